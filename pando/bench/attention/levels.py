"""The same attention composed of torch's own kernels: a flash call for each level of the tree, and a merge. No shared key is read twice.

Segments of one level, length and number of readers are one batched call, over views of the pool where they lie evenly; the queries of their
readers, and the heads of a group, are folded into the length of the query.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .scene import Scene

Flash = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v [B, H, n, D] to out, and lse [B, H, n] to base e


class Unfit(Exception):
    """There is no such kernel for this case."""


class Batch(NamedTuple):
    """Segments that one call reads."""

    k: Tensor  # [B, K, N, D]
    v: Tensor
    rows: Tensor | None  # the readers of the first, of the second, and so on; None: all rows, in order
    readers: int  # of each


class ByLevels:
    def __init__(self, scene: Scene) -> None:
        self._case, self._flash = scene.case, _flash(scene)
        self._levels = [self._batches(scene, depth) for depth in range(max(scene.case.depth) + 1)]
        self._levels = [level for level in self._levels if level]

    def _batches(self, scene: Scene, depth: int) -> list[Batch]:
        case, alike = scene.case, dict[tuple[int, int], list[int]]()
        for index, part in enumerate(case.segments):
            if case.depth[index] == depth and part.tokens and case.readers[index]:  # these kernels may crash on nothing at all
                alike.setdefault((part.tokens, len(case.readers[index])), []).append(index)
        batches = []
        for (_, readers), found in alike.items():
            rows = [row for index in found for row in case.readers[index]]
            every = rows == list(range(len(case.rows)))
            k, v = (_side_by_side(pool, scene, found) for pool in (scene.k, scene.v))
            batches.append(Batch(k, v, None if every else torch.tensor(rows, device=scene.device), readers))
        return batches

    def attend(self, q: Tensor) -> Tensor:
        """q [R, H, D]."""
        parts = [self._level(q, level) for level in self._levels]
        if len(parts) == 1:
            return parts[0][0]
        weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]  # [levels, R, H, 1]
        out = parts[0][0] * weights[0]
        for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
            out += part * weight
        return out.to(q.dtype)

    def _level(self, q: Tensor, level: list[Batch]) -> tuple[Tensor, Tensor]:
        """Of a level that a row has nothing in, it finds nothing: lse -inf."""
        if level[0].rows is None:
            return self._read(q, level[0])
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
        for batch in level:
            assert batch.rows is not None
            part, part_lse = self._read(q[batch.rows], batch)
            out.index_copy_(0, batch.rows, part)
            lse.index_copy_(0, batch.rows, part_lse)
        return out, lse

    def _read(self, q: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        segments, kv_heads, readers, size = len(batch.k), self._case.hkv, batch.readers, self._case.d
        folded = q.view(segments, readers, kv_heads, -1, size).transpose(1, 2).reshape(segments, kv_heads, -1, size)  # [B, K, n x G, D]
        out, lse = self._flash(folded, batch.k, batch.v)
        out = out.reshape(segments, kv_heads, readers, -1, size).transpose(1, 2).reshape(q.shape)
        return out, lse.reshape(segments, kv_heads, readers, -1).transpose(1, 2).reshape(q.shape[:2])


def _side_by_side(pool: Tensor, scene: Scene, found: list[int]) -> Tensor:
    """Segments of equal length [B, K, N, D]: a view where they lie at even distances, otherwise a copy, which is not timed."""
    starts, tokens = [scene.start[index] for index in found], scene.case.segments[found[0]].tokens
    steps = {b - a for a, b in pairwise(starts)} or {tokens}
    if len(steps) == 1:
        _, kv_heads, size = pool.shape
        slot = kv_heads * size
        flat = pool.as_strided((len(found), tokens, kv_heads, size), (steps.pop() * slot, slot, size, 1), starts[0] * slot)
    else:
        flat = torch.stack([pool[start : start + tokens] for start in starts])
    return flat.transpose(1, 2)


def _flash(scene: Scene) -> Flash:
    scale, dtype = scene.geometry.scale, scene.q.dtype
    if scene.device.type == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return lambda q, k, v: on_cpu(q, k, v, 0.0, False, scale=scale)
    if dtype == torch.float32 or scene.case.d > 256 or scene.case.d % 8:
        raise Unfit(f"torch's flash kernel takes no {scene.case.dtype} heads of {scene.case.d} on a GPU")
    on_gpu = torch.ops.aten._scaled_dot_product_flash_attention
    return lambda q, k, v: on_gpu(q, k, v, 0.0, False, False, scale=scale)[:2]
