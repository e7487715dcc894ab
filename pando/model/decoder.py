"""The only decoder. Its features follow the config; its loop is the same for every family.

T tokens of any number of rows go through one forward pass; which of them belong together is known to `step.attend` alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import fp8
from ..kernels.fp8 import Scaled, Weight
from ..kernels.ops import ACTIVATIONS, AddNorm, Apply, Attend, Linear, Maps, TorchOps, Whole, add_norm
from ..kernels.reference import Geometry, alibi_slopes
from ..kernels.rope import frequencies, turns
from .config import ModelConfig
from .weights import LayerWeights, Norm, Weights


@dataclass
class Step:
    """One forward pass, as the engine hands it over."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where each token's K and V are written
    wanted: Tensor | None  # [N] int64: the tokens whose logits are wanted; None: all
    attend: Attend
    logits: Tensor | None = None  # [N, V]: where they are written, if not to memory of their own


class Pool(Protocol):
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [S, K, D]."""
        ...


def plain_linear(weight: Weight, bias: Tensor | None) -> Apply:
    if isinstance(weight, Scaled):
        return fp8.linear(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def geometry(config: ModelConfig, device: torch.device) -> Geometry:
    freqs, factor, slopes = None, 1.0, None
    if config.rope is not None:
        freqs, factor = frequencies(config.rope.dim, config.rope.theta, config.rope.scaling)
        freqs = freqs.to(device)
    if config.positions == "alibi":
        slopes = alibi_slopes(config.heads, config.alibi_max).to(device)
    return Geometry(config.heads, config.kv_heads, config.head_dim, config.softmax_scale, freqs, factor, slopes)


class Decoder:
    """`linear` and `ops` are the places where a device brings faster forms of the same maths."""

    def __init__(self, config: ModelConfig, weights: Weights, linear: Linear = plain_linear, ops: TorchOps | None = None) -> None:
        ops = ops or TorchOps()
        self.config = config
        self.geometry = geometry(config, weights.embed.device)
        self.embed, self.positions = weights.embed, weights.positions
        self.embed_norm = _norm(weights.embed_norm, config, ops) if weights.embed_norm else None
        self.layers = [_Layer(layer, config, linear, ops) for layer in weights.layers]
        self.norm = _norm(weights.norm, config, ops)
        self.head = linear(weights.head, weights.head_bias)

    @torch.inference_mode()
    def forward(self, step: Step, pool: Pool) -> Tensor:
        """Writes K and V of the step's tokens into the pool and answers the logits of the wanted ones, [N, V], fp32 if nothing is said."""
        x, turn = self.embedded(step.tokens, step.positions), self.turned(step.positions)
        last = len(self.layers) - 1
        more = self._through(range(last), x, turn, step, pool)
        layer = self.layers[last]
        normed = layer.attn_norm(x, more)
        if step.wanted is not None and not len(step.wanted):  # the middle of a prompt
            layer.take_apart(normed, turn, step.slots, *pool.layer(last))
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32 if step.logits is None else x.dtype)
        attended = layer.attention(normed, turn, step, *pool.layer(last))
        if step.wanted is not None:  # nobody reads the other tokens any more: their K and V are written
            x, normed, attended = (each.index_select(0, step.wanted) for each in (x, normed, attended))
        logits = self.head(self.norm(x, layer.finish(x, normed, attended)))
        return logits.to(torch.float32) if step.logits is None else step.logits.copy_(logits)

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The stream as it enters the first layer, [T, C]."""
        x = F.embedding(tokens, self.embed)
        if self.positions is not None:
            x += F.embedding(positions, self.positions)
        return x if self.embed_norm is None else self.embed_norm(x, None)

    def turned(self, positions: Tensor) -> Tensor | None:
        freqs = self.geometry.freqs
        return None if freqs is None else turns(positions, freqs, self.geometry.factor)

    def through(self, layers: range, x: Tensor, turn: Tensor | None, step: Step, pool: Pool) -> Tensor:
        """The stream behind some of the layers. It is changed in place."""
        more = self._through(layers, x, turn, step, pool)
        return x if more is None else x.add_(more)

    def _through(self, layers: range, x: Tensor, turn: Tensor | None, step: Step, pool: Pool) -> Tensor | None:
        """Answers what has yet to be added to the stream: the norm behind it does so."""
        more = None
        for index in layers:
            more = self.layers[index](x, more, turn, step, *pool.layer(index))
        return more

    def store(self, index: int, x: Tensor, turn: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes the K and V that one layer makes of the stream before it; nothing is attended to."""
        layer = self.layers[index]
        layer.take_apart(layer.attn_norm(x, None), turn, slots, k, v)


class _Layer:
    def __init__(self, weights: LayerWeights, config: ModelConfig, linear: Linear, ops: TorchOps) -> None:
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.clip, self.eps = config.clip_qkv, config.norm_eps
        self.sequential = config.block == "sequential"
        self.attn_norm = _norm(weights.attn_norm, config, ops)
        self.mlp_norm = _norm(weights.mlp_norm, config, ops) if weights.mlp_norm else None
        self.qkv, self.o = linear(weights.qkv, weights.qkv_bias), linear(weights.o, weights.o_bias)
        self.up, self.down = _up(weights, config, linear, ops), linear(weights.down, weights.down_bias)
        self.rotate_and_store = ops.rotate_and_store
        self.qk_norm: Tensor | None = None  # [H + K, D]: one product serves queries and keys
        if weights.q_norm is not None and weights.k_norm is not None:
            self.qk_norm = torch.cat((weights.q_norm.weight.expand(self.heads, -1), weights.k_norm.weight.expand(self.kv_heads, -1)))
        self.whole = self._whole(weights, config, ops)

    def _whole(self, w: LayerWeights, config: ModelConfig, ops: TorchOps) -> Whole | None:
        """All of it in one call, if it is of the usual kind."""
        usual = (config.block, config.norm, config.gated, config.activation, config.clip_qkv)
        if usual != ("sequential", "rms", True, "silu", None) or w.mlp_norm is None:
            return None
        if isinstance(w.qkv, Scaled) or isinstance(w.o, Scaled) or isinstance(w.up, Scaled) or isinstance(w.down, Scaled):
            return None
        maps = (w.qkv, w.qkv_bias), self.qk_norm, (w.o, w.o_bias), w.mlp_norm.weight, (w.up, w.up_bias), (w.down, w.down_bias)
        return ops.whole(Maps(w.attn_norm.weight, *maps, self.heads, self.kv_heads, self.head_dim, self.eps))

    def __call__(self, x: Tensor, more: Tensor | None, turn: Tensor | None, step: Step, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Adds to the stream what it has yet to take in, and answers the same of this layer."""
        if self.whole is not None and turn is not None:
            done = self.whole(x, more, turn, step.slots, step.attend, k_pool, v_pool)
            if done is not None:
                return done
        normed = self.attn_norm(x, more)
        return self.finish(x, normed, self.attention(normed, turn, step, k_pool, v_pool))

    def attention(self, normed: Tensor, turn: Tensor | None, step: Step, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        q, turned = self.take_apart(normed, turn, step.slots, k_pool, v_pool)
        return step.attend(q, turned, k_pool, v_pool).flatten(1)  # [T, H * D]

    def take_apart(self, normed: Tensor, turn: Tensor | None, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        """The queries, as they are and rotated; keys and values go to their slots."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(normed).view(-1, heads + 2 * kv_heads, self.head_dim)  # [T, H + 2K, D]
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if self.qk_norm is not None:
            qkv[:, : heads + kv_heads] = F.rms_norm(qkv[:, : heads + kv_heads], (self.head_dim,), eps=self.eps).mul_(self.qk_norm)
        return self.rotate_and_store(qkv, turn, slots, k_pool, v_pool)

    def finish(self, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, for the tokens that go on: answers what has yet to be added to the stream. The MLP reads the stream
        after attention, or beside it (parallel blocks)."""
        if self.sequential and self.mlp_norm is not None:
            return self.mlp(self.mlp_norm(x, self.o(attended)))
        beside = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x, None))
        x.add_(self.o(attended))
        return beside

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _up(weights: LayerWeights, config: ModelConfig, linear: Linear, ops: TorchOps) -> Apply:
    """The first half of the MLP, with its activation."""
    if config.gated:
        return ops.gated(linear, weights.up, weights.up_bias, config.activation)
    up, activate = linear(weights.up, weights.up_bias), ACTIVATIONS[config.activation]
    return lambda x: activate(up(x))


def _norm(norm: Norm, config: ModelConfig, ops: TorchOps) -> AddNorm:
    if config.norm == "rms":
        return ops.add_rms_norm(norm.weight, config.norm_eps)
    return add_norm(ops.layer_norm(norm.weight, norm.bias, config.norm_eps))
