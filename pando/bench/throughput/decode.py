"""Rows that all decode: how long their steps take, and for how much of that the device has nothing to do."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ...engine.engine import Engine
from ...engine.request import Request
from ...errors import PandoError
from ...model.decoder import Decoder, Pool, Step
from ...model.load import Model
from ..trial import greedy

WARM = 4  # steps of all rows that are not counted: kernels are compiled and graphs captured in them
LEAST = 3  # steps that are counted, however long they take


class Unsteady(PandoError):
    """Rows did not decode side by side."""


@dataclass(frozen=True)
class Window:
    """What is measured of a decode."""

    new: int  # tokens that a row asks for; the last is left out, and those of the warm-up
    steps: int  # at most
    seconds: float  # after which no further step is begun, once there are the least

    @property
    def counted(self) -> int:
        return max(LEAST, min(self.steps, self.new - 1 - WARM))

    @property
    def asked(self) -> int:
        return max(self.new, WARM + LEAST + 1)


@dataclass(frozen=True)
class Pace:
    rows: int
    ms: tuple[float, ...]  # of each step
    idle: float | None = None  # the share of the time in which the device waits; None where that could not be seen

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.ms)

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.mean_ms * 1e3

    def as_json(self) -> dict[str, float | int | None]:
        found = {"ms": self.mean_ms, "median_ms": statistics.median(self.ms), "largest_ms": max(self.ms)}
        return {**found, "tokens_per_second": self.tokens_per_second, "steps": len(self.ms), "idle": self.idle}


class Watch(Protocol):
    def begin(self) -> None:
        """What was seen until now does not count."""
        ...

    def skip(self) -> None:
        """Nor does what comes before the next step."""
        ...

    def idle(self) -> float | None: ...


def decode(engine: Engine, prompts: Sequence[Sequence[int]], window: Window, watch: Watch) -> Pace:
    """Steps in which every row gets a token. An engine may tell of a step when the next one runs already: only when tokens come is looked
    at. Where steps are captured, those of a kind that is still to be captured do not count: it happens once."""
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), prompt, greedy(window.asked)))
    try:
        _full_steps(engine, len(prompts), WARM, watch)
        watch.begin()
        ms = _full_steps(engine, len(prompts), window.counted, watch, window.seconds)
    finally:
        for row in range(len(prompts)):
            engine.cancel(str(row))
    return Pace(len(prompts), tuple(ms), watch.idle())


def _full_steps(engine: Engine, rows: int, count: int, watch: Watch, seconds: float = float("inf")) -> list[float]:
    begun = last = time.perf_counter()
    every, steady, was_captured = list[float](), list[float](), True
    while len(every) < count and (len(every) < LEAST or last - begun < seconds):
        if not engine.has_work:
            raise Unsteady(f"after {len(every)} of {count} steps nothing was left to do: the pool is too small for {rows} rows at once")
        replays = _replays(engine)
        told = len(engine.step())
        is_captured = replays is None or _replays(engine) != replays
        if not is_captured:
            watch.skip()
        if told == rows:  # whatever came between two of these belongs to the later one
            now = time.perf_counter()
            every.append(1e3 * (now - last))
            if is_captured and was_captured:
                steady.append(every[-1])
            last, was_captured = now, is_captured
    return steady or every  # steps of too many tokens are never captured


def _replays(engine: Engine) -> int | None:
    return None if engine.graphs is None else engine.graphs.replays


# ---- how long the device is idle


class Replays:
    """On a GPU: events before and behind each captured step. What lies between two of them is the host's doing: the device waits, or does
    what was not captured."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event] | None] = []  # None: what lies between does not count

    def begin(self) -> None:
        self._spans = []

    def skip(self) -> None:
        self._spans.append(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        plain = torch.cuda.CUDAGraph.replay

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            plain(graph)
            end.record()
            self._spans.append((start, end))

        _replay_by(replay)
        try:
            yield
        finally:
            _replay_by(plain)

    def idle(self) -> float | None:
        """The share of the time; None where steps were not captured."""
        pairs = [(one, other) for one, other in pairwise(self._spans) if one is not None and other is not None]
        if not pairs:
            return None
        pairs[-1][1][1].synchronize()
        work: float = sum(start.elapsed_time(end) for _, (start, end) in pairs)
        return max(0.0, 1 - work / sum(float(before.elapsed_time(end)) for (_, before), (_, end) in pairs))


def _replay_by(replay: Callable[[torch.cuda.CUDAGraph], None]) -> None:
    """Whoever has captured a step repeats it like this: there is no other place that all of them pass."""
    setattr(torch.cuda.CUDAGraph, "replay", replay)  # noqa: B010  # a method, to the type checker


class Passes(Decoder):
    """On a CPU: a decoder that knows when it ran."""

    def __init__(self, like: Decoder) -> None:
        vars(self).update(vars(like))
        self._like = like
        self._spans: list[tuple[float, float]] = []

    def forward(self, step: Step, pool: Pool) -> Tensor:
        start = time.perf_counter()
        logits = self._like.forward(step, pool)
        self._spans.append((start, time.perf_counter()))
        return logits

    def begin(self) -> None:
        self._spans = []

    def skip(self) -> None:
        """Nothing is captured on a CPU."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        yield

    def idle(self) -> float | None:
        if len(self._spans) < 2:
            return None
        work = sum(end - start for start, end in self._spans[1:])
        return 1 - work / (self._spans[-1][1] - self._spans[0][1])


def watched(model: Model) -> tuple[Model, Replays | Passes]:
    """The model as it is to be run, and who watches."""
    if model.device.type == "cuda":
        return model, Replays()
    passes = Passes(model.decoder)
    return replace(model, decoder=passes), passes
