"""How long does it take here? What differs from machine to machine is measured, not guessed."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def in_turns(runs: Mapping[Name, Callable[[], object]], repeats: int = 4) -> dict[Name, float]:
    """Seconds of each: the shortest of a few timings, the one least disturbed. They take turns, so that whatever slows down a machine for
    a moment slows down all of them, and none finds in a cache what it has left there itself just before."""
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
