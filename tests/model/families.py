"""Tiny seeded models of every family, in transformers: odd shapes, and no weight that is zero or one by default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 61
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _LLAMA | {"hidden_size": 64}  # families whose heads are hidden_size / heads wide
_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 72,
    "max_position_embeddings": 96,
}


def _scaled(kind: str, **numbers: float) -> LlamaConfig:
    return LlamaConfig(**_LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **numbers})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_LLAMA),
    "llama-biases": lambda: LlamaConfig(
        **_LLAMA | {"num_key_value_heads": 4}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-linear": lambda: _scaled("linear"),
    "llama-llama3": lambda: _scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "llama-yarn": lambda: _scaled("yarn", original_max_position_embeddings=16),
    "llama-yarn-tuned": lambda: _scaled(
        "yarn", original_max_position_embeddings=24, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.3, truncate=False
    ),
    "llama-yarn-factor": lambda: _scaled("yarn", original_max_position_embeddings=24, attention_factor=1.3),
    "mistral": lambda: MistralConfig(**_LLAMA | {"num_key_value_heads": 1}, sliding_window=64),
    "qwen2": lambda: Qwen2Config(**{name: value for name, value in _WIDE.items() if name != "head_dim"}, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_LLAMA),
    "phi": lambda: PhiConfig(**{name: value for name, value in _WIDE.items() if name != "head_dim"}, partial_rotary_factor=0.375),
    "falcon-7b": lambda: FalconConfig(**_FALCON),
    "falcon-40b": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-11b": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-sequential": lambda: FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, tie_word_embeddings=False),
    "mpt": lambda: MptConfig(vocab_size=VOCAB, d_model=48, n_heads=3, n_layers=3, max_seq_len=96),
    "mpt-clip": lambda: MptConfig(
        vocab_size=VOCAB, d_model=48, n_heads=4, n_layers=3, max_seq_len=96, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.4}
    ),
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=80, n_head=5, n_layer=3),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_positions=96, n_embd=48, n_head=3, n_layer=3, n_inner=72, bos_token_id=1, eos_token_id=2
    ),
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() > 1:
            embeds = any(part in parameter_name for part in ("embed", "wte", "wpe"))
            parameter.data = noise * (0.5 if embeds else 1.5 * min(parameter.shape) ** -0.5)
        else:
            parameter.data = 0.3 * noise + (0.0 if parameter_name.endswith("bias") else 1.0)
    return model


def save(name: str, directory: Path) -> PreTrainedModel:
    model = build(name)
    model.save_pretrained(directory)
    return model


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V], of one prompt alone."""
    with torch.inference_mode():
        answer: torch.Tensor = model(input_ids=tokens[None]).logits[0]
    return answer
