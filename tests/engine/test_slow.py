"""Tiers that are slow, silent or expired: what is kept there is computed, in time, and the answer says why."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pando.engine import pace
from pando.engine.engine import Engine
from pando.engine.pace import measure
from pando.engine.request import Request, Tenant, TokenEvent, Truncation
from pando.errors import PromptTooLong
from pando.kv.run import Origin, Run
from pando.kv.segment import Key
from pando.model.load import Model
from pando.store import scout, speeds
from pando.store.tier import Card, Lost, Tier
from pando.store.transfer import Load
from tests.engine.test_store import Faulty, ask, cold, engine_of, evict, kept_then_opened, settled, spoil, stick, tokens_of, whole, words
from tests.tiny import drain, greedy, run, tiny_llm, tiny_model

PROMPT = words(1, 60)
ENOUGH = 0.01  # GiB
WINDOW = 256  # tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def computes(engine: Engine, seconds: float) -> None:
    """A token takes so long, whatever else this machine does."""
    assert engine.store is not None
    engine.store.speeds.computed(1, seconds)
    engine.store.speeds.computed = lambda tokens, seconds: None  # type: ignore[method-assign]


def test_how_fast_prompts_are_computed_is_known_before_anyone_asks(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    assert engine.store is not None and engine.store.speeds.patience(10**6) is None
    measure(engine)
    assert (engine.store.speeds.patience(10**9) or 0) > speeds.LEAST
    whole(engine)
    assert ask(engine, PROMPT)[0].num_cached_tokens == 0 and not engine.store.facts().loaded
    engine.close()


def test_where_there_is_no_memory_to_measure_with_an_engine_starts_all_the_same(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(model, tmp_path)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.decoder, "forward", full)
        measure(engine)
    assert "not known yet" in caplog.text
    assert [event.token for event in ask(engine, PROMPT)] == cold(model, PROMPT)
    whole(engine)


def test_a_library_measures_computing_before_it_first_chooses_to_load(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, options = list[Engine](), {"disk_gib": ENOUGH, "disk_dir": str(tmp_path), "page_size": 4, "kv_cache_tokens": 1024}

    def counted(engine: Engine) -> None:
        measured.append(engine)
        measure(engine)

    monkeypatch.setattr(pace, "measure", counted)
    long, short = words(1, 200), words(2, 60)
    with tiny_llm(model, **options) as llm:
        [answer] = llm.generate([long], greedy(20))
        llm.generate([short], greedy(3))
        assert not measured, "nothing is kept yet: there is nothing to choose, and what is computed tells"
    with tiny_llm(model, **options) as llm:
        talk = llm.stream(words(3, 9), greedy(60))
        said = [next(talk) for _ in range(3)]  # so that a step is moved on when it is measured
        assert llm.engine.store is not None and llm.engine.store.speeds.patience(10**6) is None and not measured
        [short_again] = llm.generate([short], greedy(3))
        assert short_again.reuse.tiers and not measured, "a few tokens are loaded in less time than a measurement takes"
        [again] = llm.generate([long], greedy(20))
        assert len(measured) == 1 and (llm.engine.store.speeds.patience(10**9) or 0) > speeds.LEAST
        assert again.reuse.tiers["disk"] > 150 and again.outputs[0].token_ids == answer.outputs[0].token_ids
        tokens = [event.token for event in (*said, *talk)]
        whole(llm.engine)
    assert tokens == cold(model, words(3, 9), 60)
    with tiny_llm(model, **options) as llm:
        assert llm.generate([long], greedy(1))[0].reuse.tiers and len(measured) == 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_load_is_given_up_when_computing_would_long_have_been_done(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(speeds, "LEAST", 0.1)
    engine = kept_then_opened(model, tmp_path, PROMPT)
    assert engine.store is not None
    computes(engine, 0.0001)
    stuck, load, begun = stick(engine), engine.store.load, list[Load]()
    monkeypatch.setattr(engine.store, "load", lambda *given: (begun.append(load(*given)), begun[-1])[1])
    if not alone:
        engine.add(Request("other", words(2, 5), greedy(90)))
        engine.step()
    engine.add(Request("r", PROMPT, greedy(1)))
    while not (events := [event for event in engine.step() if event.request_id == "r"]):
        pass
    assert [(each.patience, each.done) for each in begun] == [(0.1, False)], "it takes longer still"
    stuck.free.set()
    drain(engine)
    assert events[0].token == cold(model, PROMPT, 1)[0]
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
    assert engine.store.facts().lost == {"late": 1}
    whole(engine)
    engine.close()


def test_a_tier_that_was_given_up_once_is_left_and_the_answer_says_that_it_is_slow(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "LEAST", 0.1)
    other = [*words(3, 60)]
    first = engine_of(model, tmp_path)
    ask(first, other)
    settled(first)
    first.close()
    engine = kept_then_opened(model, tmp_path, PROMPT)
    computes(engine, 0.0001)  # all of it in a tenth of the time that a load gets
    stuck = stick(engine)
    assert engine.store is not None
    ask(engine, PROMPT)
    stuck.free.set()
    settled(engine)
    before = engine.store.facts().recomputed
    events = ask(engine, other)
    assert [event.token for event in events] == cold(model, other)
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "slow"
    facts = engine.store.facts()
    assert (facts.lost, facts.recomputed - before) == ({"late": 1}, 59)
    whole(engine)
    engine.close()


def test_modules_that_are_too_slow_to_load_say_so_as_well(model: Model) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH, kv_cache_tokens=400)
    assert engine.store is not None
    asked = Request("r", words(3, 9), greedy(6), runs=(Run(tuple(words(1, 40)), 0, Origin((), 0)),))
    wanted = [event.token for event in run(engine, [asked])["r", 0]]
    evict(engine)
    engine.store.speeds.gave_up("host", speeds.Moved(1, 10.0))
    events = run(engine, [asked])["r", 0]
    assert [event.token for event in events] == wanted
    assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "slow"
    whole(engine)


@pytest.mark.parametrize("reason", ["slow", "expired"])
def test_what_a_conversation_that_is_cut_does_not_load_is_counted_once(model: Model, reason: str) -> None:
    """It is looked for when it is decided how to cut, and again by the row."""
    engine = engine_of(model, None, host_gib=ENOUGH, max_model_len=100, ttl=60)
    store, history = engine.store, words(5, 90)
    assert store is not None
    history += [*tokens_of(engine, history), *words(6, 20)]
    asked = Request("r", history, greedy(6), truncation=Truncation())
    assert run(engine, [asked])["r", 0][0].reuse.truncated.moved
    evict(engine)
    start = store._clock()
    if reason == "slow":
        store.speeds.gave_up("host", speeds.Moved(1, 10.0))
    else:
        store._clock = lambda: start + 61  # type: ignore[method-assign]
    told = run(engine, [replace(asked, prompt=[*history, 1, 2, 3])])["r", 0][0].reuse
    assert told.miss.reason == reason and told.truncated.ranges == ((4, 72),)
    assert (store.facts().recomputed, store.facts().lost) == ((4, {}) if reason == "slow" else (0, {"expired": 1}))
    whole(engine)


def test_what_is_nearer_is_loaded_although_the_rest_is_too_slow(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, None, remote=str(tmp_path))
    ask(first, PROMPT)
    first.close()
    engine = engine_of(model, None, remote=str(tmp_path), host_gib=ENOUGH)
    assert engine.store is not None
    engine.store.speeds.computed(1, 0.01)
    engine.store.speeds.gave_up("remote", speeds.Moved(1, 10.0))
    ask(engine, PROMPT[:33], count=1)
    evict(engine)
    before = engine.store.facts().recomputed
    events = ask(engine, PROMPT)
    assert [event.token for event in events] == cold(model, PROMPT)
    assert events[0].reuse.tiers == {"host": 32}
    assert events[0].reuse.miss is not None and (events[0].reuse.miss.reason, events[0].reuse.miss.token) == ("slow", 32)
    assert engine.store.facts().recomputed - before == 59 - 32
    engine.close()


def test_loads_are_measured_from_the_first_on_also_those_that_fail(model: Model, tmp_path: Path) -> None:
    engine = kept_then_opened(model, tmp_path, PROMPT)
    store, told = engine.store, dict[str, speeds.Moved]()
    assert store is not None
    store.speeds.moved = lambda tier, moved: told.update({tier: moved})  # type: ignore[method-assign]
    spoil(engine, Tenth(), 0.5, delay=0.001)
    ask(engine, PROMPT)
    settled(engine)
    assert store.facts().lost and 0 < told["disk"].size < 15 * store._page_bytes and told["disk"].seconds > 0.01
    engine.close()


class Tenth(random.Random):
    """Says at the 25th question that something fails."""

    asked = 0

    def random(self) -> float:
        self.asked += 1
        return 0.0 if self.asked == 25 else 1.0


def test_what_expired_is_told_from_what_was_evicted(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path, ttl=60)
    ask(engine, PROMPT)
    evict(engine)
    store = engine.store
    assert store is not None
    start = store._clock()
    store._clock = lambda: start + 61  # type: ignore[method-assign]
    for reason in ("expired", None):
        events = ask(engine, [*PROMPT, 1])
        assert [event.token for event in events] == cold(model, [*PROMPT, 1])
        assert (events[0].reuse.miss.reason if events[0].reuse.miss else None) == reason
    assert store.facts().lost == {"expired": 1}
    engine.close()


class Silent(Faulty):
    """A remote that does not answer."""

    asked = 0

    def look(self, keys: Sequence[Key]) -> int:
        Silent.asked += 1
        raise Lost("unreadable", "it is gone")

    def ends(self, parent: Key) -> Sequence[Card]:
        Silent.asked += 1
        raise Lost("unreadable", "it is gone")


def test_a_remote_that_does_not_say_what_it_has_is_counted_and_asked_once_for_a_request(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, None, remote=str(tmp_path))
    ask(engine, PROMPT)
    evict(engine)
    store = engine.store
    assert store is not None
    gone = Silent(store.below[-1], random.Random(0), 0.0)
    store.below = (*store.below[:-1], gone)
    for prompt in (words(5, 60), words(6, 60)):
        events = ask(engine, prompt)
        assert [event.token for event in events] == cold(model, prompt)
        assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
    assert store.facts().unanswered == {"unreadable": 2} and Silent.asked == 2
    events = ask(engine, [*words(6, 60), *(event.token for event in events), *words(7, 5)])
    assert events[0].reuse.miss is None, "all that is known of it was in the pool"
    engine.close()


class Slowly(Faulty):
    """A remote that takes its time to say what it has."""

    seconds, sleep = 0.3, staticmethod(time.sleep)

    def look(self, keys: Sequence[Key]) -> int:
        self.sleep(self.seconds)
        return self.inner.look(keys)

    def ends(self, parent: Key) -> Sequence[Card]:
        self.sleep(self.seconds)
        return self.inner.ends(parent)


class Held(Faulty):
    """A remote that says what it has when it is let."""

    def __init__(self, inner: Tier, dice: random.Random, share: float) -> None:
        super().__init__(inner, dice, share)
        self.free = threading.Event()

    def look(self, keys: Sequence[Key]) -> int:
        self._wait()
        return self.inner.look(keys)

    def ends(self, parent: Key) -> Sequence[Card]:
        self._wait()
        return self.inner.ends(parent)

    def _wait(self) -> None:
        if not self.free.wait(20):
            raise Lost("late", "whoever lets it waits for it")


def remote_of(engine: Engine, how: type[Any] = Slowly) -> Any:
    assert engine.store is not None and engine.store.scout is not None
    inner = engine.store.scout._inner  # type: ignore[attr-defined]
    made = engine.store.scout._inner = how(inner, random.Random(0), 0.0)  # type: ignore[attr-defined]
    return made


def test_asking_a_remote_holds_up_nobody_else(model: Model, tmp_path: Path) -> None:
    first = engine_of(model, None, remote=str(tmp_path))
    ask(first, PROMPT)
    first.close()
    engine = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=960)
    engine.add(Request("talks", words(2, 5), greedy(400)))
    while not engine.step():
        pass
    remote, asks = remote_of(engine, Held), list[TokenEvent]()
    engine.add(Request("asks", PROMPT, greedy(3)))
    goes_on(engine)
    remote.free.set()
    while not asks:
        asks = [event for event in engine.step() if event.request_id == "asks"]
    assert asks[0].token == cold(model, PROMPT)[0] and asks[0].reuse.tiers == {"remote": 59}
    drain(engine)
    whole(engine)
    engine.close()


def goes_on(engine: Engine) -> None:
    """Who talks gets tokens, and nobody else does."""
    told = list[str]()
    while len(told) < 6:
        told += [event.request_id for event in engine.step()]
    assert {*told} == {"talks"}


def talking_beside_a_silent_remote(model: Model, shared: Path) -> tuple[Engine, Held]:
    """An engine that answers someone, and does not hear yet what a remote has."""
    engine = engine_of(model, None, remote=str(shared), kv_cache_tokens=1600, max_model_len=WINDOW)
    engine.add(Request("talks", words(2, 5), greedy(WINDOW - 10)))
    while not engine.step():
        pass
    return engine, remote_of(engine, Held)


def test_how_a_conversation_is_cut_is_asked_of_a_remote_while_others_go_on(model: Model, tmp_path: Path) -> None:
    history = words(1, 200)
    first = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=1600, max_model_len=WINDOW)
    ask(first, history)
    asked = Request("asks", [*history, *words(3, 60)], greedy(3), truncation=Truncation())
    beside = [event.token for event in run(first, [asked])["asks", 0]]
    first.close()
    (engine, remote), heard = talking_beside_a_silent_remote(model, tmp_path), list[TokenEvent]()
    engine.add(asked)
    assert engine.cutting.waiting == ["asks"] and engine.has_work
    goes_on(engine)
    remote.free.set()  # of the cut, and then of each of its runs
    while not heard:
        heard = [event for event in engine.step() if event.request_id == "asks"]
    truncated = heard[0].reuse.truncated
    assert truncated is not None and truncated.moved > 50 and truncated.recomputed is None, "what was dropped elsewhere goes on here"
    assert heard[0].reuse.tiers["remote"] > 50
    drain(engine)
    assert [heard[0].token] == beside[:1]
    whole(engine)
    engine.close()


def test_a_conversation_that_is_given_up_while_a_remote_is_asked_is_forgotten(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=1600, max_model_len=WINDOW)
    remote_of(engine)
    engine.add(Request("asks", words(1, 260), greedy(3), truncation=Truncation()))
    engine.cancel("asks")
    assert not engine.has_work
    with pytest.raises(PromptTooLong):  # what is wrong with a request is said before anyone is asked
        engine.add(Request("asks", words(1, 260), greedy(3), truncation=Truncation(keep=259)))
    assert not engine.has_work
    engine.close()


def test_whether_a_remote_has_modules_is_asked_while_others_go_on(model: Model, tmp_path: Path) -> None:
    opening = Run(tuple(words(4, 40)), 0, Origin((), 0))
    runs = [opening, Run(tuple(words(5, 40)), 40, Origin((opening,), 40))]
    first = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=1600, max_model_len=WINDOW)
    assert first.encode(runs, Tenant()) == 2
    drain(first)
    first.close()
    engine, remote = talking_beside_a_silent_remote(model, tmp_path)
    assert engine.encode(runs, Tenant()) == 2 and engine.unmade(runs, Tenant()) == 2
    goes_on(engine)
    assert engine.unmade(runs, Tenant()) == 2
    remote.free.set()
    while engine.unmade(runs, Tenant()):
        engine.step()
    assert engine.store is not None and engine.store.facts().loaded == {"remote": 80}
    assert all(engine.holds(each, Tenant()) for each in runs)
    drain(engine)
    whole(engine)
    engine.close()


def test_a_remote_is_asked_once_for_all_that_a_request_needs_and_what_begins_alike_is_asked_for_as_well(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, None, remote=str(tmp_path))
    remote, threads = remote_of(engine), list[str]()

    def told(keys: Sequence[Key]) -> int:
        threads.append(threading.current_thread().name)
        return 0

    monkeypatch.setattr(remote, "look", told)
    for tail in (3, 4):
        ask(engine, [*words(8, 30), *words(tail, 30)])
    assert threads == ["pando-look"] * 2
    engine.close()


def test_a_remote_that_hangs_is_waited_for_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "AWAITED", 0.2)
    engine, now = engine_of(model, None, remote=str(tmp_path)), [0.0]
    remote, asking = remote_of(engine, Held), engine.store.scout  # type: ignore[union-attr]
    monkeypatch.setattr(asking, "_clock", lambda: now[0])
    monkeypatch.setattr(asking, "listen", lambda seconds: now.__setitem__(0, now[0] + seconds))  # no other time passes
    for number in range(4):
        began = now[0]
        events = ask(engine, words(number, 60))
        assert [event.token for event in events] == cold(model, words(number, 60))
        assert events[0].reuse.miss is not None and events[0].reuse.miss.reason == "lost"
        assert now[0] == began if number else now[0] > 0.2
    assert engine.store is not None and engine.store.facts().unanswered == {"late": 4}
    remote.free.set()
    engine.close()
