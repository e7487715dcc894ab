"""A case in memory: pages that are physically shared, rows that read them, queries at their ends; and what is right, in fp64."""

import time
from statistics import median

import torch
from torch import Tensor

from ...engine.batch import reads_of
from ...kernels import reference
from ...kernels.reads import Reads
from ...kernels.reference import Geometry, Read
from ...kv.plan import ALWAYS, CostModel, Plan, RowView, plan
from ...kv.segment import Placement, Segment
from ...model.load import DTYPES
from .cases import DTYPES as SIZES
from .cases import Case

CHECKED = 8  # rows compared with fp64, where a case has more


def pool_bytes(case: Case, page_size: int) -> int:
    slots = sum(_pages(part.tokens, page_size) for part in case.segments) * page_size
    return 2 * slots * case.hkv * case.d * SIZES[case.dtype]


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


class Scene:
    """Every segment begins on a page of its own and lies in one piece, level by level: as a pool that had room to place them so."""

    def __init__(self, case: Case, page_size: int, device: torch.device) -> None:
        self.case, self.page_size, self.device = case, page_size, device
        self.geometry = Geometry(case.hq, case.hkv, case.d, case.d**-0.5)
        self.start = self._allot()  # first slot of each segment
        self.segments = [self._segment(index) for index in range(len(case.segments))]
        self.views = [self._view(row) for row in range(len(case.rows))]
        self.positions = torch.tensor([case.length(row) - 1 for row in range(len(case.rows))])  # on the host, as a step's are
        make = torch.Generator(device).manual_seed(0)
        shape, dtype = (pool_bytes(case, page_size) // (2 * case.hkv * case.d * SIZES[case.dtype]), case.hkv, case.d), DTYPES[case.dtype]
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device).normal_(generator=make) for _ in range(2))  # [S, K, D]
        self.q = torch.empty(len(case.rows), case.hq, case.d, dtype=dtype, device=device).normal_(generator=make)  # [R, H, D]

    def _allot(self) -> list[int]:
        case, start, slot = self.case, [0] * len(self.case.segments), 0
        alike = sorted(range(len(start)), key=lambda i: (case.depth[i], len(case.readers[i]), case.segments[i].tokens, i))
        for index in alike:
            start[index] = slot
            slot += _pages(case.segments[index].tokens, self.page_size) * self.page_size
        return start

    def pages(self, index: int) -> tuple[int, ...]:
        first = self.start[index] // self.page_size
        return tuple(range(first, first + _pages(self.case.segments[index].tokens, self.page_size)))

    def slots(self, index: int) -> Tensor:
        return self.start[index] + torch.arange(self.case.segments[index].tokens, device=self.device)

    def _segment(self, index: int) -> Segment:
        pages = self.pages(index)
        return Segment((b"",) * len(pages), (0,) * self.case.segments[index].tokens, pages, self.case.first[index])

    def _view(self, row: int) -> RowView:
        """A last segment that nobody else reads is the tail that the row is writing."""
        leaf = self.case.rows[row]
        *path, _ = self.case.path(leaf)
        if len(self.case.readers[leaf]) == 1:
            return RowView(tuple(Placement(self.segments[i]) for i in path), self.pages(leaf), self.case.first[leaf])
        return RowView(tuple(Placement(self.segments[i]) for i in (*path, leaf)), (), self.case.length(row))

    def plan(self, cost: CostModel) -> tuple[Plan, Reads]:
        found = plan(self.views, self.page_size, self.case.group, cost)
        tails = [self.case.segments[leaf].tokens for leaf, view in zip(self.case.rows, self.views, strict=True) if view.tail]
        unseen = sum(_pages(tokens, self.page_size) * self.page_size - tokens for tokens in tails)
        return found, reads_of(found, [1] * len(self.views), unseen)

    def plan_us(self, repeats: int) -> float:
        """To make the plan anew, as the engine does when a row joins, leaves or fills a page."""
        spent = []
        for _ in range(repeats):
            start = time.perf_counter()
            plan(self.views, self.page_size, self.case.group, ALWAYS)
            spent.append(time.perf_counter() - start)
        return median(spent) * 1e6

    def checked_rows(self) -> list[int]:
        count = len(self.case.rows)
        return list(range(count)) if count <= CHECKED else [i * (count - 1) // (CHECKED - 1) for i in range(CHECKED)]

    def truth(self, rows: list[int]) -> Tensor:
        """What these rows must find, by the definition, in fp64."""
        reads = []
        for index, readers in enumerate(self.case.readers):
            mine = torch.tensor([place for place, row in enumerate(rows) if row in readers], dtype=torch.int64, device=self.device)
            if len(mine):
                reads.append(Read(self.slots(index), self.case.first[index], mine, torch.zeros_like(mine)))
        at = self.positions[rows].to(self.device)
        return reference.attend(self.q[rows].double(), self.k, self.v, reads, at, self.geometry)
