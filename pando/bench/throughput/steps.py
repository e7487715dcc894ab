"""Steps without anything to share: against reading the weights once, and how long the device waits for the host."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.engine import Engine
from ..measure import Result, at_most
from ..picture import Axes
from ..trial import drawn
from .decode import WARM, Pace, Window, decode, watched
from .grid import room
from .report import number, percent, times
from .setting import Setting, engine_config

TABLE = "steps"
BATCHES = (1, 32)
CONTEXT = 64  # tokens of each row before it decodes
OVER_READ = 1.15  # times, of one row
IDLE = 3.0  # percent
HEADS = ("batch", "steps", "ms", "median", "read ms", "x read", "products", "attention", "x floors", "idle %", "tok/s")


@dataclass(frozen=True)
class Alone:
    batch: int
    pace: Pace
    read_ms: float
    products_ms: float
    attention_ms: float

    @property
    def over_read(self) -> float:
        return self.pace.mean_ms / self.read_ms

    @property
    def over_floors(self) -> float:
        return self.pace.mean_ms / (self.products_ms + self.attention_ms)

    def cells(self) -> Sequence[str]:
        floors = (number(self.products_ms), number(self.attention_ms), times(self.over_floors))
        ms = (number(self.pace.mean_ms), number(statistics.median(self.pace.ms)), number(self.read_ms), times(self.over_read))
        return (str(self.batch), str(len(self.pace.ms)), *ms, *floors, percent(self.pace.idle), number(self.pace.tokens_per_second))

    def as_json(self) -> dict[str, Any]:
        floors = {"read_ms": self.read_ms, "products_ms": self.products_ms, "attention_ms": self.attention_ms}
        return {"batch": self.batch, **self.pace.as_json(), **floors, "over_read": self.over_read, "over_floors": self.over_floors}


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    read = f"{setting.weight_bytes / 1e9:.2f} GB of weights"
    about = f"rows that share nothing, {CONTEXT} tokens each; read: {read}, moved once; idle: outside captured steps"
    setting.report.begin(TABLE, about, HEADS)
    with torch.inference_mode():
        read_ms = setting.read_ms()
    found = []
    for batch in BATCHES:
        one = _alone(setting, batch, Window(max(arguments.new), arguments.steps, arguments.seconds), read_ms)
        if one is not None:
            found.append(one)
            setting.report.add(one)
    if found:
        setting.report.promise(promises(found))


def _alone(setting: Setting, batch: int, window: Window, read_ms: float) -> Alone | None:
    """None: it does not fit."""
    model, watch = watched(setting.model)
    prompts = [drawn(model, f"{setting.seed} alone {row}", CONTEXT) for row in range(batch)]

    def work(engine: Engine) -> Pace:
        return decode(engine, prompts, window, watch)

    with watch.watching():
        pace = setting.attempt(f"{batch} rows", engine_config("auto", batch, tokens=room(2 * batch, 0, window)), work, model=model)
    if pace is None:
        return None
    own = CONTEXT + WARM + len(pace.ms) // 2
    with torch.inference_mode():
        products = setting.lasting_products_ms(batch, window.counted, window.seconds)
        return Alone(batch, pace, read_ms, products, setting.attention_ms(batch, 0, own))


def promises(found: Sequence[Alone]) -> list[Result]:
    read = [at_most("one row's step against reading the weights", one.over_read, "times", OVER_READ) for one in found if one.batch == 1]
    idle = [(one.batch, 100 * one.pace.idle) for one in found if one.pace.idle is not None]
    return [*read, *(at_most(f"idle between steps, batch {batch}", share, "%", IDLE) for batch, share in idle)]


def draw(axis: Axes, found: Sequence[Alone]) -> None:
    places = range(len(found))
    axis.bar([place - 0.2 for place in places], [one.pace.mean_ms for one in found], 0.4, label="a step")
    axis.bar([place + 0.2 for place in places], [one.read_ms for one in found], 0.4, label="reading the weights")
    axis.set_xticks(list(places), [f"{one.batch} rows" for one in found])
    axis.set(ylabel="ms")
