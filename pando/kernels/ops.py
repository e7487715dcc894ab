"""The steps of a decoder layer, in plain torch. `native.NativeOps` and `gpu_ops.TritonOps` do some of them in fewer calls."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .fp8 import Weight, store
from .rope import rotate

Apply = Callable[[Tensor], Tensor]
AddNorm = Callable[[Tensor, Tensor | None], Tensor]  # the norm of a stream, to which what is given is added first, in place
Linear = Callable[[Weight, Tensor | None], Apply]  # (weight, bias): a place to pack weights for a device
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# (q, not rotated [T, H, D]; q rotated at the step's positions, or q itself [T, H, D]; k and v of the pool [S, K, D]) -> [T, H, D]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (the stream [T, C]; what it has yet to take in; how its positions turn; its slots; who attends; k and v of the pool) -> what it has then
# yet to take in; None, and nothing is done, where it cannot be done for these
Whole = Callable[[Tensor, Tensor | None, Tensor, Tensor, Attend, Tensor, Tensor], Tensor | None]

ACTIVATIONS: dict[Activation, Apply] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Maps(NamedTuple):
    """Of a layer whose MLP reads the stream behind attention, and is gated by SiLU. Norms are RMS; maps have a bias or none."""

    norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    qk_norm: Tensor | None  # [H + K, D]: of each query and key
    o: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def add_norm(norm: Apply) -> AddNorm:
    """The sum is rounded to the stream's dtype before the norm reads it."""

    def apply(x: Tensor, more: Tensor | None) -> Tensor:
        return norm(x if more is None else x.add_(more))

    return apply


class TorchOps:
    def add_rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        return add_norm(self.rms_norm(weight, eps))

    def rms_norm(self, weight: Tensor, eps: float) -> Apply:
        return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Apply:
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=eps)

    def gate(self, activation: Activation) -> Apply:
        """[T, 2I] to [T, I]: the first half, activated, times the second."""
        apply = ACTIVATIONS[activation]

        def gated(x: Tensor) -> Tensor:
            gate, other = x.chunk(2, dim=-1)
            return apply(gate).mul_(other)

        return gated

    def gated(self, linear: Linear, weight: Weight, bias: Tensor | None, activation: Activation) -> Apply:
        """[T, C] to [T, I]: a linear map to [T, 2I], and its gate."""
        up, gate = linear(weight, bias), self.gate(activation)
        return lambda x: gate(up(x))

    def rotate_and_store(self, qkv: Tensor, turn: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes qkv [T, H + 2K, D] apart: keys, rotated, and values go to their slots of the pool [S, K, D]; queries are answered as they
        are and rotated, [T, H, D]."""
        kv_heads = k.shape[1]
        heads = qkv.shape[1] - 2 * kv_heads
        q, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        turned = q
        if turn is not None:
            turned, key = rotate(qkv[:, : heads + kv_heads], turn).split((heads, kv_heads), dim=1)
        store(k, slots, key)
        store(v, slots, value)
        return q, turned

    def whole(self, maps: Maps) -> Whole | None:
        """Such a layer in one call, where there is one."""
        return None


class FusedOps(TorchOps):
    """Where a kernel takes queries, keys and values apart in one go."""

    def turn_and_store(self, qkv: Tensor, turn: Tensor, slots: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes the rotated queries to `turned`, and the rest to the pool."""
        raise NotImplementedError

    def rotate_and_store(self, qkv: Tensor, turn: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if turn is None:
            return super().rotate_and_store(qkv, turn, slots, k, v)
        count, both, size = qkv.shape
        heads = both - 2 * k.shape[1]
        qkv = qkv.contiguous()
        turned = qkv.new_empty(count, heads, size)
        self.turn_and_store(qkv, turn, slots, turned, k, v)
        return qkv[:, :heads], turned
