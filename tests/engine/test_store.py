"""What outlives the pool: conversations that come back from host memory, from disk and after a restart, through tiers that may fail."""

import gc
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from pando.engine.engine import Engine
from pando.engine.layout import Layout
from pando.engine.llm import LLM
from pando.engine.request import Request, Tenant, Truncation
from pando.engine.truncation import Cut
from pando.errors import InvalidOption
from pando.kv.pool import PagePool
from pando.kv.run import Origin, Run
from pando.kv.segment import Key
from pando.model.decoder import Step
from pando.model.load import Model
from pando.store import touches, transfer, worker
from pando.store.movers import Copy
from pando.store.remote import SharedTier
from pando.store.speeds import Speeds
from pando.store.store import Store
from pando.store.tier import Card, Lost, Reader, Tier
from tests.tiny import drain, greedy, run, tiny_config, tiny_engine, tiny_model

POOL = 160  # tokens: one conversation, and not much more
LITTLE, ENOUGH = 0.00001, 0.01  # GiB
PAGE = 4
SLOW = 0.004  # seconds at most that a slow call takes: some steps
OURS = Tenant()


def engine_of(model: Model, folder: Path | None, **options: object) -> Engine:
    defaults: dict[str, object] = {"kv_cache_tokens": POOL, "page_size": PAGE}
    if folder is not None:
        defaults |= {"disk_gib": ENOUGH, "disk_dir": str(folder)}
    return tiny_engine(model, **{**defaults, **options})


def tokens_of(engine: Engine, prompt: Sequence[int], tenant: Tenant = OURS, count: int = 6) -> list[int]:
    return [event.token for event in ask(engine, prompt, tenant, count)]


def ask(engine: Engine, prompt: Sequence[int], tenant: Tenant = OURS, count: int = 6):  # type: ignore[no-untyped-def]
    return run(engine, [Request("r", list(prompt), greedy(count), tenant)])["r", 0]


def cold(model: Model, prompt: Sequence[int], count: int = 6) -> list[int]:
    return tokens_of(tiny_engine(model, prefix_caching=False), prompt, count=count)


def words(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {place}").randrange(256) for place in range(length)]


def settled(engine: Engine) -> None:
    """Everything that is on its way has arrived."""
    assert engine.store is not None
    deadline = time.monotonic() + 60
    while engine.tend() is not None or not quiet(engine):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def quiet(engine: Engine) -> bool:
    """Have the threads that move bytes nothing to do? What was given up is gone from host memory, too."""
    reached = threading.Event()
    assert engine.store is not None
    engine.store._saver.settle()
    engine.store._writer.post(reached.set)
    return reached.wait(10) and not engine.store.busy


def evict(engine: Engine) -> None:
    settled(engine)
    engine.clear_cache()


def whole(engine: Engine) -> None:
    """Nothing of the pool or of host memory is lost, and nothing pinned, when nobody asks for anything; and nobody is told of anything."""
    settled(engine)
    assert engine.store is not None
    host = engine.store.host
    assert all(engine.store.ledger.has(key, "host") for key in host._kept) and len(host) + host.free == host.pages
    assert not engine.scheduler.makers._lacking
    engine.clear_cache()
    assert engine.pages.free == engine.pages.count
    assert not list(engine.tree.stems())


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def test_what_is_needed_again_before_it_is_written_is_not_lost(model: Model, tmp_path: Path) -> None:
    engine, go = engine_of(model, tmp_path, host_gib=ENOUGH), threading.Event()
    store = engine.store
    assert store is not None
    store._writer.post(go.wait)  # a slow disk
    ask(engine, words(1, 40), count=1)
    store._saver.settle()
    engine.tend()
    keys = list(store._unwritten)
    store.ledger.drop(keys, "host")  # as where there is no place for them
    store.join(99, keys)
    engine.tend()
    deadline = time.monotonic() + 20
    while store._raising and time.monotonic() < deadline:
        time.sleep(0.002)
        store.pump()
    store.leave(99)
    go.set()
    settled(engine)
    assert keys and all(store.ledger.has(key) for key in keys)
    whole(engine)


def test_a_load_of_which_everything_came_is_not_late(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH)
    ask(engine, words(1, 60), count=1)
    evict(engine)
    assert engine.store is not None
    monkeypatch.setattr(transfer, "LATE", 0.2)
    monkeypatch.setattr(engine.store.transfer.mover, "drain", lambda: time.sleep(0.5))
    found = ask(engine, words(1, 60))
    assert all(sum(event.reuse.tiers.values()) == 59 and event.reuse.miss is None for event in found)
    assert [event.token for event in found] == cold(model, words(1, 60))
    monkeypatch.undo()
    whole(engine)


def test_who_has_come_to_wait_for_nothing_runs_when_the_store_is_closed(model: Model) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH)
    engine.add(Request("r", words(2, 40), greedy(6)))
    heard, scheduler = engine.step(), engine.scheduler
    [row] = scheduler.running
    scheduler.running.remove(row)  # as where those it borrowed from were taken in
    scheduler.loading.append(row)
    scheduler.turns.change()
    engine.close()
    heard += [event for events in drain(engine, 500).values() for event in events]
    assert [event.token for event in heard] == cold(model, words(2, 40))


def test_what_came_is_counted_when_the_answer_is_there(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(SimpleQueue[Callable[[], None]]):
        def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
            time.sleep(0.05)
            super().put(item)

    engine = engine_of(model, None, host_gib=ENOUGH)
    ask(engine, words(1, 70), count=1)
    evict(engine)
    assert engine.store is not None
    monkeypatch.setattr(engine.store, "_done", Slow())
    ask(engine, words(1, 70), count=1)
    assert engine.store.facts().loaded == {"host": 68}
    whole(engine)


def test_a_short_end_that_a_prompt_goes_on_from_comes_back_however_long_pages_are(model: Model) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, page_size=256, kv_cache_tokens=256 * 8)
    said = words(1, 256 + 24)
    said += [event.token for event in ask(engine, said, count=2)]
    evict(engine)
    assert ask(engine, [*said, *words(2, 30)], count=1)[0].reuse.tiers == {"host": 256 + 25}, "all but the token that was said last"
    whole(engine)


def test_a_conversation_that_left_the_pool_continues_from_host_memory(model: Model) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH)
    prompt = words(1, 70)
    ask(engine, prompt)
    evict(engine)
    events = ask(engine, prompt)
    assert [event.token for event in events] == cold(model, prompt)
    assert events[0].reuse.tiers == {"host": 68}
    assert events[0].num_cached_tokens == 68
    whole(engine)


def test_a_conversation_continues_after_a_restart(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path)
    prompt = words(2, 90)
    answer = tokens_of(first, prompt, count=30)
    first.close()
    second = engine_of(model, tmp_path)
    events = ask(second, [*prompt, *answer, *words(3, 9)])
    assert [event.token for event in events] == cold(model, [*prompt, *answer, *words(3, 9)])
    assert events[0].reuse.tiers["disk"] >= 116  # all but an end that is too short to be kept
    assert events[0].reuse.miss is None
    whole(second)
    second.close()


def test_the_short_end_of_a_conversation_is_kept_too(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path, page_size=64, kv_cache_tokens=512)
    prompt = words(4, 100)
    ask(first, prompt, count=1)
    first.close()
    second = engine_of(model, tmp_path, page_size=64, kv_cache_tokens=512)
    assert ask(second, [*prompt, 1, 2, 3])[0].reuse.tiers == {"disk": 100}
    second.close()


def test_a_kept_end_comes_up_only_for_a_prompt_that_shares_enough_of_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    engine = engine_of(model, None, page_size=64, kv_cache_tokens=1024, host_gib=ENOUGH)
    prompt = words(4, 100)
    ask(engine, prompt, count=1)
    evict(engine)
    assert ask(engine, [*prompt[:64], *words(5, 9)])[0].reuse.tiers == {"host": 64}
    few, more = [*prompt[:67], *words(6, 9)], [*prompt[:90], *words(7, 9)]
    events = ask(engine, few)
    assert [event.token for event in events] == cold(model, few)
    assert (events[0].num_cached_tokens, events[0].reuse.tiers) == (64, {}), "three tokens are sooner computed"
    events = ask(engine, more)
    assert [event.token for event in events] == cold(model, more)
    assert (events[0].num_cached_tokens, events[0].reuse.tiers) == (90, {"host": 26})
    whole(engine)


def test_a_conversation_continues_on_another_machine_from_a_shared_tier(model: Model, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    first = engine_of(model, None, remote=shared)
    prompt = words(30, 90)
    answer = tokens_of(first, prompt, count=12)
    first.close()
    second = engine_of(model, tmp_path / "own", remote=f"file://{shared}")
    events = ask(second, [*prompt, *answer, 1, 2])
    assert [event.token for event in events] == cold(model, [*prompt, *answer, 1, 2])
    assert events[0].reuse.tiers["remote"] >= 100
    whole(second)
    second.close()


def test_a_beginning_that_never_leaves_the_pool_stays_in_a_shared_tier_below_what_is_saved_behind_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody loads it there, and whoever saves a page behind it uses it."""
    monkeypatch.setattr(touches, "EVERY", 0.0)
    now = [time.time()]
    one = engine_of(model, None, remote=str(tmp_path), ttl=60, kv_cache_tokens=960)
    assert one.store is not None and one.store.scout is not None
    shared = one.store.scout._inner
    assert isinstance(shared, SharedTier)
    monkeypatch.setattr(shared, "_clock", lambda: now[0])
    monkeypatch.setattr(shared._folder, "_clock", lambda: now[0])
    prompt = words(13, 40)
    for turn in range(4):
        prompt = [*prompt, *tokens_of(one, prompt), *words(60 + turn, 20)]
        settled(one)
        now[0] += 40
        shared.expire()
    one.close()
    monkeypatch.setattr(time, "time", lambda: now[0])
    another = engine_of(model, None, remote=str(tmp_path), ttl=60, kv_cache_tokens=960)
    assert ask(another, prompt)[0].reuse.tiers.get("remote", 0) >= len(prompt) - 20 - PAGE
    another.close()


def test_a_page_is_saved_once_however_many_turns_share_it(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    prompt = words(5, 40)
    for turn in range(4):
        ask(engine, [*prompt, *words(turn, 8)], count=1)
        settled(engine)
    assert engine.store is not None
    saved = engine.store.facts().saved
    assert saved["host"] == saved["disk"] == 10 + 4 * 2
    engine.close()


def test_a_module_comes_up_without_what_it_was_encoded_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    engine = engine_of(model, None, host_gib=ENOUGH, kv_cache_tokens=400)
    first = Run(tuple(words(1, 40)), 0, Origin((), 0))
    second = Run(tuple(words(2, 24)), 40, Origin((first,), 40))
    asked = [Request("r", words(3, 9), greedy(6), runs=runs) for runs in ((first, second), (second.moved(0),))]
    wanted = [[event.token for event in run(engine, [request])["r", 0]] for request in asked]
    evict(engine)
    assert engine.store is not None and engine.store.facts().loaded == {}
    events = run(engine, [asked[1]])["r", 0]
    assert [event.token for event in events] == wanted[1]
    assert engine.store.facts().loaded == {"host": 24 + 8} and events[0].reuse.tiers == {"host": 24 + 8}, "and the words behind it"
    assert [event.token for event in run(engine, [asked[0]])["r", 0]] == wanted[0]
    whole(engine)


def test_tenants_do_not_share_what_is_kept(model: Model, tmp_path: Path) -> None:
    prompt, mine, yours = words(6, 60), Tenant(b"mine"), Tenant(b"yours")
    first = engine_of(model, tmp_path)
    ask(first, prompt, mine)
    first.close()
    second = engine_of(model, tmp_path)
    assert ask(second, prompt, yours)[0].num_cached_tokens == 0
    assert ask(second, [*prompt, 7], mine)[0].num_cached_tokens == 60
    second.close()


def test_another_models_pages_are_not_used(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path)
    ask(first, words(7, 60))
    first.close()
    other = tiny_model(seed=1)
    second = engine_of(other, tmp_path)
    events = ask(second, words(7, 60))
    assert events[0].num_cached_tokens == 0
    assert [event.token for event in events] == cold(other, words(7, 60))
    second.close()


def test_what_was_damaged_on_disk_is_computed_again_and_says_so(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path)
    prompt = words(8, 80)
    ask(first, prompt)
    first.close()
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 600 and "sqlite" not in file.name):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1  # in the last layer: found when the first was used already
        file.write_bytes(raw)
    second = engine_of(model, tmp_path)
    events = ask(second, prompt)
    assert [event.token for event in events] == cold(model, prompt)
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
    assert events[0].num_cached_tokens == 0
    assert second.store is not None and second.store.facts().lost["corrupt"] >= 1
    whole(second)
    second.close()


def test_a_prompt_of_many_requests_is_loaded_once(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path)
    prompt = words(9, 40)
    ask(first, prompt)
    first.close()
    second = engine_of(model, tmp_path)
    events = run(second, [Request(str(i), [*prompt, i], greedy(4)) for i in range(6)])
    assert second.store is not None
    assert second.store.facts().loaded == {"disk": 40}
    for i in range(6):
        assert [event.token for event in events[str(i), 0]] == cold(model, [*prompt, i], 4)
    whole(second)
    second.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_loaded_beside_others_is_shared_as_soon_as_it_is_there(model: Model, overlap: bool) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, kv_cache_tokens=400, overlap=overlap)
    prompt = words(1, 8 * PAGE + 1)  # all but the last token are kept
    ask(engine, prompt)
    assert engine.store is not None
    engine.store.speeds = Speeds()
    evict(engine)
    engine.add(Request("beside", words(2, 9), greedy(200)))
    scattered = engine.pages.take(60)  # pages are no neighbours any more
    engine.pages.give(scattered[::2])
    for _ in range(3):
        engine.step()
    engine.add(Request("r", prompt, greedy(6, n=3)))
    events = drain(engine)
    engine.pages.give(scattered[1::2])
    for answer in range(3):
        assert [event.token for event in events["r", answer]] == cold(model, prompt)
        assert events["r", answer][0].num_cached_tokens == 8 * PAGE
    assert engine.store.facts().loaded == {"host": 8 * PAGE}
    whole(engine)


class Faulty:
    """A tier that delays, cuts short, corrupts and raises, as a seeded dice says. What it corrupts, its checksum tells."""

    def __init__(self, inner: Tier, dice: random.Random, share: float, delay: float = 0.0, slow: float = 0.0) -> None:
        """Of all calls, `share` fail; all take `delay` seconds longer, and of them `slow` up to SLOW seconds more."""
        self.inner, self.dice, self.share, self.delay, self.slow, self.name = inner, dice, share, delay, slow, inner.name
        self.asked, self.waited = 0, 0.0

    def _fails(self) -> bool:
        self.asked += 1
        delay = self.delay
        if self.slow and self.dice.random() < self.slow:
            delay += self.dice.uniform(0, SLOW)
        if delay:
            time.sleep(delay)
            self.waited += delay
        return self.dice.random() < self.share

    def look(self, keys: Sequence[Key]) -> int:
        count = self.inner.look(keys)
        return self.dice.randrange(count + 1) if self._fails() else count

    def ends(self, parent: Key) -> Sequence[Card]:
        return [] if self._fails() else self.inner.ends(parent)

    def open(self, key: Key) -> Reader:
        if self._fails():
            raise Lost("absent")
        return FaultyReader(self, self.inner.open(key))

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        if self._fails():
            raise Lost("unreadable", "no space left on device")
        self.inner.save(card, layers)

    def drop(self, keys: Sequence[Key]) -> None:
        self.inner.drop(keys)

    def close(self) -> None:
        self.inner.close()


class FaultyReader:
    def __init__(self, tier: Faulty, inner: Reader) -> None:
        self._tier, self._inner, self.card = tier, inner, inner.card

    def layer(self, index: int, into: memoryview) -> None:
        self._inner.layer(index, into)
        if self._tier._fails():
            into[:] = bytes(len(into))
            raise Lost("corrupt", "a flipped bit")

    def close(self) -> None:
        self._inner.close()


def spoil(engine: Engine, dice: random.Random, share: float, delay: float = 0.0, slow: float = 0.0) -> Sequence[Faulty]:
    store = engine.store
    assert store is not None
    bad = tuple(Faulty(tier, dice, share, delay, slow) for tier in store.below)
    store.below = bad
    store.transfer.tiers.update({tier.name: tier for tier in bad})
    return bad


def test_rows_answer_on_while_another_ones_context_is_loaded(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path, kv_cache_tokens=512)
    prompt = words(10, 60)
    ask(first, prompt)
    first.close()
    engine = engine_of(model, tmp_path, kv_cache_tokens=1024)
    stuck, told = stick(engine), list[str]()
    engine.add(Request("talks", words(11, 5), greedy(450)))
    engine.step()
    engine.add(Request("loads", prompt, greedy(3)))
    while len(told) < 6:
        told += [event.request_id for event in engine.step()]
    assert {*told} == {"talks"}
    [row] = engine.scheduler.loading
    stuck.free.set()
    assert all(load.ends_within(20) for load in row.loads)
    assert {name for name, _ in drain(engine)} == {"talks", "loads"}
    whole(engine)
    engine.close()


def test_a_row_alone_begins_before_its_last_layer_is_there(tmp_path: Path) -> None:
    deep = tiny_model(layers=6)
    first = engine_of(deep, tmp_path)
    prompt = words(12, 60)
    ask(first, prompt)
    first.close()
    engine = engine_of(deep, tmp_path)
    assert engine.store is not None
    ready: list[tuple[int, int]] = []
    layer, begun = engine.pool.layer, threading.Event()
    put = engine.store.transfer.mover.put

    def watched(index: int):  # type: ignore[no-untyped-def]
        found = layer(index)
        ready.extend((index, len(load._layers)) for load in engine.pool.arrivals)  # type: ignore[attr-defined]
        begun.set()
        return found

    def last_waits(index: int, copies: Sequence[Copy]) -> None:
        if index == 5:
            begun.wait(20)
        put(index, copies)

    engine.pool.layer = watched  # type: ignore[method-assign]
    engine.store.transfer.mover.put = last_waits  # type: ignore[method-assign]
    assert tokens_of(engine, prompt) == cold(deep, prompt)
    assert ready[0][0] == 0 and ready[0][1] < 6
    engine.close()


def test_a_request_that_is_cancelled_while_its_context_comes_leaves_nothing_behind(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, tmp_path)
    ask(first, words(13, 60))
    first.close()
    engine = engine_of(model, tmp_path)
    stuck = stick(engine)
    engine.add(Request("other", words(14, 5), greedy(40)))
    engine.step()
    engine.add(Request("gone", words(13, 60), greedy(3)))
    engine.step()
    assert engine.scheduler.loading
    engine.cancel("gone")
    assert not engine.scheduler.loading
    stuck.free.set()
    drain(engine)
    whole(engine)
    engine.close()


@pytest.mark.parametrize("seed", range(int(os.environ.get("PANDO_SCHEDULES", "40"))))
def test_whatever_fails_the_answers_are_those_of_a_cold_run(
    model: Model, tmp_path: Path, seed: int, expected: "Expected", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations come, grow, leave the pool and come back, in batches, through tiers that fail or are slow, and steps that fail. Some
    outgrow the window. Where a tier is slow, a load ends steps later than one that was asked for with it, or is given up for it."""
    dice = random.Random(seed)
    options = {"max_model_len": 100, "kv_cache_tokens": dice.choice((POOL, 320, 960)), "overlap": dice.choice((False, True))}
    monkeypatch.setattr(Speeds, "pays", dice.choice((Speeds.pays, lambda *_: True)))  # a model of this size is sooner computed
    monkeypatch.setattr(Speeds, "in_time", dice.choice((Speeds.in_time, lambda *_: True)))  # who waits for it holds up others
    monkeypatch.setattr(transfer, "LATE", dice.choice((transfer.LATE, SLOW / 2)))
    engine = engine_of(model, tmp_path, host_gib=dice.choice((0, LITTLE, ENOUGH)), **options)
    [tier] = spoil(engine, dice, dice.choice((0.0, 0.02, 0.2)), slow=0.05)
    interrupt(engine, dice)
    talks = {"long": words(50, 60), "longer": words(51, 90)}
    for restart in range(2):
        for _ in range(5):
            chosen = dice.sample(range(6), dice.randrange(1, 4))
            asked = {str(each): expected.turn(each, dice.randrange(3)) for each in chosen}
            talking = dice.sample(sorted(talks), dice.choice((0, 1, 2, 2)))
            cut = [Request(name, talks[name], greedy(6), truncation=Truncation(keep=8)) for name in talking]
            events = run(engine, [*(Request(name, prompt, greedy(6)) for name, (prompt, _) in asked.items()), *cut])
            for name, (_, answer) in asked.items():
                assert [event.token for event in events[name, 0]] == answer
            for request in cut:
                answer = [event.token for event in events[request.request_id, 0]]
                assert answer == expected.of_the_rest(engine, request)
                talks[request.request_id] = [*request.prompt, *answer, *words(len(request.prompt), 25)]
            if dice.random() < 0.5:
                engine.clear_cache()
        whole(engine)
        engine.close()
        assert tier.waited > 0 or tier.asked < 300, "it was never slow"
        if not restart:
            engine = engine_of(model, tmp_path, host_gib=0, **options)
            [tier] = spoil(engine, dice, 0.05, slow=0.05)
            interrupt(engine, dice)


def interrupt(engine: Engine, dice: random.Random) -> None:
    """Some steps end between two layers, for want of memory. The engine makes them smaller, and would in the end make them no more."""
    layer, left = engine.pool.layer, [dice.randrange(4)]
    share = dice.choice((0.01, 0.1))

    def failing(index: int) -> tuple[Tensor, Tensor]:
        found = layer(index)
        if left[0] and dice.random() < share:
            left[0] -= 1
            raise torch.OutOfMemoryError
        return found

    engine.pool.layer = failing  # type: ignore[method-assign]


class Expected:
    """Conversations of several turns, and what a cold run answers. They are much the same whatever fails: each is asked for once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self._rests: dict[tuple[tuple[int, ...], tuple[bytes, ...], int | None], list[int]] = {}

    def turn(self, conversation: int, number: int) -> tuple[list[int], list[int]]:
        if (conversation, number) not in self._known:
            before, answer = self.turn(conversation, number - 1) if number else (words(conversation % 2, 20), [])
            prompt = [*before, *answer, *words(100 * conversation + number, 17)]
            self._known[conversation, number] = prompt, cold(self._model, prompt)
        return self._known[conversation, number]

    def of_the_rest(self, engine: Engine, request: Request) -> list[int]:
        """The answer to what is left of a conversation, as an engine cut it, by one that computes all of it."""
        layout = engine.truncations._recall(request.prompt, engine.admission.lineage(OURS, 0), []) or Layout()
        asked = replace(Cut(layout).request(request), request_id="r")
        key = (tuple(asked.prompt), tuple(each.digest for each in asked.runs), asked.position)
        if key not in self._rests:
            self._rests[key] = self._made_from_nothing(asked)
        return self._rests[key]

    def _made_from_nothing(self, asked: Request) -> list[int]:
        if not asked.runs:
            return cold(self._model, asked.prompt)
        return [event.token for event in run(tiny_engine(self._model, kv_cache_tokens=4096), [asked])["r", 0]]


@pytest.fixture(scope="module")
def expected(model: Model) -> Expected:
    return Expected(model)


def kept_then_opened(model: Model, folder: Path, prompt: Sequence[int]) -> Engine:
    """An engine that has a prompt on disk, and nowhere else."""
    first = engine_of(model, folder)
    ask(first, prompt)
    first.close()
    return engine_of(model, folder)


def test_a_load_that_fails_for_any_reason_is_computed(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kept_then_opened(model, tmp_path, words(20, 60))
    assert engine.store is not None

    def full(layer: int, copies: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.store.transfer.mover, "put", full)
    events = ask(engine, words(20, 60))
    assert [event.token for event in events] == cold(model, words(20, 60))
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
    whole(engine)
    engine.close()


def test_saving_that_fails_for_any_reason_costs_no_answer_and_ends(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, tmp_path)
    assert engine.store is not None

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.store.transfer.mover, "take", full)
    assert tokens_of(engine, words(21, 60)) == cold(model, words(21, 60))
    whole(engine)
    assert engine.store.facts().saved == {}
    engine.close()


def test_where_no_thread_can_be_started_no_request_waits_for_it(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "pando-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine_of(model, tmp_path)
    monkeypatch.undo()
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread not in before], "those that did start end"
    engine = engine_of(model, tmp_path)
    assert tokens_of(engine, words(25, 60)) == cold(model, words(25, 60))
    whole(engine)
    engine.close()


class Stuck(Faulty):
    """A tier whose device does not answer."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, random.Random(0), 0.0)
        self.free = threading.Event()

    def open(self, key: Key) -> Reader:
        self.free.wait(20)
        return self.inner.open(key)


def stick(engine: Engine, how: type[Stuck] = Stuck) -> Stuck:
    """The disk does not answer any more."""
    assert engine.store is not None
    stuck = how(engine.store.below[0])
    engine.store.below, engine.store.transfer.tiers["disk"] = (stuck,), stuck
    return stuck


@pytest.mark.parametrize("alone", [True, False])
def test_a_tier_that_does_not_answer_is_given_up(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    monkeypatch.setattr(transfer, "LATE", 0.05)
    prompt = words(22, 60)
    engine = kept_then_opened(model, tmp_path, prompt)
    stuck = stick(engine)
    if not alone:
        engine.add(Request("other", words(23, 5), greedy(70)))
        engine.step()
        assert engine.store is not None
        engine.store._now = lambda: time.monotonic() + 0.01 * engine.steps  # type: ignore[method-assign]  # 70 steps are most of a second
    events = run(engine, [Request("r", prompt, greedy(6))])
    assert [event.token for event in events["r", 0]] == cold(model, prompt)
    assert alone or events["other", 0][-1].finish_reason == "length"
    first = events["r", 0][0]
    assert (first.num_cached_tokens, dict(first.reuse.tiers)) == (0, {})
    assert first.reuse.miss is not None and first.reuse.miss.reason == "lost"
    stuck.free.set()
    whole(engine)
    engine.close()


@pytest.mark.parametrize("gone", [False, True])
def test_a_row_that_has_to_stop_while_it_is_loaded_is_told_of_what_came_in_the_end(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    prompt = words(10, 60)
    kept_then_opened(model, tmp_path, prompt).close()
    engine = engine_of(model, tmp_path, kv_cache_tokens=160)
    stuck = stick(engine)
    engine.add(Request("talks", words(11, 5), greedy(140)))
    engine.step()
    engine.add(Request("loads", prompt, greedy(3)))
    while not engine.scheduler.preemptions:  # by the one that came before it, which needs the room
        engine.step()
    for file in [file for file in tmp_path.rglob("*") if len(file.name) == 64] if gone else ():
        file.unlink()
    stuck.free.set()
    first = drain(engine)["loads", 0][0]
    assert engine.totals.tokens == 5 + 140 - 1 + len(prompt) - first.num_cached_tokens + 2
    assert (first.num_cached_tokens, dict(first.reuse.tiers)) == ((0, {}) if gone else (59, {"disk": 59}))
    assert (first.reuse.miss is not None and first.reuse.miss.reason == "lost") == gone
    whole(engine)
    engine.close()


def test_a_page_that_is_offered_again_while_it_is_written_leaves_host_memory(model: Model, tmp_path: Path) -> None:
    """Host memory is only on the way to a slow remote, and the pool too small for what is asked: offers are let go again and again."""
    engine = tiny_engine(model, page_size=4, kv_cache_tokens=440, remote=str(tmp_path))
    store = engine.store
    assert store is not None and store.scout is not None
    save, decided = store.scout._inner.save, threading.Event()

    def slow(card: Card, layers: Sequence[memoryview]) -> None:
        decided.wait(0.01)
        save(card, layers)

    store.scout._inner.save = slow  # type: ignore[method-assign]
    for turn in range(3):
        decided.clear()
        talk, others = words(3 * turn, 400), [words(3 * turn + 1, 400), words(3 * turn + 2, 400)]
        tokens_of(engine, talk, count=2)
        until = store.counts.saved["host"] + 60
        while store.counts.saved["host"] < until and engine.tend() is not None:
            time.sleep(0.002)
        tokens_of(engine, others[0], count=2)  # needs the room: of what is not saved yet only some is on its way
        tokens_of(engine, talk, count=2)  # is computed again, and offered again
        until = store.counts.saved["remote"] + 8
        while store.counts.saved["remote"] < until and engine.tend() is not None:
            time.sleep(0.002)
        tokens_of(engine, others[1], count=2)  # needs the room once more
        decided.set()  # what is on its way by now needs no more time
        settled(engine)
        assert [key for key in store.host._kept if not store.ledger.has(key, "host")] == [], turn
    engine.close()


def test_whoever_waits_for_pages_that_a_late_load_still_fills_takes_no_time_of_the_processor(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LATE", 0.05)
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    prompt = words(27, 90)  # there is no room for it beside the pages that its load has
    engine = kept_then_opened(model, tmp_path, prompt)
    stuck = stick(engine)
    engine.add(Request("r", prompt, greedy(6)))
    while engine.scheduler.below is not None and not engine.scheduler.below.limbo:
        engine.step()
    began = time.monotonic()
    for _ in range(20):  # between two of them others may ask for something
        assert engine.step() == []
    assert time.monotonic() - began > 20 * 0.008 and engine.scheduler.below is not None and engine.scheduler.below.limbo
    stuck.free.set()
    assert [event.token for event in drain(engine)["r", 0]] == cold(model, prompt)
    whole(engine)
    engine.close()


def test_states_that_are_no_numbers_stay_in_no_tier(tmp_path: Path) -> None:
    model = tiny_model()
    engine = engine_of(model, tmp_path)
    prompt = words(24, 40)
    good = model.decoder.head
    model.decoder.head = lambda x: good(x) * float("nan")
    assert ask(engine, prompt)[-1].finish_reason == "error"
    model.decoder.head = good
    settled(engine)
    engine.close()
    second = engine_of(model, tmp_path)
    events = ask(second, prompt)
    assert events[0].num_cached_tokens == 0
    assert [event.token for event in events] == cold(model, prompt)
    second.close()


@pytest.mark.parametrize("page", [PAGE, 32])
def test_modules_that_are_no_numbers_stay_in_no_tier_nor_what_they_were_made_behind(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    model = tiny_model()
    engine = engine_of(model, None, host_gib=ENOUGH, kv_cache_tokens=960, page_size=page)
    first = Run(tuple(words(1, 88)), 0, Origin((), 0))
    second = Run(tuple(words(2, 88)), 88, Origin((first,), 88))
    asked = Request("r", words(3, 9), greedy(6), runs=[second.part(32, 88).moved(0)])
    wanted = [event.token for event in run(tiny_engine(model), [asked])["r", 0]]
    good = model.decoder.forward

    def bad(step: Step, pool: PagePool) -> Tensor:
        logits = good(step, pool)
        pool.v[:] = float("nan")
        return logits

    model.decoder.forward = bad  # type: ignore[method-assign]
    assert run(engine, [asked])["r", 0][-1].finish_reason == "error"
    model.decoder.forward = good  # type: ignore[method-assign]
    engine.pool.v.zero_()
    assert [event.token for event in run(engine, [asked])["r", 0]] == wanted
    whole(engine)


def test_states_that_are_no_numbers_are_not_found_while_they_are_removed(tmp_path: Path) -> None:
    model, prompt = tiny_model(), words(24, 40)
    engine = engine_of(model, tmp_path)
    ask(engine, prompt)
    settled(engine)
    good, removing = model.decoder.head, threading.Event()
    assert engine.store is not None
    engine.store._writer.post(lambda: removing.wait(20))
    model.decoder.head = lambda x: good(x) * float("nan")
    assert ask(engine, prompt)[-1].finish_reason == "error"
    model.decoder.head = good
    assert all(map(engine.store.ledger.has, engine.store.host._kept)), "what is not found any more takes no room in host memory"
    events = ask(engine, prompt)
    removing.set()
    assert (events[0].num_cached_tokens, [event.token for event in events]) == (0, cold(model, prompt))
    whole(engine)
    engine.close()


def clock_of(store: Store) -> Callable[[float], None]:
    """Sets it, in seconds from now on."""
    start = store._clock()

    def move(later: float) -> None:
        store._clock = lambda: start + later  # type: ignore[method-assign]

    move(0)
    return move


def test_a_beginning_that_nobody_keeps_any_more_is_kept_again_while_the_pool_has_it(model: Model, tmp_path: Path) -> None:
    engine, prompt = engine_of(model, tmp_path, ttl=60, kv_cache_tokens=960, host_gib=ENOUGH), words(27, 60)
    store = engine.store
    assert store is not None
    move = clock_of(store)
    ask(engine, prompt)
    settled(engine)
    move(61)
    longer = [*prompt, *words(28, 20)]
    assert ask(engine, longer)[0].reuse.tiers == {}, "it is still in the pool"
    evict(engine)
    event = ask(engine, longer)[0]
    assert event.num_cached_tokens >= len(longer) - PAGE and sum(event.reuse.tiers.values()) == event.num_cached_tokens
    whole(engine)
    engine.close()


def test_what_a_tier_had_no_room_for_is_not_copied_again_with_every_turn(model: Model, tmp_path: Path) -> None:
    page = 2 * 2 * 2 * 8 * 4 * PAGE  # bytes
    engine = engine_of(model, tmp_path, kv_cache_tokens=960, host_gib=8 * page / 2**30, disk_gib=24 * page / 2**30)
    store, prompt = engine.store, words(31, 50 * PAGE)
    assert store is not None
    ask(engine, prompt)
    settled(engine)
    before = store.counts.saved["host"]
    for turn in range(4):
        prompt += words(32 + turn, 2 * PAGE)
        ask(engine, prompt)
        settled(engine)
    assert store.counts.saved["host"] <= before + 4 * 4
    engine.close()


class Stubborn(Faulty):
    """A tier that takes nothing for a while."""

    refuses = True

    def _fails(self) -> bool:
        return False

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        if self.refuses:
            raise Lost("unreadable", "it is somewhere else")
        self.inner.save(card, layers)


def test_what_a_tier_did_not_take_it_gets_with_what_is_saved_behind_it(model: Model, tmp_path: Path) -> None:
    engine, prompt = engine_of(model, tmp_path, kv_cache_tokens=960, host_gib=ENOUGH), words(29, 60)
    store = engine.store
    assert store is not None
    stubborn = Stubborn(store.below[0], random.Random(0), 0.0)
    store.below = (stubborn,)
    store.transfer.tiers["disk"] = stubborn
    ask(engine, prompt)
    settled(engine)
    assert store.counts.unsaved["unreadable"] == store.counts.saved["host"] > 0 == store.counts.saved["disk"]
    stubborn.refuses = False
    longer = [*prompt, *words(30, 40)]
    said = tokens_of(engine, longer)
    settled(engine)
    engine.close()
    other = engine_of(model, tmp_path, host_gib=ENOUGH)
    event = ask(other, longer)[0]
    assert event.reuse.tiers.get("disk", 0) >= len(longer) - PAGE and tokens_of(other, longer) == said
    other.close()


@pytest.mark.parametrize("quick", [False, True])
def test_what_nobody_used_for_too_long_is_not_found_any_more(model: Model, tmp_path: Path, quick: bool) -> None:
    """Also where nothing was kept since, and before it is removed."""
    engine, prompt = engine_of(model, tmp_path, ttl=60), words(26, 71)
    store = engine.store
    assert store is not None
    move = clock_of(store)
    ask(engine, prompt)
    evict(engine)
    move(59)
    assert sum(ask(engine, prompt)[0].reuse.tiers.values()) >= 68
    evict(engine)
    move(59 + 61)
    removing = threading.Event()
    if quick:
        store._writer.post(lambda: removing.wait(20))
    events = ask(engine, prompt)
    removing.set()
    assert (events[0].num_cached_tokens, dict(events[0].reuse.tiers)) == (0, {})
    assert [event.token for event in events] == cold(model, prompt)
    whole(engine)
    engine.close()


def test_what_another_process_used_meanwhile_stays_on_disk_and_goes_when_nobody_does(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touches, "EVERY", 0.0)
    now, prompt = [time.time()], words(26, 71)
    first, second = (engine_of(model, tmp_path, ttl=60) for _ in range(2))
    for engine in (first, second):
        store = engine.store
        assert store is not None and store._disk is not None
        for part in (store, store._disk, store._disk._folder):
            part._clock = lambda: now[0]  # type: ignore[method-assign]
    ask(first, prompt)
    evict(first)
    now[0] += 40
    assert ask(second, prompt)[0].reuse.tiers["disk"] >= 68
    evict(second)
    now[0] += 30
    ask(first, words(27, 20))  # whatever is looked for, what expired is removed
    settled(first)
    for engine in (second, first):
        events = ask(engine, prompt)
        assert sum(events[0].reuse.tiers.values()) >= 68 and [event.token for event in events] == cold(model, prompt)
        evict(engine)
    now[0] += 61
    ask(first, words(28, 20))
    settled(first)
    assert ask(first, prompt)[0].reuse.tiers == {}
    whole(first)
    for engine in (first, second):
        engine.close()


def test_what_was_too_old_when_another_page_was_kept_has_expired_and_was_not_evicted(model: Model, tmp_path: Path) -> None:
    """Long answers keep pages for as long as they last, and most of what expires does so then."""
    engine, prompt = engine_of(model, tmp_path, ttl=60, kv_cache_tokens=2 * POOL), words(26, 71)
    store = engine.store
    assert store is not None
    move = clock_of(store)
    ask(engine, prompt)
    evict(engine)
    move(59)
    engine.add(Request("another", words(27, 40), greedy(40)))
    engine.step()
    move(61)
    drain(engine)
    evict(engine)
    miss = ask(engine, prompt)[0].reuse.miss
    assert (miss and miss.reason, store.facts().lost) == ("expired", {"expired": 1})
    whole(engine)
    engine.close()


def test_an_engine_that_was_closed_still_answers(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    engine.close()
    engine.close()
    assert tokens_of(engine, words(25, 30)) == cold(model, words(25, 30))


class Deaf(Stuck):
    """A tier whose device takes nothing, and does not say so either."""

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        self.free.wait(20)

    def close(self) -> None:
        self.free.wait(20)
        self.inner.close()


@pytest.mark.parametrize("reads", [False, True])
def test_a_tier_that_takes_nothing_is_given_up_at_the_end_and_it_is_told_what_was_not_saved(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: bool
) -> None:
    prompt = words(28, 90)
    engine = kept_then_opened(model, tmp_path, prompt)
    monkeypatch.setattr(worker, "PATIENCE", 0.2)
    monkeypatch.setattr(transfer, "LATE", 0.2)
    deaf = stick(engine, Deaf)
    if reads:  # it does not answer those who read, either
        engine.add(Request("r", prompt, greedy(6)))
        engine.step()
        engine.cancel("r")
    ask(engine, words(29, 60))
    began = time.monotonic()
    engine.close()
    assert time.monotonic() < began + 5
    [told] = [record.getMessage() for record in caplog.records if "not saved" in record.getMessage()]
    assert re.search(r"1[56] pages of 4 tokens", told), told
    assert tokens_of(engine, words(29, 60)) == cold(model, words(29, 60)), "from the pool"
    deaf.free.set()


def test_what_a_slow_tier_takes_is_waited_for_as_long_as_it_takes_anything(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, prompt, told = engine_of(model, tmp_path), words(30, 80), list[bool]()
    store, taken = engine.store, threading.Semaphore(0)
    assert store is not None
    save = store.below[0].save

    def slowly(card: Card, layers: Sequence[memoryview]) -> None:
        taken.acquire(timeout=20)
        save(card, layers)

    def settles(moving: worker.Worker) -> bool:
        """Patience is at its end whenever one more page was taken."""
        reached = moving._reached()
        taken.release()
        while not reached.wait(0.001) and store._done.empty():
            pass
        told.append(reached.is_set())
        return told[-1]

    monkeypatch.setattr(worker.Worker, "settles", settles)
    monkeypatch.setattr(store.below[0], "save", slowly)
    ask(engine, prompt, count=1)
    engine.close()
    assert told.count(False) > 1
    second = engine_of(model, tmp_path)
    assert ask(second, [*prompt, 1])[0].reuse.tiers == {"disk": 80}
    second.close()
    assert "not saved" not in caplog.text


def test_a_disk_bound_below_one_page_is_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="one page of 4 tokens takes"):
        engine_of(model, tmp_path, disk_gib=1e-9)


def test_a_directory_that_cannot_be_written_costs_no_answer(model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any more: at the start it is refused."""
    engine = engine_of(model, tmp_path / "store")
    assert engine.store is not None
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("not a directory")
    assert tokens_of(engine, words(15, 30)) == cold(model, words(15, 30))
    settled(engine)
    facts = engine.store.facts()
    assert facts.unsaved == {"unreadable": facts.saved["host"]} and facts.saved["host"] == 8 and "disk" not in facts.saved
    [said] = [record.getMessage() for record in caplog.records if "takes no pages" in record.getMessage()]
    assert said.startswith("a page could not be kept: ") and "(Not a directory)" in said and "lost" not in said
    engine.close()


def test_a_directory_that_is_removed_while_it_is_used_is_made_again(model: Model, tmp_path: Path) -> None:
    engine, prompt = engine_of(model, tmp_path / "a" / "store"), words(15, 40)
    ask(engine, words(16, 40))
    evict(engine)
    shutil.rmtree(tmp_path / "a")
    assert tokens_of(engine, prompt) == cold(model, prompt)
    assert tokens_of(engine, words(16, 40)) == cold(model, words(16, 40))
    engine.close()
    second = engine_of(model, tmp_path / "a" / "store")
    assert ask(second, prompt)[0].reuse.tiers == {"disk": 39}
    second.close()


def test_nothing_is_kept_below_unless_it_is_asked_for(model: Model) -> None:
    assert LLM.from_config(tiny_config(), model).engine.store is None


def test_what_is_placed_for_a_step_that_is_not_taken_comes_all_the_same() -> None:
    """It is asked for while the last step of another runs, there is nothing to compute, and its client leaves."""
    engine = engine_of(tiny_model(), None, overlap=True, host_gib=0.01)
    known = words(1, 60)
    run(engine, [Request("first", known, greedy(6))])
    evict(engine)
    engine.add(Request("short", words(2, 5), greedy(3)))
    while (row := next(iter(engine.answers))) is not None and len(row.tokens) != row.last - 1:
        engine.step()
    engine.add(Request("back", known, greedy(6)))
    engine.step()
    assert any(row.load is not None for row in engine.scheduler.loading), "nothing was placed: this tests nothing"
    engine.cancel("back")
    drain(engine)
    settled(engine)
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_miss_is_that_of_the_admission_that_counts(tmp_path: Path) -> None:
    """A row has to stop while a part of its context comes, and another process writes the rest before it is admitted again."""
    model, known = tiny_model(), words(1, 60)
    engine = engine_of(model, tmp_path, kv_cache_tokens=400)
    engine.add(Request("first", known, greedy(1)))
    row = next(iter(engine.answers))
    drain(engine)
    evict(engine)
    assert engine.store is not None
    engine.store.discard(row.keys[10:])  # as if the bound of the disk had taken these
    settled(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speeds, "in_time", lambda *_: False)
        engine.add(Request("busy", words(2, 5), greedy(40)))
        engine.step()
        engine.add(Request("r", known, greedy(1)))
        engine.step()
        row = next(row for row in engine.answers if row.request_id == "r")
        assert row in engine.scheduler.loading and row.miss is not None
        engine.scheduler._preempt(row)
        other = engine_of(model, tmp_path, kv_cache_tokens=400)
        run(other, [Request("o", known, greedy(1))])
        settled(other)
        other.close()
        found = drain(engine)["r", 0][-1]
    assert (found.num_cached_tokens, found.reuse.miss) == (59, None)
    engine.close()
