"""`pando bench store`: that it measures what it says; how fast anything is, no test can say."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pando.bench import codecs, preload, returning, rounding, saving, store
from pando.bench import trial as trials
from pando.bench.preload import AHEAD, BESIDE, BESIDE_WAITING, FORMULA, LAYERED, POOL, READ_AHEAD, WAITING, Preload, Switched, throttle
from pando.bench.random_model import random_model
from pando.bench.returning import Returning
from pando.bench.saving import Saving
from pando.bench.trial import Size, ask, drawn, opened
from pando.cli import main
from pando.errors import InvalidOption
from pando.model.load import Model
from pando.store.movers import Copy
from pando.store.speeds import Speeds
from pando.store.tier import Card, Reader

from ..tiny import tiny_model

TEXT = "A text that goes on, and says more or less the same in every line of it. " * 4


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(max_positions=2048, layers=3)


def test_a_turn_comes_from_where_it_is_said_to_come_from(model: Model, tmp_path: Path) -> None:
    bench = Returning(model, replace(returning.QUICK, repeats=2), tmp_path)
    results = bench.results()
    origins = {name: [(trial.device, dict(trial.tiers)) for trial in trials] for name, trials in bench.trials.items()}
    assert origins == {
        returning.POOL: [(128, {})] * 2,
        returning.HOST: [(128, {"host": 128})] * 2,
        returning.DISK: [(128, {"disk": 128})] * 2,
        returning.RESTART: [(128, {"disk": 128})] * 2,
        returning.AGAIN: [(0, {})] * 2,
    }
    assert results[-1].ours == results[-1].theirs == 8  # all answers are those of a cold run
    assert [result.target for result in results] == ["", "", ">= 8x", "", "<= 1.2", "all 6", "all 8"]


class Slow:
    """A page whose layers are there at once."""

    card = Card(b"key", b"parent", b"tenant", (1,))

    def layer(self, index: int, into: memoryview) -> None: ...
    def close(self) -> None: ...

    def open(self, key: bytes) -> Reader:
        return self


def test_a_throttled_tier_is_as_fast_as_it_is_told_to_be() -> None:
    tier = Slow()
    throttle(tier, 1e5)  # type: ignore[arg-type]
    reader = tier.open(b"key")
    start = time.perf_counter()
    for layer in range(5):
        reader.layer(layer, memoryview(bytearray(4000)))
    assert time.perf_counter() - start >= 0.2 - READ_AHEAD


@pytest.mark.parametrize("patient", [True, False])
def test_only_a_patient_engine_waits_for_all_of_its_context(model: Model, tmp_path: Path, patient: bool) -> None:
    history, size = drawn(model, "history", 128), Size(pool=1024, kept=1024)
    first = opened(model, size, tmp_path)
    ask(first, [history])
    first.close()
    engine = opened(model, size, tmp_path, kind=Switched)
    assert isinstance(engine, Switched) and engine.store is not None
    engine.patient = patient
    throttle(engine.store.transfer.tiers["disk"], 1e5)  # half a second in all
    done: list[bool] = []
    layer = engine.pool.layer

    mover, begun = engine.store.transfer.mover, threading.Event()
    put = mover.put

    def watched(index: int):  # type: ignore[no-untyped-def]
        found = layer(index)
        done.extend(load.done for load in engine.pool.arrivals)  # type: ignore[attr-defined]
        begun.set()
        return found

    def last_waits(index: int, copies: Sequence[Copy]) -> None:
        """For the step that begins before, if there is one."""
        if index == 2 and not patient:
            begun.wait(20)
        put(index, copies)

    engine.pool.layer = watched  # type: ignore[method-assign]
    mover.put = last_waits  # type: ignore[method-assign]
    trial = ask(engine, [[*history, *drawn(model, "new", 8)]])
    assert trial.tiers == {"disk": 128} and done[0] is patient
    engine.close()


@pytest.mark.parametrize("bandwidth", [10.0, None])
def test_every_load_is_measured_in_every_way(
    model: Model, tmp_path: Path, bandwidth: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "FIGURE", 128)
    bench = Preload(model, replace(preload.QUICK, bandwidth=bandwidth, repeats=2, buffers=(1, 99)), tmp_path)  # it has fewer layers
    results = bench.results()
    assert {history: {way: len(each) for way, each in found.items()} for history, found in bench.samples.items()} == {
        history: dict.fromkeys((WAITING, LAYERED, AHEAD, POOL, BESIDE_WAITING, BESIDE, "1 layers ahead", FORMULA), 2)
        for history in (64, 128)
    }
    assert [result.target for result in results].count(">= 35 %") == 1 and len(results) == 10
    judged = {result.case.rpartition(", ")[2] for result in results if result.target == ">= 50 %"}
    assert judged == (set() if bandwidth else {AHEAD, FORMULA}), "the figure is of a GPU, with host memory below it"


def test_layers_that_were_there_before_are_not_on_the_clock(model: Model, tmp_path: Path) -> None:
    layers = model.config.layers
    sweep = preload.Sweep(histories=(128,), new=8, rows=2, repeats=1, bandwidth=0.1, buffers=(layers,))  # a second in all
    bench = Preload(model, sweep, tmp_path)
    bench.results()
    found = {way: each[0] for way, each in bench.samples[128].items()}
    assert found[f"{layers} layers ahead"] < found[WAITING] - 500, "all of them were"
    assert bench.enough[128] == layers and found[FORMULA] < found[WAITING] - 500, "next to nothing is computed meanwhile"


def test_what_is_loaded_may_be_modules(model: Model, tmp_path: Path) -> None:
    results = Preload(model, replace(preload.QUICK, modules=3), tmp_path).results()
    assert [result.case for result in results][:2] == [f"2 x 64 loaded in 3 modules, 8 new, {way}" for way in (LAYERED, AHEAD)]


def test_others_are_answered_as_long_as_anyone_is_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LONG", 12)
    engine, added = trials.opened(model, trials.Size(pool=2048, rows=2), None), list[str]()
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (added.append(request.request_id), add(request)))
    trial = trials.ask(engine, [trials.drawn(model, "asked", 8)], 40, beside=[trials.drawn(model, "beside", 8)])
    assert [len(answer) for answer in trial.answers.values()] == [40] and trial.paused > 0
    assert len(added) - 1 >= 40 // 12 and len({*added}) == 2 and not engine.has_work
    engine.close()


def test_what_was_asked_before_is_not_on_the_clock(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, size = drawn(model, "history", 128), Size(pool=8192, kept=4096, rows=2, step=2048)
    first = opened(model, size, tmp_path)
    ask(first, [history])
    first.close()
    engine = opened(model, size, tmp_path)
    clock = SimpleNamespace(perf_counter=lambda: float(engine.totals.tokens))  # a token that is computed takes a second, whatever else runs
    monkeypatch.setattr(trials, "time", clock)
    long = ask(engine, [drawn(model, "long", 1500)]).seconds
    engine.store.speeds = Speeds()  # type: ignore[union-attr]
    trial = ask(engine, [[*history, 1, 2, 3]], 2, behind=[drawn(model, "before", 1500)])
    assert trial.tiers == {"disk": 128} and trial.seconds < long
    assert [len(answer) for answer in trial.answers.values()] == [2]
    engine.close()


def test_saving_is_measured_beside_not_saving(model: Model, tmp_path: Path) -> None:
    results = Saving(model, saving.QUICK, tmp_path).results()
    assert [result.target for result in results] == [">= 0.97x"] * 2
    assert all({len(each) for each in result.samples.values()} == {saving.QUICK.pairs} for result in results)
    assert " 6 pages saved, 0 not" in results[0].note  # two prompts of one page, thrice
    assert " 6 pages saved, 0 not" in results[1].note  # two answers, thrice; and not those of the prompts once more


def test_rounding_takes_less_and_is_told_from_exact(model: Model, tmp_path: Path) -> None:
    none, fp8, int8 = codecs.compare_codecs(model, TEXT, codecs.Reading(context=128, following=6), tmp_path)
    assert none.ours < 1e-9 < int8.ours < fp8.ours
    sizes = [int(result.note.split(", ")[2].split()[0]) for result in (none, fp8, int8)]
    assert sizes[1] == sizes[2] < sizes[0] / 2
    assert all("128 tokens loaded" in result.note for result in (none, fp8, int8))
    with pytest.raises(InvalidOption, match="give a longer one with --text"):
        codecs.compare_codecs(model, "short", codecs.QUICK, tmp_path / "other")


def test_8_bits_are_the_nearer_the_less_has_them(tmp_path: Path) -> None:
    def load(quantization: str) -> Model:
        return random_model("tiny", torch.device("cpu"), torch.float32, compiled=False, quantization=quantization)

    plain, weights, rows, states, both = rounding.compare_fp8(load("none"), load, TEXT, rounding.Passage(before=100, judged=40))
    assert plain.ours > 1
    assert 0 < weights.ours < rows.ours < both.ours and 0 < states.ours < both.ours
    assert "of 40, perplexity" in both.note


def test_the_command_runs_without_a_file_writes_its_samples_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--random-weights", "--shape", "tiny", "--quick", "--device", "cpu", "--dtype", "float32", "--only", "conversation"]
    kept = ["--only", "preload", "--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.svg"), "--dir", str(tmp_path)]
    assert main(["bench", "store", *given, *kept]) == 0
    assert "from disk, after a restart" in capsys.readouterr().out
    cases = [result["case"] for result in json.loads((tmp_path / "s.json").read_text())["results"]]
    assert len(cases) == 7 + 6
    assert "tokens loaded" in (tmp_path / "s.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.json", "s.svg"]


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--repeats: '0' is no whole number from 1"):
        store.main(["--repeats", "0"])
    with pytest.raises(InvalidOption, match="no such folder"):
        store.main(["--dir", str(tmp_path / "nowhere")])
    with pytest.raises(InvalidOption, match="cannot be read as text"):
        store.main(
            ["--random-weights", "--shape", "tiny", "--only", "codec", "--text", str(tmp_path / "nothing.txt"), "--dtype", "float32"]
        )
