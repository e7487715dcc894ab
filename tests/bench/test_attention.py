"""`pando bench attention`: that it measures what it says, and refuses what it cannot; how fast anything is, no test can say."""

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import geometric_mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pando import cli
from pando.bench.attention import calibrate, command
from pando.bench.attention.bench import Bench
from pando.bench.attention.calibrate import Sample, fit, lost, pays
from pando.bench.attention.cases import Case, Part, read_cases
from pando.bench.attention.clock import Clock, Limits, Run, Timing, Work, floor_us, relay_formula, work_of
from pando.bench.attention.levels import ByLevels
from pando.bench.attention.report import Measured, Skipped, Table, as_json, read_peers, summary
from pando.bench.attention.scene import Scene
from pando.bench.attention.suites import SUITES, Heads, beams, single, tree
from pando.engine import costs
from pando.engine.costs import Subject, chosen_cost, cost_of, default_cost, device_name, keep_cost
from pando.errors import InvalidOption
from pando.kv.plan import ALWAYS, NEVER, CostModel
from pando.model import load

from ..tiny import compile_folder, tiny_model

CPU = torch.device("cpu")
SMALL = Heads(9, 3, 16, "float32")
PAGE = 16
FIELDS = {"name", "shared_us", "flat_us", "torch_us", "floor_us", "rel_err", "shared_reads"}
GIVEN = {
    "name": "a fork",
    "hq": 9,
    "hkv": 3,
    "d": 16,
    "dtype": "fp32",
    "segments": [{"parent": None, "tokens": 40}, {"parent": 0, "tokens": 5}, {"parent": 0, "tokens": 17}],
    "rows": [1, 2, 2],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Kernels are compiled once for the whole run of tests."""
    home = tmp_path_factory.mktemp("home")
    (home / "native").symlink_to(compile_folder())
    return home


@pytest.fixture(autouse=True)
def home(folder, monkeypatch):
    """Nothing of the user's is read or written."""
    monkeypatch.setenv("PANDO_HOME", str(folder))
    return folder


@pytest.fixture
def bench(folder):
    return Bench(CPU, PAGE, Clock(CPU, repeats=2, flush=1 << 10), Limits(CPU, 1.0, 1.0), folder)


def file_of(folder, content):
    file = folder / "cases.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


# Cases


def test_a_file_may_hold_one_case_or_several(tmp_path):
    [case] = read_cases(file_of(tmp_path, GIVEN))
    assert case == Case("a fork", 9, 3, 16, "float32", (Part(None, 40), Part(0, 5), Part(0, 17)), (1, 2, 2))
    assert read_cases(file_of(tmp_path, [GIVEN, {**GIVEN, "name": "b"}])) == [case, replace(case, name="b")]
    assert read_cases(file_of(tmp_path, asdict(case))) == [case]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hq": 8}, "8 query heads cannot share 3 key heads"),
        ({"hkv": 0}, "hkv is 0"),
        ({"d": 1 << 20}, "d is 1048576; it must be from 1 to 1024"),
        ({"d": None}, "'d' must be a whole number, not missing"),
        ({"d": 16.5}, "'d' must be a whole number, not 16.5"),
        ({"hq": True}, "'hq' must be a whole number, not true"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32"),
        ({"name": ""}, "its name has 0 characters"),
        ({"name": 7}, "'name' must be a text"),
        ({"name": "a\nb"}, "case 'a\\nb': its name has characters that are not printed"),
        ({"name": "\ud800"}, "its name has characters that are not printed"),
        ({"segments": []}, "it has 0 segments"),
        ({"segments": {}}, "'segments' must be a list"),
        ({"rows": []}, "it has 0 rows"),
        ({"rows": [3]}, "row 0 ends in segment 3, and there are 3 segments"),
        ({"rows": [-1]}, "row 0 ends in segment -1"),
        ({"segments": [{"tokens": 4}]}, "segment 0 must be"),
        ({"segments": [{"parent": None, "tokens": -4}], "rows": [0]}, "segment 0 has -4 tokens"),
        ({"segments": [{"parent": None, "tokens": 1 << 40}], "rows": [0]}, "segment 0 has 1099511627776 tokens"),
        ({"segments": [{"parent": None, "tokens": 1 << 26}] * 2, "rows": [0]}, "tokens together"),
        ({"segments": [{"parent": None, "tokens": 1 << 20}], "rows": [0] * 1025}, "its rows read more than"),
        (
            {"segments": [{"parent": i - 1 if i else None, "tokens": int(not i)} for i in range(1 << 12)], "rows": [4095] * 1025},
            "its rows read more than 4194304 segments together",
        ),
        ({"segments": [{"parent": 4, "tokens": 4}], "rows": [0]}, "the parent of segment 0 is 4"),
        ({"segments": [{"parent": 0, "tokens": 4}], "rows": [0]}, "segment 0 is behind itself"),
        ({"segments": [{"parent": 1, "tokens": 4}, {"parent": 0, "tokens": 4}], "rows": [0]}, "is behind itself"),
        ({"segments": [{"parent": None, "tokens": 0}], "rows": [0]}, "row 0 has no tokens to read"),
    ],
)
def test_a_case_that_means_nothing_is_refused_with_its_name_and_reason(tmp_path, change, complaint):
    with pytest.raises(InvalidOption) as refused:
        read_cases(file_of(tmp_path, {**GIVEN, **change}))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no case"),
        ("[7]", "entry 0 is no object"),
        ("[" * 100_000, "cannot be read as JSON"),
        ([GIVEN, GIVEN], "'a fork' is the name of several cases"),
    ],
)
def test_a_file_that_holds_no_cases_is_refused(tmp_path, content, complaint):
    with pytest.raises(InvalidOption, match=complaint):
        read_cases(file_of(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match="cannot be read"):
        read_cases(tmp_path / "none.json")


def test_children_may_stand_before_their_parents():
    case = Case("late", 1, 1, 8, "float32", (Part(2, 3), Part(2, 4), Part(None, 10)), (0, 1, 2))
    assert case.order.index(2) < min(case.order.index(0), case.order.index(1))
    assert case.first == [10, 10, 0]
    assert [case.length(row) for row in range(3)] == [13, 14, 10]
    assert case.readers == [[0], [1], [0, 1, 2]]
    assert case.depth == [1, 1, 0]
    assert case.shared_share == 30 / 37


def test_every_suite_names_its_cases_differently():
    for suite in SUITES.values():
        names = [case.name for case in suite.cases()]
        assert len(set(names)) == len(names) > 0


def test_trees_are_spread_evenly():
    case = tree(SMALL, [(2, 30), (4, 20), (8, 10)])
    assert [len(readers) for readers in case.readers] == [4] * 2 + [2] * 4 + [1] * 8
    assert {case.length(row) for row in range(8)} == {60}


def test_beams_leave_a_trunk_one_after_the_other():
    case = beams(SMALL, 100, depth=4, step=10, leaving=2)
    assert [case.length(row) for row in range(8)] == [120, 120, 130, 130, 140, 140, 150, 150]
    assert max(case.depth) == 5


def test_tokens_may_all_be_shared_or_none():
    assert single(SMALL, 4, 100, 0).shared_share == 1
    assert single(SMALL, 4, 0, 100).shared_share == 0


# The floor


def test_the_floor_is_by_bytes_or_by_products():
    """The published floor of these rows on a GPU of 4.61 TB/s and 803 TFLOP/s."""
    for sizes, expected in (((32, 1024, 64), 11.0), ((256, 2048, 128), 124.7), ((32, 0, 2048), 233.0)):
        assert floor_us(work_of(single(Heads(32, 32), *sizes)), 4.61, 803) == pytest.approx(expected, rel=0.01)
    assert floor_us(work_of(single(Heads(32, 8), 1024, 16384, 128)), 4.61, 803) == pytest.approx(344.9, rel=0.01)  # by products
    assert floor_us(Work(10**6, 10**12), 1.0, 1.0) == 10**6


def test_a_segment_that_no_row_reads_costs_nothing():
    case = Case("a", 2, 1, 8, "float32", (Part(None, 100), Part(None, 9)), (0,))
    assert work_of(case) == work_of(replace(case, segments=case.segments[:1]))


def test_relays_formula_holds_for_one_shared_prefix_alone():
    assert relay_formula(single(SMALL, 32, 2048, 64)) == pytest.approx((2048 + 64 + 2) / (2048 / 32 + 64 + 7))
    assert relay_formula(single(SMALL, 32, 2048, 0)) == pytest.approx(2050 / (64 + 7))
    assert relay_formula(tree(SMALL, [(1, 64), (2, 64), (4, 64)])) is None
    assert relay_formula(single(SMALL, 32, 0, 64)) is None


def test_limits_are_measured_where_they_are_not_given(monkeypatch):
    monkeypatch.setattr("pando.bench.attention.clock.COPY", 1 << 20)
    monkeypatch.setattr("pando.bench.attention.clock.SIDES", (64,))
    limits = Limits(CPU)
    assert 0 < limits.bandwidth < 100
    assert 0 < limits.rate("float32") < 1000
    assert Limits(CPU, 2.0, 3.0).rate("float32") == 3.0


# What is measured


CASES = [
    single(SMALL, 5, 40, 7),
    single(SMALL, 4, 64, 0),
    single(SMALL, 3, 0, 21),
    single(SMALL, 1, 33, 5),
    tree(SMALL, [(1, 50), (2, 33), (6, 9)]),
    tree(SMALL, [(2, 32), (6, 16)]),
    beams(SMALL, 20, depth=3, step=8, leaving=2),
    Case("ragged", 6, 2, 16, "float32", (Part(None, 17), Part(0, 1), Part(0, 30), Part(None, 0), Part(3, 5), Part(2, 16)), (1, 5, 5, 0, 4)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_variant_finds_what_the_definition_finds(bench, case):
    found = bench.measure(case)
    assert isinstance(found, Measured)
    assert (found.wrong, found.rows_checked) == ("", len(case.rows))
    for error in (found.rel_err, found.flat_rel_err, found.torch_rel_err):
        assert error is not None and error < 1e-5
    assert (found.shared_reads > 0) == (case.shared_share > 0)
    assert min(found.shared_us, found.flat_us, found.torch_us, found.floor_us) > 0


def test_shared_and_flat_read_the_same_pages_differently():
    scene = Scene(CASES[0], PAGE, CPU)
    shared, _ = scene.plan(ALWAYS)
    flat, _ = scene.plan(NEVER)
    assert (shared.shared, flat.shared) == (1, 0)
    assert set(shared.pages.tolist()) == set(flat.pages.tolist())
    assert len(flat.pages) == len(shared.pages) + 4 * 3  # the prefix fills 3 pages, which 5 rows read instead of one
    assert shared.shared_reads[0].rows == (0, 1, 2, 3, 4)


def test_a_segment_begins_on_a_page_of_its_own():
    scene = Scene(CASES[-1], PAGE, CPU)
    pages = [page for index in range(len(scene.segments)) for page in scene.pages(index)]
    assert sorted(pages) == list(range(len(scene.k) // PAGE))


def test_the_last_pages_of_rows_are_as_an_engine_has_them():
    """There they are planned whole, and kernels are told how much of them nobody has written yet."""
    reads = Scene(single(SMALL, 5, 48, 7), PAGE, CPU).plan(ALWAYS)[1]
    assert (reads.unseen, reads.tokens.tolist()) == (5 * (PAGE - 7), [48, *[PAGE] * 5])
    assert Scene(single(SMALL, 5, 48, PAGE), PAGE, CPU).plan(ALWAYS)[1].unseen == 0


def test_torch_reads_views_of_the_pool_and_no_copies():
    scene = Scene(tree(SMALL, [(1, 50), (2, 33), (6, 9)]), PAGE, CPU)
    start, end = scene.k.data_ptr(), scene.k.data_ptr() + scene.k.nbytes
    keys = [batch.k for level in ByLevels(scene)._levels for batch in level]
    assert [tuple(key.shape) for key in keys] == [(1, 3, 50, 16), (2, 3, 33, 16), (6, 3, 9, 16)]
    assert all(start <= key.data_ptr() < end for key in keys)


def test_equal_plans_have_equal_times_and_the_choice_is_told(bench, tmp_path):
    long, alone = single(SMALL, 6, 256, 7), single(SMALL, 3, 0, 21)
    found = bench.measure(long)
    assert (found.auto, found.auto_us, found.auto_shared_reads) == ("shared", found.shared_us, 1)
    found = bench.measure(alone)
    assert (found.auto, found.auto_us, found.shared_us) == ("flat", found.flat_us, found.flat_us)
    mine = replace(bench, home=tmp_path)
    (tmp_path / "native").symlink_to(bench.home / "native")
    mine.costs.mkdir()
    keep_cost(CostModel(10_000, 0), Subject(device_name(CPU), "float32", 9, 3, 16), mine.costs)
    assert mine.measure(long).auto == "flat"


def test_a_wrong_result_is_told_and_is_the_exit_code(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(ByLevels, "attend", lambda self, q: q * math.nan)
    file = file_of(tmp_path, GIVEN)
    assert command.main(["--device", "cpu", "--cases", str(file), "--repeats", "1", *LIMITS]) == command.EXIT_WRONG
    assert "WRONG: torch is not finite" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_breaks_costs_its_own_case_alone(monkeypatch, capsys, tmp_path):
    broken = []

    def breaks(self, q):
        broken.append(q)
        if len(broken) == 1:
            raise RuntimeError("out of registers")
        return q.new_zeros(q.shape)

    monkeypatch.setattr(ByLevels, "attend", breaks)
    file, out = file_of(tmp_path, [GIVEN, {**GIVEN, "name": "b"}]), tmp_path / "out.json"
    assert command.main(["--device", "cpu", "--cases", str(file), "--repeats", "1", "--json", str(out), *LIMITS]) == command.EXIT_WRONG
    assert "FAILED: RuntimeError: out of registers" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert ([case["name"] for case in found["cases"]], [case["failed"] for case in found["skipped"]]) == (["b"], [True])


def test_a_case_that_does_not_fit_is_skipped_with_the_reason(bench, monkeypatch):
    monkeypatch.setattr("pando.bench.attention.bench.free_memory", lambda device: 1000)
    found = bench.measure(CASES[0])
    assert isinstance(found, Skipped) and "GiB are free" in found.reason
    assert "skipped: its keys" in Table([found.name], False).line(found)


# The command


LIMITS = ("--bandwidth", "1", "--rate", "1", "--page-size", str(PAGE))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(command, "Clock", lambda device, repeats: Clock(device, repeats, flush=1 << 10))


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_line_for_each_case_and_writes_json(tmp_path, capsys):
    cases = file_of(tmp_path, [GIVEN, asdict(CASES[0])])
    peers = tmp_path / "peers.json"
    peers.write_text(json.dumps({CASES[0].name: 1e6}))
    out = tmp_path / "out.json"
    words = ["bench", "attention", "--device", "cpu", "--cases", str(cases), "--repeats", "2", "--json", str(out), "--peers", str(peers)]
    assert cli.main([*words, *LIMITS]) == 0
    printed = capsys.readouterr().out
    assert "a fork " in printed and "peer us" in printed and "faster than the best peer (1 cases" in printed
    found = json.loads(out.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert {"device", "versions", "cases"} <= set(found)
    assert [case["name"] for case in found["cases"]] == ["a fork", CASES[0].name]
    for case in found["cases"]:
        assert set(case) >= FIELDS
        assert case["rel_err"] < 1e-5 and case["floor_us"] > 0 and case["shared_reads"] > 0 and case["plan_us"] > 0
        assert case["shared_us"] > 0 and case["flat_us"] > 0 and case["torch_us"] > 0
    assert (found["cases"][0]["peer_us"], found["cases"][1]["peer_us"]) == (None, 1e6)
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.usefixtures("quick")
def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.svg"
    cases = file_of(tmp_path, {**GIVEN, "name": r"$\frac$"})  # is no formula
    assert command.main(["--device", "cpu", "--cases", str(cases), "--repeats", "1", "--plot", str(file), *LIMITS]) == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--suite nonsense", "invalid choice: 'nonsense'"),
        ("--suite cpu --cases x.json", "not allowed with"),
        ("--device cpu --match nowhere", "--match 'nowhere': none of the 7 cases"),
        ("--repeats 0", "--repeats: '0' is no whole number from 1"),
        ("--threads 0", "--threads: '0' is no whole number from 1"),
        ("--page-size 0", "--page-size: '0' is no whole number from 1"),
        ("--calibrate --head-size 0", "--head-size: '0' is no whole number from 1"),
        ("--bandwidth 0", "--bandwidth: '0' is no number above 0"),
        ("--rate nan", "--rate: 'nan' is no number above 0"),
        ("--threads 99999", "threads is 99999; it must be a whole number from 1 to 4096"),
        ("--page-size 99999", "page_size is 99999"),
        ("--dtype int8", "'int8' is not one of"),
        ("--json nowhere/out.json", "there is no folder nowhere"),
        ("--plot out.txt", "must end in"),
        ("--heads 9/3", "are for --calibrate"),
        ("--calibrate --json out.json", "leave out --json"),
        ("--device cpu --calibrate --heads 9/4", "--heads 9/4: give query and key heads as 32/8"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_measured(words, complaint):
    with pytest.raises(InvalidOption) as refused:
        command.main(words.split())
    assert complaint in str(refused.value)


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidOption, match="needs matplotlib"):
        command.main(["--plot", "out.svg"])


def test_the_suites_are_listed(capsys):
    assert command.main(["--suite", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in SUITES)


@pytest.mark.parametrize("content", ["[]", '{"a": 0}', '{"a": "fast"}', '{"a": true}', "{"])
def test_a_file_of_peers_that_holds_no_times_is_refused(tmp_path, content):
    with pytest.raises(InvalidOption, match="--peers"):
        read_peers(file_of(tmp_path, content))


def test_the_summary_tells_means_and_where_the_choice_was_wrong():
    one = Measured("a", 10, 10, 40, 20, 5, 0.001, 0.001, 0.001, 1, 1, 1, 1, "shared", 0.9, None, "native")
    other = replace(one, name="b", shared_us=40, flat_us=10, auto_us=40)
    assert geometric_mean([0.25, 4]) == pytest.approx(1)
    lines = summary([one, other])
    assert lines[0] == "by the kernels called native"
    assert lines[1].startswith("1.00x faster than flat")
    assert lines[-1].endswith("in 1: b")
    assert as_json({"device": "x", "versions": {}}, [one, Skipped("c", "why")])["skipped"] == [
        {"name": "c", "reason": "why", "failed": False}
    ]


# Calibration


def synthetic(cost, group, noise=0.0):
    """Times of a device on which sharing pays exactly where a cost model says."""
    dice, found = random.Random(0), []
    for rows, tokens in itertools.product((2, 3, 4, 6, 8, 12, 16, 24, 32, 64), (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)):
        flat = 100 + rows * tokens
        shared = flat - (tokens * (rows - 1) - cost.launch - cost.merge * group * rows)
        found.append(Sample(rows, tokens, shared * (1 + noise * dice.uniform(-1, 1)), flat * (1 + noise * dice.uniform(-1, 1))))
    return found


@pytest.mark.parametrize("cost", [CostModel(48, 2), CostModel(700, 0), CostModel(0, 16), CostModel(300, 8)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_calibration_finds_the_model_behind_the_times(cost, group):
    found = synthetic(cost, group)
    model = fit(found, group)
    assert lost(found, group, model) == 0
    assert lost(synthetic(cost, group, noise=0.02), group, fit(synthetic(cost, group, noise=0.02), group)) < 0.003
    for rows in (2, 8, 32):
        expected = cost.launch + cost.merge * group * rows
        assert model.launch + model.merge * group * rows == pytest.approx(expected, rel=0.35, abs=40)


def test_a_calibration_counts_many_rows_as_a_plan_does():
    group, found = 8, synthetic(CostModel(2000, 128), 8)  # many rows cost more there than any pair of values says
    pairs = [CostModel(launch, merge) for launch in (0, 2000, 25_000, 50_000, 110_000) for merge in (0.0, 4.0, 11.0, 16.0, 32.0, 128.0)]
    assert lost(found, group, fit(found, group)) <= min(lost(found, group, pair) for pair in pairs) + calibrate.NOISE


def test_the_default_stays_where_nothing_better_is_found():
    assert fit(synthetic(CostModel(), 3), 3) == CostModel()
    assert fit(synthetic(CostModel(40, 2.2), 3), 3) == CostModel()


def test_a_device_on_which_sharing_never_pays_is_told_so():
    found = [Sample(rows, tokens, 20.0, 10.0) for rows in (2, 8) for tokens in (64, 512)]
    model = fit(found, 1)
    assert not any(pays(sample, 1, model) for sample in found)
    always = [sample._replace(shared_us=5.0) for sample in found]
    assert all(pays(sample, 1, fit(always, 1)) for sample in found)


def test_what_is_lost_is_the_part_of_the_time_that_a_better_choice_saves():
    found = [Sample(2, 100, shared_us=10, flat_us=15), Sample(2, 100, shared_us=30, flat_us=10)]
    assert lost(found, 1, ALWAYS) == pytest.approx((0 + 2) / 2)
    assert lost(found, 1, NEVER) == pytest.approx((0.5 + 0) / 2)


def test_longer_segments_are_measured_until_sharing_is_clearly_better():
    asked = []

    def measure(case):
        asked.append(case)
        tokens, rows = case.segments[0].tokens, len(case.rows)
        return 100.0 + tokens, 50.0 + tokens * rows

    found = calibrate.samples(SMALL, PAGE, measure)
    assert len(found) == len(asked)
    assert {sample.rows for sample in found} == set(calibrate.ROWS)
    many = [sample for sample in found if sample.rows == 32]
    assert many[0].tokens == PAGE and len(many) < len(calibrate.PAGES)


@pytest.mark.usefixtures("quick")
def test_a_calibration_is_kept_for_engines_on_the_same_device(folder, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("PANDO_HOME", str(tmp_path))
    (tmp_path / "native").symlink_to(folder / "native")
    monkeypatch.setattr(calibrate, "ROWS", (2, 4))
    monkeypatch.setattr(calibrate, "PAGES", (1, 8))
    monkeypatch.setattr(load, "fastest_dtype", lambda: torch.float32)
    assert command.main(["--device", "cpu", "--calibrate", "--heads", "4/2", "--head-size", "8", "--repeats", "1", *LIMITS]) == 0
    [file] = (tmp_path / "costs").iterdir()
    assert str(file) in capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert len(kept["samples"]) >= 3
    with caplog.at_level("INFO"):
        assert chosen_cost(tiny_model(), "auto", tmp_path / "costs") == CostModel(kept["launch"], kept["merge"])
    assert "measured on this device" in caplog.text
    assert cost_of(kept["device"], "float32", 4, 4, 8, tmp_path / "costs") is None


def test_a_gpu_shares_no_read_of_heads_that_fill_its_tiles_alone(tmp_path, monkeypatch, caplog):
    tokens, rows, gpu = np.array([8192]), np.array([256]), torch.device("cuda")
    for heads, kv_heads, shared in ((32, 1, True), (64, 2, True), (48, 1, False), (71, 1, False)):
        assert default_cost(gpu, heads, kv_heads).pays(tokens, rows, heads // kv_heads) == shared
        assert default_cost(CPU, heads, kv_heads).pays(tokens, rows, heads // kv_heads)
        monkeypatch.setattr(costs, "device_name", lambda _: "A GPU")
        model = SimpleNamespace(device=gpu, dtype=torch.bfloat16, decoder=SimpleNamespace(geometry=(heads, kv_heads, 64)))
        caplog.clear()
        with caplog.at_level("INFO"):
            assert chosen_cost(model, "auto", tmp_path) == default_cost(gpu, heads, kv_heads)
        assert ("no read is shared" in caplog.text) != shared
    keep_cost(default_cost(gpu, 71, 1), SUBJECT, tmp_path)
    assert cost_of(*SUBJECT, tmp_path) == default_cost(gpu, 71, 1), "a calibration may end with the default"


SUBJECT = Subject("A GPU (rev. 2)", "bfloat16", 32, 8, 128)


def test_a_calibration_is_kept_and_found_again(tmp_path):
    folder = tmp_path / "deep" / "costs"
    keep_cost(CostModel(1.5, 2.5), SUBJECT, folder)
    file = keep_cost(CostModel(100.0, 0.5), SUBJECT, folder)
    assert [found.name for found in folder.iterdir()] == [file.name]
    assert cost_of(*SUBJECT, folder) == CostModel(100.0, 0.5)


def test_a_device_has_a_file_whatever_its_name(tmp_path):
    for name in ("x" * 1000, "../../etc/passwd", "\0/", ""):
        file = keep_cost(CostModel(1.0, 2.0), SUBJECT._replace(device=name), tmp_path)
        assert file.parent == tmp_path and cost_of(name, *SUBJECT[1:], tmp_path) == CostModel(1.0, 2.0)


def test_a_calibration_holds_for_a_number_of_threads(monkeypatch):
    one = device_name(CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert device_name(CPU) != one and device_name(CPU).endswith(", 97 threads")


def test_a_missing_calibration_is_none_and_no_complaint(tmp_path, caplog):
    assert cost_of(*SUBJECT, tmp_path) is None
    assert cost_of(*SUBJECT, tmp_path / "none") is None
    assert caplog.records == []


BROKEN = ["", "{", "[]", "7", "[" * 100_000, "{}", '{"launch": 1}', '{"launch": 1, "merge": 1}', "\xff"]


@pytest.mark.parametrize("content", [*BROKEN, *(f'{{"launch": {word}, "merge": 1}}' for word in ("-1", "true", "NaN", "Infinity", '"1"'))])
def test_a_broken_calibration_is_ignored_with_one_warning(tmp_path, caplog, content):
    SUBJECT.file(tmp_path).write_bytes(content.encode("latin-1"))
    assert cost_of(*SUBJECT, tmp_path) is None
    assert len(caplog.records) == 1 and "is ignored" in caplog.text


def test_a_calibration_of_another_device_is_ignored(tmp_path, caplog):
    """Two names may be alike in the letters that a file's name keeps."""
    keep_cost(CostModel(100.0, 0.5), SUBJECT, tmp_path)
    assert cost_of(*SUBJECT._replace(device="A GPU [rev. 2]"), tmp_path) is None
    assert "another device" in caplog.text


def test_a_calibration_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        keep_cost(CostModel(), SUBJECT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_wakes_a_run_comes_right_before_it_and_is_off_the_clock() -> None:
    done = list[str]()

    def wake() -> None:
        done.append("wake")
        time.sleep(0.05)

    found = Clock(CPU, repeats=3, flush=1 << 10).medians({"run": lambda: done.append("run")}, {"run": wake})
    assert done == ["run", *["wake", "run"] * 3]
    assert found["run"].us < 50_000


def test_on_a_cpu_whatever_is_timed_is_woken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = list[set[str]]()
    medians = Clock.medians

    def watched(self: Clock, runs: Mapping[str, Run], wakes: Mapping[str, Run] | None = None) -> dict[str, Timing]:
        woken.append(set(runs) - set(wakes or {}))
        return medians(self, runs, wakes)

    monkeypatch.setattr(Clock, "medians", watched)
    bench.measure(Case("a", 4, 2, 16, "float32", (Part(None, 40), Part(0, 7), Part(0, 7)), (1, 2)))
    assert woken == [set()]
