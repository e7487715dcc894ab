"""Measuring: medians of interleaved runs, a table, and the facts of the machine without which a number means nothing."""

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

from .options import cores

Samples = dict[str, list[float]]
EQUAL = "equal"  # the unit of what is counted
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


def interleave(runs: Mapping[str, Callable[[], float]], repeats: int, shown: bool = False) -> Samples:
    """Every run in turn, `repeats` times, each round in the other direction: a machine that slows down slows them all alike. Those that
    take long are `shown`."""
    samples: Samples = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if shown:
                passing(f"{name}, run {turn + 1} of {repeats}")
            samples[name].append(runs[name]())
    if shown:
        passing("")
    return samples


def passing(what: str) -> None:
    """What is going on, on a terminal, in the place of what was; silence elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K  {what}" if what else "\r\033[K", end="", file=sys.stderr, flush=True)


def worthwhile(probes: Mapping[str, float], times: float) -> tuple[list[str], str]:
    """Of variants probed once, those at most `times` slower than the best, by rate; and a note on those left out."""
    top = max(probes.values())
    kept = [name for name, rate in probes.items() if rate * times >= top]
    dropped = [f"{name} ({top / rate:.1f}x slower)" for name, rate in probes.items() if name not in kept]
    return kept, f"not measured after a short probe: {', '.join(dropped)}" if dropped else ""


def compared(case: str, samples: Samples, unit: str, *, ours: str, higher: bool, at_least: float | None, note: str = "") -> Result:
    """`ours` against the best of all other samples; the target is a ratio of medians. `higher`: more is better, as with rates."""
    medians = {name: statistics.median(found) for name, found in samples.items()}
    mine = medians.pop(ours)
    winner = (max if higher else min)(medians, key=medians.__getitem__)
    other = medians[winner]
    ratio = mine / other if higher else other / mine
    note = "; ".join(part for part in (f"against {winner}", note) if part)
    if at_least is None:
        return Result(case, mine, unit, other, ratio, note=note, samples=samples)
    return Result(case, mine, unit, other, ratio, f">= {at_least:g}x", ratio >= at_least, note, samples)


def paired(case: str, samples: Samples, unit: str, *, ours: str, theirs: str, at_least: float | None, note: str) -> Result:
    """Rates, by the median of the ratios of runs that were next to each other: what the machine does meanwhile is then in both. The note
    says how far these lie apart."""
    pairs = sorted(mine / other for mine, other in zip(samples[ours], samples[theirs], strict=True))
    middle, ratio = pairs[len(pairs) // 4 : len(pairs) - len(pairs) // 4], statistics.median(pairs)
    apart = f"from {pairs[0]:.3f}x to {pairs[-1]:.3f}x, half of them from {middle[0]:.3f}x to {middle[-1]:.3f}x"
    note = f"median of {len(pairs)} pairs {apart}; {note}"
    both = {name: samples[name] for name in (ours, theirs)}
    result = compared(case, both, unit, ours=ours, higher=True, at_least=at_least, note=note)
    return replace(result, ratio=ratio, met=None if at_least is None else ratio >= at_least)


def counted(case: str, equal: int, of: int, note: str = "") -> Result:
    """All of them must be equal."""
    return Result(case, equal, EQUAL, of, target=f"all {of}", met=equal == of, note=note)


def at_least(case: str, value: float, unit: str, least: float | None, note: str = "") -> Result:
    """None: nothing was promised."""
    if least is None:
        return Result(case, value, unit, note=note)
    return Result(case, value, unit, target=f">= {least:g}", met=value >= least, note=note)


def at_most(case: str, value: float, unit: str, most: float | None, note: str = "", theirs: float | None = None) -> Result:
    if most is None:
        return Result(case, value, unit, theirs, note=note)
    return Result(case, value, unit, theirs, target=f"<= {most:g}", met=value <= most, note=note)


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


def machine(command: str) -> dict[str, str | int]:
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
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": today(),
        "command": command,
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


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


def show(facts: Mapping[str, object]) -> None:
    print("\n".join(f"{name:<16} {value}" for name, value in facts.items()), flush=True)


def write_json(file: Path | None, found: object) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def finish(facts: Mapping[str, object], results: Sequence[Result], file: Path | None) -> None:
    """The table, and all of it in a file, where one is wanted."""
    print("\n" + table(results))
    write_json(file, as_json(facts, results))


def told(results: Iterable[Result], *, judged: bool = True) -> list[Result]:
    """Says each result as soon as it is there."""
    found = []
    for result in results:
        found.append(result if judged else unjudged(result))
        print(line(found[-1]), flush=True)
    return found


def unjudged(result: Result) -> Result:
    """What was promised is promised of the full sizes; what must be equal must be so at any."""
    return result if result.unit == EQUAL else replace(result, target="", met=None)
