"""Measuring: medians of interleaved runs, a table, and the facts of the machine without which a number means nothing."""

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

Samples = dict[str, list[float]]
_VERDICTS = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True)
class Result:
    """One line of the table. `met` is None where nothing was promised."""

    case: str
    ours: float
    unit: str
    theirs: float | None = None
    ratio: float | None = None  # how many times better ours is
    target: str = ""
    met: bool | None = None
    note: str = ""
    samples: Samples = field(default_factory=dict)


def interleave(runs: Mapping[str, Callable[[], float]], repeats: int) -> Samples:
    """Every run in turn, `repeats` times, each round in the other direction: a machine that slows down slows them all alike."""
    samples: Samples = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            samples[name].append(runs[name]())
    return samples


def worthwhile(probes: Mapping[str, float], times: float) -> tuple[list[str], str]:
    """Of variants probed once, those at most `times` slower than the best, by rate; and a note on those left out."""
    top = max(probes.values())
    kept = [name for name, rate in probes.items() if rate * times >= top]
    dropped = [f"{name} ({top / rate:.1f}x slower)" for name, rate in probes.items() if name not in kept]
    return kept, f"not measured after a short probe: {', '.join(dropped)}" if dropped else ""


def best(samples: Samples, names: Sequence[str], higher: bool) -> str:
    """Which of `names` has the best median."""
    return (max if higher else min)(names, key=lambda name: statistics.median(samples[name]))


def compared(case: str, samples: Samples, unit: str, *, ours: str, higher: bool, at_least: float | None, note: str = "") -> Result:
    """`ours` against the best of all other samples; the target is a ratio of medians. `higher`: more is better, as with rates."""
    winner = best(samples, [name for name in samples if name != ours], higher)
    mine, other = statistics.median(samples[ours]), statistics.median(samples[winner])
    ratio = mine / other if higher else other / mine
    note = "; ".join(part for part in (f"against {winner}", note) if part)
    if at_least is None:
        return Result(case, mine, unit, other, ratio, note=note, samples=samples)
    return Result(case, mine, unit, other, ratio, f">= {at_least:g}x", ratio >= at_least, note, samples)


def counted(case: str, equal: int, of: int, note: str = "") -> Result:
    """All of them must be equal."""
    return Result(case, equal, "equal", of, target=f"all {of}", met=equal == of, note=note)


def bounded(case: str, value: float, unit: str, at_most: float, theirs: float | None = None, note: str = "") -> Result:
    return Result(case, value, unit, theirs, target=f"<= {at_most:g}", met=value <= at_most, note=note)


def line(result: Result) -> str:
    """One result, for those who wait for the table."""
    parts = [f"{_number(result.ours)} {result.unit}".rstrip()]
    parts += [f"against {_number(result.theirs)}"] * (result.theirs is not None)
    parts += [f"{result.ratio:.2f}x"] if result.ratio is not None else []
    parts += [f"target {result.target}: {_VERDICTS[result.met]}"] if result.target else []
    return f"  {result.case}: {', '.join(parts)}" + (f" ({result.note})" if result.note else "")


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    heads = ("case", "Pando", "against", "unit", "ratio", "target", "met")
    rows = [
        (
            result.case,
            _number(result.ours),
            _number(result.theirs),
            result.unit,
            "" if result.ratio is None else f"{result.ratio:.2f}x",
            result.target,
            _VERDICTS[result.met],
        )
        for result in results
    ]
    notes = [f"  {result.case}: {result.note}" for result in results if result.note]
    return "\n".join([columns(heads, rows), *(["", "notes", *notes] if notes else [])])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def machine(threads: int, command: str) -> dict[str, str | int]:
    """What a reader must know to judge the numbers."""
    import torch

    from .. import __version__

    return {
        "pando": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    """The model's name on x86; on Arm the kernel gives only numbers, so implementer and part."""
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" in facts:
        return facts["model name"]
    if "CPU part" in facts:
        return f"Arm implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return platform.processor() or "unknown"


def as_json(facts: Mapping[str, object], results: Sequence[Result]) -> dict[str, object]:
    return {"machine": dict(facts), "results": [asdict(result) for result in results]}


def told(results: list[Result]) -> list[Result]:
    """Says results as soon as they are there."""
    print("\n".join(map(line, results)), flush=True)
    return results
