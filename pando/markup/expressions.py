"""The few expressions that a program may hold, worked out without running any code of the caller's."""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

Values = Mapping[str, object]

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CONSTANTS = (str, int, float, type(None))  # bool is an int


def is_constant(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(is_constant, value))
    return isinstance(value, (*_CONSTANTS, range))


def unplain(node: ast.expr, names: Collection[str]) -> str | None:
    """What in an expression can not be worked out, as it is written; None if all can."""
    if isinstance(node, ast.Constant) and isinstance(node.value, _CONSTANTS):
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return None
    if isinstance(node, ast.BoolOp | ast.Compare | ast.UnaryOp | ast.Tuple | ast.List | ast.JoinedStr):
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not | ast.USub):
            return ast.unparse(node)
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return next((found for child in inner if (found := unplain(child, names)) is not None), None)
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return unplain(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and not node.keywords:
        return next((found for child in node.args if (found := unplain(child, names)) is not None), None)
    return ast.unparse(node)


def evaluated(node: ast.expr, values: Values) -> Any:
    """The value of an expression that is plain."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BoolOp):
        return _bool(node, values)
    if isinstance(node, ast.Compare):
        return _compare(node, values)
    if isinstance(node, ast.UnaryOp):
        value = evaluated(node.operand, values)
        return not value if isinstance(node.op, ast.Not) else -value
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(evaluated(one, values) for one in node.elts)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(evaluated(one, values)) for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return evaluated(node.value, values)
    assert isinstance(node, ast.Call), "asked of an expression that is not plain"
    return range(*(evaluated(one, values) for one in node.args))


def _bool(node: ast.BoolOp, values: Values) -> Any:
    value: Any = None
    for one in node.values:
        value = evaluated(one, values)
        if bool(value) == isinstance(node.op, ast.Or):
            return value
    return value


def _compare(node: ast.Compare, values: Values) -> Any:
    left = evaluated(node.left, values)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = evaluated(other, values)
        if not (result := _COMPARE[type(op)](left, right)):
            return result
        left = right
    return True
