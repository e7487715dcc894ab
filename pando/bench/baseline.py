"""transformers at its best: what Pando is measured against, in the same process and on the same weights.

Every loop here is the leanest one its users can write: no padding, one prefill of the shared prefix whatever the batch, logits of the last
position only, and both kinds of cache, of which the better one counts.
"""

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from ..errors import InvalidOption
from ..kernels.blocks import BYTES, NIBBLES, Array, encode, plain
from ..model.config import ModelConfig
from ..model.gguf import BLOCKS
from ..model.load import Model
from .random_model import byte_vocabulary, random_config

PROBE_TOKENS = 8
HOPELESS = 3  # a dtype this many times slower than another is not measured further


def library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InvalidOption("the benchmark compares with transformers, which is not installed; pip install 'pando-llm[bench]'") from error
    return transformers


def quiet() -> None:
    library().logging.set_verbosity_error()
    library().logging.disable_progress_bar()


class Baseline:
    """One loaded model in one dtype."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self.model: Any = library().LlamaForCausalLM.from_pretrained(str(directory), dtype=dtype, attn_implementation="sdpa").eval()

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Any]:
        """The next token of the prompt [1, 1], and its cache."""
        return self._next(torch.tensor([list(tokens)]), library().DynamicCache(config=self.model.config))

    @torch.inference_mode()
    def _next(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens of `generate`, up to and with the end of the answer."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True)
        return [int(token) for token in out[0, ids.shape[1] :]]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """fp32 [T, V] of every position."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0].float()

    def score(self, tokens: Sequence[int]) -> float:
        """The sum of the logprobs of all tokens but the first."""
        scores = self.logits(tokens)[:-1].log_softmax(-1)
        return float(scores.gather(1, torch.tensor(tokens[1:])[:, None]).double().sum())

    def time_generate(self, prompt: Sequence[int], count: int) -> float:
        """Decoded tokens per second of `generate`: the time of the first token, taken by a shorter run, is not counted."""
        start = time.perf_counter()
        self._generate_all(prompt, 1)
        middle = time.perf_counter()
        self._generate_all(prompt, count + 1)
        return count / (time.perf_counter() - middle - (middle - start))

    @torch.inference_mode()
    def _generate_all(self, prompt: Sequence[int], count: int) -> None:
        ids = torch.tensor([list(prompt)])
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False, use_cache=True
        )

    def time_decode(self, prompt: Sequence[int], count: int) -> float:
        """Decoded tokens per second of the bare loop around the model."""
        token, cache = self.prefill(prompt)
        return self._time_loop(token, cache, count)

    def time_first(self, tokens: Sequence[int], kept: Any = None) -> float:
        """Seconds to the first token; `kept` is the cache of what comes before, and is not changed."""
        cache = library().DynamicCache(config=self.model.config) if kept is None else fork(kept)
        start = time.perf_counter()
        self._next(torch.tensor([list(tokens)]), cache)
        return time.perf_counter() - start

    def time_shared(self, kept: Any, questions: Sequence[Sequence[int]], count: int) -> float:
        """Decoded tokens per second of a batch over a kept prefix, its cache repeated for every row and growing."""
        cache = fork(kept)
        cache.batch_repeat_interleave(len(questions))
        token, cache = self._next(torch.tensor([list(q) for q in questions]), cache)
        return self._time_loop(token, cache, count)

    @torch.inference_mode()
    def time_shared_static(self, kept: Any, questions: Sequence[Sequence[int]], count: int) -> float:
        """The same with a cache allocated once at its final size."""
        length = kept.get_seq_length()
        cache = library().StaticCache(config=self.model.config, max_cache_len=length + len(questions[0]) + count + 1)
        for i, layer in enumerate(kept.layers):
            cache.update(*(x.expand(len(questions), -1, -1, -1) for x in (layer.keys, layer.values)), i)
        token, cache = self._next(torch.tensor([list(q) for q in questions]), cache)
        return self._time_loop(token, cache, count)

    def _time_loop(self, token: Tensor, cache: Any, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            token, cache = self._next(token, cache)
        return count * len(token) / (time.perf_counter() - start)


def fork(cache: Any) -> Any:
    """A growing cache that begins with this one's contents and shares them: growing makes new tensors, so nothing needs to be copied."""
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    return forked


def usable(directory: Path, prompt: Sequence[int]) -> list[Baseline]:
    """The model in each dtype worth measuring on this machine, float32 first."""
    loaded = [Baseline(directory, dtype) for dtype in (torch.float32, torch.bfloat16)]
    rates = []
    for baseline in loaded:
        baseline.time_decode(prompt, 1)
        rates.append(baseline.time_decode(prompt, PROBE_TOKENS))
    return [baseline for baseline, rate in zip(loaded, rates, strict=True) if rate * HOPELESS >= max(rates)]


def write_random_model(directory: Path) -> None:
    """SmolLM2-135M in all but what it learnt, quantised as it is, with a tokenizer of 256 bytes."""
    config = _config(random_config("smollm2-135m", 8192), tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, dtype="float32")
    torch.manual_seed(0)
    model, codes = library().LlamaForCausalLM(config), {}
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            codes[name] = _quantised(weight.detach().numpy(), BYTES if "embed" in name else NIBBLES)
            weight.data = torch.from_numpy(plain(codes[name], weight.shape[1]))
    model.save_pretrained(str(directory))
    save_file(codes, directory / BLOCKS)
    byte_vocabulary().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8192}), encoding="utf-8")


def _quantised(values: Array, kind: int) -> Array:
    """As GGUF's Q4_1 does it, or its Q8_0."""
    grouped = values.reshape(len(values), -1, 32)
    low = grouped.min(-1) if kind == NIBBLES else np.zeros(grouped.shape[:2], np.float32)
    largest = (grouped - low[..., None]).max(-1) / 15 if kind == NIBBLES else np.abs(grouped).max(-1) / 127
    scales, offsets = (each.astype(np.float16).astype(np.float32) for each in (largest, low))
    codes = np.rint((grouped - offsets[..., None]) / scales[..., None]).clip(0 if kind == NIBBLES else -127, 15 if kind == NIBBLES else 127)
    return encode(kind, codes.astype(np.int16).reshape(values.shape), scales, offsets)


def random_baseline(like: Model) -> Any:
    """A model of the same shape, with random weights of its own, on the same device."""
    with like.device:
        return library().AutoModelForCausalLM.from_config(_config(like.config), dtype=like.dtype, attn_implementation="sdpa").eval()


def _config(facts: ModelConfig, **more: object) -> Any:
    assert facts.rope is not None
    return library().LlamaConfig(
        vocab_size=facts.vocab_size, hidden_size=facts.hidden_size, num_hidden_layers=facts.layers, num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads, head_dim=facts.head_dim, intermediate_size=facts.intermediate_size,
        max_position_embeddings=facts.max_positions, rms_norm_eps=facts.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": facts.rope.theta}, **more,
    )  # fmt: skip
