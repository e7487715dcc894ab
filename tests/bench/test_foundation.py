"""What `pando bench` says, and when."""

from types import SimpleNamespace

import pytest

from pando.bench import foundation
from pando.bench.measure import Result
from pando.errors import InvalidOption


@pytest.fixture
def quick_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases that take no time, and nothing is loaded."""
    found = {"decode": Result("decode", 40.0, "tokens/s", 20.0, 2.0, ">= 1.6x", True), "pages": Result("pages", 96, "pages")}
    monkeypatch.setattr(foundation, "CASES", {name: lambda setting, result=result: [result] for name, result in found.items()})
    monkeypatch.setattr(foundation.cases, "prepare", lambda *_: SimpleNamespace(facts=lambda: {"Pando runs in": "float32"}))
    monkeypatch.setattr(foundation, "quiet", lambda: None)


@pytest.mark.usefixtures("quick_cases")
def test_each_result_is_told_as_soon_as_it_is_known_and_the_table_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert foundation.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = ["measuring decode ...", "  decode: 40 tokens/s", "measuring pages ...", "  pages: 96 pages", "case", "decode", "pages"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in wanted]
    assert places == sorted(places)


@pytest.mark.usefixtures("quick_cases")
def test_small_sizes_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    foundation.main(["--quick"])
    assert "1.6x" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--repeats", "--threads", "--chats", "--system-tokens", "--ppl-tokens"])
@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.usefixtures("quick_cases")
def test_sizes_of_nothing_are_refused_and_do_not_stand_for_the_usual_ones(option: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"{option}: '{value}' is no whole number from 1"):
        foundation.main([option, value])


@pytest.mark.usefixtures("quick_cases")
def test_more_threads_than_an_engine_takes_are_refused() -> None:
    with pytest.raises(InvalidOption, match="threads is 99999; it must be a whole number from 1 to 4096"):
        foundation.main(["--threads", "99999"])


@pytest.mark.usefixtures("quick_cases")
def test_the_whole_text_and_a_part_of_it_are_not_scored_both() -> None:
    with pytest.raises(InvalidOption, match="not allowed with"):
        foundation.main(["--full", "--ppl-tokens", "5"])
