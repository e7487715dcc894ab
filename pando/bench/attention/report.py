"""What `pando bench attention` found: a line for each case as it is measured, JSON, and a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean

from ...errors import InvalidOption
from ..picture import figure_in

BAR = 0.26  # width, where cases are 1 apart
CASE_INCHES, HEIGHT, NARROWEST, WIDEST = 0.55, 5.0, 6.0, 60.0


@dataclass(frozen=True)
class Measured:
    """Times in microseconds; errors relative to fp64, None where the result was not a number."""

    name: str
    shared_us: float
    auto_us: float
    flat_us: float
    torch_us: float | None  # None: torch has no kernel for it
    floor_us: float
    rel_err: float | None  # of shared
    flat_rel_err: float | None
    torch_rel_err: float | None
    rows_checked: int
    shared_reads: int
    plan_us: float  # to make that plan, on the host
    auto_shared_reads: int
    auto: str  # what the cost model chose: "shared", "flat", or "mixed"
    shared_share: float  # of the tokens that rows read, those that more than one of them reads
    relay_formula: float | None  # where all rows share one prefix
    kernel: str  # "native", "torch", "triton"
    timed: dict[str, str] = field(default_factory=dict)  # how each was timed: "graph", "eager" or "cpu"
    peer_us: float | None = None
    wrong: str = ""  # why a result is not what it must be

    @property
    def of_floor(self) -> float:
        return self.floor_us / self.shared_us

    @property
    def over_flat(self) -> float:
        return self.flat_us / self.shared_us

    @property
    def over_torch(self) -> float | None:
        return None if self.torch_us is None else self.torch_us / self.shared_us

    @property
    def over_peer(self) -> float | None:
        return None if self.peer_us is None else self.peer_us / self.shared_us

    def as_json(self) -> dict[str, object]:
        ratios = {"of_floor": self.of_floor, "over_flat": self.over_flat, "over_torch": self.over_torch, "over_peer": self.over_peer}
        return {**asdict(self), **ratios}


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str
    failed: bool = False  # it broke, and that is no fault of the case


HEADS = (
    *("shared us", "auto us", "auto is", "flat us", "torch us", "floor us", "% floor", "x flat", "x torch", "relay", "rel err", "reads"),
    "plan us",
)
PEER_HEADS = ("peer us", "x peer")


class Table:
    """Lines of fixed columns, since the first are printed before the last are known."""

    def __init__(self, names: Sequence[str], peers: bool) -> None:
        self._name = max(len("case"), *map(len, names))
        self._heads = HEADS + PEER_HEADS * peers
        self._peers = peers

    def head(self) -> str:
        return "  ".join(["case".ljust(self._name), *(head.rjust(max(8, len(head))) for head in self._heads)])

    def line(self, found: Measured | Skipped) -> str:
        name = found.name.ljust(self._name)
        if isinstance(found, Skipped):
            return f"{name}  {'FAILED' if found.failed else 'skipped'}: {found.reason}"
        cells = [
            number(found.shared_us), number(found.auto_us), found.auto, number(found.flat_us), number(found.torch_us),
            number(found.floor_us), f"{found.of_floor:.0%}", times(found.over_flat), times(found.over_torch), times(found.relay_formula),
            "not finite" if found.rel_err is None else f"{found.rel_err:.1e}", str(found.shared_reads), number(found.plan_us),
        ]  # fmt: skip
        cells += [number(found.peer_us), times(found.over_peer)] if self._peers else []
        text = "  ".join([name, *(cell.rjust(max(8, len(head))) for cell, head in zip(cells, self._heads, strict=True))]).rstrip()
        eager = [variant for variant, how in found.timed.items() if how == "eager"]
        notes = [f"timed with its launches, for no graph could be made of it: {', '.join(eager)}"] * bool(eager)
        notes += [f"WRONG: {found.wrong}"] * bool(found.wrong)
        return "\n".join([text, *(f"{' ' * self._name}  {note}" for note in notes)])


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def summary(found: Sequence[Measured]) -> list[str]:
    """Geometric means over all cases that have the ratio."""
    lines = [f"by the kernels called {', '.join(sorted({one.kernel for one in found}))}"] if found else []
    for what, values in (
        ("faster than flat, over the cases with shared reads", [one.over_flat for one in found if one.shared_reads]),
        ("faster than torch by levels", [one.over_torch for one in found if one.over_torch is not None]),
        ("faster than the best peer", [one.over_peer for one in found if one.over_peer is not None]),
    ):
        if values:
            lines.append(f"{geometric_mean(values):.2f}x {what} ({len(values)} cases, geometric mean; from {min(values):.2f}x)")
    slower = [one.name for one in found if one.auto_us > 1.02 * min(one.flat_us, one.shared_us)]
    if slower:
        lines.append(f"auto is more than 2 % slower than the better of shared and flat in {len(slower)}: {'; '.join(slower)}")
    return lines


def read_peers(file: Path) -> dict[str, float]:
    """Microseconds of the best other kernel, by the name of the case."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidOption(f"--peers {file}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict) or not all(_is_time(value) for value in found.values()):
        raise InvalidOption(f'--peers {file}: must be an object of microseconds by case, as {{"32/8 32,2048,128": 28.6}}')
    return {name: float(value) for name, value in found.items()}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def as_json(facts: Mapping[str, object], found: Sequence[Measured | Skipped]) -> dict[str, object]:
    """`facts` hold at least device and versions."""
    cases = [one.as_json() for one in found if isinstance(one, Measured)]
    return {**facts, "cases": cases, "skipped": [asdict(one) for one in found if isinstance(one, Skipped)]}


def draw(found: Sequence[Measured], title: str, file: Path) -> None:
    """Bars side by side, on a logarithmic scale, and the floor of each case as a line below which none can be."""
    width = min(WIDEST, max(NARROWEST, 2 + CASE_INCHES * len(found)))
    times = {"shared": [one.shared_us for one in found], "flat": [one.flat_us for one in found]}
    times["torch by levels"] = [one.torch_us or math.nan for one in found]
    with figure_in(file, title, width, HEIGHT) as figure:
        axis = figure.subplots()
        for place, (label, values) in enumerate(times.items()):
            axis.bar([index + (place - 1) * BAR for index in range(len(found))], values, BAR, label=label)
        edges = ([index + side for index in range(len(found))] for side in (-0.45, 0.45))
        axis.hlines([one.floor_us for one in found], *edges, "black", label="floor")
        axis.set(yscale="log", ylabel="microseconds")
        axis.set_xticks(range(len(found)), [one.name for one in found], rotation=60, ha="right", fontsize=8, parse_math=False)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
