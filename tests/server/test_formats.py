"""JSON and tool calls through the official client."""

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from ..tiny import END
from .clients import CLOCK, LLAMA_TEMPLATE, WEATHER, ask, client_of, each_client_of, exactly, live_with_tools, quoted, said
from .live import NAME, Live, live


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6, pattern="^[a-z]*$")
    colour: Colour
    stems: int = Field(ge=1, le=999)
    rings: list[bool] = Field(max_length=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_with_tools(tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture(scope="module", params=["sync", "async"])
def client(server: Live, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with each_client_of(server, request.param) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": said("A tree"), "max_tokens": 200, "temperature": 1, "seed": seed}
    reply = client.chat.completions.parse(**options, response_format=Tree)
    tree = reply.choices[0].message.parsed
    assert isinstance(tree, Tree) and reply.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**options, response_format=Tree) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == tree


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    """`}` is made likely, so that it ends."""
    end = {str(token): 40 for token in (client.post("/../tokenize", cast_to=dict, body={"prompt": "}"})["tokens"])}
    reply = ask(client, "An object", response_format={"type": "json_object"}, max_tokens=60, temperature=1, seed=1, logit_bias=end)
    assert reply.choices[0].finish_reason == "stop" and isinstance(json.loads(reply.choices[0].message.content), dict)


def test_each_of_n_answers_follows_the_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 10**6}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    reply = ask(client, "Numbers", n=4, temperature=1.5, seed=3, max_tokens=40, response_format=wanted)
    numbers = [json.loads(choice.message.content)["n"] for choice in reply.choices]
    assert all(0 <= number <= 10**6 for number in numbers) and len(set(numbers)) > 1


def test_plain_text_may_be_asked_for_by_name(client: openai.OpenAI) -> None:
    plain = ask(client, "Text").choices[0].message.content
    assert ask(client, "Text", response_format={"type": "text"}).choices[0].message.content == plain


def test_a_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "none", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        ask(client, "Broken", response_format=wanted)


# ---- tools


def test_tools_are_written_into_the_prompt_unless_none_may_be_called(client: openai.OpenAI) -> None:
    without = ask(client, "Weather?")
    told = ask(client, "Weather?", tools=[WEATHER], tool_choice="auto")
    assert told.usage.prompt_tokens > without.usage.prompt_tokens + 100
    assert told.choices[0].message.tool_calls is None and told.choices[0].finish_reason == "length"
    assert ask(client, "Weather?", tools=[WEATHER]).choices[0].message.content == told.choices[0].message.content
    none = ask(client, "Weather?", tools=[WEATHER], tool_choice="none")
    assert none.usage.prompt_tokens == without.usage.prompt_tokens
    assert none.choices[0].message.content == without.choices[0].message.content


def is_weather(arguments: str) -> bool:
    found = json.loads(arguments)
    return set(found) == {"city", "days"} and found["city"] in ("Paris", "Oslo") and 1 <= found["days"] <= 9


def test_a_required_call_follows_its_schema(client: openai.OpenAI) -> None:
    reply = ask(
        client, "Weather?", tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=1, seed=2
    )
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls" and reply.choices[0].message.content is None
    assert call.type == "function" and call.id
    assert is_weather(call.function.arguments) if call.function.name == "weather" else json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("stop", ["\n", "}", "clock"])
def test_no_stop_ends_a_required_call(client: openai.OpenAI, stop: str) -> None:
    (choice,) = ask(client, "Call", tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, max_tokens=120, stop=[stop]).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["clock"] and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_named_function_is_the_one_that_is_called(client: openai.OpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    reply = ask(client, "Call", tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=120)
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == [name]


def test_a_call_in_a_stream_is_put_together_by_the_client(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    whole = ask(client, "Stream a call", **options).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(model=NAME, messages=said("Stream a call"), temperature=0, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and not final.message.content
    (call,) = final.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", whole.arguments) and call.id
    assert call.function.parsed_arguments["city"] in ("Paris", "Oslo")


def test_several_calls_have_ids_of_their_own(client: openai.OpenAI) -> None:
    on = {"logit_bias": {str(END): -100}}  # as many calls as it may
    calls = ask(client, "All", tools=[CLOCK], tool_choice="required", max_tokens=180, **on).choices[0].message.tool_calls
    assert len({call.id for call in calls}) == len(calls) > 1
    chunks = ask(client, "All", tools=[CLOCK], tool_choice="required", max_tokens=180, **on, stream=True)
    assert [call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()] == list(range(len(calls)))
    once = ask(client, "All", tools=[CLOCK], tool_choice="required", max_tokens=180, **on, parallel_tool_calls=False)
    assert len(once.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("most", [1, 8, 30, 55, 70, 75, 90, 100])
def test_calls_that_are_cut_off_say_so_and_leave_no_piece_of_themselves(client: openai.OpenAI, most: int) -> None:
    options: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required", "max_tokens": most, "logit_bias": {str(END): -100}}
    one = len('<tool_call>\n{"name": "clock", "arguments": {}}')
    again = len("\n</tool_call>\n") + one
    (choice,) = ask(client, "All", **options).choices
    assert choice.finish_reason == "length" and not choice.message.content
    assert len(choice.message.tool_calls or ()) == (0 if most < one else 1 + (most - one) // again)
    chunks = [chunk.choices[0] for chunk in ask(client, "All", **options, stream=True)]
    assert chunks[-1].finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
    assert len([call for chunk in chunks for call in chunk.delta.tool_calls or ()]) == len(choice.message.tool_calls or ())


def test_the_result_of_a_call_goes_on_from_what_was_computed(client: openai.OpenAI) -> None:
    """The call comes back through the template as the tokens that were generated: the next turn reuses all of them."""
    options: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False}
    question = said("Next turn")
    first = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=120, tool_choice="required", **options)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = client.chat.completions.create(model=NAME, messages=[*question, message, result], temperature=0, max_tokens=8, **options)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert second.pando["miss"] is None


def test_a_model_that_calls_by_itself_is_understood(tmp_path: Path) -> None:
    """The answer is forced to be what such a model writes: an object without any mark."""
    (tmp_path / "llama.jinja").write_text(LLAMA_TEMPLATE)
    wanted = {"const": {"name": "weather", "parameters": {"city": "Oslo", "days": 3}}}
    options: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 120}
    options["response_format"] = {"type": "json_schema", "json_schema": {"name": "call", "schema": wanted}}
    with live(chat_template=str(tmp_path / "llama.jinja")) as server, client_of(server) as client:
        (choice,) = ask(client, "Auto", **options).choices
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 3}
        deltas = [chunk.choices[0].delta for chunk in ask(client, "Auto", stream=True, **options)]
        assert not any(delta.content for delta in deltas)
        assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["weather"]


def test_a_template_without_tools_says_so() -> None:
    with live() as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"takes no tools.*tool_choice"):
            ask(client, "Weather?", tools=[WEATHER])
        assert ask(client, "Weather?", tools=[WEATHER], tool_choice="none").choices[0].message.content
        assert ask(client, "Quote", response_format=exactly("fine"), max_tokens=20).choices[0].message.content == quoted("fine")
