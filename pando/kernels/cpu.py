"""Attention over a plan on the CPU.

The fused CPU kernel of torch answers (out, lse) for one dense problem at a time, so the work is to make few and dense problems:

- a run of keys that all of its readers see (a prefix) is one call, its readers' queries folded into one long query;
- a row's own new tokens are one causal square;
- the tails of rows that decode one token each are gathered into one padded batch; a long tail that lies in one piece is a run.

Neighbouring slots are a view of the pool, not a copy. A `Lowering` is built when the plan changes; it serves every layer, and every later
step of the same rows, in which only the positions move on.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .reads import Reads
from .reference import Geometry, Read, merge
from .rope import rotate, turns

LONG = 256  # keys from which reading in place beats joining the padded batch
BIAS_ELEMENTS = 1 << 24  # the largest bias held at once, where positions are a bias
UNSEEN = "whoever reads keys sees the first of them: over none, torch's kernel ends the process"
Part = tuple[Tensor, Tensor]  # out [m, H, D], lse [m, H] fp32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Lowering:
    """Reads made ready for the CPU: `begin` a step, then `attend` in each layer."""

    def __init__(self, reads: Reads, positions: Tensor, geometry: Geometry) -> None:
        self.parts: list[Run | Square | _Tails] = []
        short: list[Read] = []
        host = positions.numpy()
        singles = np.count_nonzero(np.diff(reads.query_starts) == 1)
        for read in reads.each():
            if not len(read.slots) or not len(read.queries):
                continue
            if len(read.queries) == 1:
                assert host[read.queries] - read.shifts.numpy() >= read.first, UNSEEN
                in_place = (len(read.slots) >= LONG or singles == 1) and _contiguous(read.slots.numpy())
                if in_place:
                    self.parts.append(Run(read, len(host), geometry))
                else:
                    short.append(read)
            else:
                whole, own = split_own(read, host)
                self.parts += [Run(whole, len(host), geometry)] if whole else []
                self.parts += [Square(own, len(host), geometry)] if own else []
        self.parts += [_Tails(batch, len(host), geometry) for batch in _distinct(short)]
        self.parts.sort(key=lambda part: part.queries is not None)  # one that answers every token needs no merge to start from
        self.begin(positions)

    def begin(self, positions: Tensor) -> None:
        """Takes in the positions of a step's tokens: what follows from them alone is computed here, once for all layers."""
        for part in self.parts:
            part.begin(positions)

    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, and the same rotated at the step's positions, [T, H, D]; k and v of one layer, [S, K, D]."""
        parts = iter(self.parts)
        if self.parts and self.parts[0].queries is None:
            out, lse = next(parts).read(q, turned, k, v)
        else:
            out = torch.zeros(q.shape, dtype=torch.float32)
            lse = torch.full(q.shape[:2], -math.inf)
        for part in parts:
            other, other_lse = part.read(q, turned, k, v)
            if part.queries is None:
                out, lse = merge(out, lse, other, other_lse)
            else:
                merged, merged_lse = merge(out[part.queries], lse[part.queries], other, other_lse)
                out = out.float()  # partial results keep fp32 from the first merge on
                out[part.queries], lse[part.queries] = merged, merged_lse
        return out.to(q.dtype)


class Run:
    """Keys that all of their readers see."""

    def __init__(self, read: Read, count: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slots = _index(read.slots)
        self.first, self.capacity = read.first, len(read.slots)
        self.queries = _some(read.queries, count)
        self.shifts, self.moved = read.shifts, bool(read.shifts.any())

    def begin(self, positions: Tensor) -> None:
        self.at = (positions if self.queries is None else positions[self.queries]) - self.shifts
        self.length = min(self.capacity, int(self.at.min()) - self.first + 1)  # one reader's own run grows with it
        moved = self.moved and self.geometry.freqs is not None
        self.turn = turns(self.at, self.geometry.freqs, self.geometry.factor) if moved and self.geometry.freqs is not None else None

    def read(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Part:
        query = q if self.turn is not None else turned
        query = query if self.queries is None else query[self.queries]
        query = query if self.turn is None else rotate(query, self.turn)
        k, v = (_keys(x, self.slots, self.length) for x in (k, v))
        slopes = self.geometry.slopes
        if slopes is None:
            return _dense(query, k, v, self.geometry, None)
        ahead = self.first + torch.arange(self.length) - self.at[:, None]  # [m, n]
        step = max(1, BIAS_ELEMENTS // (self.length * self.geometry.heads))
        parts = [
            _dense(query[i : i + step], k, v, self.geometry, slopes[:, None, None] * ahead[i : i + step])
            for i in range(0, len(query), step)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


class Square:
    """A row's new tokens, each of which sees itself and those before it."""

    def __init__(self, read: Read, count: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slots, self.length = _index(read.slots), len(read.slots)
        first = int(read.queries[0])
        self.queries = None if self.length == count else slice(first, first + self.length)

    def begin(self, positions: Tensor) -> None:
        pass

    def read(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Part:
        query = (turned if self.queries is None else turned[self.queries]).transpose(0, 1)[None]  # [1, H, m, D]
        k, v = (_keys(x, self.slots, self.length).transpose(0, 1)[None] for x in (k, v))
        slopes, scale = self.geometry.slopes, self.geometry.scale
        if slopes is None:
            out, lse = _flash(query, k, v, 0.0, True, scale=scale)
        else:
            ahead = torch.arange(self.length) - torch.arange(self.length)[:, None]
            bias = (slopes[:, None, None] * ahead).masked_fill_(ahead > 0, -math.inf)[None].to(query.dtype)
            out, lse = _flash(query, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)


class _Tails:
    """Short runs of one query each, side by side in a padded batch."""

    def __init__(self, reads: Sequence[Read], count: int, geometry: Geometry) -> None:
        self.geometry = geometry
        width = max(len(read.slots) for read in reads)
        table = np.zeros((len(reads), width), dtype=np.int64)  # padding points at slot 0, masked
        for row, read in zip(table, reads, strict=True):
            row[: len(read.slots)] = read.slots.numpy()
        self.slots = torch.from_numpy(table)  # [R, N]
        self.capacity = torch.tensor([len(read.slots) for read in reads])
        self.first = torch.tensor([read.first for read in reads])
        self.queries = _some(torch.cat([read.queries for read in reads]), count)
        self.shifts = torch.cat([read.shifts for read in reads])
        self.moved = bool(self.shifts.any())

    def begin(self, positions: Tensor) -> None:
        at = (positions if self.queries is None else positions[self.queries]) - self.shifts
        seen = torch.minimum(at - self.first + 1, self.capacity)
        self.width = int(seen.max())
        self.now = self.slots[:, : self.width].reshape(-1)
        place = torch.arange(self.width)
        hidden = (place >= seen[:, None])[:, None, None]
        self.unseen = hidden.flatten().nonzero()[:, 0]  # may hold anything: a weight of 0 times NaN is NaN
        slopes, freqs = self.geometry.slopes, self.geometry.freqs
        if slopes is None:
            bias = torch.zeros(hidden.shape)
        else:
            bias = slopes.view(1, self.geometry.kv_heads, -1, 1) * (self.first[:, None] + place - at[:, None])[:, None, None]
        self.bias = bias.masked_fill(hidden, -math.inf)  # [R, K or 1, G or 1, N]
        self.turn = turns(at, freqs, self.geometry.factor) if self.moved and freqs is not None else None

    def read(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Part:
        query = q if self.turn is not None else turned
        query = query if self.queries is None else query[self.queries]
        query = query if self.turn is None else rotate(query, self.turn)
        geometry, rows = self.geometry, len(self.shifts)
        shape = (rows, self.width, geometry.kv_heads, geometry.head_dim)
        k, v = (x.index_select(0, self.now).index_fill_(0, self.unseen, 0).view(shape).transpose(1, 2) for x in (k, v))  # [R, K, N, D]
        folded = query.reshape(rows, geometry.kv_heads, -1, geometry.head_dim)  # [R, K, G, D]
        out, lse = _flash(folded, k, v, 0.0, False, attn_mask=self.bias.to(q.dtype), scale=geometry.scale)
        return out.reshape(rows, geometry.heads, -1), lse.reshape(rows, geometry.heads)


def _dense(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, bias: Tensor | None) -> Part:
    """Every query [m, H, D] over every key [n, K, D]: the m x G queries of a key head are the rows of one problem. Bias: [H, m, n]."""
    count, kv_heads, size = len(q), geometry.kv_heads, geometry.head_dim
    folded = q.view(count, kv_heads, -1, size).transpose(0, 1).reshape(1, kv_heads, -1, size)  # [1, K, m x G, D]
    if bias is not None:
        bias = bias.view(kv_heads, -1, count, len(k)).transpose(1, 2).reshape(1, kv_heads, -1, len(k)).to(q.dtype)
    out, lse = _flash(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0.0, False, attn_mask=bias, scale=geometry.scale)
    out = out.view(kv_heads, count, -1, size).transpose(0, 1).reshape(count, -1, size)
    return out, lse.view(kv_heads, count, -1).transpose(0, 1).reshape(count, -1)


def split_own(read: Read, positions: NDArray[np.int64]) -> tuple[Read | None, Read | None]:
    """A read of several queries, cut into the keys that all of them see, and the queries' own, of which each sees those up to itself."""
    queries = read.queries.numpy()
    at = positions[queries] - read.shifts.numpy()
    before = int(at.min()) - read.first
    assert before >= 0, UNSEEN
    if len(read.slots) <= before + 1:
        return read, None
    assert _contiguous(queries) and _contiguous(at) and not read.shifts.any(), "a row's new tokens follow one another"
    own = Read(read.slots[before : before + len(queries)], read.first + before, read.queries, read.shifts)
    return (Read(read.slots[:before], read.first, read.queries, read.shifts) if before else None), own


def _distinct(reads: Sequence[Read]) -> list[list[Read]]:
    """Batches in which no query stands twice, so that each can be merged in one go."""
    batches: list[list[Read]] = []
    depth: dict[int, int] = {}
    for read in reads:
        query = int(read.queries[0])
        place = depth[query] = depth.get(query, -1) + 1
        if place == len(batches):
            batches.append([])
        batches[place].append(read)
    return batches


def _contiguous(numbers: NDArray[np.int64]) -> bool:
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all())


def _index(slots: Tensor) -> slice | Tensor:
    return slice(int(slots[0]), int(slots[-1]) + 1) if _contiguous(slots.numpy()) else slots


def _keys(x: Tensor, slots: slice | Tensor, length: int) -> Tensor:
    """The first keys of a run [n, K, D]: a view where they lie in one piece."""
    return x[slots.start : slots.start + length] if isinstance(slots, slice) else x.index_select(0, slots[:length])


def _some(queries: Tensor, count: int) -> Tensor | None:
    """None where they are all of the step's tokens in order: then nothing is gathered."""
    return None if len(queries) == count and bool((queries == torch.arange(count)).all()) else queries
