"""Pages are saved while the step that fills them computes: layer by layer, once, and only if the step counts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pando.engine.engine import Engine
from pando.engine.request import Miss, Request, TokenEvent
from pando.engine.row import Schedule
from pando.engine.sampler import Choices, Chosen
from pando.model.load import Model
from pando.store.movers import Take, mover_of
from pando.store.speeds import Speeds
from pando.store.store import Store
from pando.store.tier import Card
from tests.tiny import drain, greedy, run, tiny_engine, tiny_model

from .test_graphs import captured
from .test_store import ENOUGH, PAGE, ask, cold, engine_of, evict, settled, tokens_of, whole, words

pytestmark = pytest.mark.gpu
LAYERS = 4


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return tiny_model(layers=LAYERS, size=8 if request.param == "cpu" else 64, device=torch.device(request.param))


@pytest.fixture(autouse=True)
def _loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of this size is sooner computed."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)


def store_of(engine: Engine) -> Store:
    assert engine.store is not None
    return engine.store


def begun(engine: Engine) -> dict[bytes, Tensor]:
    """The slots of host memory that are being written, by key."""
    host = store_of(engine).host
    return {key: host._slot(slot) for key, slot in host._begun.items()}


def in_pool(engine: Engine, page: int, layers: int) -> list[bytes]:
    """The first layers of a page."""
    slots = slice(page * PAGE, (page + 1) * PAGE)
    return [b"".join(part[layer, slots].cpu().numpy().tobytes() for part in (engine.pool.k, engine.pool.v)) for layer in range(layers)]


@contextmanager
def at_layer(engine: Engine, index: int, act: Callable[[], None]) -> Iterator[None]:
    """Does something in a step, each time that a layer begins."""
    layer = engine.pool.layer

    def watched(asked: int) -> tuple[Tensor, Tensor]:
        found = layer(asked)
        if asked == index:
            act()
        return found

    engine.pool.layer = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.pool.layer  # type: ignore[method-assign]


def departed(engine: Engine) -> list[Schedule]:
    """The steps that saved while they computed, from now on."""
    seen: list[Schedule] = []
    forward = engine._forward

    def watched(schedule: Schedule) -> Tensor:
        if schedule.departure is not None:
            seen.append(schedule)
        return forward(schedule)

    engine._forward = watched  # type: ignore[method-assign]
    return seen


def nothing_remains(engine: Engine, saved: int = 0) -> None:
    """Of what was given up: no slot, no pin, no page."""
    whole(engine)
    store = store_of(engine)
    assert not begun(engine) and not len(store._departures) and not store._queued
    assert len(store.host) == saved and store.host.free == store.host.pages - saved


def test_the_first_layers_of_a_page_are_in_host_memory_before_its_last_is_computed(model: Model) -> None:
    engine, prompt = engine_of(model, None, host_gib=ENOUGH), words(1, 40)
    host, found = store_of(engine).host, list[tuple[list[bytes], list[bytes]]]()

    def look() -> None:
        store_of(engine)._saver.settle()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        [row] = engine.scheduler.running
        assert len(begun(engine)) == 10 and not len(host)
        for key, page in zip(row.keys, row.pages, strict=False):
            copied = [layer.tobytes() for layer in begun(engine)[key][: LAYERS - 1].numpy()]
            found.append((copied, in_pool(engine, page, LAYERS - 1)))

    with at_layer(engine, LAYERS - 1, look):
        ask(engine, prompt, count=1)
    assert len(found) == 10 and all(np.any(np.frombuffer(layer, np.uint8)) for copied, _ in found for layer in copied)
    assert all(copied == computed for copied, computed in found)
    evict(engine)
    events = ask(engine, prompt)
    assert [event.token for event in events] == cold(model, prompt) and events[0].reuse.tiers == {"host": 39}
    whole(engine)


@pytest.mark.parametrize("below", ["host", "disk"])
def test_what_was_saved_layer_by_layer_answers_as_what_was_computed(model: Model, tmp_path: Path, below: str) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH) if below == "host" else engine_of(model, tmp_path)
    prompt, steps = words(2, 30), departed(engine)
    answer = tokens_of(engine, prompt, count=40)
    assert [sum(schedule.counts) > 1 for schedule in steps][:2] == ([True, False] if model.device.type == "cpu" else [True])
    evict(engine)
    if below == "disk":
        engine.close()
        engine = engine_of(model, tmp_path)
    events = ask(engine, [*prompt, *answer, 1, 2, 3])
    assert [event.token for event in events] == cold(model, [*prompt, *answer, 1, 2, 3])
    assert events[0].reuse.tiers == {below: 68}
    whole(engine)


def test_each_layer_of_a_page_is_copied_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, tmp_path, page_size=32, kv_cache_tokens=960)
    mover, copied = store_of(engine).transfer.mover, list[tuple[int, int]]()
    take = mover.take

    def counted(takes: list[Take], computed: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        copied.extend((each.page, layer) for each in takes for layer in each.layers)
        return take(takes, computed)

    monkeypatch.setattr(mover, "take", counted)
    for turn in range(3):
        run(engine, [Request(str(row), [*words(3, 70), row, *words(turn, 9)], greedy(50)) for row in range(3)])
    settled(engine)
    assert len(copied) == len(set(copied)) == LAYERS * store_of(engine).facts().saved["host"]
    assert store_of(engine).facts().unsaved == {}
    engine.close()


def test_what_a_captured_step_fills_is_copied_whole_behind_it(model: Model) -> None:
    """Without a GPU, what is captured is simply done again."""
    if model.device.type == "cuda":
        pytest.skip("its captured steps overlap: the host does not know their tokens in time")
    engine, prompt = engine_of(model, None, host_gib=ENOUGH), words(13, 2)
    graphs, transfer = captured(engine), store_of(engine).transfer
    transfer.mover = store_of(engine)._departures._mover = mover_of(engine.pool, transfer.shape, transfer.codec)
    take, copied, steps = transfer.mover.take, list[range](), departed(engine)
    transfer.mover.take = lambda takes, computed: (copied.extend(each.layers for each in takes), take(takes, computed))[1]  # type: ignore
    answer = tokens_of(engine, prompt, count=20)
    settled(engine)
    assert len(steps) == 5 and copied == [range(LAYERS)] * 5 and graphs.replays > 12
    engine.clear_cache()
    events = ask(engine, [*prompt, *answer])
    assert [event.token for event in events] == cold(model, [*prompt, *answer]) and events[0].reuse.tiers == {"host": 20}
    whole(engine)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_step_that_fails_saves_nothing(model: Model, failure: type[BaseException]) -> None:
    engine, prompt = engine_of(model, None, host_gib=ENOUGH), words(4, 40)

    def fail() -> None:
        assert len(store_of(engine)._departures) == 10
        raise failure

    engine.add(Request("r", prompt, greedy(6)))
    with at_layer(engine, LAYERS - 1, fail):
        if failure is torch.OutOfMemoryError:
            engine.step()
        else:
            with pytest.raises(failure):
                engine.step()
    nothing_remains(engine)
    assert [event.token for event in drain(engine)["r", 0]] == cold(model, prompt)
    evict(engine)
    assert tokens_of(engine, prompt) == cold(model, prompt)
    nothing_remains(engine, saved=11)


def test_what_a_row_saved_itself_and_loads_after_a_step_that_failed_is_not_counted_as_cached(model: Model) -> None:
    engine, prompt = engine_of(model, None, host_gib=ENOUGH, max_num_batched_tokens=32, overlap=False), words(14, 60)
    engine.add(Request("r", prompt, greedy(6)))
    engine.step()
    settled(engine)

    def fail() -> None:
        raise RuntimeError

    with at_layer(engine, 1, fail), pytest.raises(RuntimeError):
        engine.step()
    events = drain(engine)["r", 0]
    assert store_of(engine).facts().loaded == {"host": 32}
    assert [event.token for event in events] == cold(model, prompt)
    assert (events[0].num_cached_tokens, events[0].reuse.tiers) == (0, {})
    whole(engine)


def test_what_is_lost_of_an_answer_that_had_begun_does_not_change_what_is_told_of_its_prompt(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, overlap=False, cuda_graphs=False)
    prompt, told = words(15, 21), list[TokenEvent]()
    engine.add(Request("r", prompt, greedy(20)))
    while len(told) < 12:
        told += engine.step()
    settled(engine)

    def fail() -> None:
        raise RuntimeError

    with at_layer(engine, 1, fail), pytest.raises(RuntimeError):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(store_of(engine).transfer.mover, "put", lambda *_: 1 / 0)
        engine.step()
    told += drain(engine)["r", 0]
    assert store_of(engine).facts().lost == {"unreadable": 1}
    assert [event.token for event in told] == cold(model, prompt, 20)
    assert {(event.num_cached_tokens, event.reuse.miss) for event in told} == {(0, Miss("cold", 0))}
    whole(engine)


def test_a_step_whose_context_does_not_come_saves_nothing_and_is_done_again(model: Model, tmp_path: Path) -> None:
    first, prompt = engine_of(model, tmp_path), words(5, 60)
    ask(first, prompt[:32], count=1)
    first.close()
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 600 and "sqlite" not in file.name):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1  # in the last layer: found when the first was used already
        file.write_bytes(raw)
    engine = engine_of(model, tmp_path)
    steps = departed(engine)
    assert tokens_of(engine, prompt) == cold(model, prompt)
    assert len(steps[0].departure.pages) == 7 and steps[0].loads  # type: ignore[union-attr]
    assert store_of(engine).facts().lost == {"corrupt": 1}
    settled(engine)
    assert store_of(engine).facts().saved["disk"] >= 7 + 1, "pages of the prompt, and one of the answer"
    evict(engine)
    assert tokens_of(engine, prompt) == cold(model, prompt)
    whole(engine)
    engine.close()


@pytest.mark.parametrize("alone", [True, False])
def test_a_row_that_is_cancelled_while_its_step_runs_saves_nothing_of_it(model: Model, alone: bool) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, overlap=True)
    if not alone:
        engine.add(Request("other", words(6, 7), greedy(12)))
        engine.step()
    engine.add(Request("gone", words(7, 24), greedy(6)))
    while not len(store_of(engine)._departures):
        engine.step()
    engine.cancel("gone")
    events = drain(engine)
    assert alone or [event.token for event in events["other", 0]] == cold(model, words(6, 7), 12)
    nothing_remains(engine, saved=0 if alone else 4)
    assert tokens_of(engine, words(7, 24)) == cold(model, words(7, 24))


def test_a_step_that_was_fed_another_token_saves_nothing_and_is_done_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, overlap=True)
    departures, read, retracted = store_of(engine)._departures, Choices.read, list[int]()
    retract = engine.scheduler.retract

    def mistaken(chosen: Choices) -> tuple[list[Chosen], bool]:
        return read(chosen)[0], not len(departures)

    def watched() -> None:
        before = len(departures)
        retract()
        retracted.append(before - len(departures))

    monkeypatch.setattr(Choices, "read", mistaken)
    monkeypatch.setattr(engine.scheduler, "retract", watched)
    engine.add(Request("other", words(6, 7), greedy(12)))
    engine.step()
    engine.add(Request("r", words(7, 24), greedy(6)))
    events = drain(engine)
    assert [event.token for event in events["r", 0]] == cold(model, words(7, 24)) and 6 in retracted
    assert [event.token for event in events["other", 0]] == cold(model, words(6, 7), 12)
    nothing_remains(engine, saved=4 + 7)


def test_where_the_tree_has_the_run_already_its_own_page_is_saved(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = engine_of(model, None, host_gib=ENOUGH), words(8, 2 * PAGE)
    store = store_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(store.transfer.mover, "take", lambda *_: 1 / 0)
        ask(engine, prompt, count=1)
        settled(engine)
    assert store.facts().saved == {}
    steps = departed(engine)
    run(engine, [Request("scored", prompt, greedy(1), score=True)])
    settled(engine)
    [stem] = engine.tree.stems()
    assert set(steps[0].departure.pages.values()).isdisjoint(stem.segment.pages)  # type: ignore[union-attr]
    assert store.facts().saved == {"host": 2} and not begun(engine)
    for key, page in zip(stem.segment.keys, stem.segment.pages, strict=False):
        kept = store.host.open(key)
        assert [layer.tobytes() for layer in kept.payload.numpy()] == in_pool(engine, page, LAYERS)
        kept.close()
    nothing_remains(engine, saved=2)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_saver_that_is_behind_holds_up_no_answer(model: Model, tmp_path: Path, overlap: bool) -> None:
    engine = engine_of(model, tmp_path, kv_cache_tokens=960, overlap=overlap)
    store, free = store_of(engine), threading.Event()
    store._saver.post(lambda: free.wait(20))
    steps = departed(engine)
    assert tokens_of(engine, words(9, 120), count=100) == cold(model, words(9, 120), 100)
    assert 0 < len(store._departures) + store._leaving <= store.buffer == sum(len(each.departure.pages) for each in steps)  # type: ignore[union-attr]
    free.set()
    settled(engine)
    assert store.facts().saved["disk"] == 219 // PAGE and store.facts().unsaved == {}
    engine.close()


def test_without_room_in_host_memory_a_page_is_saved_behind_its_step(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    host, steps = store_of(engine).host, departed(engine)
    taken = [Card(bytes([place]) * 32, b"", b"", (0,)) for place in range(host.free)]
    for card in taken:
        host.begin(card)
    ask(engine, words(10, 40), count=1)
    assert not steps
    for card in taken:
        host.abort(card)
    ask(engine, words(11, 40), count=1)
    settled(engine)
    assert len(steps) == 1 and store_of(engine).facts().saved["disk"] >= 10
    engine.close()


def test_engines_without_tiers_below_the_pool_save_nothing(model: Model) -> None:
    engine = tiny_engine(model)
    steps = departed(engine)
    tokens_of(engine, words(12, 40))
    assert not steps
