"""Reads, cut into tiles for a GPU: runs of keys and the packed queries that look at them, in int32 arrays."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from . import triton as kernels
from .launch import power_of_two
from .reads import Ints, Reads
from .reference import Geometry

LEAST_ROWS, LARGE_ROWS, LARGEST_ROWS = 16, 64, 128  # packed queries of a tile
LEAST_KEYS = 16  # that a product takes
KEYS, BLOCK_BYTES = 64, 16 * 1024  # keys looked at together, and the most bytes of theirs
SHORTEST = 128  # keys of a tile: fewer cost more in merging than they gain in company
LARGEST_GROUP, LARGEST_HEAD = 128, 256

# Costs, in keys that one processor looks at in the same time. From timings of many cuts of many plans on an H200.
OVERHEAD = 128  # to begin and end a tile
FETCH = 64  # to begin and end a small tile, when others fetch meanwhile
PART = 2  # a part of one head, to write and to merge
MERGE = 128  # to merge at all
PAYS = 40_000  # packed queries times keys, for each processor, from which on the largest tiles are the faster ones
FEW = 4  # small tiles for each processor, up to which another launch costs more than it gains
LEAN = 0.2  # of what small tiles fetch: so many keys more has the first half of a read if each half has a processor; who is done fetches
END = 64  # keys of small reads, on average, up to which it matters that the last block is not full


class Size(NamedTuple):
    """Of a launch's tiles."""

    rows: int
    stages: int = 2
    warps: int = 4
    registers: int | None = None
    many: bool = False  # a program takes one tile after the other
    crowd: int = 2  # programs that run on one processor at a time
    leaves: bool = False  # room for a small one beside it
    exact: bool = False  # few keys at a time, and none that nobody sees; else they come in whole blocks


# One program fills a processor, but for the registers and the memory that a program of small tiles needs beside it.
LARGEST = Size(LARGEST_ROWS, stages=3, warps=8, registers=192, many=True, crowd=1, leaves=True)
# One warp each, so that very many wait for memory at the same time.
SHORT = Size(LEAST_ROWS, stages=3, warps=1, crowd=4, exact=True)


def unsupported(geometry: Geometry, page_size: int) -> str | None:
    """Why the kernels cannot be used, if they cannot."""
    group = geometry.heads // geometry.kv_heads
    if group > LARGEST_GROUP or geometry.head_dim > LARGEST_HEAD:
        return f"they are not made for {group} queries per key head of {geometry.head_dim}"
    if page_size % LEAST_KEYS:
        return f"they need pages of a multiple of {LEAST_KEYS} tokens, not {page_size}"
    return None


def sizes(geometry: Geometry, dtype: torch.dtype, reads: Reads, processors: int) -> tuple[Size, Size]:
    """Large and small tiles that suit these reads. A plan with little to do takes one size, and one launch."""
    group, heads = geometry.heads // geometry.kv_heads, geometry.kv_heads
    small = Size(max(LEAST_ROWS, power_of_two(group)), crowd=4)
    rows = np.diff(reads.query_starts) * group
    is_large = rows > small.rows
    work = int((rows * reads.tokens)[is_large].sum()) * heads
    narrow = dtype.itemsize == 2 and wide(geometry) <= 128
    few = int((~is_large).sum()) * heads <= FEW * processors
    if small.rows == SHORT.rows and not few and reads.tokens[~is_large].mean() <= END:
        small = SHORT
    if narrow and work > PAYS * processors:
        return LARGEST, small
    large = Size(max(small.rows, LARGE_ROWS if dtype.itemsize == 2 else LARGE_ROWS // 2))
    return (large._replace(stages=3),) * 2 if narrow and work and few else (large, small)


def keys_of(geometry: Geometry, dtype: torch.dtype, page_size: int) -> int:
    most = min(KEYS, max(LEAST_KEYS, BLOCK_BYTES // (wide(geometry) * dtype.itemsize)))
    return min(most, page_size & -page_size)


def wide(geometry: Geometry) -> int:
    return power_of_two(max(LEAST_KEYS, geometry.head_dim))


class Tiles(NamedTuple):
    """Reads, cut for two launches."""

    counts: Ints  # large tiles; all tiles; tokens to merge
    tiles: Ints  # [N, FIELDS], the large ones first
    pages: Ints
    query: Ints  # of each pair: which of the queries, those of moved placements behind those of the step
    reader: Ints  # which of the step's tokens
    base: Ints  # the position that its first key has for it
    room: Ints  # keys of its read
    places: Ints  # of each pair of each tile: its part, or -1 - token where it is the only one
    tokens: Ints  # to merge
    starts: Ints  # of their parts
    parts: int
    moved: NDArray[np.int64]  # the pairs whose placement is shifted

    def arrays(self) -> dict[str, Ints]:
        """Those that the kernels take."""
        return {name: numbers for name, numbers in self._asdict().items() if name not in ("parts", "moved")}

    @property
    def launches(self) -> tuple[int, int, int]:
        """Large tiles, small ones, and tokens to merge."""
        large, every, tokens = self.counts.tolist()
        return large, every - large, tokens

    @classmethod
    def cut(cls, reads: Reads, count: int, geometry: Geometry, large: Size, small: Size, processors: int) -> "Tiles":
        group = geometry.heads // geometry.kv_heads
        queries = np.diff(reads.query_starts)
        there = (queries > 0) & (reads.tokens > 0)
        is_large = there & (queries * group > small.rows) & (large != small)
        few = _tile(reads, np.flatnonzero(there & ~is_large), small, geometry, processors, 0.0)
        fetching = int((few[:, 7] - few[:, 1] + FETCH).sum()) * geometry.kv_heads / processors
        many = _tile(reads, np.flatnonzero(is_large), large, geometry, processors, fetching if large.leaves else 0.0)
        tiles = np.concatenate((many, few))
        widths = tiles[:, 5]
        tiles[:, 6] = np.cumsum(widths) - widths
        owners = reads.queries[_spread(tiles[:, 4], widths)]
        parts_of = np.bincount(owners, minlength=count)
        several = parts_of[owners] > 1
        places = (-1 - owners).astype(np.int32)
        order = np.flatnonzero(several)[np.argsort(owners[several], kind="stable")]
        places[order] = np.arange(len(order), dtype=np.int32)
        tokens = np.flatnonzero(parts_of != 1)
        moved = np.flatnonzero(reads.shifts) if geometry.freqs is not None else np.zeros(0, dtype=np.int64)
        query = reads.queries.copy()
        query[moved] = count + np.arange(len(moved), dtype=np.int32)
        return cls(
            counts=np.array([len(many), len(tiles), len(tokens)], dtype=np.int32), tiles=tiles, pages=reads.pages,
            query=query, reader=reads.queries, base=np.repeat(reads.first, queries) + reads.shifts, room=np.repeat(reads.tokens, queries),
            places=places, tokens=tokens.astype(np.int32), starts=np.cumsum([0, *parts_of[tokens]]).astype(np.int32),
            parts=len(order), moved=moved,
        )  # fmt: skip


def _tile(reads: Reads, which: NDArray[np.int64], size: Size, geometry: Geometry, processors: int, meanwhile: float) -> Ints:
    """The tiles of some reads: those of the same keys are neighbours, so that what one has fetched is near for the next."""
    queries, tokens = np.diff(reads.query_starts)[which], reads.tokens[which]
    pairs = size.rows // (geometry.heads // geometry.kv_heads)
    across = -(-queries // pairs)
    slow = 1 + size.leaves * len(which) / max(1, int(across.sum()))  # what only one tile asks for comes no faster than what others fetch
    keys = _keys_of_a_tile(across * geometry.kv_heads, queries * geometry.heads, tokens, size.crowd, processors, slow, meanwhile)
    if meanwhile and len(which) == 1 and keys < tokens[0] <= 2 * keys and 2 * int(across[0]) * geometry.kv_heads <= processors:
        keys += int(min(LEAN * meanwhile, keys / 4)) // SHORTEST * SHORTEST
    count = across * -(-tokens // keys)
    owner = np.repeat(np.arange(len(which)), count)
    local = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    start, ahead = local // across[owner] * keys, local % across[owner] * pairs
    tiles = np.zeros((len(owner), kernels.FIELDS), dtype=np.int32)
    tiles[:, 0] = reads.page_starts[which][owner]
    tiles[:, 1] = start
    tiles[:, 4] = reads.query_starts[which][owner] + ahead
    tiles[:, 5] = np.minimum(pairs, queries[owner] - ahead)
    tiles[:, 7] = np.minimum(start + keys, tokens[owner])
    return tiles


def _keys_of_a_tile(
    across: NDArray[np.int64], parts: NDArray[np.int64], tokens: Ints, crowd: int, processors: int, slow: float, meanwhile: float
) -> int:
    """So many that the last processor is done soonest. Tiles are dealt out in rounds, each costs its keys and a little more, and the last
    one shares its processor with a crowd; there is no hurry while others fetch `meanwhile`; and whatever is cut must be merged.

    For each read: its tiles if it is not cut, and the parts it has then.
    """
    longest = int(tokens.max(initial=KEYS))
    cuts = np.unique(np.maximum(SHORTEST, -(-longest // np.arange(1, 129) // KEYS) * KEYS))[::-1]
    lengths, which = np.unique(tokens, return_inverse=True)
    across, parts = (np.bincount(which, weights=each, minlength=len(lengths)) for each in (across, parts))
    times = -(-lengths // cuts[:, None])  # that a read of each length is cut
    tiles, more = (times * across).sum(axis=1), ((times - 1) * parts).sum(axis=1)
    rounds = np.ceil(tiles / processors) * ((lengths * across).sum() / np.maximum(tiles, 1) + OVERHEAD)
    last = np.minimum(cuts, longest) * np.clip(tiles / processors, 1, crowd) + OVERHEAD
    done = np.maximum(slow * np.maximum(rounds, last), meanwhile)
    return int(cuts[np.argmin(done + PART * more / processors + MERGE * (more > 0))])


def _spread(starts: Ints, counts: Ints) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ..., for each of them as many as counted."""
    ends = np.cumsum(counts)
    found: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return found
