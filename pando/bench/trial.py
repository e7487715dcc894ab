"""Engines with tiers below the pool, and how soon they answer: for the measurements of the store."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from ..config import CodecName, EngineConfig
from ..engine.engine import Engine
from ..engine.llm import LLM
from ..engine.request import Request, SamplingParams, TokenEvent
from ..engine.schemas import Prompt
from ..errors import PandoError
from ..kv.pool import PagePool
from ..kv.run import Run
from ..model.load import Model
from ..store.speeds import Speeds

GIB = 2**30
PATIENCE, QUIET = 120.0, 0.1  # seconds
ANSWERING, LONG = 8, 120  # steps after which prompts are computed, and tokens that answers have which are to go on


class Willing(Speeds):
    """Whether it pays or not, it is loaded."""

    def pays(self, sizes: Mapping[str, int], tokens: int) -> bool:
        return True

    def patience(self, tokens: int) -> None:
        """However long it takes."""


class Stuck(PandoError):
    """What was to be saved is not saved."""


@dataclass(frozen=True)
class Size:
    """Of an engine, in tokens."""

    pool: int
    kept: int = 0  # in host memory; on disk there is room for four times as many
    rows: int = 1
    step: int = EngineConfig.max_num_batched_tokens


@dataclass
class Trial:
    """What one or several requests, asked together, were answered."""

    seconds: float = 0.0  # until all of them had their first token
    paused: float = 0.0  # seconds, at most, in which others heard nothing meanwhile
    answers: dict[str, list[int]] = field(default_factory=dict)
    tiers: Counter[str] = field(default_factory=Counter)  # tokens of the prompts that came from below the pool
    device: int = 0  # tokens that were reused, those included

    @property
    def ms(self) -> float:
        return 1000 * self.seconds


def opened(
    model: Model, size: Size, folder: Path | None, *, host: bool = False, codec: CodecName = "none", kind: type[Engine] = Engine
) -> Engine:
    """`folder`: where its disk tier is, if it has one."""
    facts, page = model.config, EngineConfig.page_size
    kept = size.kept * PagePool.page_bytes(page, facts.layers, facts.kv_heads, facts.head_dim, model.states) / page / GIB
    config = EngineConfig(
        kv_cache_tokens=size.pool,
        max_num_seqs=max(size.rows, 1),
        max_num_batched_tokens=size.step,
        host_gib=kept if host else 0.0,
        disk_gib=4 * kept if folder is not None else 0.0,
        disk_dir=str(folder) if folder is not None else None,
        store_codec=codec,
    )
    return kind(model, config)


def ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int = 1,
    *,
    runs: Sequence[Sequence[Run]] = (),
    behind: Sequence[Sequence[int]] = (),
    beside: Sequence[Sequence[int]] = (),
) -> Trial:
    """Greedy answers of so many tokens. `runs`: what stands before each prompt, if anything does. `behind`: prompts that are computed
    before; the clock starts when they are. `beside`: prompts that are being answered all the time."""
    names = count()
    before = {str(next(names)): prompt for prompt in behind}
    asked = {str(next(names)): prompt for prompt in prompts}
    others = {f"beside {next(names)}": prompt for prompt in beside}
    for name, prompt in others.items():
        engine.add(Request(name, prompt, greedy(LONG)))
    for _ in range(ANSWERING if beside else 0):
        engine.step()
    for name, prompt in before.items():
        engine.add(Request(name, prompt, greedy(1)))
    start = time.perf_counter()
    for (name, prompt), placed in zip(asked.items(), runs or [()] * len(asked), strict=True):
        engine.add(Request(name, prompt, greedy(tokens), runs=placed))
    trial, heard, going = Trial(), start, set(asked)
    while engine.has_work:
        events = engine.step()
        if any(event.request_id in others for event in events) and going:
            heard, trial.paused = (now := time.perf_counter()), max(trial.paused, now - heard)
        for event in events:
            before.pop(event.request_id, None)
            if event.request_id in others and event.finish_reason is not None:
                engine.add(Request(event.request_id, others[event.request_id], greedy(LONG)))  # whoever is asked may take longer
            if event.request_id in asked:
                trial.answers.setdefault(event.request_id, []).append(event.token)
                if len(trial.answers[event.request_id]) == 1:
                    trial.tiers.update(event.reuse.tiers)
                    trial.device += event.num_cached_tokens
                    trial.seconds = time.perf_counter() - start
                if event.finish_reason is not None:
                    going.discard(event.request_id)
        if not going:
            for name in others:
                engine.cancel(name)
            others = {}
        if behind and not before:
            start, behind = time.perf_counter(), ()
    return trial


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def first_token(llm: LLM, prompt: Prompt | list[int]) -> tuple[float, TokenEvent]:
    """Milliseconds until it is there; the answer goes on to its end."""
    start = time.perf_counter()
    events = llm.stream(prompt, greedy(2))
    first = next(events)
    ms = 1000 * (time.perf_counter() - start)
    list(events)
    return ms, first


def settle(engine: Engine, quiet: float = QUIET) -> float:
    """Waits until nothing was saved for a while; answers for how many seconds something was."""
    start = last = time.perf_counter()
    told = engine.stats().store
    while engine.tend() is not None or time.perf_counter() - last < quiet * (told is not None):
        now, facts = time.perf_counter(), engine.stats().store
        if facts != told:
            told, last = facts, now
        if now - start > PATIENCE:
            raise Stuck(f"after {PATIENCE:g} s something is still on its way to the store: {told}; is the disk very slow?")
        time.sleep(0.002)
    return last - start


def drawn(model: Model, seed: object, tokens: int) -> list[int]:
    """Random tokens: how long anything takes does not depend on which, and no two draws begin alike."""
    return Random(str(seed)).choices(range(model.config.vocab_size), k=tokens)
