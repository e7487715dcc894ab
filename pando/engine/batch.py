"""From a schedule to the tensors of a step.

When the same rows decode on in the same pages, the lowered plan of the last step still holds: only tokens, positions and slots move on.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import reference
from ..kernels.cpu import Lowering
from ..kernels.native import Dense, Library, NativeLowering, supports
from ..kernels.ops import Attend
from ..kernels.reads import Reads
from ..kernels.reference import Geometry
from ..kv.plan import DEFAULT, CostModel, Plan, plan, ranges
from ..model.decoder import Step
from ..model.load import Model
from .across import sent
from .row import Row, Schedule

log = logging.getLogger(__name__)

Numbers = NDArray[np.int64]
NOWHERE = -1


class Lowered(Protocol):
    """Reads made ready for a device: `begin` each step, then `attend` in each layer."""

    def begin(self, positions: Tensor) -> None: ...
    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


Lower = Callable[[Reads, Tensor, Geometry], Lowered]


def lowering_of(model: Model, page_size: int, *, use_reference: bool = False) -> Lower | None:
    """The fastest path that the model's device has. None: the definition itself."""
    if use_reference:
        return None
    if model.device.type == "cpu" and model.states != model.dtype:
        log.warning("no kernel of a CPU reads keys and values in fp8: the slow definition does; use --kv-dtype auto, or a GPU")
        return None
    return lowering_for(model.device, model.dtype, model.decoder.geometry, page_size, model.library, model.states)


def lowering_for(
    device: torch.device,
    dtype: torch.dtype,
    geometry: Geometry,
    page_size: int,
    library: Library | None,
    states: torch.dtype | None = None,
) -> Lower | None:
    """`states`: what K and V are held in, if not in the model's dtype."""
    if device.type != "cpu":
        return _on_gpu(device, dtype, geometry, page_size, states)
    if library is not None and supports(geometry):
        return partial(NativeLowering, library, Dense.measure(library, geometry))
    return Lowering


def _on_gpu(device: torch.device, dtype: torch.dtype, geometry: Geometry, page_size: int, states: torch.dtype | None) -> Lower | None:
    try:
        from ..kernels import gpu
        from ..kernels.gpu_tiles import unsupported

        reason = unsupported(geometry, page_size)
        if reason is None:
            gpu.probe(gpu.Device.of(device), dtype, geometry, page_size, states)
            return partial(gpu.TritonLowering, gpu.Device.of(device), dtype)
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    except Exception as error:  # a compiler and a driver raise whatever they like
        reason = f"a first try failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    log.warning("Pando's own GPU kernels are not used, the slow definition is: %s", reason)
    return None


@torch.inference_mode()
def warm_up(model: Model, page_size: int) -> None:
    """On a GPU, makes the kernels that plans of any kind need: the first time that takes a while, and later they are found on disk."""
    if model.device.type == "cuda":
        from ..kernels import gpu, gpu_linear, gpu_warm

        layer, facts = model.decoder.layers[0], model.config
        for rows in (*gpu_linear.ROWS, *gpu_linear.TILED):  # those of gates and with a bias: the others were made when they were timed
            x, attended = (
                torch.zeros(rows, size, dtype=model.dtype, device=model.device)
                for size in (facts.hidden_size, facts.heads * facts.head_dim)
            )
            layer.qkv(x), layer.o(attended), layer.mlp(x)
        gpu_warm.warm_up(gpu.Device.of(model.device), model.dtype, model.decoder.geometry, page_size, model.states)


def reads_of(plan: Plan, counts: Sequence[int], unseen: int = 0) -> Reads:
    """A plan's reads for rows that bring so many tokens each: rows become their tokens."""
    rows, row_starts, shifts = plan.rows, plan.row_starts, plan.shifts
    most = max(counts, default=1)
    if most > 1 and len(counts) == 1:  # it has all reads to itself
        rows, row_starts, shifts = np.arange(most * len(plan), dtype=np.int32) % most, row_starts * most, shifts.repeat(most)
    elif most > 1:
        brought = np.array(counts)
        each = brought[rows]
        rows = ranges((brought.cumsum() - brought)[rows], each).astype(np.int32)
        row_starts = np.concatenate(([0], each.cumsum()))[row_starts].astype(np.int32)
        shifts = shifts.repeat(each)
    return Reads(plan.page_size, plan.pages, plan.page_starts, plan.tokens, plan.first, rows, row_starts, shifts, unseen)


class Unread(NamedTuple):
    """Rows whose last token was chosen on the device, and is not known here yet."""

    rows: Sequence[Row]
    tokens: Tensor  # those, in the same order

    @property
    def is_bound(self) -> bool:
        """Must they be known before more are chosen? A grammar tells only then what may come."""
        return any(row.constraint is not None for row in self.rows)


class Fed(NamedTuple):
    """Tokens of a step that are not known on the host."""

    tokens: Tensor  # on the device
    sources: Numbers | None  # for each token of the step its place among these, or NOWHERE; None: they are all, in order

    def into(self, known: Tensor, sources: Tensor) -> Tensor:
        return torch.where(sources == NOWHERE, known, self.tokens[sources.clamp(min=0)])


class Batch(NamedTuple):
    """One step, on the host."""

    tokens: Numbers
    positions: Numbers
    slots: Numbers  # where each token's K and V are written
    wanted: Numbers  # the tokens whose logits are wanted: the last of rows that have caught up, all of one whose prompt is scored
    reads: Reads
    fed: Fed | None = None


class Batcher:
    """Makes steps. Counts what it plans, so that a test can tell that it plans no more than it must."""

    def __init__(self, geometry: Geometry, page_size: int, device: torch.device, lower: Lower | None, *, cost: CostModel = DEFAULT) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.device = device
        self.lower = lower  # None: the definition itself
        self.cost = cost
        self.plan = plan((), page_size)
        self.plans_made = 0
        none = np.zeros(0, dtype=np.int64)
        self._batch = Batch(none, none, none, none, reads_of(self.plan, ()))  # the last one
        self._ready: Reads | None = None  # the reads that are lowered
        self._lowering: Lowered | None = None
        self._reads: list[reference.Read] = []

    def prepare(self, schedule: Schedule, unread: Unread | None = None) -> Batch:
        """The tokens of a step and what they read: the same reads as long as the plan holds."""
        made = self._next(schedule, unread) if schedule.follows else self._anew(schedule, unread)
        if schedule.changed:
            self.plans_made += 1
            group = self.geometry.heads // self.geometry.kv_heads
            self.plan = plan([row.view(self.page_size) for row in schedule.rows], self.page_size, group, self.cost)
            room = self.page_size * sum(len(row.pages) for row in schedule.rows)
            unseen = room - int(np.add.reduce(schedule.starts)) - sum(schedule.counts)
            made = made._replace(reads=reads_of(self.plan, schedule.counts, unseen))
        self._batch = made
        return made

    def _next(self, schedule: Schedule, unread: Unread | None) -> Batch:
        """Every row has gone on by one token, to the next slot of its page or the first one of another."""
        last, size, rows, starts = self._batch, self.page_size, schedule.rows, schedule.starts
        slots = last.slots + 1
        for place in np.flatnonzero(starts % size == 0).tolist():
            slots[place] = rows[place].pages[int(starts[place]) // size] * size
        tokens = np.array([row.tokens[-1] for row in rows]) if unread is None else last.tokens
        fed = None if unread is None else Fed(unread.tokens, None)
        return last._replace(tokens=tokens, positions=last.positions + 1, slots=slots, fed=fed)

    def _anew(self, schedule: Schedule, unread: Unread | None) -> Batch:
        rows, size, ready = schedule.rows, self.page_size, set(schedule.ready)
        tokens, wanted, moves, behind = list[int](), list[int](), list[int](), list[int]()
        for row, start, count in zip(rows, schedule.starts.tolist(), schedule.counts, strict=True):
            stop, end = start + count, len(tokens) + count
            tokens += row.tokens[start:stop] or (0,)  # or one that is unread
            if row.is_scored_from(start):
                wanted += range(end - count, end)
            elif row in ready:
                wanted.append(end - 1)
            first = start // size  # of the pages that it writes to
            behind.append(len(moves) - first)
            moves += [(page - place) * size for place, page in enumerate(row.pages[first : -(-stop // size)], first)]
        counts = np.array(schedule.counts)
        places = ranges(schedule.starts, counts)  # among the row's own tokens
        return Batch(
            tokens=np.array(tokens),
            positions=places + np.array([row.at for row in rows]).repeat(counts),
            slots=places + np.array(moves)[np.array(behind).repeat(counts) + places // size],
            wanted=np.array(wanted, dtype=np.int64),
            reads=self._batch.reads,
            fed=None if unread is None else Fed(unread.tokens, _sources(rows, counts, unread.rows)),
        )

    def step(self, batch: Batch) -> Step:
        """The same, made ready for a device."""
        tokens, positions, slots, wanted = (sent(numbers, self.device) for numbers in batch[:4])
        if batch.fed is not None:
            sources = batch.fed.sources
            tokens = batch.fed.tokens if sources is None else batch.fed.into(tokens, sent(sources, self.device))
        return Step(tokens=tokens, positions=positions, slots=slots, wanted=wanted, attend=self._lowered(batch.reads, positions))

    def _lowered(self, reads: Reads, at: Tensor) -> Attend:
        if reads is self._ready:
            if self._lowering is not None:
                self._lowering.begin(at)
        elif self.lower is not None:
            self._lowering = self.lower(reads, at, self.geometry)
        else:
            self._reads = [self._put(read) for read in reads.each()]
        self._ready = reads
        return self._attend(at)

    def falls_back(self, error: BaseException) -> bool:
        """Does the definition take the place of kernels that could not do a step? Of some shapes a compiler says so only when they come."""
        if self.lower is None or not type(error).__module__.startswith("triton"):
            return False
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        log.warning("Pando's own GPU kernels of attention could not do a step; from now on the slow definition does them: %s", reason)
        self.lower = self._lowering = self._ready = None
        return True

    def _put(self, read: reference.Read) -> reference.Read:
        slots, queries, shifts = (numbers.to(self.device) for numbers in (read.slots, read.queries, read.shifts))
        return reference.Read(slots, read.first, queries, shifts)

    def _attend(self, at: Tensor) -> Attend:
        if self._lowering is not None:
            return self._lowering.attend
        reads, geometry = self._reads, self.geometry
        return lambda q, turned, k, v: reference.attend(q, k, v, reads, at, geometry)


def _sources(rows: Sequence[Row], counts: Numbers, unread: Sequence[Row]) -> Numbers:
    place = {row: i for i, row in enumerate(unread)}
    sources = np.full(counts.sum(), NOWHERE)
    sources[np.cumsum(counts) - 1] = [place.get(row, NOWHERE) for row in rows]
    return sources
