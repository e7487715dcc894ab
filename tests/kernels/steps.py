"""A layer as its steps, one by one: what a layer in one call is compared with."""

from torch import Tensor

from pando.kernels.native import NativeOps
from pando.kernels.ops import Apply, Attend, Maps


def by_steps(
    ops: NativeOps, maps: Maps, linear: list[Apply], x: Tensor, more: Tensor | None, turn: Tensor, slots: Tensor, attend: Attend,
    k: Tensor, v: Tensor,
) -> Tensor:  # fmt: skip
    """As `Whole`, with the linear maps of queries, keys and values, of what is attended to, and of the MLP's two halves."""
    qkv, o, up, down = linear
    heads = qkv(ops.add_rms_norm(maps.norm, maps.eps)(x, more)).view(len(x), -1, maps.head_dim)
    if maps.qk_norm is not None:
        for head, weight in enumerate(maps.qk_norm):
            heads[:, head] = ops.rms_norm(weight, maps.eps)(heads[:, head])
    attended = attend(*ops.rotate_and_store(heads, turn, slots, k, v), k, v).flatten(1)
    return down(ops.gate("silu")(up(ops.add_rms_norm(maps.mlp_norm, maps.eps)(x, o(attended)))))
