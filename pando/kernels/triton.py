"""Attention over a plan on a GPU: one launch for each size of tile, and one that merges their parts.

The same tiles as in C (`tiling.py`), and the same arithmetic: scores to base 2, sums in fp32, a part for each (read, query) pair of a tile.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Geometry, Read
from .rope import rotate
from .tiling import Ints, Tiling

LOG2_E = math.log2(math.e)
LEAST_ROWS, ROWS, MOST_ROWS = 16, 64, 256  # packed queries of a tile: what a product needs, what is aimed at, what one group may have
KEYS, STAGES = 64, 3  # keys looked at together, and fetched ahead
LEAST_KEYS = 128  # of a tile: shorter ones cost more in merging than they gain in company
PROGRAMS = 8  # tiles for each processor, so that the last to finish keeps nobody waiting for long
LARGEST_HEAD = 256


@triton.jit
def _tile(
    q, k, v, slopes, tiles, slots, query, seen, ahead, parts, peaks, sums, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile for one kv head. WIDE is D, made a power of two."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tiles + tile * 6)
    begin = tl.load(tiles + tile * 6 + 1)
    end = tl.load(tiles + tile * 6 + 2)
    pair = tl.load(tiles + tile * 6 + 3)
    pairs = tl.load(tiles + tile * 6 + 4)
    part = tl.load(tiles + tile * 6 + 5)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, KEYS)
    real, whole = rows < pairs * G, dims < D
    mine, name = pair + rows // G, head * G + rows % G
    who = tl.load(query + mine, mask=real, other=0).to(tl.int64)
    x = tl.load(q + (who * H + name)[:, None] * D + dims[None, :], mask=real[:, None] & whole[None, :], other=0.0)
    limit = tl.load(seen + mine, mask=real, other=0)
    if ALIBI:
        slope = tl.load(slopes + name, mask=real, other=0.0) * 1.4426950408889634
        offset = tl.load(ahead + mine, mask=real, other=0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    end = tl.minimum(end, tl.max(limit, 0))  # what nobody sees may hold anything, even NaN
    for start in tl.range(begin, end, KEYS):
        j = start + keys
        there = j < end
        slot = tl.load(slots + first + j, mask=there, other=0).to(tl.int64)
        place = (slot * K + head)[:, None] * D + dims[None, :]
        mask = there[:, None] & whole[None, :]
        key = tl.load(k + place, mask=mask, other=0.0)
        score = tl.dot(x, tl.trans(key), input_precision=PRECISION) * scale
        if ALIBI:
            score += slope[:, None] * (offset[:, None] + j[None, :]).to(tl.float32)
        score = tl.where(j[None, :] < limit[:, None], score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(v + place, mask=mask, other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        peak = top
    to = (part + rows // G).to(tl.int64) * H + name
    tl.store(peaks + to, peak, mask=real)
    tl.store(sums + to, total, mask=real)
    tl.store(parts + to[:, None] * D + dims[None, :], acc, mask=real[:, None] & whole[None, :])


@triton.jit
def _merge(parts, peaks, sums, starts, of, out, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """The parts of one token and head. One that saw nothing weighs nothing; a token that saw nothing at all answers zero."""
    token, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, WIDE)
    peak, total, acc = float("-inf"), 0.0, tl.zeros([WIDE], tl.float32)
    for i in tl.range(tl.load(starts + token), tl.load(starts + token + 1)):
        place = tl.load(of + i).to(tl.int64) * H + head
        one = tl.load(peaks + place)
        top = tl.maximum(peak, one)
        safe = tl.where(top == float("-inf"), 0.0, top)
        old, new = tl.exp2(peak - safe), tl.exp2(one - safe)
        total = total * old + tl.load(sums + place) * new
        acc = acc * old + tl.load(parts + place * D + dims, mask=dims < D, other=0.0) * new
        peak = top
    answer = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(out + (token.to(tl.int64) * H + head) * D + dims, answer.to(out.dtype.element_ty), mask=dims < D)


def supports(geometry: Geometry) -> bool:
    return geometry.heads // geometry.kv_heads <= MOST_ROWS and geometry.head_dim <= LARGEST_HEAD


class TritonLowering:
    """A plan as the GPU takes it. Valid until the plan changes."""

    def __init__(self, device: torch.device, reads: Sequence[Read], positions: Tensor, geometry: Geometry) -> None:
        self._device, self._geometry, self._count = device, geometry, len(positions)
        group = geometry.heads // geometry.kv_heads
        reads = [read for read in reads if len(read.slots) and len(read.queries)]
        keys = _keys_of_a_tile(reads, max(1, ROWS // group), geometry.kv_heads, _processors(device))
        tiling = self._tiling = Tiling(reads, positions, geometry, rows=ROWS, keys=keys, enough=math.inf)
        sizes = np.array([max(LEAST_ROWS, triton.next_power_of_2(int(pairs) * group)) for pairs in tiling.tiles[:, 4]], dtype=np.int64)
        self._tiles = [(int(size), self._put(tiling.tiles[sizes == size])) for size in np.unique(sizes)]
        self._fixed = [self._put(numbers) for numbers in (tiling.slots, tiling.query)]
        self._starts, self._of = self._put(tiling.starts), self._put(tiling.of)
        self._moved = torch.from_numpy(tiling.reader[tiling.moved]).to(device)
        self._parts = torch.empty(tiling.parts, geometry.heads, geometry.head_dim, device=device)
        self._peaks, self._sums = torch.empty(2, tiling.parts, geometry.heads, device=device)
        self.begin(positions)

    def begin(self, positions: Tensor) -> None:
        self._tiling.begin(positions.cpu().numpy())
        self._seen, self._ahead = self._put(np.stack((self._tiling.seen, self._tiling.ahead)))

    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._tiling.turn is not None:
            turned = torch.cat((turned, rotate(q[self._moved], self._tiling.turn)))
        turned = turned.contiguous()
        g = self._geometry
        wide = triton.next_power_of_2(g.head_dim)
        out = torch.empty(self._count, g.heads, g.head_dim, dtype=q.dtype, device=q.device)
        results = self._parts, self._peaks, self._sums
        slopes = turned if g.slopes is None else g.slopes
        shape = g.heads, g.kv_heads, g.heads // g.kv_heads, g.head_dim, wide
        keys = KEYS if wide * k.element_size() <= 256 else KEYS // 2
        precision = "ieee" if k.dtype == torch.float32 else "tf32"
        for rows, tiles in self._tiles:
            _tile[len(tiles), g.kv_heads](
                turned, k, v, slopes, tiles, *self._fixed, self._seen, self._ahead, *results, g.scale * LOG2_E, *shape, rows, keys,
                g.slopes is not None, precision, num_warps=4 if rows <= 64 else 8, num_stages=STAGES,
            )  # fmt: skip
        _merge[self._count, g.heads](*results, self._starts, self._of, out, g.heads, g.head_dim, wide, num_warps=1)
        return out

    def _put(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _keys_of_a_tile(reads: Sequence[Read], pairs: int, kv_heads: int, processors: int) -> int:
    """So that every processor has a few tiles, none of them too short."""
    work = sum(-(-len(read.queries) // pairs) * len(read.slots) for read in reads) * kv_heads
    return max(LEAST_KEYS, -(-work // (PROGRAMS * processors) // 64) * 64)
