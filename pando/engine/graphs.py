"""Steps of few tokens as captured graphs: on a GPU their kernels take less time than it takes to ask for them one by one.

A graph is captured for so many tokens, rounded up, and for the kinds of launches that a plan wants; which tokens they are, and which plan,
lies in buffers that stay. What is padded is written to a page that nobody reads, and reads nothing. Where some of what is read is still on
its way into the pool, there is a graph for each layer, and each waits for its own.
"""

import gc
import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ..kernels.launch import power_of_two
from ..kernels.reads import Reads, joined
from ..kernels.staging import Staged
from ..kv.pool import PagePool
from ..model.decoder import Decoder, Step
from .batch import NOWHERE, Batch, Lowered
from .sampler import NO_TOKEN, Likeliest, likeliest

log = logging.getLogger(__name__)

FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
SIZES = (*FEW, *range(288, 385, 32), 448, 512, 640, 704, 768, 896, 1024)  # tokens: from 256 on, products take longer with each of them
SPARE = 2.0  # room for larger plans than the one that a graph was captured with
WANTED = (0, 1, 8, 32, 128, 256, 512, 1024)  # tokens of a step with prompts whose logits are wanted: few kinds, there are so many mixtures
ROOM = 2 << 30  # bytes that are free when a graph is captured, if possible: what is kept for others cannot be taken back meanwhile
SEEN = 2  # times that a kind of step is met before it is captured
SEEN_WITH_PROMPTS = 4  # the same where prompts are computed: it may never come again
SEEN_BY_OTHERS = 50  # the same while graphs of other kinds can do it: those take a little longer, and a capture as long as ten steps
TRIES = 3  # graphs of other kinds that a step is offered to: whether one has room is known when a plan is cut for it
WARM = tuple(1 << power for power in range(SIZES[-1].bit_length()))  # tokens of steps that are captured before any comes,
WARM_SHARES = (1, 2, 16)  # of which so large a part decodes, and the rest is a prompt,
WARM_PROMPT = 16  # but for those of fewer tokens
WARM_CONTEXT = 4096  # tokens that each of their rows sees, half of them in common
SCARCE = 3  # times that graphs find no memory, or leave none, after which no more are captured: it would be so again

_one_at_a_time = threading.Lock()  # captures of several engines in one process: whoever waits for the device breaks those under way

Found = tuple[Tensor, Likeliest]  # logits, and what is likeliest by them: most steps ask for nothing else
Repeat = Callable[[], Found]


class Replaceable(Lowered, Protocol):
    @property
    def staged(self) -> Staged | None:
        """What `replace` has written; it is sent with the step's tokens."""
        ...

    def replace(self, reads: Reads, count: int) -> bool:
        """Takes another plan, for so many tokens, if there is room for it; it begins with the next step."""
        ...


class Kind(NamedTuple):
    """Steps that the same graph can do, if its buffers are large enough."""

    tokens: int
    wanted: int | None  # of whom the logits are; None: all
    launches: Hashable
    layered: bool  # what it reads may come layer by layer

    @property
    def told(self) -> int:
        """Rows of logits."""
        return self.tokens if self.wanted is None else self.wanted

    def does(self, other: "Kind") -> bool:
        """Can its graph do the other's steps, too, and in less time than they take one launch after the other?"""
        alike = self.layered == other.layered and (self.wanted is None) == (other.wanted is None)
        return alike and self.told >= other.told and other.tokens <= self.tokens <= max(FEW[-1], 2 * other.tokens)


class _Captured:
    """One kind of step: its buffers, and what repeats it."""

    def __init__(self, kind: Kind, logits: Tensor) -> None:
        self.kind = kind
        most = max(kind.tokens, kind.wanted or 0, 2)  # 2: so that each of them is aligned, as kernels are made
        numbers = torch.zeros(5, most, dtype=torch.int64, device=logits.device)
        self._staged = Staged(numbers)
        tokens, positions, slots, wanted, sources = numbers
        self.tokens, self.positions, self.slots = tokens[: kind.tokens], positions[: kind.tokens], slots[: kind.tokens]
        self.wanted, self.sources = None if kind.wanted is None else wanted[: kind.wanted], sources[: kind.tokens]
        self.logits = logits[: kind.told]
        self.lowering: Replaceable | None = None
        self.reads: Reads | None = None
        self._refused: Reads | None = None  # the last: there may be many steps of one plan
        self.repeat: Repeat | None = None

    def takes(self, reads: Reads) -> bool:
        """Can its graph read this, too?"""
        if reads is self.reads or reads is self._refused:
            return reads is self.reads
        self.reads = None  # half of a plan is none
        fits = self.lowering is not None and self.lowering.replace(reads, self.kind.tokens)
        self.reads, self._refused = (reads, None) if fits else (None, reads)
        return fits

    def fill(self, batch: Batch, scratch: int) -> None:
        """One copy for all of them, and for the plan."""
        host = self._staged.zeros()
        host[2], host[4] = scratch, NOWHERE  # what pads a step
        for place, numbers in enumerate(batch[:4]):
            host[place, : len(numbers)] = numbers
        fed = batch.fed
        if fed is not None and fed.sources is not None:
            host[4, : len(fed.sources)] = fed.sources
        self._staged.send(self.lowering.staged if self.lowering is not None else None)
        if fed is not None and fed.sources is None:
            self.tokens[: len(fed.tokens)].copy_(fed.tokens)
        elif fed is not None:
            self.tokens.copy_(fed.into(self.tokens, self.sources))


class Graphs:
    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        lower: Callable[[Reads, Tensor, float, Replaceable | None], Replaceable],
        launches: Callable[[Reads], Hashable],
        capture: Callable[[Callable[[], Found], bool], Repeat],
        find: Callable[[Tensor], Likeliest] = likeliest,
    ) -> None:
        """`lower` makes a plan ready, with so much spare room, and no less than one before had; `launches` names what a graph of it could
        do; `capture` makes of something that was done once what repeats it, at once or layer by layer; `find` tells what is likeliest."""
        self._decoder, self._pool, self._lower, self._launches, self._capture = decoder, pool, lower, launches, capture
        self._find = find
        self._captured: dict[Kind, _Captured] = {}
        # of all kinds: a step's are read before the next
        self._logits = torch.empty(0, decoder.config.vocab_size, dtype=decoder.embed.dtype, device=pool.k.device)
        self.likeliest: Likeliest | None = None  # of the last step
        self._met: Counter[Kind] = Counter()  # without a graph of its own that had room
        self._reads: Reads | None = None  # the last ones, and what they want
        self._kind: Hashable = None
        self._broken = False
        self._failures = 0
        self.captures = self.replays = 0

    def forward(self, batch: Batch, *, layered: bool = False, capture: bool = False) -> Tensor | None:
        """The logits of a step, if it is of a kind that was met before, or to be captured at once, and is small enough; then `likeliest` is
        known, too."""
        count, self.likeliest = len(batch.tokens), None
        if self._broken or not count or count > SIZES[-1]:
            return None
        if batch.reads is not self._reads:
            self._reads, self._kind = batch.reads, self._launches(batch.reads)
        decodes = len(batch.wanted) == count
        kind = Kind(_rounded(count, SIZES), None if decodes else _rounded(len(batch.wanted), WANTED), self._kind, layered)
        try:
            found = self._capture_anew(kind, batch, None) if capture else self._run(kind, batch)
        except RuntimeError as error:  # no memory, or a driver that cannot; but that one would never have captured any
            self._fail(" ".join(str(error).split())[:300])
            return None
        if found is None:
            return None
        logits, (tokens, told) = found
        wanted = len(batch.wanted)
        self.likeliest = tokens[:wanted], told[:wanted]
        return logits[:wanted]

    @torch.inference_mode()
    def warm_up(self, rows: int, tokens: int) -> None:
        """What finds the likeliest tokens is compiled: for one row, and for several, whose answers are aligned otherwise. Steps of up to so
        many rows and tokens are captured: those that come first need not be done one launch after the other."""
        for count in (1, 2):
            self._find(self._logits.new_zeros(count, self._logits.shape[1]))
        if not rows:
            return
        most = min(rows, tokens, SIZES[-1])  # that decode: a busy server does little else, and they need not be a power of two
        steps = {
            (min(size // share, most), min(size, tokens)): None
            for size, share in product(WARM, WARM_SHARES)
            if share == 1 or size >= WARM_PROMPT
        } | {(most, most): None}
        self._logits = self._logits.new_empty(power_of_two(_rounded(most, WANTED)), self._logits.shape[1])
        for decoding, count in steps:
            if not self._failures:  # those that come are captured anyway, if there is memory for them alone
                self.forward(self._imagined(decoding, count), capture=True)
        log.info(
            "captured %d kinds of steps, of up to %d tokens", len(self._captured), max((kind.tokens for kind in self._captured), default=0)
        )

    def _imagined(self, rows: int, count: int) -> Batch:
        """A step of so many rows that decode and a prompt of the other tokens. Its every page is the one that nobody reads."""
        size, half, where = self._pool.page_size, min(WARM_CONTEXT, self._decoder.config.max_positions) // 2, np.arange(count)

        def read(tokens: int, first: int, queries: Sequence[int]) -> tuple[list[int], int, int, Sequence[int], list[int]]:
            return [self._pool.scratch // size] * -(-tokens // size), tokens, first, queries, [0] * len(queries)

        own = [read(half, half, (row,)) for row in range(rows)]
        own += [read(count - rows, half, range(rows, count))] if count > rows else []
        return Batch(
            tokens=np.zeros_like(where),
            positions=half + np.where(where < rows, half - 1, (where - rows) % half),
            slots=np.full_like(where, self._pool.scratch),
            wanted=where[:rows],
            reads=joined(size, [read(half, 0, range(count)), *own], rows),  # hardly ever are all of the last pages full
        )

    def let_go(self) -> bool:
        """There is no memory for a step. Graphs keep theirs, of all kinds of steps that ever came: gives it back, and says whether there
        was any."""
        if held := bool(self._captured):
            self._fail("there is no memory for a step beside them")
        return held

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if self._captured and self._failures < SCARCE:
            log.warning("%d captured steps are let go, and captured anew when they come again: %s", len(self._captured), reason)
        else:
            self._broken = True
            log.warning("steps are not captured as graphs, which makes short ones slower: %s", reason)
        self._captured.clear()
        self._met.clear()
        self.likeliest = None
        self._logits = self._logits[:0].clone()

    def _run(self, kind: Kind, batch: Batch) -> Found | None:
        own = self._captured.get(kind)
        if own is not None and own.takes(batch.reads):
            return self._repeat(own, batch)
        self._met[kind] += 1
        if self._met[kind] < SEEN_BY_OTHERS and (other := self._other(kind, batch.reads)) is not None:
            return self._repeat(other, batch)
        if own is None and self._met[kind] < (SEEN if kind.wanted is None else SEEN_WITH_PROMPTS):
            return None
        del self._met[kind]
        return self._capture_anew(kind, batch, own)

    def _other(self, kind: Kind, reads: Reads) -> _Captured | None:
        """One that was captured for other steps, and can do these."""
        others = sorted(
            (other for other in self._captured if other != kind and other.does(kind)), key=lambda other: (other.tokens, other.told)
        )
        return next((entry for entry in map(self._captured.__getitem__, others[:TRIES]) if entry.takes(reads)), None)

    def _repeat(self, entry: _Captured, batch: Batch) -> Found:
        assert entry.repeat is not None
        entry.fill(batch, self._pool.scratch)
        self.replays += 1
        return entry.repeat()

    def _capture_anew(self, kind: Kind, batch: Batch, before: _Captured | None) -> Found:
        """Whoever had too little room before gets no less of anything: plans that come in turns would send each other away."""
        if len(self._logits) < kind.told:  # graphs that were captured before keep theirs: twice the room that the largest wants
            self._logits = self._logits.new_empty(power_of_two(kind.told), self._logits.shape[1])
        entry = _Captured(kind, self._logits)
        entry.fill(batch, self._pool.scratch)
        entry.reads, entry.lowering = batch.reads, self._lower(batch.reads, entry.positions, SPARE, before.lowering if before else None)
        logits, found = self._step(entry)
        logits = logits.clone()
        entry.repeat = self._capture(lambda: self._step(entry), kind.layered)
        self._captured[kind] = entry  # the one before goes only now: memory that no graph holds cannot be captured into again
        self.captures += 1
        return logits, found

    def _step(self, entry: _Captured) -> Found:
        assert entry.lowering is not None
        entry.lowering.begin(entry.positions)
        step = Step(entry.tokens, entry.positions, entry.slots, entry.wanted, entry.lowering.attend, entry.logits)
        logits = self._decoder.forward(step, self._pool)
        return logits, self._find(logits)


class _Cuts:
    """What is captured, cut where a layer is asked for."""

    def __init__(self, memory: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._memory = memory

    def __enter__(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")  # other threads move pages meanwhile

    def __exit__(self, *_: object) -> None:
        self.graphs[-1].capture_end()

    def wait(self, layer: int) -> None:
        self.__exit__()
        self.__enter__()


@contextmanager
def _kept() -> Iterator[None]:
    """Nothing is collected: it might be something whose end a capture cannot bear. To collect before takes longer than to capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def on_cuda(decoder: Decoder, pool: PagePool, dtype: torch.dtype) -> Graphs:
    from ..kernels import gpu, gpu_ops
    from ..kernels.gpu_tiles import sizes

    device, geometry = gpu.Device.of(pool.k.device), decoder.geometry
    stream, graphs = torch.cuda.Stream(pool.k.device), WeakSet[torch.cuda.CUDAGraph]()
    memory = torch.cuda.graph_pool_handle()  # one: what a graph let go serves the next

    def lower(reads: Reads, positions: Tensor, spare: float, before: Replaceable | None) -> Replaceable:
        kept = before if isinstance(before, gpu.TritonLowering) else None
        return gpu.TritonLowering(device, dtype, reads, positions, geometry, spare, kept)

    known: dict[bytes, Hashable] = {}

    def launches(reads: Reads) -> Hashable:
        form = reads.form
        if form is not None and (found := known.get(form)) is not None:
            return found
        if len(known) >= gpu.FORMS:
            known.clear()
        wanted = sizes(geometry, dtype, reads, device.processors), bool(reads.shifts.any())
        if form is not None:
            known[form] = wanted
        return wanted

    def capture(work: Callable[[], Found], layered: bool) -> Repeat:
        nonlocal memory
        with _one_at_a_time:
            torch.cuda.synchronize(device.where)
            if not graphs:  # all were let go, and memory that none holds cannot be captured into again
                memory = torch.cuda.graph_pool_handle()
            if torch.cuda.mem_get_info(device.where)[0] < ROOM:
                torch.cuda.empty_cache()
            cuts, waited = _Cuts(memory), pool.arrivals
            pool.arrivals = (cuts,) if layered else ()
            try:
                with torch.cuda.stream(stream), _kept(), cuts:
                    found = work()
            finally:
                pool.arrivals = waited
        graphs.update(cuts.graphs)
        first, *layers = cuts.graphs

        def repeat() -> Found:
            first.replay()
            for layer, graph in enumerate(layers):
                pool.reach(layer)
                graph.replay()
            return found

        return repeat

    return Graphs(decoder, pool, lower, launches, capture, partial(gpu_ops.likeliest, nothing=NO_TOKEN))


def _rounded(count: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, count)]
