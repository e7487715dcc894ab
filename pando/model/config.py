"""What a decoder is made of, read from a Hugging Face `config.json` or from GGUF metadata."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `scaling` is the checkpoint's own mapping, in the words `kernels.rope.frequencies` understands."""

    theta: float
    dim: int  # rotated part of a head; the rest passes through
    scaling: dict[str, float | str] | None = None


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    positions: Literal["rope", "alibi", "learned"]
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"]
    gated: bool  # gate and up in one weight, multiplied
    block: Literal["sequential", "parallel", "parallel_two_norms"]
    softmax_scale: float
    rope: Rope | None = None
    alibi_max: float = 8.0
    qk_norm: bool = False
    embed_norm: bool = False
    tied_head: bool = False
    clip_qkv: float | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
