"""A model that fits in a test, on disk as any other."""

import json
from pathlib import Path

import torch
import transformers

from ..tiny import tiny_tokenizer


def write_small_model(directory: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=256, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(str(directory))
    (directory / "tokenizer.json").write_text(tiny_tokenizer()._text, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
