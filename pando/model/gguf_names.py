"""What GGUF calls a tensor, and what Hugging Face calls it; `{}` is the number of the layer."""

LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
QWEN3 = {**LLAMA, "attn_q_norm": "model.layers.{}.self_attn.q_norm", "attn_k_norm": "model.layers.{}.self_attn.k_norm"}
PHI2 = {
    **{stem: name for stem, name in LLAMA.items() if stem not in ("ffn_gate", "ffn_norm")},
    "output_norm": "model.final_layernorm",
    "attn_output": "model.layers.{}.self_attn.dense",
    "ffn_up": "model.layers.{}.mlp.fc1",
    "ffn_down": "model.layers.{}.mlp.fc2",
}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.ln_1",
    "attn_qkv": "transformer.h.{}.attn.c_attn",
    "attn_output": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn_up": "transformer.h.{}.mlp.c_fc",
    "ffn_down": "transformer.h.{}.mlp.c_proj",
}
BLOOM = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.input_layernorm",
    "attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "attn_output": "transformer.h.{}.self_attention.dense",
    "ffn_norm": "transformer.h.{}.post_attention_layernorm",
    "ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
FALCON = {stem: name for stem, name in BLOOM.items() if stem not in ("ffn_norm", "token_embd_norm")}
FALCON_TWO_NORMS = {**FALCON, "attn_norm_2": "transformer.h.{}.ln_attn", "attn_norm": "transformer.h.{}.ln_mlp"}
MPT = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "attn_norm": "transformer.blocks.{}.norm_1",
    "attn_qkv": "transformer.blocks.{}.attn.Wqkv",
    "attn_output": "transformer.blocks.{}.attn.out_proj",
    "ffn_norm": "transformer.blocks.{}.norm_2",
    "ffn_up": "transformer.blocks.{}.ffn.up_proj",
    "ffn_down": "transformer.blocks.{}.ffn.down_proj",
}
