"""How far answers are from those of the plain model when its weights, or its KV cache, have 8 bits."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..config import EngineConfig
from ..engine.batch import Batch, Batcher, lowering_of
from ..kernels import fp8
from ..kernels.ops import Apply
from ..kernels.reads import joined
from ..kv.pages import Pages
from ..kv.pool import PagePool
from ..model.load import Model
from .measure import Result
from .workloads import prefix

PAGE = EngineConfig.page_size


@dataclass(frozen=True)
class Passage:
    before: int = 768  # tokens of text
    judged: int = 256  # tokens behind them, all computed in one step


QUICK = Passage(before=24, judged=8)


def compare_fp8(model: Model, load: Callable[[str], Model], text: str, passage: Passage) -> list[Result]:
    """`load`: the same model with weights of that quantization."""
    tokens = prefix(model.tokenizer.encode, text, passage.before + passage.judged + 1)
    exact = _scores(model, tokens, passage)
    following = torch.tensor(tokens[-passage.judged :])
    plain = Result("perplexity, as it is", _perplexity(exact, following), "", note=f"of {passage.judged} tokens behind {passage.before}")
    results = [plain]
    for name, each in _kinds(model, load):
        found = _scores(each, tokens, passage)
        results.append(distance(f"fp8: {name}", found, exact, f"perplexity {_perplexity(found, following):.3f}"))
    return results


def _kinds(model: Model, load: Callable[[str], Model]) -> Iterator[tuple[str, Model]]:
    rounded = load("fp8")
    if fp8.multiplied(model.device):  # a step of so many tokens rounds its rows by itself
        yield "weights, and rows", rounded
    else:
        yield "weights", rounded
        rounded = _rounding_rows(rounded)
        yield "weights, and rows as a GPU rounds them", rounded
    yield "KV cache", model.with_states("fp8")
    yield "both", rounded.with_states("fp8")


def _rounding_rows(model: Model) -> Model:
    """Whatever goes into the linear maps of the layers is rounded."""
    decoder = copy.copy(model.decoder)
    decoder.layers = [copy.copy(layer) for layer in decoder.layers]
    for layer in decoder.layers:
        layer.qkv, layer.o, layer.up, layer.down = map(_of_rounded_rows, (layer.qkv, layer.o, layer.up, layer.down))
        layer.whole = None  # which knows of none of them
    return replace(model, decoder=decoder)


def _of_rounded_rows(apply: Apply) -> Apply:
    return lambda x: apply(fp8.scaled(x).plain(x.dtype))


def _scores(model: Model, tokens: list[int], passage: Passage) -> Tensor:
    """Logarithms of what is expected behind each of the judged tokens, [N, V]: all of them in one step, over states in the pool."""
    count, facts = len(tokens) - 1, model.config
    pages = Pages(-(-count // PAGE), PAGE)
    pool = PagePool(pages, layers=facts.layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim, dtype=model.states, device=model.device)
    every = np.arange(count)
    reads = joined(PAGE, [(range(pages.count), count, 0, range(count), [0] * count)])
    batch = Batch(np.array(tokens[:-1]), every, every, every[-passage.judged :], reads)
    step = Batcher(model.decoder.geometry, PAGE, model.device, lowering_of(model, PAGE)).step(batch)
    return model.decoder.forward(step, pool).cpu().double().log_softmax(-1)


def distance(name: str, found: Tensor, exact: Tensor, note: str) -> Result:
    """Of logarithms of what is expected, [N, V]."""
    divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
    agreed = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
    note = f"same top token {agreed:.1%} of {len(exact)}, {note}"
    return Result(f"KL of the next token, {name}", divergence, "nats", note=note)


def _perplexity(scores: Tensor, following: Tensor) -> float:
    return math.exp(-float(scores.gather(1, following[:, None]).mean()))
