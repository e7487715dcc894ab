"""What surrounds attention in a layer, on a GPU: one launch for each step."""

import torch
from torch import Tensor

from . import triton_ops as kernels
from .fp8 import FP8, Weight, multiplied
from .gpu import Device
from .gpu_linear import GpuLinear
from .launch import Launches, kind_of, power_of_two
from .ops import Activation, AddNorm, Apply, FusedOps, Linear, TorchOps

GATE = 1024  # numbers that a program activates
HEADS = 8  # written together
LOGITS = 8192  # that a program looks at together


class TritonOps(FusedOps):
    def __init__(self, device: Device) -> None:
        self._overlaps = device.overlaps
        self._launch, self._early = Launches(), device.launch()
        self._writes_fp8 = device.where.type == "cpu" or multiplied(device.where)

    def add_rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        size = len(weight)
        wide = power_of_two(size)
        warps = max(1, min(16, wide // 512))

        def apply(x: Tensor, more: Tensor | None) -> Tensor:
            assert x.is_contiguous() and (more is None or more.is_contiguous())
            out = torch.empty_like(x)
            tensors = x, x if more is None else more, weight, out
            self._launch(
                kernels.add_norm, (size, more is None, *kind_of(*tensors)), (len(x),), *tensors, eps,
                size, wide, more is not None, self._overlaps, num_warps=warps, **self._early,
            )  # fmt: skip
            return out

        return apply

    def gate(self, activation: Activation) -> Apply:
        if activation != "silu":
            return super().gate(activation)

        def apply(x: Tensor) -> Tensor:
            x = x.contiguous()
            size = x.shape[1] // 2
            out = x.new_empty(len(x), size)
            self._launch(
                kernels.silu_gate, (size, *kind_of(x, out)), (len(x), -(-size // GATE)), x, out, size, GATE, self._overlaps,
                num_warps=4, **self._early,
            )  # fmt: skip
            return out

        return apply

    def gated(self, linear: Linear, weight: Weight, bias: Tensor | None, activation: Activation) -> Apply:
        plain = super().gated(linear, weight, bias, activation)
        return linear.gated(weight, bias, plain) if isinstance(linear, GpuLinear) and activation == "silu" else plain

    def rotate_and_store(self, qkv: Tensor, turn: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if k.dtype == FP8 and not self._writes_fp8:
            return TorchOps.rotate_and_store(self, qkv, turn, slots, k, v)
        return super().rotate_and_store(qkv, turn, slots, k, v)

    def turn_and_store(self, qkv: Tensor, turn: Tensor, slots: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> None:
        (count, both, size), heads, kv_heads = qkv.shape, turned.shape[1], k.shape[1]
        tensors = qkv, torch.view_as_real(turn), slots, turned, k, v
        self._launch(
            kernels.rotate_and_store, (qkv.shape[1:], heads, turn.shape[-1], *kind_of(*tensors)), (count, -(-both // HEADS)), *tensors,
            heads, kv_heads, size, turn.shape[-1], power_of_two(-(-size // 2)), HEADS, self._overlaps, num_warps=2, **self._early,
        )  # fmt: skip


def likeliest(logits: Tensor, nothing: int) -> tuple[Tensor, Tensor]:
    """Of each row of logits [N, V] the token with the largest, and what is told of it: the same, or `nothing` where none can be chosen."""
    logits = logits.contiguous()
    tokens, told = torch.empty(2, len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        kernels.likeliest[(len(logits),)](logits, tokens, told, logits.shape[1], LOGITS, nothing, num_warps=16)
    return tokens, told


def probe(device: Device, dtype: torch.dtype) -> None:
    """Each kernel once, on next to nothing. Raises whatever a broken compiler or driver raises, before anybody waits for an answer."""
    ops, x = TritonOps(device), torch.ones(1, 64, dtype=dtype, device=device.where)
    found = ops.gate("silu")(ops.add_rms_norm(x[0], 1e-5)(x.clone(), x))
    qkv, slots = x.view(1, 4, 16), torch.zeros(1, dtype=torch.int64, device=device.where)
    turn = torch.ones(1, 8, dtype=torch.complex64, device=device.where)
    _, turned = ops.rotate_and_store(qkv, turn, slots, torch.zeros_like(qkv[:, :1]), torch.zeros_like(qkv[:, :1]))
    if not (found.isfinite().all() and turned.isfinite().all() and likeliest(x, -1)[1].tolist() == [0]):
        raise RuntimeError("they answered no numbers")
