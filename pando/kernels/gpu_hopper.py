"""The kernel for large tiles that only a Hopper GPU can run: where it may be used, and how it is launched."""

import logging
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .gpu_tiles import HOPPER
from .reference import Geometry

log = logging.getLogger(__name__)

HEADS, PAGE = (64, 128), 64  # sizes that it is tried with
BESIDE = 104  # registers of a small program's thread: each of a processor's schedulers has so many left, for one warp


class Hopper:
    """Made by `found`."""

    def __init__(self, page_size: int) -> None:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia import hopper

        from . import gluon

        self.look, self.options = gluon.look, {"num_warps": 4, "maxnreg": gluon.REGISTERS}
        self._kind, self._layout, self._page_size = hopper.TensorDescriptor, NVMMASharedLayout(128, 16), page_size

    def descriptor(self, pool: Tensor) -> TensorDescriptor:
        """Of one layer's keys or values [S, K, D], in pages of one head."""
        slots, kv_heads, size = pool.shape
        return self._kind(pool, [slots, kv_heads * size], [kv_heads * size, 1], [self._page_size, size], self._layout)


def found(where: torch.device, dtype: torch.dtype, geometry: Geometry, page_size: int) -> Hopper | None:
    if where.type != "cuda" or torch.cuda.get_device_capability(where) != HOPPER:
        return None
    if dtype.itemsize != 2 or geometry.slopes is not None or geometry.head_dim not in HEADS or page_size != PAGE:
        return None
    return _tried(where, dtype, geometry.heads, geometry.kv_heads, geometry.head_dim, page_size)


@lru_cache
def _tried(where: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int) -> Hopper | None:
    """One query over one page of ones, before anybody relies on it: it is written for an experimental part of Triton."""
    try:
        hopper = Hopper(page_size)
        ints: list[list[int]] = [[0, 0, 0, page_size, 0, 1, 0, page_size, 0, 0], [1, 1, 0], [0], [0], [page_size], [-1]]
        plan = [torch.tensor(numbers, dtype=torch.int32, device=where) for numbers in ints]
        q, parts = (torch.zeros(1, heads, head_dim, dtype=kind, device=where) for kind in (dtype, torch.float32))
        ones, out = hopper.descriptor(torch.ones(page_size, kv_heads, head_dim, dtype=dtype, device=where)), torch.zeros_like(q)
        shape = heads, kv_heads, heads // kv_heads, head_dim
        hopper.look[(1,)](q, ones, ones, *plan, parts, parts, out, 1.0, *shape, page_size, True, **hopper.options)
        if (out == 1).all():
            return hopper
        reason = "it answered wrong"
    except Exception as error:  # a compiler and a driver raise whatever they like
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    log.warning("the kernel for large tiles on Hopper is not used: %s", reason)
    return None
