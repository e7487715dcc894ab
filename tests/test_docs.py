"""What the documents say is so: links lead somewhere, examples run, targets and flags exist."""

import argparse
import ast
import doctest
import re
import tomllib
from pathlib import Path

import pytest

from pando import __version__, cli
from pando.config import EngineConfig, load, options

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def named(document):
    return str(document.relative_to(ROOT))


def blocks(document, language):
    """(line, text) of each fenced block in that language."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def examples(language):
    return [pytest.param(text, id=f"{named(document)}:{line}") for document in DOCUMENTS for line, text in blocks(document, language)]


def flags(parser):
    """Every flag of a parser and of its commands."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return found


def bench_flags():
    """`pando bench` reads its own arguments: their names stand in its source."""
    tree = ast.parse((ROOT / "pando" / "bench" / "foundation.py").read_text(encoding="utf-8"))
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    local = [link.split("#")[0] for link in links if not link.startswith(("http://", "https://", "#"))]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("text", examples("python"))
def test_python_examples_compile_and_use_public_names(text):
    compile(text, "example", "exec")
    import pando

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "pando":
            assert {alias.name for alias in node.names} <= set(pando.__all__)


@pytest.mark.parametrize("text", examples("pycon"))
def test_console_examples_run(text):
    example = doctest.DocTestParser().get_doctest(text, {}, "example", None, 0)
    complaints = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(example, out=complaints.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(complaints)


@pytest.mark.parametrize("text", examples("toml"))
def test_configuration_examples_load(text, tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text(text)
    assert load({}, {}, file) != EngineConfig()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_make_target_named_exists(document):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`|^    (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    commands = [re.split(r"\||&&|;", inline or indented) for inline, indented in code]
    named_targets = {
        word
        for parts in commands
        for part in parts
        if (words := part.split())[:1] == ["make"]
        for word in words[1:]
        if re.fullmatch(r"[a-z]+", word)
    }
    assert named_targets <= targets
    if document.name == "README.md":
        assert {"chat", "check", "test"} <= named_targets


def test_the_readme_and_ci_run_the_same_command():
    assert "    make check test\n" in README
    assert "\nmake check test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_flag_named_exists(document):
    known = flags(cli.parser()) | bench_flags()
    for line in document.read_text(encoding="utf-8").splitlines():
        unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) - known
        assert unknown == set(), line


def test_the_quickstart_lists_every_engine_option_with_its_default():
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    written = {None: "auto", True: "true", False: "false", "": "empty"}
    for option in options():
        default = option.default
        expected = written[default] if default is None or isinstance(default, bool) or default == "" else str(default)
        assert rows.get(option.name, "missing").strip("`") == expected, option.name


def test_the_version_is_said_once_and_the_readme_knows_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert f"version {__version__}" in README


def test_every_dependency_is_pinned_to_one_version():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin)] == []
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    assert {re.split(r"[<>=~!\[]", name)[0].replace("_", "-").lower() for name in wanted} <= pinned


@pytest.mark.model
@pytest.mark.parametrize("text", [text for _, text in blocks(ROOT / "README.md", "python")])
def test_the_example_of_the_readme_answers_paris(text, capsys):
    exec(compile(text, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
