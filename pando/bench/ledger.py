"""What a soak test has seen, and the judgement on it. Nothing here asks a server."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..kv.segment import shared_length
from .host import Vitals
from .measure import Result

Violation = Literal["wrong answer", "server error", "wrong status", "stuck", "connection broke", "foreign tokens"]
VIOLATIONS: tuple[Violation, ...] = get_args(Violation)
HOPELESS = 100  # violations after which going on tells nothing new
SHOWN = 5  # examples of a violation
THREADS, FILES = 4, 4  # more than before that are no leak: pools that had not met their largest crowd yet

Counts = Mapping[str, float]


class Sent:
    """Every token sequence of each tenant: what it may find cached, and what only others may."""

    def __init__(self) -> None:
        self._by_first: dict[tuple[str, int], Counter[tuple[int, ...]]] = {}

    def note(self, tenant: str, tokens: Sequence[int]) -> None:
        self._by_first.setdefault((tenant, tokens[0]), Counter())[tuple(tokens)] += 1

    def reach(self, tenant: str, prompt: Sequence[int], apart_from: Sequence[int] = ()) -> int:
        """How many tokens of a prompt the tenant has sent at the beginning of another, or of one that is equal: not counting the prompt
        itself, which was noted as `apart_from`."""
        others = self._by_first.get((tenant, prompt[0]), Counter())
        left_out = tuple(apart_from)
        return max((shared_length(prompt, other) for other, times in others.items() if times > (other == left_out)), default=0)


@dataclass
class Tally:
    sent: Counter[str] = field(default_factory=Counter)  # by kind
    came: Counter[str] = field(default_factory=Counter)  # by status or end
    violations: Counter[Violation] = field(default_factory=Counter)
    examples: dict[Violation, list[str]] = field(default_factory=dict)
    compared: int = 0  # answers with what they were alone
    hits: int = 0
    tempted: int = 0  # requests that would have reused more, had they been let into another tenant's cache

    def violation(self, what: Violation, detail: str) -> None:
        self.violations[what] += 1
        if len(examples := self.examples.setdefault(what, [])) < SHOWN:
            examples.append(detail)

    @property
    def hopeless(self) -> bool:
        return self.violations.total() >= HOPELESS


@dataclass(frozen=True)
class Sample:
    seconds: float  # since the load began
    vitals: Vitals


@dataclass(frozen=True)
class Observed:
    """Everything that is judged."""

    tally: Tally
    before: Counts
    after: Counts
    idle: Vitals  # before the load
    samples: Sequence[Sample]  # under load
    end: Vitals  # after it, at rest
    complaints: int  # errors in the server's log
    warm_up: float  # seconds
    margin: int  # MiB

    def grown(self, name: str) -> float:
        return self.after.get(name, 0) - self.before.get(name, 0)


def judge(seen: Observed) -> list[Result]:
    tally = seen.tally
    warm = [sample.vitals for sample in seen.samples if sample.seconds <= seen.warm_up] or [seen.idle]
    threads, rss = max(v.threads for v in warm), max(v.rss for v in warm)
    return [
        *(_at_most(what, tally.violations[what], 0) for what in VIOLATIONS),
        _some("answers compared", tally.compared),
        _some("prompts with a hit", tally.hits),
        _some("prompts only another tenant had", tally.tempted, "the check for foreign tokens would mean nothing otherwise"),
        _some("rows preempted", seen.grown("pando_preemptions_total"), "a pool without pressure tests little"),
        _some("prompts evicted before", seen.grown('pando_cache_misses_total{reason="evicted"}')),
        _at_most("requests failed inside", seen.grown('pando_requests_total{outcome="failed"}'), 0),
        _at_most("requests timed out", seen.grown('pando_requests_total{outcome="timeout"}'), 0),
        _at_most("rows running at rest", seen.after["pando_requests_running"], 0),
        _at_most("rows waiting at rest", seen.after["pando_requests_waiting"], 0),
        _at_most("pages lost at rest", abs(seen.after["pando_pages_in_use"] - seen.after["pando_pages_cached"]), 0, "in use, not cached"),
        _at_most("pages pinned at rest", seen.after["pando_pages_pinned"], 0, "every pin was let go"),
        _at_most("errors in the log", seen.complaints, 0),
        _at_most("threads at rest", seen.end.threads, threads + THREADS, f"{threads} in the warm-up, and {THREADS} more allowed"),
        _at_most("open files at rest", seen.end.files, seen.idle.files + FILES, f"{seen.idle.files} before, and {FILES} more allowed"),
        _at_most("memory at rest", seen.end.rss, rss + seen.margin, f"{rss} MiB in the warm-up, and {seen.margin} more allowed", "MiB"),
    ]


def _at_most(case: str, value: float, limit: float, note: str = "", unit: str = "") -> Result:
    return Result(case, value, unit, target=f"<= {limit:g}" if limit else "0", met=value <= limit, note=note)


def _some(case: str, value: float, note: str = "") -> Result:
    return Result(case, value, "", target="some", met=value > 0, note=note)


def counts(exposition: str) -> dict[str, float]:
    """Samples of /metrics by name, labels included."""
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}
