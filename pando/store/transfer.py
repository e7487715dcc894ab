"""Moving pages between the pool and the tiers below it, in threads beside the computation.

A load goes layer by layer over all of its pages, so that whoever computes behind them may begin when layer 0 is there. What is read from a
file passes through host memory and stays there.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice

import torch
from torch import Tensor

from ..kv.segment import Key
from .codec import Codec
from .host import HostTier
from .movers import Copy, Mover
from .sought import Part
from .speeds import Meter, Moved
from .tier import Card, Lost, Reader, Shape, Tier

log = logging.getLogger(__name__)

TICK = 0.001  # seconds: who waits for a moment looks behind it
LATE = 30.0  # seconds without a layer, after which whoever waits computes instead


class Load:
    """Pages on their way into the pool. Whoever waits for them gives them up when they are late."""

    def __init__(
        self,
        parts: Sequence[Part],
        pages: Sequence[int],
        patience: float | None,
        gave_up: "Callable[[Load], None]",
        clock: Callable[[], float],
    ) -> None:
        """`pages`: of the pool, for each part. `patience`: seconds that it may take from when it is begun; None: nobody knows. `gave_up` is
        told if it takes longer."""
        self.parts, self.pages = parts, pages
        self.lost: Lost | None = None  # why some will not come
        self.patience, self._gave_up, self._clock = LATE if patience is None else patience, gave_up, clock
        self._began: float | None = None
        self._end, self._until = math.inf, clock() + LATE  # when it must be done, and when the next thing must have happened
        self._good = len(parts)
        self._layers: list[torch.cuda.Event | None] = []
        self._there = 0  # of these, as far as was seen
        self._is_far = any(part.tier == "remote" for part in parts)
        self.done = self.unwanted = self._late = False  # the second is for the thread that loads
        self._is_whole = False  # every layer came: there is nothing left to be late
        self._changed = threading.Condition()

    @property
    def good(self) -> Sequence[Part]:
        """Those that came, from the first on; known when it is done."""
        return self.parts[: self._good]

    @property
    def late(self) -> bool:
        """Is it given up, although it is not done? That is decided when it is asked."""
        if not (self._late or self.done or self._is_whole) and self._clock() > self._until:
            self._late, self.lost = True, self.lost or Lost("late", f"{len(self._layers)} layers came in time")
            self._gave_up(self)
        return self._late

    def seconds(self, layers: int) -> float | None:
        """How long all of its layers take at the rate of those that came; None where it is not begun."""
        return None if self._began is None else (self._clock() - self._began) * layers / max(1, len(self._layers))

    def left(self, layers: int) -> float:
        """Seconds until the last of its layers is there, at the rate of those that are; infinite where nobody can tell, and for what comes
        from another machine, which may stall at any moment."""
        known, then = len(self._layers), self._there
        while then < known and ((event := self._layers[then]) is None or event.query()):
            then += 1
        self._there = then
        if self._began is None or self.lost is not None or not then or self._is_far:
            return math.inf
        return (self._clock() - self._began) / then * (layers - then)

    def wait(self, layer: int) -> "torch.cuda.Event | None":
        """Until a layer of all pages is in the pool, or will be with the event; raises Lost where one of them will not come."""
        if self.lost is None and len(self._layers) > layer:
            return self._layers[layer]
        self._wait_for(lambda: len(self._layers) > layer or self.done or self.lost is not None)
        if self.lost is not None:
            raise self.lost
        return self._layers[layer]

    def begins_within(self, seconds: float) -> bool:
        """Waits until its first layer is there, or will be with an event; says whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._layers) or self.done, seconds)

    def ends_within(self, seconds: float) -> bool:
        """Waits until it is done, for so long at most; says whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, seconds)

    def finish(self) -> bool:
        """Waits until it is done, or until it is late; says which."""
        return self._wait_for(lambda: self.done)

    def _wait_for(self, happens: Callable[[], bool]) -> bool:
        """Says whether it does before it is late."""
        with self._changed:
            while not happens() and not self.late:
                self._changed.wait(max(0.0, self._until - self._clock()) + TICK)
        return not self._late

    def hurry(self, seconds: float) -> None:
        """Others wait for it: it is late sooner."""
        with self._changed:
            self._end = min(self._end, self._clock() + seconds)
            self._until = min(self._until, self._end)

    def abandon(self) -> None:
        """Breaks it off. Its pages may be used for something else when it is done."""
        self.unwanted = True

    # ---- for the thread that loads

    def begin(self, patience: float) -> None:
        """It has so many seconds: the loads that are made together wait for one another."""
        with self._changed:
            self._began = self._clock()
            self._end = self._began + patience
            self._until = min(self._end, self._began + LATE)
            self._changed.notify_all()

    def cut(self, place: int, lost: Lost) -> None:
        """The page at this place will not come, and what follows it is of no use."""
        with self._changed:
            self._good, self.lost = place, lost
            self._changed.notify_all()

    def arrived(self, event: "torch.cuda.Event | None", *, last: bool = False) -> None:
        with self._changed:
            self._layers.append(event)
            self._is_whole = last
            self._until = min(self._end, self._clock() + LATE)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.done = True
            self._changed.notify_all()


class Transfer:
    """Brings pages from the tiers to the pool, and back. Its methods run in worker threads."""

    def __init__(self, shape: Shape, codec: Codec, mover: Mover, host: HostTier, below: Sequence[Tier], *, reserve: int) -> None:
        """`reserve`: pages of host memory that are for what is saved, and not for what is loaded."""
        self.shape, self.codec, self.mover, self.host = shape, codec, mover, host
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in (host, *below)}
        self._reserve, self._layer_bytes = reserve, cache(partial(codec.layer_bytes, shape))

    def load(self, loads: Sequence[Load], computed: "torch.cuda.Event | None", tell: Callable[[Mapping[str, Moved]], None]) -> None:
        """Fills the pages of loads, together: the first layer of all of them, then the next. `computed`: what may still use the pages.
        `tell` hears what came from each tier, and how long that took, before anyone hears that the loads are done."""
        meter = Meter()
        with ExitStack() as stack:
            for load in loads:
                stack.callback(load.end)
                load.begin(sum(each.patience for each in loads))
            stack.callback(lambda: tell(meter.read()))
            try:
                self.mover.follow(computed)
                slots = iter(stack.enter_context(self.host.reading([part.card.key for load in loads for part in load.parts])))
                opened = [self._open(load, [*islice(slots, len(load.parts))], stack, meter) for load in loads]
                copies = list[Copy]()
                for layer in range(self.shape.layers):
                    whole = [each.read(layer) for each in opened]
                    if not layer or not all(whole):
                        copies = [copy for each in opened for copy in each.copies]
                    self.mover.put(layer, copies)
                    event = self.mover.fence()
                    for load in loads:
                        load.arrived(event, last=layer + 1 == self.shape.layers)
            except Exception as error:  # no memory, or an error of ours: what did not come must not be taken for what it should be
                log.exception("a load failed")
                for load in loads:
                    load.cut(0, Lost("unreadable", type(error).__name__))
            finally:
                self.mover.drain()  # pages and host memory stay until nothing is copied any more

    def _open(self, load: Load, slots: Sequence[Tensor | None], stack: ExitStack, meter: Meter) -> "_Opened":
        """`slots`: its pages in host memory; those that are not there come from below."""
        opened, here = _Opened(load), 0
        for place, (part, page, slot) in enumerate(zip(load.parts, load.pages, slots, strict=True)):
            tokens = len(part.card.tokens)
            if slot is not None:
                here += self._layer_bytes(tokens)
                opened.copies.append(Copy(page, tokens, slot, stays=True))
                continue
            try:
                file = stack.enter_context(self._from_below(part, meter))
            except Lost as lost:
                load.cut(place, lost)
                break
            opened.files.append((place, file))
            opened.copies.append(Copy(page, tokens, file.buffer, stays=False))
        meter.add("host", self.shape.layers * here, time.perf_counter())  # they are only copied
        return opened

    def raise_to_host(self, key: Key, tier: str) -> None:
        """Brings a page into host memory before anyone asks for it; raises Lost."""
        if self.host.look([key]):
            return  # still on its way down
        with closing(self.tiers[tier].open(key)) as below:
            card, size = below.card, self._layer_bytes(len(below.card.tokens))
            slot = self.host.begin(card)
            if slot is not None:
                with self._written(card):
                    for index, row in enumerate(slot):
                        below.layer(index, memoryview(row[:size].numpy()))

    def write(self, card: Card, tier: str) -> None:
        """Copies a page from host memory down to a tier; raises Lost."""
        with closing(self.host.open(card.key)) as reader:
            size = self._layer_bytes(len(card.tokens))
            self.tiers[tier].save(card, [memoryview(row[:size].numpy()) for row in reader.payload])

    @contextmanager
    def _from_below(self, part: Part, meter: Meter) -> "Iterator[_File]":
        began, size = time.perf_counter(), self._layer_bytes(len(part.card.tokens))
        try:
            below = self._found_below(part)
        finally:
            meter.add(part.tier, 0, began)
        add = partial(meter.add, part.tier)
        with closing(below):
            if len(below.card.tokens) != len(part.card.tokens):
                raise Lost("foreign", f"{len(below.card.tokens)} tokens where {len(part.card.tokens)} were expected")
            slot = self._slot(part.card)
            if slot is None:
                yield _File(below, torch.empty(self.shape.layers, size, dtype=torch.uint8), size, add)
            else:
                source = _File(below, slot, size, add)
                with self._written(part.card, lambda: source.layers == self.shape.layers):
                    yield source

    def _found_below(self, part: Part) -> Reader:
        """From the tier where it should be, or from another one: it may have left host memory meanwhile, or be on its way there."""
        lost = Lost("absent")
        for name in sorted(self.tiers, key=lambda name: name != part.tier):
            try:
                return self.tiers[name].open(part.card.key)
            except Lost as error:
                lost = error if name == part.tier else lost
        raise lost

    def _slot(self, card: Card) -> Tensor | None:
        """Where it may stay in host memory, if there is room."""
        if self.host.free <= self._reserve:
            return None
        try:
            return self.host.begin(card)
        except Lost:
            return None

    @contextmanager
    def _written(self, card: Card, is_whole: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """The page is found in host memory from now on, unless it was not written whole."""
        try:
            yield
        except BaseException:
            self.host.abort(card)
            raise
        (self.host.commit if is_whole() else self.host.abort)(card)


class _File:
    """A page below, read into a buffer."""

    def __init__(self, reader: Reader, buffer: Tensor, size: int, add: Callable[[int, float], None]) -> None:
        """`add` is told how many bytes were read, and since when."""
        self._reader, self.buffer, self._size, self._add = reader, buffer, size, add
        self.layers = 0

    def read(self, index: int) -> None:
        """A layer of it can be copied from now on; raises Lost."""
        began, size = time.perf_counter(), 0
        try:
            self._reader.layer(index, memoryview(self.buffer[index, : self._size].numpy().data))
            self.layers, size = self.layers + 1, self._size
        finally:
            self._add(size, began)


@dataclass
class _Opened:
    """A load whose pages are open for reading."""

    load: Load
    copies: list[Copy] = field(default_factory=list)
    files: list[tuple[int, _File]] = field(default_factory=list)  # those of them that are read before they are copied, by their place

    def read(self, layer: int) -> bool:
        """A layer of them can be copied from now on; says whether of all of them."""
        for place, file in self.files:
            if self.load.unwanted:
                break
            try:
                file.read(layer)
            except Lost as lost:
                self._cut(place, lost)
                return False
        if self.copies and self.load.unwanted:
            self._cut(0, Lost("late", "nobody waits for it any more"))
            return False
        return True

    def _cut(self, place: int, lost: Lost) -> None:
        self.load.cut(place, lost)
        del self.copies[place:]
        self.files = [(other, file) for other, file in self.files if other < place]
