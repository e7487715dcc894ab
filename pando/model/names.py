"""What a checkpoint must hold: for every family the names of its tensors, and from a config their shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without the prefix of the whole model."""

    embed: str
    layer: str
    attn_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    o: str
    up: tuple[str, ...]
    down: str
    norm: str
    positions: str = ""
    embed_norm: str = ""
    grouped: bool = False  # qkv holds, for each key-value head: its query heads, the key head, the value head
    transposed: bool = False  # weights stored [in, out]


_LLAMA = Names(
    embed="embed_tokens",
    layer="layers.{}.",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norm="norm",
)
_BLOOM = Names(
    embed="word_embeddings",
    embed_norm="word_embeddings_layernorm",
    layer="h.{}.",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    norm="ln_f",
    grouped=True,
)
_MPT = Names(
    embed="wte",
    layer="blocks.{}.",
    attn_norm="norm_1",
    mlp_norm="norm_2",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
    norm="norm_f",
)
_GPT2 = Names(
    embed="wte",
    positions="wpe",
    layer="h.{}.",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm="ln_f",
    transposed=True,
)
_NAMES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi": replace(_LLAMA, o="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", norm="final_layernorm"),
    "falcon": _BLOOM,
    "bloom": _BLOOM,
    "mpt": _MPT,
    "gpt2": _GPT2,
}


def names_of(config: ModelConfig) -> Names:
    names = _NAMES[config.family]
    two = config.family == "falcon" and config.block == "parallel_two_norms"
    return replace(names, attn_norm="ln_attn", mlp_norm="ln_mlp") if two else names


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every tensor the checkpoint must hold, by the name in the file without its prefix."""
    names, c, i, d = names_of(config), config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.heads * d, config.kv_heads * d

    def linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
        yield name + ".weight", (columns, rows) if names.transposed else (rows, columns)
        if bias:
            yield name + ".bias", (rows,)

    def norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
        yield name + ".weight", (width,)
        if config.norm_bias:
            yield name + ".bias", (width,)

    yield names.embed + ".weight", (config.vocab_size, c)
    if config.positions == "learned":
        yield names.positions + ".weight", (config.max_positions, c)
    if config.embed_norm:
        yield from norm(names.embed_norm, c)
    for index in range(config.layers):
        at = names.layer.format(index)
        yield from norm(at + names.attn_norm, c)
        if config.block != "parallel":
            yield from norm(at + names.mlp_norm, c)
        for name, rows in zip(names.qkv, (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,), strict=True):
            yield from linear(at + name, rows, c, config.qkv_bias)
        yield from linear(at + names.o, c, q, config.o_bias)
        for name in names.up:
            yield from linear(at + name, i, c, config.mlp_bias)
        yield from linear(at + names.down, c, i, config.mlp_bias)
        if config.qk_norm:
            yield at + "self_attn.q_norm.weight", (d,)
            yield at + "self_attn.k_norm.weight", (d,)
    yield from norm(names.norm, c)
    if not config.tied_head:
        yield "lm_head.weight", (config.vocab_size, c)
    if config.head_bias:
        yield "lm_head.bias", (config.vocab_size,)
