"""The CPU path against the definition, over random plans; and the definition against plain softmax."""

import math
import random

import pytest
import torch

from pando.kernels import reference
from pando.kernels.cpu import Lowering
from pando.kernels.reference import Geometry, Read, alibi_slopes, merge, partial
from pando.kernels.rope import frequencies, rotate, turns

PAGE = 4


class Case:
    """Rows over shared runs, some of them moved, and their own tails; pages in order or scattered."""

    def __init__(self, seed: int, positions: str, dtype: torch.dtype = torch.float32, decoding: bool = False) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        kv_heads, group, size = self.random.choice([1, 2, 3]), self.random.choice([1, 3, 4, 7]), self.random.choice([16, 64])
        self.k, self.v = (torch.randn(500 * PAGE, kv_heads, size).to(dtype) for _ in range(2))
        freqs = frequencies(size, 1e4)[0] if positions == "rope" else None
        slopes = alibi_slopes(kv_heads * group) if positions == "alibi" else None
        self.geometry = Geometry(kv_heads * group, kv_heads, size, size**-0.5, freqs, 1.0, slopes)
        self.dtype = dtype
        self.free = list(range(500))
        if self.random.random() < 0.5:
            self.random.shuffle(self.free)
        self.counts = [1 if decoding else self.random.choice([1, 1, 5, 9]) for _ in range(self.random.randint(1, 9))]
        self.reads: list[Read] = []
        self.moves = False
        bases = self._share([0] * len(self.counts))
        self.positions = self._tails(bases)

    def _slots(self, tokens: int) -> torch.Tensor:
        pages = [self.free.pop(0) for _ in range(-(-tokens // PAGE))]
        return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)][:tokens], dtype=torch.int64)

    def _queries(self, row: int) -> list[int]:
        start = sum(self.counts[:row])
        return list(range(start, start + self.counts[row]))

    def _share(self, bases: list[int]) -> list[int]:
        for _ in range(self.random.randint(0, 3)):
            tokens = self.random.choice([1, 3, 4, 5, 40])
            readers = [row for row in range(len(self.counts)) if self.random.random() < 0.7]
            queries, shifts = [], []
            for row in readers:
                shift = bases[row] + self.random.choice([0, 0, 5])
                self.moves = self.moves or shift > 0
                bases[row] = shift + tokens
                queries += self._queries(row)
                shifts += [shift] * self.counts[row]
            who, moved = (torch.tensor(numbers, dtype=torch.int64) for numbers in (queries, shifts))
            self.reads.append(Read(self._slots(tokens), 0, who, moved))
        return bases

    def _tails(self, bases: list[int]) -> torch.Tensor:
        positions = []
        for row, base in enumerate(bases):
            before = self.random.choice([0, 3, 4, 11, 300])
            slots = self._slots(before + self.counts[row] + 4)
            self.v[slots[before + self.counts[row] :]] = 1e4  # not written yet: must not be seen
            queries = torch.tensor(self._queries(row))
            self.reads.append(Read(slots, base, queries, torch.zeros_like(queries)))
            positions += range(base + before, base + before + self.counts[row])
        return torch.tensor(positions)

    def check(self, lowering: Lowering, positions: torch.Tensor, tolerance: float) -> None:
        geometry = self.geometry
        q = torch.randn(len(positions), geometry.heads, geometry.head_dim).to(self.dtype)
        turned = q if geometry.freqs is None else rotate(q, turns(positions, geometry.freqs))
        exact = reference.attend(q.double(), self.k.double(), self.v.double(), self.reads, positions, geometry)
        lowering.begin(positions)
        out = lowering.attend(q, turned, self.k, self.v)
        assert out.dtype == self.dtype
        assert (out.double() - exact).abs().max() < tolerance


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_the_cpu_path_equals_the_definition_over_random_plans(positions: str) -> None:
    moved = 0
    for seed in range(60):
        case = Case(seed, positions)
        moved += case.moves
        case.check(Lowering(case.reads, case.positions, case.geometry), case.positions, 3e-5)
    assert moved > 10, "too few of the plans placed a segment elsewhere"


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_a_lowering_serves_the_steps_that_follow(positions: str) -> None:
    for seed in range(30):
        case = Case(seed, positions, decoding=True)
        lowering = Lowering(case.reads, case.positions, case.geometry)
        for step in range(3):
            for read in case.reads[-len(case.counts) :]:  # what the last step wrote
                at = int(case.positions[read.queries[0]]) + step - read.first
                case.v[read.slots[at]] = torch.randn(case.v.shape[1:])
            case.check(lowering, case.positions + step, 3e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.008)])
def test_sixteen_bits_stay_within_their_rounding(dtype: torch.dtype, tolerance: float) -> None:
    for seed in range(10):
        case = Case(seed, "rope", dtype)
        case.check(Lowering(case.reads, case.positions, case.geometry), case.positions, tolerance)


def test_a_shifted_segment_reads_as_if_it_had_been_stored_there() -> None:
    geometry = Geometry(4, 2, 16, 0.25, frequencies(16, 1e4)[0])
    raw, v = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    assert geometry.freqs is not None
    here, there = (rotate(raw, turns(torch.arange(8) + start, geometry.freqs)) for start in (0, 100))
    q, at = torch.randn(1, 4, 16), torch.tensor([120])
    slots, query = torch.arange(8), torch.tensor([0])
    moved = reference.attend(q, here, v, [Read(slots, 0, query, torch.tensor([100]))], at, geometry)
    stored = reference.attend(q, there, v, [Read(slots, 100, query, torch.tensor([0]))], at, geometry)
    unmoved = reference.attend(q, here, v, [Read(slots, 0, query, torch.tensor([0]))], at, geometry)
    assert torch.allclose(moved, stored, atol=1e-5)
    assert not torch.allclose(moved, unmoved, atol=1e-2)


def test_partial_results_merge_to_the_whole_in_any_order() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    none = torch.zeros(3, 1, 12)
    whole, whole_lse = partial(q, k, v, 0.5, none)
    cuts = [(0, 5), (5, 6), (6, 12)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        out, lse = torch.zeros_like(whole), torch.full(whole_lse.shape, -math.inf)
        for index in order:
            a, b = cuts[index]
            out, lse = merge(out, lse, *partial(q, k[a:b], v[a:b], 0.5, none[..., a:b]))
        assert torch.allclose(out, whole, atol=1e-6)
        assert torch.allclose(lse, whole_lse, atol=1e-6)


def test_the_whole_is_softmax() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(12, 4, 8), torch.randn(12, 4, 8)
    out, lse = partial(q, k, v, 0.5, torch.zeros(3, 1, 12))
    scores = torch.einsum("mhd,nhd->mhn", q, k) * 0.5
    assert torch.allclose(out, torch.einsum("mhn,nhd->mhd", scores.softmax(-1), v), atol=1e-6)
    assert torch.allclose(lse, scores.exp().sum(-1).log(), atol=1e-5)  # natural logarithm, [T, H]


def test_nothing_merged_with_nothing_is_nothing() -> None:
    out, lse = merge(torch.zeros(1, 2, 4), torch.full((1, 2), -math.inf), torch.zeros(1, 2, 4), torch.full((1, 2), -math.inf))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_a_read_without_keys_or_readers_changes_nothing() -> None:
    case = Case(3, "rope")
    nobody = Read(torch.arange(4), 0, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    nothing = Read(torch.empty(0, dtype=torch.int64), 0, torch.tensor([0]), torch.tensor([0]))
    case.reads += [nobody, nothing]
    case.check(Lowering(case.reads, case.positions, case.geometry), case.positions, 3e-5)


def test_the_slopes_of_a_power_of_two_are_a_geometric_series() -> None:
    assert torch.allclose(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
