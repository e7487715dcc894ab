"""`pando bench overhead`: that it compares like with like; how fast anything is, no test can say."""

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pando.bench import host, overhead, soak
from pando.bench.lean import BadReply, Line, _understood
from pando.bench.overhead import HTTP, OFFLINE, Sizes, measure
from pando.errors import InvalidOption

from ..server.live import Live, live
from ..tiny import tiny_llm, write_checkpoint

SMALL = Sizes(clients=3, tokens=5, prefix=24, own=8, repeats=2, firsts=3)
THROUGHPUT, CACHED, FIRST, ADDED = range(4)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(disable_log_requests=True) as running:
        yield running


def test_both_sides_are_measured_as_often_and_with_the_prefix_cached(server, capsys):
    results = measure(tiny_llm(), server.url, SMALL)
    assert {side: len(found) for side, found in results[THROUGHPUT].samples.items()} == {HTTP: 2, OFFLINE: 2}
    assert results[THROUGHPUT].target == ">= 0.9x"
    assert results[CACHED].met and results[CACHED].ours >= 24
    assert {side: len(found) for side, found in results[FIRST].samples.items()} == {HTTP: 3, OFFLINE: 3}
    assert results[ADDED].ours == pytest.approx(results[FIRST].ours - results[FIRST].theirs)
    assert "measuring first_token" in capsys.readouterr().out


def test_a_side_that_does_not_reuse_the_prefix_is_told(server):
    results = measure(tiny_llm(prefix_caching=False), server.url, SMALL, seed=1)
    assert results[CACHED].met is False
    assert (results[CACHED].ours >= 24, results[CACHED].theirs) == (True, 0)


def test_every_token_of_a_stream_is_timed_and_the_connection_is_used_again(server):
    async def twice() -> list[Any]:
        line = await Line.open(server.url)
        found = [await line.complete(range(20, 40), 6) for _ in range(2)]
        await line.close()
        return found

    first, second = asyncio.run(twice())
    assert (len(first.tokens), first.cached) == (6, 0)
    assert second.cached == 19
    assert first.sent < first.tokens[0] <= first.tokens[-1] < second.sent


def test_a_refusal_is_told_with_its_status(server):
    async def ask() -> None:
        line = await Line.open(server.url)
        try:
            await line.complete([1] * 1000, 4)
        finally:
            await line.close()

    with pytest.raises(BadReply, match=r"answered HTTP/1\.1 400"):
        asyncio.run(ask())


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = event(choices=[], usage={"prompt_tokens_details": {"cached_tokens": 3}})


def test_tokens_are_counted_and_not_events():
    two = event(choices=[{"token_ids": [1, 2]}])
    found = _understood(0.0, [(1.0, two[:9]), (2.0, two[9:]), (3.0, USAGE + b"data: [DONE]\n\n")], 2)
    assert (found.tokens, found.cached) == ((2.0, 2.0), 3)


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (event(choices=[{"token_ids": [1]}]) + USAGE, "1 came, with usage"),
        (event(choices=[{"token_ids": [1, 2]}]), "2 came, without usage"),
        (event(error={"message": "lost"}), "lost"),
    ],
)
def test_a_stream_that_is_not_what_was_asked_for_is_no_measurement(stream, told):
    with pytest.raises(BadReply, match=told):
        _understood(0.0, [(1.0, stream)], 2)


def test_the_command_measures_a_server_in_another_process(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host, "write_random_model", partial(write_checkpoint, positions=512, layers=2))
    monkeypatch.setenv("PANDO_NATIVE", "0")
    file = tmp_path / "overhead.json"
    words = ["--clients", "3", "--tokens", "4", "--prefix-tokens", "20", "--repeats", "1", "--firsts", "2"]
    assert overhead.main(["--random-weights", *words, "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["machine"]["model"] == "random weights"
    assert [result["target"] for result in found["results"]] == [">= 0.9x", ">= 20 on both sides", "", "<= 5"]
    assert "3 clients, 4 tokens each" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--clients", "0"], ["--tokens", "1"], ["--nonsense"]])
def test_nonsense_is_refused_before_anything_is_started(words):
    with pytest.raises(InvalidOption):
        overhead.main(words)


@pytest.mark.parametrize("bench", [overhead, soak])
def test_the_document_lists_every_option_with_its_default_and_no_other(bench: ModuleType) -> None:
    text = (Path(__file__).parents[2] / "docs" / "soak.md").read_text(encoding="utf-8")
    [section] = [part for part in text.split("\n## ") if part.startswith(f"`pando bench {bench.__name__.rsplit('.', 1)[1]}`")]
    rows = {name: default.strip() for name, default in re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*)\|", section, re.MULTILINE)}
    options = [action for action in bench._parser()._actions if action.dest != "help"]
    assert rows == {option.option_strings[0]: _shown(option.default) for option in options}


def _shown(default: object) -> str:
    if default is None:
        return ""
    return "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
