"""Which page is in which tier, and what must leave for another to enter. Bookkeeping alone: no bytes, no clock, no I/O.

The store moves the bytes that the ledger says, and the replay of traces moves none: both decide by this one. Tiers are named from the
uppermost down. A page that leaves a tier goes to the next one, unless that or one further down has it: what was written behind to disk is
only dropped from host memory.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..kv.segment import Key
from .policy import Held, Order, Policy, Queue

Refusal = Literal["too_large", "no_room"]  # for the tier; among what is pinned there or worth more


class Page(NamedTuple):
    key: Key
    size: int  # bytes


@dataclass(frozen=True)
class Move:
    """A page leaves a tier. `target` is where its bytes must be written; None: nowhere, it is further down already, or is let go."""

    key: Key
    source: str
    target: str | None


@dataclass(frozen=True)
class Kept:
    """What comes of keeping a chain in a tier: first the moves, in order, then the pages that enter. Those behind the last are refused."""

    entered: tuple[Key, ...]
    moves: tuple[Move, ...]
    refused: Refusal | None = None


class Ledger:
    """Every method is quick: at most a few steps, and a logarithm of what is held, for each page that is named or that leaves."""

    def __init__(self, capacities: Mapping[str, int], policy: Policy, ttl: float | None = None, *, moves_down: bool = True) -> None:
        """`moves_down`: what leaves a tier goes to the next one. Otherwise whatever shall be there is written there as soon as it can."""
        self.moves_down = moves_down
        assert capacities and (ttl is None or ttl > 0)
        self.capacities = dict(capacities)  # bytes, the uppermost tier first
        self.policy = policy
        self.ttl = ttl  # seconds without use
        self.queue = Queue()
        self.used = Counter(dict.fromkeys(capacities, 0))  # bytes
        self._tiers = tuple(capacities)
        self._pages: OrderedDict[Key, Held] = OrderedDict()  # by last use
        self._pins: Counter[Key] = Counter()
        self._wants: dict[int, tuple[int, bool]] = {}  # of waiting jobs, by their place
        self._heaps: dict[str, list[tuple[Order, Key]]] = {tier: [] for tier in capacities}  # never later than the page's order

    # ---- questions

    def find(self, keys: Iterable[Key]) -> list[str]:
        """The uppermost tier of each page, from the first on, up to the first that is nowhere."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(next(tier for tier in self._tiers if tier in page.tiers))
        return found

    def held(self, tier: str) -> Iterator[Held]:
        return (page for page in self._pages.values() if tier in page.tiers)

    def prefetch(self) -> Iterator[list[Page]]:
        """Chains that waiting jobs need and that the uppermost tier lacks a page of, in the order of the jobs, as far as all that is needed
        up to there fits in together: the exact form of `C_host / S_kv` jobs. The queue may not change while it is read."""
        if not self.policy.looks_ahead:
            return
        room = self.capacities[self._tiers[0]]
        for place in self.queue.order:
            size, lacks = self._wants.get(place) or self._want(place)
            room -= size
            if room < 0:
                return
            if lacks:
                keys = self.queue.jobs[place]
                yield [Page(key, self._pages[key].size) for key in keys[: len(self.find(keys))]]

    def _want(self, place: int) -> tuple[int, bool]:
        """How many bytes a job adds to what those before it need, and whether the uppermost tier lacks any. Remembered until it changes."""
        size, lacks = 0, False
        for key in self.queue.jobs[place]:
            page = self._pages.get(key)
            if page is None:
                break
            size += page.size if self.queue.need(key) == place else 0
            lacks = lacks or self._tiers[0] not in page.tiers
        self._wants[place] = size, lacks
        return size, lacks

    def _forget_wants(self, places: Iterable[int]) -> None:
        for place in places:
            self._wants.pop(place, None)

    # ---- the queue and the pins

    def join(self, place: int, keys: Sequence[Key]) -> None:
        """A job waits; those with a smaller place are before it."""
        self.queue.join(place, keys)
        for key in keys:
            self._forget_wants(self.queue.places(key)[1:2])

    def leave(self, place: int) -> None:
        """It waits no longer: it runs, or was given up."""
        later = self.queue.leave(place)
        self._wants.pop(place, None)
        for key in later:
            self._forget_wants(self.queue.places(key)[:1])
        self._reorder(later)

    def pin(self, keys: Iterable[Key]) -> None:
        """They stay in their tiers until they are unpinned as often. What is not there yet may be pinned too."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        free = []
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                free.append(key)
        self._reorder(free)

    # ---- pages come, stay and go

    def use(self, keys: Sequence[Key], now: float) -> None:
        """A chain was used, from its first page on."""
        for depth, key in enumerate(keys):
            page = self._pages.get(key)
            if page is not None:
                self._touch(page, depth, now)

    def keep(self, tier: str, chain: Sequence[Page], now: float, only: Container[Key] | None = None) -> Kept:
        """A chain shall be in a tier; it counts as used. It is given from its first page on, with those that are there already. `only`: of
        those that are not, these alone enter."""
        moves = self.expire(now)
        entered: list[Key] = []
        before: set[Key] = set()  # of the chain, and there: what comes behind them does not displace them
        self.use([page.key for page in chain], now)
        for depth, (key, size) in enumerate(chain):
            known = self._pages.get(key)
            if known is not None and tier in known.tiers:
                before.add(key)
            elif only is None or key in only:
                refused = self._enter(tier, known or Held(key, size, depth, now, self._begun(chain, depth, now)), moves, before)
                if refused:
                    return Kept(tuple(entered), tuple(moves), refused)
                entered.append(key)
                before.add(key)
        return Kept(tuple(entered), tuple(moves))

    def restore(self, tier: str, page: Page, depth: int, used: float) -> list[Move]:
        """A page that was there before the ledger was, as after a restart. To be given in the order of their last use."""
        moves: list[Move] = []
        if not self.find([page.key]):
            self._enter(tier, Held(page.key, page.size, depth, used, used), moves)
        return moves

    def drop(self, keys: Iterable[Key], tier: str | None = None) -> None:
        """They are gone from a tier, or from all: lost, purged, or never written."""
        for page in [self._pages[key] for key in keys if key in self._pages]:
            for name in self._tiers:
                if name in page.tiers and tier in (None, name):
                    self._take_out(name, page)

    def expire(self, now: float) -> list[Move]:
        """Lets go of what was not used for too long. A pin counts as use."""
        moves: list[Move] = []
        while self.ttl is not None and self._pages:
            page = next(iter(self._pages.values()))
            if page.used + self.ttl > now:
                break
            if page.key in self._pins:
                self._touch(page, page.depth, now)
                continue
            for tier in [tier for tier in self._tiers if tier in page.tiers]:
                self._take_out(tier, page)
                moves.append(Move(page.key, tier, None))
        return moves

    def _enter(self, tier: str, page: Held, moves: list[Move], before: Container[Key] = ()) -> Refusal | None:
        """Puts a page into a tier. What goes first for it may be itself, or one that came just before it: then it does not enter."""
        if page.size > self.capacities[tier]:
            return "too_large"
        self._pages[page.key] = page
        page.tiers.add(tier)
        self.used[tier] += page.size
        self._forget_wants(self.queue.places(page.key))
        self._push(tier, page)
        while self.used[tier] > self.capacities[tier]:
            victim = self._victim(tier)
            if victim is None or victim is page or victim.key in before:
                self._take_out(tier, page)
                self._reorder([victim.key] if victim else [])
                return "no_room"
            self._move_out(tier, victim, moves)
        return None

    def _move_out(self, tier: str, page: Held, moves: list[Move]) -> None:
        below = self._tiers[self._tiers.index(tier) + 1 :]
        target = None
        if self.moves_down and below and page.tiers.isdisjoint(below) and self._enter(below[0], page, moves) is None:
            target = below[0]
        self._take_out(tier, page)
        moves.append(Move(page.key, tier, target))

    def _take_out(self, tier: str, page: Held) -> None:
        page.tiers.discard(tier)
        self.used[tier] -= page.size
        self._forget_wants(self.queue.places(page.key))
        if not page.tiers:
            self._pages.pop(page.key, None)

    # ---- their order

    def _touch(self, page: Held, depth: int, now: float) -> None:
        page.used = max(page.used, now)
        self._pages.move_to_end(page.key)
        if page.depth != depth:
            page.depth = depth
            self._reorder([page.key])

    def _begun(self, chain: Sequence[Page], depth: int, now: float) -> float:
        """A page that continues a chain belongs to it; one that branches off begins another, which those before it belong to now."""
        before = self._pages.get(chain[depth - 1].key) if depth else None
        if before is None:
            return now
        if before.next in (None, chain[depth].key):
            before.next = chain[depth].key
            return before.begun
        for key, _ in chain[:depth]:
            if key in self._pages:
                self._pages[key].begun = now
        return now

    def _order(self, page: Held) -> Order:
        return self.policy.order(page, self.queue.need(page.key))

    def _reorder(self, keys: Iterable[Key]) -> None:
        """To be said of pages that may go sooner than before. Of those that go later it is noticed when their turn comes."""
        for key in keys:
            page = self._pages.get(key)
            for tier in page.tiers if page else ():
                self._push(tier, self._pages[key])

    def _push(self, tier: str, page: Held) -> None:
        heap = self._heaps[tier]
        heapq.heappush(heap, (self._order(page), page.key))
        if len(heap) > 2 * len(self._pages) + 64:  # most of it is out of date
            heap[:] = [(self._order(page), page.key) for page in self.held(tier)]
            heapq.heapify(heap)

    def _victim(self, tier: str) -> Held | None:
        """What `policy.victim` answers, taken from the heap. Pinned pages come back to it when they are unpinned."""
        heap = self._heaps[tier]
        while heap:
            order, key = heapq.heappop(heap)
            page = self._pages.get(key)
            if page is None or tier not in page.tiers or key in self._pins:
                continue
            current = self._order(page)
            if order == current:
                return page
            if order < current:
                heapq.heappush(heap, (current, key))
        return None
