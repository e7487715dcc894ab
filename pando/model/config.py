"""What a decoder is made of, read from a Hugging Face `config.json` or from GGUF metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import BadModelFile, UnsupportedModel

Positions = Literal["rope", "alibi", "learned"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Block = Literal["sequential", "parallel", "parallel_two_norms"]


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
    positions: Positions
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    gated: bool  # gate and up in one weight, multiplied
    block: Block
    softmax_scale: float
    rope: Rope | None = None
    alibi_max: float = 8.0
    qk_norm: bool = False
    embed_norm: bool = False
    tied_head: bool = False
    clip_qkv: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    eos: tuple[int, ...] = ()
    bos: int | None = None

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BadModelFile(f"{path} cannot be read as JSON ({error}); fetch the model again") from error
        if not isinstance(raw, dict):
            raise BadModelFile(f"{path} holds a {type(raw).__name__}, not an object; fetch the model again")
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed `config.json`, as transformers 4 or 5 writes it. What it leaves out is what transformers takes for granted."""
        return _read(_Facts(raw))


class _Family(NamedTuple):
    """What every model of a family has in common and does not say in its config."""

    positions: Positions
    norm: Literal["rms", "layer"]
    gated: bool
    activation: str
    context: int
    tied_head: bool = False
    slides: bool = False  # attention has a window unless the config says otherwise
    rotated: float = 1.0  # part of a head
    only: Mapping[str, tuple[object, ...]] = {}  # settings of which Pando runs these values alone


_FAMILIES = {
    "llama": _Family("rope", "rms", True, "silu", 2048),
    "mistral": _Family("rope", "rms", True, "silu", 131072, slides=True),
    "qwen2": _Family("rope", "rms", True, "silu", 32768),
    "qwen3": _Family("rope", "rms", True, "silu", 32768),
    "phi": _Family("rope", "layer", False, "gelu_new", 2048, rotated=0.5, only={"qk_layernorm": (False, None)}),
    "falcon": _Family("rope", "layer", False, "gelu", 2048, tied_head=True, only={"alibi": (False, None)}),
    "bloom": _Family(
        "alibi", "layer", False, "gelu_new", 2048, tied_head=True, only={"apply_residual_connection_post_layernorm": (False, None)}
    ),
    "mpt": _Family(
        "alibi",
        "layer",
        False,
        "gelu",
        2048,
        tied_head=True,
        only={"no_bias": (True,), "logit_scale": (None, 1.0), "norm_type": ("low_precision_layernorm", "layernorm")},
    ),
    "gpt2": _Family(
        "learned",
        "layer",
        False,
        "gelu_new",
        1024,
        tied_head=True,
        only={"scale_attn_by_inverse_layer_idx": (False, None), "add_cross_attention": (False, None)},
    ),
}
_MPT_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "rope": (False, None),
    "qk_ln": (False, None),
    "prefix_lm": (False, None),
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_SCALINGS = ("linear", "llama3", "yarn")


class _Facts:
    """The values of a config, each checked before anything is made of it: the file is somebody else's."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        if not isinstance(raw, Mapping):
            raise BadModelFile(f"config.json holds a {type(raw).__name__} where an object was expected; fetch the model again")
        self.raw = raw

    def find(self, *names: str) -> Any:
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def whole(self, most: int, *names: str, default: int | None = None) -> int:
        value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise BadModelFile(f"{names[0]} in config.json is {_short(value)}; it must be a whole number from 1 to {most}")
        return value

    def real(self, *names: str, default: float | None = None) -> float:
        value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise BadModelFile(f"{names[0]} in config.json is {_short(value)}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.find(name)
        if value is not None and not isinstance(value, bool):
            raise BadModelFile(f"{name} in config.json is {_short(value)}; it must be true or false")
        return default if value is None else value

    def inner(self, name: str) -> "_Facts":
        return _Facts(self.find(name) or {})

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.find(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise BadModelFile(f"{name} in config.json is {_short(value)}; it must be a token, a list of tokens or null")
        return tuple(ids)

    def only(self, accepted: Mapping[str, tuple[object, ...]]) -> None:
        for name, values in accepted.items():
            if name in self.raw and self.raw[name] not in values:
                raise UnsupportedModel(f"{name} is {_short(self.raw[name])} in config.json; Pando runs models where it is {values[0]!r}")


def _short(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _family(facts: _Facts) -> tuple[str, _Family]:
    name = facts.find("model_type")
    if not isinstance(name, str):
        raise BadModelFile(f"model_type in config.json is {_short(name)}; is this the config of a language model?")
    family = _FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"the architecture {_short(name)} is not supported; Pando runs {', '.join(_FAMILIES)}")
    if facts.find("quantization_config"):
        raise UnsupportedModel("the checkpoint is quantized (quantization_config); use the original in float32, float16 or bfloat16")
    facts.only(family.only)
    return name, family


def _read(facts: _Facts) -> ModelConfig:
    name, family = _family(facts)
    attention = facts.inner("attn_config")  # MPT keeps what concerns attention here
    attention.only(_MPT_ATTENTION)
    hidden = facts.whole(2**18, "hidden_size", "n_embd", "d_model", "n_embed")
    layers = facts.whole(4096, "num_hidden_layers", "n_layer", "n_layers")
    heads = facts.whole(4096, "num_attention_heads", "n_head", "n_heads")
    ratio = facts.whole(64, "expansion_ratio", default=4)
    head_dim = _head_dim(facts, name, hidden, heads)
    scale = 1.0 if name == "gpt2" and not facts.flag("scale_attn_weights", True) else head_dim**-0.5
    rope = _rope(facts, family, head_dim) if family.positions == "rope" else None
    qkv_bias, o_bias, mlp_bias = _biases(facts, name)
    return ModelConfig(
        family=name,
        vocab_size=facts.whole(2**24, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(facts, name, heads),
        head_dim=head_dim,
        intermediate_size=facts.whole(2**22, "intermediate_size", "ffn_hidden_size", "n_inner", default=hidden * ratio),
        max_positions=_context(facts, family, layers, rope),
        positions=family.positions,
        norm=family.norm,
        norm_eps=facts.real("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6 if family.norm == "rms" else 1e-5),
        activation=_activation(facts, family),
        gated=family.gated,
        block=_block(facts, name),
        softmax_scale=attention.real("softmax_scale", default=scale),
        rope=rope,
        alibi_max=attention.real("alibi_bias_max", default=8.0),
        qk_norm=name == "qwen3",
        embed_norm=name == "bloom",
        tied_head=facts.flag("tie_word_embeddings", family.tied_head),
        clip_qkv=attention.real("clip_qkv") if attention.find("clip_qkv") else None,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        norm_bias=family.norm == "layer" and name != "mpt",
        head_bias=name == "phi",
        eos=facts.tokens("eos_token_id"),
        bos=next(iter(facts.tokens("bos_token_id")), None),
    )


def _kv_heads(facts: _Facts, name: str, heads: int) -> int:
    grouped = name != "falcon" or facts.flag("new_decoder_architecture")
    single = name == "falcon" and facts.flag("multi_query", True)
    kv_heads = facts.whole(heads, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads) if grouped else 1 if single else heads
    if heads % kv_heads:
        raise BadModelFile(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly; config.json is wrong")
    return kv_heads


def _head_dim(facts: _Facts, name: str, hidden: int, heads: int) -> int:
    if facts.find("head_dim") is None and name == "qwen3":
        return 128
    if facts.find("head_dim") is None and hidden % heads:
        raise BadModelFile(f"hidden_size {hidden} is not divisible by {heads} attention heads; config.json is wrong")
    return facts.whole(4096, "head_dim", default=hidden // heads)


def _context(facts: _Facts, family: _Family, layers: int, rope: Rope | None) -> int:
    context = facts.whole(2**31 - 1, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=family.context)
    if rope and rope.scaling and rope.scaling["type"] == "yarn":  # some configs still state the length before stretching
        context = max(context, int(float(rope.scaling["factor"]) * float(rope.scaling["original_max_position_embeddings"])))
    if facts.raw.get("sliding_window", 4096) is None or not _slides(facts, family, layers):
        return context
    # Up to the window's length a sliding window hides nothing, so the answers are the same; beyond it Pando does not go.
    return min(context, facts.whole(2**31 - 1, "sliding_window", default=4096))


def _slides(facts: _Facts, family: _Family, layers: int) -> bool:
    """Does any layer see a window only? Qwen carries a window that it does not use, or uses from some layer on."""
    if not facts.flag("use_sliding_window", family.slides):
        return False
    kinds, first = facts.find("layer_types"), facts.find("max_window_layers")
    if isinstance(kinds, list) and not family.slides:
        return "sliding_attention" in kinds
    return family.slides or not isinstance(first, int) or first < layers


def _activation(facts: _Facts, family: _Family) -> Activation:
    name = facts.find("hidden_act", "activation_function", "activation") or family.activation
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"the activation {_short(name)} is not supported; Pando runs {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _block(facts: _Facts, name: str) -> Block:
    if name == "phi":
        return "parallel"
    if name != "falcon":
        return "sequential"
    if facts.flag("new_decoder_architecture"):
        return "parallel_two_norms" if facts.whole(2, "num_ln_in_parallel_attn", default=2) == 2 else "parallel"
    return "parallel" if facts.flag("parallel_attn", True) else "sequential"


def _biases(facts: _Facts, name: str) -> tuple[bool, bool, bool]:
    """Of the query, key and value projections; of the attention's output; of the MLP."""
    match name:
        case "llama" | "qwen3":
            attention = facts.flag("attention_bias")
            return attention, attention, name == "llama" and facts.flag("mlp_bias")
        case "qwen2":
            return True, False, False
        case "falcon":
            return (facts.flag("bias"),) * 3
        case "phi" | "bloom" | "gpt2":
            return True, True, True
        case _:
            return False, False, False


def _rope(facts: _Facts, family: _Family, head_dim: int) -> Rope:
    """transformers 4 writes `rope_theta` and `rope_scaling`; 5 writes both into `rope_parameters`."""
    inner = facts.inner("rope_scaling" if facts.find("rope_scaling") else "rope_parameters")
    if any(isinstance(value, Mapping) for value in inner.raw.values()):
        raise UnsupportedModel("the rotary positions differ between layers in config.json; Pando runs models where they are the same")
    part = inner.real("partial_rotary_factor", default=facts.real("partial_rotary_factor", default=family.rotated))
    dim = int(head_dim * part)
    if not 0 < dim <= head_dim or dim % 2:
        raise BadModelFile(f"partial_rotary_factor {part} rotates {dim} of {head_dim} elements of a head; they must come in pairs")
    theta = inner.real("rope_theta", default=facts.real("rope_theta", default=10000.0))
    if theta <= 1:
        raise BadModelFile(f"rope_theta in config.json is {theta}; it must be above 1")
    return Rope(theta, dim, _scaling(facts, inner, family))


def _scaling(facts: _Facts, inner: _Facts, family: _Family) -> dict[str, float | str] | None:
    kind = inner.find("rope_type", "type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"the rope scaling {_short(kind)} is not supported; Pando runs {', '.join(_SCALINGS)}, or none")
    scaling: dict[str, float | str] = {"type": kind, "factor": inner.real("factor")}
    if kind == "linear":
        return scaling
    context = facts.real("max_position_embeddings", default=family.context)
    original = inner.real("original_max_position_embeddings", default=context)
    # A length that stands outside the scaling's own mapping has the last word in transformers.
    scaling["original_max_position_embeddings"] = facts.real("original_max_position_embeddings", default=original)
    if kind == "llama3":
        low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
        if not low < high:
            raise BadModelFile(f"low_freq_factor {low} must be below high_freq_factor {high} in config.json")
        return scaling | {"low_freq_factor": low, "high_freq_factor": high}
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if inner.find(name):
            scaling[name] = inner.real(name)
    return scaling | {"truncate": float(inner.flag("truncate", True))}
