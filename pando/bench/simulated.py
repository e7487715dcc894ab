"""The store on a simulated clock: its own decisions, its own tiers' bookkeeping, and not one byte.

The store's threads become hands, which do what is posted to them when the clock comes to it, and for as long as the bytes would take. What
they finish is seen from then on. Host memory and disk hold keys alone.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..engine.tiers import BUFFER
from ..kv.pages import Pages
from ..kv.segment import Key
from ..store.codec import codec
from ..store.host import HostTier
from ..store.ledger import Ledger
from ..store.movers import Copy, Take
from ..store.policy import Policy
from ..store.speeds import Moved, Speeds
from ..store.store import Store
from ..store.tier import Card, Ends, Lost, Reader, Shape, Tier
from ..store.transfer import Load, Transfer
from ..store.worker import Worker

T = TypeVar("T")
NOTHING = memoryview(b"")  # the bytes of a page


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.moment = 0.0  # when that will be done which a hand is doing
        self._due: list[tuple[float, int, Callable[[Any], object], object]] = []
        self._order = count()
        self._hands: list[Hand] = []

    def hand(self, _: str) -> "Hand":
        self._hands.append(Hand(self))
        return self._hands[-1]

    def spend(self, seconds: float) -> None:
        """Of the hand that is at work."""
        self.moment += seconds

    def later(self, act: Callable[[T], object], what: T) -> None:
        """When the hand is done so far."""
        heapq.heappush(self._due, (self.moment, next(self._order), act, what))

    @property
    def next(self) -> float:
        """When something happens."""
        return self._first()[0]

    def _first(self) -> "tuple[float, Hand | None]":
        """When, and which hand begins then; what was done before comes first."""
        then, first = self._due[0][0] if self._due else math.inf, None
        for hand in self._hands:
            if hand.begins < then:
                then, first = hand.begins, hand
        return then, first

    def pass_to(self, until: float) -> None:
        while True:
            then, hand = self._first()
            if then > until:
                break
            if then > self.now:
                self.now = then
            if hand is not None:
                hand.work()
            else:
                _, _, act, what = heapq.heappop(self._due)
                act(what)
        if until > self.now:
            self.now = until


class Hand(Worker):
    """A worker without a thread: the clock is what begins its tasks."""

    def __init__(self, clock: Clock) -> None:
        self.begins, self._count = math.inf, 0  # when the next task does; posted so far
        self._clock, self._free = clock, 0.0
        self._waiting: list[tuple[bool, int, float, Callable[[], object]]] = []  # what is urgent first

    def post(self, task: Callable[[], object], *, urgent: bool = False) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (not urgent, self._count, self._clock.now, task))
        if urgent or len(self._waiting) == 1:
            self._look()

    def _look(self) -> None:
        self.begins = max(self._free, self._waiting[0][2]) if self._waiting else math.inf

    def work(self) -> None:
        clock, posts = self._clock, self._waiting
        clock.moment = self.begins
        heapq.heappop(posts)[3]()
        self._free = free = clock.moment
        self.begins = max(free, posts[0][2]) if posts else math.inf

    def settle(self) -> None:
        """Whoever waits for it lets the time pass."""
        while self._waiting or self._free > self._clock.now:
            self._clock.pass_to(min(self._clock.next, self.begins) if self._waiting else self._free)

    def stop(self) -> None:
        self._waiting.clear()
        self._look()

    def join(self, seconds: float) -> None:
        """There is nothing to wait for."""


class _Done(SimpleQueue[Callable[[], None]]):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._ready = clock, super().put

    def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
        self._clock.later(self._ready, item)


class Heap(Pages):
    """Pages that need no neighbours."""

    def reset(self) -> None:
        self._unused = list(range(self.count))
        self.free = self.count

    def take(self, count: int, after: int | None = None, expect: int = 0) -> list[int]:
        assert count <= self.free, (count, self.free)
        self.free -= count
        taken = self._unused[self.free :]
        del self._unused[self.free :]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        self._unused += pages
        self.free = len(self._unused)

    def unclaim(self, last: int) -> None: ...


class Bus:
    """Between the pool and host memory: it takes time, and nothing else."""

    def __init__(self, clock: Clock, rate: float, kv_bytes: int) -> None:
        self._clock, self._token = clock, kv_bytes / rate

    def mark(self) -> None: ...

    def fence(self) -> None: ...

    def drain(self) -> None: ...

    def follow(self, computed: "torch.cuda.Event | None") -> None: ...

    def take(self, takes: Sequence[Take], computed: "torch.cuda.Event | None") -> None:
        self.move(sum(take.tokens for take in takes))

    def put(self, layer: int, copies: Sequence[Copy]) -> None:
        self.move(sum(copy.tokens for copy in copies))

    def move(self, tokens: int) -> None:
        self._clock.spend(tokens * self._token)


class Host(HostTier):
    """Every page lies in the same memory, which nobody writes to or reads."""

    def __init__(self, shape: Shape, pages: int) -> None:
        size = codec(shape.codec).layer_bytes(shape, shape.page_size)
        super().__init__(shape, pages, size, pinned=False)
        self._nothing = torch.empty(shape.layers, size, dtype=torch.uint8)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def _slot(self, slot: int) -> Tensor:
        return self._nothing


class Disk:
    """Cards, and how long a page takes."""

    name = "disk"

    def __init__(self, clock: Clock, rate: float, kv_bytes: int, page_size: int) -> None:
        self._clock, self._token, self._page_size = clock, kv_bytes / rate, page_size
        self._cards: dict[Key, Card] = {}
        self._whole = (0,) * page_size
        self._ends = Ends()

    def look(self, keys: Sequence[Key]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self._cards), len(keys))

    def ends(self, parent: Key) -> Sequence[Card]:
        return self._ends.behind(parent)

    def open(self, key: Key) -> "_Read":
        if key not in self._cards:
            raise Lost("absent")
        return _Read(self._cards[key], self._clock, self._token)

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        """Of whole pages nobody reads the tokens: of hundreds of thousands they take more memory than all else."""
        self._clock.spend(len(card.tokens) * self._token)
        if len(card.tokens) < self._page_size:
            self._ends.add(card)
        else:
            card = Card(card.key, card.parent, card.tenant, self._whole)
        self._cards[card.key] = card

    def drop(self, keys: Sequence[Key]) -> None:
        for card in [self._cards.pop(key) for key in keys if key in self._cards]:
            self._ends.drop(card.parent, card.key)

    def close(self) -> None: ...


class _Read:
    def __init__(self, card: Card, clock: Clock, token: float) -> None:
        self.card, self._clock, self._token = card, clock, token

    def layer(self, index: int, into: memoryview) -> None:
        self._clock.spend(len(self.card.tokens) * self._token)

    def close(self) -> None: ...


class _Transfer(Transfer):
    """What is asked of it is noted, and takes its time: nothing is opened, copied or checked, since there are no bytes."""

    def __init__(self, clock: Clock, shape: Shape, bus: Bus, host: Host, below: Sequence[Tier], reserve: int) -> None:
        super().__init__(shape, codec(shape.codec), bus, host, below, reserve=reserve)
        self._clock, self._bus, self._held = clock, bus, host
        self._ends: list[float] = []

    def write(self, card: Card, tier: str) -> None:
        if card.key not in self._held:
            raise Lost("absent")
        self.tiers[tier].save(card, ())

    def raise_to_host(self, key: Key, tier: str) -> None:
        if key in self._held:
            return
        below = self.tiers[tier].open(key)
        if self._held.begin(below.card) is not None:
            below.layer(0, NOTHING)
            self._held.commit(below.card)

    def load(self, loads: Sequence[Load], computed: "torch.cuda.Event | None", tell: Callable[[Mapping[str, Moved]], None]) -> None:
        """As ever, but that its end is seen when the time has passed."""
        tokens, written = 0, list[tuple[Callable[[Card], None], Card]]()
        for load, sources in [(load, self._sources(load)) for load in loads]:
            if load.unwanted and sources:
                load.cut(0, Lost("late", "nobody waits for it any more"))
            for card, below, stays in sources:
                if below is not None and not load.unwanted:
                    below.layer(0, NOTHING)
                if stays:
                    written.append((self._held.abort if load.unwanted else self._held.commit, card))
                tokens += 0 if load.unwanted else len(card.tokens)
        self._bus.move(tokens)
        for end, card in reversed(written):
            end(card)
        tell({})
        for load in loads:
            self._clock.later(Load.end, load)
        heapq.heappush(self._ends, self._clock.moment)

    def _sources(self, load: Load) -> list[tuple[Card, Reader | None, bool]]:
        """What is read for a load, from below where host memory does not have it, and whether it stays there then."""
        found: list[tuple[Card, Reader | None, bool]] = []
        for place, part in enumerate(load.parts):
            if part.card.key in self._held:
                found.append((part.card, None, False))
                continue
            try:
                found.append((part.card, self._found_below(part), self._slot(part.card) is not None))
            except Lost as lost:
                load.cut(place, lost)
                break
        return found

    @property
    def ends(self) -> float:
        """When the next of the loads that were begun does."""
        while self._ends and self._ends[0] <= self._clock.now:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else math.inf


class Known(Speeds):
    """What is simulated need not be measured."""

    def __init__(self, seconds: Mapping[str, float], prefill_rate: float) -> None:
        """For each tier, of a byte."""
        super().__init__()
        self._seconds, self._rate = seconds, prefill_rate

    def pays(self, sizes: Mapping[str, int], tokens: int) -> bool:
        return sum(size * self._seconds[tier] for tier, size in sizes.items()) < tokens / self._rate


class SimulatedStore(Store):
    _loader: Hand

    def __init__(self, clock: Clock, transfer: _Transfer, ledger: Ledger, below: Sequence[Tier], page_bytes: int, speeds: Speeds) -> None:
        super().__init__(transfer, ledger, below, buffer=BUFFER, clock=lambda: clock.now, worker=clock.hand)
        self._page_bytes, self._simulated = page_bytes, transfer
        self._done, self.speeds, self._now = _Done(clock), speeds, lambda: clock.now

    @property
    def spare(self) -> int:
        """Steps have no layers here: what they fill is copied behind them."""
        return 0

    @property
    def loads_end(self) -> float:
        """When the next load does; it may have to be begun before."""
        return min(self._simulated.ends, self._loader.begins)


def simulated_store(
    clock: Clock, policy: Policy, kv_bytes: int, page_size: int, pages: Mapping[str, int], rates: Mapping[str, float], prefill_rate: float
) -> SimulatedStore:
    """`pages`: how many host memory and disk hold; a disk of none is no tier. `rates`: bytes/s between host memory and the device, and
    between disk and host memory."""
    page_bytes = page_size * kv_bytes
    shape = Shape(bytes(32), 1, 1, 1, "float16", page_size)  # whose bytes are nobody's
    below = [Disk(clock, rates["disk"], kv_bytes, page_size)] if pages["disk"] else []
    passing = 2 * BUFFER if below else 0
    host = Host(shape, pages["host"] + passing)
    transfer = _Transfer(clock, shape, Bus(clock, rates["host"], kv_bytes), host, below, passing)
    ledger = Ledger({tier: number * page_bytes for tier, number in pages.items() if number}, policy)
    seconds = {"host": 1 / rates["host"], "disk": 1 / rates["host"] + 1 / rates["disk"]}
    return SimulatedStore(clock, transfer, ledger, below, page_bytes, Known(seconds, prefill_rate))
