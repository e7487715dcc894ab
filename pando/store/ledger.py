"""Which page is in which tier, and what must leave for another to enter. Bookkeeping alone: no bytes, no clock, no I/O.

The store moves the bytes that the ledger says, and the replay of traces moves none: both decide by this one. Tiers are named from the
uppermost down. Whatever shall be further down is written there as soon as it can be, so a page that leaves a tier goes nowhere from there.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, NamedTuple

from ..kv.segment import Key
from .policy import Held, Policy, Queue

Rank = tuple[Any, ...]  # a page's order and its key, the smallest leaves first: flat, since a heap compares nothing more often


class Page(NamedTuple):
    key: Key
    size: int  # bytes


class Gone(NamedTuple):
    """A page that has left a tier: it is further down already, or is let go."""

    key: Key
    tier: str


class Kept(NamedTuple):
    """What comes of keeping a chain in a tier: the pages that enter, and those that are gone. Those behind the last to enter do not."""

    entered: tuple[Key, ...]
    gone: tuple[Gone, ...]


class Ledger:
    """Every method is quick: at most a few steps, and a logarithm of what is held, for each page that is named or that leaves."""

    def __init__(self, capacities: Mapping[str, int], policy: Policy, ttl: float | None = None) -> None:
        assert capacities and (ttl is None or ttl > 0)
        self.capacities = dict(capacities)  # bytes, the uppermost tier first
        self.policy = policy
        self.ttl = ttl  # seconds without use
        self.queue = Queue()
        self.used = Counter(dict.fromkeys(capacities, 0))  # bytes
        self._tiers = tuple(capacities)
        self._pages: OrderedDict[Key, Held] = OrderedDict()  # by last use
        self._pins: dict[Key, int] = {}
        self._wants: dict[int, tuple[int, bool]] = {}  # of waiting jobs, by their place
        self._complete = -math.inf  # no job up to this place lacks anything, and those behind it are not looked at
        self._heaps: dict[str, list[Rank]] = {}  # never later than the page's order; made when something must leave a tier
        self._noted: dict[str, dict[Key, Rank]] = {}  # of each page the soonest that is in a heap; the others there count for nothing
        self._counts = dict.fromkeys(capacities, 0)  # pages
        self._spared: set[Key] = set()  # pinned pages whose turn to leave has come

    # ---- questions

    def find(self, keys: Iterable[Key]) -> list[str]:
        """The uppermost tier of each page, from the first on, up to the first that is nowhere."""
        found, tiers = list[str](), self._tiers
        for page in map(self._pages.get, keys):
            if page is None:
                break
            for tier in tiers:
                if tier in page.tiers:
                    found.append(tier)
                    break
        return found

    def has(self, key: Key, tier: str | None = None) -> bool:
        """Is a page in a tier, or in any?"""
        page = self._pages.get(key)
        return page is not None and (tier is None or tier in page.tiers)

    def held(self, tier: str) -> Iterator[Held]:
        return (page for page in self._pages.values() if tier in page.tiers)

    def prefetch(self) -> Iterator[list[Page]]:
        """Chains that waiting jobs need and that the uppermost tier lacks a page of, in the order of the jobs, as far as all that is needed
        up to there fits in together: the exact form of `C_host / S_kv` jobs. The queue may not change while it is read."""
        if not self.policy.looks_ahead or self._complete > -math.inf:
            return
        room, wants, complete = self.capacities[self._tiers[0]], self._wants, True
        for place in self.queue.order:
            size, lacks = wants.get(place) or self._want(place)
            room -= size
            if room < 0:
                self._complete = place if complete else -math.inf
                return
            if lacks:
                complete = False
                keys = self.queue.jobs[place]
                yield [Page(key, self._pages[key].size) for key in keys[: len(self.find(keys))]]
        self._complete = math.inf if complete else -math.inf

    def _want(self, place: int) -> tuple[int, bool]:
        """How many bytes a job adds to what those before it need, and whether the uppermost tier lacks any. Remembered until it changes."""
        size, lacks = 0, False
        for key in self.queue.jobs[place]:
            page = self._pages.get(key)
            if page is None:
                break
            size += page.size if self.queue.needs[key][0] == place else 0
            lacks = lacks or self._tiers[0] not in page.tiers
        self._wants[place] = size, lacks
        return size, lacks

    def _forget_wants(self, places: Iterable[int]) -> None:
        for place in places:
            self._wants.pop(place, None)
            if place <= self._complete:
                self._complete = -math.inf

    # ---- the queue and the pins

    def join(self, place: int, keys: Sequence[Key]) -> None:
        """A job waits; those with a smaller place are before it."""
        self.queue.join(place, keys)
        self._forget_wants([place])
        if place != self.queue.order[-1]:
            for key in keys:
                self._forget_wants(self.queue.needs[key][1:2])  # it is needed sooner, and by another

    def leave(self, place: int) -> None:
        """It waits no longer: it runs, or was given up."""
        later = self.queue.leave(place)
        self._forget_wants([place])
        for key in later:
            if key in self.queue.needs:
                self._forget_wants(self.queue.needs[key][:1])
        self._reorder(later)

    def pin(self, keys: Iterable[Key]) -> None:
        """They stay in their tiers until they are unpinned as often. What is not there yet may be pinned too."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Key]) -> None:
        free = []
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                del self._pins[key]
                if key in self._spared:
                    self._spared.remove(key)
                    free.append(key)
        if free:
            self._reorder(free)

    # ---- pages come, stay and go

    def use(self, keys: Sequence[Key], now: float) -> None:
        """A chain was used, from its first page on."""
        pages, expires = self._pages, self.ttl is not None
        for depth, page in enumerate(map(pages.get, keys)):
            if page is None:
                continue
            if page.used < now:
                page.used = now
            if expires:  # what was used longest ago is looked for by nothing else
                pages.move_to_end(page.key)
            if page.depth != depth:
                page.depth = depth
                self._reorder([page.key])

    def keep(self, tier: str, chain: Sequence[tuple[Key, int]], now: float, only: Container[Key] | None = None) -> Kept:
        """A chain of pages, each with its size, shall be in a tier; it counts as used. It is given from its first page on, with those that
        are there already. `only`: of those that are not, these alone enter."""
        gone, keys = self.expire(now), [key for key, _ in chain]
        entered: list[Key] = []
        self.use(keys, now)
        places = range(len(keys)) if only is None else [place for place, key in enumerate(keys) if key in only]
        for depth in places:
            key, size = chain[depth]
            known = self._pages.get(key)
            if known is None or tier not in known.tiers:
                page = known or Held(key, size, depth, now, self._begun(chain, depth, now))
                if not self._enter(tier, page, gone, chain):
                    break
                entered.append(key)
        return Kept(tuple(entered), tuple(gone))

    def restore(self, tier: str, page: Page, depth: int, used: float) -> None:
        """A page that was there before the ledger was, as after a restart. To be given in the order of their last use: what there is no
        room for is not found."""
        if not self.has(page.key):
            self._enter(tier, Held(page.key, page.size, depth, used, used), [])

    def drop(self, keys: Iterable[Key], tier: str | None = None) -> None:
        """They are gone from a tier, or from all: lost, purged, or never written."""
        for page in [self._pages[key] for key in keys if key in self._pages]:
            for name in self._tiers:
                if name in page.tiers and tier in (None, name):
                    self._take_out(name, page)

    def expire(self, now: float) -> list[Gone]:
        """Lets go of what was not used for too long. A pin counts as use."""
        gone: list[Gone] = []
        while self.ttl is not None and self._pages:
            page = next(iter(self._pages.values()))
            if page.used > now:  # the clock was set back: it would hold up those behind it
                page.used = now
                self._pages.move_to_end(page.key)
                self._reorder([page.key])
                continue
            if page.used + self.ttl > now:
                break
            if page.key in self._pins:
                page.used = max(page.used, now)
                self._pages.move_to_end(page.key)
                continue
            for tier in [tier for tier in self._tiers if tier in page.tiers]:
                self._take_out(tier, page)
                gone.append(Gone(page.key, tier))
        return gone

    def _enter(self, tier: str, page: Held, gone: list[Gone], chain: Sequence[tuple[Key, int]] = ()) -> bool:
        """Puts a page into a tier, and says whether it is there now. What goes first for it may be itself, or one that stands before it in
        the chain that it enters with: then it does not enter."""
        capacity = self.capacities[tier]
        if page.size > capacity:
            return False
        self._pages[page.key] = page
        page.tiers.add(tier)
        self.used[tier] += page.size
        self._counts[tier] += 1
        if page.key in self.queue.needs:
            self._forget_wants(self.queue.needs[page.key])
        self._push(tier, page)
        while self.used[tier] > capacity:
            victim = self._victim(tier)
            if victim is None or victim is page or _is_before(victim, page, chain):
                self._take_out(tier, page)
                self._reorder([victim.key] if victim else [])
                return False
            self._take_out(tier, victim)
            gone.append(Gone(victim.key, tier))
        return True

    def _take_out(self, tier: str, page: Held) -> None:
        page.tiers.discard(tier)
        self.used[tier] -= page.size
        self._counts[tier] -= 1
        if page.key in self.queue.needs:
            self._forget_wants(self.queue.needs[page.key])
        if not page.tiers:
            self._pages.pop(page.key, None)

    # ---- their order

    def _begun(self, chain: Sequence[tuple[Key, int]], depth: int, now: float) -> float:
        """A page that continues a chain belongs to it; one that branches off begins another, which those before it belong to now."""
        before, key = self._pages.get(chain[depth - 1][0]) if depth else None, chain[depth][0]
        if before is None:
            return now
        if before.next in (None, key):
            before.next = key
            return before.begun
        for key, _ in chain[:depth]:
            if key in self._pages:
                self._pages[key].begun = now
        return now

    def _rank(self, page: Held) -> Rank:
        needs = self.queue.needs.get(page.key)
        return *self.policy.order(page, needs[0] if needs else math.inf), page.key

    def _reorder(self, keys: Iterable[Key]) -> None:
        """To be said of pages that may go sooner than before. Of those that go later it is noticed when their turn comes."""
        for page in [self._pages[key] for key in keys if key in self._pages]:
            for tier in page.tiers:
                self._push(tier, page)

    def _push(self, tier: str, page: Held) -> None:
        heap = self._heaps.get(tier)
        if heap is None:
            return
        rank, noted = self._rank(page), self._noted[tier]
        known = noted.get(page.key)
        if known is not None and known <= rank:
            return  # it is looked at by then: a job that comes and goes would leave one more of each of its pages
        noted[page.key] = rank
        heappush(heap, rank)
        if len(heap) > 2 * self._counts[tier] + 64:  # most of it is out of date
            named = (self._pages.get(key) for key in noted)
            self._order(tier, [self._rank(page) for page in named if page is not None and tier in page.tiers])

    def _heap(self, tier: str) -> list[Rank]:
        if tier not in self._heaps:
            self._order(tier, [self._rank(page) for page in self.held(tier)])
        return self._heaps[tier]

    def _order(self, tier: str, ranks: list[Rank]) -> None:
        heapify(ranks)
        self._heaps[tier], self._noted[tier] = ranks, {rank[-1]: rank for rank in ranks}

    def _victim(self, tier: str) -> Held | None:
        """What `policy.victim` answers, taken from the heap. Pinned pages come back to it when they are unpinned."""
        heap, pages, pins, noted = self._heap(tier), self._pages, self._pins, self._noted[tier]
        while heap:
            rank = heap[0]
            page = pages.get(key := rank[-1])
            if noted.get(key) is not rank:
                heappop(heap)
                continue
            if page is not None and tier in page.tiers and key not in pins:
                current = self._rank(page)
                if rank < current:
                    noted[key] = current
                    heapreplace(heap, current)
                    continue
                if rank == current:
                    del noted[key]
                    heappop(heap)
                    return page
            elif key in pins:
                self._spared.add(key)
            del noted[key]
            heappop(heap)
        return None


def _is_before(page: Held, other: Held, chain: Sequence[tuple[Key, int]]) -> bool:
    """In a chain that was just used: the depths of its pages are their places."""
    return page.depth < min(other.depth, len(chain)) and chain[page.depth][0] == page.key
