"""What a prompt is made of: runs of tokens, each at its place.

Some runs bring an origin: they were, or will be, encoded elsewhere, behind a context of their own, and their states are reused wherever
they stand. The others are new and are computed where they stand, behind everything that stands before them. So a prefix hit, a module, an
argument and the words of a user are all runs, and a context is a list of them, too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .segment import Key, Lineage, extend_keys, packed, page_key

KNOWN = 4  # contexts that the keys of a run are remembered for: there is one for each tenant; and other places where it stood


@dataclass(frozen=True, eq=False)
class Origin:
    """How the states of a run are made: behind which runs, and at which position. What is left of a longer run, whose beginning is not
    wanted here, brings that beginning's tokens: whole pages."""

    context: tuple["Run", ...]
    first: int
    before: tuple[int, ...] = ()  # these are computed right behind the context, and the run right behind them

    @property
    def start(self) -> int:
        """The position right behind the context."""
        return self.first - len(self.before)

    def key(self, root: Key) -> Key:
        """The root of whatever is computed so. Behind nothing, from the start, it is the tenant's own."""
        if not self.context and not self.start:
            return root
        return hashlib.sha256(b"context" + root + self.digest + self.start.to_bytes(8, "little")).digest()

    @cached_property
    def digest(self) -> bytes:
        """Names the context. It is asked for by whatever stands behind it: by a thousand modules, a thousand times."""
        return context_digest(self.context)

    @cached_property
    def placed_digest(self) -> bytes:
        """The same, of the context as a prompt that it is the beginning of would have it."""
        return context_digest(in_place(self.context))


@dataclass(eq=False, slots=True)
class _Known:
    """What was found out about a run, wherever it stands: a module is asked for again and again."""

    keys: dict[tuple[Lineage, int], tuple[Key, ...]] = field(default_factory=dict)
    vocabulary: int | None = None  # whose tokens it is made of
    tokens: bytes | None = None  # their digest
    packed: bytes | None = None  # and they themselves
    moved: dict[int, "Run"] = field(default_factory=dict)  # by position


@dataclass(frozen=True, eq=False)
class Run:
    tokens: tuple[int, ...]
    position: int  # of its first token, in the prompt or context that it stands in
    origin: Origin | None = None  # None: it is computed where it stands
    _known: _Known = field(default_factory=_Known, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    @property
    def shift(self) -> int:
        """How far it stands behind where it was encoded."""
        return 0 if self.origin is None else self.position - self.origin.first

    @property
    def is_plain(self) -> bool:
        """The beginning of a prompt, as any other."""
        return self.position == 0 and (self.origin is None or not (self.origin.context or self.origin.first))

    def moved(self, position: int) -> "Run":
        """Whoever asks again gets the same one, which knows its digest."""
        known = self._known.moved
        found = known.get(position)
        if found is None:
            if len(known) >= KNOWN:
                known.clear()
            found = known[position] = Run(self.tokens, position, self.origin, self._known)
        return found

    def part(self, start: int, stop: int) -> "Run":
        """Some of it, where it stands, with the states that it has as a part of the whole."""
        origin = self.origin
        if origin is not None and start:
            origin = Origin(origin.context, origin.first + start, (*origin.before, *self.tokens[:start]))
        return Run(self.tokens[start:stop], self.position + start, origin)

    @property
    def packed(self) -> bytes:
        """Its tokens as int32."""
        if self._known.packed is None:
            self._known.packed = packed(self.tokens)
        return self._known.packed

    @cached_property
    def digest(self) -> bytes:
        """Names the tokens, where they stand, and where they come from."""
        made = b"" if self.origin is None else self.origin.digest + self.origin.first.to_bytes(8, "little")
        left = () if self.origin is None else self.origin.before
        facts = (made, packed(left), self.packed, self.position.to_bytes(8, "little"))
        return hashlib.sha256(b"".join(len(fact).to_bytes(8, "little") + fact for fact in facts)).digest()

    @property
    def tokens_digest(self) -> bytes:
        """Names the tokens alone, wherever they stand."""
        if self._known.tokens is None:
            self._known.tokens = page_key(b"", self.tokens)
        return self._known.tokens

    def keys(self, context: Lineage, page_size: int) -> tuple[Key, ...]:
        """Of the full pages of what it is made from, in a context."""
        known = self._known.keys
        found = known.get((context, page_size))
        if found is None:
            keys, before = list[Key](), () if self.origin is None else self.origin.before
            extend_keys(keys, context, (*before, *self.tokens), page_size)
            if len(known) >= KNOWN:
                known.clear()
            found = known[context, page_size] = tuple(keys)
        return found

    def is_of(self, vocabulary: int) -> bool:
        """Is it made of the tokens of a vocabulary of so many?"""
        if self._known.vocabulary != vocabulary and are_tokens(self.tokens, vocabulary):
            self._known.vocabulary = vocabulary
        return self._known.vocabulary == vocabulary


def are_tokens(numbers: Sequence[int], vocabulary: int) -> bool:
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < vocabulary)


def in_place(runs: Sequence[Run]) -> list[Run]:
    """Runs, all of them with an origin: what is computed where it stands has everything before it for a context."""
    found, context, named = list[Run](), hashlib.sha256(), 0
    for run in runs:
        if run.origin is None:
            for before in found[named:]:
                context.update(before.digest)
            named, origin = len(found), Origin(tuple(found), run.position)
            for name in ("digest", "placed_digest"):  # of a thousand such contexts, each would name all runs before it
                object.__setattr__(origin, name, context.digest())
            run = Run(run.tokens, run.position, origin)
        found.append(run)
    return found


def alike(some: tuple[Run, ...], others: tuple[Run, ...]) -> bool:
    """Are they the same runs at the same places? Contexts share theirs, so that tokens are seldom looked at."""
    if some == others:
        return True
    return len(some) == len(others) and all(one is other or one.digest == other.digest for one, other in zip(some, others, strict=True))


def context_digest(runs: Sequence[Run]) -> bytes:
    return hashlib.sha256(b"".join(run.digest for run in runs)).digest()
