"""RelayAttention's two scenarios, behind a system prompt: a batch job, and a service whose requests arrive one by one."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...config import Attention
from ...engine.engine import Engine
from ...errors import InvalidOption
from ..measure import Result, at_least
from ..options import chosen, decimal, several, whole, whole_numbers
from ..picture import Axes
from ..traffic import read_lengths
from ..trial import drawn
from .report import number
from .service import Job, Served, jobs_of, lengths_of, serve, warm
from .setting import FLAT, SHARED, Setting, engine_config

JOB, SERVICE = "relay job", "relay service"
MODES: dict[str, Attention] = {SHARED: "shared", FLAT: "flat"}
SHORT, LONG = 64, 2048  # system prompts that something is promised of
KEPT = 90.0  # percent of the throughput
OVER_FLAT, KNEE = 2.1, 2.2  # times
SCENARIOS = {"job": JOB, "service": SERVICE}
HEADS = ("mode", "system", "rate", "answered", "seconds", "req/s", "tok/s", "ms/tok", "rows")


@dataclass(frozen=True)
class Load:
    mode: str
    system: int  # tokens
    rate: float  # requests that arrive in a second; endless: all at once
    served: Served

    def cells(self) -> Sequence[str]:
        found, rate = self.served, "all" if math.isinf(self.rate) else number(self.rate)
        speeds = (number(found.requests_per_second), number(found.tokens_per_second), number(found.latency_ms))
        return (self.mode, str(self.system), rate, str(len(found.latencies)), number(found.seconds), *speeds, str(found.rows))

    def as_json(self) -> dict[str, Any]:
        rate = None if math.isinf(self.rate) else self.rate  # JSON has no infinity
        return {"mode": self.mode, "system": self.system, "rate": rate, **self.served.as_json()}


def add_options(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--scenarios", type=chosen(SCENARIOS), default=list(SCENARIOS.values()), metavar="S,S", help="job, service (both)")
    prompts = "tokens of the system prompt (64,512,2048)"
    to.add_argument("--prompts", type=whole_numbers, default=[64, 512, 2048], metavar="N,N,...", help=prompts)
    to.add_argument("--lengths", type=Path, metavar="FILE", help="a CSV file of prompt and answer tokens (drawn by ShareGPT's quartiles)")
    to.add_argument("--longest", type=whole(1), default=2048, metavar="N", help="tokens of a prompt or an answer; more are cut off (2048)")
    to.add_argument(
        "--requests", type=whole(1), default=1000, metavar="N", help="of the batch job, more than rows, and at each rate (1000)"
    )
    to.add_argument("--rows", type=whole(1), default=256, metavar="N", help="that run at the same time (256)")
    arriving = "requests per second that arrive at the service, ascending; it ends with the first that is too many (8,16,24,32,48,64,96)"
    to.add_argument("--arrivals", type=several(decimal()), default=[8, 16, 24, 32, 48, 64, 96], metavar="R,R,...", help=arriving)
    limit = "ms for each token of an answer, on average, that are still bearable (100)"
    to.add_argument("--limit", type=decimal(), default=100.0, metavar="MS", help=limit)


def check(arguments: argparse.Namespace) -> None:
    if arguments.only and "relay" not in arguments.only:
        return
    if arguments.only and not set(arguments.modes) & set(MODES):
        raise InvalidOption("--modes has none of shared and flat, and relay measures no other; give one of them")
    if JOB in arguments.scenarios and arguments.requests <= arguments.rows:
        said = f"--requests is {arguments.requests} and --rows {arguments.rows}"
        raise InvalidOption(f"{said}: a batch job is measured while requests wait for a row; give more of them")
    if arguments.lengths is not None:
        read_lengths(arguments.lengths)


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    jobs, services = list[Load](), list[Load]()
    if JOB in arguments.scenarios:
        about = f"{arguments.requests} requests at once, {arguments.rows} rows at most, until none waits; ms/tok: from arrival to end"
        setting.report.begin(JOB, about, HEADS)
        jobs = _each_mode(setting, arguments, _job)
    if SERVICE in arguments.scenarios:
        about = f"{arguments.requests} requests at each rate, system prompt {max(arguments.prompts)}; bearable: {arguments.limit:g} ms/tok"
        setting.report.begin(SERVICE, about, HEADS)
        services = _each_mode(setting, arguments, _service)
    if jobs or services:
        setting.report.promise([*of_jobs(jobs), *of_services(services, arguments.limit)])


Scenario = Callable[[Setting, argparse.Namespace, str, Engine], list[Load]]


def _each_mode(setting: Setting, arguments: argparse.Namespace, scenario: Scenario) -> list[Load]:
    found: list[Load] = []
    for mode, attention in MODES.items():
        if mode in arguments.modes:
            config = engine_config(attention, arguments.rows)
            found += setting.attempt(mode, config, partial(scenario, setting, arguments, mode)) or []
    return found


def _job(setting: Setting, arguments: argparse.Namespace, mode: str, engine: Engine) -> list[Load]:
    loads = []
    lengths = lengths_of(arguments.lengths, arguments.requests, arguments.longest, setting.seed)
    for length in arguments.prompts:
        system = drawn(engine.model, f"{setting.seed} system", length)
        warm(engine, system, arguments.rows)
        jobs = jobs_of(system, lengths, math.inf, engine.model.config.vocab_size, setting.seed)
        _rehearse(engine, jobs[: arguments.rows * 5 // 4])
        loads.append(Load(mode, length, math.inf, serve(engine, jobs, tail=False)))
        engine.clear_cache()
        setting.report.add(loads[-1])
    return loads


def _service(setting: Setting, arguments: argparse.Namespace, mode: str, engine: Engine) -> list[Load]:
    """Ever more requests in a second, until they wait too long."""
    loads: list[Load] = []
    length = max(arguments.prompts)
    system = drawn(engine.model, f"{setting.seed} system", length)
    warm(engine, system, arguments.rows)
    lengths = lengths_of(arguments.lengths, arguments.requests, arguments.longest, setting.seed)
    some = lengths[: arguments.rows * 5 // 4]
    _rehearse(engine, jobs_of(system, some, math.inf, engine.model.config.vocab_size, setting.seed))
    for rate in sorted(arguments.arrivals):
        loads.append(Load(mode, length, rate, serve(engine, jobs_of(system, lengths, rate, engine.model.config.vocab_size, setting.seed))))
        engine.clear_cache()
        setting.report.add(loads[-1])
        if loads[-1].served.latency_ms > arguments.limit:
            break
    return loads


def _rehearse(engine: Engine, jobs: Sequence[Job]) -> None:
    """Steps in which some rows begin while others go on, for nobody: of many kinds, which are captured when they have come often."""
    serve(engine, jobs, tail=False)
    engine.clear_cache()


def of_jobs(loads: Sequence[Load]) -> list[Result]:
    speeds = {(load.mode, load.system): load.served.tokens_per_second for load in loads}
    results = []
    short, long = speeds.get((SHARED, SHORT)), speeds.get((SHARED, LONG))
    if short is not None and long is not None:
        case = f"throughput behind {LONG} tokens, of that behind {SHORT}"
        results.append(at_least(case, 100 * long / short, "%", KEPT))
    for system in sorted({load.system for load in loads}):
        ours, theirs = speeds.get((SHARED, system)), speeds.get((FLAT, system))
        if ours is not None and theirs is not None:
            least = OVER_FLAT if system == LONG else None
            results.append(at_least(f"batch job behind {system} tokens, times flat", ours / theirs, "times", least))
    return results


def knee(loads: Sequence[Load], mode: str, limit: float) -> float | None:
    """The most requests in a second that are answered in time."""
    return max((load.rate for load in loads if load.mode == mode and load.served.latency_ms <= limit), default=None)


def of_services(loads: Sequence[Load], limit: float) -> list[Result]:
    ours, theirs = knee(loads, SHARED, limit), knee(loads, FLAT, limit)
    if ours is None or theirs is None:
        return []
    ended = {mode: any(load.mode == mode and load.served.latency_ms > limit for load in loads) for mode in MODES}
    note = f"{ours:g} against {theirs:g} requests/s under {limit:g} ms/tok"
    note += "".join(f"; the most that was tried, {mode}" for mode, over in ended.items() if not over)
    least = KNEE if max(load.system for load in loads) == LONG else None
    return [at_least("requests per second at the knee, times flat", ours / theirs, "times", least, note)]


def draw_job(axis: Axes, loads: Sequence[Load]) -> None:
    for mode in MODES:
        points = [(load.system, load.served.tokens_per_second) for load in loads if load.mode == mode]
        axis.plot([system for system, _ in points], [speed for _, speed in points], marker="o", label=mode)
    axis.set(xlabel="tokens of the system prompt", ylabel="output tokens/s", ylim=(0, None))


def draw_service(axis: Axes, loads: Sequence[Load]) -> None:
    for mode in MODES:
        points = [(load.rate, load.served.latency_ms) for load in loads if load.mode == mode]
        axis.plot([rate for rate, _ in points], [ms for _, ms in points], marker="o", label=mode)
    axis.set(xlabel="requests/s", ylabel="ms for each output token", yscale="log")
