"""What a prompt says: imports with their arguments, roles, and new text. All names are looked up here."""

from typing import NamedTuple

from .outline import WORDS_OF_PML, Module, Param, Union, every, near, told
from .pml import Element, Place, Text, clipped
from .schema import Schema
from .tokens import ROLES


def prompt_schema(element: Element) -> str:
    """The name of the schema that a prompt is made from."""
    if element.name != "prompt":
        raise element.wrong(f'<{clipped(element.name)}> at the root; a prompt is <prompt schema="…">…</prompt>')
    for attribute in element.attributes:
        if attribute != "schema":
            raise element.wrong(f"unknown attribute {clipped(attribute)!r} of <prompt>; it takes schema")
    if not element.attributes.get("schema", "").strip():
        raise element.wrong('<prompt> without a schema; name one, as in <prompt schema="…">')
    return element.attributes["schema"].strip()


class New(NamedTuple):
    text: str
    at: Place


class Begins(NamedTuple):
    role: str
    at: Place


class Ends(NamedTuple):
    at: Place


class Import(NamedTuple):
    module: Module
    steps: "tuple[Step, ...]"
    at: Place


Step = New | Begins | Ends | Import


class Reading:
    """What a prompt says."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._chosen: dict[Union, Module] = {}
        self.imported: dict[Module, Place] = {}
        self.arguments: dict[Param, tuple[int, ...]] = {}

    def steps(self, element: Element, module: Module) -> "tuple[Step, ...]":
        found: list[Step] = []
        for child in element.children:
            if isinstance(child, Text):
                found.append(New(child.text, child.at))
            elif child.name in ROLES:
                if element.name != "prompt":
                    raise child.wrong(f"<{child.name}> in <{clipped(element.name)}>; in a prompt, a role stands directly in <prompt>")
                if child.attributes:
                    raise child.wrong(f"unknown attribute {clipped(next(iter(child.attributes)))!r} of <{child.name}>; it takes none")
                found += [Begins(child.name, child.at), *self.steps(child, module), Ends(child.at)]
            else:
                found.append(self._import(child, module))
        return tuple(found)

    def _import(self, element: Element, parent: Module) -> Import:
        module = parent.named.get(element.name)
        if module is None:
            raise element.wrong(self._unknown(element.name, parent))
        if module in self.imported:
            raise element.wrong(f"<{module.name}> is imported twice (first in line {self.imported[module].line}); remove one")
        union = self._schema.unions.get(module)
        if union is not None and union in self._chosen:
            raise element.wrong(f"<{module.name}> beside <{self._chosen[union].name}>, two members of one union; choose one")
        self.imported[module] = element.at
        if union is not None:
            self._chosen[union] = module
        if element.attributes or module.params:
            self._arguments(element, module)
        return Import(module, self.steps(element, module) if element.children else (), element.at)

    def _unknown(self, name: str, parent: Module) -> str:
        if name in WORDS_OF_PML:
            return f"<{name}> is not allowed in a prompt, which holds imports, roles and text; move or remove it"
        where = f"in module {parent.path!r}" if parent.path else f"in schema {self._schema.name!r}"
        for module in every(self._schema.outline.root):
            if module.name == name:
                around = module.path.split("/")[:-1]
                inside = "".join(f"<{one}>" for one in around) or "no other module"
                return f"<{clipped(name)}> is imported outside of its parent; import it inside {inside}"
        known = f"; there are {told(parent.named)}" if parent.named else "; there are none"
        return f"unknown module <{clipped(name)}> {where}{near(name, parent.named) or known}"

    def _arguments(self, element: Element, module: Module) -> None:
        for name, value in element.attributes.items():
            param = module.params.get(name)
            if param is None:
                known = near(name, module.params) or f"; it takes {told(module.params) or 'none'}"
                raise element.wrong(f"unknown argument {clipped(name)!r} of <{module.name}>{known}")
            tokens = tuple(self._schema.tokenizer.text(value)) if value else ()
            if len(tokens) > param.length:
                found = f"{len(tokens)} tokens, and {param.length} are allowed"
                raise element.wrong(f"the argument {name!r} of <{module.name}> has {found}; shorten it, or raise len in the schema")
            self.arguments[param] = tokens
        for name, param in module.params.items():
            if param in self.arguments:
                continue
            if param.default is None:
                raise element.wrong(
                    f'<{module.name}> lacks its argument {name!r}; write <{module.name} {name}="…">, or give the param a default'
                )
            self.arguments[param] = param.default
