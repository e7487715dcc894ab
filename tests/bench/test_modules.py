"""`pando bench modules`: that it compares like with like; how fast anything is, no test can say."""

import json
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
import torch

from pando.bench import answers, modules
from pando.bench.answers import Paragraph, compare_answers, measured, read_questions
from pando.bench.judge import Judge
from pando.bench.modules import COLD, MODULAR, QUICK, Bench
from pando.bench.quality import ENCODES, Way
from pando.bench.random_model import random_model
from pando.engine.llm import LLM
from pando.engine.schemas import Prompt
from pando.errors import InvalidOption

from ..tiny import tiny_config, tiny_llm, tiny_model

TINY = ["--random-weights", "--shape", "tiny", "--quick", "--device", "cpu", "--dtype", "float32"]
PARAGRAPHS = [Paragraph(f"Town {i} lies on river {i}, and <{i * 7}> people live there.", (f"Where is town {i}?",)) for i in range(8)]


@pytest.fixture
def bench() -> Bench:
    return Bench(tiny_llm(tiny_model(max_positions=2048), max_num_batched_tokens=256), QUICK)


def test_a_prompt_of_modules_computes_its_new_words_alone(bench: Bench) -> None:
    [output] = bench.llm.generate(Prompt(bench._prompt(2)))
    _, bound = bench.llm.schemas.bind(bench._prompt(2))
    assert output.num_cached_tokens == bound.module_tokens >= 2 * QUICK.piece


def test_the_plain_prompt_is_the_same_text_with_nothing_cached(bench: Bench) -> None:
    seen: list[tuple[int, int]] = []
    stream = bench.llm.stream

    def watched(prompt: object, params: object) -> object:
        for event in stream(prompt, params):  # type: ignore[arg-type]
            seen.append((event.num_cached_tokens, event.num_prompt_tokens))
            yield event

    bench.llm.stream = watched  # type: ignore[assignment, method-assign]
    samples, tokens = bench._timed(2)
    assert {name: len(found) for name, found in samples.items()} == {MODULAR: 2, modules.ALONE: 2, COLD: 2}
    cold = [facts for facts in set(seen) if facts[0] == 0 and facts[1] > tokens]
    modular = [facts for facts in set(seen) if facts[0] >= tokens]
    assert cold and modular, seen


def test_text_has_the_tokens_that_are_asked_for(bench: Bench) -> None:
    for tokens in (6, 24, 100):
        assert tokens <= len(bench.llm.tokenizer.encode(bench._text(tokens))) < tokens + 12


def test_a_schema_of_many_modules_is_read_whole(bench: Bench) -> None:
    [result] = bench.reading()
    assert result.case == "reading and laying out 50 modules" and result.unit == "ms"


def test_the_curve_is_drawn(bench: Bench, tmp_path: Path) -> None:
    modules.draw(bench.curve(), "tiny", tmp_path / "curve.svg")
    assert "tokens of modules" in (tmp_path / "curve.svg").read_text()


def test_a_model_of_random_weights_needs_no_file() -> None:
    llm = LLM.from_config(tiny_config(), random_model("tiny", torch.device("cpu"), torch.float32, 512, compiled=False))
    [output] = llm.generate("hello")
    assert len(output.outputs[0].token_ids) == 16


def test_questions_are_asked_in_every_way_of_the_same_plain_prompt() -> None:
    judge = Judge(tiny_model(max_positions=2048), tiny_config(max_num_batched_tokens=512), 4)
    found = measured(judge, PARAGRAPHS, 3, 2, 0, [Way("isolated"), Way("causal"), Way("opening"), Way("opening", 1.0)])
    assert len({each.tokens for each in found.values()}) == 1
    assert found[Way("opening", 1.0)].kl == pytest.approx(0, abs=1e-5)
    assert all(found[Way(encode)].kl > 1e-4 for encode in ("isolated", "causal", "opening"))  # type: ignore[arg-type]


def test_what_was_promised_is_judged_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "EngineConfig", lambda disk_gib: tiny_config(max_num_batched_tokens=512, disk_gib=disk_gib))
    results = compare_answers(tiny_model(max_positions=2048), PARAGRAPHS, 4, 1, 0)
    judged = {result.case for result in results if result.target}
    whole = {f"KL, 4 paragraphs, {encode}, repair 1" for encode in ENCODES}
    assert judged == {"KL, 4 paragraphs, opening, repair 0.15", *whole}
    assert len(results) == 15


def test_paragraphs_are_read_from_squads_form(tmp_path: Path) -> None:
    qas = [{"question": "Who?", "id": "1"}]
    raw = {"data": [{"title": "t", "paragraphs": [{"context": "A <b> c.", "qas": qas}]}]}
    (tmp_path / "xquad_en.json").write_text(json.dumps(raw))
    [paragraph] = read_questions(tmp_path)
    assert paragraph == Paragraph("A <b> c.", ("Who?",)) and escape(paragraph.text) == "A &lt;b&gt; c."
    (tmp_path / "xquad_en.json").write_text('{"data": 3}')
    with pytest.raises(InvalidOption, match="not in SQuAD's form"):
        read_questions(tmp_path)


def test_the_command_runs_without_a_file_and_writes_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert modules.main([*TINY, "--json", str(tmp_path / "m.json")]) == 0
    assert "first token" in capsys.readouterr().out
    found = json.loads((tmp_path / "m.json").read_text())
    assert {len(result["samples"].get(COLD, [])) for result in found["results"]} <= {0, 2}
    assert not any(result["target"] for result in found["results"]), "small sizes are not judged"


def test_every_way_has_run_before_it_is_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def turns(runs: Mapping[str, object], repeats: int) -> dict[str, list[float]]:
        ran.append(repeats if len(runs) == 3 else 0)
        return {name: [1.0] * repeats for name in runs}

    monkeypatch.setattr(modules, "interleave", turns)
    bench._timed(1)
    assert [repeats for repeats in ran if repeats] == [1, QUICK.repeats], "a warm-up of ours alone is no comparison"


def test_small_sizes_may_be_repeated_as_often_as_one_likes(tmp_path: Path) -> None:
    assert modules.main([*TINY, "--repeats", "3", "--json", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert {len(result["samples"][COLD]) for result in found["results"] if result["samples"]} == {3}


def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidOption, match="not in SQuAD's form"):
        modules.main([*TINY, "--data", str(tmp_path)])
    few = [{"context": "A.", "qas": [{"question": "Who?"}]}] * 5 + [{"context": "B.", "qas": []}]
    (tmp_path / "xquad_en.json").write_text(json.dumps({"data": [{"paragraphs": few}]}))
    with pytest.raises(InvalidOption, match="5 paragraphs with questions, and a schema takes 6"):
        modules.main([*TINY, "--data", str(tmp_path)])
    with pytest.raises(InvalidOption, match="give --random-weights, too"):
        modules.main(["--shape", "tiny"])
    assert capsys.readouterr().out == ""
