"""A request whose context is on its way runs beside others when the rest of it comes in time, and holds up nobody."""

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from pando.engine.engine import Engine
from pando.engine.request import Request
from pando.engine.row import Schedule
from pando.kv.run import Origin, Run
from pando.model.load import Model
from pando.store.movers import Copy
from pando.store.speeds import Speeds
from pando.store.tier import Lost
from tests.engine.test_store import ENOUGH, ask, cold, engine_of, settled, whole, words
from tests.tiny import drain, greedy, run, tiny_model

LAYERS = 6
PROMPT = words(12, 60)


@pytest.fixture(scope="module")
def deep() -> Model:
    return tiny_model(layers=LAYERS)


class Watched:
    """An engine whose loads stop before a layer, until a step reads what they bring or somebody says so; and what its steps waited for."""

    def __init__(self, engine: Engine, stop: int) -> None:
        assert engine.store is not None
        self.engine, self.go = engine, threading.Event()
        self.early: list[tuple[int, int]] = []  # rows of steps that began before a load was done, and how many of its layers had come
        self._stop, self._put, self._forward = stop, engine.store.transfer.mover.put, engine._forward
        self.spoilt = False
        engine.store.transfer.mover.put = self.put  # type: ignore[method-assign]
        engine._forward = self.forward  # type: ignore[method-assign]

    def put(self, layer: int, copies: Sequence[Copy]) -> None:
        if layer == self._stop:
            assert self.go.wait(20)
            if self.spoilt:
                raise MemoryError
        self._put(layer, copies)

    def forward(self, schedule: Schedule) -> Tensor:
        for load in schedule.loads:
            if not load.done:
                self.early.append((len(schedule.rows), len(load._layers)))  # type: ignore[attr-defined]
                self.go.set()
        return self._forward(schedule)


def opened(model: Model, folder: Path, stop: int, *, overlap: bool = False) -> Watched:
    """Its prompt is on disk, and nowhere else; another request is being answered."""
    first = engine_of(model, folder)
    ask(first, PROMPT)
    first.close()
    engine = engine_of(model, folder, kv_cache_tokens=1024, overlap=overlap)
    engine.add(Request("beside", words(11, 5), greedy(200)))
    for _ in range(3):
        engine.step()
    return Watched(engine, stop)


@pytest.fixture
def once_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has begun to come comes in time."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    monkeypatch.setattr(Speeds, "in_time", lambda self, left, tokens: left < math.inf)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("once_begun")
def test_it_joins_the_steps_of_others_before_its_last_layers_are_there(deep: Model, tmp_path: Path, overlap: bool) -> None:
    watched = opened(deep, tmp_path, stop=4, overlap=overlap)
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    events = drain(watched.engine)
    [(rows, layers)] = watched.early
    assert rows == 2 and 1 <= layers <= 4, "one step, of both rows, before the last layers came"
    assert [event.token for event in events["r", 0]] == cold(deep, PROMPT)
    assert events["r", 0][0].reuse.tiers == {"disk": 59}
    assert [event.token for event in events["beside", 0]][-190:] == cold(deep, words(11, 5), 200)[-190:]
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("once_begun")
def test_it_waits_beside_the_steps_of_others_while_nothing_has_come(deep: Model, tmp_path: Path, overlap: bool) -> None:
    watched = opened(deep, tmp_path, stop=0, overlap=overlap)
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    for _ in range(20):
        assert {event.request_id for event in watched.engine.step()} <= {"beside"}
    assert not watched.early and len(watched.engine.scheduler.loading) == 1
    watched.go.set()
    events = drain(watched.engine)
    assert [event.token for event in events["r", 0]] == cold(deep, PROMPT)
    whole(watched.engine)
    watched.engine.close()


def test_it_waits_beside_the_steps_of_others_for_what_would_not_come_in_time(
    deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    watched, now = opened(deep, tmp_path, stop=4), time.monotonic()
    assert watched.engine.store is not None
    watched.engine.store._now = lambda: now  # type: ignore[method-assign]
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    watched.engine.step()
    [row] = watched.engine.scheduler.loading
    assert row.load is not None and row.load.begins_within(20)  # type: ignore[attr-defined]
    while row.load.left(LAYERS) == math.inf:
        time.sleep(0.001)
    now += 0.9  # seconds that its layers have taken until now: not late, and far longer than a step
    for _ in range(20):
        watched.engine.step()
    assert not watched.early and watched.engine.scheduler.loading == [row]
    watched.go.set()
    drain(watched.engine)
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.usefixtures("once_begun")
def test_what_does_not_come_after_all_is_computed_and_costs_nobody_a_token(deep: Model, tmp_path: Path) -> None:
    watched = opened(deep, tmp_path, stop=4)
    watched.spoilt = True
    told = watched.engine.answers
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    events = drain(watched.engine)
    assert [rows for rows, _ in watched.early] == [2] and not told
    assert [event.token for event in events["r", 0]] == cold(deep, PROMPT)
    assert events["r", 0][0].reuse.miss is not None and events["r", 0][0].reuse.miss.reason == "lost"
    assert [event.token for event in events["beside", 0]][-190:] == cold(deep, words(11, 5), 200)[-190:]
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.usefixtures("once_begun")
def test_modules_are_read_while_their_last_layers_come(deep: Model) -> None:
    engine = engine_of(deep, None, host_gib=ENOUGH, kv_cache_tokens=1024)
    modules = [Run(tuple(words(seed, 24)), 24 * place, Origin((), 0)) for place, seed in enumerate((1, 2))]
    asked = [Request("r", words(seed, 9), greedy(6), runs=modules) for seed in (3, 4)]
    wanted = [event.token for event in run(engine_of(deep, None, kv_cache_tokens=1024), asked[1:])["r", 0]]
    run(engine, asked[:1])
    settled(engine)
    engine.clear_cache()
    engine.add(Request("beside", words(11, 5), greedy(200)))
    for _ in range(3):
        engine.step()
    watched = Watched(engine, 4)
    engine.add(asked[1])
    events = drain(engine)
    assert {rows for rows, _ in watched.early} == {2}
    assert [event.token for event in events["r", 0]] == wanted
    whole(engine)


def test_nobody_can_tell_when_a_load_ends_that_failed(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    watched = opened(deep, tmp_path, stop=4)
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    watched.engine.step()
    [row] = watched.engine.scheduler.loading
    assert row.load is not None and row.load.begins_within(20)  # type: ignore[attr-defined]
    while row.load.left(LAYERS) == math.inf:
        time.sleep(0.001)
    row.load.cut(0, Lost("corrupt"))  # type: ignore[attr-defined]
    assert row.load.left(LAYERS) == math.inf
    watched.go.set()
    drain(watched.engine)
    watched.engine.close()
