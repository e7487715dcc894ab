"""From a schedule to the tensors of a step.

When the same rows decode on in the same pages, the lowered plan of the last step still holds: only tokens, positions and slots move on.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import reference
from ..kernels.cpu import Lowering
from ..kernels.native import Dense, NativeLowering, supports
from ..kernels.reference import Geometry
from ..kv.plan import Plan, plan
from ..model.decoder import Attend, Step
from ..model.load import Model
from .scheduler import Row, Schedule

log = logging.getLogger(__name__)

Numbers = NDArray[np.int64]


class Lowered(Protocol):
    """Reads made ready for a device: `begin` each step, then `attend` in each layer."""

    def begin(self, positions: Tensor) -> None: ...
    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


Lower = Callable[[Sequence[reference.Read], Tensor, Geometry], Lowered]


def lowering_of(model: Model, *, use_reference: bool = False) -> Lower | None:
    """The fastest path that the model's device has."""
    if use_reference:
        return None
    geometry = model.decoder.geometry
    if model.device.type != "cpu":
        return _on_gpu(model.device, geometry)
    if model.library is not None and supports(geometry):
        return partial(NativeLowering, model.library, Dense.measure(model.library, geometry))
    return Lowering


def _on_gpu(device: torch.device, geometry: Geometry) -> Lower | None:
    try:
        from ..kernels import triton

        if triton.supports(geometry):
            return partial(triton.TritonLowering, device)
        reason = f"they are not made for {geometry.heads // geometry.kv_heads} queries per key head of {geometry.head_dim}"
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    log.warning("Pando's own GPU kernels are not used, the slow definition is: %s", reason)
    return None


class Batcher:
    """Makes steps. Counts what it plans, so that a test can tell that it plans no more than it must."""

    def __init__(self, geometry: Geometry, page_size: int, device: torch.device, lower: Lower | None) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.device = device
        self.lower = lower  # None: the definition itself
        self.plan = Plan((), ())
        self.plans_made = 0
        self._lowering: Lowered | None = None
        self._reads: list[reference.Read] = []

    def step(self, schedule: Schedule) -> Step:
        rows, counts = schedule.rows, schedule.counts
        positions = np.concatenate([np.arange(row.computed, row.computed + count) for row, count in zip(rows, counts, strict=True)])
        tokens = [token for row, count in zip(rows, counts, strict=True) for token in row.tokens[row.computed : row.computed + count]]
        at = torch.from_numpy(positions)
        attend = self._plan(schedule, at) if schedule.changed else self._again(at)
        return Step(
            tokens=torch.tensor(tokens, device=self.device),
            positions=at.to(self.device),
            slots=torch.from_numpy(self._slots(rows, positions, counts)).to(self.device),
            wanted=torch.tensor(_wanted(rows, counts), dtype=torch.int64, device=self.device),
            attend=attend,
        )

    def _slots(self, rows: Sequence[Row], positions: Numbers, counts: Sequence[int]) -> Numbers:
        size = self.page_size
        pages = [row.pages[p // size] for row, count in zip(rows, counts, strict=True) for p in range(row.computed, row.computed + count)]
        return np.array(pages) * size + positions % size

    def _plan(self, schedule: Schedule, at: Tensor) -> Attend:
        self.plans_made += 1
        group = self.geometry.heads // self.geometry.kv_heads
        self.plan = plan([row.view(self.page_size) for row in schedule.rows], self.page_size, group)
        self._reads = self._lower(schedule.counts)
        if self.lower is not None:
            self._lowering = self.lower(self._reads, at, self.geometry)
        return self._attend(at)

    def _again(self, at: Tensor) -> Attend:
        if self._lowering is not None:
            self._lowering.begin(at)
        return self._attend(at)

    def _attend(self, at: Tensor) -> Attend:
        if self._lowering is not None:
            return self._lowering.attend
        reads, geometry, at = self._reads, self.geometry, at.to(self.device)
        return lambda q, turned, k, v: reference.attend(q, k, v, reads, at, geometry)

    def _lower(self, counts: Sequence[int]) -> list[reference.Read]:
        """Rows become the queries they bring, pages become slots."""
        ends = np.cumsum(counts)
        offsets = np.arange(self.page_size)
        reads = []
        for read in self.plan.reads:
            slots = (np.array(read.pages)[:, None] * self.page_size + offsets).reshape(-1)[: read.tokens]
            queries = np.concatenate([np.arange(ends[row] - counts[row], ends[row]) for row in read.rows])
            shifts = np.repeat(np.array(read.shifts), [counts[row] for row in read.rows])
            reads.append(reference.Read(self._tensor(slots), read.first, self._tensor(queries), self._tensor(shifts)))
        return reads

    def _tensor(self, numbers: Numbers) -> Tensor:
        """A path lowers reads on the host; the definition takes them as they are."""
        found = torch.from_numpy(numbers)
        return found.to(self.device) if self.lower is None else found


def _wanted(rows: Sequence[Row], counts: Sequence[int]) -> list[int]:
    """The last token of each row that has caught up; every token of one whose prompt is scored."""
    wanted: list[int] = []
    end = 0
    for row, count in zip(rows, counts, strict=True):
        end += count
        if row.scored is not None:
            wanted += range(end - count, end)
        elif row.computed + count == len(row.tokens):
            wanted.append(end - 1)
    return wanted
