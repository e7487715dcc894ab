"""Matrix products of the CPU path. Which form of a weight is quickest, and which dtype, differs from machine to machine: it is measured.

oneDNN can keep a weight in a layout of its own. On some CPUs that wins for any number of rows, on some only for more than one; there the
plain weight is kept beside it, as long as memory allows.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Apply = Callable[[Tensor], Tensor]

PROBE = (1536, 576)  # rows and columns of the weight that is timed
FEW, MANY = 1, 32  # rows of input: decoding alone, decoding together


class CpuLinear:
    """Makes linear maps in the form that was quickest here. `spare` is how many bytes second copies of weights may take in all."""

    def __init__(self, dtype: torch.dtype, spare: int) -> None:
        self.spare = spare
        self.packs, self.keeps_plain = _measure(dtype)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Apply:
        plain = partial(F.linear, weight=weight, bias=bias)
        if not self.packs:
            return plain
        if not self.keeps_plain:
            return _packed(weight, bias)
        if weight.nbytes > self.spare:
            return plain
        self.spare -= weight.nbytes
        packed = _packed(weight, bias)
        return lambda x: plain(x) if len(x) == 1 else packed(x)


def _packed(weight: Tensor, bias: Tensor | None) -> Apply:
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, MANY)

    def apply(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")
        return out

    return apply


def _measure(dtype: torch.dtype) -> tuple[bool, bool]:
    """Does the packed form pay, and is the plain one still needed for a single row?"""
    weight = torch.randn(PROBE).to(dtype)
    few, many = torch.randn(FEW, PROBE[1]).to(dtype), torch.randn(MANY, PROBE[1]).to(dtype)
    plain = partial(F.linear, weight=weight)
    try:
        packed = _packed(weight, None)
        packed(few)
    except (RuntimeError, AttributeError, NotImplementedError):  # built without oneDNN, or not for this dtype
        return False, True
    if seconds(lambda: packed(many)) > 0.95 * seconds(lambda: plain(many)):
        return False, True
    return True, seconds(lambda: packed(few)) > 1.05 * seconds(lambda: plain(few))


def fastest_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively and that is quicker than float32, for few rows and for many; else float32."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    spent = {dtype: _probe(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return min(spent, key=lambda dtype: spent[dtype])


def _probe(dtype: torch.dtype) -> float:
    weight = torch.randn(PROBE).to(dtype)
    inputs = [torch.randn(rows, PROBE[1]).to(dtype) for rows in (FEW, MANY)]
    return sum(seconds(partial(F.linear, x, weight)) for x in inputs)


def seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of a few timings: the one least disturbed."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
