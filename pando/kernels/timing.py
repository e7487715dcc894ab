"""How long does it take here? What differs from machine to machine is measured, not guessed."""

import time
from collections.abc import Callable


def seconds(run: Callable[[], object], repeats: int = 4) -> float:
    """The shortest of a few timings: the one least disturbed."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
