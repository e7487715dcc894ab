"""Pictures, by matplotlib, which only who wants one needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Axes = Any  # matplotlib's


@contextmanager
def figure_in(file: Path, title: str, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches to draw on, which is in the file then."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    yield figure
    figure.savefig(file)
