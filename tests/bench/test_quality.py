"""`pando schema quality`: that distances are what they say, and that repair in full leaves none."""

import json
import math
from pathlib import Path

import pytest
import torch

from pando.bench import quality
from pando.bench.judge import Distance, Judge
from pando.bench.options import text_of
from pando.bench.quality import Way, encoded, report, shown, split
from pando.engine.request import Request
from pando.errors import InvalidOption, InvalidPrompt, MarkupError
from pando.kv.run import Origin, Run
from pando.markup.pml import parse

from ..engine.test_imports import OPENING, module, words
from ..tiny import greedy, tiny_config, tiny_model, write_checkpoint

RUNS = (OPENING, module(2, 17, 10), module(3, 13, 27), Run(words(9, 6), 40))
SCHEMA = """<schema name="s">You read.
<module name="a">Apples are red and round and sweet.</module>
<module name="b" encode="isolated">Boats swim on the wide blue sea.</module>
<module name="c">Cats sleep all day.</module>
</schema>"""
PROMPTS = """<prompt schema="s"><a/><b/> What is red?</prompt>
<prompt schema="s"><a/><c/> Who sleeps?</prompt>
"""


@pytest.fixture
def judge() -> Judge:
    return Judge(tiny_model(layers=4), tiny_config(max_num_batched_tokens=256), 8)


def test_a_plain_prompt_is_no_distance_from_itself(judge: Judge) -> None:
    reference = judge.reference(RUNS)
    found = judge.distance([Run(reference.prompt, 0)], reference)
    assert found.kl == pytest.approx(0, abs=1e-5) and found.agreement == 1
    assert found.perplexity == pytest.approx(reference.distance.perplexity, rel=1e-4)


def test_the_reference_is_the_greedy_answer_and_its_distributions(judge: Judge) -> None:
    reference = judge.reference(RUNS)
    assert len(reference.answer) == len(reference.scores) == 8
    assert reference.scores.argmax(-1).tolist() == list(reference.answer)
    torch.testing.assert_close(reference.scores.exp().sum(-1), torch.ones(8))


def test_modules_are_some_distance_away_and_repaired_in_full_none(judge: Judge) -> None:
    reference = judge.reference(RUNS)
    apart, whole = judge.distance(RUNS, reference), judge.distance(RUNS, reference, 1.0)
    assert apart.kl > 1e-3 and apart.foreign == 13
    assert whole.kl == pytest.approx(0, abs=1e-5) and whole.agreement == 1 and whole.repaired == 13


def test_arguments_are_no_module_tokens_repaired_or_not(judge: Judge) -> None:
    runs = (*RUNS[:2], Run(words(4, 5), 27), module(3, 13, 32), Run(words(9, 6), 45))
    reference = judge.reference(runs)
    assert judge.distance(runs, reference).foreign == judge.distance(runs, reference, 0.5).foreign == 13


def test_the_distance_is_what_the_formulas_say(judge: Judge) -> None:
    """Held against a row of the same states, answered step by step."""
    reference = judge.reference(RUNS)
    found = judge.distance(RUNS, reference)
    logits = []
    for known in range(len(reference.answer)):
        last = Run((*RUNS[-1].tokens, *reference.answer[:known]), 40)
        logits.append(_next(judge, (*RUNS[:-1], last)))
    ours = torch.stack(logits).log_softmax(-1)
    kl = (reference.scores.exp() * (reference.scores - ours)).sum()
    assert found.divergence == pytest.approx(float(kl), rel=1e-3)
    assert found.agreed == int((ours.argmax(-1) == reference.scores.argmax(-1)).sum())
    surprise = -sum(float(row[token]) for row, token in zip(ours, reference.answer, strict=True))
    assert found.surprise == pytest.approx(surprise, rel=1e-4)


def _next(judge: Judge, runs: tuple[Run, ...]) -> torch.Tensor:
    judge.engine.add(Request(f"{runs[-1].end}", runs[-1].tokens, greedy(1), runs=runs[:-1]))
    _, logits = judge.engine.drain()
    return logits[-1]


def test_a_prompt_that_ends_with_a_module_is_measured_too(judge: Judge) -> None:
    runs = RUNS[:-1]
    reference = judge.reference(runs)
    assert judge.distance(runs, reference, 1.0).kl == pytest.approx(0, abs=1e-5)


def test_the_blame_is_that_of_the_module_that_has_not_seen_its_context(judge: Judge) -> None:
    """The first module stands where it was encoded: nothing is won by encoding it again. The second one is to blame for all."""
    reference = judge.reference(RUNS)
    whole = judge.distance(RUNS, reference).divergence
    assert judge.blame(RUNS, reference, [1]).divergence == pytest.approx(whole, rel=1e-3)
    assert judge.blame(RUNS, reference, [2]).divergence == pytest.approx(0, abs=1e-4)


def test_distances_of_prompts_add_up() -> None:
    total = Distance(2, 0.5, 1, 2.0, 3, 4) + Distance(2, 0.3, 2, 2.0, 0, 0)
    assert (total.kl, total.agreement, total.repaired, total.foreign) == (0.2, 0.75, 3, 4)
    assert total.perplexity == pytest.approx(math.e)


def test_a_report_has_every_way_and_names_the_modules(judge: Judge) -> None:
    prompts = [parse(text) for text in split(PROMPTS)]
    ways = [Way(encode, share) for encode in (None, "opening", "causal") for share in (0.0, 1.0)]
    found = report(judge, parse(SCHEMA), prompts, ways)
    assert found.prompts == 2 and [line.way for line in found.lines] == ways
    for line in found.lines:
        assert line.distance is not None and line.distance.tokens == found.plain.tokens
        assert (line.distance.kl < 1e-5) == (line.way.repair == 1), line
    assert {share.path: share.prompts for share in found.shares} == {"(opening)": 2, "a": 2, "b": 1, "c": 1}
    assert found.shares[0].path in ("b", "c"), "the others have seen all that stands before them"
    text = shown(found)
    assert "as the schema says" in text and "causal" in text and "KL, nats per token" in text


def test_a_prompt_with_holes_cannot_be_repaired_and_says_so(judge: Judge) -> None:
    schema = parse(SCHEMA.replace("<schema", '<schema layout="fixed"'))
    found = report(judge, schema, [parse('<prompt schema="s"><a/><c/> Who sleeps?</prompt>')], [Way(), Way(None, 0.5)])
    assert found.lines[0].distance is not None and found.lines[1].distance is None
    assert "without holes" in found.lines[1].note and "without holes" in shown(found)


def test_another_way_to_encode_replaces_that_of_the_schema_and_of_its_modules() -> None:
    changed = encoded(parse(SCHEMA), "causal")
    assert changed.attributes == {"name": "s", "encode": "causal"}
    assert all("encode" not in child.attributes for child in changed.children if hasattr(child, "attributes"))


def test_prompts_follow_one_another_and_errors_know_their_line() -> None:
    found = split("\n" + PROMPTS)
    assert len(found) == 2
    with pytest.raises(MarkupError) as caught:
        parse(found[1].replace("<a/>", "<a>"))
    assert caught.value.line == 3


def test_a_line_is_what_xml_takes_for_one() -> None:
    first, second = split('<prompt schema="s">a\u2028<b/>\x85</prompt>\n<prompt schema="s"><a></prompt>')
    assert parse(first).name == "prompt"
    with pytest.raises(MarkupError) as caught:
        parse(second)
    assert caught.value.line == 2


def test_text_before_the_first_prompt_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="begins with 'What"):
        split("What?\n" + PROMPTS)
    with pytest.raises(InvalidPrompt, match="each prompt begins on a line that starts with <prompt"):
        split("  <prompt/>")
    assert split("") == split("\n \n") == []


def test_a_file_of_prompts_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "p.pml"
    file.write_text("\ufeff" + PROMPTS, encoding="utf-8")
    assert split(text_of(file)) == split(PROMPTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repair", "0,2"], "from 0 to 1"),
        (["--repair", "some"], "no number from 0"),
        (["--encode", "opening,sideways"], "opening"),
        (["--tokens", "0"], "no whole number from 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        quality.main(["schema.pml", "--prompts", str(tmp_path), *options])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"none\.pml: cannot be read"):
        quality.main([str(tmp_path / "none.pml"), "--prompts", "x"])


def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, positions=512, layers=2)
    (tmp_path / "s.pml").write_text(SCHEMA)
    (tmp_path / "p.pml").write_text(PROMPTS)
    wanted = ["--model", str(tmp_path), "--device", "cpu", "--repair", "0,1", "--tokens", "4", "--json", str(tmp_path / "out.json")]
    assert quality.main([str(tmp_path / "s.pml"), "--prompts", str(tmp_path / "p.pml"), *wanted]) == 0
    assert "2 prompts of" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [line["way"]["repair"] for line in found["lines"]] == [0.0, 1.0]
    as_it_is, repaired = (line["distance"]["divergence"] for line in found["lines"])
    assert as_it_is > 1e-3 and repaired == pytest.approx(0, abs=1e-4)


def test_states_elsewhere_are_blamed_at_their_own_place(judge: Judge) -> None:
    """With a hole before it a module keeps its position, and its exact states are moved there."""
    runs = (OPENING, Run(words(3, 13), 30, Origin((OPENING,), 30)), Run(words(9, 6), 43))
    reference = judge.reference(runs)
    assert judge.blame(runs, reference, [1]).tokens == len(reference.answer)
