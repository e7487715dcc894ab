"""The page that teaches the language: each of its blocks is run, and prints what the page says."""

import linecache
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pando import cli
from pando.bench import random_model
from pando.errors import MarkupError
from pando.markup import reader, tokens
from pando.markup.pml import Limits, parse
from pando.model.tokenizer import Tokenizer

from ..tiny import tiny_llm

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")
BLOCKS = [
    (PAGE[: match.start()].count("\n") + 1, match[1], match[2])
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
INDENTED = re.findall(r"^    (.+)$", re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def run(source, line, names):
    """As if it stood in a file: programs are read from their source."""
    name = f"<pml.md:{line}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)


@pytest.fixture(scope="module")
def printed():
    """What each block prints, by its line. A schema is remembered by its name, and a prompt is made from the last one of that name."""
    schemas, names, found = {}, {}, {}
    run(next(text for _, kind, text in BLOCKS if kind == "python"), 0, names)
    for line, kind, text in BLOCKS:
        lines = []
        names["print"] = lambda *words, to=lines: to.append(" ".join(map(str, words)))
        if kind == "python":
            run(text, line, names)
        elif kind == "xml" and (root := parse(text)).name == "schema":
            schemas[root.attributes["name"]] = text
        elif kind == "xml":
            try:
                names["table"](schemas[root.attributes["schema"]], text)
            except MarkupError as error:
                lines += error.shown().splitlines()
        found[line] = lines
    return found


def test_every_block_is_of_a_kind_that_is_run():
    assert {kind for _, kind, _ in BLOCKS} == {"xml", "python", "text"}


@pytest.mark.parametrize(
    "place", [place for place, (_, kind, _) in enumerate(BLOCKS) if kind == "text"], ids=lambda place: f"line {BLOCKS[place][0]}"
)
def test_the_page_shows_what_is_printed(printed, place):
    said = [printed[line] for line, kind, _ in BLOCKS[:place] if printed[line] and kind != "text"]
    assert [line.rstrip() for line in said[-1]] == [line.rstrip() for line in BLOCKS[place][2].splitlines()]


def test_every_output_is_shown(printed):
    outputs = [line for line, kind, _ in BLOCKS if kind != "text" and printed[line]]
    assert len(outputs) == sum(kind == "text" for _, kind, _ in BLOCKS)


@pytest.mark.model
def test_the_commands_of_the_page_do_what_it_says(default_model, tmp_path, monkeypatch, capsys):
    """By the default model's tokenizer, and weights that take no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(random_model.SHAPES, "wide", (32, 2, 4, 2, 8, 48, 49152, 1e4))
    model = random_model.random_model("wide", torch.device("cpu"), torch.float32, compiled=False)
    llm = tiny_llm(replace(model, tokenizer=Tokenizer.from_directory(default_model.directory)))
    monkeypatch.setattr(cli, "make_llm", lambda config: llm)
    [names] = re.findall(r"the first schema of this page and the prompt below it in the files `(.+)` and `(.+)`:", PAGE)
    for name, (_, _, text) in zip(names, [block for block in BLOCKS if block[1] == "xml"][:2], strict=True):
        (tmp_path / name).write_text(text)
    said = {}
    for line in INDENTED:
        program, *words = shlex.split(line)
        assert program == "pando" and cli.main(words) == 0, line
        said[" ".join(words[: 1 + (words[0] == "schema")])] = capsys.readouterr()
    assert said.keys() == {"schema check", "schema show", "run"}
    first = [column.split()[0] for column in said["schema check"].out.splitlines()[2:8]]
    assert first == ["(opening)", "trip", "trip:time", "trip", "miami", "(prompt)"], "as in the table of the page"
    assert [line.split()[0] for line in said["schema show"].out.splitlines()[2:6]] == ["(opening)", "trip", "tokyo", "miami"]
    assert "prompt tokens" in said["run"].err and "approximate: modular" in said["run"].err


def test_the_page_knows_the_limits():
    shown = PAGE[PAGE.index("## Limits") :]
    limits = Limits()
    assert f"{limits.bytes >> 20} Mi" in shown and f"{limits.value >> 20} Mi" in shown
    assert f" {reader.MAX_PLACEHOLDERS >> 20} Mi |" in shown
    for value in (limits.depth, limits.elements, limits.name, reader.MAX_PATH, tokens.MAX_ROLES, reader.MAX_SCAFFOLDS):
        assert f" {value:,} |" in shown
