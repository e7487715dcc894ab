"""Reads as kernels take them: tiles of (keys, queries) in a few int32 arrays, for every layer and for every step until the plan changes.

A tile is a run of keys and the packed queries that look at it: `pairs` of a read and a query, each with the G heads of a key's group. What
its rows find is a part; `of` lists the parts of each token, from starts[t] to starts[t + 1], which a merge makes one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .reference import Geometry, Read
from .rope import turns

Ints = NDArray[np.int32]
NONE = np.zeros(0, dtype=np.int64)


class Tiling:
    """`owners` are the tokens that parts made elsewhere answer: they come first. A read is cut after `keys` of its keys if `enough` tiles
    of queries would not keep the machine busy."""

    def __init__(
        self,
        reads: Sequence[Read],
        positions: Tensor,
        geometry: Geometry,
        *,
        rows: int,
        keys: int,
        enough: float,
        owners: Sequence[int] = (),
    ) -> None:
        self._geometry, self._count = geometry, len(positions)
        self.slots = _int32([_host(read.slots) for read in reads])
        self._lengths = _int32([np.full(len(read.queries), len(read.slots)) for read in reads])
        self._first = _int32([np.full(len(read.queries), read.first) for read in reads])
        self.reader = np.concatenate([NONE, *(_host(read.queries) for read in reads)])
        self._shifts = np.concatenate([NONE, *(_host(read.shifts) for read in reads)])
        self._tile(reads, max(1, rows // (geometry.heads // geometry.kv_heads)), keys, enough, list(owners))
        self._find_moved()

    def _tile(self, reads: Sequence[Read], pairs: int, keys: int, enough: float, owners: list[int]) -> None:
        tiles, slot, pair = [], 0, 0
        for read in reads:
            step = len(read.slots) if len(read.queries) / pairs > enough else keys
            for start in range(0, len(read.queries), pairs):
                width = min(pairs, len(read.queries) - start)
                for key in range(0, len(read.slots), step):
                    tiles.append((slot, key, min(key + step, len(read.slots)), pair + start, width, len(owners)))
                    owners += read.queries[start : start + width].tolist()
            slot += len(read.slots)
            pair += len(read.queries)
        self.tiles: Ints = np.array(tiles, dtype=np.int32).reshape(-1, 6)
        self.parts = len(owners)
        order = np.argsort(np.array(owners, dtype=np.int64), kind="stable")
        self.of: Ints = order.astype(np.int32)
        self.starts: Ints = np.searchsorted(np.array(owners, dtype=np.int64)[order], np.arange(self._count + 1)).astype(np.int32)

    def _find_moved(self) -> None:
        """A pair whose placement is shifted looks with a query of its own, behind those of the step."""
        self.moved = np.flatnonzero(self._shifts)
        self.query: Ints = self.reader.astype(np.int32)
        if self._geometry.freqs is not None:
            self.query[self.moved] = self._count + np.arange(len(self.moved))

    def begin(self, positions: NDArray[np.int64]) -> None:
        """Takes in the positions of a step's tokens: how many keys each pair sees, how far ahead of it the first one lies, and how the
        queries of moved placements are turned."""
        at = positions[self.reader] - self._shifts
        self.seen: Ints = np.minimum(at - self._first + 1, self._lengths).astype(np.int32)
        self.ahead: Ints = (self._first - at).astype(np.int32)
        self.turn: Tensor | None = None
        if len(self.moved) and self._geometry.freqs is not None:
            freqs = self._geometry.freqs
            self.turn = turns(torch.from_numpy(at[self.moved]).to(freqs.device), freqs, self._geometry.factor)


def _host(numbers: Tensor) -> NDArray[np.int64]:
    return numbers.cpu().numpy()


def _int32(arrays: Sequence[NDArray[np.int64]]) -> Ints:
    return np.concatenate([NONE, *arrays]).astype(np.int32)
