import time
from collections.abc import Sequence

from pando.kv.segment import Key
from pando.store.ledger import Ledger
from pando.store.policy import LRU
from pando.store.scout import Scout
from pando.store.sought import Sought
from pando.store.tier import Card

from .pages import ROOT, TENANT, card


class Broken:
    """A tier with an error of ours in it."""

    name = "remote"

    def look(self, keys: Sequence[Key]) -> int:
        raise MemoryError

    def ends(self, parent: Key) -> Sequence[Card]:
        return []

    def close(self) -> None: ...


def test_an_error_in_asking_is_an_answer() -> None:
    scout, page = Scout(Broken(), Ledger({"host": 100}, LRU()), 8), card(1)  # type: ignore[arg-type]
    sought = Sought([page.key], [*page.tokens, 5], ROOT, [ROOT], TENANT, 8)
    deadline = time.monotonic() + 20
    while scout.awaits(sought):
        assert time.monotonic() < deadline and scout.answers < 3
        time.sleep(0.001)
    scout.close()
