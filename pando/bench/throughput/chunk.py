"""ChunkAttention's table 4: requests with one long prompt in common, against the same with nothing shared: latency, and what KV takes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...config import EngineConfig
from ...engine.engine import Engine
from ...errors import InvalidOption
from ..measure import Result, at_least
from ..options import decimal, several, whole, whole_numbers
from ..picture import Axes
from ..trial import drawn
from .report import number
from .service import Served, jobs_of, serve, warm
from .setting import SHARED, Setting, engine_config

TABLE, UNSHARED = "chunk", "unshared"
MODES = (SHARED, UNSHARED)
ROWS = 32  # at most, as in the paper
WARMED = 64  # tokens of prompts where nothing is shared: longer ones make no other kind of step
PROMISED, SPARED = 4096, 89.0  # tokens of the prompt; percent of the bytes
HEADS = ("prompt", "mode", "answer", "req/s", "ms/tok", "KV GB", "peak rows", "answered", "seconds")


@dataclass(frozen=True)
class Crowd:
    prompt: int
    mode: str
    answer: int
    rate: float
    served: Served
    kv_bytes: int  # at most, of the pages that running rows hold

    def cells(self) -> Sequence[str]:
        found = self.served
        sizes = (number(self.kv_bytes / 1e9), str(found.rows), str(len(found.latencies)), number(found.seconds))
        return (str(self.prompt), self.mode, str(self.answer), number(self.rate), number(found.latency_ms), *sizes)

    def as_json(self) -> dict[str, Any]:
        facts = {"prompt": self.prompt, "mode": self.mode, "answer": self.answer, "rate": self.rate}
        return {**facts, "kv_bytes": self.kv_bytes, **self.served.as_json()}


def add_options(to: argparse._ArgumentGroup) -> None:
    prompts = "tokens of the prompt (1024,2048,4096)"
    to.add_argument("--chunk-prompts", type=whole_numbers, default=[1024, 2048, 4096], metavar="N,N,...", help=prompts)
    arriving = "requests per second for each of them (5,3,2: five times the paper's, on a faster device)"
    to.add_argument("--chunk-arrivals", type=several(decimal()), default=[5.0, 3.0, 2.0], metavar="R,R,...", help=arriving)
    to.add_argument("--chunk-requests", type=whole(1), default=32, metavar="N", help="of each (32)")
    to.add_argument("--chunk-answer", type=whole(1), default=512, metavar="N", help="tokens of each answer (512)")


def check(arguments: argparse.Namespace) -> None:
    prompts, arriving = arguments.chunk_prompts, arguments.chunk_arrivals
    if len(prompts) != len(arriving):
        raise InvalidOption(f"--chunk-prompts has {len(prompts)} and --chunk-arrivals {len(arriving)}; give a rate for each prompt")


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    rows = min(ROWS, arguments.rows)
    about = f"one prompt for all, {rows} rows at most; KV: pages of running rows, at the peak, each counted once"
    setting.report.begin(TABLE, about, HEADS)
    found: list[Crowd] = []
    for mode in MODES:
        config = engine_config("shared", rows, reuse=mode == SHARED)
        found += setting.attempt(mode, config, partial(_crowds, setting, arguments, mode)) or []
    if found:
        setting.report.promise(promises(found))


def _crowds(setting: Setting, arguments: argparse.Namespace, mode: str, engine: Engine) -> list[Crowd]:
    crowds = []
    for prompt, rate in zip(arguments.chunk_prompts, arguments.chunk_arrivals, strict=True):
        shared = drawn(engine.model, f"{setting.seed} prompt", prompt)
        warm(engine, shared if mode == SHARED else shared[:WARMED], min(ROWS, arguments.rows))
        lengths = [(1, arguments.chunk_answer)] * arguments.chunk_requests
        served = serve(engine, jobs_of(shared, lengths, rate, engine.model.config.vocab_size, setting.seed), weighed=True)
        held = served.pages * EngineConfig.page_size * setting.token_bytes
        crowds.append(Crowd(prompt, mode, arguments.chunk_answer, rate, served, held))
        engine.clear_cache()
        setting.report.add(crowds[-1])
    return crowds


def promises(found: Sequence[Crowd]) -> list[Result]:
    results = []
    by = {(crowd.prompt, crowd.mode): crowd for crowd in found}
    for prompt in sorted({crowd.prompt for crowd in found}):
        ours, theirs = (by.get((prompt, mode)) for mode in MODES)
        if ours is not None and theirs is not None:
            spared, least = 100 * (1 - ours.kv_bytes / theirs.kv_bytes), SPARED if prompt == PROMISED else None
            note = f"latency {ours.served.latency_ms:.1f} ms/tok instead of {theirs.served.latency_ms:.1f}"
            results.append(at_least(f"peak KV bytes spared, {prompt} shared tokens", spared, "%", least, note))
    return results


def draw(axis: Axes, found: Sequence[Crowd]) -> None:
    for mode in MODES:
        points = [(crowd.prompt, crowd.kv_bytes / 1e9) for crowd in found if crowd.mode == mode]
        axis.plot([prompt for prompt, _ in points], [size for _, size in points], marker="o", label=mode)
    axis.set(xlabel="tokens of the prompt", ylabel="GB of KV at the peak", ylim=(0, None))
