"""`pando schema` and `pando run --schema`: files of PML in, tables and carets out."""

import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pando import cli
from pando.config import options
from pando.flags import flag_of

from .tiny import tiny_llm

SCHEMA = """<schema name="tour">
  Be kind.
  <module name="rome">Rome.</module>
  <union default="train">
    <module name="train">By rail.</module>
    <module name="plane">Fly with <param name="bags" len="4" default="1"/> bags.</module>
  </union>
  <module name="today" cache="false">Rain.</module>
  <scaffold modules="rome train"/>
</schema>
"""
PROMPT = '<prompt schema="tour"><rome/><plane bags="two"/>Go?</prompt>\n'


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    for variable in [name for name in os.environ if name.startswith("PANDO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))


@pytest.fixture
def files(tmp_path) -> Path:
    (tmp_path / "tour.pml").write_text(SCHEMA)
    (tmp_path / "ask.pml").write_text(PROMPT)
    return tmp_path


@pytest.fixture
def model(tiny_gguf, tmp_path) -> str:
    """A token for each character, and 64 positions."""
    return str(tiny_gguf(tmp_path / "tiny.gguf", vocabulary=tiny_gguf.byte_level(merges=("q q",))))


@pytest.fixture
def llm(monkeypatch):
    made = tiny_llm()
    monkeypatch.setattr(cli, "make_llm", lambda config: made)
    monkeypatch.setattr(made, "close", lambda: None)  # several commands use it
    return made


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


# --- pando schema check ------------------------------------------------------------------------------------------------------------


def test_a_sound_schema_is_one_line(files, model, capsys):
    assert run("schema", "check", files / "tour.pml", "--model", model) == 0
    shown = capsys.readouterr().out
    assert shown == f"{files}/tour.pml: schema tour: 4 modules, 41 tokens; layout compact, encode opening, order schema\n"


def test_a_prompt_is_shown_as_a_table_of_its_runs(files, model, capsys):
    assert run("schema", "check", files / "tour.pml", "--prompt", files / "ask.pml", "--model", model) == 0
    _, *table, last, note = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["run", "tokens", "positions", "state"],
        ["(opening)", "8", "0-7", "cached"],
        ["rome", "5", "8-12", "cached"],
        ["plane", "9", "13-21", "cached,", "moved", "by", "+5"],
        ["plane:bags", "3", "22-24", "new"],
        ["plane", "6", "25-30", "cached,", "moved", "by", "+4"],
        ["(prompt)", "3", "31-33", "new"],
    ]
    assert last == "34 tokens, 28 from the schema and 6 new; modular: some modules have not seen what stands before them"
    assert note.startswith("note: there are no roles, so the model's chat template is not used")


def test_a_dash_reads_the_prompt_from_standard_input(files, model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'<prompt schema="tour"><rome/>Go?</prompt>'), encoding="utf-8"))
    assert run("schema", "check", files / "tour.pml", "--prompt", "-", "--model", model) == 0
    assert "exact: it answers as the plain prompt does" in capsys.readouterr().out


def test_a_prompt_with_roles_needs_no_note(files, model, capsys):
    (files / "ask.pml").write_text('<prompt schema="tour"><rome/><user>Go?</user></prompt>')
    assert run("schema", "check", files / "tour.pml", "--prompt", files / "ask.pml", "--model", model) == 0
    assert "note:" not in capsys.readouterr().out


def test_a_check_needs_no_torch(files, model):
    run("schema", "check", files / "tour.pml", "--model", model)  # which fetches and converts, once
    words = ["schema", "check", str(files / "tour.pml"), "--prompt", str(files / "ask.pml"), "--model", model]
    script = f"import sys; from pando.cli import main\nassert main({words!r}) == 0\nsys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_an_exact_prompt_says_so(files, model, capsys):
    (files / "ask.pml").write_text('<prompt schema="tour"><rome/>Go?</prompt>')
    assert run("schema", "check", files / "tour.pml", "--prompt", files / "ask.pml", "--model", model) == 0
    assert "exact: it answers as the plain prompt does" in capsys.readouterr().out


@pytest.mark.parametrize(("imported", "kind"), [("<paris/>", "exact but for its holes"), ("<rome/>", "modular: some modules have not")])
def test_holes_are_no_module_that_has_not_seen_what_stands_before_it(files, model, capsys, imported, kind):
    body = 'Go.<module name="paris">A tower.</module><module name="rome">A forum.</module>'
    (files / "tour.pml").write_text(f'<schema name="tour" layout="fixed" encode="causal">{body}</schema>')
    (files / "ask.pml").write_text(f'<prompt schema="tour">{imported}Go?</prompt>')
    assert run("schema", "check", files / "tour.pml", "--prompt", files / "ask.pml", "--model", model) == 0
    assert f" new; {kind}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "complaint", "source", "column"),
    [
        ("tour.pml", SCHEMA.replace("<union ", "<unoin ").replace("</union>", "</unoin>"), "unknown element <unoin>", "  <unoin def", 3),
        ("ask.pml", PROMPT.replace("<rome/>", "<roma/>"), "unknown module <roma>", '<prompt schema="tour"><roma/>', 23),
        ("ask.pml", PROMPT.replace("two", "twenty"), "6 tokens, and 4 are allowed", "<prompt", 30),
        ("ask.pml", PROMPT.replace("Go?", "Go " * 20), "the model's context has 64", "<prompt", 1),
    ],
)
def test_an_error_has_a_caret_under_the_place_and_exit_code_2(files, model, capsys, file, text, complaint, source, column):
    (files / file).write_text(text)
    assert run("schema", "check", files / "tour.pml", "--prompt", files / "ask.pml", "--model", model) == 2
    told, line, caret = capsys.readouterr().err.rstrip("\n").split("\n")
    assert told.startswith(f"pando: error: {files / file}:") and complaint in told
    assert line.startswith("    " + source) and caret == " " * (4 + column - 1) + "^"


def test_files_are_read_below_the_schemas_directory(files, model, capsys):
    (files / "rome.txt").write_text("Rome has cats.")
    (files / "inner").mkdir()
    for place, code in ((files, 0), (files / "inner", 2)):
        (place / "src.pml").write_text(f'<schema name="s"><module name="a" src="{"" if place == files else "../"}rome.txt"/></schema>')
        assert run("schema", "check", place / "src.pml", "--model", model) == code
    captured = capsys.readouterr()
    assert "14 tokens" in captured.out and "outside of the directory" in captured.err


@pytest.mark.parametrize("words", [["check", "none.pml"], ["show", "none.pml"], ["check", "tour.pml", "--prompt", "none.pml"]])
def test_a_file_that_is_not_there_is_named(files, model, capsys, words):
    named = [str(files / word) if word.endswith(".pml") else word for word in words]
    assert run("schema", *named, "--model", model) == 2
    assert "none.pml cannot be read" in capsys.readouterr().err


def test_a_shorter_context_is_the_one_that_counts(files, model, capsys):
    assert run("schema", "check", files / "tour.pml", "--model", model, "--max-model-len", 12) == 2
    assert "the model's context has 12" in capsys.readouterr().err


@pytest.mark.parametrize(("action", "used"), [("check", set()), ("show", {"--page-size", "--device", "--dtype", "--kv-dtype"})])
def test_the_only_options_of_the_engine_are_those_that_count(capsys, action, used):
    with pytest.raises(SystemExit):
        run("schema", action, "--help")
    flags = {flag_of(option.name) for option in options()} - {"--model"}
    assert set(re.findall(r"--[\w-]+", capsys.readouterr().out)) & flags == used | {"--max-model-len"}
    for flag in sorted(flags - used - {"--max-model-len"}):
        assert run("schema", action, "tour.pml", flag, 1) == 2
        assert f"see `pando schema {action} --help`" in capsys.readouterr().err.lower()


@pytest.mark.parametrize("words", [[], ["sing"], ["check"], ["check", "a", "b"], ["show", "a", "--prompt", "b"]])
def test_words_that_mean_nothing_are_refused(capsys, words):
    assert run("schema", *words) == 2
    assert capsys.readouterr().err.startswith("pando: error: ")


# --- pando schema show and quality -------------------------------------------------------------------------------------------------


def test_show_lists_modules_with_their_unions_and_params(files, model, capsys):
    assert run("schema", "show", files / "tour.pml", "--model", model, "--dtype", "float32", "--page-size", 4) == 0
    summary, head, *rows, scaffold, total = capsys.readouterr().out.splitlines()
    assert summary.startswith("schema tour: 4 modules")
    assert head.split() == ["module", "encode", "tokens", "bytes", "notes"]
    cells = {row.split()[0]: row for row in rows}
    assert list(cells) == ["(opening)", "rome", "train", "plane", "today"]
    page = 4 * 2 * 1 * 2 * 8 * 4 / 2**20  # tokens, K and V, layers, heads, their size, bytes of a number
    assert cells["rome"].split()[1:] == ["opening", "5", f"{2 * page:.2f}", "MiB"]
    assert cells["train"].endswith("the default, or plane")
    assert cells["plane"].endswith("or train; bags: up to 4 tokens, has a default")
    assert cells["today"].split()[3] == "none" and cells["today"].endswith("computed with each prompt")
    assert scaffold.startswith("scaffold rome train: 8 tokens once more")
    assert total.endswith("of KV cache in float32, in whole pages of 4 tokens")


def test_show_counts_what_a_cache_in_8_bits_takes(files, model, capsys):
    assert run("schema", "show", files / "tour.pml", "--model", model, "--kv-dtype", "fp8") == 0
    assert "of KV cache in float8_e4m3fn, in" in capsys.readouterr().out


def test_a_model_that_does_not_exist_is_exit_code_2(files, capsys):
    assert run("schema", "show", files / "tour.pml", "--model", "nothing") == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "module"), [(["schema", "quality"], "quality"), (["bench", "modules"], "modules")])
def test_measurements_read_their_own_arguments(monkeypatch, words, module):
    given = []
    bench = types.ModuleType(f"pando.bench.{module}")
    bench.main = lambda argv: given.append(argv) or 3
    monkeypatch.setitem(sys.modules, f"pando.bench.{module}", bench)
    assert run(*words, "x.pml", "-h") == 3
    assert given == [["x.pml", "-h"]]


# --- pando run ---------------------------------------------------------------------------------------------------------------------


def test_run_answers_a_prompt_made_of_modules(files, llm, capsys, monkeypatch):
    assert run("run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml", "--max-tokens", 5) == 0
    first = capsys.readouterr()
    assert first.out.strip() and first.err.startswith("note: there are no roles")
    assert first.err.splitlines()[1:] == ["the answer is approximate: 15 module tokens had been encoded in another context"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((files / "ask.pml").read_bytes()), encoding="utf-8"))
    assert run("run", "--schema", files / "tour.pml", "--prompt", "-", "--max-tokens", 5, "--stats") == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert again.err.splitlines()[1] == first.err.splitlines()[1]
    assert again.err.splitlines()[2].startswith("34 prompt tokens, 33 cached · ") and "approximate: modular" in again.err
    assert run("run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml", "--max-tokens", 5, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reuse"] == "modular" and told["repaired"] == 0
    assert sum(told["tokens"].values()) == 34 and told["tokens"]["computed"] == 1 and told["tokens"]["module"] > 0


def test_a_run_names_the_file_of_a_prompt_that_is_wrong(files, llm, capsys):
    (files / "ask.pml").write_text(PROMPT.replace("two", "twenty"))
    assert run("run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml") == 2
    assert capsys.readouterr().err.startswith(f"pando: error: {files / 'ask.pml'}:")


def test_an_eager_run_encodes_all_modules_first(files, llm, capsys):
    line = ["run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml", "--max-tokens", 2, "--stats", "--eager"]
    assert run(*line) == 0
    encoded, _, _, told = capsys.readouterr().err.splitlines()
    assert encoded.startswith("schema encoded in ") and told.startswith("34 prompt tokens, 28 cached · ")


def test_a_run_repairs_what_it_is_told_to(files, llm, capsys):
    line = ["run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml", "--max-tokens", 2, "--stats", "--repair"]
    assert run(*line, 1) == 0
    told = capsys.readouterr().err
    assert "15 module tokens were repaired" in told and "approximate" not in told
    assert run(*line, 2) == 2
    assert "repair is 2.0" in capsys.readouterr().err


def test_several_answers_and_json_are_given_for_modules_too(files, llm, capsys):
    words = ["run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml", "--max-tokens", 3]
    assert run(*words, "--n", 2) == 0
    assert capsys.readouterr().out.startswith("--- 1 of 2\n")
    assert run(*words, "--json", "--seed", 1) == 0
    assert '"num_prompt_tokens": 34' in capsys.readouterr().out


@pytest.mark.parametrize("words", [["some/model", "--schema", "S", "--prompt", "P"], ["--schema", "S", "--prompt", "P", "some/model"]])
def test_a_model_may_be_named_beside_the_files(files, llm, monkeypatch, words):
    given = []
    monkeypatch.setattr(cli, "make_llm", lambda config: given.append(config.model) or llm)
    paths = {"S": files / "tour.pml", "P": files / "ask.pml"}
    assert run("run", *(paths.get(word, word) for word in words), "--max-tokens", 1) == 0
    assert given == ["some/model"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--schema", "S"], "belong together"),
        (["--prompt", "P"], "belong together"),
        (["--schema", "S", "--prompt", "P", "--raw"], "--raw and --system are for plain prompts"),
        (["--schema", "S", "--prompt", "P", "--system", "x"], "--raw and --system are for plain prompts"),
        (["--schema", "S", "--prompt", "P", "--truncation", "auto"], "--truncation auto is for plain prompts"),
        (["--schema", "S", "--prompt", "P", "model", "hello"], "unknown argument 'hello'"),
        (["--schema", "S", "--prompt", "N"], "cannot be read"),
        (["--eager", "hello"], "--eager and --repair need a --schema"),
        (["--repair", "0.5", "hello"], "--eager and --repair need a --schema"),
    ],
)
def test_what_does_not_go_together_is_refused(files, llm, capsys, words, complaint):
    paths = {"S": files / "tour.pml", "P": files / "ask.pml", "N": files / "none.pml"}
    assert run("run", *(paths.get(word, word) for word in words)) == 2
    assert complaint in capsys.readouterr().err


def test_a_prompt_that_is_wrong_has_its_caret(files, llm, capsys):
    (files / "ask.pml").write_text(PROMPT.replace("<rome/>", "<roma/>"))
    assert run("run", "--schema", files / "tour.pml", "--prompt", files / "ask.pml") == 2
    told = capsys.readouterr().err
    assert "did you mean 'rome'?" in told and told.endswith("^\n")


def test_stats_are_told_for_plain_prompts_too(llm, capsys):
    assert run("run", "--raw", "Once upon", "--max-tokens", 2, "--stats") == 0
    assert capsys.readouterr().err.startswith("9 prompt tokens, 0 cached · ")
