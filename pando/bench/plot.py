"""A picture of a load test."""

from collections.abc import Sequence
from pathlib import Path

from .load import Run
from .picture import Axes, figure_in
from .report import Spread, Summary, summarise


def draw(runs: Sequence[Run], title: str, file: Path) -> None:
    """One run: how its latencies are spread. Several: how they and the throughput follow the rate."""
    with figure_in(file, title, 13, 4) as figure:
        axes = list(figure.subplots(1, 3))
        if len(runs) == 1:
            _spread(axes, runs[0])
        else:
            _against_rate(axes, [summarise(run) for run in runs])


def _spread(axes: Sequence[Axes], run: Run) -> None:
    answered = [outcome for outcome in run.outcomes if outcome.failure is None]
    panels = {
        "time to first token, ms": [outcome.first for outcome in answered],
        "time per output token, ms": [outcome.per_token for outcome in answered],
        "end to end, ms": [outcome.total for outcome in answered],
    }
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        found = sorted(value * 1e3 for value in values if value is not None)
        axis.step(found, [100 * (i + 1) / len(found) for i in range(len(found))], where="post")
        axis.set(xlabel=name, ylabel="% of answered requests", ylim=(0, 101))
        axis.grid(alpha=0.3)


def _against_rate(axes: Sequence[Axes], found: Sequence[Summary]) -> None:
    places, names = range(len(found)), [f"{summary.rate:g}" for summary in found]
    _percentiles(axes[0], [summary.first for summary in found])
    _percentiles(axes[1], [summary.per_token for summary in found])
    axes[0].set(ylabel="time to first token, ms")
    axes[1].set(ylabel="time per output token, ms")
    axes[2].plot(places, [summary.output_per_second for summary in found], marker="o")
    axes[2].set(ylabel="output tokens/s", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="requests/s offered")
        axis.set_xticks(list(places), names)  # a step each, since rates are often doubled and one may be endless
        axis.grid(alpha=0.3)


def _percentiles(axis: Axes, spreads: Sequence[Spread | None]) -> None:
    there = [(place, spread) for place, spread in enumerate(spreads) if spread is not None]
    places = [place for place, _ in there]
    for name in ("p50", "p90", "p99"):
        axis.plot(places, [getattr(spread, name) * 1e3 for _, spread in there], marker="o", label=name)
    axis.set_ylim(bottom=0)
    axis.legend()
