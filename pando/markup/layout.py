"""Where everything in a schema stands, and behind what it is encoded.

One walk through the schema, in the order in which it is written, gives each text its run: as it stands when everything is imported, a union
as its default. The same walk gives each its origin. Contexts share their runs, so that a thousand modules are laid out in no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..kv.run import Origin, Run, alike
from .outline import Encode, Item, Module, Outline, Param, Union, Words
from .pml import Place
from .tokens import Tokenizer

MAX_CONTEXTS = 4_000_000  # runs in the contexts of one schema, all contexts together


class Facts(NamedTuple):
    """What a layout has to know of a model."""

    movable: bool  # its positions can move: RoPE with fixed frequencies, ALiBi
    max_len: int  # the context window


@dataclass(frozen=True, eq=False)
class Joint:
    """Modules that are also encoded together."""

    modules: tuple[Module, ...]
    runs: Mapping[Words, Run]
    tokens: int  # that this stores besides what the single modules do


@dataclass(frozen=True, eq=False)
class Laid:
    opening: Run | None  # with the tokens that every prompt starts with
    home: Mapping[Words, Run]
    starts: Mapping[Param, int]
    joints: tuple[Joint, ...]
    end: int  # of the whole schema
    contexts: int  # texts that others are encoded behind, counted for each of these


def lay(outline: Outline, tokenizer: Tokenizer, facts: Facts) -> Laid:
    walk = _Walk(outline, tokenizer, facts)
    end = walk.schema()
    joints = tuple(walk.joint(modules) for modules, _ in outline.scaffolds)
    return Laid(walk.opening, walk.home, walk.starts, joints, end, walk.contexts)


class _Own:
    """What a text of a module sees: the module's context, and the module so far."""

    def __init__(self, context: list[Run]) -> None:
        self.runs = context
        self.end = context[-1].end if context else 0

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.end = run.end


class _Walk:
    def __init__(self, outline: Outline, tokenizer: Tokenizer, facts: Facts) -> None:
        self.outline = outline
        self.facts = facts
        self.begin = tokenizer.begin
        self.alone = None if tokenizer.bos is None else Run((tokenizer.bos,), 0)
        self.opening: Run | None = None
        self.chain: list[Run] = []  # everything before, as causal texts see it
        self.home: dict[Words, Run] = {}
        self.starts: dict[Param, int] = {}
        self.order: dict[Words | Param, int] = {}
        self.contexts = 0

    def schema(self) -> int:
        first, *rest = self.outline.root.items or (None,)
        tokens = self.begin
        if isinstance(first, Words):
            tokens = first.tokens if self.begin and first.tokens[: len(self.begin)] == self.begin else self.begin + first.tokens
        elif first is not None:
            rest.insert(0, first)
        if tokens:
            self.opening = Run(tokens, 0, Origin((), 0))
            self.chain.append(self.opening)
            if isinstance(first, Words):
                self.home[first] = self.opening
            self._fits(self.opening, self.outline.at, "the opening text")
        position = len(tokens)
        for item in rest:  # a text outside any module sees what a module sees
            position = self._item(item, self.outline.root, self._own(self.outline.encode, position), position)
        return position

    def _own(self, encode: Encode, position: int) -> _Own:
        if encode == "opening":
            return _Own([] if self.opening is None else [self.opening])
        has_room = self.facts.movable or position > 0
        return _Own([self.alone] if self.alone is not None and has_room else [])

    def _module(self, module: Module, position: int) -> int:
        own = self._own(module.encode, position)
        for item in module.items:
            position = self._item(item, module, own, position)
        return position

    def _item(self, item: Item, module: Module, own: _Own, position: int) -> int:
        if isinstance(item, Words | Param):
            self.order[item] = len(self.order)
        if isinstance(item, Words):
            return self._words(item, module, own, position)
        if isinstance(item, Param):
            self.starts[item] = position
            own.add(Run(item.placeholder, self._first(own, position)))
            self.chain.append(Run(item.placeholder, position))
            self._fits(own.runs[-1], item.at, f"param {item.name!r} with the text before it")
            return position + item.length
        if isinstance(item, Module):
            return self._module(item, position)
        return self._union(item, position)

    def _union(self, union: Union, position: int) -> int:
        before, ends = len(self.chain), {}
        default: list[Run] = []
        for member in union.members:
            ends[member] = self._module(member, position)
            if member is union.default:
                default = self.chain[before:]
            del self.chain[before:]
        self.chain += default
        if self.outline.layout == "fixed":
            return max(ends.values())
        return ends[union.default] if union.default else position

    def _words(self, words: Words, module: Module, own: _Own, position: int) -> int:
        if not words.tokens:
            return position
        if not module.cached:
            run = Run(words.tokens, position)
        elif module.encode == "causal":
            run = Run(words.tokens, position, Origin(self._context(self.chain, words.at), position))
        else:
            run = self._alone(words, own, position)
        self.home[words] = run
        self.chain.append(run)
        label = f"module {module.path!r}" if module.path else "the schema's text"
        self._fits(run if run.origin is None else run.moved(run.origin.first), words.at, f"{label} with what it is encoded behind")
        if self.outline.layout == "fixed":
            self._fits(run, words.at, f"{label} at its position")
        return run.end

    def _alone(self, words: Words, own: _Own, position: int) -> Run:
        first = self._first(own, position)
        run = Run(words.tokens, position, Origin(self._context(own.runs, words.at), first))
        own.add(run if first == position else run.moved(first))
        return run

    def _first(self, own: _Own, position: int) -> int:
        """Where states are made that may move, the same text is encoded at the same place in every schema."""
        return own.end if self.facts.movable else position

    def joint(self, modules: tuple[Module, ...]) -> Joint:
        """Each module sees those before it. The first sees what it sees anyway, and is not stored again."""
        own = self._own("isolated" if self.outline.encode == "isolated" else "opening", 1 if self.opening else 0)
        runs: dict[Words, Run] = {}
        extra = 0
        items = [(item, module) for module in modules for item in module.items if isinstance(item, Words | Param)]
        for item, module in sorted(items, key=lambda one: self.order[one[0]]):  # as they are written: one may stand within another
            if isinstance(item, Param):
                own.add(Run(item.placeholder, self._first(own, self.starts[item])))
            elif item.tokens:
                runs[item] = self._joined(item, own)
                extra += 0 if runs[item] is self.home[item] else len(item.tokens)
                self._fits(own.runs[-1], item.at, f"module {module.path!r} behind the others of its scaffold")
        return Joint(modules, runs, extra)

    def _joined(self, words: Words, own: _Own) -> Run:
        home = self.home[words]
        first = self._first(own, home.position)
        assert home.origin is not None
        if home.origin.first == first and alike(home.origin.context, tuple(own.runs)):
            own.add(home if first == home.position else home.moved(first))
            return home
        return self._alone(words, own, home.position)

    def _context(self, runs: list[Run], at: Place) -> tuple[Run, ...]:
        self.contexts += len(runs)
        if self.contexts > MAX_CONTEXTS:
            advice = 'use encode="opening", or fewer modules, params and scaffolds'
            raise at.wrong(f"the texts of this schema see more than {MAX_CONTEXTS:,} other texts in total; {advice}")
        return tuple(runs)

    def _fits(self, run: Run, at: Place, what: str) -> None:
        if run.end > self.facts.max_len:
            raise at.wrong(
                f"{what} takes positions up to {run.end:,}, and the model's context has {self.facts.max_len:,}; shorten or split it"
            )
