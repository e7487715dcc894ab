"""How long a call takes, and how long it must take at least."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.timing import in_turns
from ...model.load import DTYPES
from ..measure import interleave
from .cases import DTYPES as SIZES
from .cases import Case

FLUSH = 256 << 20  # bytes written before each run, or, on a CPU, read as weights are, so that it finds nothing in a cache
WARM_UPS = 3
COPY = 256 << 20  # bytes copied to measure the bandwidth, on a CPU; a GPU copies four times as many
SIDES = (512, 1024, 2048, 4096, 8192)  # of the square matrices that are multiplied to measure the rate
PATIENCE = 0.05  # seconds of a product after which no larger one is tried
TRIES = 7

Run = Callable[[], object]


class Timing(NamedTuple):
    us: float  # the median
    how: str  # "graph", "eager" or "cpu"


@dataclass(frozen=True)
class Clock:
    device: torch.device
    repeats: int
    flush: int = FLUSH
    _dirt: list[Tensor] = field(default_factory=list)  # that memory, once it is needed

    def medians(self, runs: Mapping[str, Run], wakes: Mapping[str, Run] | None = None) -> dict[str, Timing]:
        """Each after a warm-up; on a CPU in turns. A GPU does not drift: there each is repeated by itself, and finds the code and the
        tables of addresses that the run before it has left. `wakes`: on a CPU these find nothing in a cache in place of the runs, which
        find the interpreter's own code there, as in an engine, and none of their keys."""
        if self.device.type == "cuda":
            return {name: self._replayed(run) for name, run in runs.items()}
        for run in runs.values():
            run()
        samples = interleave({name: partial(self._on_cpu, run, (wakes or {}).get(name)) for name, run in runs.items()}, self.repeats)
        return {name: Timing(statistics.median(found) * 1e6, "cpu") for name, found in samples.items()}

    def mean_us(self, run: Run, count: int, seconds: float) -> float:
        """Of so many runs, or of those that so many seconds are enough for, one behind the other. A GPU that is at work for longer than
        some milliseconds is at its limit of power, and its clock is lower than in the first runs."""
        graph = _captured(run) if self.device.type == "cuda" else None
        again, begun, done, marks = graph.replay if graph is not None else run, time.perf_counter(), 0, list[torch.cuda.Event]()
        while done < count and (not done or time.perf_counter() - begun < seconds):
            if self.device.type == "cuda":
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                marks[max(0, done - 1)].synchronize()  # the device has a run to do while the next one is asked for
            again()
            done += 1
        if not marks:
            return (time.perf_counter() - begun) / done * 1e6
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return float(marks[0].elapsed_time(end)) / done * 1e3

    def _soil(self) -> None:
        if not self._dirt:
            self._dirt.append(torch.ones(self.flush // 4, device=self.device))
        self._dirt[0].fill_(1) if self.device.type == "cuda" else self._dirt[0].sum()

    def _on_cpu(self, run: Run, wake: Run | None) -> float:
        self._soil()
        if wake is not None:
            wake()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _replayed(self, run: Run) -> Timing:
        graph = _captured(run)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in events:
            self._soil()
            start.record()
            run() if graph is None else graph.replay()
            end.record()
        torch.cuda.synchronize()
        ms = statistics.median(start.elapsed_time(end) for start, end in events)
        return Timing(ms * 1e3, "eager" if graph is None else "graph")


def _captured(run: Run) -> torch.cuda.CUDAGraph | None:
    """None where it cannot be: then its launches are timed, too."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


class Work(NamedTuple):
    """What a case cannot do without."""

    bytes: int  # each key and value once, however many read it, and the queries and answers
    flops: int


def work_of(case: Case) -> Work:
    size = 2 * case.d * SIZES[case.dtype]
    tokens = sum(part.tokens for part, readers in zip(case.segments, case.readers, strict=True) if readers)
    return Work((tokens * case.hkv + len(case.rows) * case.hq) * size, 4 * case.hq * case.d * case.read_tokens)


class Limits:
    """What the device can do: given, or measured once when it is first asked for."""

    def __init__(self, device: torch.device, bandwidth: float | None = None, rate: float | None = None) -> None:
        """In TB/s and TFLOP/s."""
        self._device, self._bandwidth, self._rate = device, bandwidth, rate
        self._rates: dict[str, float] = {}

    @property
    def bandwidth(self) -> float:
        """TB/s of a large copy, what is read and what is written."""
        if self._bandwidth is None:
            count = COPY * (4 if self._device.type == "cuda" else 1)
            source, target = (torch.zeros(count, dtype=torch.int8, device=self._device) for _ in range(2))
            self._bandwidth = 2 * count / self._seconds(lambda: target.copy_(source)) / 1e12
        return self._bandwidth

    def rate(self, dtype: str) -> float:
        """TFLOP/s of the fastest product of large matrices."""
        if self._rate is not None:
            return self._rate
        if dtype not in self._rates:
            kinds = {DTYPES[dtype], torch.float32} if self._device.type == "cpu" else {DTYPES[dtype]}  # it can always be widened
            self._rates[dtype] = max(map(self._measure_rate, kinds))
        return self._rates[dtype]

    def _measure_rate(self, dtype: torch.dtype) -> float:
        best = 0.0
        for side in SIDES:
            a, b = (torch.randn(side, side, device=self._device).to(dtype) for _ in range(2))
            spent = self._seconds(partial(torch.matmul, a, b))
            best = max(best, 2 * side**3 / spent / 1e12)
            if spent > PATIENCE:
                break
        return best

    def _seconds(self, run: Run) -> float:
        def whole() -> None:
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize()

        return in_turns({"": whole}, TRIES)[""]

    def floor_us(self, case: Case) -> float:
        return floor_us(work_of(case), self.bandwidth, self.rate(case.dtype))


def floor_us(work: Work, bandwidth: float, rate: float) -> float:
    """Microseconds at the least, by TB/s and TFLOP/s."""
    return max(work.bytes / bandwidth, work.flops / rate) / 1e6


def relay_formula(case: Case) -> float | None:
    """RelayAttention's prediction of the gain over flat, p = (s + c + 2) / (s / b + c + 7), where b rows share s tokens and have c each."""
    roots = [index for index, part in enumerate(case.segments) if part.parent is None and case.readers[index]]
    own = {case.length(row) - case.segments[roots[0]].tokens for row in range(len(case.rows))}
    if len(roots) != 1 or len(own) != 1 or not all(leaf == roots[0] or len(case.readers[leaf]) == 1 for leaf in case.rows):
        return None
    if any(case.depth[leaf] > 1 for leaf in case.rows):
        return None
    s, c, b = case.segments[roots[0]].tokens, own.pop(), len(case.rows)
    return (s + c + 2) / (s / b + c + 7)
