"""What the scheduler says to the tiers below the pool, and hears from them: values."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ..kv.segment import Key, page_key
from ..kv.stem import Stem
from .tier import Card


class Part(NamedTuple):
    """A kept page, and the tier that it is read from."""

    card: Card
    tier: str


class Sought(NamedTuple):
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


class Found(NamedTuple):
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


class Offer(NamedTuple):
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
