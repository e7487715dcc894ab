"""The CPU paths against the definition, over random plans; and the definition against plain softmax."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from pando.kernels import native, reference
from pando.kernels.cpu import Lowering, Run, Square
from pando.kernels.native import DENSE_QUERIES, DENSE_SQUARE, Dense, NativeLowering, supports
from pando.kernels.reads import Reads, joined
from pando.kernels.reference import Geometry, Read, alibi_slopes, merge, partial
from pando.kernels.rope import frequencies, rotate, turns

from ..tiny import native_library

PAGE, SLOTS = 4, 9600
SOME, MANY = DENSE_QUERIES + 4, DENSE_SQUARE + 6  # so many queries are handed to torch's kernel: at least a run, and both
WAYS = (Dense(), Dense(columns=False), Dense(True, True), Dense(True, False), Dense(False, True))
PATHS = {"torch": None} | {f"native, {dense}": dense for dense in WAYS}

Numbers = list[int]
Parts = list[tuple[Sequence[int], int, int, Sequence[int], Sequence[int]]]  # as `joined` takes them


def tolerance(dtype: torch.dtype) -> float:
    """A result is rounded a few times; sums over hundreds of keys, and angles of hundreds of turns, are fp32."""
    return max(8 * torch.finfo(dtype).eps, 256 * torch.finfo(torch.float32).eps)


class Case:
    """Rows over shared runs, some of them moved, and their own tails; pages in order or scattered. What was never written is NaN. `shape`:
    queries for each key head, the size of a head, and how many key heads there are, if not one."""

    def __init__(
        self,
        seed: int,
        positions: str,
        dtype: torch.dtype = torch.float32,
        decoding: bool = False,
        shape: tuple[int, ...] | None = None,
        tails: tuple[int, ...] = (0, 3, 4, 11, 63, 64, 65, 300),
        rows: int | None = None,
        page: int = PAGE,
    ) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        kv_heads = self.random.choice([1, 2, 3]) if shape is None else (*shape, 1)[2]
        group, size = shape[:2] if shape is not None else (self.random.choice([1, 3, 4, 7, 8]), self.random.choice([16, 64]))
        self.k, self.v = (torch.full((SLOTS, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2))
        freqs = frequencies(size, 1e4)[0] if positions == "rope" else None
        slopes = alibi_slopes(kv_heads * group) if positions == "alibi" else None
        self.geometry = Geometry(kv_heads * group, kv_heads, size, size**-0.5, freqs, 1.0, slopes)
        self.dtype, self.lengths = dtype, tails
        self.page, self.free = page, list(range(SLOTS // page))
        if self.random.random() < 0.5:
            self.random.shuffle(self.free)
        rows = rows or self.random.choice([1, 2, 3, 5, 9])
        self.counts = [1 if decoding else self.random.choice([1, 1, 5, SOME, MANY]) for _ in range(rows)]
        self._reads: Parts = []
        self.moves = False
        bases = self._share([0] * len(self.counts))
        self.positions = self._tails(bases)

    def write(self, slots: torch.Tensor) -> None:
        for pool in (self.k, self.v):
            pool[slots] = torch.randn(len(slots), *pool.shape[1:]).to(self.dtype)

    @property
    def reads(self) -> Reads:
        return joined(self.page, self._reads)

    def add(self, tokens: int, first: int, queries: Sequence[int], shifts: Sequence[int]) -> torch.Tensor:
        """A read of pages that nobody has; answers its slots."""
        pages = [self.free.pop(0) for _ in range(-(-tokens // self.page))]
        self._reads.append((pages, tokens, first, queries, shifts))
        return torch.tensor([page * self.page + i for page in pages for i in range(self.page)][:tokens], dtype=torch.int64)

    def _queries(self, row: int) -> range:
        start = sum(self.counts[:row])
        return range(start, start + self.counts[row])

    def _share(self, bases: Numbers) -> Numbers:
        for _ in range(self.random.randint(0, 3)):
            tokens = self.random.choice([1, 3, 4, 5, 40])
            readers = [row for row in range(len(self.counts)) if self.random.random() < 0.8]
            queries, shifts = [], []
            for row in readers:
                shift = bases[row] + self.random.choice([0, 0, 5])
                self.moves = self.moves or shift > 0
                bases[row] = shift + tokens
                queries += self._queries(row)
                shifts += [shift] * self.counts[row]
            self.write(self.add(tokens, 0, queries, shifts))
        return bases

    def _tails(self, bases: Numbers) -> torch.Tensor:
        positions = []
        for row, base in enumerate(bases):
            before = self.random.choice(self.lengths)
            slots = self.add(before + self.counts[row] + 4, base, self._queries(row), [0] * self.counts[row])
            self.write(slots[: before + self.counts[row]])
            positions += range(base + before, base + before + self.counts[row])
        return torch.tensor(positions)

    def lower(self, dense: Dense | None) -> Lowering | NativeLowering:
        plan = self.reads, self.positions, self.geometry
        return Lowering(*plan) if dense is None else NativeLowering(native_library(self.dtype), dense, *plan)

    def paths(self) -> dict[str, Lowering | NativeLowering]:
        return {name: self.lower(dense) for name, dense in PATHS.items()}

    def by_tiles(self) -> dict[str, Lowering | NativeLowering]:
        """Tile instructions as this machine has them, and as they are defined."""
        plan = self.reads, self.positions, self.geometry
        libraries = {"here": native_library(self.dtype), "defined": native_library(self.dtype, "-DTILES_IN_C")}
        return {name: NativeLowering(library, Dense(), *plan) for name, library in libraries.items()}

    def check(self, paths: dict[str, Lowering | NativeLowering], positions: torch.Tensor) -> None:
        geometry = self.geometry
        q = torch.randn(len(positions), geometry.heads, geometry.head_dim).to(self.dtype)
        turned = q if geometry.freqs is None else rotate(q, turns(positions, geometry.freqs))
        exact = reference.attend(q.double(), self.k, self.v, self.list, positions, geometry)  # as wide as the queries are
        assert exact.isfinite().all()
        for name, lowering in paths.items():
            out = poisoned(lowering, positions, q, turned, self.k, self.v)
            assert out.dtype == self.dtype
            assert (out.double() - exact).abs().max() < tolerance(self.dtype), name

    @property
    def list(self) -> Sequence[Read]:
        """As the definition takes them."""
        return [*self.reads.each()]


def poisoned(lowering: Lowering | NativeLowering, positions: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """A step, in which whatever it is about to write holds NaN before."""
    if isinstance(lowering, NativeLowering):
        for result in (lowering._parts, lowering._peaks, lowering._sums, lowering._out, lowering._queries):
            result.fill_(torch.nan)
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        lowering.begin(positions)
        return lowering.attend(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)


def handed_over(path: Lowering | NativeLowering) -> set[type]:
    """What the native path leaves to torch's kernel."""
    assert isinstance(path, NativeLowering)
    return {type(part) for part, _ in path._dense}


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_every_cpu_path_equals_the_definition_over_random_plans(positions: str) -> None:
    moved, dense = 0, {name: set[type]() for name in PATHS}
    for seed in range(50):
        case = Case(seed, positions)
        moved += case.moves
        paths = case.paths()
        case.check(paths, case.positions)
        for name in PATHS.keys() - {"torch"}:
            dense[name] |= handed_over(paths[name])
    assert moved > 10, "too few of the plans placed a segment elsewhere"
    for name, choice in PATHS.items():
        assert choice is None or dense[name] == {kind for kind, chosen in ((Run, choice.runs), (Square, choice.squares)) if chosen}


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 40])
def test_every_cpu_path_takes_heads_of_every_shape(group: int) -> None:
    for size in (16, 64, 80, 128, 256):
        for positions in ("rope", "alibi"):
            case = Case(group + size, positions, shape=(group, size), tails=(0, 11, 64))
            assert supports(case.geometry)
            case.check(case.paths(), case.positions)


@pytest.mark.parametrize(("queries", "told_apart"), [(1, False), (40, True)])
def test_queries_are_lanes_only_where_there_are_many(queries: int, told_apart: bool) -> None:
    """Sums are then taken in another order: equal to the last bit would be the same way."""
    k, v, q = torch.randn(3, 128, 1, 64)
    reads, at = joined(128, [([0], 128, 0, range(queries), [0] * queries)]), torch.full((queries,), 128)
    one, other = (NativeLowering(native_library(), dense, reads, at, Geometry(1, 1, 64, 0.125)) for dense in WAYS[:2])
    assert torch.equal(one.attend(q, q, k, v), other.attend(q, q, k, v)) != told_apart


@pytest.mark.parametrize("width", [4, 8])
def test_vectors_as_other_machines_have_them_give_the_same(width: int) -> None:
    for seed in range(16):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        case = Case(seed, ("rope", "alibi")[seed // 2 % 2], dtype, shape=((1, 3, 8)[seed % 3], (64, 80, 96)[seed // 3 % 3]))
        library, plan = native_library(dtype, f"-DWIDTH={width}"), (case.reads, case.positions, case.geometry)
        case.check({str(dense): NativeLowering(library, dense, *plan) for dense in WAYS[:2]}, case.positions)


@pytest.mark.parametrize("dense", PATHS.values(), ids=PATHS.keys())
def test_many_keys_that_weigh_the_same_are_added_up_well(dense: Dense | None) -> None:
    """A sum that took in one after the other would round each of them alike. Half of the values are the same, too."""
    tokens, count, size = 1 << 17, DENSE_QUERIES, 68
    torch.manual_seed(0)
    v, q = torch.randn(tokens, 1, size) + 1, torch.randn(count, 1, size)
    v[..., ::2] = 1
    k = (torch.randn(size) / 4).expand(tokens, 1, size).clone()
    k[0] = 0  # weighs 1, and they something else
    plan = joined(tokens, [([0], tokens, 0, range(count), [0] * count)]), tokens + torch.arange(count), Geometry(1, 1, size, 0.125)
    lowering = Lowering(*plan) if dense is None else NativeLowering(native_library(), dense, *plan)
    out, exact = lowering.attend(q, q, k, v), reference.attend(q.double(), k, v, [*plan[0].each()], *plan[1:])
    assert (out - exact).abs().max() < tolerance(torch.float32) / 2


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_attention_by_tiles_equals_the_definition(positions: str) -> None:
    for seed in range(12):
        case = Case(seed, positions, torch.bfloat16, shape=((1, 3, 8)[seed % 3], (32, 64, 80, 96, 128, 256)[seed // 2]))
        case.check(case.by_tiles(), case.positions)


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (3, 20), (5, 8), (9, 1)])  # as many as there are, two groups each, a rest behind
@pytest.mark.usefixtures("few_threads")
def test_heads_that_are_looked_at_together_find_what_each_does_alone(
    kv_heads: int, group: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block all of them have their turn; modules that follow each other, moved and not, and rows of their own."""
    monkeypatch.setattr(native, "TILE_KEYS", 64)
    for seed, positions in enumerate(("rope", "alibi")):
        case = Case(seed, positions, torch.bfloat16, shape=(group, size, kv_heads), tails=(1, 64, 300), rows=3)
        case._reads.clear()
        case.counts = [5, 1, 1]
        bases = [0, 0, 0]
        for length, readers in ((130, 3), (64, 3), (190, 2), (31, 2)):
            shifts = [base + (4 if length == 190 else 0) for base in bases[:readers]]
            bases[:readers] = [shift + length for shift in shifts]
            queries = [query for row in range(readers) for query in case._queries(row)]
            moves = [shift for row, shift in enumerate(shifts) for _ in case._queries(row)]
            case.write(case.add(length, 0, queries, moves))
        case.positions = case._tails(bases)
        paths = case.by_tiles()
        for path in paths.values():
            assert isinstance(path, NativeLowering)
            assert path._tiling.together == min(kv_heads, 256 // size)
        case.check(paths, case.positions)


@pytest.mark.parametrize("length", [1, 31, 33, 63, 65, 126, 127, 128, 129, 130, 255, 257, 700])
def test_tiles_take_a_run_of_every_length(length: int) -> None:
    """Where another block is packed, and where a tile instruction is not filled; what lies behind the last key is not a number."""
    for positions, group in (("rope", 3), ("alibi", 8)):
        cases = (Case(seed, positions, torch.bfloat16, shape=(group, 64), tails=(length,), rows=2) for seed in range(length, length + 50))
        case = next(case for case in cases if max(case.counts) == SOME)  # enough for tiles, and few enough to be quick
        case.check(case.by_tiles(), case.positions)


@pytest.mark.parametrize("count", [1, 2, 40])  # too few for tiles, one group, and more than a tile takes
def test_reads_with_the_same_queries_are_looked_at_as_one(count: int) -> None:
    """Modules, a prefix of which some queries see nothing, and their own tokens: one chain, whose tiles are of different lengths."""
    case = Case(0, "rope", torch.bfloat16, shape=(8, 64, 2), rows=1)
    case._reads.clear()
    case.counts = [count]
    lengths = (130, 1, 64, 515, 29)
    case.positions = torch.arange(count) * 3 + sum(lengths)
    for place, length in enumerate(lengths):
        shift = sum(lengths[:place]) + (4 if place % 2 else 0)
        case.write(case.add(length, 0, range(count), [shift + (2000 if i == 0 and place < 2 else 0) for i in range(count)]))
    paths = case.by_tiles()
    case.check(paths, case.positions)
    chained = paths["defined"]
    assert isinstance(chained, NativeLowering)
    assert len(chained._tiling.tiles) > len(lengths) - 1 > len(chained._tiling.chains) - 2, "they were not chained"
    assert chained._tiling.parts < count * len(lengths)


@pytest.mark.parametrize("length", [62, 63, 64, 65, 127, 128, 129, 510, 511, 512, 513, 1025])
def test_every_cpu_path_takes_a_tail_of_every_length(length: int) -> None:
    """Where the C kernel begins another block of keys, and where it splits a tile."""
    for decoding in (True, False):
        case = Case(length, "rope", decoding=decoding, shape=(3, 16), tails=(length,), rows=3)
        case.check(case.paths(), case.positions)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 65, 300])
def test_every_cpu_path_takes_any_number_of_readers(rows: int) -> None:
    """Where the C kernel begins another tile of queries, and where torch's kernel takes over."""
    for group in (1, 3, 4, 7, 8):
        case = Case(rows + group, "rope", decoding=True, shape=(group, 16), tails=(0, 3, 4, 5), rows=rows)
        case.check(case.paths(), case.positions)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (3, 3), (5, 3), (20, 3), (3, 18)])  # up to 4 columns, more, two groups, many heads
@pytest.mark.usefixtures("few_threads")
def test_short_reads_at_the_end_are_one_task_for_all_heads(group: int, kv_heads: int) -> None:
    for seed in range(6):
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(seed, "rope", dtype, decoding=True, shape=(group, 64, kv_heads), tails=(0, 11, 63, 64, 100), rows=20)
            paths = case.by_tiles() if dtype is torch.bfloat16 else case.paths()
            case.check(paths, case.positions)
            for path in paths.values():
                if isinstance(path, NativeLowering) and not path._dense:
                    assert path._tiling.longer < len(path._tiling.chains) - 1


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_a_lowering_serves_the_steps_that_follow(positions: str) -> None:
    dense = set[type]()
    for seed in range(20):
        case = Case(seed, positions, decoding=True, rows=SOME if seed % 4 == 0 else None)
        paths = case.paths()
        dense |= handed_over(paths[f"native, {Dense(True, True)}"])
        for step in range(3):
            tails = case.list[-len(case.counts) :]
            at = [int(case.positions[read.queries[0]]) + step - read.first for read in tails]
            case.write(torch.stack([read.slots[place] for read, place in zip(tails, at, strict=True)]))  # as the step does
            case.check(paths, case.positions + step)
    assert dense == {Run}, "no plan had a run with readers enough"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 computes it the slow way
def test_bfloat16_stays_within_its_rounding_on_every_path() -> None:
    dense = set[type]()
    for seed in range(8):
        case = Case(seed, "rope", torch.bfloat16, tails=(0, 11, 64))
        paths = case.paths()
        dense |= handed_over(paths[f"native, {Dense(True, True)}"])
        case.check(paths, case.positions)
    assert dense == {Run, Square}


def test_float16_stays_within_its_rounding() -> None:
    for seed in range(8):
        case = Case(seed, "rope", torch.float16, tails=(0, 11, 64))
        case.check({"torch": case.lower(None)}, case.positions)


@pytest.mark.parametrize(("dense", "width"), [(dense, None) for dense in PATHS.values()] + [(dense, 4) for dense in WAYS[:2]])
@pytest.mark.parametrize("spoilt", ["query", "key", "other key", "infinite key"])
def test_what_is_no_number_is_answered_as_none_and_to_nobody_else(dense: Dense | None, width: int | None, spoilt: str) -> None:
    """A kernel that passes over it would answer something else in its place."""
    count = MANY
    k, v, q = torch.randn(3, 2 * count, 4, 64)
    q = q[:count]
    if spoilt == "query":
        q[7] = torch.nan
    elif spoilt == "other key":  # one of the many numbers that are none
        k[count + 7] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    else:
        k[count + 7] = torch.nan if spoilt == "key" else torch.inf * q[7].sign()
    reads = joined(count, [([page], count, page * count, range(count), [0] * count) for page in (0, 1)])
    plan = reads, count + torch.arange(count), Geometry(4, 4, 64, 0.125)
    options = () if width is None else (f"-DWIDTH={width}",)
    lowering = Lowering(*plan) if dense is None else NativeLowering(native_library(torch.float32, *options), dense, *plan)
    lost = lowering.attend(q, q, k, v).isnan().any(-1).any(-1)
    assert lost[7]
    assert not lost[:7].any()
    assert spoilt != "query" or not lost[8:].any()


@pytest.mark.parametrize("dense", PATHS.values(), ids=PATHS.keys())
def test_a_value_however_large_is_not_seen_before_its_turn(dense: Dense | None) -> None:
    q, k, v = torch.randn(3, MANY, 4, 64)
    v[12] = torch.finfo(torch.float32).max
    reads, queries, geometry = joined(MANY, [([0], MANY, 0, range(MANY), [0] * MANY)]), torch.arange(MANY), Geometry(4, 4, 64, 0.125)
    plan = reads, queries, geometry
    lowering = Lowering(*plan) if dense is None else NativeLowering(native_library(), dense, *plan)
    out, exact = lowering.attend(q, q, k, v), reference.attend(q, k, v, list(reads.each()), queries, geometry)
    assert torch.allclose(out[:12], exact[:12], atol=tolerance(torch.float32))


def test_heads_that_the_c_kernel_has_no_room_for_are_not_given_to_it() -> None:
    assert supports(Geometry(96, 1, 256, 1.0))
    assert not supports(Geometry(97, 1, 256, 1.0))
    assert not supports(Geometry(8, 8, 257, 1.0))


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
    for queries in ([], [0], list(range(SOME))):
        case = Case(3, "rope", rows=SOME)
        case.add(4 if not queries else 0, 0, queries, [0] * len(queries))
        case.check(case.paths(), case.positions)


@pytest.mark.parametrize("queries", [1, 2, SOME])
def test_keys_that_a_query_does_not_see_weigh_nothing_or_are_refused(queries: int) -> None:
    """No plan has such reads: what a row imports stands before what it computes. Over no keys, torch's kernel would end the process."""
    case = Case(0, "rope", rows=queries, decoding=True, shape=(3, 16), tails=(11,))
    for first, tokens in ((5000, 8), (int(case.positions.max()) + 1, 300)):
        case.write(case.add(tokens, first, range(queries), [0] * queries))
    case.check({"native": case.lower(Dense()), "native by rows": case.lower(Dense(columns=False))}, case.positions)
    for dense in (None, Dense(True, True))[: 2 if queries == SOME else 1]:
        with pytest.raises(AssertionError, match="sees the first of them"):
            case.lower(dense)


def test_the_slopes_of_a_power_of_two_are_a_geometric_series() -> None:
    assert torch.allclose(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
