"""`pando bench throughput`: that it measures what it says; how fast anything is, no test can say."""

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pando.bench.attention.clock import Clock, Limits
from pando.bench.random_model import dressed, random_weights
from pando.bench.throughput import chats, cold, command, decode, grid, relay
from pando.bench.throughput.chunk import Crowd
from pando.bench.throughput.chunk import promises as of_crowds
from pando.bench.throughput.decode import LEAST, WARM, Pace, Passes, Replays, Unsteady, Window, _full_steps
from pando.bench.throughput.grid import Cell, behind, room
from pando.bench.throughput.relay import Load, knee, of_jobs, of_services
from pando.bench.throughput.report import Report
from pando.bench.throughput.service import ANSWERS, PROMPTS, Job, Served, jobs_of, lengths_of, serve, warm
from pando.bench.throughput.setting import FLAT, NONE, SHARED, Setting, engine_config, unattended
from pando.bench.trial import Trial, ask, drawn
from pando.cli import main
from pando.engine.engine import Engine
from pando.engine.graphs import SIZES
from pando.engine.request import Request, TokenEvent
from pando.errors import InvalidOption
from pando.model.decoder import Step

SMALL = Window(new=10, steps=4, seconds=60.0)
CPU = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny", "--quick", "--bandwidth", "0.01", "--rate", "0.01"]


@pytest.fixture(autouse=True)
def whatever_was_imported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its engines the command looks for garbage among all that was frozen: here that would be all that the tests have imported."""
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


@pytest.fixture(scope="module")
def setting() -> Setting:
    place = torch.device("cpu")
    config, weights = random_weights("tiny", place, torch.float32, 4096)
    model, limits = dressed("tiny", config, weights, compiled=False), Limits(place, 0.01, 0.001)
    return Setting(model, weights, limits, Clock(place, 1, 1 << 10), Report({}), seed=0)


def engine_of(setting: Setting, attention: str, rows: int, tokens: int) -> Engine:
    return Engine(setting.model, engine_config(attention, rows, tokens=tokens))  # type: ignore[arg-type]


# ---- decoding


@pytest.mark.parametrize(("attention", "reads"), [("shared", (1, 4)), ("flat", (0, 0))])
def test_the_prefix_is_read_once_or_by_every_row(setting: Setting, attention: str, reads: tuple[int, int]) -> None:
    engine = engine_of(setting, attention, 4, room(4, 128, SMALL))
    pace = behind(engine, 4, 128, SMALL, 0, Replays())
    assert (pace.rows, len(pace.ms)) == (4, 4)
    assert (engine.facts.shared_reads, engine.facts.shared_rows) == reads and engine.facts.rows == 4


def test_the_prefix_is_computed_once(setting: Setting) -> None:
    engine = engine_of(setting, "shared", 4, room(4, 128, SMALL))
    behind(engine, 4, 128, SMALL, 0, Replays())
    assert 128 + 4 * (WARM + 4) <= engine.totals.tokens <= 128 + 4 * (WARM + 4 + 1)


def test_the_pool_just_holds_every_row_until_it_has_all_its_tokens(setting: Setting) -> None:
    window = Window(new=128, steps=1000, seconds=60.0)
    engine = engine_of(setting, "shared", 8, room(8, 64, window))
    pace = behind(engine, 8, 64, window, 0, Replays())
    assert len(pace.ms) == 127 - WARM and engine.stats().preemptions == 0


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (Window(new=12, steps=5, seconds=60.0), 5),
        (Window(new=12, steps=100, seconds=60.0), 11 - WARM),
        (Window(new=12, steps=100, seconds=1e-9), LEAST),
        (Window(new=1, steps=100, seconds=60.0), LEAST),
    ],
)
def test_steps_count_behind_the_warm_up_and_as_long_as_there_is_time(setting: Setting, window: Window, steps: int) -> None:
    engine = engine_of(setting, "shared", 2, room(2, 64, window))
    assert len(behind(engine, 2, 64, window, 0, Replays()).ms) == steps
    assert not engine.has_work


def test_rows_that_do_not_fit_side_by_side_are_no_measurement(setting: Setting) -> None:
    engine = engine_of(setting, "shared", 8, 4 * 64)
    prompts = [drawn(setting.model, row, 70) for row in range(8)]
    with pytest.raises(Unsteady, match="too small for 8 rows"):
        decode.decode(engine, prompts, SMALL, Replays())
    assert not engine.has_work


def test_without_attention_all_else_is_done(setting: Setting) -> None:
    bare = unattended(setting.model).decoder
    assert bare.embed is setting.model.decoder.embed

    def never(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it attended")

    engine = engine_of(setting, "shared", 1, 256)
    one = torch.zeros(1, dtype=torch.int64)
    logits = bare.forward(Step(one, one, one, one, never), engine.pool)
    assert torch.equal(logits, Passes(bare).forward(Step(one, one, one, one, never), engine.pool))  # a watch changes nothing
    assert logits.shape == (1, 320) and logits.isfinite().all()
    assert engine.pool.k[:, 0].any()  # what it would have attended to is written


def test_a_cpu_is_idle_while_its_decoder_is_not_at_work(setting: Setting) -> None:
    model, watch = decode.watched(setting.model)
    engine = Engine(model, engine_config("auto", 2, tokens=1024))
    assert isinstance(watch, Passes) and watch.idle() is None
    pace = decode.decode(engine, [drawn(model, row, 8) for row in range(2)], SMALL, watch)
    assert pace.idle is not None and 0 < pace.idle < 1


class FakeEvent:
    """Of a device that works for 3 ms, then waits for 1 ms."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at

    def synchronize(self) -> None: ...


def test_a_gpu_is_idle_between_captured_steps() -> None:
    watch = Replays()
    assert watch.idle() is None
    watch._spans = [(FakeEvent(4 * step), FakeEvent(4 * step + 3)) for step in range(5)]  # type: ignore[misc]
    assert watch.idle() == pytest.approx(0.25)
    watch.skip()  # a step of a kind that is captured only now
    watch._spans += [(FakeEvent(step), FakeEvent(step + 1)) for step in (100, 102)]  # type: ignore[misc]
    assert watch.idle() == pytest.approx(1 - (4 * 3 + 1) / (4 * 4 + 2))
    watch.begin()
    assert watch.idle() is None


def test_graphs_are_repeated_as_before_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Recorded())
    watch, graph = Replays(), object()
    with watch.watching():
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
    torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
    assert replayed == [graph] * 3 and len(watch._spans) == 2


class Capturing:
    """An engine of which every fourth step is not repeated."""

    def __init__(self, ever: bool = True) -> None:
        self.graphs, self.has_work, self.steps, self.ever = SimpleNamespace(replays=0), True, 0, ever

    def step(self) -> list[int]:
        self.steps += 1
        self.graphs.replays += self.ever and self.steps % 4 != 0
        return [1, 2]


def test_steps_that_are_captured_only_now_do_not_count() -> None:
    watch = Replays()
    assert len(_full_steps(Capturing(), 2, 8, watch)) == 5  # type: ignore[arg-type]
    assert watch._spans == [None, None]
    assert len(_full_steps(Capturing(ever=False), 2, 8, watch)) == 8, "who never captures has no others"  # type: ignore[arg-type]


class Recorded:
    def record(self) -> None: ...


# ---- floors


def test_the_floor_of_attention_is_that_of_all_layers(setting: Setting) -> None:
    tokens, rows = 128 + 4 * 32, 4
    layer = (tokens * 2 + rows * 4) * 2 * 8 * 4  # K and V of 2 heads of 8 in fp32, and queries and answers of 4
    flops = 4 * 4 * 8 * rows * (128 + 32)
    assert setting.attention_ms(4, 128, 32) == pytest.approx(2 * max(layer / 0.01, flops / 0.001) / 1e9)


def test_what_is_multiplied_is_what_is_read(setting: Setting) -> None:
    assert setting.weight_bytes == 4 * (2 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48) + 320 * 32)
    assert setting.read_ms() > 0 and setting.products_ms(2) > 0


@pytest.mark.parametrize(("count", "seconds", "done"), [(5, 60.0, 5), (1000, 1e-9, 1)])
def test_what_lasts_is_repeated_so_often_or_for_so_long(setting: Setting, count: int, seconds: float, done: int) -> None:
    runs = list[int]()
    assert setting.clock.mean_us(lambda: runs.append(0), count, seconds) > 0
    assert len(runs) == done
    assert setting.lasting_products_ms(2, count, seconds) > 0


def test_floors_in_8_bits_are_those_of_fewer_bytes(setting: Setting) -> None:
    place = torch.device("cpu")
    config, weights = random_weights("tiny", place, torch.float32, 4096, quantization="fp8")
    model = dressed("tiny", config, weights, compiled=False).with_states("fp8")
    rounded = replace(setting, model=model, weights=weights, limits=Limits(place, 0.01, 1e9))
    layer = (128 + 4 * 32) * 2 * 2 * 8 + 4 * 4 * 2 * 8 * 4  # K and V in bytes, and queries and answers in fp32
    assert rounded.attention_ms(4, 128, 32) == pytest.approx(2 * layer / 0.01 / 1e9)
    outputs = 64 + 32 + 96 + 32  # each has a scale
    assert rounded.weight_bytes == 2 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48 + 4 * outputs) + 4 * 320 * 32
    assert rounded.products_ms(2) > 0


# ---- requests that arrive


def test_every_request_is_answered_and_its_time_runs_from_its_arrival(setting: Setting) -> None:
    engine = engine_of(setting, "shared", 2, 2048)
    jobs = [Job(arrival, drawn(setting.model, arrival, 16), 5) for arrival in (0.0, 0.02, 0.1)]
    served = serve(engine, jobs)
    assert served.tokens == 15 and len(served.latencies) == 3 and served.seconds > 0.1
    assert served.tokens_per_second == pytest.approx(15 / served.seconds)
    assert served.latency_ms == pytest.approx(1e3 * statistics.fmean(served.latencies))
    assert sum(served.latencies) * 5 < 3 * served.seconds


def test_who_waits_for_a_row_waits_longer(setting: Setting) -> None:
    engine = engine_of(setting, "shared", 1, 2048)
    served = serve(engine, [Job(0.0, drawn(setting.model, row, 16), 8) for row in range(4)])
    assert served.rows == 1 and list(served.latencies) == sorted(served.latencies)
    assert served.latencies[-1] * 8 == pytest.approx(served.seconds)


def test_a_job_without_its_tail_ends_when_nobody_waits(setting: Setting) -> None:
    jobs = [Job(0.0, drawn(setting.model, row, 16), answer) for row, answer in enumerate((4, 4, 4, 4, 60, 60))]
    engine = engine_of(setting, "shared", 2, 2048)
    served = serve(engine, jobs, tail=False)
    assert len(served.latencies) == 4 and 16 <= served.tokens < 30 and not engine.has_work


@pytest.mark.parametrize(("reuse", "pages"), [(True, 2 + 3), (False, 3 * 3)])
def test_shared_pages_are_weighed_once_and_those_of_ended_rows_not_at_all(setting: Setting, reuse: bool, pages: int) -> None:
    engine = Engine(setting.model, engine_config("shared", 3, tokens=4096, reuse=reuse))
    shared = drawn(setting.model, "shared", 128)
    jobs = [Job(0.0, [*shared, token], 8) for token in range(9)]
    assert serve(engine, jobs, weighed=True).pages == pages


def test_lengths_have_the_quartiles_of_sharegpt() -> None:
    for place, wanted in enumerate((PROMPTS, ANSWERS)):
        found = sorted(pair[place] for pair in lengths_of(None, 20_000, 2048, seed=0))
        assert (found[0], found[-1]) == pytest.approx((wanted[0], wanted[-1]), rel=0.1)
        assert statistics.quantiles(found, n=4) == pytest.approx(wanted[1:4], rel=0.1)


def test_lengths_are_drawn_from_a_file_and_cut(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("5,7\n900,3\n")
    assert set(lengths_of(tmp_path / "lengths.csv", 50, 100, seed=0)) == {(5, 7), (100, 3)}


def test_other_rates_bring_the_same_words_at_other_times() -> None:
    slow, fast, at_once = (jobs_of([1, 2], [(3, 4)] * 20, rate, 320, seed=0) for rate in (1.0, 10.0, math.inf))
    assert [job.prompt for job in slow] == [job.prompt for job in fast] == [job.prompt for job in at_once]
    assert all(job.prompt[:2] == (1, 2) and len(job.prompt) == 5 and job.answer == 4 for job in slow)
    assert [job.arrival for job in slow] == pytest.approx([10 * job.arrival for job in fast])
    assert {job.arrival for job in at_once} == {0.0}


def test_the_warm_up_meets_ever_fewer_rows_and_leaves_nothing(setting: Setting) -> None:
    engine = engine_of(setting, "shared", 9, 4096)
    met: list[int] = []
    step = engine.step

    def watched() -> list[object]:
        events = step()
        met.append(engine.facts.rows)
        return events  # type: ignore[return-value]

    engine.step = watched  # type: ignore[assignment, method-assign]
    warm(engine, drawn(setting.model, "system", 64), 9)
    sizes = [size for size in SIZES if size <= 9]
    assert len(sizes) > 3 and all(met.count(rows) >= 3 for rows in (9, *sizes)), "each that is captured"
    assert engine.stats().pages_in_use == 0


# ---- what follows from the tables


def cell(batch: int, prefix: int, shared: float, flat: float) -> Cell:
    paces = {mode: Pace(batch, (ms,)) for mode, ms in ((SHARED, shared), (FLAT, flat), (NONE, 8.0))}
    return Cell(batch, prefix, 128, paces, products_ms=6.0, attention_ms=2.0)


def test_a_grid_is_judged_by_its_floors_and_by_what_a_longer_prefix_costs() -> None:
    cells = [cell(1024, 1024, 10.0, 20.0), cell(1024, 16384, 12.0, 200.0), cell(32, 1024, 8.0, 8.0)]
    floors, shared, flat = grid.promises(cells)
    assert floors.ours == pytest.approx(1.5) and floors.met is False and "batch 1024, prefix 16384" in floors.note
    assert shared.ours == pytest.approx(100 / 6) and shared.met is True
    assert flat.ours == pytest.approx(90) and flat.met is True


def test_what_a_step_is_to_brief_products_is_told_and_not_judged() -> None:
    brief = replace(cell(512, 1024, 11.0, 20.0), brief_ms=3.0)
    assert brief.over_floors == pytest.approx(1.375) and brief.over_brief == pytest.approx(2.2)
    [floors] = grid.promises([brief])
    assert floors.met is True and "2.20x with brief products" in floors.note


def test_a_mode_that_did_not_fit_leaves_its_column_empty() -> None:
    without = Cell(2, 64, 9, {FLAT: Pace(2, (4.0,))}, 1.0, 1.0)
    told = dict(zip(grid.HEADS, without.cells(), strict=True))
    assert (told["shared ms"], told["flat ms"], told["flat tok/s"], told["x floors"], told["x flat"]) == ("-", "4.00", "500.0", "-", "-")


def load(mode: str, system: int, rate: float, seconds: float, latency: float) -> Load:
    return Load(mode, system, rate, Served(seconds, 100, (latency,), 0, 1))


def test_the_knee_is_the_highest_rate_that_is_borne() -> None:
    shared = [load(SHARED, 2048, rate, 1.0, latency) for rate, latency in ((8, 0.01), (16, 0.02), (24, 0.3))]
    flat = [load(FLAT, 2048, rate, 1.0, latency) for rate, latency in ((8, 0.01), (16, 0.2))]
    assert (knee(shared, SHARED, 100), knee(flat, FLAT, 100), knee(flat, FLAT, 1)) == (16, 8, None)
    [result] = of_services([*shared, *flat], 100)
    assert result.ours == 2 and result.met is False and "tried" not in result.note
    assert of_services(shared, 100) == []


def test_a_batch_job_is_judged_by_the_longest_system_prompt() -> None:
    loads = [load(mode, system, math.inf, seconds, 0.1) for mode, system, seconds in
             ((SHARED, 64, 1.0), (SHARED, 2048, 1.05), (FLAT, 64, 1.1), (FLAT, 2048, 3.0))]  # fmt: skip
    kept, short, long = of_jobs(loads)
    assert (kept.met, short.met, long.met) == (True, None, True)
    assert kept.ours == pytest.approx(100 / 1.05) and long.ours == pytest.approx(3 / 1.05)


def test_bytes_that_sharing_spares_are_told_for_every_prompt() -> None:
    sizes = {(1024, "shared"): 40, (1024, "unshared"): 100, (4096, "shared"): 10, (4096, "unshared"): 100, (8192, "shared"): 1}
    served = Served(1.0, 8, (0.01,), 1, 1)
    short, long = of_crowds([Crowd(prompt, mode, 8, 1.0, served, size) for (prompt, mode), size in sizes.items()])
    assert (short.ours, short.met, long.ours, long.met) == (pytest.approx(60), None, pytest.approx(90), True)


# ---- the command


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(tmp_path: Path, *options: str) -> dict[str, list[dict[str, object]]]:
    file = tmp_path / "found.json"
    assert main(["bench", "throughput", *CPU, "--json", str(file), *options]) == 0
    found = json.loads(file.read_text())
    assert found["skipped"] == [] and found["machine"]["model"] == "random weights in the shape of tiny"
    tables: dict[str, list[dict[str, object]]] = found["tables"]
    return tables


@pytest.mark.usefixtures("one_thread")
def test_the_grid_has_a_line_for_each_place_in_it(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "hydragen", "--batches", "3,2", "--prefixes", "64", "--new", "9,12", "--modes", "flat")["hydragen"]
    assert [(line["batch"], line["prefix"], line["new"]) for line in lines] == [(2, 64, 9), (2, 64, 12), (3, 64, 9), (3, 64, 12)]


@pytest.mark.usefixtures("one_thread")
def test_the_ceiling_is_measured_once_and_stands_beside_every_prefix(tmp_path: Path) -> None:
    short, long = run(tmp_path, "--only", "hydragen", "--modes", "none,shared")["hydragen"]
    assert (short["prefix"], long["prefix"]) == (64, 128) and set(short["paces"]) == set(long["paces"]) == {SHARED, NONE}  # type: ignore[call-overload]
    assert short["paces"][NONE] == long["paces"][NONE] and short["paces"][SHARED] != long["paces"][SHARED]  # type: ignore[index]


@pytest.mark.usefixtures("one_thread")
def test_steps_are_measured_with_one_row_and_with_many(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "steps")["steps"]
    assert [(line["batch"], line["steps"]) for line in lines] == [(1, 3), (32, 3)]
    assert all(line["idle"] is not None for line in lines)


@pytest.mark.usefixtures("one_thread")
def test_steps_are_measured_in_8_bits(tmp_path: Path) -> None:
    assert len(run(tmp_path, "--only", "steps", "--quantization", "fp8", "--kv-dtype", "fp8")["steps"]) == 2
    facts = json.loads((tmp_path / "found.json").read_text())["machine"]
    assert (facts["quantization"], facts["KV cache"]) == ("fp8", "torch.float8_e4m3fn")


@pytest.mark.usefixtures("one_thread")
def test_a_service_is_asked_ever_more_until_it_is_too_much(tmp_path: Path) -> None:
    tables = run(tmp_path, "--only", "relay", "--arrivals", "40,80,100", "--limit", "0.0001")
    assert [(line["mode"], line["system"], line["rate"]) for line in tables[relay.JOB]] == [
        (mode, system, None) for mode in (SHARED, FLAT) for system in (16, 64)
    ]
    assert [(line["mode"], line["rate"]) for line in tables[relay.SERVICE]] == [(SHARED, 40), (FLAT, 40)]


def test_a_service_of_one_mode_is_asked_so_many_requests_at_each_rate_however_many_rows_there_are(tmp_path: Path) -> None:
    given = ("--scenarios", "service", "--modes", "flat", "--requests", "3", "--rows", "4", "--arrivals", "40,80", "--limit", "1e9")
    tables = run(tmp_path, "--only", "relay", *given)
    assert set(tables) == {relay.SERVICE}, "the other scenario can be left out"
    assert [(line["mode"], line["rate"], line["answered"]) for line in tables[relay.SERVICE]] == [(FLAT, 40, 3), (FLAT, 80, 3)]


@pytest.mark.usefixtures("one_thread")
def test_a_crowd_holds_less_where_its_prompt_is_shared(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "chunk", "--chunk-prompts", "256", "--chunk-arrivals", "1000")["chunk"]
    held = {line["mode"]: line["kv_bytes"] for line in lines}
    page = 64 * 2 * 2 * 2 * 8 * 4  # two layers of K and V, two heads of 8, fp32
    assert held == {SHARED: (4 + 3) * page, "unshared": 3 * 5 * page}


def test_conversations_are_told_of_in_parts_of_the_time_and_reuse_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, reused = list[int](), list[int]()
    step, add = Engine.step, Engine.add

    def watched(engine: Engine) -> Sequence[TokenEvent]:
        events = step(engine)
        reused.extend(event.num_cached_tokens for event in events)
        return events

    def added(engine: Engine, request: Request) -> None:
        asked.append(len(request.prompt))
        add(engine, request)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(Engine, "add", added)
    monkeypatch.setattr(chats, "ANSWERED", (4,))
    clock = itertools.count()  # a hundredth of a second each time that somebody looks
    monkeypatch.setattr(chats, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 100, sleep=lambda seconds: None))
    lines = run(tmp_path, "--only", "chats", "--chats", "3", "--chat-seconds", "3", "--think", "0.05")[chats.TABLE]
    assert [line["until"] for line in lines] == pytest.approx([0.6, 1.2, 1.8, 2.4, 3.0]) and all(line["captured"] == 0 for line in lines)
    assert sum(line["tokens_per_second"] for line in lines) > 0 and max(line["rows"] for line in lines) <= 3
    told = [line["next_ms"] for line in lines if line["next_ms"]["100"]]
    assert told and all(0 < line["50"] <= line["90"] <= line["99"] <= line["100"] for line in told)
    assert max(asked) > chats.SYSTEM + max(chats.SAID) and max(reused) > chats.SYSTEM, "turns go on behind what was said"


def test_of_a_cold_prompt_nothing_is_reused_and_it_stands_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reused = list[int]()

    def asked(engine: Engine, prompts: list[list[int]]) -> Trial:
        trial = ask(engine, prompts)
        reused.append(trial.device)
        return trial

    monkeypatch.setattr(cold, "ask", asked)
    lines = run(tmp_path, "--only", "cold", "--repeats", "2", "--plot", str(tmp_path / "cold.svg"))["cold"]
    assert [line["tokens"] for line in lines] == [16, 64] and reused == [0] * 6, "one more of each is the warm-up"
    assert all(len(line[name]) == 2 for line in lines for name in ("ms", "theirs_ms"))  # type: ignore[arg-type]
    short, long = (line["attention_ms"] for line in lines)
    assert long == pytest.approx(short * 64 * 65 / (16 * 17))  # type: ignore[operator]
    assert (tmp_path / "cold.svg").exists()


def test_without_transformers_cold_prompts_are_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "found.json"
    assert main(["bench", "throughput", *CPU, "--json", str(file), "--only", "cold"]) == 0
    found = json.loads(file.read_text())
    assert [line["over_theirs"] for line in found["tables"]["cold"]] == [None, None]
    assert "pip install 'pando-llm[bench]'" in found["skipped"][0]["reason"]


@pytest.mark.usefixtures("one_thread")
def test_modules_come_from_where_they_are_said_to_come_from(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "prompt-cache", "--plot", str(tmp_path / "first.svg"))["prompt-cache"]
    cold, pool, host = lines
    assert (cold["reused"], cold["from_host"]) == (0, 0)
    assert pool["reused"] >= 600 and pool["from_host"] == 0  # type: ignore[operator]
    assert host["from_host"] >= 590  # type: ignore[operator]
    assert {line["tokens"] for line in lines} == {cold["tokens"]}
    assert "time to first token" in (tmp_path / "first.svg").read_text()


@pytest.mark.usefixtures("one_thread")
def test_a_table_that_breaks_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device fell off")

    monkeypatch.setitem(command.TABLES, "chunk", command.Table("", broken))
    file = tmp_path / "found.json"
    assert main(["bench", "throughput", *CPU, "--json", str(file), "--only", "chunk", "--only", "steps"]) == 1
    found = json.loads(file.read_text())
    assert [one["reason"] for one in found["skipped"]] == ["RuntimeError: the device fell off"] and len(found["tables"]["steps"]) == 2
    assert "FAILED: RuntimeError: the device fell off" in capsys.readouterr().out


def test_what_is_wrong_with_a_table_that_is_not_measured_is_no_matter() -> None:
    given = argparse.Namespace(only=["chunk"], modes=["none"], scenarios=[relay.JOB], requests=100, rows=256, lengths=Path("nowhere.csv"))
    relay.check(given)
    with pytest.raises(InvalidOption):
        relay.check(argparse.Namespace(**{**vars(given), "only": None}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batches", "0,4"], "'0' is no whole number from 1"),
        (["--modes", "shared,fast"], "no list of shared, flat, none"),
        (["--arrivals", "inf"], "'inf' is no number above 0"),
        (["--chunk-prompts", "1024"], "--chunk-prompts has 1 and --chunk-arrivals 3"),
        (["--requests", "256"], "--requests is 256 and --rows 256"),
        (["--only", "relay", "--modes", "none"], "none of shared and flat"),
        (["--steps", "0"], "--steps: '0' is no whole number from 1"),
        (["--seconds", "nan"], "--seconds: 'nan' is no number above 0"),
        (["--json", "nowhere/found.json"], "no folder"),
        (["--lengths", "nowhere.csv"], "cannot be read"),
        (["--only", "hydragen", "--shape", "tiny", "--device", "cpu", "--batches", "400"], "there are 320"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        command.main([*options, "--bandwidth", "1", "--rate", "1"])
