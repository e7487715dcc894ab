"""What a load test found: statistics of the answered requests, the others by reason, as a table and as JSON."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .load import Outcome, Run
from .measure import columns

UNFINISHED = "not finished when the run was stopped"


@dataclass(frozen=True)
class Spread:
    """In seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Summary:
    """One run. A spread is None where nothing was measured. Failed requests are in `failures` and nowhere else."""

    rate: float
    planned: int
    answered: int
    failures: dict[str, int]  # by reason
    examples: dict[str, str]  # by reason: what one of the servers' complaints said
    silent: int  # answered with tokens that make no text
    seconds: float  # from the first arrival to the end of the last request
    first: Spread | None
    per_token: Spread | None
    gap: Spread | None
    total: Spread | None
    lag: Spread | None
    capped: int
    held: Spread | None
    prompt_tokens: int | None  # None: the server told no usage
    output_tokens: int
    cached_tokens: int | None
    tokens_were_counted: bool  # in pieces of text, for want of usage

    @property
    def requests_per_second(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.prompt_tokens is None or not self.seconds else (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens and self.cached_tokens is not None else None


def spread(values: Iterable[float | None]) -> Spread | None:
    found = [value for value in values if value is not None]
    return Spread(statistics.fmean(found), *np.quantile(found, (0.5, 0.9, 0.99, 1)).tolist()) if found else None


def summarise(run: Run, turn: int | None = None) -> Summary:
    """Of all requests, or of those of one turn of their conversations."""
    outcomes = [outcome for outcome in run.outcomes if turn in (None, outcome.turn)]
    planned = run.requests if turn is None else sum(len(conversation.turns) > turn for conversation in run.planned)
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    sent = [outcome for outcome in outcomes if outcome.reply is not None]
    replies = [outcome.reply for outcome in answered if outcome.reply is not None]
    failures, examples = _failures(outcomes, planned)
    cached = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
    prompts = [reply.prompt_tokens for reply in replies if reply.prompt_tokens is not None]
    return Summary(
        rate=run.rate,
        planned=planned,
        answered=len(answered),
        failures=failures,
        examples=examples,
        silent=sum(not reply.pieces for reply in replies),
        seconds=_window(sent),
        first=spread(outcome.first for outcome in answered),
        per_token=spread(outcome.per_token for outcome in answered),
        gap=spread(gap for outcome in answered for gap in outcome.gaps),
        total=spread(outcome.total for outcome in answered),
        lag=spread(outcome.lag for outcome in sent),
        capped=sum(outcome.capped for outcome in sent),
        held=spread(outcome.held for outcome in sent if outcome.capped),
        prompt_tokens=sum(prompts) if prompts else None,
        output_tokens=sum(outcome.tokens for outcome in answered),
        cached_tokens=sum(cached) if cached else None,  # a server that tells at all leaves out the zeros
        tokens_were_counted=any(reply.output_tokens is None for reply in replies),
    )


def _window(sent: Sequence[Outcome]) -> float:
    ends = [outcome.arrival + outcome.total for outcome in sent if outcome.total is not None]
    return max(ends) - min(outcome.arrival for outcome in sent) if ends else 0.0


def _failures(outcomes: Sequence[Outcome], planned: int) -> tuple[dict[str, int], dict[str, str]]:
    found = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    counts = Counter(failure.reason for failure in found)
    counts[UNFINISHED] = planned - len(outcomes)
    return {reason: count for reason, count in counts.most_common() if count}, {f.reason: f.detail for f in reversed(found) if f.detail}


def describe(run: Run) -> str:
    """One run, for people."""
    found = summarise(run)
    rows = [
        ("time to first token", "ms", found.first, 1e3),
        ("time per output token", "ms", found.per_token, 1e3),
        ("between pieces of text", "ms", found.gap, 1e3),
        ("end to end", "s", found.total, 1.0),
        ("late start", "ms", found.lag, 1e3),
    ]
    cells = [(name, unit, *_cells(values, scale)) for name, unit, values, scale in rows]
    parts = [columns(("measure", "unit", "mean", "p50", "p90", "p99", "largest"), cells), "\n".join(_lines(found))]
    if any(len(conversation.turns) > 1 for conversation in run.planned):
        parts.append(_by_turn(run))
    return "\n\n".join(parts)


def _lines(found: Summary) -> list[str]:
    total = "unknown" if found.tokens_per_second is None else _number(found.tokens_per_second)
    rate = f"{_number(found.requests_per_second)} requests/s, {_number(found.output_per_second)} output tokens/s, {total} tokens/s in all"
    prompt = "unknown" if found.prompt_tokens is None else str(found.prompt_tokens)
    counted = " (counted in pieces of text)" if found.tokens_were_counted else ""
    cached = "not told by the server" if found.cached_tokens is None else f"{found.cached_tokens} ({_share(found)} of the prompts)"
    lines = [
        f"requests     {found.planned} planned, {found.answered} answered, {sum(found.failures.values())} not",
        *(f"{'':13}{count} x {reason}{_said(found, reason)}" for reason, count in found.failures.items()),
        f"throughput   {rate}, over {_number(found.seconds)} s",
        f"tokens       {prompt} of prompts, {found.output_tokens} of answers{counted}",
        f"cached       {cached}",
    ]
    if found.held:
        held = f"{_number(found.held.mean)} s on average, {_number(found.held.largest)} s at most"
        lines.append(f"held back    {found.capped} by --concurrency, for {held}")
    if found.silent:
        lines.append(f"no text      {found.silent} answers of tokens that make no text; they have no time to first token")
    return lines


def _said(found: Summary, reason: str) -> str:
    return f": {found.examples[reason]}" if reason in found.examples else ""


def _by_turn(run: Run) -> str:
    turns = range(max(len(conversation.turns) for conversation in run.planned))
    rows = []
    for turn in turns:
        found = summarise(run, turn)
        prompt = "" if not found.prompt_tokens else _number(found.prompt_tokens / found.answered)
        rows.append((str(turn + 1), str(found.answered), prompt, _share(found), *_cells(found.first, 1e3)))
    heads = ("turn", "answered", "prompt tokens", "cached", "first ms, mean", "p50", "p90", "p99", "largest")
    return columns(heads, rows)


def sweep(runs: Sequence[Run]) -> str:
    """A line for each rate."""
    counts = ("rate", "answered", "failed", "requests/s", "output tok/s", "cached")
    times = ("first p50 ms", "p90", "p99", "per token p50 ms", "p90", "p99")
    rows = []
    for run in runs:
        found = summarise(run)
        speeds = (_number(found.requests_per_second), _number(found.output_per_second), _share(found))
        spreads = (*_cells(found.first, 1e3)[1:4], *_cells(found.per_token, 1e3)[1:4])
        rows.append((f"{run.rate:g}", str(found.answered), str(sum(found.failures.values())), *speeds, *spreads))
    return columns((*counts, *times), rows)


def _cells(values: Spread | None, scale: float) -> tuple[str, ...]:
    if values is None:
        return ("",) * 5
    return tuple(_number(value * scale) for value in (values.mean, values.p50, values.p90, values.p99, values.largest))


def _share(found: Summary) -> str:
    return "" if found.cached_share is None else f"{found.cached_share:.1%}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def as_json(facts: Mapping[str, object], runs: Sequence[Run]) -> dict[str, Any]:
    return {"facts": dict(facts), "runs": [_run_json(run) for run in runs]}


def _run_json(run: Run) -> dict[str, Any]:
    found = summarise(run)
    derived = {
        "requests_per_second": found.requests_per_second,
        "output_per_second": found.output_per_second,
        "tokens_per_second": found.tokens_per_second,
        "cached_share": found.cached_share,
    }
    summary = asdict(found) | {"rate": _rate(run.rate)} | derived
    return {"rate": _rate(run.rate), "summary": summary, "requests": [_outcome_json(outcome) for outcome in run.outcomes]}


def _rate(rate: float) -> float | str:
    """JSON has no infinity."""
    return rate if math.isfinite(rate) else "inf"


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    reply, failure = outcome.reply, outcome.failure
    told = {
        "prompt_tokens": reply and reply.prompt_tokens,
        "output_tokens": reply and reply.output_tokens,
        "cached_tokens": reply and reply.cached_tokens,
    }
    return {
        "conversation": outcome.conversation,
        "turn": outcome.turn,
        "arrival": outcome.arrival,
        "lag": outcome.lag,
        "held": outcome.held,
        "first": outcome.first,
        "per_token": outcome.per_token,
        "total": outcome.total,
        "gaps": outcome.gaps,
        "asked_tokens": outcome.answer,
        **told,
        "failure": asdict(failure) if failure else None,
    }
