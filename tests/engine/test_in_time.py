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
from pando.engine.row import Row, Schedule
from pando.kv.run import Origin, Run
from pando.model.load import Model
from pando.store.movers import Copy
from pando.store.speeds import Speeds
from pando.store.tier import Lost
from pando.store.transfer import Load
from tests.engine.test_store import ENOUGH, ask, cold, engine_of, settled, whole, words
from tests.tiny import drain, greedy, run, tiny_model, tokens

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


def begun(watched: Watched) -> Row:
    """The row of a request for the prompt, when some of its layers have come."""
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    watched.engine.step()
    [row] = watched.engine.scheduler.loading
    assert row.load is not None
    while row.load.left(LAYERS) == math.inf:
        time.sleep(0.001)
    return row


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


@pytest.mark.parametrize(("a_token", "joins"), [(10.0, True), (0.0001, False)])
def test_whether_it_waits_beside_the_steps_of_others_depends_on_how_long_its_own_tokens_take(
    deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_token: float, joins: bool
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    monkeypatch.setattr(Speeds, "stepped", lambda *_: None)  # steps of this model tell nothing
    watched, now = opened(deep, tmp_path, stop=4), time.monotonic()
    assert watched.engine.store is not None
    watched.engine.store.speeds = Speeds()
    watched.engine.store.speeds.computed(1, a_token)
    watched.engine.store._now = lambda: now  # type: ignore[method-assign]
    row = begun(watched)
    now += 0.9  # seconds that its layers have taken until now: not late
    for _ in range(20):
        watched.engine.step()
    assert bool(watched.early) == joins and (watched.engine.scheduler.loading == [row]) != joins
    watched.go.set()
    drain(watched.engine)
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.usefixtures("once_begun")
def test_what_does_not_come_after_all_is_computed_and_costs_nobody_a_token(deep: Model, tmp_path: Path) -> None:
    watched = opened(deep, tmp_path, stop=4)
    watched.spoilt = True
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    events = drain(watched.engine)
    assert [rows for rows, _ in watched.early] == [2] and not watched.engine.answers
    assert [event.token for event in events["r", 0]] == cold(deep, PROMPT)
    assert events["r", 0][0].reuse.miss is not None and events["r", 0][0].reuse.miss.reason == "lost"
    assert [event.token for event in events["beside", 0]][-190:] == cold(deep, words(11, 5), 200)[-190:]
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("once_begun")
def test_modules_are_waited_for_beside_others_and_what_is_copied_for_their_readers_is(deep: Model, overlap: bool) -> None:
    module = Run(tuple(words(1, 24)), 0, Origin((), 7))
    engine = engine_of(deep, None, host_gib=ENOUGH, kv_cache_tokens=1024, overlap=overlap)
    said = tokens(run(engine, [Request("first", words(3, 9), greedy(6), runs=[module])])["first", 0])
    own = [*words(3, 9), *said[:5], *words(5, 7)]  # of the first of them the tree has the beginning of a page
    asked = Request("r", own, greedy(6), runs=[module])
    wanted = tokens(run(engine_of(deep, None, kv_cache_tokens=1024), [asked])["r", 0])
    settled(engine)
    engine.pages.give(engine.tree.evict(6))  # the module, which was used least recently
    engine.add(Request("beside", words(11, 5), greedy(6)))
    watched = Watched(engine, 4)
    for _ in range(5):
        engine.step()
    engine.add(asked)
    engine.step()
    time.sleep(0.1)  # the module is on its way, and the last step of the other under way
    heard = [event.token for event in engine.step() if event.request_id == "r"]
    watched.go.set()
    assert [*heard, *tokens(drain(engine)["r", 0])] == wanted
    assert 2 not in [rows for rows, _ in watched.early]
    whole(engine)


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.usefixtures("once_begun")
def test_no_step_is_made_ahead_that_reads_what_is_on_its_way(deep: Model, tmp_path: Path, spoilt: bool) -> None:
    """One that has joined others and got none of a step's tokens is in the next."""
    first = engine_of(deep, tmp_path)
    for prompt in (PROMPT, words(13, 60)):
        ask(first, prompt)
    first.close()
    engine = engine_of(deep, tmp_path, kv_cache_tokens=1024, overlap=True, max_num_batched_tokens=8, max_num_seqs=4)
    assert engine.store is not None
    engine.add(Request("beside", words(11, 5), greedy(60)))
    for _ in range(3):
        engine.step()
    watched, hold, begun, made = Watched(engine, 4), threading.Event(), list[int](), list[Schedule]()
    watched.spoilt = spoilt
    ahead = engine.scheduler.ahead

    def second_stops(layer: int, copies: Sequence[Copy]) -> None:
        if not layer:
            begun.append(layer)
            assert hold.wait(20)
        (watched.put if len(begun) > 1 else watched._put)(layer, copies)

    def noted(before: Schedule) -> Schedule | None:
        schedule = ahead(before)
        made.extend([] if schedule is None else [schedule])
        return schedule

    engine.store.transfer.mover.put = second_stops  # type: ignore[method-assign]
    engine.scheduler.ahead = noted  # type: ignore[method-assign]
    asked = {"one": [*PROMPT, *words(31, 24)], "two": [*words(13, 60), *words(32, 10)]}
    heard: dict[str, list[int]] = {}

    def step() -> None:
        for event in engine.step():
            heard.setdefault(event.request_id, []).append(event.token)

    for name, prompt in asked.items():
        engine.add(Request(name, prompt, greedy(6)))
        step()
    hold.set()
    while engine.has_work:
        step()
        time.sleep(0.01)
    assert watched.early and not any(schedule.loads for schedule in made)
    assert {name: heard[name] for name in asked} == {name: cold(deep, prompt) for name, prompt in asked.items()}
    whole(engine)
    engine.close()


def test_a_load_that_stalls_when_others_wait_for_it_is_given_up(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    monkeypatch.setattr(Speeds, "grace", lambda self, left: 0.05)
    watched = opened(deep, tmp_path, stop=4)
    monkeypatch.setattr(Speeds, "in_time", lambda self, left, tokens: left < math.inf)
    monkeypatch.setattr(watched.go, "set", lambda: None)
    watched.engine.add(Request("r", PROMPT, greedy(6)))
    events = drain(watched.engine, 300)
    assert [rows for rows, _ in watched.early] == [2]
    assert tokens(events["r", 0]) == cold(deep, PROMPT)
    assert events["r", 0][0].reuse.miss is not None and events["r", 0][0].reuse.miss.reason == "lost"
    assert watched.engine.store is not None and watched.engine.store.facts().lost["late"] == 1
    monkeypatch.undo()
    watched.go.set()
    whole(watched.engine)
    watched.engine.close()


@pytest.mark.usefixtures("once_begun")
def test_a_repair_does_not_wait_for_what_comes_for_another(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [Run(tuple(words(seed, 24)), 24 * place, Origin((), 7)) for place, seed in enumerate((1, 2))]
    asked = Request("repaired", words(3, 9), greedy(6), runs=modules, repair=0.25)
    wanted = tokens(run(engine_of(deep, None, kv_cache_tokens=1024), [asked])["repaired", 0])
    watched = opened(deep, tmp_path, stop=4)
    engine, repairs = watched.engine, list[int]()
    engine.encode(modules, asked.tenant)
    while engine.unmade(modules, asked.tenant):
        engine.step()
    repair, forward = engine.repairer.repair, watched.forward

    def noted(*given: object) -> None:
        repair(*given)  # type: ignore[arg-type]
        watched.go.set()

    def stepped(schedule: Schedule) -> Tensor:
        repairs.extend(sum(not load.done for load in schedule.loads) for _ in schedule.repairs)
        return watched._forward(schedule) if schedule.repairs else forward(schedule)

    monkeypatch.setattr(engine.repairer, "repair", noted)
    monkeypatch.setattr(engine, "_forward", stepped)
    begun(watched)
    engine.add(asked)
    events = drain(engine)
    assert repairs == [1], "the rest was let come when it was done"
    assert tokens(events["repaired", 0]) == wanted and tokens(events["r", 0]) == cold(deep, PROMPT)
    whole(engine)
    engine.close()


def test_nobody_can_tell_when_a_load_ends_that_failed(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    watched = opened(deep, tmp_path, stop=4)
    load = begun(watched).load
    assert isinstance(load, Load)
    load.cut(0, Lost("corrupt"))
    assert load.left(LAYERS) == math.inf
    watched.go.set()
    drain(watched.engine)
    watched.engine.close()
