"""Hydragen's grid: many rows behind one prefix, decoding only, with its prefix read once, read by every row, and without attention."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any

import torch

from ...config import Attention, EngineConfig
from ...engine.engine import Engine
from ...errors import InvalidOption
from ..measure import Result, at_least, at_most
from ..options import chosen, decimal, whole, whole_numbers
from ..picture import Axes
from ..trial import ask, drawn
from .decode import WARM, Pace, Watch, Window, decode, watched
from .report import number, percent, times
from .setting import FLAT, NONE, SHARED, Setting, engine_config, unattended

TABLE = "hydragen"
MODES: dict[str, Attention] = {SHARED: "shared", FLAT: "flat", NONE: "shared"}
WORDS = {"shared": SHARED, "flat": FLAT, "none": NONE}
OVER_FLOORS = 1.4  # times
BATCH, SHORT, LONG = 1024, 1024, 16384  # what throughput may lose is said of these
LOST, LOST_FLAT = 40.0, 85.0  # percent
SPARE = 16  # pages
HEADS = (
    *("batch", "prefix", "new", "steps", "shared ms", "flat ms", "none ms", "products", "briefly", "attention", "x floors", "x brief"),
    *("idle %", "shared tok/s", "flat tok/s", "none tok/s", "x flat", "% of none"),
)


@dataclass(frozen=True)
class Cell:
    batch: int
    prefix: int
    new: int
    paces: dict[str, Pace]  # by mode; one that did not fit is missing
    products_ms: float
    attention_ms: float  # the floor of it, in the middle of the steps that count
    brief_ms: float | None = None  # the products, if they last for a moment only

    def ms(self, mode: str) -> float | None:
        return self.paces[mode].mean_ms if mode in self.paces else None

    def rate(self, mode: str) -> float | None:
        return self.paces[mode].tokens_per_second if mode in self.paces else None

    def over(self, mode: str) -> float | None:
        """How many times faster it is shared."""
        ours, theirs = self.ms(SHARED), self.ms(mode)
        return None if ours is None or theirs is None else theirs / ours

    @property
    def over_floors(self) -> float | None:
        ours = self.ms(SHARED)
        return None if ours is None else ours / (self.products_ms + self.attention_ms)

    @property
    def over_brief(self) -> float | None:
        ours = self.ms(SHARED)
        return None if ours is None or self.brief_ms is None else ours / (self.brief_ms + self.attention_ms)

    def cells(self) -> Sequence[str]:
        steps = self.paces[SHARED].ms if SHARED in self.paces else ()
        return (
            str(self.batch), str(self.prefix), str(self.new), str(len(steps)), *(number(self.ms(mode)) for mode in MODES),
            *map(number, (self.products_ms, self.brief_ms, self.attention_ms)), times(self.over_floors), times(self.over_brief),
            percent(self.paces[SHARED].idle if SHARED in self.paces else None),
            *(number(self.rate(mode)) for mode in MODES), times(self.over(FLAT)), percent(self.over(NONE)),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        facts = {"batch": self.batch, "prefix": self.prefix, "new": self.new}
        floors = {"products_ms": self.products_ms, "attention_ms": self.attention_ms, "over_floors": self.over_floors}
        floors |= {"brief_products_ms": self.brief_ms, "over_brief_floors": self.over_brief}
        return {**facts, **floors, "paces": {mode: pace.as_json() for mode, pace in self.paces.items()}}


def add_options(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--batches", type=whole_numbers, default=[32, 128, 512, 1024], metavar="N,N,...", help="rows (32,128,512,1024)")
    prefixes = "tokens that they share (1024,2048,4096,8192,16384)"
    to.add_argument("--prefixes", type=whole_numbers, default=[1024, 2048, 4096, 8192, 16384], metavar="N,N,...", help=prefixes)
    to.add_argument("--new", type=whole_numbers, default=[128], metavar="N,N,...", help="tokens of each answer (128)")
    to.add_argument("--steps", type=whole(1), default=1024, metavar="N", help="steps that are counted, at most (1024)")
    to.add_argument("--seconds", type=decimal(), default=2.0, metavar="S", help="after which no further step of a cell is begun (2)")
    to.add_argument("--modes", type=chosen(WORDS), default=list(MODES), metavar="M,M", help="of shared, flat and none (all)")


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    vocab = setting.model.config.vocab_size
    if max(arguments.batches) > vocab:
        raise InvalidOption(f"--batches {max(arguments.batches)}: every row begins with a token of its own, and there are {vocab}")
    about = "rows decode behind one prefix; ms of a step; products and attention are floors, x floors is shared over their sum"
    setting.report.begin(TABLE, about, HEADS)
    found: list[Cell] = []
    for batch in arguments.batches:
        found += _batch(setting, batch, arguments)
    if found:
        setting.report.promise(promises(found))


def _batch(setting: Setting, batch: int, arguments: argparse.Namespace) -> list[Cell]:
    """Without attention it makes no difference how long the prefix is: that is measured once."""
    windows = [Window(new, arguments.steps, arguments.seconds) for new in arguments.new]
    ceilings = {window: _paces(setting, [NONE], batch, min(arguments.prefixes), window) for window in windows if NONE in arguments.modes}
    with torch.inference_mode():
        brief = setting.products_ms(batch)
        lasting = {window: setting.lasting_products_ms(batch, window.counted, window.seconds) for window in windows}
    cells = []
    for prefix, window in product(arguments.prefixes, windows):
        paces = _paces(setting, [mode for mode in arguments.modes if mode != NONE], batch, prefix, window) | ceilings.get(window, {})
        if paces:
            own = 1 + WARM + len(next(iter(paces.values())).ms) // 2
            cells.append(Cell(batch, prefix, window.new, paces, lasting[window], setting.attention_ms(batch, prefix, own), brief))
            setting.report.add(cells[-1])
    return cells


def _paces(setting: Setting, modes: Sequence[str], batch: int, prefix: int, window: Window) -> dict[str, Pace]:
    """Of the modes that fit into memory."""
    found = {}
    for mode in modes:
        model, watch = watched(unattended(setting.model) if mode == NONE else setting.model)
        config = engine_config(MODES[mode], batch, tokens=room(batch, prefix, window))
        work = partial(behind, batch=batch, prefix=prefix, window=window, seed=setting.seed, watch=watch)
        with watch.watching():
            pace = setting.attempt(f"{batch} rows behind {prefix}, {mode}", config, work, model=model)
        if pace is not None:
            found[mode] = pace
    return found


def room(batch: int, prefix: int, window: Window) -> int:
    """Tokens of a pool that just holds them: a page more for each row is half of the device's memory."""
    size = EngineConfig.page_size
    return (-(-prefix // size) + batch * max(2, -(-window.asked // size)) + SPARE) * size


def behind(engine: Engine, batch: int, prefix: int, window: Window, seed: int, watch: Watch) -> Pace:
    """The prefix is computed once; what every row has of its own is one token, so that all of them decode from their first step on."""
    shared = drawn(engine.model, f"{seed} prefix", prefix)
    ask(engine, [shared])
    own = Random(f"{seed} own").sample(range(engine.model.config.vocab_size), batch)
    return decode(engine, [(*shared, token) for token in own], window, watch)  # a thousand lists would be looked through for garbage


def promises(cells: Sequence[Cell]) -> list[Result]:
    results = []
    over = {cell.over_floors: cell for cell in cells if cell.over_floors is not None}
    if over:
        worst = over[max(over)]
        brief = f", {worst.over_brief:.2f}x with brief products" if worst.over_brief is not None else ""
        note = f"at batch {worst.batch}, prefix {worst.prefix}{brief}; best {min(over):.2f}x"
        case = f"a decode step against the sum of its floors, worst of {len(over)}"
        results.append(at_most(case, max(over), "times", OVER_FLOORS, note))
    for mode in (SHARED, FLAT):
        rates = {cell.prefix: rate for cell in cells if cell.batch == BATCH and (rate := cell.rate(mode)) is not None}
        if SHORT in rates and LONG in rates:
            lost, case = 100 * (1 - rates[LONG] / rates[SHORT]), f"throughput lost from {SHORT} to {LONG} at batch {BATCH}, {mode}"
            results.append(at_most(case, lost, "%", LOST) if mode == SHARED else at_least(case, lost, "%", LOST_FLAT))
    return results


def draw(axis: Axes, cells: Sequence[Cell]) -> None:
    """Throughput over the length of the prefix, for the largest batch."""
    batch = max(cell.batch for cell in cells)
    for mode in MODES:
        points = [(cell.prefix, rate) for cell in cells if cell.batch == batch and (rate := cell.rate(mode)) is not None]
        axis.plot([prefix for prefix, _ in points], [rate for _, rate in points], marker="o", label=f"{mode}, {batch} rows")
    axis.set(xlabel="tokens of the shared prefix", ylabel="tokens/s", xscale="log", ylim=(0, None))
