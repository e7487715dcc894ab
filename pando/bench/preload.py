"""Computing while context is still on its way, layer by layer, against computing when all of it is there."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from torch import Tensor

from ..engine.engine import Engine
from ..engine.pace import measure
from ..engine.row import Schedule
from ..kv.run import Origin, Run
from ..model.load import Model
from ..store.tier import Reader, Tier
from .measure import Result, Samples, interleave
from .trial import Size, Trial, Willing, ask, drawn, opened, settle

WAITING, LAYERED, AHEAD, POOL = "load, then compute", "layer by layer", "begun during the step before", "in the pool"
FORMULA = "as many layers ahead as the paper's formula says"
BESIDE, BESIDE_WAITING = "beside others who are answered", "beside others, when all of it is there"
MB = 10**6
READ_AHEAD = 0.05  # seconds


@dataclass(frozen=True)
class Sweep:
    histories: tuple[int, ...] = (256, 512, 1024, 2048, 4096)  # tokens that are loaded
    new: int = 64  # tokens that are computed behind them
    rows: int = 1
    repeats: int = 3
    bandwidth: float | None = 100.0  # MB/s of a tier in the place of the disk; None: host memory, as fast as it is
    modules: int = 0  # that a history is made of, equally long; 0: it is a plain prompt
    buffers: tuple[int, ...] = ()  # layers that are there when computing begins, in ways of their own; if any, also by the formula


ON_GPU = Sweep(  # figure 19 of CachedAttention, which has 1,024 tokens and these buffers
    histories=(128, 256, 512, 1024), new=100, rows=16, repeats=7, bandwidth=None, buffers=(5, 10, 15)
)
QUICK = Sweep(histories=(64, 128), new=8, rows=2, repeats=1, bandwidth=10.0)
FIGURE = 1024  # tokens
LESS_ON_GPU, LESS = 50.0, 35.0  # percent: in that figure's case with a read buffer; where load and compute take equally long


class Switched(Engine):
    """An engine that can be told to wait: for all that is loaded, or for so many layers of it, which is not counted."""

    patient = False
    buffer = 0
    waited = 0.0  # seconds, for a buffer

    def _forward(self, schedule: Schedule) -> Tensor:
        if (self.patient or self.buffer) and self.store is not None:
            self.store.go()
        began = time.perf_counter()
        for load in schedule.loads:
            if self.patient:
                load.finish()
            elif self.buffer and (event := load.wait(self.buffer - 1)) is not None:
                event.synchronize()
        self.waited += 0.0 if self.patient else time.perf_counter() - began
        return super()._forward(schedule)


class Waiting(Willing):
    """As if nothing came in time."""

    def in_time(self, left: float, tokens: int) -> bool:
        return not left


def throttle(tier: Tier, rate: float) -> None:
    """From now on it is read at this rate, in bytes per second."""
    opened, due = tier.open, 0.0

    def pass_on(size: int) -> None:
        """Takes as long as so many bytes do. Who comes late finds that the device has read on meanwhile."""
        nonlocal due
        now = time.perf_counter()
        due = max(due, now - READ_AHEAD) + size / rate
        time.sleep(max(due - now, 0.0))

    tier.open = lambda key: _Throttled(opened(key), pass_on)  # type: ignore[method-assign]


class _Throttled:
    def __init__(self, inner: Reader, pass_on: Callable[[int], None]) -> None:
        self.card, self.close = inner.card, inner.close
        self._inner, self._pass_on = inner, pass_on

    def layer(self, index: int, into: memoryview) -> None:
        self._inner.layer(index, into)
        self._pass_on(into.nbytes)


@dataclass
class Preload:
    model: Model
    sweep: Sweep
    folder: Path
    samples: dict[int, Samples] = field(default_factory=dict)  # milliseconds, by the length of the history
    enough: dict[int, int] = field(default_factory=dict)  # layers, by the formula
    pauses: dict[tuple[int, str], list[float]] = field(default_factory=dict)  # milliseconds that others heard nothing

    def __post_init__(self) -> None:
        sweep = self.sweep
        self._histories = [drawn(self.model, f"history {row}", max(sweep.histories)) for row in range(sweep.rows)]
        self._numbers = count()
        ends, beside = 64 * (sweep.modules + 1), sweep.rows * (sweep.new + 128)
        tokens = sweep.rows * sum(history + ends for history in (sweep.histories if sweep.modules else [max(sweep.histories)]))
        self._size = Size(
            pool=tokens + 4 * beside,
            kept=tokens + 4 * beside,  # of the new ones, only the latest stay
            rows=2 * sweep.rows,
            step=max(512, 2 * sweep.rows * sweep.new),
        )
        self._kept: Engine | None = None

    def results(self) -> list[Result]:
        first = self._opened()
        for history in self.sweep.histories if self.sweep.modules else [max(self.sweep.histories)]:
            self._ask(first, history, [[]] * self.sweep.rows)
        settle(first)
        if self.sweep.bandwidth is None:
            self._kept = first  # what is in host memory ends with its engine
            assert first.store is not None
            first.store.ledger.pin([page.key for page in first.store.ledger.held("host")])  # whatever else is computed, this stays
        else:
            first.close()
        for history in self.sweep.histories:
            self._sample(history, LAYERED)  # not counted
            self.samples[history] = self._interleave(history, {WAITING: 0, LAYERED: 0, AHEAD: 0, POOL: 0, BESIDE_WAITING: 0, BESIDE: 0})
            if self.sweep.buffers:
                self.enough[history] = self._enough(history)
                some = (layers for layers in self.sweep.buffers if layers <= self.model.config.layers)
                buffers = {**{f"{layers} layers ahead": layers for layers in some}, FORMULA: self.enough[history]}
                self.samples[history] |= self._interleave(history, buffers)
        if self._kept is not None:
            self._kept.close()
        return self._told()

    def _interleave(self, history: int, ways: Mapping[str, int]) -> Samples:
        """`ways`: and the layers that are there, in each of them."""
        runs: dict[str, Callable[[], float]] = {way: partial(self._sample, history, way, layers) for way, layers in ways.items()}
        return interleave(runs, self.sweep.repeats)

    def _enough(self, history: int) -> int:
        """What has to be there so that the rest comes while it is computed: the paper's B (T_load L_hist - T_pref L_new), in layers."""
        found, layers = _medians(self.samples[history]), self.model.config.layers
        return math.ceil(layers * max(0.0, 1 - found[POOL] / _load(found))) if _load(found) else 0

    def _opened(self) -> Switched:
        throttled = self.sweep.bandwidth is not None
        engine = opened(self.model, self._size, self.folder if throttled else None, host=not throttled, kind=Switched)
        assert isinstance(engine, Switched) and engine.store is not None
        if self.sweep.bandwidth is not None:
            throttle(engine.store.transfer.tiers["disk"], self.sweep.bandwidth * MB)
        return engine

    def _sample(self, history: int, way: str, buffer: int = 0) -> float:
        """An engine keeps in host memory what it has loaded: to load it from below again takes another."""
        engine = self._kept or self._opened()
        assert isinstance(engine, Switched) and engine.store is not None
        if self._kept is not None:
            settle(engine)
            engine.clear_cache()
        ask(engine, [self._new()[:8]])  # whatever is made at the first step is there
        asked = [self._new() for _ in self._histories]
        if way == POOL:
            self._ask(engine, history, [[]] * len(asked))
        engine.patient, engine.buffer, engine.waited = way == WAITING, buffer, 0.0
        engine.store.speeds = Waiting() if way == BESIDE_WAITING else Willing()
        if way in (BESIDE, BESIDE_WAITING):
            measure(engine)
        behind, beside = ([self._new() for _ in asked] if way in ways else [] for ways in ((AHEAD,), (BESIDE, BESIDE_WAITING)))
        trial = self._ask(engine, history, asked, behind=behind, beside=beside)
        self.pauses.setdefault((history, way), []).append(1000 * trial.paused)
        engine.patient, engine.buffer = False, 0
        if self._kept is None:
            engine.close()
        whole = history - history % max(self.sweep.modules, 1)
        loaded, wanted = sum(trial.tiers.values()), 0 if way == POOL else whole * len(asked)
        assert wanted <= loaded < wanted + self.sweep.new * len(asked), f"{loaded} tokens were loaded where {wanted} should be: {way}"
        return trial.ms - 1000 * engine.waited

    def _ask(
        self,
        engine: Engine,
        history: int,
        new: Sequence[Sequence[int]],
        *,
        behind: Sequence[Sequence[int]] = (),
        beside: Sequence[Sequence[int]] = (),
    ) -> Trial:
        count = self.sweep.modules
        if not count:
            asked = [[*tokens[:history], *words] for tokens, words in zip(self._histories, new, strict=True)]
            return ask(engine, asked, behind=behind, beside=beside)
        size = history // count
        starts = range(0, count * size, size)
        parts = [[Run(tuple(tokens[at : at + size]), at, Origin((), 0)) for at in starts] for tokens in self._histories]
        return ask(engine, new, runs=parts, behind=behind, beside=beside)

    def _new(self) -> list[int]:
        return drawn(self.model, f"new {next(self._numbers)}", self.sweep.new)

    def _told(self) -> list[Result]:
        medians = {history: _medians(found) for history, found in self.samples.items()}
        closest = min(medians, key=lambda history: abs(_load(medians[history]) / medians[history][POOL] - 1))
        figure = FIGURE if self.sweep.bandwidth is None else None
        results = []
        for history, found in medians.items():
            for way in (way for way in found if way not in (WAITING, POOL, BESIDE_WAITING)):
                ahead = way in (AHEAD, FORMULA) and history == figure
                target = LESS if (history, way) == (closest, LAYERED) else LESS_ON_GPU if ahead else None
                results.append(self._result(history, way, found, target))
        return results

    def _result(self, history: int, way: str, found: dict[str, float], target: float | None) -> Result:
        other = BESIDE_WAITING if way == BESIDE else WAITING
        saved = 100 * (1 - found[way] / found[other])
        rows = f"{self.sweep.rows} x " if self.sweep.rows > 1 else ""
        parts = f" in {self.sweep.modules} modules" if self.sweep.modules else ""
        case = f"{rows}{history} loaded{parts}, {self.sweep.new} new, {way}"
        note = f"{found[way]:.1f} ms instead of {found[other]:.1f}; load {_load(found):.1f}, compute {found[POOL]:.1f}"
        if way == BESIDE:
            paused, before = (statistics.median(self.pauses[history, each]) for each in (BESIDE, BESIDE_WAITING))
            note += f"; others wait {paused:.1f} ms at most instead of {before:.1f}"
        note += f"; {self.enough[history]} layers" if way == FORMULA else ""
        samples = {name: self.samples[history][name] for name in (way, other, POOL)}
        promise = (f">= {target:g} %", saved >= target) if target is not None else ("", None)
        return Result(case, saved, "% less", target=promise[0], met=promise[1], note=note, samples=samples)


def _medians(found: Samples) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in found.items()}


def _load(found: dict[str, float]) -> float:
    """Milliseconds that loading alone takes."""
    return max(found[WAITING] - found[POOL], 0.0)
