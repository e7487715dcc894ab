"""The source of a function to the nodes of a schema. The source is read, never run.

Text is text; what is in braces is a param; a condition is a module or a union; a call of another program is a nested module. Conditions are
worked out at each call, so they are made of arguments, constants and comparisons, and nothing else.
"""

import ast
import inspect
import linecache
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ..errors import MarkupError
from .expressions import Values, evaluated, is_constant, unplain
from .outline import NAME, WORDS_OF_PML
from .pml import Source, undented

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HOLE = "\1"  # where an argument stands: no text has it


def unwritable(text: str) -> str | None:
    """What is wrong with a text that PML cannot hold."""
    bad = _NOT_XML.search(text)
    return f"the character U+{ord(bad[0]):04X}, which PML cannot hold; remove it" if bad else None


@dataclass(frozen=True)
class Len:
    """The most tokens of an argument: `x: Annotated[str, Len(10)]`."""

    tokens: int


@dataclass(frozen=True)
class Slot:
    name: str  # of the param
    argument: str


@dataclass(frozen=True)
class Module:
    name: str
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True)
class Choice:
    """The first arm whose test holds; or none."""

    arms: tuple[tuple[Callable[[Values], object], Module], ...]
    union: bool


@dataclass(frozen=True)
class Compiled:
    """A function, as other functions call it."""

    name: str
    signature: inspect.Signature
    params: Mapping[str, int]  # the arguments that are params, and how long they may be
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True)
class Call:
    name: str
    callee: Compiled
    values: Callable[[Values], Values]


Node = str | Slot | Choice | Call


class _Names:
    """Names in one scope, each once."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # each with the number of the last one like it

    def new(self, wish: str, otherwise: str) -> str:
        """The name that was wished for, where that is one, or one like it."""
        name = stem = wish if NAME.fullmatch(wish) and wish not in WORDS_OF_PML else otherwise
        number = self._used.get(stem, 1)
        while name in self._used:
            number += 1
            name = f"{stem.removesuffix('.1')}.{number}"
        self._used[name], self._used[stem] = 1, number
        return name


def _names_of(function: FunctionType) -> dict[str, object]:
    """What the names in a function mean that are not its own."""
    code, outer = function.__code__, function.__globals__
    found = {name: outer[name] for name in code.co_names if name in outer}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet: the function itself, or one that is written behind it
            found[name] = cell.cell_contents
    return found


class Compiler:
    def __init__(self, function: Callable[..., object]) -> None:
        if not inspect.isfunction(function):
            raise MarkupError(f"{type(function).__name__} is not a function; decorate one that is written with def", "python", 1, 1)
        self._function = function
        code = self._function.__code__
        self._file, self._line = code.co_filename, code.co_firstlineno
        self._source = Source(self._file, "".join(linecache.getlines(self._file)))
        self._node = self._definition()
        self._known = _names_of(self._function)
        if not NAME.fullmatch(self._node.name) or self._node.name in WORDS_OF_PML:
            raise self.wrong(f"a schema cannot be named {self._node.name!r}; rename the function")
        self._signature = inspect.signature(self._function)
        self._arguments = set(self._signature.parameters)
        self.params = self._annotated()

    def wrong(self, message: str, node: ast.AST | None = None) -> MarkupError:
        line = getattr(node, "lineno", self._line)
        before = linecache.getline(self._file, line).encode()[: getattr(node, "col_offset", 0)]  # which Python counts in bytes
        return self._source.wrong(message, line, len(before.decode(errors="ignore")) + 1)

    def _definition(self) -> ast.FunctionDef:
        if self._source.text:
            for node in ast.walk(ast.parse(self._source.text)):
                if isinstance(node, ast.FunctionDef) and node.name == self._function.__name__:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    if first == self._line:
                        return node
        raise self.wrong("the source of this function cannot be found; write it, with def, in a file")

    def _annotated(self) -> dict[str, int]:
        try:
            hints = typing.get_type_hints(self._function, include_extras=True)
        except Exception as error:  # whatever working out one that is written in quotes raises
            raise self.wrong(f"the annotations cannot be read: {error}; write them with names that are known here") from None
        lengths = {name: [fact for fact in getattr(hint, "__metadata__", ()) if isinstance(fact, Len)] for name, hint in hints.items()}
        found = {name: some[0].tokens for name, some in lengths.items() if some and name != "return"}
        for name, tokens in found.items():
            if type(tokens) is not int or tokens < 1:
                raise self.wrong(f"the length of {name!r} is {tokens!r}; it is a number of tokens, from 1 on")
        return found

    def compiled(self) -> Compiled:
        return Compiled(self._node.name, self._signature, self.params, self.body(in_module=True))

    def body(self, in_module: bool) -> tuple[Node, ...]:
        """Directly in a schema there are no params, so that a text with params is there a module of its own, which every prompt imports."""
        return self._block(self._node.body, {}, _Names(), _Names() if in_module else None)

    def _block(self, body: Sequence[ast.stmt], constants: Values, modules: _Names, slots: _Names | None) -> tuple[Node, ...]:
        found: list[Node] = []
        for statement in body:
            found += self._statement(statement, constants, modules, slots)
        return tuple(found)

    def _statement(self, node: ast.stmt, constants: Values, modules: _Names, slots: _Names | None) -> Iterator[Node]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            found = tuple(self._text(node.value, constants, slots or _Names()))
            if slots is None and any(isinstance(one, Slot) for one in found):
                yield Choice(((lambda _: True, Module(modules.new("text.1", "text"), found)),), union=False)
            else:
                yield from found
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._call(node.value, constants, modules)
        elif isinstance(node, ast.If):
            yield from self._if(node, constants, modules, slots)
        elif isinstance(node, ast.Match):
            yield self._match(node, constants, modules)
        elif isinstance(node, ast.For) and not node.orelse:
            for value in self._values(node, constants):
                assert isinstance(node.target, ast.Name)
                yield from self._block(node.body, {**constants, node.target.id: value}, modules, slots)
        elif not isinstance(node, ast.Pass):
            what = "a string, if, match, a loop over constants, or a call of another program"
            raise self.wrong(f"{type(node).__name__} cannot be compiled; a program is made of {what}", node)

    def _text(self, node: ast.Constant | ast.JoinedStr, constants: Values, slots: _Names) -> Iterator[Node]:
        parts: list[str | Slot] = []
        for value in node.values if isinstance(node, ast.JoinedStr) else [node]:
            part = self._braces(value, constants, slots) if isinstance(value, ast.FormattedValue) else self._string(value)
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        line = linecache.getline(self._file, node.lineno).encode()[node.col_offset :]
        if re.match(rb"[rRfFuU]*(\"\"\"|''')", line):  # as a whole: a line may begin or end in braces
            texts = undented("".join(part if isinstance(part, str) else HOLE for part in parts)).split(HOLE)
            held, parts = [part for part in parts if isinstance(part, Slot)], [texts[0]]
            for slot, text in zip(held, texts[1:], strict=True):
                parts += (slot, text)
        yield from (part for part in parts if part != "")

    def _string(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            raise self.wrong("a value that is not a string; write text in quotes", node)
        if bad := unwritable(node.value):
            raise self.wrong(bad, node)
        return node.value

    def _braces(self, node: ast.FormattedValue, constants: Values, slots: _Names) -> str | Slot:
        if node.conversion != -1 or node.format_spec is not None:
            raise self.wrong("a conversion or format in braces; braces hold only a name", node)
        inner = node.value
        if isinstance(inner, ast.Name) and inner.id not in constants and inner.id in self._arguments:
            if inner.id not in self.params:
                raise self.wrong(f"{inner.id!r} has no length; annotate it: {inner.id}: Annotated[str, Len(10)]", node)
            return Slot(slots.new(inner.id, "argument"), inner.id)
        text = str(self._constant(inner, constants))
        if bad := unwritable(text):
            raise self.wrong(bad, node)
        return text

    def _constant(self, node: ast.expr, constants: Values) -> object:
        known = self._constants(constants)
        if why := unplain(node, known):
            raise self.wrong(f"{why[:60]!r} is neither an argument nor a constant; only these can be compiled", node)
        return self._worked(node, known)

    def _constants(self, loops: Values) -> Values:
        """The names that mean the same in every call."""
        outer = {name: value for name, value in self._known.items() if name not in self._arguments and is_constant(value)}
        return {**outer, **loops}

    def _test(self, node: ast.expr, constants: Values) -> Callable[[Values], object]:
        known = self._constants(constants)
        if why := unplain(node, {*self._arguments, *known}):
            raise self.wrong(f"{why[:60]!r} cannot be compiled; use arguments, constants, comparisons, and, or, not", node)

        return lambda values: self._worked(node, {**known, **values, **constants})

    def _worked(self, node: ast.expr, values: Values) -> Any:
        try:
            return evaluated(node, values)
        except Exception as error:  # whatever comparing two of the caller's values raises
            shown = ast.unparse(node)[:60]
            raise self.wrong(f"{shown!r} cannot be worked out: {error}; give it values that can be compared", node) from error

    def _if(self, node: ast.If, constants: Values, modules: _Names, slots: _Names | None) -> Iterator[Node]:
        if unplain(node.test, constants) is None:  # the same in every prompt: a condition on the variable of a loop
            yield from self._block(node.body if self._worked(node.test, constants) else node.orelse, constants, modules, slots)
            return
        arms: list[tuple[Callable[[Values], object], Module]] = []
        rest: list[ast.stmt] = [node]
        first = ""
        while len(rest) == 1 and isinstance(arm := rest[0], ast.If):
            wish = arm.test.id if isinstance(arm.test, ast.Name) else "if"
            arms.append((self._test(arm.test, constants), self._arm(modules.new(wish, "if"), arm.body, constants)))
            first = first or arms[0][1].name
            rest = arm.orelse
        if rest:
            arms.append((lambda _: True, self._arm(modules.new(f"{first}.else", "else"), rest, constants)))
        yield Choice(tuple(arms), union=len(arms) > 1)

    def _arm(self, name: str, body: Sequence[ast.stmt], constants: Values) -> Module:
        return Module(name, self._block(body, constants, _Names(), _Names()))

    def _match(self, node: ast.Match, constants: Values, modules: _Names) -> Choice:
        arms = []
        for case in node.cases:
            if case.guard is not None:
                raise self.wrong("a case with a guard cannot be compiled; use if", case.guard)
            values = self._patterns(case.pattern)
            subject = self._test(node.subject, constants)
            wish = "other" if values is None else str(values[0])
            module = self._arm(modules.new(wish, "case"), case.body, constants)
            arms.append((self._matches(subject, values), module))
        return Choice(tuple(arms), union=True)

    def _matches(self, subject: Callable[[Values], object], patterns: list[object] | None) -> Callable[[Values], object]:
        """As Python does: True, False and None are themselves alone, and other constants whatever equals them."""

        def matches(value: object) -> bool:
            return any(value is one if one is None or isinstance(one, bool) else value == one for one in patterns or ())

        return lambda values: patterns is None or matches(subject(values))

    def _patterns(self, pattern: ast.pattern) -> list[object] | None:
        """The values that a case is for; None: any."""
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
            return None
        if isinstance(pattern, ast.MatchValue):
            match pattern.value:
                case ast.Constant(value):
                    return [value]
                case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
                    return [-value]
        if isinstance(pattern, ast.MatchSingleton):
            return [pattern.value]
        if isinstance(pattern, ast.MatchOr):
            found = [self._patterns(one) for one in pattern.patterns]
            return None if None in found else [value for one in found if one is not None for value in one]
        raise self.wrong('a case that is not a constant cannot be compiled; write case "a", case "a" | "b", or case _', pattern)

    def _values(self, node: ast.For, constants: Values) -> Sequence[Any]:
        if not isinstance(node.target, ast.Name):
            raise self.wrong("a loop over more than one variable; use one", node.target)
        if node.target.id in self._arguments or node.target.id in constants:
            raise self.wrong(f"the variable of a loop is {node.target.id!r}, which has a meaning already; rename it", node.target)
        found = self._constant(node.iter, constants)
        if not isinstance(found, str | tuple | list | range):
            raise self.wrong(f"a loop over {type(found).__name__}; it goes over a list, a tuple or a range of constants", node.iter)
        if len(found) > 10_000:
            raise self.wrong(f"a loop of {len(found):,} rounds; at most 10,000 are unrolled", node.iter)
        return found

    def _call(self, node: ast.Call, constants: Values, modules: _Names) -> Call:
        found = self._known.get(node.func.id) if isinstance(node.func, ast.Name) else None
        callee = getattr(found, "compiled", None)
        if not isinstance(callee, Compiled):
            raise self.wrong(
                f"{ast.unparse(node.func)[:60]!r} is not a known program; call only functions that were decorated before", node
            )
        if any(isinstance(one, ast.Starred) for one in node.args) or any(key.arg is None for key in node.keywords):
            raise self.wrong("* and ** cannot be compiled; write the arguments", node)
        plain = [self._test(one, constants) for one in node.args]
        by_name = {key.arg: self._test(key.value, constants) for key in node.keywords if key.arg is not None}
        try:
            callee.signature.bind(*plain, **by_name)
        except TypeError as error:
            raise self.wrong(f"{callee.name}(): {error}", node) from None

        def values(outer: Values) -> Values:
            given = callee.signature.bind(*(one(outer) for one in plain), **{name: one(outer) for name, one in by_name.items()})
            given.apply_defaults()
            return given.arguments

        return Call(modules.new(callee.name, callee.name), callee, values)
