"""Into how many pieces a plan is cut for the C kernel."""

from collections.abc import Sequence

import numpy as np
import pytest

from pando.kernels.reads import joined
from pando.kernels.reference import Geometry
from pando.kernels.rope import frequencies
from pando.kernels.tiling import Left, Tiling

PAGE = 64
HEADS = Geometry(9, 3, 64, 0.125)


def tiled(shared: int, tails: Sequence[int], threads: int, heads: int = 1) -> Tiling:
    """Rows that share so many tokens, and have so many each of their own; `heads` that are looked at together if they may be."""
    rows, page, parts = range(len(tails)), 0, []
    for tokens, queries in ((shared, rows), *((tail, rows[i : i + 1]) for i, tail in enumerate(tails))):
        pages = list(range(page, page := page + -(-tokens // PAGE)))
        parts.append((pages, tokens, 0, queries, [0] * len(queries)))
    reads = joined(PAGE, parts)
    left = Left(np.zeros(len(reads), np.int64), reads.tokens.astype(np.int64), np.zeros(0, np.int64))
    return Tiling(reads, left, len(tails), HEADS, rows=256, keys=512, threads=threads, heads=heads, chained=True)


def keys_of_chains(tiling: Tiling) -> list[int]:
    found: list[int] = np.add.reduceat(tiling.tiles[:, 2] - tiling.tiles[:, 1], tiling.chains[:-1]).tolist()
    return found


def test_a_long_read_is_cut_so_that_no_thread_waits() -> None:
    assert keys_of_chains(tiled(2048, [64] * 4, threads=2)) == [1024, 1024, *[64] * 4]
    assert keys_of_chains(tiled(2048, [64] * 4, threads=8)) == [*[512] * 4, *[64] * 4]


def test_a_long_read_is_left_whole_where_short_ones_fill_the_gap() -> None:
    assert keys_of_chains(tiled(2048, [64] * 32, threads=2)) == [2048, *[64] * 32]
    assert keys_of_chains(tiled(2048, [64] * 4, threads=1)) == [2048, *[64] * 4]


def test_a_long_read_that_comes_last_is_cut_whatever_comes_before_it() -> None:
    assert keys_of_chains(tiled(64, [64] * 32 + [2048], threads=2)) == [64, *[64] * 32, 1024, 1024]


@pytest.mark.parametrize(("tails", "longer"), [([64] * 32, 1), ([64] * 5, 7), ([64] * 9 + [500] + [1] * 6, 12), ([500] * 8, 10)])
def test_short_reads_at_the_end_are_one_task_for_all_heads_if_they_are_many(tails: list[int], longer: int) -> None:
    tiling = tiled(2048, tails, threads=2)
    assert tiling.longer == longer, keys_of_chains(tiling)


def test_a_thread_looks_at_several_heads_only_where_there_are_reads_for_all_threads() -> None:
    assert tiled(2048, [64] * 4, threads=2, heads=4).together == 3, "there are no more"
    assert tiled(2048, [64] * 4, threads=2, heads=2).together == 2
    assert tiled(2048, [64] * 4, threads=4, heads=4).together == 1, "four pieces, and two for each thread are wanted"
    assert tiled(2048, [512] * 4, threads=4, heads=4).together == 3


def test_a_read_whose_heads_are_together_is_cut_more_often() -> None:
    """There is one task for each piece, not one for each head of it."""
    assert keys_of_chains(tiled(4096, [64] * 4, threads=2, heads=4)) == [704] * 5 + [576, *[64] * 4]
    assert keys_of_chains(tiled(4096, [64] * 4, threads=2, heads=1)) == [2048, 2048, *[64] * 4]
    assert keys_of_chains(tiled(2048, [64] * 32, threads=2, heads=4)) == [704, 704, 640, *[64] * 32]


def test_nothing_is_read() -> None:
    assert keys_of_chains(tiled(64, [0] * 3, threads=2)) == [64]
    assert len(tiled(0, [0], threads=2).tiles) == 0


def test_a_token_asks_once_for_all_placements_that_are_moved_as_far() -> None:
    shifts = [[8, 8], [0, 0], [8, 8], [8, 72]]
    reads = joined(PAGE, [([page], PAGE, 0, [0, 1], shift) for page, shift in enumerate(shifts)])
    left = Left(np.zeros(4, np.int64), reads.tokens.astype(np.int64), np.zeros(0, np.int64))
    geometry = Geometry(9, 3, 64, 0.125, frequencies(64, 1e4)[0])
    tiling = Tiling(reads, left, 2, geometry, rows=256, keys=512, threads=2, heads=1, chained=True)
    asks = list(zip(tiling.readers_moved.tolist(), tiling._shifts[tiling.moved].tolist(), strict=True))
    assert sorted(asks) == [(0, 8), (1, 8), (1, 72)]
    wanted = [token if not shift else 2 + asks.index((token, shift)) for shift_of in shifts for token, shift in enumerate(shift_of)]
    assert tiling.query.tolist() == wanted
