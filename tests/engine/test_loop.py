"""The engine in its thread: whatever is posted, from wherever and whenever, gets its answer or an end."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from pando.engine.engine import Engine
from pando.engine.facts import StepFacts
from pando.engine.loop import FAILURES, EngineLoop
from pando.engine.request import Request, TokenEvent
from pando.engine.row import Schedule
from pando.errors import InvalidPrompt
from pando.store import transfer
from pando.store.speeds import Speeds

from ..tiny import greedy, run, tiny_engine
from .test_store import settled

pytestmark = pytest.mark.usefixtures("overlap")

WAIT = 20.0  # seconds; only a failing test waits so long
PROMPTS = {f"request {i}": [(11 * i + j) % 256 for j in range(5 + i)] for i in range(12)}


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ran earlier in this process keeps the log to its journal."""
    monkeypatch.setattr(logging.getLogger("pando"), "propagate", True)


class Desk:
    """What comes out of a loop, and when a request has ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.lost: list[str] = []
        self.observed: list[StepFacts] = []
        self._ends: dict[str, threading.Event] = {}

    def end_of(self, name: str) -> threading.Event:
        return self._ends.setdefault(name, threading.Event())

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                self.end_of(event.request_id).set()

    def give_up(self, names: Sequence[str]) -> None:
        self.lost += names
        for name in names:
            self.end_of(name).set()

    def answer(self, name: str) -> list[int]:
        assert self.end_of(name).wait(WAIT), f"{name} never ended"
        return self.tokens.get(name, [])


@contextmanager
def looping(engine: Engine | None = None) -> Iterator[tuple[EngineLoop, Desk]]:
    desk = Desk()
    loop = EngineLoop(lambda: engine or tiny_engine(), desk.deliver, desk.give_up, lambda seconds, facts: desk.observed.append(facts))
    loop.start().result(WAIT)
    try:
        yield loop, desk
    finally:
        loop.stop(WAIT)
        assert not loop.alive


def alone(prompt: list[int], count: int = 16) -> list[int]:
    return [event.token for event in run(tiny_engine(), [Request("only", prompt, greedy(count))])["only", 0]]


def failing(engine: Engine, times: int) -> list[int]:
    """Makes the model fail so many times, in the middle of a step; counts the failures."""
    forward, failed = engine._forward, [0]

    def maybe(schedule: Schedule) -> Tensor:
        logits = forward(schedule)
        if failed[0] < times:
            failed[0] += 1
            raise RuntimeError("no memory, say")
        return logits

    engine._forward = maybe  # type: ignore[method-assign]
    return failed


def idle(loop: EngineLoop) -> Engine:
    """The engine when nothing is left in it."""
    assert not loop.call(lambda engine: engine.has_work).result(WAIT)
    return loop.call(lambda engine: engine).result(WAIT)


def test_requests_posted_from_many_threads_are_answered_as_they_are_alone():
    with looping() as (loop, desk):
        posted: dict[str, Future[None]] = {}

        def post(name: str) -> None:
            posted[name] = loop.add(Request(name, PROMPTS[name], greedy()))

        threads = [threading.Thread(target=post, args=(name,)) for name in PROMPTS]
        release = blocked(loop)
        for thread in threads[:3]:
            thread.start()
        for thread in threads[:3]:
            thread.join()
        release()  # these run together, and the others come meanwhile
        for thread in threads[3:]:
            thread.start()
        for thread in threads[3:]:
            thread.join()
        assert {name: desk.answer(name) for name in PROMPTS} == {name: alone(prompt) for name, prompt in PROMPTS.items()}
        assert all(future.result(WAIT) is None for future in posted.values())
        assert desk.observed and max(facts.rows for facts in desk.observed) > 1
        engine = idle(loop)
        assert engine.pages_in_use == engine.tree.pages


def test_a_refused_request_tells_its_poster_and_nobody_else():
    with looping() as (loop, desk):
        good = loop.add(Request("good", PROMPTS["request 1"], greedy()))
        with pytest.raises(InvalidPrompt, match="empty"):
            loop.add(Request("bad", [], greedy())).result(WAIT)
        assert good.result(WAIT) is None
        assert desk.answer("good") == alone(PROMPTS["request 1"])
        assert "bad" not in desk.tokens


def test_a_question_that_fails_belongs_to_whoever_asked():
    with looping() as (loop, _):
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda engine: 1 // 0).result(WAIT)
        with pytest.raises(SystemExit):
            loop.call(lambda engine: leave()).result(WAIT)
        assert loop.call(lambda engine: 7).result(WAIT) == 7


def leave() -> None:
    raise SystemExit(3)


def test_a_cancelled_request_leaves_its_row_and_its_pages_at_once():
    with looping() as (loop, desk):
        begun, cancelled = threading.Event(), threading.Event()
        deliver = desk.deliver

        def watch(events: Sequence[TokenEvent]) -> None:
            deliver(events)
            begun.set()
            cancelled.wait(WAIT)

        loop._deliver = watch
        loop.add(Request("long", PROMPTS["request 2"], greedy(400))).result(WAIT)
        assert begun.wait(WAIT)
        loop.cancel("long")
        cancelled.set()
        engine = idle(loop)
        assert len(desk.tokens["long"]) < 400
        assert engine.pages_in_use == engine.tree.pages
        assert not engine.scheduler.running and not engine.scheduler.waiting


def test_cancelling_what_is_unknown_does_nothing():
    with looping() as (loop, desk):
        loop.cancel("nobody")
        loop.add(Request("good", PROMPTS["request 1"], greedy()))
        assert desk.answer("good") == alone(PROMPTS["request 1"])


@pytest.mark.parametrize("times", [1, FAILURES - 1])
def test_after_a_step_that_failed_requests_go_on_and_answer_as_if_it_had_not(times: int, caplog: pytest.LogCaptureFixture):
    engine = tiny_engine()
    failed = failing(engine, times)
    with caplog.at_level(logging.ERROR), looping(engine) as (loop, desk):
        for name in PROMPTS:
            loop.add(Request(name, PROMPTS[name], greedy()))
        assert {name: desk.answer(name) for name in PROMPTS} == {name: alone(prompt) for name, prompt in PROMPTS.items()}
        assert desk.lost == [] and failed == [times]
    assert sum("a step failed" in record.message for record in caplog.records) == times


def test_requests_that_no_step_can_answer_are_given_up_and_the_next_one_is_answered(caplog: pytest.LogCaptureFixture):
    engine = tiny_engine()
    failed = failing(engine, FAILURES)
    with caplog.at_level(logging.ERROR), looping(engine) as (loop, desk):

        def post_both(engine: Engine) -> None:
            engine.add(Request("first", PROMPTS["request 1"], greedy()))
            engine.add(Request("second", PROMPTS["request 2"], greedy(n=2)))

        loop.call(post_both).result(WAIT)
        assert desk.answer("first") == desk.answer("second") == []
        assert desk.lost == ["first", "second"] and failed == [FAILURES]
        loop.add(Request("third", PROMPTS["request 3"], greedy()))
        assert desk.answer("third") == alone(PROMPTS["request 3"])
        assert idle(loop).pages_in_use == engine.tree.pages


@pytest.mark.parametrize("place", ["_forward", "_settle"])
def test_requests_are_given_up_although_not_every_call_fails(place: str, monkeypatch: pytest.MonkeyPatch):
    """The first part of a prompt may be computed again and again; and where steps overlap, a call may do no more than ask for one."""
    engine, failed = tiny_engine(max_num_batched_tokens=8), [0]
    done = getattr(engine, place)

    def failing(step: Any) -> Any:
        schedule: Schedule = step if place == "_forward" else step.schedule
        if [row.request_id for row in schedule.rows] == ["bad"] and schedule.starts[0] >= (8 if place == "_forward" else 0):
            failed[0] += 1
            raise RuntimeError("no memory, say")
        return done(step)

    monkeypatch.setattr(engine, place, failing)
    with looping(engine) as (loop, desk):
        loop.add(Request("bad", [7] * 20, greedy()))
        assert desk.answer("bad") == []
        assert desk.lost == ["bad"] and failed == [FAILURES]
        loop.add(Request("good", PROMPTS["request 3"], greedy()))
        assert desk.answer("good") == alone(PROMPTS["request 3"])


def test_requests_after_those_that_were_given_up_have_as_many_tries(caplog: pytest.LogCaptureFixture):
    engine = tiny_engine()
    failed = failing(engine, FAILURES)
    with caplog.at_level(logging.ERROR), looping(engine) as (loop, desk):
        loop.add(Request("first", PROMPTS["request 1"], greedy()))
        desk.answer("first")
        loop.call(lambda engine: failed.__setitem__(0, 1)).result(WAIT)  # two more failures are left
        loop.add(Request("second", PROMPTS["request 2"], greedy()))
        assert desk.answer("second") == alone(PROMPTS["request 2"])
        assert desk.lost == ["first"] and failed == [FAILURES]


def blocked(loop: EngineLoop) -> Callable[[], None]:
    """Holds the engine's thread until it is let go."""
    entered, gate = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        entered.set()
        gate.wait(WAIT)

    loop.call(hold)
    assert entered.wait(WAIT)
    return gate.set


def test_what_is_posted_when_the_loop_stops_is_answered_or_cancelled_but_never_left():
    with looping() as (loop, _):
        release = blocked(loop)
        posted = [loop.call(lambda engine, i=i: i) for i in range(20)]
        stopping = threading.Thread(target=loop.stop, args=(WAIT,))
        stopping.start()
        release()
        stopping.join(WAIT)
        assert not loop.alive
        for i, future in enumerate(posted):
            assert future.done() and (future.cancelled() or future.result() == i)


def test_after_the_stop_nothing_is_delivered_though_a_step_may_still_run():
    engine = tiny_engine()
    inside, gate = threading.Event(), threading.Event()
    forward = engine._forward

    def slow(schedule: Schedule) -> Tensor:
        inside.set()
        gate.wait(WAIT)
        return forward(schedule)

    engine._forward = slow  # type: ignore[method-assign]
    with looping(engine) as (loop, desk):
        loop.add(Request("first", PROMPTS["request 1"], greedy()))
        assert inside.wait(WAIT)
        loop.stop(timeout=0)
        assert loop.alive
        gate.set()
        loop.stop(WAIT)
        assert desk.tokens == {} and not loop.alive


def test_what_is_posted_after_the_stop_is_cancelled():
    with looping() as (loop, desk):
        loop.stop(WAIT)
        with pytest.raises(CancelledError):
            loop.call(lambda engine: 1).result(WAIT)
        with pytest.raises(CancelledError):
            loop.add(Request("late", PROMPTS["request 1"], greedy())).result(WAIT)
        loop.cancel("late")  # a request that ends while the loop stops does this
        assert desk.tokens == {}


def test_posts_that_race_with_the_stop_all_come_to_an_end():
    for _ in range(20):
        with looping() as (loop, _):
            posted: list[Future[int]] = []
            posting = threading.Thread(target=lambda: posted.extend(loop.call(lambda engine: 1) for _ in range(200)))  # noqa: B023
            posting.start()
            loop.stop(WAIT)
            posting.join(WAIT)
        assert len(posted) == 200
        assert all(future.done() for future in posted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_loop_dies_of_its_own_error_nobody_waits_for_ever():
    engine = tiny_engine()
    with looping(engine) as (loop, desk):
        release = blocked(loop)
        asked = loop.add(Request("first", PROMPTS["request 1"], greedy()))
        desk.deliver = loop._deliver = lambda events: 1 // 0  # type: ignore[method-assign, assignment]
        release()
        assert asked.result(WAIT) is None
        assert desk.answer("first") == [] and desk.lost == ["first"]
        loop._thread.join(WAIT)
        with pytest.raises(CancelledError):
            loop.call(lambda engine: 1).result(WAIT)


def test_a_tier_that_hangs_while_a_step_fails_costs_time_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate, prompt = tiny_engine(kv_cache_tokens=160, host_gib=0.01), threading.Event(), PROMPTS["request 11"] * 4
    assert engine.store is not None
    run(engine, [Request("before", prompt, greedy(1))])
    settled(engine)
    engine.clear_cache()
    monkeypatch.setattr(transfer, "LATE", 0.05)
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    load = engine.store.transfer.load

    def hang(*given: Any) -> Any:
        gate.wait(WAIT)
        return load(*given)

    monkeypatch.setattr(engine.store.transfer, "load", hang)
    failing(engine, 1)
    try:
        with looping(engine) as (loop, desk):
            loop.add(Request("first", prompt, greedy()))
            assert desk.answer("first") == alone(prompt)
            assert engine.pages.free + engine.tree.pages < engine.pages.count, "what may still be written to is nobody's"
            gate.set()
            loop.call(settled).result(WAIT)
            assert loop.call(lambda engine: engine.pages.free + engine.tree.pages).result(WAIT) == engine.pages.count
    finally:
        gate.set()


def test_pins_run_out_while_nobody_asks_for_anything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pando.engine.loop.IDLE", 0.01)
    engine = tiny_engine()
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    with looping(engine) as (loop, desk):
        request = Request("first", PROMPTS["request 8"], greedy(1))
        loop.add(request)
        desk.answer("first")
        pin = loop.call(lambda engine: engine.pin(request.prompt, request.tenant, 0, 5.0)).result(WAIT)
        assert pin.tokens > 0 and loop.call(lambda engine: engine.pins.pages).result(WAIT) > 0
        now[0] = 6.0
        waited = threading.Event()
        for _ in range(int(WAIT / 0.01)):
            if not engine.pins.pages:
                break
            waited.wait(0.01)
        assert engine.pins.pages == 0


def test_an_engine_that_cannot_be_made_says_why() -> None:
    def make() -> Engine:
        raise InvalidPrompt("no such model")

    loop = EngineLoop(make, lambda events: None, lambda names: None)
    with pytest.raises(InvalidPrompt, match="no such model"):
        loop.start().result(WAIT)
    with pytest.raises(CancelledError):
        loop.call(lambda engine: engine.stats()).result(WAIT)
    loop.stop(WAIT)


def test_the_engine_is_made_and_run_in_one_thread() -> None:
    threads = []

    def make() -> Engine:
        threads.append(threading.get_ident())
        return tiny_engine()

    loop = EngineLoop(make, lambda events: None, lambda names: None)
    loop.start().result(WAIT)
    threads.append(loop.call(lambda engine: threading.get_ident()).result(WAIT))
    loop.stop(WAIT)
    assert threads[0] == threads[1] != threading.get_ident()


def test_what_is_posted_before_an_engine_that_never_comes_is_cancelled() -> None:
    go = threading.Event()

    def make() -> Engine:
        go.wait(WAIT)
        raise RuntimeError("no model")

    loop = EngineLoop(make, lambda events: None, lambda lost: None)
    made, posted = loop.start(), loop.call(lambda engine: 1)
    go.set()
    with pytest.raises(RuntimeError):
        made.result(WAIT)
    with pytest.raises(CancelledError):
        posted.result(WAIT)
