"""Modules and cut conversations that come up from below the pool: a row reads them on their way, layer by layer."""

import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pando.engine import below, holding, imports, makers, scheduler, turns
from pando.engine import engine as engine_
from pando.engine.batch import Batch, Unread
from pando.engine.engine import Engine
from pando.engine.request import Request, Tenant, TokenEvent, Truncation
from pando.engine.row import Schedule
from pando.kv.run import Origin, Run
from pando.model.load import Model
from pando.store import store, transfer
from pando.store.movers import Copy
from pando.store.speeds import Speeds
from pando.store.tier import Card, Lost, Reader

from ..tiny import CPU_ALONE, Interrupt, drain, greedy, run, tiny_engine, tiny_model, tokens
from .test_store import ENOUGH, LITTLE, Faulty, FaultyReader, engine_of, evict, settled, whole, words

LAYERS = 4
OPENING = Run(tuple(words(1, 10)), 0, Origin((), 0))
LENGTHS = (13, 8, 21, 5)  # tokens: some end with a page


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(layers=LAYERS)


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of this size is sooner computed."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)


def modules(*chosen: int) -> list[Run]:
    """Each encoded behind the opening alone, and placed behind one another."""
    runs, at = [OPENING], OPENING.end
    for each in chosen:
        runs.append(Run(tuple(words(10 + each, LENGTHS[each])), at, Origin((OPENING,), OPENING.end)))
        at = runs[-1].end
    return runs


def prompt(name: str, runs: Sequence[Run], own: int = 9, count: int = 6, answers: int = 1) -> Request:
    return Request(name, words(sum(map(len, runs)), own), greedy(count, n=answers), runs=runs)


def made_from_nothing(model: Model, request: Request) -> list[int]:
    return tokens(run(tiny_engine(model), [request])[request.request_id, 0])


def kept(model: Model, tier: str, folder: Path, requests: Sequence[Request], **options: object) -> Engine:
    """An engine that has what these requests read in a tier, and nowhere else."""
    options = {"kv_cache_tokens": 640, **options}
    first = engine_of(model, folder if tier == "disk" else None, host_gib=ENOUGH if tier == "host" else 0, **options)
    for request in requests:
        run(first, [request])
    evict(first)
    if tier == "host":
        return first
    first.close()
    return engine_of(model, folder, **options)


class Gate:
    """Layers from a given one on stay away until it is opened; and what was copied together."""

    def __init__(self, engine: Engine, first: int) -> None:
        assert engine.store is not None
        self._engine, self._first, self._free = engine, first, threading.Event()
        self._mover = engine.store.transfer.mover
        self._put, self._mover.put = self._mover.put, self.put  # type: ignore[method-assign]
        self.copied: list[int] = []  # pages, layer by layer

    def put(self, layer: int, copies: Sequence[Copy]) -> None:
        if layer >= self._first:
            assert self._free.wait(20), "nobody began before it was there"
        self.copied.append(len(copies))
        self._put(layer, copies)

    def open(self) -> None:
        self._free.set()

    def open_behind(self, layer: int) -> None:
        """When a step has come so far."""
        get = self._engine.pool.layer

        def watched(index: int) -> tuple[Tensor, Tensor]:
            found = get(index)
            if index == layer:
                self.open()
            return found

        self._engine.pool.layer = watched  # type: ignore[method-assign]


def test_a_module_that_comes_up_is_looked_for_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt("r", modules(0, 1, 2, 3))
    engine = kept(model, "host", tmp_path, [asked])
    assert engine.store is not None
    looked, look = list[tuple[int, ...]](), engine.store.look
    monkeypatch.setattr(engine.store, "look", lambda sought, **how: (looked.append(tuple(sought.tokens)), look(sought, **how))[1])
    engine.add(asked)
    first = engine.step()
    assert first[0].reuse.tiers["host"] >= OPENING.end + sum(LENGTHS), "all of them came up"
    assert sorted(looked) == sorted([*(run.tokens for run in asked.runs), tuple(asked.prompt)]), "and the prompt's own words"
    drain(engine)
    whole(engine)


@CPU_ALONE
@pytest.mark.parametrize("slow", [False, True])
def test_a_device_is_asked_for_its_first_copies_before_a_plan_is_made_if_they_come_soon(
    model: Model, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt("r", modules(0, 1))
    engine = kept(model, "host", tmp_path, [asked])
    assert engine.store is not None
    gate, prepare, copied = Gate(engine, 0 if slow else 1), engine.batcher.prepare, list[int]()

    def prepared(schedule: Schedule, unread: Unread | None) -> Batch:
        copied.append(len(gate.copied))
        gate.open()
        return prepare(schedule, unread)

    monkeypatch.setattr(engine.store.transfer.mover, "mark", lambda: object())  # as of a device
    monkeypatch.setattr(engine.batcher, "prepare", prepared)
    monkeypatch.setattr(store, "FULL_START", 0.01 if slow else 10)
    engine.add(asked)
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    assert copied[0] == (0 if slow else 1), "one layer, if it came in time"
    whole(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_first_step_computes_while_the_layers_of_all_modules_come_together(
    model: Model, tier: str, overlap: bool, tmp_path: Path
) -> None:
    asked = prompt("r", modules(0, 1, 2, 3))
    engine = kept(model, tier, tmp_path, [asked], overlap=overlap)
    gate = Gate(engine, 1)
    gate.open_behind(0)
    engine.add(asked)
    first = engine.step()
    assert len(first) == 1, "no step before the one that computes"
    assert len(gate.copied) == LAYERS and len({*gate.copied}) == 1 and gate.copied[0] > 4, "all pages of a layer, then the next layer"
    assert [first[0].token, *tokens(drain(engine)["r", 0])] == made_from_nothing(model, asked)
    reuse = first[0].reuse
    assert reuse.tiers == {tier: first[0].num_cached_tokens} and reuse.miss is None
    assert first[0].num_cached_tokens == 57 + 8, "the modules, and the words behind them"
    whole(engine)
    engine.close()


def test_more_modules_come_together_than_rows_may_run(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2, 3))
    engine = kept(model, "disk", tmp_path, [asked], max_num_seqs=1)
    gate = Gate(engine, 1)
    gate.open_behind(0)
    engine.add(asked)
    assert len(engine.step()) == 1
    drain(engine)
    whole(engine)
    engine.close()


@pytest.mark.parametrize("length", [8, 9, 12])
def test_a_module_at_the_end_is_read_on_its_way_but_for_its_last_token(model: Model, length: int, tmp_path: Path) -> None:
    last = Run(tuple(words(5, length)), 30, Origin((), 3))
    asked = Request("r", [], greedy(6), runs=[*modules(1), last])
    engine = kept(model, "disk", tmp_path, [asked])
    gate = Gate(engine, 1)
    gate.open_behind(0)
    events = run(engine, [asked])["r", 0]
    assert tokens(events) == made_from_nothing(model, asked)
    assert events[0].num_cached_tokens == 10 + 8 + length - 1
    whole(engine)
    engine.close()


def test_rows_that_read_the_same_module_wait_for_one_load_of_it(model: Model, tmp_path: Path) -> None:
    runs = modules(0, 2)
    asked = [Request(str(seed), words(seed, 9), greedy(6, n=2), runs=runs) for seed in range(3)]
    engine = kept(model, "disk", tmp_path, asked, attention="shared")
    gate = Gate(engine, 1)
    gate.open_behind(0)
    for request in asked:
        engine.add(request)
    first = engine.step()
    assert len(first) >= 3 and engine.facts.shared_reads == 3, "they begin together, and share what comes"
    events = drain(engine)
    for request in asked:
        answer = [event.token for event in first if event.request_id == request.request_id and not event.index]
        assert answer + tokens(events[request.request_id, 0]) == made_from_nothing(model, request)
    assert engine.store is not None and engine.store.facts().loaded == {"disk": 10 + 13 + 21 + 3 * 8}, "each page once"
    whole(engine)
    engine.close()


def test_modules_on_their_way_hold_up_nobody_who_answers(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked], kv_cache_tokens=960)
    gate, told = Gate(engine, 0), list[str]()
    engine.add(Request("talks", words(2, 5), greedy(30)))
    engine.step()
    engine.add(asked)
    while len(told) < 10:
        told += [event.request_id for event in engine.step()]
    assert {*told} == {"talks"}
    gate.open()
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


def test_a_row_keeps_its_place_while_its_modules_come(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked], kv_cache_tokens=960, max_num_seqs=2)
    gate, told = Gate(engine, 0), list[str]()
    engine.add(Request("talks", words(2, 5), greedy(40)))
    engine.step()
    engine.add(asked)
    engine.add(Request("later", words(3, 5), greedy(20)))
    while len(told) < 8:
        told += [event.request_id for event in engine.step()]
    assert {*told} == {"talks"}, "two have a place"
    gate.open()
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("comes_first", [False, True])
def test_who_came_with_a_row_whose_context_is_below_does_not_wait_for_it(
    model: Model, tmp_path: Path, is_plain: bool, comes_first: bool
) -> None:
    asked = Request("r", words(7, 60), greedy(6)) if is_plain else prompt("r", modules(0, 1, 2))
    other = Request("other", words(2, 5), greedy(6))
    engine = kept(model, "disk", tmp_path, [asked])
    gate, told = Gate(engine, 0), list[TokenEvent]()
    for request in (other, asked) if comes_first else (asked, other):
        engine.add(request)
    while len(told) < 6:
        told += engine.step()
    assert {event.request_id for event in told} == {"other"}
    gate.open()
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


class Bad(Faulty):
    """One page of those that are read has a layer that cannot be, or does not come."""

    def __init__(self, inner: "Faulty", page: int, layer: int, free: threading.Event | None) -> None:
        super().__init__(inner, random.Random(0), 0.0)
        self.left, self.layer, self.free = page, layer, free

    def open(self, key: bytes) -> Reader:
        self.left -= 1
        return BadReader(self, self.inner.open(key)) if self.left == -1 else self.inner.open(key)


class BadReader(FaultyReader):
    def layer(self, index: int, into: memoryview) -> None:
        bad = self._tier
        assert isinstance(bad, Bad)
        if index == bad.layer and bad.free is None:
            bad.inner.drop([self.card.key])
            raise Lost("corrupt", "a flipped bit")
        if index == bad.layer and bad.free is not None:
            bad.free.wait(20)
        self._inner.layer(index, into)


def break_page(engine: Engine, page: int, layer: int, free: threading.Event | None = None) -> None:
    store = engine.store
    assert store is not None
    bad = Bad(store.below[0], page, layer, free)
    store.below, store.transfer.tiers["disk"] = (bad,), bad


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("page", [0, 8, 16])  # of the opening, of modules, of the words behind them
def test_a_layer_that_is_damaged_in_the_middle_of_the_step_is_computed(model: Model, tmp_path: Path, page: int, layer: int) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked])
    break_page(engine, page, layer)
    events = run(engine, [asked])["r", 0]
    assert tokens(events) == made_from_nothing(model, asked)
    assert engine.store is not None and engine.store.facts().lost["corrupt"] == 1
    assert sum(events[0].reuse.tiers.values()) <= events[0].num_cached_tokens < 52 + 8
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
    again = run(engine, [asked])["r", 0]
    assert tokens(again) == tokens(events) and again[0].num_cached_tokens == 52 + 8
    whole(engine)
    engine.close()


@pytest.mark.parametrize("page", [0, 4, 16])
def test_a_layer_that_does_not_come_is_given_up_and_its_pages_come_back(
    model: Model, tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LATE", 0.1)
    asked, free = prompt("r", modules(0, 1, 2)), threading.Event()
    engine = kept(model, "disk", tmp_path, [asked])
    break_page(engine, page, 1, free)
    events = run(engine, [asked])["r", 0]
    assert tokens(events) == made_from_nothing(model, asked)
    free.set()
    whole(engine)
    engine.close()


def test_a_row_that_is_cancelled_in_the_step_that_reads_what_comes_leaves_nothing(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked])
    gate, get = Gate(engine, 1), engine.pool.layer

    def cancelling(index: int) -> tuple[Tensor, Tensor]:
        engine.cancel("r")
        gate.open()
        return get(index)

    engine.pool.layer = cancelling  # type: ignore[method-assign]
    engine.add(asked)
    engine.step()
    assert not engine.has_work
    whole(engine)
    engine.close()


def test_who_borrowed_has_its_token_before_the_tree_has_what_it_borrowed(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked])
    engine.add(asked)
    events = engine.step()
    own = engine.tree.pages
    assert len(events) == 1 and events[0].reuse.tiers == {"disk": events[0].num_cached_tokens}
    assert len(engine.scheduler.loading) == 4
    events += engine.step()
    assert len(events) == 2 and engine.tree.pages > own and not engine.scheduler.loading
    assert tokens([*events, *drain(engine)["r", 0]]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


def test_what_was_borrowed_is_found_between_two_steps(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 2))
    engine = kept(model, "host", tmp_path, [asked])
    engine.add(asked)
    assert len(engine.step()) == 1 and engine.scheduler.loading
    assert engine.holds(modules(0)[1], Tenant(b""))
    assert not engine.scheduler.loading
    drain(engine)
    whole(engine)
    engine.close()


def test_a_module_that_is_no_number_is_forgotten_although_another_row_runs(model: Model) -> None:
    def behind_its_own(name: str, seed: int) -> Request:
        """A prompt behind a module that is behind an opening of its own."""
        opening = Run(tuple(words(seed, 8)), 0, Origin((), 0))
        return Request(name, words(seed, 9), greedy(6), runs=[Run(tuple(words(seed + 1, 13)), 3, Origin((opening,), 8))])

    bad, good = behind_its_own("bad", 50), behind_its_own("good", 60)
    engine = engine_of(model, None, host_gib=ENOUGH, kv_cache_tokens=960)
    for request in (bad, good):
        run(engine, [request])
    evict(engine)
    assert engine.store is not None
    for key in engine.admission.rows(bad)[0].wants[0].keys:
        engine.store.host.open(key).payload.view(torch.float32).fill_(torch.nan)
    engine.add(bad)
    engine.add(good)
    assert {event.request_id: event.finish_reason for event in engine.step()} == {"bad": "error", "good": None}
    drain(engine)
    for request in (bad, good):
        assert tokens(run(engine, [request])[request.request_id, 0]) == made_from_nothing(model, request)
    engine.close()


def test_a_step_that_fails_while_its_modules_come_is_taken_again(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked])
    gate, get = Gate(engine, 2), engine.pool.layer

    def failing(index: int) -> tuple[Tensor, Tensor]:
        if index == 1:
            engine.pool.layer = get  # type: ignore[method-assign]
            raise RuntimeError("no step")
        return get(index)

    engine.pool.layer = failing  # type: ignore[method-assign]
    engine.add(asked)
    with pytest.raises(RuntimeError, match="no step"):
        engine.step()
    gate.open()
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


def test_whoever_stops_the_rows_that_bring_modules_makes_those_begin_again_who_read_them(model: Model, tmp_path: Path) -> None:
    """Between the launch of a step and its end, which only steps that overlap have."""
    asked = prompt("r", modules(0, 1, 2))
    engine = kept(model, "disk", tmp_path, [asked])
    engine.add(asked)
    schedule = engine.scheduler.next()
    assert len(schedule.rows) == 1 and len(schedule.loads) >= 4
    engine.scheduler.stop_making()
    assert engine.scheduler.running == [] and engine.scheduler.loading == []
    assert tokens(drain(engine)["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


def test_a_pool_without_room_for_the_row_beside_its_modules_brings_them_first(model: Model, tmp_path: Path) -> None:
    asked = prompt("r", modules(0, 1, 2), own=20, count=4)
    engine = kept(model, "disk", tmp_path, [asked], kv_cache_tokens=104)
    assert tokens(run(engine, [asked])["r", 0]) == made_from_nothing(model, asked)
    whole(engine)
    engine.close()


def test_a_cut_conversation_is_read_on_its_way(model: Model) -> None:
    options: dict[str, object] = {"max_model_len": 100, "kv_cache_tokens": 320, "max_num_batched_tokens": 128}
    stays, leaves = engine_of(model, None, **options), engine_of(model, None, host_gib=ENOUGH, **options)
    said, cuts = words(3, 80), 0
    for turn in range(5):
        asked = Request("r", said, greedy(6), truncation=Truncation(keep=8))
        wanted = run(stays, [asked])["r", 0]
        evict(leaves)
        gate = Gate(leaves, 1)
        gate.open_behind(0)
        leaves.add(asked)
        first = leaves.step()
        assert len(first) == 1 and first[0].reuse.truncated == wanted[0].reuse.truncated
        if first[0].reuse.truncated is not None:
            cuts += 1
            assert first[0].reuse.tiers == {"host": first[0].num_cached_tokens} and first[0].num_cached_tokens > 30
        assert [first[0].token, *tokens(drain(leaves)["r", 0])] == tokens(wanted)
        said = [*said, *tokens(wanted), *words(100 + turn, 9)]
    assert cuts >= 2
    whole(leaves)
    leaves.close()


def test_what_is_lost_and_comes_again_while_a_row_waits_is_counted_once(model: Model, tmp_path: Path) -> None:
    """Ctrl-C between the first of its modules and the last."""
    asked = prompt("r", modules(0, 1))
    engine = kept(model, "disk", tmp_path, [prompt("other", modules(0))])
    engine.add(asked)
    [row] = engine.answers
    assert engine.step() == [] and row.cached is None and row.tiers == {"disk": row.had} and row.had >= 10, "the opening has come"
    settled(engine)
    get = engine.scheduler.next

    def interrupted() -> Schedule:
        engine.scheduler.next = get  # type: ignore[method-assign]
        raise KeyboardInterrupt

    engine.scheduler.next = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    [first, *rest] = drain(engine)["r", 0]
    assert tokens([first, *rest]) == made_from_nothing(model, asked)
    assert first.num_cached_tokens == sum(first.reuse.tiers.values()) == 10 + 13 + 8
    whole(engine)
    engine.close()


def test_a_load_for_somebody_who_is_not_asked_for_any_more_keeps_its_pages(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a cancellation, and in the next step again: what is being filled is given to nobody."""
    engine = kept(model, "host", tmp_path, [])
    engine.add(Request("gone", words(3, 20), greedy(2)))
    [gone], scheduler_ = [*engine.answers], engine.scheduler
    stopped = list[object]()
    assert scheduler_.below is not None
    monkeypatch.setattr(scheduler_.below, "stop", lambda row: stopped.append(row) or setattr(row, "load", None))
    scheduler_.waiting.clear()
    scheduler_.loading.append(gone)
    gone.load = object()  # type: ignore[assignment]
    del engine.answers[gone]
    engine._begin_again()
    assert stopped == [gone]
    assert not scheduler_.waiting and not scheduler_.loading
    engine.close()


DECIDING = engine_, scheduler, makers, holding, below, imports, turns


@pytest.mark.parametrize("modules_are", ["in host memory", "nowhere"])
def test_ctrl_c_while_it_is_decided_who_runs_loses_nobody(model: Model, tmp_path: Path, modules_are: str) -> None:
    """Other threads wait for their answers, too."""
    asked = [prompt(name, modules(*chosen)) for name, chosen in (("one", (0, 1)), ("two", (1, 2)), ("three", (2, 3)))]
    asked.insert(1, Request("plain", words(50, 30), greedy(6)))
    wanted = {request.request_id: made_from_nothing(model, request) for request in asked}

    def lines(place: int) -> int:
        """That were run in the first steps, of which one was interrupted."""
        before = [prompt("other", modules(0, 2))] if modules_are == "in host memory" else []
        engine = kept(model, "host", tmp_path, before, max_num_seqs=3, kv_cache_tokens=256)
        for request in asked:
            engine.add(request)
        said: dict[str, list[int]] = {}
        with Interrupt(DECIDING, place) as interrupt:
            for _ in range(4):
                with suppress(KeyboardInterrupt):
                    for event in engine.step():
                        said.setdefault(event.request_id, []).append(event.token)
        for (name, _), found in drain(engine, 300).items():
            said.setdefault(name, []).extend(tokens(found))
        assert said == wanted, f"interrupted before line {place}"
        whole(engine)
        engine.close()
        return interrupt.moments

    every = lines(0)
    assert every > 1000
    for place in random.Random(modules_are).sample(range(1, every), int(os.environ.get("PANDO_SCHEDULES", "12"))):
        lines(place)


@pytest.mark.parametrize("outside", ["a cancellation", "modules that are asked for"])
def test_ctrl_c_outside_of_a_step_loses_nobody_and_no_page(model: Model, tmp_path: Path, outside: str) -> None:
    asked = [prompt(name, modules(*chosen)) for name, chosen in (("one", (0, 1)), ("two", (1, 2)))]
    wanted = {request.request_id: made_from_nothing(model, request) for request in asked}

    def lines(place: int, steps: int) -> int:
        """That were run outside of steps, of which one was interrupted."""
        engine = kept(model, "host", tmp_path, [prompt("other", modules(0, 2))])
        for request in (*asked, prompt("gone", modules(3, 0)), Request("plain", words(50, 30), greedy(6))):
            engine.add(request)
        said: dict[str, list[int]] = {}
        for _ in range(steps):
            for event in engine.step():
                said.setdefault(event.request_id, []).append(event.token)
        with Interrupt(DECIDING, place) as interrupt, suppress(KeyboardInterrupt):
            if outside == "a cancellation":
                engine.cancel("gone")
            else:
                engine.encode(modules(3, 1), Tenant(b""))
        engine.cancel("gone")
        for (name, _), found in drain(engine, 300).items():
            said.setdefault(name, []).extend(tokens(found))
        assert {name: said[name] for name in wanted} == wanted, f"interrupted before line {place} behind {steps} steps"
        whole(engine)
        engine.close()
        return interrupt.moments

    dice, every = random.Random(outside), [lines(0, steps) for steps in range(3)]
    assert min(every) > 10
    for _ in range(int(os.environ.get("PANDO_SCHEDULES", "12"))):
        steps = dice.randrange(3)
        lines(dice.randrange(1, every[steps]), steps)


class Known:
    """Prompts, and what an engine answers that makes all of them from nothing."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def request(self, name: str, dice: random.Random) -> tuple[Request, list[int]]:
        """The prompt of some modules and some words; without modules it is a plain one."""
        chosen, own = tuple(dice.sample(range(len(LENGTHS)), dice.randrange(4))), dice.choice((1, 9, 20))
        runs = modules(*chosen) if chosen else []
        asked = Request(name, words(own, own), greedy(6, n=dice.choice((1, 1, 2))), runs=runs)
        if (chosen, own) not in self._answers:
            self._answers[chosen, own] = made_from_nothing(self._model, asked)
        return asked, self._answers[chosen, own]


class Rotten(Faulty):
    """It keeps whatever it is given, and some of that cannot be read."""

    def look(self, keys: Sequence[bytes]) -> int:
        return self.inner.look(keys)

    def ends(self, parent: bytes) -> Sequence[Card]:
        return self.inner.ends(parent)

    def open(self, key: bytes) -> Reader:
        return FaultyReader(self, self.inner.open(key))

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        self.inner.save(card, layers)


@pytest.fixture(scope="module")
def known(model: Model) -> Known:
    return Known(model)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PANDO_SCHEDULES", "12"))))
def test_whatever_happens_answers_are_those_of_modules_made_from_nothing(
    model: Model, tmp_path: Path, seed: int, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come, are cancelled, leave the pool and come back; tiers and steps fail."""
    dice = random.Random(seed)
    monkeypatch.setattr(Speeds, "in_time", dice.choice((Speeds.in_time, lambda *_: True)))  # who waits for it holds up others
    options: dict[str, object] = {
        "kv_cache_tokens": dice.choice((112, 200, 960)), "max_num_seqs": dice.choice((1, 2, 16)), "overlap": dice.choice((False, True)),
        "max_num_batched_tokens": dice.choice((8, 64)), "host_gib": dice.choice((0, 0, LITTLE, ENOUGH)),
    }  # fmt: skip
    engine = engine_of(model, tmp_path, **options)
    assert engine.store is not None
    kind, share, delay = dice.choice((Rotten, Rotten, Faulty)), dice.choice((0.0, 0.01, 0.1)), dice.choice((0.0, 0.0002))
    tier = kind(engine.store.below[0], random.Random(seed), share, delay)
    engine.store.below, engine.store.transfer.tiers["disk"] = (tier,), tier
    get, trips = engine.pool.layer, dice.choice((0.0, 0.01))

    def tripping(index: int) -> tuple[Tensor, Tensor]:
        if index and dice.random() < trips:
            raise RuntimeError("tripped")
        return get(index)

    engine.pool.layer = tripping  # type: ignore[method-assign]
    for turn in range(4):
        coming, wanted, heard = [known.request(f"{turn} {each}", dice) for each in range(dice.randrange(1, 5))], {}, {}
        while coming or engine.has_work:
            if coming and dice.random() < 0.5:
                asked, answer = coming.pop()
                engine.add(asked)
                wanted |= {(asked.request_id, index): answer for index in range(asked.params.n)}
            try:
                events = engine.step()
            except RuntimeError:
                continue
            for event in events:
                heard.setdefault((event.request_id, event.index), []).append(event.token)
            if wanted and dice.random() < 0.02:
                gone = dice.choice(sorted(wanted))[0]
                engine.cancel(gone)
                wanted = {name: answer for name, answer in wanted.items() if name[0] != gone}
        assert {name: heard.get(name) for name in wanted} == wanted
        if dice.random() < 0.7:
            evict(engine)
    whole(engine)
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_module_that_stands_in_a_prompt_twice_is_made_once_and_brought_up_once(
    model: Model, tier: str, overlap: bool, tmp_path: Path
) -> None:
    module = Run(tuple(words(40, 42)), 0, Origin((), 7))
    asked = prompt("r", [module, module.moved(50), module.moved(100)], count=1)
    engine = kept(model, tier, tmp_path, [], overlap=overlap)
    [made] = run(engine, [asked])["r", 0]
    assert engine.totals.tokens == 42 + 9
    assert made.num_cached_tokens == 2 * 42 and made.reuse.miss is not None and made.reuse.miss.token == 0
    engine.close()
    engine = kept(model, tier, tmp_path, [asked], overlap=overlap)
    [brought] = run(engine, [asked])["r", 0]
    assert engine.store is not None and engine.store.facts().loaded == {tier: 42 + 8}
    assert (brought.num_cached_tokens, brought.reuse.miss) == (3 * 42 + 8, None)
    assert (dict(brought.reuse.tiers), brought.reuse.held) == ({tier: 42 + 8}, 2 * 42), "and read from the pool from then on"
    assert made.token == brought.token == made_from_nothing(model, asked)[0]
    whole(engine)
    engine.close()
