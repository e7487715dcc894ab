"""What vLLM's clients ask for as structured_outputs is followed over HTTP, in chats and in plain completions."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pando.engine.grammar import Grammars
from pando.server import limits, wire

from ..engine.test_grammar import allows, comes_to_an_end
from ..tiny import END, VOCAB, tiny_tokenizer
from .clients import WAIT, WEATHER, ask, each_client_of, fetch, live_with_tools, said
from .live import NAME, Live
from .test_wire import refusal

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WORDS = ["yes", "no, näh 😀"]
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": CITY}, r'\{"city": ?"(Paris|Rome)"\}'),
    "text of json": ({"json": json.dumps(CITY)}, r'\{"city": ?"(Paris|Rome)"\}'),
    "regex": ({"regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
    "choice": ({"choice": WORDS}, "|".join(WORDS)),
    "with what asks for nothing": (
        {
            "choice": WORDS,
            "json": None,
            "json_object": False,
            "structural_tag": None,
            "disable_any_whitespace": True,
            "disable_fallback": True,
        },
        "|".join(WORDS),
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_with_tools(tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture(scope="module", params=["sync", "async"])
def client(server: Live, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with each_client_of(server, request.param) as client:
        yield client


def options(wanted: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"max_tokens": 60, "temperature": 1, "seed": 5, "extra_body": {"structured_outputs": wanted}, **others}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_follows_what_is_asked_for_whole_and_streamed(client: openai.OpenAI, way: str) -> None:
    wanted, follows = WAYS[way]
    (choice,) = ask(client, "Answer", **options(wanted)).choices
    assert re.fullmatch(follows, choice.message.content) and choice.finish_reason == "stop"
    chunks = ask(client, "Answer", **options(wanted), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content

    text = client.completions.create(model=NAME, prompt="Answer", **options(wanted)).choices[0]
    assert re.fullmatch(follows, text.text) and text.finish_reason == "stop"
    events = client.completions.create(model=NAME, prompt="Answer", **options(wanted), stream=True)
    assert "".join(event.choices[0].text for event in events) == text.text


LINES = "a\x85b\u2028c\u2029d"
SAYING_LINES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": said("Lines"), "structured_outputs": {"choice": [LINES]}},
    "completions": {"prompt": "Lines", "structured_outputs": {"choice": [LINES]}, "max_tokens": 60},
    "responses": {"input": "Lines", "text": {"format": {"type": "json_schema", "name": "exactly", "schema": {"const": LINES}}}},
}


@pytest.mark.parametrize("route", SAYING_LINES)
def test_each_event_is_one_line_for_clients_that_split_a_stream_as_python_splits_text(server: Live, route: str) -> None:
    body = {**SAYING_LINES[route], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/{route}", json=body, timeout=WAIT) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert all(line.startswith(("data: ", "event: ")) for line in lines)
    told = json.dumps([json.loads(line[6:]) for line in lines if line.startswith("data: {")], ensure_ascii=False)
    assert set(LINES) <= set(told)


def test_each_of_several_answers_to_several_prompts_follows_it(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=NAME, prompt=["One", "Two"], n=8, **options({"choice": ["a", "b"]}, temperature=50))
    assert len(reply.choices) == 16 and {choice.text for choice in reply.choices} == {"a", "b"}
    assert {choice.message.content for choice in ask(client, "One", n=16, **options({"choice": ["a", "b"]}, temperature=50)).choices} == {
        "a",
        "b",
    }


def test_an_answer_that_follows_a_structure_has_logprobs(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "One", **options({"choice": ["yes"]}), logprobs=True, top_logprobs=2).choices
    assert "".join(one.token for one in choice.logprobs.content).startswith("yes")


def test_a_prompt_that_is_echoed_is_not_constrained(client: openai.OpenAI) -> None:
    for scored in ({}, {"logprobs": 1}):
        reply = client.completions.create(model=NAME, prompt="Free text: ", echo=True, **options({"choice": WORDS}), **scored)
        assert reply.choices[0].text in [f"Free text: {word}" for word in WORDS]


def test_any_object_is_begun(client: openai.OpenAI) -> None:
    assert ask(client, "Object", **options({"json_object": True})).choices[0].message.content.startswith("{")


def test_a_prompt_made_of_modules_is_answered_so_too(server: Live) -> None:
    schema = '<schema name="guide"><module name="who">You are a guide. </module></schema>'
    assert fetch(server, "/v1/schemas", content=schema, headers={"content-type": "application/xml"}).status_code < 300
    body = {"prompt": '<prompt schema="guide"><who/>Yes?</prompt>', "prompt_format": "pml", "structured_outputs": {"choice": WORDS}}
    assert fetch(server, "/v1/completions", {**body, "max_tokens": 60}).json()["choices"][0]["text"] in WORDS


def test_tools_that_need_not_be_called_may_stand_beside_it(client: openai.OpenAI) -> None:
    reply = ask(client, "Answer", tools=[WEATHER], tool_choice="auto", **options({"choice": ["yes"]}))
    assert reply.choices[0].message.content == "yes"


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"regex": "("}, "regex cannot be followed"),
        ({"json": "{"}, "JSON schema cannot be followed"),
        ({"json": {"type": "strange"}}, "JSON schema cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(client: openai.OpenAI, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        ask(client, "Answer", **options(wanted))
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(model=NAME, prompt="Answer", **options(wanted))


@pytest.mark.parametrize("body", [wire.ChatBody, wire.CompletionBody])
@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({}, "structured_outputs: structured outputs are one of json, regex, choice, grammar and json_object; found none of them"),
        ({"choices": ["a"]}, "found none of them"),
        ({"json_object": False}, "found none of them"),
        ({"json": CITY, "regex": "a"}, "found json and regex"),
        ([], "structured_outputs: Input should be an object"),
        ({"json": [1]}, "structured_outputs.json: Input should be a JSON schema, or its text"),
        ({"json": {"description": "x" * limits.MAX_SCHEMA_BYTES}}, "at most 65536 bytes"),
        ({"json": " " * (limits.MAX_SCHEMA_BYTES + 1)}, "at most 65536 characters"),
        ({"regex": 5}, "structured_outputs.regex: Input should be a valid string"),
        ({"regex": "a" * (limits.MAX_SCHEMA_BYTES + 1)}, "at most 65536 characters"),
        ({"choice": "yes"}, "structured_outputs.choice: Input should be a list"),
        ({"choice": []}, "at least 1 item"),
        ({"choice": ["a"] * (limits.MAX_CHOICES + 1)}, "at most 1024 items"),
        ({"choice": ["a" * 40_000, "b" * 40_000]}, "at most 65536 characters in all, not 80000"),
        ({"choice": ["a", 1]}, "structured_outputs.choice.1: Input should be a valid string"),
        ({"grammar": 'start: "a"'}, "structured_outputs: grammar: not supported; a short grammar can take all memory"),
        ({"structural_tag": "{}"}, "structured_outputs: structural_tag: not supported; "),
        ({"json": CITY, "whitespace_pattern": " *"}, "structured_outputs: whitespace_pattern: not supported; "),
        ({"json": CITY, "disable_additional_properties": True}, "structured_outputs: disable_additional_properties: not supported; "),
    ],
)
def test_what_cannot_be_meant_or_is_too_large_is_refused_by_name(body: type[limits.Body], wanted: Any, says: str) -> None:
    assert says in refusal(body, {"structured_outputs": wanted})


def test_two_constraints_on_one_answer_are_refused() -> None:
    wanted = {"structured_outputs": {"choice": ["a"]}, "tools": [WEATHER]}
    said = refusal(wire.ChatBody, {**wanted, "response_format": {"type": "json_object"}})
    assert said.startswith("structured_outputs: cannot be combined with response_format")
    for forced in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert "a tool_choice that forces a call" in refusal(wire.ChatBody, {**wanted, "tool_choice": forced})
    fine = {"messages": [{"role": "user", "content": "a"}], **wanted, "response_format": {"type": "text"}, "tool_choice": "none"}
    assert wire.ChatBody.model_validate(fine).structured_outputs is not None


# ---- what it may cost


HOSTILE = {
    "a long regex": {"regex": "".join(f"(a|b){{0,{i % 90}}}" for i in range(6000))},
    "repeats in a regex": {"regex": "((((x{0,99}){0,99}){0,99}){0,99}){0,99}"},
    "states of a regex": {"regex": "^(.*a.{400}|.*b.{500})$"},
    "a regex of parts that may be missing": {"regex": r"\w?" * 20_000},
    "a regex of groups that may be empty": {"regex": r"(|\w)" * 12_000},
    "a pattern of such parts": {"json": {"type": "string", "pattern": r"\w?" * 15_000}},
    "such a pattern of names": {"json": {"type": "object", "patternProperties": {r"\w?" * 15_000: {}}}},
    "many choices": {"choice": [f"choice number {i} {'x' * 40}" for i in range(1024)]},
    "a long choice": {"choice": ["x" * 65_000]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_client_may_ask_for_is_refused_or_followed_in_little_time(name: str) -> None:
    """Larger ones of some of these take minutes, or end the process."""
    body = wire.CompletionBody.model_validate({"prompt": "a", "structured_outputs": HOSTILE[name]})
    assert body.structured_outputs is not None
    params = body.structured_outputs.params()
    assert comes_to_an_end(lambda: Grammars(tiny_tokenizer(), VOCAB, [END]).of(params))


def test_any_of_very_many_choices_may_be_chosen() -> None:
    body = wire.CompletionBody.model_validate({"prompt": "a", "structured_outputs": {"choice": [f"choice {i}" for i in range(1024)]}})
    assert body.structured_outputs is not None
    make = Grammars(tiny_tokenizer(), VOCAB, [END]).of(body.structured_outputs.params())
    assert all(allows(make, f"choice {i}") for i in (0, 1, 10, 100, 1023)) and not allows(make, "choice 1024")


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "|".join(f"word{i}" for i in range(5000))},
        {"choice": ["?" * 2000, "word1", "(*[{" * 2000]},
    ],
)
def test_long_ones_that_cost_little_are_followed(wanted: dict[str, Any]) -> None:
    body = wire.CompletionBody.model_validate({"prompt": "a", "structured_outputs": wanted})
    assert body.structured_outputs is not None
    assert allows(Grammars(tiny_tokenizer(), VOCAB, [END]).of(body.structured_outputs.params()), "word1")
