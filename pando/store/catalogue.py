"""Where pages are to be found below the pool: by the ledger, and where that knows nothing, by the tiers themselves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from ..kv.segment import Key, page_key, shared_length
from .keeper import Part, end_parent
from .ledger import Ledger
from .tier import Tier


class Catalogue:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._hidden: Counter[Key] = Counter()  # not to be found any more, and still to be removed from so many tiers

    def tiers(self, keys: Sequence[Key], below: Sequence[Tier]) -> Iterator[str]:
        """The uppermost tier of each page, as far as they follow each other."""
        place = 0
        while place < len(keys):
            names = self._ledger.find(keys[place:])
            if not names:  # what others wrote to a tier is known to that tier alone
                there = list(takewhile(lambda key: key not in self._hidden, keys[place:]))
                names = next(([tier.name] * count for tier in below if (count := tier.look(there))), [])
            if not names:
                return
            yield from names
            place += len(names)

    def end(self, tiers: Sequence[Tier], before: Key, owners: Sequence[Key], rest: Sequence[int]) -> tuple[Part | None, int]:
        """The short end behind a page that has most in common with the rest of a row's tokens; and how many."""
        best, found = 0, None
        for parent in {end_parent(before, owner) for owner in owners} if rest else ():
            for tier in tiers:
                for card in tier.ends(parent):
                    shared = shared_length(card.tokens, rest)
                    if shared > best and card.key not in self._hidden and page_key(card.parent, card.tokens) == card.key:
                        best, found = shared, Part(card, tier.name)
        return found, best

    def hide(self, keys: Sequence[Key]) -> None:
        """They are about to be removed from a tier."""
        self._hidden.update(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """They were."""
        for key in keys:
            self._hidden[key] -= 1
            if not self._hidden[key]:
                del self._hidden[key]
