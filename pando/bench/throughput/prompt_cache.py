"""Prompt Cache's figure 3: how soon a prompt of modules is answered, computed, from the pool and from host memory."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from string import ascii_lowercase
from typing import Any

import torch

from ...config import EngineConfig
from ...engine.graphs import SEEN_WITH_PROMPTS
from ...engine.llm import LLM
from ...engine.request import TokenEvent
from ...engine.schemas import Prompt
from ...errors import PandoError
from ..measure import Result, compared, interleave
from ..modules import plain
from ..options import whole
from ..picture import Axes
from ..trial import Willing, first_token, greedy, settle
from .report import number, times
from .setting import PREFILL, Setting

TABLE = "prompt-cache"
COLD, POOL, HOST = "cold", "in the pool", "in host memory"
SOONER = {POOL: 15.0, HOST: 6.0}  # times
PIECE = 512  # tokens of a module
NEW = 30  # tokens behind them
WARMED = 3  # times on a GPU
GIB = 2**30
HEADS = ("modules are", "tokens", "reused", "from host", "first ms", "x cold")


class NotLoaded(PandoError):
    """What was to come from host memory did not."""


@dataclass(frozen=True)
class First:
    where: str
    tokens: int  # of the prompt
    reused: int
    loaded: int  # of these, from host memory
    ms: tuple[float, ...]
    cold_ms: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    def cells(self) -> Sequence[str]:
        counts = (str(self.tokens), str(self.reused), str(self.loaded))
        return (self.where, *counts, number(self.median_ms), times(self.cold_ms / self.median_ms))

    def as_json(self) -> dict[str, Any]:
        return {"where": self.where, "tokens": self.tokens, "reused": self.reused, "from_host": self.loaded, "ms": self.ms}


def add_options(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--module-tokens", type=whole(1), default=10 * PIECE, metavar="N", help=f"of all modules of the prompt ({10 * PIECE})")


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    tokens = arguments.module_tokens
    setting.report.begin(TABLE, f"{tokens} tokens of modules and {NEW} new ones; ms to the first token", HEADS)
    setting.settle_memory()
    try:
        with LLM.from_config(_config(setting, tokens), setting.model) as llm:
            trial = Trial(llm, tokens)
            samples = trial.samples(setting.clock.repeats)
    except (PandoError, torch.OutOfMemoryError) as error:
        setting.report.skip(f"{tokens} tokens", error)
        return
    cold = statistics.median(samples[COLD])
    for where, ms in samples.items():
        event = trial.last[where]
        loaded = event.reuse.tiers.get("host", 0)
        setting.report.add(First(where, event.num_prompt_tokens, event.num_cached_tokens, loaded, tuple(ms), cold))
    setting.report.promise(promises(samples, tokens))


def _config(setting: Setting, tokens: int) -> EngineConfig:
    """Room for some prompts of so many tokens; pinning memory takes its time, and there is as little of it as will do."""
    kept = (2 * tokens + 2048) * setting.token_bytes / GIB
    return EngineConfig(kv_cache_tokens=4 * tokens + 4096, host_gib=kept, disk_gib=0, max_num_batched_tokens=PREFILL)


@dataclass
class Trial:
    """A schema whose modules a prompt imports; text of letters, each of which is a token."""

    llm: LLM
    tokens: int
    last: dict[str, TokenEvent] = field(default_factory=dict)  # the first of the latest answer, by where its modules were
    random: Random = field(default_factory=lambda: Random("prompt-cache"))

    def __post_init__(self) -> None:
        sizes = [min(PIECE, self.tokens - done) for done in range(0, self.tokens, PIECE)]
        modules = "".join(f'<module name="m{i}">{self._text(size)}</module>' for i, size in enumerate(sizes))
        self.llm.schemas.add(f'<schema name="bench">{modules}</schema>', eager=True)
        self._imports = "".join(f"<m{i}/>" for i in range(len(sizes)))
        self._fresh = count()
        engine = self.llm.engine
        assert engine.store is not None
        engine.store.speeds = Willing()
        settle(engine)
        engine.store.ledger.pin([page.key for page in engine.store.ledger.held("host")])  # whatever else is computed, these stay

    def samples(self, repeats: int) -> dict[str, list[float]]:
        runs: dict[str, Callable[[], float]] = {COLD: self._cold, POOL: self._pool, HOST: self._host}
        on_gpu = self.llm.engine.model.device.type == "cuda"
        interleave(runs, WARMED if on_gpu else 1)
        interleave({POOL: self._pool, HOST: self._host}, SEEN_WITH_PROMPTS if on_gpu else 0)  # until their steps are captured
        return interleave(runs, repeats)

    def _cold(self) -> float:
        """The same tokens, but for the first, which is another each time."""
        settle(self.llm.engine)
        first = next(self._fresh) % self.llm.engine.model.config.vocab_size
        return self._first(COLD, plain(self.llm, self._prompt(), first))

    def _pool(self) -> float:
        list(self.llm.stream(Prompt(self._prompt()), greedy(1)))
        settle(self.llm.engine)
        return self._first(POOL, Prompt(self._prompt()))

    def _host(self) -> float:
        """What is in the pool is forgotten: all of it must be loaded."""
        settle(self.llm.engine)
        self.llm.engine.clear_cache()
        ms = self._first(HOST, Prompt(self._prompt()))
        loaded = self.last[HOST].reuse.tiers.get("host", 0)
        if loaded < self.tokens * 0.8:  # the last token of a module is computed, and ends of few tokens are not kept
            raise NotLoaded(f"{loaded} of {self.tokens} tokens of modules came from host memory; raise host_gib")
        return ms

    def _first(self, where: str, prompt: Prompt | list[int]) -> float:
        if self.llm.engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        ms, self.last[where] = first_token(self.llm, prompt)
        return ms

    def _prompt(self) -> str:
        return f'<prompt schema="bench">{self._imports} {self._text(NEW - 1)}</prompt>'

    def _text(self, tokens: int) -> str:
        return "".join(self.random.choices(ascii_lowercase, k=tokens))


def promises(samples: dict[str, list[float]], tokens: int) -> list[Result]:
    results = []
    for where, least in SOONER.items():
        found, case = {name: samples[name] for name in (where, COLD)}, f"first token, {tokens} tokens of modules {where}"
        results.append(compared(case, found, "ms", ours=where, higher=False, at_least=least))
    return results


def draw(axis: Axes, found: Sequence[First]) -> None:
    for one in found:
        axis.bar(one.where, one.median_ms, label=f"{one.where}: {one.median_ms:.1f} ms")
    axis.set(ylabel="time to first token, ms", yscale="log")
