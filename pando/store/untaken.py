"""Pages that a tier did not take although host memory has them.

Nobody offers them again, since they are kept: but what is saved behind them would be of no use in that tier without them. So they are
written when it takes another page of their chain.
"""

from collections.abc import Callable, Sequence

from ..kv.latest import Latest
from ..kv.segment import Key
from .tier import Card, Lost

MOST = 4096


class Untaken:
    def __init__(self) -> None:
        self._cards = Latest[tuple[str, Key], Card](MOST)

    def note(self, tier: str, card: Card, lost: Lost) -> None:
        """Where there was no room, there will be none for it either."""
        if lost.reason != "full":
            self._cards[tier, card.key] = card

    def again(self, tier: str, chain: Sequence[Key], taken: Key, has: Callable[[Key], bool]) -> list[Card]:
        """When the last page of a chain was taken, those of it, in its order, that were not and are still there; they are forgotten, until
        they fail again."""
        if self._cards:
            self._cards.pop((tier, taken), None)
        found = [self._cards.pop((tier, key), None) for key in chain] if self._cards and taken == chain[-1] else []
        return [card for card in found if card is not None and has(card.key)]
