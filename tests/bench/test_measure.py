"""The arithmetic of the table, and that runs are taken in turns."""

import json
from collections.abc import Iterator

import pytest

from pando.bench.measure import Result, as_json, at_most, compared, counted, interleave, line, table, told, worthwhile


def test_runs_take_turns_and_change_direction() -> None:
    order: list[str] = []

    def run(name: str, value: float) -> float:
        order.append(name)
        return value

    samples = interleave({"a": lambda: run("a", 1.0), "b": lambda: run("b", 2.0)}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_terminal_shows_which_run_is_going_on_and_then_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"a": lambda: 1.0, "b": lambda: 2.0}
    assert interleave(runs, 2, shown=True) == interleave(runs, 2)
    assert capsys.readouterr() == ("", "")  # there is no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    interleave(runs, 2)
    assert capsys.readouterr() == ("", "")
    interleave(runs, 2, shown=True)
    out, shown = capsys.readouterr()
    *steps, last = shown.split("\r\033[K")[1:]
    assert not out and not last
    assert [step.strip() for step in steps] == ["a, run 1 of 2", "b, run 1 of 2", "b, run 2 of 2", "a, run 2 of 2"]


def test_a_result_is_told_before_the_next_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def measured() -> Iterator[Result]:
        yield Result("first", 1.0, "ms")
        assert "first: 1 ms" in capsys.readouterr().out
        yield Result("second", 2.0, "ms")

    assert [result.case for result in told(measured())] == ["first", "second"]
    assert "second: 2 ms" in capsys.readouterr().out


def test_a_rate_is_compared_by_medians_with_the_best_other() -> None:
    samples = {"ours": [30.0, 90.0, 40.0], "slow": [1.0, 1.0, 1.0], "quick": [20.0, 10.0, 500.0]}
    result = compared("decode", samples, "tokens/s", ours="ours", higher=True, at_least=2)
    assert (result.ours, result.theirs, result.ratio, result.met) == (40, 20, 2, True)
    assert result.note == "against quick"


def test_a_time_is_better_when_it_is_shorter() -> None:
    samples = {"ours": [0.5], "slow": [9.0], "quick": [1.0]}
    result = compared("first token", samples, "s", ours="ours", higher=False, at_least=2.5, note="warm")
    assert (result.theirs, result.ratio, result.met) == (1.0, 2.0, False)
    assert result.note == "against quick; warm"


def test_without_a_target_nothing_is_judged() -> None:
    result = compared("x", {"ours": [1.0], "other": [2.0]}, "s", ours="ours", higher=False, at_least=None)
    assert result.met is None and result.target == ""


def test_small_sizes_are_judged_by_what_must_be_equal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    slow, wrong = Result("x", 3.0, "ms", 2.0, 0.5, ">= 1x", False, "why", {"ours": [3.0]}), counted("greedy", 19, 20)
    assert told([slow, wrong], judged=False) == [Result("x", 3.0, "ms", 2.0, 0.5, note="why", samples={"ours": [3.0]}), wrong]
    assert "target" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(("equal", "met"), [(20, True), (19, False)])
def test_one_different_text_is_one_too_many(equal: int, met: bool) -> None:
    assert counted("greedy", equal, 20).met is met


@pytest.mark.parametrize(("value", "met"), [(96, True), (97, False)])
def test_a_bound_holds_up_to_itself(value: float, met: bool) -> None:
    assert at_most("pages", value, "pages", 96).met is met


def test_the_table_shows_failure_louder_than_success_and_keeps_the_notes() -> None:
    text = table([
        Result("decode", 40.0, "tokens/s", 20.0, 2.0, ">= 1.6x", True, "against generate"),
        Result("shared decode", 0.05375, "s", None, None, ">= 4x", False),
    ])  # fmt: skip
    lines = text.splitlines()
    assert lines[0].split() == ["case", "Pando", "against", "unit", "ratio", "target", "met"]
    assert lines[2].split() == ["decode", "40", "20", "tokens/s", "2.00x", ">=", "1.6x", "yes"]
    assert lines[3].split() == ["shared", "decode", "0.05375", "s", ">=", "4x", "NO"]
    assert lines[2].index("40") == lines[3].index("0.05375")
    assert "  decode: against generate" in lines


def test_the_json_keeps_every_sample() -> None:
    result = compared("x", {"ours": [1.0, 3.0], "other": [2.0, 2.0]}, "s", ours="ours", higher=False, at_least=1)
    read = json.loads(json.dumps(as_json({"cores": 2}, [result])))
    assert read["machine"] == {"cores": 2}
    assert read["results"][0]["samples"] == {"ours": [1.0, 3.0], "other": [2.0, 2.0]}


def test_a_result_can_be_told_before_the_table_is_ready() -> None:
    told = line(Result("decode", 40.0, "tokens/s", 20.0, 2.0, ">= 4x", False, "against generate"))
    assert told == "  decode: 40 tokens/s, against 20, 2.00x, target >= 4x: NO (against generate)"
    assert line(Result("pages", 96, "pages")) == "  pages: 96 pages"


def test_a_variant_more_than_twice_slower_is_left_out_and_said() -> None:
    kept, note = worthwhile({"growing": 10.0, "static": 20.1, "half": 10.05}, 2)
    assert kept == ["static", "half"]
    assert note == "not measured after a short probe: growing (2.0x slower)"


def test_the_best_variant_always_stays() -> None:
    assert worthwhile({"only": 0.001}, 2) == (["only"], "")
    assert worthwhile({"a": 5.0, "b": 5.0}, 2) == (["a", "b"], "")
