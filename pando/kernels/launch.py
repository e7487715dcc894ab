"""Triton kernels that are found once and launched many times.

At every launch Triton looks at all arguments anew, to find the kernel that was compiled for their kind; that takes longer than many a
kernel runs. Where nothing but addresses and numbers that no kernel was compiled for differ, the one found first is launched again.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # bytes: a kernel that may move so many at once is another one


def kind_of(*tensors: Tensor) -> tuple[torch.dtype | bool, ...]:
    """What kernels are compiled for, of tensors whose places differ."""
    return *(tensor.dtype for tensor in tensors), *(tensor.data_ptr() % ALIGNED == 0 for tensor in tensors)


class Launches:
    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def __call__(self, kernel: Any, kind: Hashable, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """`kind` tells apart whatever the kernel is compiled for, `options` among it."""
        name = id(kernel), kind  # its own hash is slow
        found = self._found.get(name)
        if found is None:
            self._found[name] = kernel[grid](*arguments, **options)  # the interpreter has nothing to find
        else:
            found[(*grid, 1, 1)[:3]](*arguments)


def aligned(count: int) -> int:
    """Room for so many numbers of 4 bytes, so that what lies behind them is aligned, too: where it is not, another kernel is compiled."""
    each = ALIGNED // 4
    return max(1, -(-count // each)) * each


def power_of_two(least: int) -> int:
    """That is no less. Triton's own takes some microseconds."""
    return 1 << max(0, least - 1).bit_length()
