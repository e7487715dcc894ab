"""When does sharing pay here? Rows over one segment, read once and read by each, for lengths around where the one overtakes the other; then
the cost model that would have chosen best."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kv.plan import DEFAULT, CostModel
from ..measure import columns
from .cases import Case
from .report import number
from .suites import Heads, single

ROWS = (2, 3, 4, 8, 16, 32, 64)
PAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # lengths of the shared segment
TAIL = 64  # tokens of each row's own
CLEAR = 0.7  # of the flat time: longer segments than those that reach it are no question
NOISE = 0.001  # of the time, that a fit must save to be believed over the default
MERGES = (0.0, *(0.125 * 2 ** (step / 2) for step in range(21)))  # tokens per row and head of a group


class Sample(NamedTuple):
    rows: int
    tokens: int
    shared_us: float
    flat_us: float

    @property
    def best_us(self) -> float:
        return min(self.shared_us, self.flat_us)


Numbers = NDArray[np.float64]
Measure = Callable[[Case], tuple[float, float]]  # microseconds, shared and flat


def samples(heads: Heads, page_size: int, measure: Measure) -> list[Sample]:
    """For each number of rows, ever longer segments until sharing is clearly better."""
    found = []
    for rows in ROWS:
        clear = 0
        for pages in PAGES:
            case = single(heads, rows, pages * page_size, TAIL)
            sample = Sample(rows, pages * page_size, *measure(case))
            found.append(sample)
            clear = clear + 1 if sample.shared_us < CLEAR * sample.flat_us else 0
            if clear == 2:
                break
    return found


def pays(sample: Sample, group: int, cost: CostModel) -> bool:
    return bool(cost.pays(np.array(sample.tokens), np.array(sample.rows), group))


def lost(found: Sequence[Sample], group: int, cost: CostModel) -> float:
    """The part of the time that the model's choices cost more than the best ones, on average over the samples."""
    spent = [sample.shared_us if pays(sample, group, cost) else sample.flat_us for sample in found]
    return sum(time / sample.best_us - 1 for time, sample in zip(spent, found, strict=True)) / len(found)


def fit(found: Sequence[Sample], group: int, default: CostModel = DEFAULT) -> CostModel:
    """The model that loses the least: the default if it does nearly, otherwise one from the middle of those that do."""
    rows, tokens, shared, flat = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    best = np.minimum(shared, flat)
    if_shared, if_flat = shared / best - 1, flat / best - 1
    options = [(_launch(tokens * (rows - 1) - merge * group * rows, if_shared, if_flat), merge) for merge in MERGES]
    losses = [lost(found, group, CostModel(*option)) for option in options]  # as a plan chooses: there each of many rows counts for less
    least = min(losses)
    good = [option for loss, option in zip(losses, options, strict=True) if loss <= least + 1e-12]
    if lost(found, group, default) <= least + NOISE:
        return default
    launch, merge = good[len(good) // 2]
    return CostModel(launch, merge)


def _launch(gain: Numbers, if_shared: Numbers, if_flat: Numbers) -> float:
    """The best launch: a sample is shared if its gain is above it. Between two gains all launches are alike; the widest such gap of the
    best ones is taken, and the middle of it."""
    order = np.argsort(gain)
    gain = gain[order]
    loss = np.concatenate(([0.0], np.cumsum(if_flat[order]))) + np.concatenate((np.cumsum(if_shared[order][::-1])[::-1], [0.0]))
    low = np.maximum(0.0, np.concatenate(([0.0], gain)))
    high = np.concatenate((gain, [2 * low[-1] + 1]))
    width = np.where(high > low, (high + 1) / (low + 1), 0.0)
    good = width > 0
    best = good & (loss <= loss[good].min() + 1e-9)
    chosen = int(np.argmax(np.where(best, width, -1.0)))
    return float(np.sqrt((low[chosen] + 1) * (high[chosen] + 1)) - 1)


def table(found: Sequence[Sample], group: int, cost: CostModel) -> str:
    rows = [
        (
            *(str(sample.rows), str(sample.tokens), number(sample.shared_us), number(sample.flat_us)),
            f"{sample.flat_us / sample.shared_us:.2f}x",
            "shared" if pays(sample, group, cost) else "flat",
            _lost(sample, group, cost),
        )
        for sample in found
    ]
    return columns(("rows", "tokens", "shared us", "flat us", "gain", "chosen", "lost"), rows)


def _lost(sample: Sample, group: int, cost: CostModel) -> str:
    share = lost([sample], group, cost)
    return f"{share:.1%}" if share else ""
