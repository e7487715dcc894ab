"""Ctrl-C at any moment, where a process answers by itself: nothing is lost, leaked or wrong, and it ends."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pando.engine import below, engine, holding, llm, lock, scheduler, stream, whole
from pando.engine.request import SamplingParams
from pando.kv import pages, tree
from pando.model.load import Model
from pando.store import catalogue, departures, host, ledger, store, touches, worker

from ..tiny import Interrupt, at_rest, tiny_llm, tiny_model

pytestmark = pytest.mark.usefixtures("overlap")

TAKING = llm, lock, stream, engine
KEEPING = *TAKING, whole, scheduler, holding, below, store, ledger, catalogue, departures, touches, host, tree, pages
CLOSING = engine, scheduler, below, store, worker


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def test_ctrl_c_takes_no_tokens_from_who_is_not_interrupted(model: Model) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    wanted = tiny_llm(model).generate([[4, 5, 6]], params)[0].outputs[0].token_ids
    place, came = 1, True
    while came:
        made = tiny_llm(model)
        one, other = made.stream([1, 2, 3], params), made.stream([4, 5, 6], params)
        try:
            with Interrupt(TAKING, place):
                next(one)  # which finds tokens for both
            came = False
        except KeyboardInterrupt:
            place += 1
        assert [event.token for event in other] == wanted, f"interrupted before line {place}"
    assert place > 5


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_a_token_is_waited_for_loses_none_and_tells_none_twice(model: Model, times: int) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2)
    wanted = [answer.token_ids for answer in tiny_llm(model).generate([[1, 2, 3]], params)[0].outputs]
    place, came = 1, True
    while came:
        made, said, came = tiny_llm(model), [list[int](), list[int]()], False
        tokens = made.stream([1, 2, 3], params)
        with Interrupt(TAKING, place, times):
            while True:
                try:
                    for event in tokens:
                        said[event.index].append(event.token)
                    break
                except KeyboardInterrupt:
                    came = True
        assert said == wanted, f"interrupted at moment {place}"
        assert at_rest(made)
        place += 1 if place < 40 else 19
    assert place > 150


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_what_was_computed_is_kept_leaves_all_of_it_sound(model: Model, tmp_path: Path, times: int) -> None:
    """And whoever asks again is answered, and finds it kept, also after a restart."""
    params, prompts = (
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
        [[*range(40)], [*range(50, 80)], [*range(20), *range(90, 99)]],
    )
    wanted = [answer.outputs[0].token_ids for answer in tiny_llm(model, prefix_caching=False).generate(prompts, params)]

    def moments(place: int) -> int:
        kept = {"kv_cache_tokens": 160, "host_gib": 0.01, "disk_gib": 0.01, "disk_dir": str(tmp_path / str(place))}
        made = tiny_llm(model, **kept)
        made.generate(prompts[1], params)
        with Interrupt(KEEPING, place, times) as interrupt, suppress(KeyboardInterrupt):
            made.generate(prompts, params)
        assert [answer.outputs[0].token_ids for answer in made.generate(prompts, params)] == wanted, f"interrupted at moment {place}"
        below_it, until = made.engine.store, time.monotonic() + 60
        assert below_it is not None
        while made.engine.tend() is not None:
            assert time.monotonic() < until, f"interrupted at moment {place}, it never rests"
            time.sleep(0.001)
        on_the_way = [
            below_it._offers,
            below_it._loads,
            below_it._queued,
            below_it._unwritten,
            below_it._raising,
            below_it._departures,
            below_it.ledger._pins,
        ]
        assert not any(map(len, on_the_way)) and not below_it._leaving and not below_it._writing, f"interrupted at moment {place}"
        assert at_rest(made), f"interrupted at moment {place}"
        assert made.generate(prompts[:1], params)[0].num_cached_tokens == 39, f"interrupted at moment {place}"
        made.close()
        made = tiny_llm(model, **kept)
        [again] = made.generate(prompts[:1], params)
        assert (again.outputs[0].token_ids, again.num_cached_tokens) == (wanted[0], 39), f"interrupted at moment {place}"
        made.close()
        return interrupt.moments

    every = moments(0)
    assert every > 3000
    for place in random.Random(times).sample(range(1, every), int(os.environ.get("PANDO_SCHEDULES", "6"))):
        moments(place)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_it_is_closed_leaves_nothing_that_closing_again_would_wait_for(model: Model, tmp_path: Path, times: int) -> None:
    for place in range(1, 180, 20):
        made = tiny_llm(model, disk_gib=0.01, disk_dir=str(tmp_path / str(place)))
        made.generate([*range(40)], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        with Interrupt(CLOSING, place, times), suppress(KeyboardInterrupt):
            made.close()
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), f"interrupted at moment {place}"


def test_ctrl_c_while_something_is_posted_to_a_thread_holds_up_nobody_who_stops_that() -> None:
    """A garbage collector may be the one, in any thread."""
    place, came = 1, True
    while came:
        made, came = worker.Worker("test"), False
        try:
            with Interrupt([worker], place):
                made.post(list)
        except KeyboardInterrupt:
            came = True
        stopping = threading.Thread(target=worker.stop, args=([made],), daemon=True)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive() and not made._thread.is_alive(), f"interrupted at moment {place}"
        place += 1
    assert place > 3


def test_what_ctrl_c_kept_from_being_cancelled_is_cancelled_at_its_next_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came a second time, while the lock was waited for."""
    made, params = tiny_llm(model), SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made, "_fill", interrupted)
        patch.setattr(made, "_close", interrupted)
        with suppress(KeyboardInterrupt):
            made.generate([[1, 2, 3], [4, 5, 6]], params)
    assert len(made.engine.answers) == 2
    assert len(made.generate([[7, 8, 9]], SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 9
    assert at_rest(made) and not made._inboxes


@pytest.mark.parametrize("asked", [False, True])
def test_whoever_is_heard_in_the_middle_of_holding_ctrl_c_back_leaves_it_as_it_was(asked: bool) -> None:
    """A garbage collector closes streams at any time, also while the lock is taken or let go of."""
    heard, interrupts = list[int](), lock._Interrupts(lambda: False)
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    ours = signal.getsignal(signal.SIGINT)
    try:
        interrupts.hold()
        interrupts.hold()
        if asked:
            signal.raise_signal(signal.SIGINT)
        assert not heard
        interrupts.let_go()
        interrupts.let_go()
        assert signal.getsignal(signal.SIGINT) is ours and len(heard) == asked
    finally:
        signal.signal(signal.SIGINT, before)
