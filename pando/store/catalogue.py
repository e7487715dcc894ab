"""Where pages are to be found below the pool: by the ledger, and where that knows nothing, by the tiers themselves."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ..kv.latest import Latest
from ..kv.segment import Key, page_key, shared_length, worth_having
from .facts import Counts
from .ledger import Ledger
from .sought import Found, Part, Sought, end_parent
from .tier import Lost, Tier

REMEMBERED = 2**16  # keys of pages that expired: to tell them from what was never there


class Catalogue:
    def __init__(self, ledger: Ledger, counts: Counts, page_size: int) -> None:
        self._ledger, self._counts, self._page_size = ledger, counts, page_size
        self._hidden: Counter[Key] = Counter()  # not to be found any more, and still to be removed from so many tiers
        self._expired = Latest[Key, None](REMEMBERED)

    def shown(self, keys: Iterable[Key]) -> set[Key]:
        """But for those that are to be removed."""
        return {key for key in keys if key not in self._hidden}

    def find(self, sought: Sought, host: Tier, below: Sequence[Tier]) -> Found:
        """What there is, whether it is worth loading or not."""
        size, limit, keys, silent = self._page_size, sought.limit, sought.keys, set[str]()
        tiers = self._tiers(keys[: -(-limit // size)], below, silent)
        parts = [Part(card, tier) for card, tier in zip(sought.cards(len(tiers), size), tiers, strict=False)]
        whole, count, before = len(parts), len(parts) * size, parts[-1].card.key if parts else sought.before
        if count < limit:
            rest = sought.tokens[count : min(limit, count + size)]
            end, shared = self.end((host, *below), before, sought.owners, rest, silent)
            parts += [end] if end is not None else []
            count += shared
        is_expired = count < limit and whole < len(keys) and keys[whole] in self._expired
        return Found(tuple(parts), min(count, limit), "expired" if is_expired else "lost" if silent else None)

    def _tiers(self, keys: Sequence[Key], below: Sequence[Tier], silent: set[str]) -> list[str]:
        """The uppermost tier of each page, as far as they follow each other."""
        found = list[str]()
        while len(found) < len(keys):
            place = len(found)
            names = self._ledger.find(keys[place:])
            if not names:  # what others wrote to a tier is known to that tier alone
                there = list(takewhile(lambda key: key not in self._hidden, keys[place:]))
                names = next(([tier.name] * count for tier in below if (count := self._look(tier, there, silent))), [])
            if not names:
                break
            found += names
        return found

    def _look(self, tier: Tier, keys: Sequence[Key], silent: set[str]) -> int:
        try:
            return tier.look(keys) if tier.name not in silent else 0
        except Lost as lost:
            self._fails(tier, lost, silent)
            return 0

    def _fails(self, tier: Tier, lost: Lost, silent: set[str]) -> None:
        """It is not asked a second time, which might take as long again."""
        silent.add(tier.name)
        self._counts.unanswered[lost.reason] += 1

    def end(
        self, tiers: Sequence[Tier], before: Key, owners: Sequence[Key], rest: Sequence[int], silent: set[str]
    ) -> tuple[Part | None, int]:
        """The short end behind a page that has most in common with the rest of a row's tokens; and how many. `silent`: tiers that do not
        answer."""
        best, found, rest = 0, None, tuple(rest)
        least = min(len(rest), worth_having(self._page_size))  # or less, where no more are wanted, or known
        for parent in {end_parent(before, owner) for owner in owners} if rest else ():
            for tier in [tier for tier in tiers if tier.name not in silent]:
                try:
                    cards = tier.ends(parent)
                except Lost as lost:
                    self._fails(tier, lost, silent)
                    continue
                for card in cards:
                    most = max(best, min(least, len(card.tokens)) - 1)
                    if card.tokens[most : most + 1] != rest[most : most + 1]:
                        continue  # it cannot have more
                    shared = shared_length(card.tokens, rest)
                    if shared > most and card.key not in self._hidden and page_key(card.parent, card.tokens) == card.key:
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

    def expire(self, keys: Iterable[Key]) -> None:
        """Nobody used them for too long."""
        self._expired.update(dict.fromkeys(keys))

    def keep(self, keys: Iterable[Key]) -> None:
        """They are there again."""
        for key in keys if self._expired else ():
            self._expired.pop(key, None)
