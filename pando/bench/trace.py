"""`pando bench trace`: what each policy finds of a trace, where, and what that saves.

The engine's scheduler and store decide, on a simulated clock; how long anything takes follows from what the paper on CachedAttention says
of its machines. With `--engine` a small part of the trace goes through a whole engine.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np

from ..config import PolicyName
from ..errors import InvalidOption
from ..flags import Parser, written_file
from ..store.policy import POLICIES
from .conversations import MOST_TOKENS, PAGE, Conversation, Shape, read, sharegpt
from .measure import Result, columns, table, write_json
from .optimum import optimum
from .options import SUFFIXES, cores, decimal, picture, several, whole
from .picture import figure_in
from .replay import Busy, Machine, Outcome, endless, recomputed, replay

GIB, HOUR = 2**30, 3600
GPU_PRICE, HOST_PRICE, DISK_PRICE = 5.0, 0.0088, 0.000082  # dollars for an hour of a GPU, of a GB; section 4.2
WINDOW = 4096  # tokens of LLaMA-13B's context, and of what an engine is asked of generated conversations
MACHINES = {
    # 40 layers of 5,120 values in 2 bytes, K and V. The rates follow from figures 14, 16 and 25: docs/bench-store.md. The pool is nine
    # tenths of the memory, less the weights.
    "llama-13b": Machine(kv_bytes=819_200, prefill_rate=2100, step=0.027, batch=24, gpus=2, pool=144_000),
    # 80 layers of 8 heads of 128. Section 2.4 has 2K tokens of a 65B model in 360 ms; the step is assumed.
    "llama-70b": Machine(kv_bytes=327_680, prefill_rate=5280, step=0.04, batch=24, gpus=4, pool=450_000),
}
EVERY = 10.0  # seconds between two words on how far a replay is
PROMISED, NEAR, IN_HOST = 0.86, 0.03, 0.99
GENERATED_PAGE = 128  # tokens
LONGEST = 32768  # tokens of a request that an engine is asked
ENDLESS, RECOMPUTED, BELADY = "endless", "recompute", "Belady"


@dataclass(frozen=True)
class Line:
    """One replay. Of turns after the warm-up."""

    policy: str
    host_gib: float
    disk_gib: float
    think: float | None  # seconds; None: the trace's own times
    turns: int
    whole: float  # share of turns whose whole context was there: the hit rate of the paper
    tokens: float  # share of the prompts' tokens that were there
    device: float  # share of those that were in the pool
    host: float  # and in host memory
    first_mean: float | None = None  # seconds from admission to the first token
    first_p95: float | None = None
    waited: float | None = None  # seconds before that, on average
    prefill_rate: float | None = None  # prompt tokens/s
    gpu_hours: float | None = None  # of all GPUs together: hours in which they were busy
    cost: float | None = None  # dollars
    took: float = 0.0  # seconds, of this machine


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    if bool(given.file) == bool(given.generate):
        raise InvalidOption("give a trace or --generate sharegpt, and not both")
    if given.engine and any((given.plot, given.host_gib, given.disk_gib, given.warmup, given.jobs)):
        raise InvalidOption("--plot, --host-gib, --disk-gib, --warmup and --jobs are of what is simulated; leave them out, or --engine")
    if given.engine and len(given.think_seconds) > 1:
        raise InvalidOption("--engine takes one pause; give --think-seconds one number")
    machine = _machine(given)
    facts: dict[str, object] = {"command": " ".join(["pando bench trace", *argv]), "machine": asdict(machine)}
    if given.engine:
        return _through_engine(given, machine, facts)
    lines, start = list[Line](), time.perf_counter()
    for line in _replays(given, machine):
        _say(f"{line.policy}: {line.whole:.1%} of turns, {line.tokens:.1%} of tokens, {line.took:.0f} s")
        lines.append(line)
    _say(f"{len(lines)} replays in {time.perf_counter() - start:.0f} s")
    results = judged(lines, generated=bool(given.generate))
    print(shown(lines))
    if results:
        print("\n" + table(results))
    write_json(given.json, {"facts": facts, "lines": list(map(asdict, lines)), "results": list(map(asdict, results))})
    if given.plot:
        draw(lines, given.file.name if given.file else "conversations like ShareGPT's", given.plot)
    return 0


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def _through_engine(given: argparse.Namespace, machine: Machine, facts: dict[str, object]) -> int:
    from . import rehearsal  # the simulation does without torch

    longest = LONGEST if given.file else WINDOW
    small = rehearsal.Small(given.sessions, longest, given.scale, given.shares, shape=given.shape)
    shape = Shape(given.sessions, given.rate, given.think_seconds[0])
    said = read(given.file) if given.file else sharegpt(shape, given.seed)
    lines = []
    for line in rehearsal.rehearse(said, machine, small, _policies(given)):
        _say(f"{line.policy}: {line.computed:.1%} computed{', simulated' if line.simulated else ''}")
        lines.append(line)
    print(f"{lines[0].turns} turns, {lines[0].tokens} tokens of prompts\n\n{rehearsal.shown(lines)}")
    write_json(given.json, {"facts": facts, "small": asdict(small), "lines": list(map(asdict, lines))})
    return 0


def _policies(given: argparse.Namespace) -> tuple[PolicyName, ...]:
    return get_args(PolicyName) if given.policy == "all" else (given.policy,)


@dataclass(frozen=True)
class Case:
    """What is replayed: a trace, or what is drawn, by a policy with tiers of these sizes."""

    machine: Machine
    said: Path | Shape
    seed: int
    policy: str
    host: float  # GiB
    disk: float
    warm: int  # turns that are not counted


def _replays(given: argparse.Namespace, machine: Machine) -> Iterator[Line]:
    """Side by side, as many as there are cores at hand."""
    cases, jobs = list(_cases(given, machine)), given.jobs or cores()
    if jobs == 1:
        yield from map(played, cases)
        return
    with ProcessPoolExecutor(jobs) as workers:
        yield from workers.map(played, cases)


def _cases(given: argparse.Namespace, machine: Machine) -> Iterator[Case]:
    hosts, disks = given.host_gib or [119.0], given.disk_gib or [9313.0 if given.generate else 0.0]
    warm = given.warmup if given.warmup is not None else 10_000 if given.generate else 0
    window = MOST_TOKENS if given.overflow == "move" else WINDOW
    shapes = [Shape(given.conversations, given.rate, think, window) for think in given.think_seconds]
    for said in shapes if given.generate else [given.file]:
        turns = sum(len(one.turns) for one in _said(said, given.seed))
        if turns <= warm:
            raise InvalidOption(f"--warmup {warm} leaves none of {turns} turns; give less")
        for disk, host in product(disks, hosts):
            optimum = [BELADY] if given.file and not disk else []
            for name in (*_policies(given), *optimum):
                yield Case(machine, said, given.seed, name, host, disk, warm)
        for name in (ENDLESS, RECOMPUTED):
            yield Case(machine, said, given.seed, name, 0, 0, warm)


def _said(source: Path | Shape, seed: int) -> list[Conversation]:
    return sharegpt(source, seed) if isinstance(source, Shape) else read(source)


class Progress:
    """Says how far a replay is, now and then: the long ones take minutes."""

    def __init__(self, name: str, turns: int) -> None:
        self._name, self._turns, self._start = name, turns, time.perf_counter()
        self._next = self._start + EVERY

    def __call__(self, served: int) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + EVERY
            _say(f"{self._name}: {served} of {self._turns} turns, {now - self._start:.0f} s")


def played(case: Case) -> Line:
    start, said = time.perf_counter(), _said(case.said, case.seed)
    tell = Progress(case.policy, sum(len(one.turns) for one in said))
    if case.policy == BELADY:
        return replace(belady(said, case.machine, case.host, case.warm), took=time.perf_counter() - start)
    if case.policy == ENDLESS:
        outcome = endless(case.machine, said, tell)
    elif case.policy == RECOMPUTED:
        outcome = recomputed(case.machine, said, tell)
    else:
        outcome = replay(case.machine, said, POLICIES[case.policy], round(case.host * GIB), round(case.disk * GIB), tell)
    think = case.said.think if isinstance(case.said, Shape) else None
    line = summary(outcome, case.policy, case.host, case.disk, machine=case.machine, think=think, warm=case.warm)
    return replace(line, took=time.perf_counter() - start)


def summary(outcome: Outcome, name: str, host: float, disk: float, *, machine: Machine, think: float | None, warm: int) -> Line:
    """`host` and `disk` in GiB are what is paid for; an endless cache is paid as none. A turn's whole context was there if less than a page
    of it was computed: of an answer's last token there are no states."""
    served = outcome.served[warm:]
    found, prompts = sum(turn.found for turn in served), sum(turn.prompt for turn in served)
    seconds = [turn.prefill for turn in served]
    before = outcome.busy[warm - 1] if warm else Busy()
    hours = (outcome.total.all - before.all) / HOUR
    computing = outcome.total.prompts - before.prompts  # nothing, if all came with the last turn of the warm-up
    price = machine.gpus * GPU_PRICE + (host * HOST_PRICE + disk * DISK_PRICE) * GIB / 1e9
    return Line(
        policy=name,
        host_gib=host,
        disk_gib=disk,
        think=think,
        turns=len(served),
        whole=sum(0 < turn.found and turn.context - turn.found < machine.page for turn in served) / len(served),
        tokens=found / prompts,
        device=sum(turn.device for turn in served) / found if found else 0.0,
        host=sum(turn.host for turn in served) / found if found else 0.0,
        first_mean=statistics.fmean(seconds),
        first_p95=float(np.quantile(seconds, 0.95)),
        waited=statistics.fmean(turn.waited for turn in served),
        prefill_rate=prompts / computing if computing else None,
        gpu_hours=hours * machine.gpus,
        cost=hours * price,
    )


def belady(said: Sequence[Conversation], machine: Machine, host: float, warm: int) -> Line:
    """Of a trace whose requests are served in the order of their arrival, and that is kept in the pool and in host memory alone: in one
    cache as large as both."""
    turns = [turn for one in said for turn in one.turns]
    pages = machine.pool // machine.page + machine.pages(round(host * GIB))
    found = optimum([turn.context for turn in turns], pages)[warm:]
    turns = turns[warm:]
    there = (0 < tokens and turn.prompt - turn.new - tokens < machine.page for turn, tokens in zip(turns, found, strict=True))
    whole = sum(there) / len(turns)
    return Line(BELADY, host, 0, None, len(turns), whole, sum(found) / sum(turn.prompt for turn in turns), 0.0, 1.0)


def judged(lines: Sequence[Line], generated: bool) -> list[Result]:
    """What was promised, and whether it was kept, for everything that Lookahead was replayed with."""
    results = []
    for mine in [line for line in lines if line.policy == "lookahead"]:
        beside = {line.policy: line for line in lines if (line.host_gib, line.disk_gib) == (mine.host_gib, mine.disk_gib)}
        case = f"{mine.host_gib:g} GiB host, {mine.disk_gib:g} GiB disk" + (f", {mine.think:g} s pauses" if mine.think is not None else "")
        if generated:
            most = next(line.whole for line in lines if line.policy == ENDLESS and line.think == mine.think)
            least = min(PROMISED, most - NEAR)
            results.append(
                Result(f"hit rate, {case}", 100 * mine.whole, "%", 100 * most, None, f">= {100 * least:.1f}", mine.whole >= least)
            )
            note = f"{100 * mine.device:.1f} % more in the pool"
            results.append(Result(f"of hits in host memory, {case}", 100 * mine.host, "%", None, None, ">= 99", mine.host >= IN_HOST, note))
        elif "lru" in beside:
            other = beside["lru"].tokens
            note = f"{BELADY} {beside[BELADY].tokens:.2%}" if BELADY in beside else ""
            result = Result(f"hit rate, {case}", 100 * mine.tokens, "%", 100 * other, None, ">= LRU", mine.tokens >= other, note)
            results.append(result)
    return results


def shown(lines: Sequence[Line]) -> str:
    found = ("turns", "tokens", "in pool", "in host")
    heads = ("pause s", "host GiB", "disk GiB", "policy", *found, "first ms", "p95", "waited s", "prefill tok/s", "GPU h", "$")
    rows = []
    for line in lines:
        sizes = ("", "") if line.policy in (ENDLESS, RECOMPUTED) else (f"{line.host_gib:g}", f"{line.disk_gib:g}")
        times = [None if value is None else 1000 * value for value in (line.first_mean, line.first_p95)]
        rest = (line.waited, line.prefill_rate, line.gpu_hours, line.cost)
        tiers = (f"{line.device:.1%}", f"{line.host:.1%}") if line.tokens and line.policy != BELADY else ("", "")
        shares = (f"{line.whole:.1%}", f"{line.tokens:.1%}", *tiers)
        rows.append(("" if line.think is None else f"{line.think:g}", *sizes, line.policy, *shares, *map(_number, (*times, *rest))))
    return columns(heads, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw(lines: Sequence[Line], title: str, file: Path) -> None:
    """A bar for every replay: its hits by tier, its time to the first token, its GPU time."""
    with figure_in(file, title, 15, 1.5 + 0.3 * len(lines)) as figure:
        found, first, busy = figure.subplots(1, 3, sharey=True)
        places = list(range(len(lines), 0, -1))
        by_tokens = all(line.think is None for line in lines)
        hits = [100 * (line.tokens if by_tokens else line.whole) for line in lines]
        found.barh(places, hits, color="tab:orange", label="disk")
        above = [hit * (line.device + line.host) for hit, line in zip(hits, lines, strict=True)]
        found.barh(places, above, color="tab:blue", label="host memory")
        found.barh(places, [hit * line.device for hit, line in zip(hits, lines, strict=True)], color="tab:green", label="pool")
        found.set_yticks(places, [_label(line) for line in lines])
        found.set(xlabel="hits, % of tokens" if by_tokens else "hits, % of turns", xlim=(0, 100))
        found.legend()
        first.barh(places, [1000 * (line.first_mean or math.nan) for line in lines])
        first.set(xlabel="first token after admission, ms")
        busy.barh(places, [line.gpu_hours or math.nan for line in lines])
        busy.set(xlabel="GPU hours")


def _label(line: Line) -> str:
    pause = "" if line.think is None else f", {line.think:g} s"
    return f"{line.policy}{pause}" + (f", {line.host_gib:g} + {line.disk_gib:g} GiB" if line.host_gib else "")


def _machine(given: argparse.Namespace) -> Machine:
    machine = MACHINES[given.model or ("llama-13b" if given.generate else "llama-70b")]
    count = given.machines
    return replace(
        machine,
        prefill_rate=given.prefill_rate or machine.prefill_rate * count,
        step=given.step_ms / 1000 if given.step_ms else machine.step,
        batch=machine.batch * count,
        gpus=machine.gpus * count,
        pool=machine.pool * count,
        window=WINDOW if given.overflow == "move" else None,
        page=PAGE if given.file else GENERATED_PAGE,
        budget=machine.budget * count,
        host_rate=machine.host_rate * count,
        disk_rate=machine.disk_rate * count,
    )


def _shares(text: str) -> tuple[float, ...]:
    values = several(decimal())(text)
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers, such as 15,15,60")
    return tuple(value / 100 for value in values)


def _parser() -> Parser:
    about = "Replay a trace of requests through the scheduler and the store, with simulated compute and transfers, for each policy."
    made = Parser(prog="pando bench trace", description=about, allow_abbrev=False)
    made.add_argument(
        "file", nargs="?", type=Path, help="JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token pages"
    )
    made.add_argument("--generate", choices=["sharegpt"], help="conversations with ShareGPT's published statistics, instead of a file")
    made.add_argument("--policy", choices=["all", *POLICIES], default="all", help="(%(default)s)")
    made.add_argument("--host-gib", type=several(decimal()), metavar="N,N,...", help="of host memory (119: 128 GB)")
    amounts, pauses = several(decimal(zero=True)), "mean pause before a turn, assumed (60)"
    made.add_argument("--disk-gib", type=amounts, metavar="N,N,...", help="of disk; 0: none (9313, 10 TB; with a file none)")
    made.add_argument("--think-seconds", type=amounts, default=[60.0], metavar="S,S,...", help=pauses)
    made.add_argument("--conversations", type=whole(1), default=9000, metavar="N", help="to generate (9000)")
    made.add_argument("--rate", type=decimal(), default=1.0, metavar="R", help="conversations that begin in a second, Poisson (1)")
    made.add_argument(
        "--overflow",
        choices=["compute", "move"],
        default="compute",
        help="what is left of a conversation past 4,096 tokens is computed again, or moved, by the engine's truncation (%(default)s)",
    )
    made.add_argument("--warmup", type=whole(0), metavar="N", help="turns that are not counted (10000; with a file 0)")
    made.add_argument("--model", choices=MACHINES, help="and its machine (llama-13b on 2 A100; with a file llama-70b on 4)")
    made.add_argument("--machines", type=whole(1), default=1, metavar="N", help="as one that is so many times as fast (1)")
    made.add_argument("--prefill-rate", type=decimal(), metavar="R", help="tokens that are computed in a second, of all machines together")
    made.add_argument("--step-ms", type=decimal(), metavar="MS", help="of a decoding step")
    made.add_argument("--jobs", type=whole(1), metavar="N", help="replays at the same time (the cores at hand)")
    made.add_argument("--seed", type=whole(0), default=0, metavar="N", help="(0)")
    made.add_argument("--engine", action="store_true", help="a small part of the trace, through a real engine with random weights")
    made.add_argument("--sessions", type=whole(1), default=60, metavar="N", help="conversations of that part (60)")
    made.add_argument("--scale", type=whole(1), default=32, metavar="N", help="tokens of the trace for one of the engine (32)")
    made.add_argument(
        "--shares", type=_shares, default=(0.15, 0.15, 0.6), metavar="P,H,D", help="pool, host and disk, %% of all that is kept (15,15,60)"
    )
    made.add_argument("--shape", default="tiny", metavar="NAME", help="of the engine's model (tiny)")
    made.add_argument("--json", type=written_file, metavar="FILE", help="write the facts and all numbers")
    made.add_argument("--plot", type=picture, metavar="FILE", help=f"draw a picture; the name ends in {', '.join(SUFFIXES)}")
    return made
