"""Requests that arrive in time, answered by an engine in this process: what becomes of them, and how much they hold meanwhile."""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from ...engine.engine import Engine
from ...engine.graphs import SIZES
from ...engine.request import Request
from ..traffic import Lengths, arrivals, read_lengths
from ..trial import greedy

PROMPTS = (4, 23, 112, 423, 1024)  # tokens of ShareGPT's prompts: the fewest, the quartiles, and the most
ANSWERS = (4, 27, 146, 359, 1024)  # the same of its answers, but for the last hundredth, which is longer
WARM_STEPS = 4  # for each number of rows


@dataclass(frozen=True)
class Job:
    arrival: float  # seconds from the start
    prompt: Sequence[int]
    answer: int  # tokens


@dataclass(frozen=True)
class Served:
    seconds: float  # from the first arrival to the last token
    tokens: int  # of all answers
    latencies: tuple[float, ...]  # seconds for each token of an answer: from its arrival to its end, by its length
    pages: int  # that running rows held at most, each counted once; 0 if they were not
    rows: int  # that ran together at most

    @property
    def requests_per_second(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def latency_ms(self) -> float:
        """For each token, on average over the requests that were answered to the end."""
        return 1e3 * statistics.fmean(self.latencies)

    def as_json(self) -> dict[str, Any]:
        return {
            "answered": len(self.latencies), "seconds": self.seconds, "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second, "latency_ms": self.latency_ms,
            "median_latency_ms": 1e3 * statistics.median(self.latencies), "peak_rows": self.rows,
        }  # fmt: skip


def serve(engine: Engine, jobs: Sequence[Job], *, tail: bool = True, weighed: bool = False) -> Served:
    """Answers them all. A request's time runs from the moment at which it was to arrive, even if a step was in the way then. Without a
    `tail` it ends when none waits any more, before ever fewer rows run. `weighed`: the pages that are held are counted at every step, which
    takes some time."""
    coming = deque(sorted(jobs, key=lambda job: job.arrival))
    asked: dict[str, Job] = {}
    latencies: list[float] = []
    begun, first, tokens, pages, rows = time.perf_counter(), coming[0].arrival, 0, 0, 0
    while coming or engine.has_work:
        now = time.perf_counter() - begun
        while coming and coming[0].arrival <= now:
            job, name = coming.popleft(), str(len(asked))
            asked[name] = job
            engine.add(Request(name, job.prompt, greedy(job.answer)))
        if not engine.has_work:
            time.sleep(coming[0].arrival - now)
            continue
        events = engine.step()
        now = time.perf_counter() - begun
        ended = [asked[event.request_id] for event in events if event.finish_reason is not None]
        latencies += [(now - job.arrival) / job.answer for job in ended]
        tokens, rows = tokens + len(events), max(rows, engine.facts.rows)
        if weighed:
            stats = engine.stats()
            pages = max(pages, stats.pages_in_use - stats.pages_evictable)
        if not tail and not coming and not engine.scheduler.waiting:
            for name in asked:
                engine.cancel(name)
    return Served(now - first, tokens, tuple(latencies), pages, rows)


# ---- what is asked


def lengths_of(file: Path | None, count: int, longest: int, seed: int) -> list[Lengths]:
    """Drawn from a file, or by ShareGPT's quartiles; what is longer is cut."""
    random = Random(f"{seed} lengths")
    if file is not None:
        found = random.choices(read_lengths(file), k=count)
    else:
        found = [(_by_quartiles(PROMPTS, random), _by_quartiles(ANSWERS, random)) for _ in range(count)]
    return [(min(longest, prompt), min(longest, answer)) for prompt, answer in found]


def _by_quartiles(quartiles: Sequence[int], random: Random) -> int:
    """Evenly among the four quarters, and within one evenly on a logarithmic scale."""
    quarter = random.randrange(4)
    low, high = quartiles[quarter], quartiles[quarter + 1]
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def jobs_of(system: Sequence[int], lengths: Sequence[Lengths], rate: float, vocab: int, seed: int) -> list[Job]:
    """Behind the same system prompt; `rate` may be endless, and all arrive at once. What is said, and when, is drawn apart."""
    words, times = Random(f"{seed} words"), Random(f"{seed} arrivals")
    starts = islice(arrivals(rate, times), len(lengths))
    each = zip(starts, lengths, strict=True)
    return [Job(start, (*system, *words.choices(range(vocab), k=prompt)), answer) for start, (prompt, answer) in each]


def warm(engine: Engine, system: Sequence[int], rows: int) -> None:
    """Runs every number of rows that is of a kind of its own, from the largest down, so that kernels are there and steps captured."""
    answers: list[int] = []
    tokens, live = WARM_STEPS, rows
    while live:
        kept = max((size for size in SIZES if size < live), default=0)
        answers += [tokens] * (live - kept)
        tokens, live = tokens + WARM_STEPS, kept
    own = Random("warm").choices(range(engine.model.config.vocab_size), k=rows)
    serve(engine, [Job(0.0, (*system, token), answer) for token, answer in zip(own, answers, strict=True)])
    engine.clear_cache()
