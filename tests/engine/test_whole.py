"""Whatever cuts work short, and whenever: nothing that is half done is taken for what it should be."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pando.engine.engine import Engine
from pando.engine.request import Request, Tenant, Truncation
from pando.kv import tree
from pando.model.load import Model

from ..tiny import drain, greedy, run, tiny_engine, tiny_llm, tiny_model, write_checkpoint
from .test_store import ENOUGH, cold, engine_of, tokens_of, whole, words


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_another_is_put_right_leaves_no_wrong_page(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, None, host_gib=ENOUGH)
    run(engine, [Request("old", words(1, 60), greedy(6))])
    engine.add(Request("r", words(2, 40), greedy(6)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.decoder, "forward", interrupted)
        patch.setattr(engine.store, "forget_pool", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
    engine.cancel("r")
    for prompt in (words(3, 60), words(1, 60), words(1, 50) + words(9, 4)):
        assert tokens_of(engine, prompt) == cold(model, prompt)
    whole(engine)


@pytest.mark.parametrize("said", range(1, 9))
@pytest.mark.parametrize("where", ["store", "scheduler"])
def test_a_row_goes_on_after_an_interrupt_while_another_is_put_right(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, said: int
) -> None:
    engine, heard = engine_of(model, None, host_gib=ENOUGH), []
    engine.add(Request("r", words(2, 40), greedy(24)))
    while len(heard) < said:
        heard += engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.decoder, "forward", interrupted)
        patch.setattr(getattr(engine, where), "go" if where == "store" else "forget_states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    heard += [event for events in drain(engine).values() for event in events]
    assert [event.token for event in heard] == cold(model, words(2, 40), 24)


def at_line(line: int, act: Callable[[], object]) -> Callable[..., object]:
    """Acts at the n-th line of what cuts a segment of the tree in two."""
    seen = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal seen
        code = frame.f_code  # type: ignore[attr-defined]
        if code.co_filename != tree.__file__ or code.co_name != "_cut":
            return None
        seen += event == "line"
        if seen == line:
            sys.settrace(None)
            act()
        return trace

    return trace


def nothing_is_held(engine: Engine) -> bool:
    return not [stem for stem in engine.tree.stems() if stem.held] and engine.tree.evictable() == engine.tree.pages


@pytest.mark.parametrize("line", range(3, 11))
@pytest.mark.parametrize("asks", ["add", "pin"])
def test_a_stream_that_a_garbage_collector_closes_disturbs_nobody(asks: str, line: int) -> None:
    llm = tiny_llm(kv_cache_tokens=200, max_model_len=128)
    gc.disable()
    stream = llm.stream(words(1, 60), greedy(9))
    for _ in range(3):
        next(stream)
    circle: list[object] = [stream]
    circle.append(circle)
    del stream, circle
    sys.settrace(at_line(line, gc.collect))  # type: ignore[arg-type]
    try:
        if asks == "add":
            llm.generate([words(1, 47) + words(7, 120)], greedy(4), truncation=Truncation(keep=8))
        else:
            llm.engine.pins.drop(llm.engine.pin(words(1, 47), Tenant(), 0, None))
    finally:
        sys.settrace(None)
        gc.enable()
    gc.collect()
    assert not llm.engine.has_work and nothing_is_held(llm.engine)


def test_of_a_request_that_is_cancelled_before_a_step_nothing_stays() -> None:
    engine = tiny_engine()
    for number in range(20):
        engine.add(Request(f"{number}", words(1, 100), greedy(4)))
        engine.cancel(f"{number}")
    assert not engine.has_work and not engine._begun


LEAVES = """
import atexit, os, sys, threading, time
threads = []
atexit.register(lambda: [thread.join() for thread in threads])  # the first is done last
from pando import LLM, SamplingParams
for _ in range(3):  # what takes long, to import, is done once
    if (child := os.fork()) == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()
llm = LLM(sys.argv[1], kv_cache_tokens=2048, host_gib=0, disk_gib=0)
params, begun = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True), threading.Event()
def ask():
    while True:
        for event in llm.stream([1, 2, 3], params):
            begun.set()
for _ in range(4):
    threads.append(threading.Thread(target=ask, daemon=True))
    threads[-1].start()
begun.wait(60)
time.sleep(0.1)
print(len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids))
"""


def test_a_process_may_end_while_its_threads_are_being_answered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    done = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "100\n" * 3), done.stderr[-2000:]
