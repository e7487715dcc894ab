"""How K and V become bytes: as they are, or with 8 bits for each number.

A layer of `none` is K [n, Kh, D], then V. One of `int8` or `fp8` begins with its scales in float32: those of the keys, one for each channel
over all tokens of the page, and those of the values, one for each token and head; then follow K and V, a byte for each number. Keys have
channels that are far larger than others at every token, and values have not.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InvalidOption
from .tier import Shape

_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)}
_NAN = -128  # of int8: the one value that no number is rounded to
_FLOAT = 4  # bytes of a scale


class Codec(Protocol):
    def layer_bytes(self, shape: Shape, tokens: int) -> int: ...

    def encode(self, k: Tensor, v: Tensor) -> Tensor:
        """K and V [L, n, Kh, D] as bytes [L, layer_bytes]."""
        ...

    def decode(self, data: Tensor, shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
        """The other way. `data` may have fewer layers than the shape."""
        ...


def codec(name: str) -> Codec:
    match name:
        case "none":
            return _Exact()
        case "int8":
            return _Scaled(torch.int8, 127.0)
        case "fp8":
            return _Scaled(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max)
    raise InvalidOption(f"there is no codec {name!r} for the store; take none, fp8 or int8")


class _Exact:
    def layer_bytes(self, shape: Shape, tokens: int) -> int:
        return 2 * tokens * shape.kv_heads * shape.head_dim * _DTYPES[shape.dtype].itemsize

    def encode(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack((k, v), dim=1).flatten(1).view(torch.uint8)

    def decode(self, data: Tensor, shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the data."""
        k, v = data.view(_DTYPES[shape.dtype]).view(-1, 2, tokens, shape.kv_heads, shape.head_dim).unbind(1)
        return k, v


class _Scaled:
    def __init__(self, kind: torch.dtype, largest: float) -> None:
        self._kind = kind
        self._largest = largest

    def layer_bytes(self, shape: Shape, tokens: int) -> int:
        return sum(self._sizes(shape, tokens))

    def _sizes(self, shape: Shape, tokens: int) -> tuple[int, int, int, int]:
        """Bytes of the scales of K and V, then of K and V."""
        numbers = tokens * shape.kv_heads * shape.head_dim
        return _FLOAT * shape.kv_heads * shape.head_dim, _FLOAT * tokens * shape.kv_heads, numbers, numbers

    def encode(self, k: Tensor, v: Tensor) -> Tensor:
        k_scales, k_codes = self._rounded(k.float(), over=1)
        v_scales, v_codes = self._rounded(v.float(), over=3)
        return torch.cat([part.flatten(1).view(torch.uint8) for part in (k_scales, v_scales, k_codes, v_codes)], dim=1)

    def decode(self, data: Tensor, shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
        k_scales, v_scales, k_codes, v_codes = data.split(self._sizes(shape, tokens), dim=1)
        whole = -1, tokens, shape.kv_heads, shape.head_dim
        k = self._numbers(k_codes).view(whole) * _floats(k_scales).view(-1, 1, shape.kv_heads, shape.head_dim)
        v = self._numbers(v_codes).view(whole) * _floats(v_scales).view(-1, tokens, shape.kv_heads, 1)
        return k.to(_DTYPES[shape.dtype]), v.to(_DTYPES[shape.dtype])

    def _rounded(self, x: Tensor, over: int) -> tuple[Tensor, Tensor]:
        """Scales, and what is left of the numbers. What is not finite becomes NaN, and does not spoil its neighbours."""
        known = x.nan_to_num(0.0, 0.0, 0.0)
        scales = (known.abs().amax(over, keepdim=True) / self._largest).clamp_min(torch.finfo(torch.float32).tiny)
        codes = known / scales
        is_whole = self._kind == torch.int8
        if is_whole:
            codes.round_()
        if not torch.equal(known, x):  # rare, and slow to look for number by number
            codes.masked_fill_(~x.isfinite(), _NAN if is_whole else math.nan)
        return scales, codes.to(self._kind)

    def _numbers(self, codes: Tensor) -> Tensor:
        numbers = codes.contiguous().view(self._kind).float()
        return numbers.where(numbers != _NAN, math.nan) if self._kind == torch.int8 else numbers


def _floats(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a clone, since a part may begin anywhere
