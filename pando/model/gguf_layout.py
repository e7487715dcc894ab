"""From GGUF's settings, names and orders back to those of Hugging Face, per architecture."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadModelFile, UnsupportedModel
from .gguf_names import BLOOM, FALCON, FALCON_TWO_NORMS, GPT2, LLAMA, MPT, PHI2, QWEN3

Array = np.ndarray[Any, Any]
Config = dict[str, Any]
Arrange = Callable[[str, Array, Config], Array]

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<part>weight|bias)")
_NOT_WEIGHTS = {"rope_freqs.weight"}  # becomes config


@dataclass(frozen=True)
class Layout:
    """How one file becomes a Hugging Face model. `names` is in the order of writing: GGUF name -> Hugging Face name."""

    path: Path
    config: Config
    names: Mapping[str, str]
    arrange_stem: Arrange
    transposed: frozenset[str]

    def arrange(self, name: str, values: Array) -> Array:
        match = _TENSOR.fullmatch(name)
        assert match is not None  # `names` holds only names that matched
        try:
            arranged = self.arrange_stem(match["stem"], values, self.config)
        except ValueError as error:
            raise BadModelFile(f"{self.path}: {name} of shape {values.shape} does not fit the number of heads; it is corrupt") from error
        return arranged.T if self._is_transposed(name) else arranged

    def shape(self, name: str, shape: tuple[int, ...]) -> list[int]:
        return list(shape[::-1] if self._is_transposed(name) else shape)

    def keeps_rows(self, name: str) -> bool:
        """Rows may change places, and each stays what it is."""
        return not self._is_transposed(name)

    def _is_transposed(self, name: str) -> bool:
        return name.endswith(".weight") and name.split(".")[-2] in self.transposed


@dataclass(frozen=True)
class _Fields:
    """Typed access to the metadata of one architecture."""

    path: Path
    metadata: Mapping[str, Any]
    architecture: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value.tolist()[0]
        elif isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.path}: {self.architecture}.{name} differs from layer to layer, which Pando does not run")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise BadModelFile(f"{self.path}: {self.architecture}.{name} is {value!r} instead of a positive number; the file is corrupt")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModelFile(f"{self.path}: {self.architecture}.{name} is {value!r} instead of a number; the file is corrupt")
        return float(f"{value:.7g}")  # stored as float32: 1e-5 is meant, not 9.999999747378752e-06


@dataclass(frozen=True)
class _Family:
    config: Callable[[_Fields, Mapping[str, tuple[int, ...]]], Config]
    names: Mapping[str, str]
    arrange: Arrange
    transposed: frozenset[str] = frozenset()


def layout_of(path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: Array | None) -> Layout:
    """Config and names for a file's architecture; raises for what Pando cannot run and for what does not fit together."""
    architecture = metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnsupportedModel(f"{path}: GGUF architecture {architecture!r} is not supported; Pando converts {known}")
    family, fields = _FAMILIES[architecture], _Fields(path, metadata, architecture)
    if "blk.0.attn_norm_2.weight" in shapes and architecture == "falcon":
        family = replace(family, names=FALCON_TWO_NORMS)
    if fields.get("expert_count", 0):
        raise UnsupportedModel(f"{path}: a mixture of {fields.get('expert_count')} experts; Pando runs dense models only")
    if "token_embd.weight" not in shapes:
        raise BadModelFile(f"{path}: no token embedding (token_embd.weight); the file is no language model or is only one part of it")
    config = {**family.config(fields, shapes), **_shared(fields, shapes)}
    if rope_factors is not None:
        if "head_dim" not in config:
            raise UnsupportedModel(f"{path}: RoPE factors in a model of architecture {architecture}; Pando knows them in Llama only")
        told, divided = config.get("rope_scaling"), _llama3_scaling(path, rope_factors, config)
        if told and divided:
            raise UnsupportedModel(f"{path}: RoPE factors beside the scaling {told['rope_type']}; Pando runs one of them")
        config["rope_scaling"] = told or divided
    return Layout(path, config, _names(path, family, shapes, fields.whole("block_count")), family.arrange, family.transposed)


def _names(path: Path, family: _Family, shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, str]:
    names: dict[str, str] = {}
    seen: set[int] = set()
    for name in shapes:
        if name in _NOT_WEIGHTS:
            continue
        match = _TENSOR.fullmatch(name)
        if match is None or match["stem"] not in family.names or ("{}" in family.names[match["stem"]]) != bool(match["layer"]):
            raise UnsupportedModel(f"{path}: tensor {name} is not part of any architecture Pando runs; convert the original model instead")
        if match["layer"]:
            seen.add(int(match["layer"]))
        names[name] = family.names[match["stem"]].format(match["layer"]) + "." + match["part"]
    if len(seen) != layers or max(seen) != layers - 1:
        raise BadModelFile(f"{path}: {layers} layers announced, tensors of {len(seen)} found; a split file must be merged first")
    return names


def _shared(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    """What every architecture says in the same words."""
    tokens = {"bos": fields.metadata.get("tokenizer.ggml.bos_token_id"), "eos": fields.metadata.get("tokenizer.ggml.eos_token_id")}
    turn = fields.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != tokens["eos"]:
        tokens["eos"] = turn if tokens["eos"] is None else [tokens["eos"], turn]
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": tokens["bos"],
        "eos_token_id": tokens["eos"],
    }


def _rotary(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    """Llama, Qwen2 and Qwen3."""
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", hidden // heads)
    rotated = fields.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(f"{fields.path}: {rotated} of {head_dim} elements of a head are rotated; Pando expects all of them")
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[fields.architecture]],
        "model_type": fields.architecture,
        "hidden_size": hidden,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.whole("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
    }
    if fields.architecture != "qwen2":
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    scaling = _scaling(fields)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _scaling(fields: _Fields) -> Config | None:
    kind = fields.get("rope.scaling.type", "linear" if fields.get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    factor = fields.real("rope.scaling.factor", fields.get("rope.scale_linear"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"{fields.path}: RoPE scaling {kind!r}; Pando knows linear, llama3 and yarn")
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = fields.whole("rope.scaling.original_context_length", fields.whole("context_length"))
    if fields.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = fields.real("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        if fields.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = fields.real(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3_scaling(path: Path, factors: Array, config: Config) -> Config | None:
    """GGUF keeps only the resulting divisor of each frequency. Every Llama 3 has the same three other numbers: put them in and compare."""
    dim, theta = config["head_dim"], config["rope_theta"]
    if factors.shape != (dim // 2,):
        raise BadModelFile(f"{path}: rope_freqs has shape {factors.shape} instead of {(dim // 2,)}; the file is corrupt")
    if np.all(factors == 1):
        return None
    scaling: Config = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    turns = 8192 * theta ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)
    blend = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
    expected = 1 / (blend + (1 - blend) / scaling["factor"])
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(f"{path}: its RoPE factors are not those of Llama 3; use the original Hugging Face model")
    return scaling


def _gpt2(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": fields.whole("embedding_length"),
        "n_inner": fields.whole("feed_forward_length"),
        "n_layer": fields.whole("block_count"),
        "n_head": fields.whole("attention.head_count"),
        "n_positions": fields.whole("context_length"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _phi2(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    return {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_size": hidden,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "hidden_act": "gelu_new",
        "max_position_embeddings": fields.whole("context_length"),
        "layer_norm_eps": fields.real("attention.layer_norm_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "partial_rotary_factor": fields.whole("rope.dimension_count") / (hidden // heads),
        "rope_scaling": _scaling(fields),
    }


def _falcon(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    kv_heads = fields.whole("attention.head_count_kv", 1)
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": fields.whole("embedding_length"),
        "ffn_hidden_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": fields.whole("attention.head_count"),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in shapes else 1,
        "parallel_attn": True,
        "bias": "blk.0.attn_qkv.bias" in shapes,
        "alibi": False,
        "max_position_embeddings": fields.whole("context_length"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(fields),
    }


def _bloom(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": fields.whole("embedding_length"),
        "n_layer": fields.whole("block_count"),
        "n_head": fields.whole("attention.head_count"),
        "seq_length": fields.whole("context_length"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_epsilon"),
    }


def _mpt(fields: _Fields, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    steepest = fields.real("attention.max_alibi_bias", 8.0)
    attention: Config = {"alibi": True, "alibi_bias_max": int(steepest) if steepest.is_integer() else steepest}
    if fields.get("attention.clamp_kqv"):
        attention["clip_qkv"] = fields.real("attention.clamp_kqv")
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": fields.whole("embedding_length"),
        "n_layers": fields.whole("block_count"),
        "n_heads": fields.whole("attention.head_count"),
        "max_seq_len": fields.whole("context_length"),
        "expansion_ratio": fields.whole("feed_forward_length") // fields.whole("embedding_length"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_epsilon"),
        "attn_config": attention,
    }


def _as_it_is(stem: str, values: Array, config: Config) -> Array:
    return values


def _halves(stem: str, values: Array, config: Config) -> Array:
    """GGUF's llama brings rotated pairs together; Hugging Face keeps the first elements of all pairs before the second ones."""
    if stem not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _by_head(stem: str, values: Array, config: Config) -> Array:
    """GGUF's bloom holds all queries, all keys, all values; Hugging Face holds the three of each head together."""
    if stem != "attn_qkv":
        return values
    return values.reshape(3, config["n_head"], -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _by_group(stem: str, values: Array, config: Config) -> Array:
    """The same for Falcon, where a group is the queries that share one key and value."""
    if stem != "attn_qkv":
        return values
    heads, groups = config["num_attention_heads"], config["num_kv_heads"]
    rows = values.reshape(heads + 2 * groups, -1, *values.shape[1:])
    queries, keys, parts = rows[:heads], rows[heads : heads + groups], rows[heads + groups :]
    grouped = (queries.reshape(groups, -1, *rows.shape[1:]), keys[:, None], parts[:, None])
    return np.concatenate(grouped, axis=1).reshape(values.shape)


_FAMILIES = {
    "llama": _Family(_rotary, LLAMA, _halves),
    "qwen2": _Family(_rotary, LLAMA, _as_it_is),
    "qwen3": _Family(_rotary, QWEN3, _as_it_is),
    "phi2": _Family(_phi2, PHI2, _as_it_is),
    "falcon": _Family(_falcon, FALCON, _by_group),
    "bloom": _Family(_bloom, BLOOM, _by_head),
    "mpt": _Family(_mpt, MPT, _as_it_is),
    "gpt2": _Family(_gpt2, GPT2, _as_it_is, frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})),
}
