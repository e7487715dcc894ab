"""What must stay: runs of the tree that somebody asked to keep, for how long, and how much of the pool they may take."""

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import QuotaExceeded, counted
from ..kv.segment import Key
from ..kv.stem import Stem
from ..kv.tree import PrefixTree
from .request import Tenant

log = logging.getLogger(__name__)

MAX_PINS = 1024


class Turn(NamedTuple):
    """Of a conversation."""

    session: str
    asked: Key  # the last whole page of its prompt


@dataclass(frozen=True)
class Pin:
    pin_id: str
    tenant: Tenant
    tokens: int  # of the context, from its beginning
    pages: frozenset[int]
    until: float | None  # on the scheduler's clock; None: until it is taken away
    stems: tuple[Stem, ...]
    last: Key | None  # of the whole pages of what it is of, before any of that was dropped
    automatic: bool  # it came with a request, and gives way to that of the next turn
    turn: Turn | None  # where the conversation has a name


class Pins:
    def __init__(self, tree: PrefixTree, quota: int) -> None:
        self.quota = quota  # pages
        self._tree = tree
        self._pins: dict[str, Pin] = {}
        self._held: dict[int, int] = {}  # how many pins hold each page: hundreds may hold the same thousands

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    @property
    def pages(self) -> int:
        return len(self._held)

    def ends(self) -> Counter[Stem]:
        """How many pins end in each stem. What only leads to another stem of the same pin is not its end."""
        return Counter(stem for pin in self for stem in pin.stems if not any(_leads(stem, other) for other in pin.stems))

    def add(
        self,
        stems: Sequence[Stem],
        tokens: int,
        keys: Sequence[Key],
        tenant: Tenant,
        until: float | None,
        *,
        automatic: bool = False,
        turn: Turn | None = None,
    ) -> Pin:
        """`tokens`: how many lead to these stems. `keys`: of all whole pages that were said."""
        yielding = self._yielding(tenant, keys, turn) if automatic else []
        pages = frozenset().union(*map(_pages, stems))
        if len(self._pins) - len(yielding) >= MAX_PINS:
            raise QuotaExceeded(f"{MAX_PINS} contexts are pinned, the most there may be; unpin one first")
        going = Counter(page for pin in yielding for page in pin.pages)
        free = {page for page, count in going.items() if self._held[page] == count}
        total = len(self._held) - len(free) + sum(page not in self._held or page in free for page in pages)
        if total > self.quota:
            raise QuotaExceeded(
                f"pinning {counted(len(pages), 'page')} would make {total} of the {self.quota} that pins may hold; "
                "unpin something, pin a shorter context, or raise pin_quota"
            )
        for stem in stems:
            self._tree.pin(stem)
        for pin in yielding:
            self.drop(pin)
        pin = Pin(f"pin-{secrets.token_hex(8)}", tenant, tokens, pages, until, tuple(stems), keys[-1] if keys else None, automatic, turn)
        self._pins[pin.pin_id] = pin
        for page in pages:
            self._held[page] = self._held.get(page, 0) + 1
        return pin

    def _yielding(self, tenant: Tenant, keys: Sequence[Key], turn: Turn | None) -> list[Pin]:
        """The automatic pins of what is gone on with here. An answer may come back as other tokens, without its stop string for one: in a
        session it is enough that what was asked does."""
        said, session = set(keys), turn and turn.session
        mine = [pin for pin in self if pin.automatic and pin.tenant == tenant]
        return [pin for pin in mine if pin.last in said or (pin.turn and pin.turn.session == session and pin.turn.asked in said)]

    def make_way(self, tenant: Tenant, keys: Sequence[Key], turn: Turn | None) -> None:
        """Of a conversation that was cut: what the pin before holds leads along what was dropped, and what is left could not do without."""
        for pin in self._yielding(tenant, keys, turn):
            self.drop(pin)

    def get(self, pin_id: str, owner: bytes) -> Pin | None:
        """A pin of this owner: another's does not exist for it."""
        pin = self._pins.get(pin_id)
        return pin if pin is not None and pin.tenant.owner == owner else None

    def drop(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        for page in pin.pages:
            if self._held[page] > 1:
                self._held[page] -= 1
            else:
                del self._held[page]
        for stem in pin.stems:
            self._tree.unpin(stem)

    def give_way(self) -> None:
        """A request that would wait for ever comes before what is pinned: first those that came with requests go, then the newest. What the
        operator shares is the oldest."""
        if self._pins:
            pin = next((pin for pin in self if pin.automatic), list(self)[-1])
            log.warning("a request finds no room beside what is pinned: a pin of %d tokens is taken away", pin.tokens)
            self.drop(pin)

    def expire(self, now: float) -> None:
        for pin in [pin for pin in self if pin.until is not None and pin.until <= now]:
            self.drop(pin)

    def reset(self) -> None:
        """The tree has forgotten everything."""
        self._pins.clear()
        self._held.clear()


def _pages(stem: Stem) -> frozenset[int]:
    """From the root to here."""
    return frozenset(page for segment in stem.path() for page in segment.pages)


def _leads(stem: Stem, other: Stem) -> bool:
    at = other.parent
    while at is not None and at is not stem:
        at = at.parent
    return at is stem
