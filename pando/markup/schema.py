"""A schema, ready for prompts: what it says, where that stands, and what can be stored of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..kv.run import Run
from .layout import Facts, Laid, lay
from .outline import Encode, Layout, Module, Order, Outline, Union, Words, every
from .pml import DEFAULT_LIMITS, Element, Limits, parse
from .reader import Reader
from .tokens import Roles, Tokenizer

OPENING = "(opening)"
ANONYMOUS = "(schema)"


@dataclass(frozen=True)
class Part:
    """One module, as a table shows it. The opening and other texts outside of modules have a name in parentheses."""

    path: str
    encode: Encode
    cached: bool
    tokens: int  # of its own text, without what is nested in it
    runs: tuple[Run, ...]  # what can be stored of it


@dataclass(frozen=True)
class Scaffold:
    paths: tuple[str, ...]
    tokens: int  # stored besides those of the single modules
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Schema:
    outline: Outline
    laid: Laid
    facts: Facts
    tokenizer: Tokenizer
    roles: Roles

    @property
    def name(self) -> str:
        return self.outline.name

    @property
    def layout(self) -> Layout:
        return self.outline.layout

    @property
    def encode(self) -> Encode:
        return self.outline.encode

    @property
    def order(self) -> Order:
        return self.outline.order

    @property
    def digest(self) -> bytes:
        """Names the content. Comments are no content."""
        return self.outline.digest

    @property
    def held(self) -> int:
        """Bytes that it takes beside what it says: few words can have many contexts, and long placeholders."""
        placeholders = {id(param.placeholder): len(param.placeholder) for param in self.laid.starts}
        return 8 * (self.laid.contexts + sum(placeholders.values()))

    @cached_property
    def modules(self) -> tuple[Part, ...]:
        """The opening, then the texts outside of modules and the modules, in the order in which they are written."""
        root, home = self.outline.root, self.laid.home
        found = [] if self.laid.opening is None else [Part(OPENING, self.encode, True, len(self.laid.opening), (self.laid.opening,))]
        for item in root.items:
            if isinstance(item, Words) and item in home and home[item] is not self.laid.opening:
                found.append(Part(ANONYMOUS, self.encode, True, len(item.tokens), (home[item],)))
        return (*found, *(self._part(module) for module in every(root)))

    def _part(self, module: Module) -> Part:
        runs = [self.laid.home[item] for item in module.items if isinstance(item, Words) and item in self.laid.home]
        return Part(
            module.path or ANONYMOUS,
            module.encode,
            module.cached,
            sum(map(len, runs)),
            tuple(run for run in runs if run.origin is not None),
        )

    @cached_property
    def scaffolds(self) -> tuple[Scaffold, ...]:
        home = set(self.laid.home.values())
        return tuple(
            Scaffold(
                tuple(module.path for module in joint.modules), joint.tokens, tuple(run for run in joint.runs.values() if run not in home)
            )
            for joint in self.laid.joints
        )

    @cached_property
    def stored(self) -> tuple[Run, ...]:
        """Every run that can be stored. What stands in a context comes before what is encoded behind it."""
        own = [run for run in self.laid.home.values() if run.origin is not None and run is not self.laid.opening]
        opening = [] if self.laid.opening is None else [self.laid.opening]
        return (*opening, *own, *(run for scaffold in self.scaffolds for run in scaffold.runs))

    @cached_property
    def unions(self) -> Mapping[Module, Union]:
        """The union that a module is a member of."""
        modules = (self.outline.root, *every(self.outline.root))
        found = [item for module in modules for item in module.items if isinstance(item, Union)]
        return {member: union for union in found for member in union.members}

    @cached_property
    def places(self) -> Mapping[Module, int]:
        """Which item of the module around it a module stands in."""
        found = {}
        for module in (self.outline.root, *every(self.outline.root)):
            for place, item in enumerate(module.items):
                found.update(dict.fromkeys((item,) if isinstance(item, Module) else item.members if isinstance(item, Union) else (), place))
        return found


def read_schema(
    pml: str | bytes | Element,
    tokenizer: Tokenizer,
    *,
    movable: bool,
    max_len: int,
    directory: Path | None = None,
    file: str = "schema",
    limits: Limits = DEFAULT_LIMITS,
) -> Schema:
    """`movable`: the model's positions can move. `directory`: `src` is read below it, and nowhere else. `file` names it in errors."""
    element = pml if isinstance(pml, Element) else parse(pml, file, limits)
    facts = Facts(movable, max_len)
    outline = Reader(tokenizer, movable, max_len, directory, limits).outline(element)
    return Schema(outline, lay(outline, tokenizer, facts), facts, tokenizer, Roles(tokenizer))
