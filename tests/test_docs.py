"""What the documents say is so: links lead somewhere, examples run, targets and flags exist."""

import argparse
import ast
import doctest
import io
import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import httpx
import pytest

from pando import __version__, arguments
from pando.config import Attention, EngineConfig, ServerConfig, load_server, options

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


def tables(text):
    """Each table as its rows, and each row as its cells, without the marks of code; the first row is the head."""
    found = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    rows = [[[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]
    return [[row for row in table if not re.fullmatch("-+", row[0])] for table in rows]


def flags(parser):
    """Every flag of a parser and of its commands."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return found


@cache
def bench_flags():
    """The benchmarks read their own arguments, and importing them needs what only they need: the flags are read from their source."""
    found = set()
    for file in (ROOT / "pando" / "bench").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                given = {word.value for word in call.args if isinstance(word, ast.Constant)}
                is_switch = any(isinstance(key.value, ast.Attribute) and key.value.attr == "BooleanOptionalAction" for key in call.keywords)
                found |= given | ({flag.replace("--", "--no-", 1) for flag in given} if is_switch else set())
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_relative_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    local = [link.partition("#") for link in links if not link.startswith(("http://", "https://"))]
    assert [path for path, _, _ in local if not (document.parent / path).exists()] == []
    headings = {
        path: sections((document.parent / path if path else document).read_text(encoding="utf-8")) for path, _, place in local if place
    }
    assert [place for path, _, place in local if place and place not in map(anchor, headings[path])] == []


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
    assert load_server({}, {}, file) != (EngineConfig(), ServerConfig())


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
        assert {"serve", "check", "test"} <= named_targets


def test_the_readme_and_ci_run_the_same_command():
    assert "    make check test\n" in README
    assert "\nmake check test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_flag_named_exists(document):
    known = flags(arguments.parser()) | bench_flags()
    for line in document.read_text(encoding="utf-8").splitlines():
        unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) - known
        assert unknown == set(), line


@pytest.mark.parametrize(("document", "config"), [("quickstart.md", EngineConfig), ("operating.md", ServerConfig)])
def test_every_option_is_listed_with_its_default(document, config):
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    told = {row[0]: row[1] for table in tables(text) if table[0][0] == "option" for row in table[1:]}
    written = {"None": "auto", "True": "true", "False": "false", "": "empty", "()": "none"}
    assert told == {option.name: written.get(str(option.default), str(option.default)) for option in options(config)}


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
    assert {re.split(r"[<>=~!\[;]", name)[0].replace("_", "-").lower() for name in wanted} <= pinned


@pytest.mark.model
@pytest.mark.parametrize("text", [text for _, text in blocks(ROOT / "README.md", "python")])
def test_the_example_of_the_readme_answers_paris(text, capsys):
    exec(compile(text, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


# ---- the reference of the server


SERVER = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("server.md", "api.md", "operating.md"))
BESIDE = {"GET /docs", "GET /redoc", "GET /openapi.json"}  # routes that describe the others


def sections(text):
    """What stands under each heading, up to the next one."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {heading.replace("`", ""): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def column(text, head):
    """The first cells of every table that is headed so; a cell may name several things."""
    found = [row[0] for table in tables(text) if table[0][0] == head for row in table[1:]]
    return {name for cell in found for name in cell.split(", ")}


def fields(schema, known, path=""):
    """Every field that a JSON schema allows, as documents write it, with its default; a mere container of fields has none of its own."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rsplit("/", 1)[1]]
    found = {}
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= fields(part, known, path)
    if "items" in schema:
        found |= fields(schema["items"], known, path + "[]")
    for name, inner in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        if not only_holds_fields(inner, known):
            found[place] = "required" if name in schema.get("required", ()) else written(inner.get("default"))
        found |= fields(inner, known, place)
    return found


def only_holds_fields(schema, known):
    if "$ref" in schema:
        schema = known[schema["$ref"].rsplit("/", 1)[1]]
    forms = [form for form in (*schema.get("anyOf", ()), *schema.get("oneOf", ())) if form.get("type") != "null"]
    if forms:
        return all(only_holds_fields(form, known) for form in forms)
    return "properties" in schema or ("items" in schema and only_holds_fields(schema["items"], known))


def written(default):
    return {"None": "none", "True": "true", "False": "false", "{}": "empty", "[]": "empty"}.get(
        str(default), f"{default}".removesuffix(".0")
    )


@pytest.fixture(scope="module")
def app():
    from pando.server.app import make_app
    from pando.server.journal import Journal
    from pando.server.service import Service
    from pando.server.tenants import Tenants
    from pando.server.tracing import Tracing

    service = Service(EngineConfig(), ServerConfig())
    yield make_app(service, Tenants(()), Journal(io.StringIO()), Tracing())
    service.stop()


@pytest.fixture(scope="module")
def bodies(app):
    """The fields of each route: what it takes, and what it gives."""
    schema = app.openapi()
    known = schema["components"]["schemas"]
    found = {}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            taken = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            given = route["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
            found[f"{method.upper()} {path}"] = fields(taken, known), fields(given, known)
    return found


def told(heading):
    """The fields that a section tells of, and those that it leaves to sections it links to: with a default where it is one of a request."""
    parts = sections(SERVER)
    linked = [name for name in parts if f"#{anchor(name)})" in parts[heading]]
    found = [table for name in (heading, *linked) for table in tables(parts[name]) if table[0][0] == "field"]
    taken = {row[0]: row[1] for table in found if table[0][1] == "default" for row in table[1:]}
    given = {name for table in found if table[0][1] == "meaning" for row in table[1:] for name in row[0].split(", ")}
    return taken, given


def test_the_server_document_lists_every_route(app, bodies):
    methods = [(method, route.path.replace(":path", "")) for route in app.routes for method in route.methods - {"HEAD"}]
    routes = {f"{method} {path}" for method, path in methods if not path.startswith("/docs/")}  # a page that only /docs needs
    assert routes == set(bodies) | BESIDE
    assert column(SERVER, "route") == routes
    assert set(bodies) <= set(sections(SERVER))


def test_the_server_document_names_no_route_that_does_not_exist(bodies):
    named_routes = set(re.findall(r"(?:GET|POST|PUT|DELETE) (/[\w/{}.]+)", SERVER)) | set(re.findall(r"127\.0\.0\.1:8000(/[\w/]+)", SERVER))
    known = {route.split(" ")[1] for route in set(bodies) | BESIDE}
    assert named_routes - known <= {"/v1"}  # the address that clients are given
    assert len(named_routes) > 10


def test_the_server_document_tells_every_field_of_every_request_with_its_default(bodies):
    for route, (taken, _) in bodies.items():
        found = told(route)[0]
        assert {name: found.get(name, "missing") for name in taken} == taken, route


def test_the_server_document_tells_every_field_of_every_answer(bodies):
    for route, (_, given) in bodies.items():
        assert set(given) - told(route)[1] == set(), route


def test_the_server_document_tells_no_field_that_does_not_exist(bodies):
    from pando.server.replies import ChatChunk

    streamed = fields(*chunk(ChatChunk))
    parts = sections(SERVER)
    for heading, body in parts.items():
        rows = column(body, "field")
        users = [names for route, names in bodies.items() if route == heading or f"#{anchor(heading)})" in parts[route]]
        known = {name for pair in users for names in pair for name in names} | set(streamed)
        containers = {name[: dot.start()] for name in known for dot in re.finditer(r"\.|\[\]", name)}
        assert rows - known - containers == set(), heading


def test_the_server_document_tells_every_field_of_a_streamed_chat(bodies):
    from pando.server.replies import ChatChunk

    names = set(fields(*chunk(ChatChunk)))
    assert names - column(sections(SERVER)["Streaming"], "field") - told("POST /v1/chat/completions")[1] == set()
    assert "choices[].delta.content" in names


def chunk(kind):
    from pydantic import TypeAdapter

    schema = TypeAdapter(kind).json_schema()
    return schema, schema["$defs"]


def test_the_server_document_lists_every_reason_kind_and_outcome():
    from pando.engine.request import MissReason
    from pando.server.history import DriftKind
    from pando.server.metrics import Outcome

    assert column(SERVER, "reason") == set(get_args(MissReason))
    assert column(SERVER, "drift") == set(get_args(DriftKind))
    assert column(SERVER, "outcome") == {*get_args(Outcome), "refused"}


def test_the_documents_list_every_mode_of_attention():
    modes = set(get_args(Attention))
    assert column(SERVER, "attention") == column((ROOT / "docs" / "attention.md").read_text(encoding="utf-8"), "attention") == modes


def test_the_server_document_lists_every_metric():
    from pando.engine.facts import Stats
    from pando.server.metrics import Metrics

    names = set(Metrics("tiny", Stats, "vllm").names())
    assert column(SERVER, "metric") == names
    assert set(re.findall(r"`((?:pando_|process_|vllm:)[a-z_]+)`", SERVER)) <= names


def test_the_server_document_lists_every_status():
    from pando.server.app import FAILURES

    assert {str(status) for status in FAILURES} <= column(SERVER, "status")


def test_the_server_document_lists_what_is_refused_by_name():
    from pando.server.wire import ChatBody, CompletionBody

    [refused] = re.findall(r"\*\*Refused with 422\*\*(.*?)\n\n", SERVER, re.DOTALL)
    assert {*ChatBody.refused, *CompletionBody.refused} <= set(re.findall(r"`(\w+)`", refused))


def test_the_server_document_knows_the_limits():
    from pando.engine import request
    from pando.server import limits

    shown = sections(SERVER)["Limits"]
    for name in sorted({*vars(limits), *vars(request)}):
        if name.startswith("MAX_") and name not in ("MAX_INT32", "MAX_TTL_SECONDS", "MAX_LOGPROBS"):
            value = getattr(limits, name, None) or getattr(request, name)
            size = f"{value >> 20} Mi" if not value % 2**20 else f"{value >> 10} Ki" if value >= 2**14 else str(value)
            assert re.search(rf"\b{size}", shown), name
    assert f"{limits.MAX_TTL_SECONDS // 86400} days" in shown


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from .server.live import live

    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)  # as those of real models, it can be cut between two messages
    with live(served_model_name=EngineConfig().model, log_prompts=True, chat_template=str(template)) as running:
        yield running


@pytest.fixture(scope="module")
def address(server):
    return server.url


def test_the_server_document_tells_every_field_of_a_line_of_the_log(server):
    httpx.post(server.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).raise_for_status()
    server.settle()
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    [line] = [line for line in lines if line["event"] == "request" and line.get("prompt") == "Hello"]
    assert column(SERVER, "field of the line") == set(line)


@pytest.mark.parametrize(
    "text", [*examples("sh"), pytest.param("\n".join(re.findall(r"^    (curl .*|  .*)$", README, re.M)), id="README.md")]
)
def test_shell_examples_of_the_server_answer(text, address):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert "curl" in text
    script = text.replace("http://127.0.0.1:8000", address).replace("curl ", "curl --no-progress-meter --fail-with-body ")
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"choices"' in done.stdout or '"segments"' in done.stdout


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=f"server.md:{line}") for line, text in blocks(ROOT / "docs" / "server.md", "python")]
)
def test_python_examples_of_the_server_answer(text, address, capsys):
    exec(compile(text.replace("http://127.0.0.1:8000", address), "server.md", "exec"), {})
    assert re.search(r"^\d+ (None|\{'reason')", capsys.readouterr().out, re.MULTILINE)
