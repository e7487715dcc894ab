"""Reads as the C kernel takes them: tiles of (keys, queries) in a few int32 arrays, for every layer and step until the plan changes.

A tile is a run of keys and the packed queries that look at it: `pairs` of a read and a query, each with the G heads of a key's group. Tiles
with the same queries may be a chain, from chains[c] to chains[c + 1]. What the rows of a chain find is a part; `of` lists the parts of each
token, from starts[t] to starts[t + 1], which a merge makes one.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .reads import Ints, Reads
from .reference import Geometry
from .rope import turns

Numbers = NDArray[np.int64]

GRAIN = 64  # keys of which a cut is a multiple
SHORT = 128  # keys of a chain whose heads are looked at by one thread
PIECES_PER_THREAD = 2  # of reads, if each is cut as often as it may be: with fewer, heads are shared out, too
TASKS_PER_THREAD = 3  # from which the last to finish keeps nobody waiting for long
SIDE, BESIDE = 16, 96  # as many packed queries, and keys, take as long as what is done for every key, and for every read


class Left(NamedTuple):
    """What others leave of the reads: the keys from `begin` to `end` of each. They answer the tokens `owners`, whose parts come first."""

    begin: Numbers  # [R]
    end: Numbers  # [R]
    owners: Numbers


class Tiling:
    """A read is cut into so many tiles that all `threads` are kept busy, but none of less than `keys` keys for that. `heads`: so many of a
    tile had better be looked at by one thread, `together`. `chained`: neighbouring reads with the same queries are cut as if they were
    one."""

    def __init__(
        self, reads: Reads, left: Left, count: int, geometry: Geometry, *, rows: int, keys: int, threads: int, heads: int, chained: bool
    ) -> None:
        self._geometry, self._threads = geometry, threads
        self.slots: Ints = np.add.outer(reads.pages * reads.page_size, np.arange(reads.page_size, dtype=np.int32)).reshape(-1)
        queries = np.diff(reads.query_starts)
        self._first = np.repeat(reads.first, queries)
        self.reader, self._shifts = reads.queries.astype(np.int64), reads.shifts
        run = _runs(reads) if chained else np.arange(len(reads))
        pairs = max(1, rows // (geometry.heads // geometry.kv_heads))
        pieces = ((left.end - left.begin) // keys * -(-queries // pairs)).sum()
        self.together = min(heads, geometry.kv_heads) if pieces >= PIECES_PER_THREAD * threads else 1
        answered = self._tile(reads, left, run, pairs, keys)
        self._list_parts(np.concatenate((left.owners, answered)), count)
        self._find_moved(count)

    def _tile(self, reads: Reads, left: Left, run: Numbers, pairs: int, keys: int) -> Numbers:
        """Makes the tiles of reads, each of which is in a run; answers the tokens of their parts."""
        queries, length = np.diff(reads.query_starts).astype(np.int64), left.end - left.begin
        slices = -(-queries // pairs)
        before, total = _within(run, length)
        wanted = np.maximum(1, np.ceil(self._tasks_of(queries, length, total) / np.maximum(1, slices))).astype(np.int64)
        step = np.maximum(keys, -(-total // wanted // GRAIN) * GRAIN)
        first = before // step
        cuts = (before + length - 1) // step - first + 1
        counts = cuts * slices  # tiles of each read: slices of its queries, and of each its slices of keys
        read = np.repeat(np.arange(len(reads)), counts)
        slice_, cut = np.divmod(np.arange(len(read)) - (np.cumsum(counts) - counts)[read], cuts[read])
        cut += first[read]
        if run.max(initial=-1) + 1 < len(run):  # otherwise they stand in order
            order = np.lexsort((read, cut, slice_, run[read]))
            read, slice_, cut = read[order], slice_[order], cut[order]
        away, stride, most = before[read], step[read], length[read]
        start, stop = (np.minimum(np.maximum(0, -((away - at * stride) // GRAIN) * GRAIN), most) for at in (cut, cut + 1))
        width = np.minimum(pairs, queries[read] - slice_ * pairs)
        pair = reads.query_starts[read] + slice_ * pairs
        heads = np.flatnonzero(_changes(run[read], slice_, cut))
        self.chains: Ints = np.append(heads, len(read)).astype(np.int32)
        self.longer = self._longer(stop - start)
        part = np.cumsum(width[heads]) - width[heads]
        slot, begin, parts = reads.page_starts[read] * reads.page_size, left.begin[read], np.repeat(part, np.diff(self.chains))
        columns = (slot, begin + start, begin + stop, pair, width, len(left.owners) + parts)
        self.tiles: Ints = np.stack(columns, axis=1).astype(np.int32)
        answered: Numbers = self.reader[np.repeat(pair[heads] - part, width[heads]) + np.arange(width[heads].sum())]
        return answered

    def _tasks_of(self, queries: Numbers, length: Numbers, total: Numbers) -> NDArray[np.float64]:
        """Of each read, by the keys of its own and of its run: how often it had better be cut. If there are enough short reads behind all
        others, they keep everyone busy while the last of those ends, and those need not be cut."""
        each = queries * (self._geometry.heads // self._geometry.kv_heads) / SIDE + 1
        last = np.flatnonzero(total > SHORT).max(initial=-1) + 1
        short = np.where(length > 0, (length + BESIDE) * each, 0.0)[last:].sum()
        parts = -(-self._geometry.kv_heads // self.together)
        gap = (total + BESIDE) * each / parts * (self._threads - 1)
        tasks: NDArray[np.float64] = np.minimum(TASKS_PER_THREAD * self._threads / parts, gap / short if short else np.inf)
        return tasks

    def _longer(self, keys: Numbers) -> int:
        """Chains up to the last one of more than a few keys; none is short, if tasks of all heads would be too few."""
        long = np.flatnonzero(np.add.reduceat(keys, self.chains[:-1]) > SHORT) if len(keys) else keys
        first, count = int(long[-1]) + 1 if len(long) else 0, len(self.chains) - 1
        return first if count - first >= TASKS_PER_THREAD * self._threads else count

    def _list_parts(self, owner: Numbers, count: int) -> None:
        self.parts = len(owner)
        self.of: Ints = np.argsort(owner, kind="stable").astype(np.int32)
        self.starts: Ints = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count)))).astype(np.int32)

    def _find_moved(self, count: int) -> None:
        """Pairs whose placements are shifted look with queries of their own, behind those of the step: one for each token and shift."""
        moved = np.flatnonzero(self._shifts)
        _, first, which = np.unique(self._shifts[moved] * np.int64(count) + self.reader[moved], return_index=True, return_inverse=True)
        self.query: Ints = self.reader.astype(np.int32)
        if self._geometry.freqs is not None:
            self.query[moved] = count + which
        self.moved: Numbers = moved[first]
        self.readers_moved: Numbers = self.reader[self.moved]

    def begin(self, positions: Numbers) -> None:
        """Takes in the positions of a step's tokens: how many keys each pair sees, if there are so many, and how the queries of moved
        placements are turned."""
        at = positions[self.reader] - self._shifts
        self.seen: Ints = (at - self._first + 1).astype(np.int32)
        self.turn: Tensor | None = None
        if len(self.moved) and self._geometry.freqs is not None:
            self.turn = turns(torch.from_numpy(at[self.moved]), self._geometry.freqs, self._geometry.factor)


def _runs(reads: Reads) -> Numbers:
    """The number of each read's run: neighbours with the same queries are in one."""
    counts = np.diff(reads.query_starts)
    read = np.repeat(np.arange(len(reads)), counts)
    before = np.maximum(0, np.arange(len(read)) - counts[read])  # where a query stands in the read before, if that has as many
    others = np.bincount(read, reads.queries != reads.queries[before], minlength=len(reads))
    runs: Numbers = np.cumsum(_changes(counts) | (others > 0)) - 1
    return runs


def _within(run: Numbers, length: Numbers) -> tuple[Numbers, Numbers]:
    """Of each read: the keys of its run before it, and all of them."""
    starts = np.cumsum(length) - length
    return starts - starts[np.searchsorted(run, run)], np.bincount(run, length).astype(np.int64)[run]


def _changes(*columns: Numbers | Ints) -> NDArray[np.bool_]:
    """Where one of them is another than before; the first always is."""
    changed = np.zeros(len(columns[0]), dtype=np.bool_)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed
