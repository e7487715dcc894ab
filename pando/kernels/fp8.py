"""Numbers of 8 bits: e4m3, which have 3 bits behind the point and reach from 2^-9 to 448. Weights and rows of input have a scale for each
row, keys and values of the pool have none.

This is the definition, in plain torch. On GPUs of sm_89 on, `gpu_linear` multiplies them as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
ROWS = 4096  # that are rounded at a time: beside a weight there is room for a part of it, and not for all of it in float32


@dataclass(frozen=True)
class Scaled:
    """A matrix whose row i is `codes[i] * scales[i]`."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N] fp32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def plain(self, dtype: torch.dtype) -> Tensor:
        """[N, K]. Multiplied in float32, and rounded once."""
        return (self.codes.to(torch.float32) * self.scales[:, None]).to(dtype)


Weight = Tensor | Scaled


def scaled(x: Tensor) -> Scaled:
    """A matrix [N, K] in 8 bits: the largest number of each row becomes the largest that there is."""
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    for start in range(0, len(x), ROWS):
        part = x[start : start + ROWS].to(torch.float32)
        scale = scales[start : start + ROWS]
        scale.copy_((part.abs().amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny))
        codes[start : start + ROWS] = (part / scale[:, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return Scaled(codes, scales)


def multiplied(place: torch.device) -> bool:
    """Whether the device multiplies them as they are."""
    return place.type == "cuda" and torch.cuda.get_device_capability(place) >= (8, 9)


def linear(weight: Scaled, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The weight made plain for every product: nothing but memory is saved, and it takes longer."""
    return lambda x: F.linear(x, weight.plain(x.dtype), bias)


def store(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Writes rows to their slots of the pool [S, K, D], in its dtype. What 8 bits do not reach becomes the largest number they have; NaN
    stays NaN."""
    if pool.dtype == FP8:
        x = x if x.dtype == FP8 else x.clamp(-LARGEST, LARGEST).to(FP8)
        pool, x = pool.view(torch.uint8), x.view(torch.uint8)  # torch copies no numbers of 8 bits by an index
    pool.index_copy_(0, slots, x)
