"""Attention over plans of every kind, for nobody: whatever Triton compiles for them is there before anybody waits for it."""

from collections.abc import Iterator
from itertools import product

import torch

from .gpu import Device, TritonLowering
from .reads import Reads, joined
from .reference import Geometry

MOST = 4096  # tokens of a step
BESIDE = ((100, 100), (512, 512), (2048, 2048), (20_000, 1))  # rows that decode: tokens of another row, and how many of them it computes

# Rows, tokens that all of them share, tokens that each has of its own, and how many of those it computes: what makes kernels differ is how
# much there is of each, so that nearly all kinds are among these.
PLANS = (
    *(
        (rows, shared, own, new)
        for rows, shared, own, new in product((1, 3, 8, 32, 64, 300), (0, 64, 1024, 4096), (64, 128, 512, 2048), (1, 16, 100, 512))
        if new <= own and rows * new <= MOST and (rows > 1 or not shared)
    ),
    *((300, 65536, own, 1) for own in (64, 128, 2048)),  # the largest tiles, of models with few heads
    (16, 64, 20_000, 16),
)


def warm_up(device: Device, dtype: torch.dtype, geometry: Geometry, page_size: int, states: torch.dtype) -> None:
    pool = torch.zeros(page_size, geometry.kv_heads, geometry.head_dim, dtype=states, device=device.where)
    for reads, positions in _plans(page_size):
        q = torch.zeros(len(positions), geometry.heads, geometry.head_dim, dtype=dtype, device=device.where)
        TritonLowering(device, dtype, reads, positions, geometry).attend(q, q, pool, pool)
    if device.where.type == "cuda":
        torch.cuda.synchronize(device.where)


def _plans(page_size: int) -> Iterator[tuple[Reads, torch.Tensor]]:
    """All of their pages are the same one. The last of each row's are hardly ever full. Each such plan comes padded, too, as captured steps
    are: what pads them reads nothing, and is merged of no parts. Where all rows decode, there are others with a prompt or a long row beside
    them, all of it again with last pages that are half empty, and one plan with full ones."""
    for rows, shared, own, new in PLANS:
        reads = [_read(page_size, shared, 0, range(rows * new))] if shared else []
        reads += [_read(page_size, own, shared, range(row * new, (row + 1) * new)) for row in range(rows)]
        positions = torch.arange(shared + own - new, shared + own).repeat(rows)
        if new == 1:
            yield joined(page_size, reads), positions
        for unseen in (rows, rows * page_size // 2) if new == 1 else (rows,):
            yield joined(page_size, reads, unseen), positions
            yield joined(page_size, reads, unseen), torch.cat((positions, positions[:1]))
            for tokens, brought in BESIDE if new == 1 else ():
                another = _read(page_size, tokens, 0, range(rows, rows + brought))
                yield joined(page_size, [*reads, another], unseen), torch.cat((positions, torch.arange(tokens - brought, tokens)))


def _read(page_size: int, tokens: int, first: int, queries: range) -> tuple[list[int], int, int, range, list[int]]:
    return [0] * -(-tokens // page_size), tokens, first, queries, [0] * len(queries)
