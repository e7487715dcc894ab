"""The examples do what their texts say. A small model answers nonsense, but it answers what they ask."""

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pando.bench import quality
from pando.engine.llm import LLM
from pando.engine.words import Words
from pando.kv.run import Run
from pando.markup.binding import Bound
from pando.markup.library import Library
from pando.model.tokenizer import Tokenizer

from .tiny import tiny_llm, tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "schema.pml").exists())
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer()._text, {"eos_token": "<end>"}, [], TEMPLATE)


def small_llm() -> LLM:
    return tiny_llm(replace(tiny_model(max_positions=8192), tokenizer=tokenizer()), kv_cache_tokens=32768, max_num_batched_tokens=4096)


def in_bytes(schema: str) -> str:
    """A token of this tokenizer is a byte, so arguments need more of them."""
    return re.sub(r'len="(\d+)"', lambda found: f'len="{8 * int(found[1])}"', schema)


def bound(name: str) -> list[Bound]:
    library = Library(Words(tokenizer()), movable=True, max_len=100_000)
    library.add(in_bytes((EXAMPLES / name / "schema.pml").read_text(encoding="utf-8")), directory=EXAMPLES / name)
    prompts = (EXAMPLES / name / "prompts.pml").read_text(encoding="utf-8")
    return [library.bind(prompt)[1] for prompt in quality.split(prompts)]


def text(runs: tuple[Run, ...]) -> str:
    """Bytes are tokens here."""
    found = tokenizer()
    return b"".join(found.token_bytes(token, skip_special=False) for run in runs for token in run.tokens).decode()


def test_there_is_one_for_each_thing_that_modules_are_for() -> None:
    assert NAMES == ["code", "persona", "retrieval", "trip"]


@pytest.mark.parametrize("name", NAMES)
def test_most_of_each_prompt_comes_from_modules_and_stands_without_holes(name: str) -> None:
    for each in bound(name):
        assert each.module_tokens > each.new_tokens
        assert sum(map(len, each.runs)) == each.end
        assert text(each.runs).endswith("[assistant] ")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    schema = folder / "schema.pml"
    schema.write_text(in_bytes(schema.read_text(encoding="utf-8")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("examples_run", EXAMPLES / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(small_llm(), folder, 3)
    cached = re.findall(r"^(\d+) of (\d+) tokens came from the cache", capsys.readouterr().out, re.MULTILINE)
    assert len(cached) == len(bound(name))
    assert all(int(found) > int(of) // 2 for found, of in cached)


def test_code_is_kept_as_it_is() -> None:
    assert (EXAMPLES / "code" / "files" / "stock.py").read_text() in text(bound("code")[0].runs)


def test_a_persona_is_one_member_of_each_union() -> None:
    assert bound("persona")[0].imported == ("child", "brief", "warm")


def test_a_trip_has_its_arguments_and_the_defaults_of_the_others() -> None:
    family, friends, _ = (text(each.runs) for each in bound("trip"))
    assert "The travellers are a family with two children, with 120 euros for each day." in family
    assert "The travellers are three friends, with no fixed budget for each day." in friends


def test_passages_are_imported_in_the_order_of_the_search() -> None:
    found = bound("retrieval")
    assert [each.imported for each in found] == [("travel", "devices"), ("illness", "holidays"), ("visitors", "travel", "holidays")]
    assert text(found[1].runs).index("Illness.") < text(found[1].runs).index("Holidays.")
