"""What the scheduler says to the tiers below the pool, and hears from them: values, and the two things it knows of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..kv.segment import Key, page_key
from ..kv.stem import Stem
from .speeds import Speeds
from .tier import Card, Lost

if TYPE_CHECKING:
    import torch


class Part(NamedTuple):
    """A kept page, and the tier that it is read from."""

    card: Card
    tier: str


@dataclass(frozen=True)
class Sought:
    """Tokens that are looked for behind those that the tree has."""

    keys: Sequence[Key]  # of their full pages
    tokens: Sequence[int]
    before: Key  # of the page before
    owners: Sequence[Key]  # whose short ends may be used
    tenant: bytes
    limit: int  # so many of the tokens are wanted at most

    def cards(self, count: int, size: int) -> list[Card]:
        """Of the first full pages, so many."""
        tokens, before, starts = self.tokens, (self.before, *self.keys[:count]), range(0, count * size, size)
        pages = zip(self.keys, before, starts, strict=False)
        return [Card(key, parent, self.tenant, tuple(tokens[start : start + size])) for key, parent, start in pages]


Ended = Literal["slow", "expired", "lost"]


@dataclass(frozen=True)
class Found:
    """What the tiers have of a row, from where the tree ends. The last part may be a short end, of which the row has the beginning.

    Why it is no more, where that is known: slow: there is more, and it is sooner computed than loaded. expired: there was, and nobody used
    it for too long. lost: a tier did not answer.
    """

    parts: tuple[Part, ...] = ()
    tokens: int = 0
    ended: Ended | None = None

    def sizes(self, page_bytes: int) -> Mapping[str, int]:
        """Bytes that come from each tier."""
        found = dict[str, int]()
        for part in self.parts:
            found[part.tier] = found.get(part.tier, 0) + page_bytes
        return found

    def nearer(self) -> "Found":
        """Without what comes last, and from the same tier."""
        stop = len(self.parts)
        while stop and self.parts[stop - 1].tier == self.parts[-1].tier:
            stop -= 1
        return Found(self.parts[:stop], sum(len(part.card.tokens) for part in self.parts[:stop]), "slow")


@dataclass(frozen=True)
class Offer:
    """Pages that the tree has taken, to be kept below. `chain` leads to the last of them, from the first of its context on."""

    stem: Stem  # pinned until they are copied
    chain: tuple[Key, ...]
    pages: tuple[tuple[Card, int], ...]

    @property
    def cards(self) -> list[Card]:
        return [card for card, _ in self.pages]


def end_parent(before: Key, owner: Key) -> Key:
    """What the short ends behind a page are found by: those of one owner alone."""
    return page_key(before + owner, ())


def end_card(parent: Key, tenant: bytes, tokens: Sequence[int]) -> Card:
    return Card(page_key(parent, tokens), parent, tenant, tuple(tokens))


class Loading(Protocol):
    """Pages on their way into the pool."""

    @property
    def done(self) -> bool: ...

    @property
    def lost(self) -> Lost | None:
        """Why some will not come."""
        ...

    @property
    def good(self) -> Sequence[Part]:
        """Those that came, from the first on; known when it is done."""
        ...

    def wait(self, layer: int) -> "torch.cuda.Event | None":
        """Until a layer of all pages is there, or will be with the event; raises Lost."""
        ...

    @property
    def late(self) -> bool:
        """Was it given up, although it is not done?"""
        ...

    def left(self, layers: int) -> float:
        """Seconds until the last of so many layers is there, as far as anyone can tell."""
        ...

    def ends_within(self, seconds: float) -> bool:
        """Waits until it is done, for so long at most; says whether it is."""
        ...

    def finish(self) -> bool:
        """Waits until it is done, or until it is late; says which."""
        ...

    def hurry(self, seconds: float) -> None:
        """It is late after so many seconds at most."""
        ...

    def abandon(self) -> None:
        """Breaks it off. Its pages may be used for something else when it is done."""
        ...


class Departing(Protocol):
    """Pages that leave the pool while the step that fills them computes."""

    @property
    def pages(self) -> Mapping[Key, int]:
        """Where they are in the pool."""
        ...

    def computed(self, layers: int) -> None:
        """So many layers of all of them are computed, or asked of the device."""
        ...


class Noting(Protocol):
    """What is remembered beside the pages on disk, and outlives the process."""

    def find(self, keys: Sequence[Key]) -> Mapping[Key, bytes]:
        """What there is under some of these keys. It may be anything: whoever wrote it can tell."""
        ...

    def keep(self, key: Key, tenant: Key, note: bytes) -> None:
        """`tenant`: the root of what it has, or its tag."""
        ...


class Asking(Protocol):
    """What others keep on a remote, asked while a row waits."""

    answers: int  # that have come until now

    def awaits(self, sought: Sought) -> bool:
        """Asks what there is, unless that is known; says whether there is no answer yet."""
        ...

    def listen(self, seconds: float) -> None:
        """Until an answer comes, if one is awaited, and for so long at most."""
        ...


class Keeper(Protocol):
    """The tiers below the pool, as the engine's thread sees them: nothing here waits but `settle`, `forget_pool` and `close`; `look`, for
    a remote of which the `scout` did not ask before; and `go`, for a moment."""

    buffer: int  # pages that are offered together, at most
    rounds: bool  # what comes up is not quite what was kept
    speeds: Speeds

    @property
    def scout(self) -> Asking | None:
        """Who asks a remote, if there is one."""
        ...

    @property
    def notes(self) -> Noting | None:
        """Where something can be remembered that outlives the process, if there is a disk."""
        ...

    def look(self, sought: Sought, *, counts: bool = True) -> Found: ...
    def needs(self, keys: Sequence[Key], tokens: Sequence[int], before: Key, owners: Sequence[Key]) -> list[Key]: ...
    def load(self, found: Found, chain: Sequence[Key], pages: Sequence[int]) -> Loading: ...
    def go(self) -> None: ...
    def left(self, load: Loading) -> float:
        """Seconds until the last layer of it is there, as far as anyone can tell."""
        ...

    def tag(self, tenant: Key) -> bytes: ...
    def wanted(self, key: Key) -> bool: ...
    @property
    def spare(self) -> int: ...
    def depart(self, pages: Iterable[tuple[Card, int]]) -> Departing: ...
    def dismiss(self, departure: Departing) -> None: ...
    def offer(self, offer: Offer) -> None: ...
    def pump(self) -> list[Stem]: ...
    def settle(self) -> list[Stem]: ...
    def relent(self) -> list[Stem]: ...
    def forget_pool(self) -> None: ...
    def join(self, place: int, keys: Sequence[Key]) -> None: ...
    def leave(self, place: int) -> None: ...
    def discard(self, keys: Sequence[Key]) -> None: ...
    def close(self) -> list[Stem]: ...
