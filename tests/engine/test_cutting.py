"""Who waits for what a remote has, and for whom others may have to wait: nobody is forgotten, and nobody waits for ever."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pando.engine.engine import Engine
from pando.engine.loop import EngineLoop
from pando.engine.request import Request, Tenant, TokenEvent, Truncation
from pando.kv.run import Origin, Run
from pando.kv.segment import Key, extend_keys
from pando.model.load import Model
from pando.store import scout, speeds
from tests.engine.test_slow import ENOUGH, remote_of
from tests.engine.test_store import engine_of, settled, spoil, words
from tests.tiny import drain, greedy, tiny_llm, tiny_model

LONG = 60.0  # seconds: who has no answer by then waits for ever


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def cutting_engine(model: Model, folder: Path, seconds: float) -> Engine:
    engine = engine_of(model, None, remote=str(folder), kv_cache_tokens=1600, max_model_len=256)
    remote_of(engine).seconds = seconds
    return engine


def cut(name: str, seed: int) -> Request:
    return Request(name, words(seed, 260), greedy(3), truncation=Truncation())


def finish(engine: Engine) -> Counter[str]:
    """How many tokens each request gets."""
    told, end = Counter[str](), time.monotonic() + LONG
    while engine.has_work and time.monotonic() < end:
        told.update(event.request_id for event in engine.step())
    assert not engine.has_work, [row.request_id for row in engine.scheduler.waiting]
    return told


def test_a_request_that_waits_for_an_answer_counts_as_waiting_from_its_beginning(model: Model, tmp_path: Path) -> None:
    engine = cutting_engine(model, tmp_path, 0.3)
    began = time.monotonic()
    engine.add(cut("r", 1))
    assert engine.stats().waiting == 1
    [first, *_] = drain(engine)["r", 0]
    assert isinstance(first, TokenEvent) and 0.3 <= first.waited <= time.monotonic() - began


def test_a_step_that_fails_forgets_nobody_who_waits_for_an_answer(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cutting_engine(model, tmp_path, 0.05)
    for name in "abc":
        engine.add(cut(name, ord(name)))
    with monkeypatch.context() as broken:
        broken.setattr(engine.truncations, "cut", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            finish(engine)
    assert finish(engine) == {"a": 3, "b": 3, "c": 3}


def test_a_request_that_is_cancelled_while_it_is_cut_does_not_come_back(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cutting_engine(model, tmp_path, 0.01)
    engine.add(cut("r", 1))
    plain = engine.truncations.cut

    def cancelled(*arguments: object) -> object:
        engine.cancel("r")  # as the garbage collector may, when it ends a stream that nobody reads
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.truncations, "cut", cancelled)
    assert finish(engine) == {}


def test_those_who_wait_for_an_answer_are_told_too_where_steps_keep_failing(model: Model, tmp_path: Path) -> None:
    told, lost = list[TokenEvent](), list[str]()
    loop = EngineLoop(lambda: cutting_engine(model, tmp_path, 1.0), told.extend, lost.extend)
    loop.start().result()

    def ask(engine: Engine) -> None:
        """Before either of them is answered, no step goes well any more."""
        engine.add(Request("plain", words(5, 30), greedy(200)))
        engine.add(cut("cut", 1))
        assert engine.cutting.waiting == ["cut"]
        engine.step = lambda: (_ for _ in ()).throw(RuntimeError("broken"))  # type: ignore[method-assign]

    loop.call(ask).result()
    end = time.monotonic() + LONG
    while len(lost) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    loop.stop()
    assert sorted(lost) == ["cut", "plain"]


def test_many_modules_all_come_from_a_remote_that_answers_slowly(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "AWAITED", 0.3)
    runs = [Run(tuple(words(100 + i, 24)), 0, Origin((), 0)) for i in range(20)]
    first = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=4096)
    first.encode(runs, Tenant())
    drain(first)
    first.close()
    engine, now = engine_of(model, None, remote=str(tmp_path), kv_cache_tokens=4096), [0.0]
    remote = remote_of(engine)
    assert engine.store is not None
    monkeypatch.setattr(engine.store.scout, "_clock", lambda: now[0])
    monkeypatch.setattr(remote, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))  # no other time passes
    remote.seconds = 0.02
    engine.encode(runs, Tenant())
    drain(engine)
    assert now[0] > 2 * 0.3
    facts = engine.store.facts()
    assert facts.unanswered == {} and facts.loaded["remote"] > 0.9 * 20 * 24, "each answer came in time"


def test_an_answer_counts_though_the_step_took_longer_than_it_would(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "FRESH", 0.03)
    engine = cutting_engine(model, tmp_path, 0.01)
    engine.add(Request("talks", words(2, 5), greedy(40)))
    while not engine.step():
        pass
    forward = engine.model.decoder.forward

    asking, now = engine.store.scout, [0.0]  # type: ignore[union-attr]
    monkeypatch.setattr(asking, "_clock", lambda: now[0])

    def slowly(*arguments: object) -> object:
        """What was asked before it is answered while it computes, and then too old."""
        with asking._changed:  # type: ignore[union-attr]
            asking._changed.wait_for(lambda: not asking._asked, LONG)  # type: ignore[union-attr]
        now[0] += 0.06
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model.decoder, "forward", slowly)
    run = Run(tuple(words(100, 24)), 0, Origin((), 0))
    engine.add(Request("asks", words(1, 60), greedy(3)))
    engine.add(cut("cut", 3))
    engine.encode([run], Tenant())
    ends = dict[str, int]()
    for step in range(200):
        ends.update({event.request_id: step for event in engine.step() if event.finish_reason is not None})
        if not engine.has_work:
            break
    assert ends.keys() == {"talks", "asks", "cut"} and max(ends["asks"], ends["cut"]) < ends["talks"]
    assert not engine.unmade([run], Tenant())


def test_computing_is_measured_beside_a_load_that_fails(model: Model, tmp_path: Path) -> None:
    one = words(1, 60)
    prompts = [one, [*one[:20], *words(2, 200)]]
    options = {"disk_gib": ENOUGH, "disk_dir": str(tmp_path), "page_size": 4, "kv_cache_tokens": 2048}
    with tiny_llm(model, **options) as llm:
        wanted = [llm.generate([prompt], greedy(3))[0].outputs[0].token_ids for prompt in prompts]
        keys = list[Key]()
        extend_keys(keys, llm.engine.admission.lineage(Tenant(), 0), one, 4)
    [page] = [file for file in tmp_path.rglob("*") if file.is_file() and keys[12].hex() in file.name]
    data = bytearray(page.read_bytes())
    data[-3] ^= 255
    page.write_bytes(data)
    with tiny_llm(model, **options) as llm, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(llm.generate, prompts, greedy(3))
        try:
            assert [answer.outputs[0].token_ids for answer in answers.result(LONG)] == wanted
        finally:
            llm.engine.answers.clear()  # or a hung one would never let this end


def test_a_preempted_row_does_not_stand_before_one_that_came_earlier_and_holds_what_it_needs(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"page_size": 8, "kv_cache_tokens": 272, "host_gib": 0}
    modules = [Run(tuple(words(90 + i, size)), 0, Origin((), 0)) for i, size in enumerate((26, 29, 23))]
    engine = engine_of(model, tmp_path, **options)
    engine.encode(modules, Tenant())
    drain(engine)
    settled(engine)
    engine.close()
    engine = engine_of(model, tmp_path, **options)
    engine.encode([modules[0], modules[2]], Tenant())
    drain(engine)
    settled(engine)
    spoil(engine, random.Random(0), 0.0, delay=0.1)
    monkeypatch.setattr(speeds, "LEAST", 10)
    engine.add(Request("decodes", words(1, 5), greedy(20)))
    while not engine.step():
        pass
    engine.add(Request("early", words(2, 4), greedy(8), runs=(modules[0], modules[1].moved(26), modules[2].moved(55))))
    engine.step()
    engine.add(Request("late", words(3, 150), greedy(74)))
    told = finish(engine)
    assert (told["early"], told["late"]) == (8, 74) and engine.scheduler.preemptions > 0
