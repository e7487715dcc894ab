"""What `pando bench throughput` found: lines, printed as they are measured, JSON, written with each of them, and a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..measure import Result, told, write_json
from ..picture import Axes, figure_in

WIDTH = 8  # of a column, at least
PANEL = (6.0, 4.5)  # inches
ACROSS = 3  # panels


class Line(Protocol):
    """One line of a table."""

    def cells(self) -> Sequence[str]: ...
    def as_json(self) -> dict[str, Any]: ...


Draw = Callable[[Axes, Sequence[Any]], None]


@dataclass(frozen=True)
class Skipped:
    table: str
    what: str
    reason: str
    failed: bool  # it broke, and was not merely too large


@dataclass
class Report:
    """All of a run. What was measured is on paper at once: the machine may be gone the next minute."""

    facts: Mapping[str, object]
    file: Path | None = None
    judged: bool = True  # the promises are about a GPU and the full sizes
    tables: dict[str, list[Line]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _table: str = ""
    _heads: Sequence[str] = ()

    def begin(self, table: str, about: str, heads: Sequence[str]) -> None:
        self._table, self._heads = table, heads
        self.tables[table] = []
        print(f"\n{table}: {about}\n" + self._row(heads), flush=True)

    def add(self, found: Line) -> None:
        self.tables[self._table].append(found)
        print(self._row(found.cells()), flush=True)
        self._write()

    def skip(self, what: str, reason: object, *, failed: bool = False) -> None:
        self.skipped.append(Skipped(self._table, what, " ".join(str(reason).split()), failed))
        print(f"  {what} {'FAILED' if failed else 'skipped'}: {self.skipped[-1].reason}", flush=True)
        self._write()

    def promise(self, results: Sequence[Result]) -> None:
        """What follows from a table."""
        self.results += told(results, judged=self.judged)
        self._write()

    def _row(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(max(WIDTH, len(head))) for cell, head in zip(cells, self._heads, strict=True)).rstrip()

    def _write(self) -> None:
        found = {
            "machine": dict(self.facts),
            "tables": {name: [one.as_json() for one in lines] for name, lines in self.tables.items()},
            "results": [asdict(result) for result in self.results],
            "skipped": [asdict(one) for one in self.skipped],
        }
        write_json(self.file, found)


def draw(report: Report, ways: Mapping[str, Draw], title: str, file: Path) -> None:
    """A panel for each table that has lines."""
    there = [name for name, lines in report.tables.items() if lines]
    if not there:
        return
    across, down = min(ACROSS, len(there)), -(-len(there) // ACROSS)
    with figure_in(file, title, PANEL[0] * across, PANEL[1] * down) as figure:
        for place, name in enumerate(there):
            axis = figure.add_subplot(down, across, place + 1)
            ways[name](axis, report.tables[name])
            axis.set_title(name)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
