"""Reads, cut into tiles for a GPU: runs of keys and the packed queries that look at them, in int32 arrays."""

from functools import lru_cache
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
PIECES = np.arange(1, 129)  # that a read may be cut into
SHORTEST = 128  # keys of a tile: fewer cost more in merging than they gain in company
LARGEST_GROUP, LARGEST_HEAD = 128, 256
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
NARROW = 64 * 128  # numbers that a tile's rows have at most, where there is less of the memory that a processor's programs share

# Costs, in keys that a small tile looks at in the same time. From timings of many cuts of many plans on an H200.
MERGE = 128  # to merge at all
FETCH = 64  # to begin and end a small tile, when others fetch meanwhile
COMPANY = 0.9  # what a processor does more of, at most, while several programs run on it: one waits, another computes
PAYS = 100_000  # packed queries times keys, for each processor, from which on the largest tiles are the faster ones, if they are full
FEWEST = 3 / 4  # small tiles for each processor, up to which another launch costs more than it gains
LITTLE = 500  # keys that small tiles look at, for each processor, up to which they are the faster ones where all have one size,
LESS = 1.75  # or so many times as many as large ones would
BESIDE = 300  # the same for large reads beside small ones, in keys of 256 bytes, those that tiles take to begin among them. To this come
LASTS = 400  # as many keys as a small read has, on average, up to so many: until those are read there is no hurry
LEAN = 0.8  # of what small tiles still fetch then: so many keys more has the first half of a read if each half has a processor,
MEANWHILE, IDLE = 0.25, 2.0  # for each key of a half, those that are fetched beside it, and by a processor without one
UNSEEN = 12  # keys of each small read that are still to be written, on average, from which on its last block is hardly ever full
LONG = 640  # keys of such reads, on average, up to which that matters,
AMONG = 96  # or so many for each that a processor has: few wait for memory, and fetch more at once in whole blocks,
AMONG_SHORT = 8  # which are shorter for heads of more than 128 (16 bits),
ROOMY = 2  # up to so many do with the last block ahead of the others (16 bits)
END, FEW = 64, 4  # where all blocks are full: keys up to which it may, and reads of each processor from which on it does,
LONELY = 32  # or so many, where heads share no keys or have more than 128 numbers; of one query and up to END keys, these need no products
LASTING = 512  # keys of small tiles, on average, from which on there is no room for them beside large ones
SHARED_BYTES = 227 * 1024  # of memory that the programs on one processor share,
OWN_BYTES = 3 * 1024  # and that each of small tiles takes beside its blocks and its queries
AHEAD_BYTES = 256  # of a key, with which two stages and the last block ahead are best: of fewer, places are; of more, registers are scarce


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
    ahead: bool = False  # the last block is fetched before all others
    heads: int = 1  # that a program looks at
    key: float = 1.0  # the time that a key takes
    memory: float = 0.0  # that it takes at least to come from memory, when all fetch
    overhead: int = 64  # keys that take as long as to begin and end a tile,
    part: float = 8.0  # and as to write and to merge a part of one head


SMALL = Size(LEAST_ROWS)
LARGE = Size(LARGE_ROWS, key=1.3, part=8 / 1.3)
# One program fills a processor, but for the registers and the memory that a program of small tiles needs beside it.
LARGEST = Size(LARGEST_ROWS, stages=3, warps=8, registers=192, many=True, crowd=1, leaves=True, overhead=128, part=2.0)
# One warp each, so that very many wait for memory at the same time.
SHORT = Size(LEAST_ROWS, stages=3, warps=1, crowd=4, exact=True)
# For one query and keys that no other head reads: no products, so that there is room for still more.
LONE = Size(1, warps=1, crowd=4, exact=True, heads=2)


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
    least = SMALL if group <= SMALL.rows else SMALL._replace(rows=power_of_two(group))
    rows = reads.brought * group
    is_large = rows > least.rows
    products = np.multiply(rows, reads.tokens, dtype=np.int64)[is_large]
    half, key_bytes = dtype.itemsize == 2, wide(geometry) * dtype.itemsize
    narrow = half and geometry.head_dim <= 128
    each = (len(reads) - len(products)) * heads / processors
    small = _exact(geometry, dtype, reads, ~is_large, each) if each and least.rows == SHORT.rows else None
    if small is None:
        small = _crowded(least, key_bytes)
    pays = PAYS * processors / heads
    if narrow and int(np.add.reduce(products)) > pays and _full(rows[is_large], products) > pays:
        return LARGEST, small
    full = max(least.rows, LARGE_ROWS if half else LARGE_ROWS // 2)
    large = _crowded(LARGE._replace(rows=full, stages=3 if narrow else 2), key_bytes)
    if small.exact:
        return large, small
    # those that have room beside one another fetch more stages ahead, and few warps are enough for few rows
    quick = _crowded(small._replace(stages=3, warps=2 if narrow and small.rows == LEAST_ROWS else small.warps), key_bytes)
    if not products.any():
        return large, _placed(quick if each <= quick.crowd else small, reads, geometry, dtype, processors)
    if not half:
        return large, small
    if each > FEWEST:
        most = (BESIDE + min(LASTS, reads.tokens[~is_large].mean())) * processors / heads * 256 / key_bytes
        across = _across(reads, quick, group)[is_large]
        if across.dot(reads.tokens[is_large] + quick.overhead) > most:
            has_room = small.rows == LEAST_ROWS and key_bytes == AHEAD_BYTES  # in registers: two warps have little
            return large, small._replace(warps=2, ahead=True) if reads.unseen and has_room else small
        rounds = (each + int(across.sum()) * heads / processors) / quick.crowd
        one = _placed(small if 1 < rounds <= 2 else quick, reads, geometry, dtype, processors)
        return one, one
    most = max(LITTLE * processors / heads, LESS * _looked(reads, large, group))
    one = _placed(quick, reads, geometry, dtype, processors) if _looked(reads, quick, group) <= most else large
    return one, one


def _placed(size: Size, reads: Reads, geometry: Geometry, dtype: torch.dtype, processors: int) -> Size:
    """Small tiles of this size, where there are no others: they fetch as much ahead as leaves a place for each of them at once. Who has
    none begins when another has ended."""
    if dtype.itemsize != 2 or size.rows != LEAST_ROWS:
        return size
    key_bytes = wide(geometry) * dtype.itemsize
    block, own = _block(key_bytes) * key_bytes, size.rows * key_bytes + OWN_BYTES
    places = SHARED_BYTES // (4 * block + own)
    if (programs := _programs(reads, size, geometry, processors, places)) > places:
        if size.stages > 2 and not reads.unseen:
            return size  # whole blocks are fetched so soon behind one another that a place more gains less
        return size._replace(stages=2, warps=2, ahead=reads.unseen > 0 and key_bytes == AHEAD_BYTES)
    ahead = reads.unseen > 0 and programs <= SHARED_BYTES // (5 * block + own)
    return size._replace(stages=3, warps=2 if key_bytes <= AHEAD_BYTES else 4, ahead=ahead)


def _programs(reads: Reads, size: Size, geometry: Geometry, processors: int, places: int) -> float:
    """Tiles for each processor, cut as they will be, if it has a place for those that are not cut."""
    heads, real = geometry.kv_heads, (reads.brought > 0) & (reads.tokens > 0)
    queries, tokens, across = reads.brought[real], reads.tokens[real], _across(reads, size, geometry.heads // heads)[real]
    each = int(across.sum()) * heads / processors
    if not 0 < each <= places:
        return each
    merge = MERGE if np.bincount(reads.queries).max() == 1 else 0
    keys = _keys(tokens, across, queries, size, geometry, processors, _fetched(reads, size, geometry, processors), merge)
    return int(across.dot(-(-tokens // keys))) * heads / processors


def _exact(geometry: Geometry, dtype: torch.dtype, reads: Reads, is_small: NDArray[np.bool_], each: float) -> Size | None:
    """For small reads, so many of them for each processor, of which half of the last block would be for nobody."""
    tokens, alone, half = reads.tokens[is_small], geometry.heads == geometry.kv_heads, dtype.itemsize == 2
    mean, is_short = tokens.mean(), half and geometry.head_dim > 128
    if reads.unseen > UNSEEN * len(tokens):
        if each <= (ROOMY if half else 0) or mean > min(LONG, (AMONG_SHORT if is_short else AMONG) * each):
            return None
    elif mean > END or each <= (LONELY if alone or is_short else FEW):
        return None
    lone = alone and each > LONELY and mean <= END and reads.brought[is_small].max() == 1
    return LONE if lone and geometry.heads % LONE.heads == 0 and geometry.slopes is None else SHORT


def _looked(reads: Reads, size: Size, group: int) -> int:
    """Keys that tiles of this size look at, one after the other."""
    return int(_across(reads, size, group).dot(reads.tokens))


def _across(reads: Reads, size: Size, group: int) -> NDArray[np.int64]:
    """Tiles of this size that each read's queries fill."""
    return -(-reads.brought.astype(np.int64) // (size.rows // group))


def suited(size: Size, geometry: Geometry, capability: tuple[int, int]) -> Size:
    """Before Hopper, two warps have no room for what a tile keeps in registers; before Ampere, the largest tiles have none in the memory
    that a processor's programs share."""
    if size.exact or capability >= HOPPER:
        return size
    if capability < AMPERE and size.rows * wide(geometry) > NARROW:
        size = LARGE._replace(rows=max(NARROW // wide(geometry), power_of_two(geometry.heads // geometry.kv_heads)), crowd=1)
    return size._replace(warps=max(4, size.warps))


@lru_cache(maxsize=256)
def _crowded(size: Size, key_bytes: int) -> Size:
    """As many side by side as keys of so many bytes leave room for."""
    block = _block(key_bytes) * key_bytes
    fetched = min(key_bytes, 256) / 256  # a key of more bytes also takes longer to look at
    return size._replace(crowd=max(1, SHARED_BYTES // (2 * size.stages * block)), memory=fetched / size.key)


def _full(rows: Ints, products: NDArray[np.int64]) -> float:
    """Of these products, those that the largest tiles are filled with."""
    return float(products.dot(rows / (-(-rows // LARGEST_ROWS) * LARGEST_ROWS)))


def _fetched(reads: Reads, size: Size, geometry: Geometry, processors: int) -> float:
    """How long all keys take to come from memory, each once, for each processor; where there are many tiles, that does not matter."""
    if len(reads) * geometry.kv_heads > size.crowd * processors:
        return 0.0
    return size.overhead + reads.distinct * reads.page_size * geometry.kv_heads * size.memory / processors


def keys_of(geometry: Geometry, dtype: torch.dtype, page_size: int) -> int:
    return min(_block(wide(geometry) * dtype.itemsize), page_size & -page_size)


def _block(key_bytes: int) -> int:
    """Keys of so many bytes that are looked at together."""
    return min(KEYS, max(LEAST_KEYS, BLOCK_BYTES // key_bytes))


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
    moved: Ints  # of the pairs whose placement is shifted: which of the step's tokens
    shifts: Ints  # and how far
    parts: int

    @property
    def arrays(self) -> tuple[Ints, ...]:
        """Those that lie on the device."""
        return self.counts, self.tiles.ravel(), *self[2:-1]

    @property
    def launches(self) -> tuple[int, int, int]:
        """Large tiles, small ones, and tokens to merge."""
        large, every, tokens = self.counts.tolist()
        return large, every - large, tokens

    def moved_to(self, reads: Reads) -> "Tiles":
        """For reads of the same form, in other pages."""
        tiles = self.tiles.copy()
        tiles[:, 8] = reads.pages[tiles[:, 0] + tiles[:, 1] // reads.page_size]
        return self._replace(tiles=tiles, pages=reads.pages)

    @classmethod
    def cut(cls, reads: Reads, count: int, geometry: Geometry, large: Size, small: Size, processors: int) -> "Tiles":
        group, queries = geometry.heads // geometry.kv_heads, reads.brought
        facts = np.array((reads.page_starts[:-1], reads.query_starts[:-1], queries, reads.tokens, reads.first))  # [5, R]
        room, first = facts[3:].repeat(queries, 1)
        if np.count_nonzero(facts[2:4]) < 2 * len(reads):  # of no queries, or no keys
            facts = facts.compress(facts[2:4].all(0), 1)
        is_few = facts[2] * group <= small.rows
        if large == small or is_few.all():
            merge = MERGE if len(reads.queries) <= count else 0  # a query of several reads is merged, cut or not
            tiles, larger = _tile(facts, reads, small, geometry, processors, _fetched(reads, small, geometry, processors), merge=merge), 0
        else:
            few = _tile(facts.compress(is_few, 1), reads, small, geometry, processors)
            looked = int((few[:, 7] - few[:, 1]).sum())
            fetching = (looked + FETCH * len(few)) * geometry.kv_heads / processors / large.key
            # long ones that come one after the other do not fill what large tiles leave: each processor should have its share of those
            if not large.leaves and looked >= LASTING * len(few) and len(few) * geometry.kv_heads > small.crowd * processors:
                fetching = 0.0
            # short ends are programs small enough to find room beside large tiles at any time: for those nobody has to be done earlier
            lean = large.leaves and not small.exact
            many = _tile(facts.compress(~is_few, 1), reads, large, geometry, processors, fetching, lean)
            tiles, larger = np.concatenate((many, few)), len(many)
        widths = tiles[:, 5]
        begins = widths.cumsum() - widths
        tiles[:, 6] = begins
        pairs = (tiles[:, 4] - begins).repeat(widths)
        owners = reads.queries[pairs + np.arange(len(pairs))]
        parts_of = np.bincount(owners, minlength=count)
        places = -1 - owners
        tokens = (parts_of != 1).nonzero()[0]
        order = owners.astype(np.min_scalar_type(count)).argsort(kind="stable")  # the narrower, the faster
        if len(tokens) < count:
            order = order[parts_of[owners[order]] > 1]
        places[order] = np.arange(len(order), dtype=np.int32)
        moved = reads.shifts.nonzero()[0] if geometry.freqs is not None else np.zeros(0, dtype=np.int64)
        query = reads.queries.copy()
        query[moved] = np.arange(count, count + len(moved), dtype=np.int32)
        starts = np.zeros(len(tokens) + 1, dtype=np.int32)
        starts[1:] = parts_of[tokens].cumsum()
        return cls(
            counts=np.array([larger, len(tiles), len(tokens)], dtype=np.int32), tiles=tiles, pages=reads.pages,
            query=query, reader=reads.queries, base=first + reads.shifts, room=room,
            places=places, tokens=tokens.astype(np.int32), starts=starts,
            moved=reads.queries[moved], shifts=reads.shifts[moved], parts=len(order),
        )  # fmt: skip


def _tile(
    facts: Ints, reads: Reads, size: Size, geometry: Geometry, processors: int,
    meanwhile: float = 0.0, lean: bool = False, merge: int = MERGE,
) -> Ints:  # fmt: skip
    """The tiles of some reads: those of the same keys are neighbours, so that what one has fetched is near for the next. `facts` of each:
    where its pages are listed, where its pairs are, how many, and its keys. `lean`: a processor that is done sooner has keys to fetch."""
    _, _, queries, tokens, _ = facts
    if not len(tokens):
        return np.zeros((0, kernels.FIELDS), dtype=np.int32)
    pairs = size.rows // (geometry.heads // geometry.kv_heads)
    across = (queries.astype(np.int64) + (pairs - 1)) // pairs
    keys = _keys(tokens, across, queries, size, geometry, processors, meanwhile, merge)
    idle = 1 - 2 * int(across[0]) * geometry.kv_heads / processors  # of the processors, if this is one read, in halves
    if lean and len(tokens) == 1 and keys < tokens[0] <= 2 * keys and idle >= 0:
        more = LEAN * (meanwhile - keys * (MEANWHILE + IDLE * idle))
        keys += int(min(max(0, more), keys / 4)) // SHORTEST * SHORTEST
    count = across * ((tokens + (keys - 1)) // keys)
    begin = (count.cumsum() - count).repeat(count)
    cut, slice_ = np.divmod(np.arange(len(begin)) - begin, across.repeat(count))
    page, pair, queries, tokens, _ = facts.repeat(count, 1)
    start, ahead = cut * keys, slice_ * pairs
    tiles = np.zeros((len(begin), kernels.FIELDS), dtype=np.int32)
    tiles[:, 0] = page
    tiles[:, 1] = start
    tiles[:, 4] = pair + ahead
    tiles[:, 5] = np.minimum(queries - ahead, pairs)
    tiles[:, 7] = np.minimum(start + keys, tokens)
    tiles[:, 8] = reads.pages[page + start // reads.page_size]
    return tiles


def _keys(
    tokens: Ints, across: NDArray[np.int64], queries: Ints, size: Size, geometry: Geometry, processors: int, meanwhile: float, merge: int
) -> int:  # fmt: skip
    """Of a tile of these reads, each of so many keys and queries, which fill so many tiles across."""
    if int(np.maximum.reduce(tokens)) <= SHORTEST:
        return SHORTEST
    slow = 1.0  # what only one tile asks for comes no faster than what others fetch
    if size.leaves:
        slow += len(tokens) / int(across.sum())
    return _keys_of_a_tile(across * geometry.kv_heads, queries * geometry.heads, tokens, size, processors, slow, meanwhile, merge)


def _keys_of_a_tile(
    across: NDArray[np.int64], parts: Ints, tokens: Ints, size: Size, processors: int,
    slow: float = 1.0, meanwhile: float = 0.0, merge: int = MERGE,
) -> int:  # fmt: skip
    """So many that the last processor is done soonest. Each tile costs its keys and a little more; several on one
    processor do more together than one behind the other, but each takes longer; there is no hurry while others fetch `meanwhile`; and
    whatever is cut must be merged.

    For each read: its tiles if it is not cut, and the parts it has then.
    """
    longest = max(KEYS, int(np.maximum.reduce(tokens)))
    cuts = _cuts(-(-longest // KEYS))
    if len(tokens) > len(PIECES):
        across, parts, tokens = _together(across, parts, tokens)
    times = (tokens - 1) // cuts[:, None]  # [C, R]: that a read of each length is cut
    tiles, more = times.dot(across) + np.add.reduce(across), times.dot(parts)
    each = np.maximum(tiles / processors, 1)
    crowd = np.minimum(each, size.crowd)
    pace = 1 + COMPANY * (1 - 1 / crowd)
    rounds = (np.ceil(each) if size.many else each) * (int(tokens.astype(np.int64).dot(across)) / tiles + size.overhead) / pace
    last = (np.minimum(cuts, longest) + size.overhead) * crowd / pace
    done = np.maximum(rounds, last)
    if slow > 1 or meanwhile:
        done = np.maximum(done * slow, meanwhile)
    done += more * (size.part / processors)
    done[1:] += merge / size.key  # the first length cuts none
    return int(cuts[done.argmin()])


@lru_cache(maxsize=4096)
def _cuts(blocks: int) -> NDArray[np.int64]:
    """The lengths that so many blocks of keys may be cut into, the longest first."""
    cuts = np.maximum(SHORTEST, -(-blocks // PIECES) * KEYS)
    return cuts[_begins(cuts)]


def _together(across: NDArray[np.int64], parts: Ints, tokens: Ints) -> tuple[NDArray[np.int64], Ints, Ints]:
    """Reads of the same length as one."""
    order = tokens.argsort()
    alike = _begins(tokens[order]).nonzero()[0]
    return np.add.reduceat(across[order], alike), np.add.reduceat(parts[order], alike), tokens[order[alike]]


def _begins(numbers: Ints) -> NDArray[np.bool_]:
    """Is it another than the one before it?"""
    begins = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    return begins
