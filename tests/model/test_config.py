"""Facts out of a config.json: as transformers 4 and 5 write it, and as nobody should."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pando.errors import BadModelFile, InputError, UnsupportedModel
from pando.kernels.rope import frequencies
from pando.model.config import ModelConfig

from .families import FAMILIES, build

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MPT: dict[str, Any] = {"model_type": "mpt", "vocab_size": 100, "d_model": 48, "n_layers": 2, "n_heads": 3}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 32}


def read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(raw | changes)


def test_a_llama_is_read_with_the_defaults_of_transformers() -> None:
    config = read(LLAMA)
    assert (config.family, config.positions, config.norm, config.activation, config.block) == ("llama", "rope", "rms", "silu", "sequential")
    assert (config.head_dim, config.kv_heads, config.softmax_scale, config.norm_eps) == (16, 2, 0.25, 1e-6)
    assert config.rope is not None and (config.rope.theta, config.rope.dim, config.rope.scaling) == (10000.0, 16, None)
    assert not config.tied_head and not config.qkv_bias and config.max_positions == 512


def test_heads_without_groups_are_as_many_as_queries() -> None:
    assert read({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}).kv_heads == 4


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_scaling_is_the_same_in_the_spelling_of_transformers_4_and_5(kind: str) -> None:
    scaling = {kind: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    new = read(LLAMA, rope_parameters=scaling | {"rope_theta": 5e5})
    assert old == new
    assert old.rope is not None and old.rope.scaling == {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64.0,
    }


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith(("llama", "phi"))])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    model = build(name)
    config = ModelConfig.from_hf(model.config.to_dict())
    assert config.rope is not None
    freqs, factor = frequencies(config.rope.dim, config.rope.theta, config.rope.scaling)
    torch.testing.assert_close(freqs, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(model.model.rotary_emb.attention_scaling)


@pytest.mark.parametrize("original", [1, 2, 7])
def test_yarn_of_a_context_too_short_for_one_turn_is_that_of_transformers(original: int) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": original}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA | {"rope_parameters": scaling}))
    rope = read(LLAMA, rope_parameters=scaling).rope
    assert rope is not None
    torch.testing.assert_close(frequencies(rope.dim, rope.theta, rope.scaling)[0], theirs.inv_freq, rtol=1e-6, atol=0)


def test_yarn_without_an_original_length_stretches_the_stated_one() -> None:
    config = read(LLAMA, rope_scaling={"type": "yarn", "factor": 4.0})
    assert config.rope is not None and config.rope.scaling is not None
    assert config.rope.scaling["original_max_position_embeddings"] == 512
    assert config.max_positions == 2048


def test_a_window_shortens_the_context_only_where_it_is_used() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert read(mistral, sliding_window=128).max_positions == 128
    assert read(mistral, sliding_window=4096).max_positions == 512
    assert read(mistral, sliding_window=None).max_positions == 512
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 128}
    assert read(qwen).max_positions == 512
    assert read(qwen, use_sliding_window=False).max_positions == 512
    assert read(qwen, use_sliding_window=True, max_window_layers=1).max_positions == 128
    assert read(qwen, use_sliding_window=True, max_window_layers=2).max_positions == 512


def test_the_forms_of_falcon_differ_in_heads_and_norms() -> None:
    small = read(FALCON)
    assert (small.kv_heads, small.block, small.tied_head, small.intermediate_size) == (1, "parallel", True, 256)
    large = read(FALCON, new_decoder_architecture=True, num_kv_heads=2)
    assert (large.kv_heads, large.block) == (2, "parallel_two_norms")


def test_what_mpt_says_about_attention_is_heard() -> None:
    config = read(MPT, attn_config={"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6, "softmax_scale": 0.5})
    assert (config.positions, config.alibi_max, config.clip_qkv, config.softmax_scale) == ("alibi", 16.0, 6.0, 0.5)
    assert (config.tied_head, config.norm_bias, config.intermediate_size) == (True, False, 192)


def test_ends_of_text_are_one_many_or_none() -> None:
    assert read(LLAMA, eos_token_id=2, bos_token_id=1).eos == (2,)
    assert read(LLAMA, eos_token_id=[7, 8], bos_token_id=None).eos == (7, 8)
    assert read(LLAMA).eos == () and read(LLAMA).bos is None and read(LLAMA, bos_token_id=3).bos == 3


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (LLAMA | {"model_type": "mamba"}, "Pando runs llama, mistral, qwen2, qwen3, phi, falcon, bloom, mpt, gpt2"),
        (LLAMA | {"hidden_act": "quick_gelu"}, "silu"),
        (LLAMA | {"hidden_act": ["silu"]}, "silu"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "linear, llama3, yarn"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "linear, llama3, yarn"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        (FALCON | {"alibi": True}, "alibi"),
        (LLAMA | {"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
        (MPT | {"attn_config": {"alibi": False}}, "alibi"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "multihead_attention"),
        (MPT | {"no_bias": False}, "no_bias"),
        (MPT | {"norm_type": "rmsnorm"}, "norm_type"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_pando_does_not_run_is_named(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_file_that_holds_no_object_is_a_bad_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadModelFile, match=r"config\.json .*; fetch the model again"):
        ModelConfig.from_file(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"vocab_size": None}, "vocab_size in config.json is missing"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size in config.json is 0"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "64 is not divisible by 5"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"head_dim": 15}, "pairs"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"intermediate_size": 1.5}, "intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": "linear"}, "object"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 2.0}, "pairs"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadModelFile, match=says):
        read(LLAMA, **changes)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadModelFile, match="list"):
        ModelConfig.from_hf([])  # type: ignore[arg-type]


JUNK: list[Any] = [None, True, False, -1, 0, 1, 3, 1.5, float("nan"), float("inf"), 10**400, "x", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("raw", [LLAMA, FALCON, MPT, GPT2], ids=lambda raw: raw["model_type"])
def test_no_value_of_any_kind_escapes_as_another_error(raw: dict[str, Any]) -> None:
    inner = ("rope_type", "factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "truncate", "alibi")
    yarn = {"rope_type": "yarn", "factor": 2.0}
    outer = (*raw, "head_dim", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling", "attn_config")
    trials = [raw | {name: value} for name in (*outer, "hidden_act", "eos_token_id", "multi_query", "expansion_ratio") for value in JUNK]
    trials += [raw | {"rope_scaling": yarn | {name: value}, "attn_config": {name: value}} for name in inner for value in JUNK]
    trials += [trial | {"use_sliding_window": True} for trial in trials]
    refused = 0
    for trial in trials:
        try:
            ModelConfig.from_hf(trial)
        except InputError:
            refused += 1
    assert 0 < refused < len(trials)
