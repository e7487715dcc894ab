"""The GPU kernels against the definition, over random plans: through Triton's interpreter where there is no GPU."""

from types import ModuleType

import numpy as np
import pytest
import torch

from pando.kernels import reference
from pando.kernels.launch import ALIGNED
from pando.kernels.reads import Reads, joined
from pando.kernels.reference import Geometry
from pando.kernels.rope import frequencies, rotate, turns

from . import test_attention
from .test_attention import Case, tolerance

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16


class OnDevice:
    """A lowering on the device, for a case whose tensors are in host memory. What it is about to write is poisoned before."""

    def __init__(self, gpu: ModuleType, case: Case, processors: int | None = None, spare: float = 1.0) -> None:
        freqs, slopes = (None if x is None else x.to(DEVICE) for x in (case.geometry.freqs, case.geometry.slopes))
        device = gpu.Device.of(DEVICE)
        device = device._replace(processors=processors or device.processors)
        geometry = case.geometry._replace(freqs=freqs, slopes=slopes)
        self.lowering = gpu.TritonLowering(device, case.dtype, case.reads, case.positions, geometry, spare)

    def begin(self, positions: torch.Tensor) -> None:
        self.lowering.begin(positions)
        for result in (self.lowering._parts, self.lowering._lses):
            result.fill_(torch.nan)
        assert self.lowering._lses.dtype == torch.float32
        assert self.lowering._lses.shape == self.lowering._parts.shape[:2]

    def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.asked = tensors
        return self.lowering.attend(*(x.to(DEVICE) for x in tensors)).cpu()

    def check_parts(self, case: Case) -> None:
        """Of each token that is merged they are an answer and the natural logarithm of its sum, whichever kernel left them."""
        (q, _, *pool), low = self.asked, self.lowering
        parts, lses, starts, tokens, counts = (
            x.cpu() for x in (low._parts, low._lses, *(low._arrays[n] for n in ("starts", "tokens", "counts")))
        )
        out, lse = reference.look(q.double(), *pool, case.list, case.positions, case.geometry)
        for item, token in enumerate(tokens[: counts[2]].tolist()):
            mine = slice(int(starts[item]), int(starts[item + 1]))
            whole = torch.logsumexp(lses[mine].double(), 0)  # [H]
            assert (whole - lse[token]).abs().max() < 2 * tolerance(case.dtype)
            weights = torch.exp(lses[mine] - whole)[..., None]
            assert ((weights * parts[mine]).sum(0) - out[token]).abs().max() < tolerance(case.dtype)


def check(gpu: ModuleType, case: Case, processors: int | None = None) -> OnDevice:
    path = OnDevice(gpu, case, processors)
    case.check({"triton": path}, case.positions)  # type: ignore[dict-item]
    path.check_parts(case)
    return path


SEEDS = range(24) if DEVICE.type == "cuda" else (35, 0)  # few queries, in which most differs that may differ
SHAPES = ((1, 64, 2), (7, 16, 3), (4, 64, 1)) if DEVICE.type == "cuda" else (None,)  # few: each of them is compiled
TAILS = (0, 3, 4, 11, 63, 64, 65, 300) if DEVICE.type == "cuda" else (0, 3, 4, 65)


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_the_gpu_path_equals_the_definition_over_random_plans(gpu: ModuleType, positions: str) -> None:
    moved = 0
    for seed in SEEDS:
        shape = SHAPES[seed % len(SHAPES)]
        case = Case(seed, positions, shape=shape, tails=TAILS, page=PAGE, rows=None if DEVICE.type == "cuda" else 3)
        moved += case.moves
        check(gpu, case)
    assert moved, "none of the plans placed a segment elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_of_moved_placements_stand_behind_the_others_turned_anew(gpu: ModuleType, dtype: torch.dtype) -> None:
    freqs, positions = frequencies(48, 1e4)[0].to(DEVICE), torch.tensor([40, 41, 42])
    geometry = Geometry(9, 3, 64, 0.125, freqs)  # 16 of the 64 are not turned
    reads = joined(PAGE, [([0], 7, 0, [0, 1, 2], [0, 0, 0]), ([1], 9, 7, [2, 0], [13, -5])])
    lowering = gpu.TritonLowering(gpu.Device.of(DEVICE), dtype, reads, positions, geometry)
    qkv = torch.randn(3, 15, 64, device=DEVICE).to(dtype)
    q, turned = qkv[:, :9], torch.randn(3, 9, 64, device=DEVICE).to(dtype)
    found = lowering._turn_again(q, turned, lowering._turn)
    assert torch.equal(found[:3], turned)
    expected = rotate(q[[2, 0]], turns(torch.tensor([42 - 13, 40 + 5], device=DEVICE), freqs))
    assert (found[3:].double() - expected.double()).abs().max() <= 8 * torch.finfo(dtype).eps


def test_queries_that_were_turned_beside_keys_are_read_as_they_stand(gpu: ModuleType) -> None:
    """Where torch takes queries and keys apart, the queries of two tokens are not neighbours."""
    freqs, positions = frequencies(64, 1e4)[0].to(DEVICE), torch.tensor([40, 41, 42])
    reads = joined(PAGE, [([0], 7, 0, [0, 1, 2], [0, 0, 0]), ([1], 9, 7, [2, 0], [13, -5])])
    lowering = gpu.TritonLowering(gpu.Device.of(DEVICE), torch.float32, reads, positions, Geometry(9, 3, 64, 0.125, freqs))
    q, both = torch.randn(3, 9, 64, device=DEVICE), torch.randn(3, 12, 64, device=DEVICE)
    k, v = torch.randn(2, 2 * PAGE, 3, 64, device=DEVICE)
    assert torch.equal(lowering.attend(q, both[:, :9], k, v), lowering.attend(q, both[:, :9].contiguous(), k, v))


def test_how_much_there_is_of_a_plan_makes_no_other_kernels(gpu: ModuleType) -> None:
    """Triton compiles another one where an array is not aligned."""
    for rows in range(1, 9):
        reads = joined(PAGE, [([0], 7, 0, range(rows), [0] * rows), *(([1], 9, 7, [row], [0]) for row in range(rows))])
        lowering = gpu.TritonLowering(gpu.Device.of(DEVICE), torch.float32, reads, torch.full((rows,), 15), Geometry(2, 1, 64, 0.125))
        arrays = {**lowering._arrays, "seen": lowering._seen, "ahead": lowering._ahead}
        assert not [name for name, array in arrays.items() if array.data_ptr() % ALIGNED]


DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32]
GROUPS, SIZES = (1, 3, 4, 7, 8, 71), (64, 80, 96, 128, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_the_gpu_path_takes_heads_of_every_shape(gpu: ModuleType, group: int, dtype: torch.dtype) -> None:
    """On a GPU, where each is compiled, every group and every type meets every size, and not each pair of them each size."""
    place = GROUPS.index(group) + DTYPES.index(dtype)
    for size in (SIZES[place % len(SIZES)],) if DEVICE.type == "cuda" else SIZES[:2]:
        case = Case(group + size, "alibi", dtype, decoding=DEVICE.type == "cpu", shape=(group, size), tails=TAILS[:4], rows=3, page=PAGE)
        check(gpu, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_of_many_rows_over_one_prefix(gpu: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from pando.kernels.gpu_tiles import LARGE

    for rows in (1, 2, 64, 65, 300) if DEVICE.type == "cuda" else (20,):
        case = Case(3, "rope", dtype, decoding=True, shape=(4, 64), tails=(5,), rows=rows, page=PAGE)
        path = check(gpu, case)
        if rows >= 20 and not path.lowering._grids[0] and path.lowering._small.rows == 16:  # it is read in small ones alone, and then
            with monkeypatch.context() as patch:
                patch.setattr(gpu, "sizes", lambda *_: (LARGE, LARGE))
                path = check(gpu, case)
        low = path.lowering
        assert rows < 20 or low._grids[0] or low._small.rows > 16, "nothing was read in large tiles"  # of their own, or of the only size
        for read in case.list[-rows:]:
            case.write(read.slots[6:7])
        case.check({"triton": path}, case.positions + 1)  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_short_ends_are_read_key_by_key(gpu: ModuleType, positions: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind an end is NaN in every case, and no key of it may come."""
    monkeypatch.setattr("pando.kernels.gpu_tiles.END", 1000)
    for size, tail in ((64, 1), (80, 15), (64, 17), (64, 65), (64, 300 if DEVICE.type == "cuda" else 130)):
        case = Case(tail, positions, dtype, decoding=True, shape=(3, size), tails=(tail,), rows=9, page=PAGE)
        assert check(gpu, case, processors=1).lowering._small.exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_the_last_block_may_come_ahead_of_the_others(
    gpu: ModuleType, positions: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind an end is NaN here, too; and of a prompt, not all of its queries see the blocks behind that one."""
    from pando.kernels.gpu_tiles import Size
    from pando.kernels.triton import FIELDS

    monkeypatch.setattr(gpu, "sizes", lambda *_: (Size(16), Size(16, stages=3, warps=4, ahead=True)))
    for name, queries in (("SOME", 3), ("MANY", 5)):  # so few have a small tile
        monkeypatch.setattr(test_attention, name, queries)
    behind = 0  # tiles with more than one block that not all queries see
    for size, tail, page in ((64, 1, PAGE), (80, 12, PAGE), (64, 16, PAGE), (64, 33, 3 * PAGE), (80, 77, 3 * PAGE), (64, 77, PAGE)):
        case = Case(tail, positions, dtype, decoding=tail < 77, shape=(3, size), tails=(tail,), rows=3, page=page)
        low = check(gpu, case).lowering
        large, count = low._arrays["counts"][:2].tolist()
        tiles = low._arrays["tiles"][: count * FIELDS].view(-1, FIELDS)[large:]
        assert (tiles[:, 3] > tiles[:, 2]).any()
        behind += int((tiles[:, 3] - tiles[:, 2] > low._keys).sum())
    assert behind


@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_of_one_query_are_read_without_products(gpu: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind an end is NaN here, too."""
    from pando.kernels.gpu_tiles import LONE, Size

    monkeypatch.setattr(gpu, "sizes", lambda *_: (Size(16), LONE))
    for size, tail in ((64, 1), (80, 7), (128, 9), (64, 64), (64, 130), (256, 3)):
        case = Case(tail, "rope", dtype, decoding=True, shape=(1, size, 2), tails=(tail,), rows=3, page=PAGE)
        assert check(gpu, case).lowering._grids[1] >= 3


def test_many_ends_of_one_query_are_read_so_where_heads_have_keys_of_their_own() -> None:
    from pando.kernels.gpu_tiles import sizes

    def heads(
        tokens: int, heads: int = 32, kv_heads: int = 32, slopes: torch.Tensor | None = None, rows: int = 200, shared: int = 17
    ) -> int:
        reads = [([0], 64, 0, range(shared), [0] * shared)]
        reads += [([row] * (tokens // 64), tokens, 64, [row], [0]) for row in range(rows)]
        some = joined(64, reads, 30 * rows)
        return sizes(Geometry(heads, kv_heads, 128, 1.0, slopes=slopes), torch.bfloat16, some, 132)[1].heads

    assert heads(64) == 2
    assert heads(128) == 1, "those of more than a page are faster in tiles"
    assert heads(64, kv_heads=8) == 1, "a product serves four heads"
    assert heads(64, 33, 33) == 1, "heads go in pairs"
    assert heads(64, slopes=torch.ones(32)) == 1
    assert heads(64, shared=16) == 1, "what sixteen rows read is a small tile, too"
    assert heads(64, rows=64) == 1, "too few to wait for memory at the same time"


def test_short_ends_are_read_key_by_key_if_there_are_enough_to_wait_for_memory() -> None:
    from pando.kernels.gpu_tiles import sizes

    def is_exact(rows: int, tokens: int, unseen: int = 0, kv_heads: int = 8, size: int = 128) -> bool:
        reads = joined(64, [([row] * (tokens // 64), tokens, 0, [row], [0]) for row in range(rows)], rows * unseen)
        return sizes(Geometry(32, kv_heads, size, 1.0), torch.bfloat16, reads, kv_heads // 2)[1].exact

    assert is_exact(9, 64)
    assert not is_exact(9, 128), "their last blocks are full"
    assert is_exact(9, 128, unseen=32) and is_exact(9, 640, unseen=32)
    assert not is_exact(9, 704, unseen=32), "the last block is a small part of it"
    assert is_exact(2, 384, unseen=32) and not is_exact(2, 448, unseen=32), "the fewer they are, the shorter"
    assert not is_exact(1, 64, unseen=32), "whole blocks have a place, and the last one comes ahead of them"
    assert not is_exact(2, 64)
    assert not is_exact(9, 64, kv_heads=32) and is_exact(9, 64, unseen=32, kv_heads=32), "one query of each key, and a full block"
    assert not is_exact(9, 64, size=256) and is_exact(9, 64, unseen=32, size=256), "blocks of fewer keys"
    assert is_exact(9, 128, unseen=32, size=256) and not is_exact(9, 192, unseen=32, size=256)


def test_a_plan_of_few_tiles_has_one_size_of_them() -> None:
    from pando.kernels.gpu_tiles import sizes

    def rows_of(rows: int, shared: int, tokens: int, heads: int = 8, kv_heads: int = 1, size: int = 128) -> tuple[int, int]:
        reads = [(range(shared // 64), shared, 0, range(rows), [0] * rows)]
        reads += [([1000 + row] * (tokens // 64), tokens, shared, [row], [0]) for row in range(rows)]
        large, small = sizes(Geometry(heads, kv_heads, size, 1.0), torch.bfloat16, joined(64, reads), 132)
        return large.rows, small.rows

    assert rows_of(64, 8192, 128) == (64, 64), "another launch would cost more"
    assert rows_of(32, 1024, 128) == (16, 16), "all small ones have a place at once"
    assert rows_of(256, 1024, 128) == (64, 16)
    assert rows_of(256, 8192, 128) == (128, 16)
    assert rows_of(40, 512, 128, 32, 8) == (16, 16), "little is read by many"
    assert rows_of(40, 2048, 128, 32, 8) == (64, 16)
    assert rows_of(64, 512, 128, 32, 8) == (64, 16) and rows_of(64, 512, 512, 32, 8) == (16, 16), "as much, while small ones take longer"
    assert rows_of(64, 512, 128, 32, 8, size=64) == (16, 16), "half as many bytes"
    assert rows_of(24, 512, 128, 32, 8, size=256) == (16, 16), "twice as many"
    assert rows_of(64, 512, 128, 32, 8, size=256) == (64, 16)
    assert rows_of(64, 8192, 128, size=256) == (64, 64)
    assert rows_of(256, 128, 128, 32, 8) == (64, 16), "as many keys as 64 rows of 512, and four times as many tiles"


def test_one_size_of_tiles_has_stages_for_which_there_is_room() -> None:
    from pando.kernels.gpu_tiles import sizes

    def stages_of(rows: int, tokens: int = 128, unseen: int = 0, size: int = 128) -> tuple[int, bool]:
        """Of small tiles; and whether their last block comes ahead of the others."""
        reads = [(range(4), 256, 0, range(rows), [0] * rows)]
        reads += [([1000 + row] * (tokens // 64), tokens, 256, [row], [0]) for row in range(rows)]
        found = sizes(Geometry(32, 8, size, 1.0), torch.bfloat16, joined(64, reads, rows * unseen), 132)[1]
        return found.stages, found.ahead

    assert stages_of(24) == stages_of(32) == (3, False), "320 tiles, at most three on each processor: they fetch further ahead"
    assert stages_of(36) == stages_of(48) == (2, False), "432 and 576: more of them have a place with fewer stages"
    assert stages_of(56) == (3, False), "672: another round in any case"
    assert stages_of(20, unseen=5) == (3, True) and stages_of(32, unseen=5) == (3, False), "240: what comes ahead takes a place, too"
    assert stages_of(36, unseen=5) == stages_of(56, unseen=5) == (2, True)
    assert stages_of(4, 1024, unseen=5) == (3, False), "40 are few, but they are cut"
    assert stages_of(40, unseen=5, size=64) == (3, True) and stages_of(36, unseen=5, size=64) == (3, True), "half as many bytes"
    assert stages_of(108) == (2, False) and stages_of(108, unseen=5) == (2, True), "beside large tiles"
    assert stages_of(108, unseen=5, size=64) == (2, False)


def test_the_last_block_comes_ahead_only_where_registers_have_room_for_it() -> None:
    from pando.kernels.gpu_tiles import sizes

    def chosen(
        rows: int, shared: int = 0, heads: tuple[int, int] = (32, 8), size: int = 128, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int, int, bool]:
        """Rows, stages and warps of small tiles, and whether it does."""
        reads = [(range(shared // 64), shared, 0, range(rows), [0] * rows)] if shared else []
        reads += [([1000 + row] * 16, 1024, shared, [row], [0]) for row in range(rows)]
        small = sizes(Geometry(*heads, size, 1.0), dtype, joined(64, reads, rows * 5), 132)[1]
        return small.rows, small.stages, small.warps, small.ahead

    assert chosen(8) == (16, 3, 2, True) and chosen(64) == (16, 2, 2, True)
    assert chosen(8, size=256) == (16, 3, 4, True) and chosen(64, size=256) == (16, 2, 2, False)
    assert chosen(64, size=64) == (16, 3, 2, True) and chosen(100, size=64) == (16, 2, 2, False)
    assert chosen(8, dtype=torch.float32) == (16, 3, 4, False) and chosen(64, dtype=torch.float32) == (16, 2, 4, False)
    assert chosen(8, heads=(48, 1)) == (64, 3, 4, False) and chosen(800, heads=(48, 1)) == (64, 2, 4, False)
    assert chosen(140, 512, heads=(48, 1)) == (64, 2, 4, False), "beside large tiles, too: two warps would keep half of them in memory"


def test_what_is_merged_anyway_is_cut_sooner() -> None:
    from pando.kernels.gpu_tiles import SMALL, Tiles

    def tiles(apart: int) -> int:
        """Three reads of 1,024 keys, each for three queries, and nine of 512 for the same queries, or for others."""
        reads = [(range(read * 16, read * 16 + 16), 1024, 0, range(read * 3, read * 3 + 3), [0] * 3) for read in range(3)]
        reads += [(range(48 + row * 8, 56 + row * 8), 512, 1024, [row + apart], [0]) for row in range(9)]
        return len(Tiles.cut(joined(64, reads), 9 + apart, Geometry(32, 32, 128, 1.0), SMALL, SMALL, 132).tiles)

    assert tiles(apart=9) == 12, "nothing is merged"
    assert tiles(apart=0) > 12


@pytest.mark.parametrize("rows", [3, 300])
def test_pages_that_several_reads_have_are_counted_once(rows: int) -> None:
    """Of few and of many pages, which are counted in different ways."""
    reads = joined(64, [(range(90_000 + row, 90_010 + row), 640, 0, [row], [0]) for row in range(rows)])
    assert reads.distinct == 9 + rows


def test_rows_that_share_nothing_are_cut_no_shorter_than_memory_is_fast() -> None:
    from pando.kernels.gpu_tiles import Tiles, sizes

    def tiles(pages: int) -> int:
        """Of 32 rows of 1,024 keys, 28/4 heads: all of so many pages, again and again."""
        reads = joined(64, [([(row * 16 + page) % pages for page in range(16)], 1024, 0, [row], [0]) for row in range(32)])
        geometry = Geometry(28, 4, 128, 1.0)
        return len(Tiles.cut(reads, 32, geometry, *sizes(geometry, torch.bfloat16, reads, 132), 132).tiles)

    assert tiles(32 * 16) == 32
    assert tiles(16) > 32, "what one has fetched is near for the others"


def test_a_read_cut_over_many_processors_is_merged_again(gpu: ModuleType) -> None:
    case = Case(2, "rope", decoding=True, shape=(4, 64), tails=(700,), rows=2, page=PAGE)
    whole, cut = check(gpu, case, processors=1), check(gpu, case, processors=64)
    assert cut.lowering._grids[1] > whole.lowering._grids[1]


def test_a_query_that_one_tile_answers_is_not_merged(gpu: ModuleType) -> None:
    for seed in range(20):
        case = Case(seed, "none", decoding=True, tails=(5,), page=PAGE)
        if len(case.reads) == len(case.counts):  # nothing shared
            assert check(gpu, case).lowering._grids[2] == 0
            return
    raise AssertionError("every plan shared something")


def test_another_plan_takes_the_place_of_one_with_room_for_it(gpu: ModuleType) -> None:
    """As a captured graph needs it: the kernels and their arguments stay, what they read changes."""
    case = Case(5, "none", decoding=True, shape=(3, 64), tails=(40,), rows=6, page=PAGE)
    path = OnDevice(gpu, case, spare=1.5)
    arguments = {name: array.data_ptr() for name, array in path.lowering._arrays.items()}
    fewer = Case(7, "none", decoding=True, shape=(3, 64), tails=(9,), rows=4, page=PAGE)
    assert path.lowering.replace(fewer.reads, len(fewer.positions))
    assert {name: array.data_ptr() for name, array in path.lowering._arrays.items()} == arguments
    fewer.check({"triton": path}, fewer.positions)  # type: ignore[dict-item]
    more = Case(5, "none", decoding=True, shape=(3, 64), tails=(40,), rows=20, page=PAGE)
    assert not path.lowering.replace(more.reads, len(more.positions))
    fewer.check({"triton": path}, fewer.positions)  # type: ignore[dict-item]


def test_another_plan_moves_other_placements(gpu: ModuleType) -> None:
    def case(seed: int, rows: int, moves: bool) -> Case:
        some = (Case(at, "rope", decoding=True, shape=(3, 64), tails=(9,), rows=rows, page=PAGE) for at in range(seed, seed + 40))
        return next(case for case in some if case.reads.shifts.any() == moves)

    path, fewer = OnDevice(gpu, case(1, 6, moves=True), spare=1.5), case(50, 3, moves=True)
    assert path.lowering.replace(fewer.reads, 3)
    fewer.check({"triton": path}, fewer.positions)  # type: ignore[dict-item]
    still, moving = OnDevice(gpu, case(1, 6, moves=False), spare=20.0), case(1, 6, moves=True)
    assert not still.lowering.replace(moving.reads, 6), "a graph of it turns no queries"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are a GPU's")
def test_a_captured_graph_follows_the_plan(gpu: ModuleType) -> None:
    case = Case(5, "none", torch.bfloat16, decoding=True, shape=(4, 128), tails=(300,), rows=9, page=64)
    lowering = OnDevice(gpu, case, spare=2.0).lowering
    k, v = case.k.to(DEVICE), case.v.to(DEVICE)
    q = torch.randn(9, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    lowering.attend(q, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lowering.attend(q, q, k, v)
    for rows, tail in ((9, 300), (9, 301), (5, 64), (1, 2)):
        now = Case(rows, "none", torch.bfloat16, decoding=True, shape=(4, 128), tails=(tail,), rows=rows, page=64)
        k.copy_(now.k)
        v.copy_(now.v)
        assert lowering.replace(now.reads, len(now.positions))
        lowering.begin(now.positions)
        graph.replay()
        eager = OnDevice(gpu, now)
        eager.begin(now.positions)
        assert torch.equal(out[:rows].cpu(), eager.attend(*(x[:rows].cpu() for x in (q, q)), now.k, now.v))


def test_reads_are_cut_so_that_every_processor_has_work() -> None:
    from pando.kernels.gpu_tiles import Tiles, sizes

    geometry = Geometry(32, 8, 128, 1.0)

    def launches(rows: int, shared: int, tail: int) -> tuple[int, int, int]:
        reads: list[tuple[list[int], int, int, list[int], list[int]]] = []
        if shared:
            reads.append((list(range(shared // 64)), shared, 0, list(range(rows)), [0] * rows))
        reads += [(list(range(tail // 64)), tail, shared, [row], [0]) for row in range(rows)]
        given = joined(64, reads)
        cut = Tiles.cut(given, rows, geometry, *sizes(geometry, torch.bfloat16, given, 132), 132)
        assert cut.tiles[:, 7].max(initial=0) <= max(shared, tail)
        return cut.launches

    assert launches(256, 8192, 128) == (16, 256, 256)  # 128 of 132 programs, for 8 key heads
    assert launches(1024, 2048, 128) == (32, 1024, 1024)
    assert launches(32, 0, 2048) == (0, 32, 0)  # enough as they are: nothing to merge
    assert launches(1, 0, 4224)[1] > 8
    assert launches(0, 0, 0) == (0, 0, 0)


def test_halves_of_a_read_are_uneven_only_beside_blocks_that_wait_for_room() -> None:
    from pando.kernels.gpu_tiles import Tiles, sizes

    geometry = Geometry(32, 32, 128, 1.0)

    def halves(tail: int, unseen: int) -> set[int]:
        reads = [(list(range(256)), 16384, 0, list(range(256)), [0] * 256)]
        reads += [([256 + row] * (tail // 64), tail, 16384, [row], [0]) for row in range(256)]
        given = joined(64, reads, 256 * unseen)
        cut = Tiles.cut(given, 256, geometry, *sizes(geometry, torch.bfloat16, given, 132), 132)
        large = cut.tiles[: cut.launches[0]]
        return set((large[:, 7] - large[:, 1]).tolist())

    first, second = halves(128, 0)
    assert first + second == 16384 and first != second
    assert halves(64, 32) == halves(128, 32) == {8192}, "ends of one query, a warp each, run beside large tiles from the start"


def moved(reads: Reads, seed: int) -> Reads:
    """The same of other pages."""
    order = np.random.default_rng(seed).permutation(int(reads.pages.max()) + 9).astype(np.int32)
    return Reads(reads.page_size, order[reads.pages], *reads[2:])


def test_what_was_cut_suits_other_pages() -> None:
    from pando.kernels.gpu_tiles import Tiles, sizes

    forms = set[bytes | None]()
    for seed in range(30):
        case = Case(seed, "rope", torch.bfloat16, page=PAGE, tails=(0, 3, 300))
        reads, other, facts = case.reads, moved(case.reads, seed), (len(case.positions), case.geometry)
        assert reads.form == other.form
        wanted = sizes(case.geometry, torch.bfloat16, reads, 132)
        assert wanted == sizes(case.geometry, torch.bfloat16, other, 132)
        found, expected = Tiles.cut(reads, *facts, *wanted, 132).moved_to(other), Tiles.cut(other, *facts, *wanted, 132)
        assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
        forms.add(reads.form)
    assert len(forms) == 30
    assert Reads(PAGE, np.zeros(4096, np.int32), *reads[2:]).form is None, "of many pages it takes long to tell"


def test_a_plan_of_a_known_form_reads_its_own_pages(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(5, "rope", decoding=True, shape=(3, 64), tails=(40,), rows=6, page=PAGE)
    path = OnDevice(gpu, case, spare=1.5)
    monkeypatch.setattr(gpu.Tiles, "cut", lambda *_: pytest.fail("it was cut before"))
    other = moved(case.reads, 1)
    k, v = (torch.full((int(other.pages.max()) + 1, PAGE, *pool.shape[1:]), float("nan"), dtype=pool.dtype) for pool in (case.k, case.v))
    for before, now in zip(case.reads.pages, other.pages, strict=True):
        k[now], v[now] = case.k.view(-1, *k.shape[1:])[before], case.v.view(-1, *v.shape[1:])[before]
    assert path.lowering.replace(other, len(case.positions))
    case.k, case.v, listed = k.flatten(0, 1), v.flatten(0, 1), np.split(other.pages, other.page_starts[1:-1])
    case._reads = [(pages.tolist(), *read[1:]) for pages, read in zip(listed, case._reads, strict=True)]
    case.check({"triton": path}, case.positions)  # type: ignore[dict-item]


def test_every_pair_of_a_read_and_a_query_is_in_tiles_that_cover_its_keys_once() -> None:
    from pando.kernels.gpu_tiles import Tiles, sizes

    for seed in range(30):
        case = Case(seed, "rope", torch.bfloat16, page=PAGE, tails=(0, 3, 300, 1000))
        reads, count = case.reads, len(case.positions)
        processors = 1 + seed * 7
        cut = Tiles.cut(reads, count, case.geometry, *sizes(case.geometry, torch.bfloat16, reads, processors), processors)
        covered = np.zeros(len(reads.queries), dtype=np.int64)
        for listed, first, _, _, pair, pairs, _, stop, page, _ in cut.tiles.tolist():
            covered[pair : pair + pairs] += stop - first
            assert page == reads.pages[listed + first // PAGE]
        assert (covered == np.repeat(reads.tokens, np.diff(reads.query_starts))).all()
        written = np.sort(cut.places[cut.places >= 0])
        assert (written == np.arange(cut.parts)).all()
        assert sorted([*(-1 - cut.places[cut.places < 0]), *cut.tokens]) == list(range(count))


def test_reads_of_the_same_length_are_cut_as_if_they_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from pando.kernels.gpu_tiles import Size, _keys_of_a_tile, _together

    chance = np.random.default_rng(3)
    for processors in (1, 132):
        tokens = chance.choice(np.array([64, 100, 2048, 131_072], dtype=np.int32), 200)
        across, parts = (chance.integers(1, 1000, 200).astype(np.int32) for _ in range(2))
        fewer = _together(across, parts, tokens)
        assert len(fewer[2]) == 4 and (fewer[0].sum(), fewer[1].sum()) == (across.sum(), parts.sum())
        found = _keys_of_a_tile(*fewer, Size(16), processors)
        monkeypatch.setattr("pando.kernels.gpu_tiles._together", lambda *reads: reads)
        assert _keys_of_a_tile(across, parts, tokens, Size(16), processors) == found


def test_pages_and_heads_that_the_kernels_are_not_made_for_are_named() -> None:
    from pando.kernels.gpu_tiles import unsupported

    assert unsupported(Geometry(32, 8, 128, 1.0), 64) is None
    assert "257" in (unsupported(Geometry(8, 8, 257, 1.0), 64) or "")
    assert "12" in (unsupported(Geometry(8, 8, 64, 1.0), 12) or "")


def test_the_definition_agrees_with_itself_over_pages() -> None:
    """What the other tests compare with: `each` gives back what `joined` was given."""
    reads = joined(4, [([3, 1], 6, 2, [0, 1], [0, 5])])
    (read,) = reads.each()
    assert isinstance(reads, Reads)
    assert read.slots.tolist() == [12, 13, 14, 15, 4, 5]
    assert (read.first, read.queries.tolist(), read.shifts.tolist()) == (2, [0, 1], [0, 5])


def test_a_first_try_shows_that_the_kernels_work(gpu: ModuleType) -> None:
    gpu.probe(gpu.Device.of(DEVICE), torch.float32, Geometry(4, 2, 64, 0.125), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_fetched_from_host_memory_to_their_places(gpu: ModuleType, dtype: torch.dtype) -> None:
    page, heads, size = 16, 3, 40
    kept = torch.randn(4, 2, page, heads, size).to(dtype)  # of each page keys, then values
    if DEVICE.type == "cuda":
        kept = kept.pin_memory()
    k, v = (torch.zeros(6 * page, heads, size, dtype=dtype, device=DEVICE) for _ in range(2))
    places = [5, 0, 3, 1]
    gpu.fetch(torch.tensor([[each.data_ptr() for each in kept], places], device=DEVICE), k, v, page)
    for pool, part in ((k, 0), (v, 1)):
        found = pool.view(6, page, heads, size).cpu()
        assert all(torch.equal(found[place], each[part]) for place, each in zip(places, kept, strict=True))
        assert not found[2].any()
        assert not found[4].any()


FEW_NUMBERS = {
    "whole": torch.arange(3000), "bytes": torch.arange(7) % 2 == 0, "real": torch.randn(5, 3), "one": torch.tensor(3.5),
    "unaligned": torch.arange(9, dtype=torch.uint8)[1:5], "halves": torch.arange(9, dtype=torch.bfloat16)[1:3],
    "apart": torch.randn(3, 4)[:1, 2],
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_NUMBERS)
def test_few_numbers_come_and_go_by_a_kernel(gpu: ModuleType, name: str) -> None:
    from pando.kernels.staging import by_kernel

    numbers = FEW_NUMBERS[name]
    here = torch.empty(32_000, dtype=torch.uint8, pin_memory=True).view(numbers.dtype) if DEVICE.type == "cuda" else numbers
    if DEVICE.type == "cuda":  # where it stood, in pinned memory
        here = here.as_strided(numbers.shape, numbers.stride(), numbers.storage_offset()).copy_(numbers)
    there, back = torch.zeros(numbers.shape, dtype=numbers.dtype, device=DEVICE), torch.zeros_like(here, pin_memory=DEVICE.type == "cuda")
    by_kernel(gpu.kernels.bring, here, there)
    by_kernel(gpu.kernels.bring, there, back)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(there.cpu(), numbers) and torch.equal(back, numbers)


@pytest.mark.parametrize("rest", [1, 1024, 2500])
def test_two_places_are_filled_by_one_launch(gpu: ModuleType, rest: int) -> None:
    from pando.kernels.staging import by_kernel

    pinned = DEVICE.type == "cuda"
    one, two = (torch.arange(count, dtype=torch.int32, pin_memory=pinned) for count in (1500, rest))
    there, other = (torch.full((2 * len(each),), -1, dtype=torch.int32, device=DEVICE) for each in (one, two))
    by_kernel(gpu.kernels.bring, one, there[: len(one)], (two, other[: len(two)]))
    for given, found in ((one, there.cpu()), (two, other.cpu())):
        assert torch.equal(found[: len(given)], given) and (found[len(given) :] == -1).all()


def test_what_was_written_is_sent_once_with_what_comes_next() -> None:
    from pando.kernels.staging import Staged

    at, to = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    plan, tokens = Staged(at), Staged(to)
    plan.zeros()[:] = 1
    tokens.zeros()[:] = 2
    assert not at.any()
    tokens.send(plan)
    assert at.tolist() == [1] * 4 and to.tolist() == [2] * 4
    at.zero_()
    tokens.zeros()[:] = 3
    tokens.send(plan)
    assert at.tolist() == [0] * 4 and to.tolist() == [3] * 4


@pytest.mark.skipif(DEVICE.type == "cpu", reason="copy engines are a GPU's")
def test_the_numbers_of_a_step_do_not_wait_for_what_is_loaded_or_saved() -> None:
    from pando.engine.across import Returning, sent
    from pando.kernels import staging

    assert staging._kernel(torch.empty(0, device=DEVICE).device) is not None
    aside, bulk = torch.cuda.Stream(), torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
    for loads in (None, True, False):  # first without: kernels are made and memory is pinned, which waits for all there is
        torch.cuda.synchronize()
        with torch.cuda.stream(aside):
            for _ in range(0 if loads is None else 16):
                (pool if loads else bulk).copy_(bulk if loads else pool, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        told = Returning(sent(np.arange(1000), DEVICE) + 1).read()
        assert loads is None or not done.query(), f"{loads=}: some 80 ms are still on their way"
        assert told.tolist() == list(range(1, 1001))


def test_kernels_are_made_before_they_are_needed(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from pando.kernels import gpu_warm

    launched, warps = set(), set()
    launch = gpu.Launches.__call__

    def watch(self: object, kernel: object, kind: object, grid: object, *arguments: object, **options: object) -> None:
        launched.add(kernel)
        if kernel is gpu.kernels.look:
            warps.add(options["num_warps"])
        launch(self, kernel, kind, grid, *arguments, **options)

    monkeypatch.setattr(gpu.Launches, "__call__", watch)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu_warm, "PLANS", ((1, 0, 32, 1), (3, 32, 96, 1), (2, 32, 8, 8)))
        monkeypatch.setattr(gpu_warm, "BESIDE", ((20, 20),))
    gpu_warm.warm_up(gpu.Device.of(DEVICE), torch.float32, Geometry(4, 2, 64, 0.125), 32, torch.float32)
    assert len(launched - {gpu.kernels.bring}) == 2, "tiles and their merge, besides what brings a GPU its numbers"
    assert 1 in warps, "and ends that are read key by key, as they are where last pages are half empty"
