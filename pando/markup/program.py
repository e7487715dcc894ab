"""A Python function as PML: the function is a schema, and a call of it is a prompt."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args, overload
from xml.sax.saxutils import escape, quoteattr

from ..errors import InvalidPrompt
from .compiler import Call, Choice, Compiled, Compiler, Len, Node, Slot, unwritable
from .expressions import Values
from .outline import Encode, Layout

__all__ = ["Len", "Program", "Prompt", "program"]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the schema that it is made from, both PML."""

    schema: str
    pml: str

    def then(self, text: str) -> "Prompt":
        """The same, with new text at the end."""
        if bad := unwritable(text):
            raise InvalidPrompt(f"the text after a prompt has {bad}")
        return replace(self, pml=self.pml.removesuffix("</prompt>") + _escaped(text) + "</prompt>")


class Program:
    """A decorated function. `pml` is its schema."""

    def __init__(self, function: Callable[..., object], encode: Encode | None, layout: Layout | None) -> None:
        compiler = Compiler(function)
        self.compiled = compiler.compiled()
        self._wrong = compiler.wrong
        self._root = compiler.body(in_module=False)
        facts = ""
        for name, value, choices in (("encode", encode, get_args(Encode)), ("layout", layout, get_args(Layout))):
            if value is not None and value not in choices:
                raise self._wrong(f"{name} is {value!r}; it is one of {', '.join(choices)}")
            facts += "" if value is None else f" {name}={quoteattr(value)}"
        self.pml = f'<schema name="{self.name}"{facts} xml:space="preserve">{_schema(self.compiled, self._root)}</schema>'

    @property
    def name(self) -> str:
        return self.compiled.name

    def __call__(self, *args: object, **arguments: object) -> Prompt:
        try:
            given = self.compiled.signature.bind(*args, **arguments)
        except TypeError as error:
            raise self._wrong(f"{self.name}(): {error}; give it what its signature says") from None
        given.apply_defaults()
        for name, value in given.arguments.items():
            if bad := unwritable(str(value)):
                raise self._wrong(f"the argument {name!r} of {self.name}() has {bad}")
        return Prompt(self.pml, f'<prompt schema="{self.name}" xml:space="preserve">{_imports(self._root, given.arguments)}</prompt>')


def _schema(of: Compiled, nodes: Sequence[Node]) -> str:
    found = []
    for node in nodes:
        if isinstance(node, str):
            found.append(_escaped(node))
        elif isinstance(node, Slot):
            default = of.signature.parameters[node.argument].default
            shown = "" if default is inspect.Parameter.empty else f" default={_quoted(default)}"
            found.append(f'<param name="{node.name}" len="{of.params[node.argument]}"{shown}/>')
        elif isinstance(node, Call):
            found.append(f'<module name="{node.name}">{_schema(node.callee, node.callee.nodes)}</module>')
        else:
            arms = "".join(f'<module name="{module.name}">{_schema(of, module.nodes)}</module>' for _, module in node.arms)
            found.append(f"<union>{arms}</union>" if node.union else arms)
    return "".join(found)


def _imports(nodes: Sequence[Node], values: Values) -> str:
    found = []
    for node in nodes:
        if isinstance(node, Call):
            found.append(_element(node.name, node.callee.nodes, node.values(values)))
        elif isinstance(node, Choice):
            module = next((module for test, module in node.arms if test(values)), None)
            found.append("" if module is None else _element(module.name, module.nodes, values))
    return "".join(found)


def _element(name: str, nodes: Sequence[Node], values: Values) -> str:
    given = "".join(f" {node.name}={_quoted(values[node.argument])}" for node in nodes if isinstance(node, Slot))
    return f"<{name}{given}>{_imports(nodes, values)}</{name}>"


@overload
def program(function: Callable[..., object]) -> Program: ...
@overload
def program(*, encode: Encode | None = None, layout: Layout | None = None) -> Callable[[Callable[..., object]], Program]: ...
def program(
    function: Callable[..., object] | None = None, *, encode: Encode | None = None, layout: Layout | None = None
) -> Program | Callable[[Callable[..., object]], Program]:
    """Makes a program of a function, as a decorator."""
    if function is None:
        return lambda decorated: Program(decorated, encode, layout)
    return Program(function, encode, layout)


def _escaped(text: str) -> str:
    return escape(text, {"\r": "&#13;"})


def _quoted(value: object) -> str:
    return quoteattr(str(value))
