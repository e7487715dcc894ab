"""The definition of attention over a plan, in plain torch. Every fast path is tested against this one.

A step brings T new query tokens. A read is a run of keys in the pool and the queries that look at it; a query sees key j of a read when
`first + j <= position - shift`: that one rule makes a prefix fully visible, a row's own tokens causal, and unwritten slots invisible.
Partial results carry the natural logarithm of their softmax sum (`lse`, fp32, [T, H]); merging them is exact in any order, and a read
that a query sees nothing of answers `lse = -inf`, which merges as nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rope import rotate, turns


class Geometry(NamedTuple):
    """What attention needs to know of the model."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    freqs: Tensor | None = None  # [dim / 2]: rotary positions
    factor: float = 1.0  # of the rotation, see rope.frequencies
    slopes: Tensor | None = None  # [H]: ALiBi


class Read(NamedTuple):
    slots: Tensor  # [n] int64: where the keys lie, in the order of their positions
    first: int  # the position at which the first key was stored; the others follow one by one
    queries: Tensor  # [m] int64: which of the step's tokens read it
    shifts: Tensor  # [m] int64: how far each reader's placement moved the keys


def alibi_slopes(heads: int, largest: float = 8.0) -> Tensor:
    """One slope per head, fp32 [H]: a geometric series, with the odd members of the next finer one where H is no power of two."""
    whole = 2 ** math.ceil(math.log2(heads))
    series = 2.0 ** (-largest / whole * torch.arange(1, whole + 1, dtype=torch.float32))
    return series if whole == heads else torch.cat((series[1::2], series[0::2]))[:heads]


def partial(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q [m, H, D] over k, v [n, K, D] under an additive bias [m, H or 1, n]: (out [m, H, D], lse [m, H]), at least fp32."""
    wide, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], q.shape[1] // k.shape[1])  # g query heads look at each of k
    q, k, v = (x.to(wide) for x in (q, k, v))
    scores = torch.einsum("mkgd,nkd->mkgn", q.unflatten(1, groups), k).flatten(1, 2) * scale + bias.to(wide)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("mkgn,nkd->mkgd", weights.unflatten(1, groups), v).flatten(1, 2), lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Folds two partial results over disjoint keys into one. -inf on one side is nothing; on both sides it stays -inf."""
    assert lse.shape == other_lse.shape == out.shape[:-1] and lse.dtype == other_lse.dtype in (torch.float32, torch.float64)
    total = torch.logaddexp(lse, other_lse)
    empty = total.masked_fill(total == -math.inf, 0.0)
    return out * torch.exp(lse - empty)[..., None] + other * torch.exp(other_lse - empty)[..., None], total


def attend(q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read], positions: Tensor, geometry: Geometry) -> Tensor:
    """q [T, H, D], not yet rotated; k, v [S, K, D], the pool of one layer, keys rotated where they were stored; positions [T]."""
    return look(q, k, v, reads, positions, geometry)[0].to(q.dtype)


def look(q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read], positions: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The same as a partial result, which other reads can be merged with: (out [T, H, D], lse [T, H]), at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
    for read in reads:
        if not len(read.slots) or not len(read.queries):
            continue
        at = positions[read.queries] - read.shifts
        read = read._replace(slots=read.slots[: max(0, int(at.max()) - read.first + 1)])  # what nobody sees may hold anything, even NaN
        query = q[read.queries]
        if geometry.freqs is not None:
            query = rotate(query, turns(at, geometry.freqs, geometry.factor))
        ahead = read.first + torch.arange(len(read.slots), device=q.device) - at[:, None]  # [m, n]: key position less query position
        bias = torch.zeros(ahead.shape, device=q.device).masked_fill(ahead > 0, -math.inf)[:, None]
        if geometry.slopes is not None:
            bias = bias + geometry.slopes[:, None] * ahead[:, None]
        part, part_lse = partial(query, k[read.slots], v[read.slots], geometry.scale, bias)
        out[read.queries], lse[read.queries] = merge(out[read.queries], lse[read.queries], part, part_lse)
    return out, lse
