"""Cold prompts: how soon one is answered of which nothing is known, beside transformers and beside the least that it could take."""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ...config import EngineConfig
from ...engine.engine import Engine
from ...engine.graphs import SEEN_WITH_PROMPTS
from ...errors import PandoError
from ..baseline import random_baseline
from ..options import whole_numbers
from ..picture import Axes
from ..trial import ask, drawn
from .report import number, times
from .setting import Setting

TABLE = "cold"
LENGTHS = [512, 2048, 8192, 30000]
HEADS = ("tokens", "first ms", "tok/s", "theirs ms", "x theirs", "products", "attention", "x floors")


@dataclass(frozen=True)
class Cold:
    tokens: int
    ms: tuple[float, ...]
    theirs_ms: tuple[float, ...]  # of transformers, where it is installed and has room
    products_ms: float
    attention_ms: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def over_theirs(self) -> float | None:
        return statistics.median(self.theirs_ms) / self.median_ms if self.theirs_ms else None

    @property
    def over_floors(self) -> float:
        return self.median_ms / (self.products_ms + self.attention_ms)

    def cells(self) -> Sequence[str]:
        theirs = number(statistics.median(self.theirs_ms)) if self.theirs_ms else "-"
        floors = number(self.products_ms), number(self.attention_ms), times(self.over_floors)
        return (
            str(self.tokens), number(self.median_ms), number(1e3 * self.tokens / self.median_ms), theirs, times(self.over_theirs), *floors
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "ms": self.ms, "theirs_ms": self.theirs_ms, "products_ms": self.products_ms,
            "attention_ms": self.attention_ms, "over_theirs": self.over_theirs, "over_floors": self.over_floors,
        }  # fmt: skip


def add_options(to: argparse._ArgumentGroup) -> None:
    said = f"tokens of the prompts, one length after the other ({','.join(map(str, LENGTHS))})"
    to.add_argument("--cold-prompts", type=whole_numbers, default=LENGTHS, metavar="N,N,...", help=said)


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    lengths, step = arguments.cold_prompts, EngineConfig.max_num_batched_tokens
    about = f"one prompt at a time, of which nothing is known, in steps of {step} tokens; theirs: transformers, all of it at once"
    setting.report.begin(TABLE, about, HEADS)
    room = 2 * (max(lengths) + step)
    config = EngineConfig(kv_cache_tokens=room, max_model_len=max(lengths) + 8, host_gib=0, disk_gib=0)

    def work(engine: Engine) -> dict[int, tuple[float, ...]]:
        fresh = count()
        return {length: _ours(setting, engine, length, fresh) for length in lengths}

    ours = setting.attempt("cold prompts", config, work) or {}
    theirs = _theirs(setting, list(ours))
    with torch.inference_mode():
        products = {length: _products_ms(setting, length, step) for length in ours}
    for length, ms in ours.items():
        setting.report.add(Cold(length, ms, theirs.get(length, ()), products[length], _attention_ms(setting, length)))


def _ours(setting: Setting, engine: Engine, length: int, fresh: "count[int]") -> tuple[float, ...]:
    """After as many as it takes until steps in the middle of such a prompt are captured."""
    warm = 1 if setting.model.device.type == "cpu" else 2 + SEEN_WITH_PROMPTS * EngineConfig.max_num_batched_tokens // length
    spent = [
        ask(engine, [drawn(setting.model, f"{setting.seed} cold {next(fresh)}", length)]).ms for _ in range(warm + setting.clock.repeats)
    ]
    return tuple(spent[warm:])


def _theirs(setting: Setting, lengths: Sequence[int]) -> dict[int, tuple[float, ...]]:
    found: dict[int, tuple[float, ...]] = {}
    try:
        model = random_baseline(setting.model)
        for length in lengths:
            spent = [_time(model, torch.tensor([drawn(setting.model, f"{turn}", length)])) for turn in range(1 + setting.clock.repeats)]
            found[length] = tuple(spent[1:])
    except (PandoError, torch.OutOfMemoryError) as error:
        setting.report.skip("transformers", error)
    finally:
        setting.settle_memory()
    return found


@torch.inference_mode()
def _time(model: Any, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    model(input_ids=tokens.to(model.device), use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    return 1e3 * (time.perf_counter() - start)


def _products_ms(setting: Setting, length: int, step: int) -> float:
    whole, rest = divmod(length, step)
    return whole * setting.products_ms(step) + (setting.products_ms(rest) if rest else 0.0)


def _attention_ms(setting: Setting, length: int) -> float:
    """Operations alone: each token looks at those before it and at itself."""
    heads, layers = setting.heads, setting.model.config.layers
    return layers * 2 * heads.hq * heads.d * length * (length + 1) / setting.limits.rate(heads.dtype) / 1e9


def draw(axis: Axes, found: Sequence[Cold]) -> None:
    axis.loglog([one.tokens for one in found], [one.median_ms for one in found], "o-", label="Pando")
    if theirs := [one for one in found if one.theirs_ms]:
        axis.loglog([one.tokens for one in theirs], [statistics.median(one.theirs_ms) for one in theirs], "s-", label="transformers")
    axis.loglog([one.tokens for one in found], [one.products_ms + one.attention_ms for one in found], "--", label="floors")
    axis.set(xlabel="tokens", ylabel="ms to the first token")
