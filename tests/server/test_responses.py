"""OpenAI's Responses API through the official client: the same answers as of a chat, in another form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from pando.engine.request import SamplingParams, TokenEvent
from pando.engine.tools import HERMES
from pando.server import replies
from pando.server.limits import MAX_CALLS, MAX_MESSAGES
from pando.server.prompts import Asked, Prompt
from pando.server.responses import ResponseAnswers
from pando.server.responses_wire import ResponsesBody

from ..tiny import END
from .clients import CLOCK, WEATHER, braked, client_of, counters, each_client_of, fetch, live_with_tools, said, wait_for
from .live import NAME, Live, live

FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]  # type: ignore[dict-item]
TOOLS: dict[str, Any] = {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 120}
LOGPROBS: Any = ["message.output_text.logprobs"]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6, pattern="^[a-z]*$")
    rivers: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_with_tools(tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture(scope="module", params=["sync", "async"])
def each(server: Live, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with each_client_of(server, request.param) as client:
        yield client


def respond(client: openai.OpenAI, given: Any, **options: Any) -> Any:
    """The response to it: the likeliest, and short."""
    return client.responses.create(model=NAME, input=given, **{"temperature": 0, "max_output_tokens": 8, **options})


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, **{"temperature": 0, "max_tokens": 8, **options})


def streamed(client: openai.OpenAI, given: Any, **options: Any) -> Any:
    """The same, put together by the client out of a stream, and the types of its events."""
    with client.responses.stream(model=NAME, input=given, **{"temperature": 0, "max_output_tokens": 8, **options}) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, [event.type for event in events]


def without_names(response: Response) -> dict[str, Any]:
    """What is the same each time that it is asked for."""
    body = response.to_dict()
    for name in ("id", "created_at", "completed_at", "pando", "usage"):
        body.pop(name)
    items: Any = body["output"]
    for item in items:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return body


# ---- text


def test_a_response_says_what_a_chat_says(each: openai.OpenAI) -> None:
    told = respond(each, "Hello there", instructions="Be kind.", extra_body={"top_k": 40, "session_id": "kind"})
    same = chat(each, [{"role": "system", "content": "Be kind."}, *said("Hello there")])
    assert told.output_text == same.choices[0].message.content != ""
    assert (told.object, told.model, told.id[:5], told.instructions) == ("response", NAME, "resp_", "Be kind.")
    assert told.usage.input_tokens == same.usage.prompt_tokens and told.usage.total_tokens == same.usage.total_tokens
    assert told.usage.output_tokens_details.reasoning_tokens == 0
    assert told.pando["session_id"] == "kind" and sum(told.pando["tokens"].values()) == told.usage.input_tokens
    assert told.store is False and told.previous_response_id is None and told.metadata == {}


def test_an_answer_that_is_cut_off_is_incomplete_and_one_that_ends_is_completed(client: openai.OpenAI) -> None:
    cut = respond(client, "Go on")
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens" and cut.completed_at is None
    assert cut.output[0].status == "incomplete" and cut.usage.output_tokens == 8
    whole = respond(client, "Go on", extra_body={"logit_bias": {str(END): 100}})
    assert whole.status == "completed" and whole.incomplete_details is None and whole.completed_at >= whole.created_at
    assert [(item.type, item.status, item.content[0].text) for item in whole.output] == [("message", "completed", "")]


@pytest.mark.parametrize("options", [{}, {"extra_body": {"logit_bias": {str(END): 100}}}, {"include": LOGPROBS, "top_logprobs": 2}])
def test_a_stream_makes_the_same_response(each: openai.OpenAI, options: dict[str, Any]) -> None:
    respond(each, "Stream it")  # what is computed another time is rounded another way
    whole = respond(each, "Stream it", metadata={"a": "b"}, **options)
    final, types = streamed(each, "Stream it", metadata={"a": "b"}, **options)
    assert without_names(final) == without_names(whole) and whole.metadata == {"a": "b"}
    assert final.usage.input_tokens == whole.usage.input_tokens and final.pando["reuse"] == "exact"
    assert types[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert set(types[4:-4]) <= {"response.output_text.delta"}


def test_the_final_response_of_a_stream_is_the_clients_own(client: openai.OpenAI) -> None:
    ended = {"extra_body": {"logit_bias": {str(END): 4.0}}, "max_output_tokens": 200}
    whole = respond(client, "To its end", **ended)
    assert whole.status == "completed" and whole.output_text
    with client.responses.stream(model=NAME, input="To its end", temperature=0, **ended) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert without_names(stream.get_final_response()) == without_names(whole)
    assert "".join(pieces) == whole.output_text and len(pieces) > 1


def test_the_events_of_a_stream_are_named_and_created_comes_before_any_token(server: Live) -> None:
    body = {"input": "Named", "stream": True, "max_output_tokens": 3}
    with braked(server) as brake, httpx.stream("POST", server.url + "/v1/responses", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        first = [next(lines) for _ in range(6)]
        assert brake.steps == 0 and first[0] == "event: response.created" and first[3] == "event: response.in_progress"
        created = json.loads(first[1].removeprefix("data: "))["response"]
        assert created["status"] == "in_progress" and created["output"] == [] and created["usage"] is None
        brake.let(100)
        rest = [line for line in lines if line]
    for name, data in zip(rest[::2], rest[1::2], strict=True):
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_logprobs_are_those_of_a_chat(client: openai.OpenAI) -> None:
    respond(client, "Likely?")  # what is computed another time is rounded another way
    told = respond(client, "Likely?", include=LOGPROBS, top_logprobs=2)
    same = chat(client, said("Likely?"), logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [one.to_dict() for one in told.output[0].content[0].logprobs] == [one.to_dict() for one in same]
    assert respond(client, "Likely?", top_logprobs=2).output[0].content[0].logprobs == told.output[0].content[0].logprobs
    bare = respond(client, "Likely?", include=[*LOGPROBS, "reasoning.encrypted_content"]).output[0].content[0].logprobs
    assert len(bare) == len(same) and not any(one.top_logprobs for one in bare)


# ---- conversations


def test_a_second_turn_sends_the_output_back_and_reuses_the_first(server: Live, client: openai.OpenAI) -> None:
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "a tree?"}]}
    first = respond(client, [question], prompt_cache_key="trees", extra_body={"logit_bias": {str(END): 4.0}}, max_output_tokens=200)
    assert first.status == "completed" and first.usage.input_tokens_details.cached_tokens < first.usage.input_tokens
    server.settle()
    again = [question, *first.output, {"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "And a wood?"}]
    second = respond(client, again, prompt_cache_key="trees")
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.pando["reuse"] == "exact" and second.pando["tokens"]["device"] == second.usage.input_tokens_details.cached_tokens
    messages = [*said("What is a tree?", first.output_text, "And a wood?")]
    assert second.output_text == chat(client, messages).choices[0].message.content


def test_what_changed_since_the_last_response_of_a_session_is_told(server: Live, client: openai.OpenAI) -> None:
    first = respond(client, "Edited", prompt_cache_key="edited")
    server.settle()
    back = [*said("Edited", "Something else."), {"role": "user", "content": "Go on"}]
    assert first.output_text != "Something else."
    assert respond(client, back, prompt_cache_key="edited").pando["miss"]["drift"] == "history_changed"


NOON = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]


def test_calls_in_a_row_are_one_message_with_the_words_before_them() -> None:
    body = ResponsesBody.model_validate(
        {
            "instructions": "Call.",
            "input": [
                {"role": "developer", "content": "Be quick.", "type": None},
                {"role": "user", "content": "Weather?", "type": "message", "status": "completed", "id": "msg_0"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}], "type": "message"},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"},
                {"type": "function_call", "call_id": "b", "name": "clock", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "sun"},
                {"type": "function_call_output", "call_id": "b", "output": NOON},
                {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
            ],
        }
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "b", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ]
    assert body.chat.conversation() == [
        {"role": "system", "content": "Call."},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "a"},
        {"role": "tool", "content": "noon", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "tool_calls": [{**calls[1], "id": "c"}]},
        {"role": "assistant", "content": "I will not."},
    ]


def test_a_conversation_past_the_context_is_cut_where_that_is_asked_for(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": f"{place}: " + "very long " * 30} for place in range(5)]
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, long)
    assert refused.value.code == "context_length_exceeded"
    told = respond(client, long, truncation="auto")
    assert told.truncation == "auto" and told.pando["truncated"]["dropped_tokens"] > 0 and told.usage.output_tokens == 8
    assert respond(client, "Short").truncation == "disabled"


# ---- tools and formats


def test_a_forced_call_is_answered_and_its_output_sent_back(server: Live, each: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "Weather?"}]
    told = respond(each, asked, **TOOLS)
    (call,) = told.output
    assert (call.type, call.name, call.status, told.status) == ("function_call", "weather", "completed", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo") and call.call_id and told.output_text == ""
    assert [tool.to_dict()["name"] for tool in told.tools] == ["weather", "clock"] and told.tool_choice.name == "weather"
    server.settle()
    back = [*asked, *told.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    after = respond(each, back, tools=FLAT)
    assert after.usage.input_tokens_details.cached_tokens >= told.usage.input_tokens
    function = {"name": "weather", "arguments": call.arguments}
    spoken = [*asked, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]
    same = chat(each, [*spoken, {"role": "tool", "tool_call_id": "1", "content": "sun"}], tools=[WEATHER, CLOCK])
    assert after.output_text == same.choices[0].message.content and after.usage.input_tokens == same.usage.prompt_tokens


def test_a_stream_tells_of_calls(each: openai.OpenAI) -> None:
    whole = respond(each, "Call", **TOOLS)
    final, types = streamed(each, "Call", **TOOLS)
    assert without_names(final) == without_names(whole)
    assert types[2:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_several_calls_have_ids_of_their_own_unless_only_one_may_be_made(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": FLAT[1:], "tool_choice": "required", "max_output_tokens": 180}
    on = {"extra_body": {"logit_bias": {str(END): -100}}}
    calls = respond(client, "All", **options, **on).output
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == len(calls) > 1
    final, _ = streamed(client, "All", **options, **on)
    assert [item.name for item in final.output] == ["clock"] * len(calls)
    assert len(respond(client, "All", **options, **on, parallel_tool_calls=False).output) == 1


def test_a_response_follows_a_schema(each: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "A city", "max_output_tokens": 100, "temperature": 1, "extra_body": {"seed": 3}}
    told = each.responses.parse(**asked, text_format=City)
    assert isinstance(told.output_parsed, City) and told.status == "completed"
    with each.responses.stream(**asked, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == told.output_parsed
    brace = {str(token): 40 for token in each.post("/../tokenize", cast_to=dict, body={"prompt": "}"})["tokens"]}
    text: Any = {"format": {"type": "json_object"}, "verbosity": "low"}
    some = respond(each, "An object", text=text, max_output_tokens=60, temperature=1, extra_body={"seed": 1, "logit_bias": brace})
    assert isinstance(json.loads(some.output_text), dict) and some.text.format.type == "json_object"


def answers_of(stream: bool) -> ResponseAnswers:
    asked = Asked([Prompt((1, 2), "x")], SamplingParams(), form=HERMES)
    body = ResponsesBody.model_validate({"input": "x", "stream": stream})
    account = Mock(usage=lambda: replies.usage(2, 3, 0), report=dict)
    return ResponseAnswers(asked, body, replies.Envelope("resp_1", 1, NAME), account, bytes, ())


def test_words_and_calls_stand_in_the_order_in_which_they_came() -> None:
    """Each message is told to its end before what follows it begins."""
    said = ["I look.", "<tool_call>", '{"name": "clock", "arguments": {}}', "</tool_call>", "Noon."]
    events = [(0, TokenEvent("r", 0, place, text), 0.0) for place, text in enumerate(said)]
    events.append((0, TokenEvent("r", 0, 9, "", finish_reason="stop"), 0.0))
    whole, streamed = answers_of(False), answers_of(True)
    whole.take(events)
    told = [json.loads(event.split(b"data: ")[1]) for event in streamed.events(events)]
    for answers in (whole, streamed):
        output: Any = answers.whole()["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "message"]
        assert [item["content"][0]["text"] for item in output[::2]] == ["I look.", "Noon."]
    assert [event["output_index"] for event in told] == sorted(event["output_index"] for event in told)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == streamed.whole()["output"]


# ---- what is refused, and who leaves


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation as input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompt templates are stored"),
        ({"background": True}, "background", "leave it out"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "Only functions are known"),
        ({"tools": [FLAT[0], {"type": "custom", "name": "x"}]}, "tools.1", "Only functions are known"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "not among the tools"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice.name", "required"),
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 7}, "input", "a string or a list of items"),
        ({"input": ["x"]}, "input.0", "an item of type message"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "nothing is stored"),
        ({"input": [{"type": ["message"]}]}, "input.0", "an item of type message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing to answer"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0", "only text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", "required"),
        ({"input": [{"type": "function_call_output", "call_id": "f", "output": {"a": 1}}]}, "input.0.output", "a string or a list"),
        ({"input": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "input", f"at most {MAX_MESSAGES}"),
        ({"input": [{"role": "user", "content": "x"}] * MAX_MESSAGES, "instructions": "x"}, "input", f"more than {MAX_MESSAGES}"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * (MAX_CALLS + 1)}, "input", "in a row"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
        ({"text": {"format": {"type": "json_schema", "name": "deep", "schema": nested(300)}}}, "text", "nested deeper"),
        ({"tools": [{"type": "function", "name": "deep", "parameters": nested(300)}]}, "tools", "nested deeper"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format", "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "text.format"),
        ({"max_tokens": 4}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "one answer"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"truncation": "always"}, "truncation", "auto"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_in_words(server: Live, body: dict[str, Any], param: str, words: str) -> None:
    refused = fetch(server, "/v1/responses", {"input": "Hello", **body})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (422, "invalid_request_error", param)
    assert words in error["message"]


def test_what_asks_for_nothing_else_is_not_refused(client: openai.OpenAI) -> None:
    plain = respond(client, "Plain")
    told = respond(
        client,
        "Plain",
        background=False,
        include=["reasoning.encrypted_content"],
        previous_response_id=None,
        reasoning={"effort": "low"},
        safety_identifier="me",
        service_tier="auto",
        store=True,
        text={"format": {"type": "text"}, "verbosity": "high"},
        tools=[],
        user="me",
    )
    assert told.output_text == plain.output_text and told.store is False and told.user == "me"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_not_refused_can_be_sent_back(server: Live, stream: bool) -> None:
    tools = [{"type": "function", "name": "deep", "parameters": {**nested(198), "const": 10**400}}]
    told = fetch(server, "/v1/responses", {"input": "x", "tools": tools, "tool_choice": "none", "max_output_tokens": 2, "stream": stream})
    assert told.status_code == 200 and told.text.count('"items"') == 198 * (3 if stream else 1)


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    told = respond(client, "Stored?")
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(told.id)


def test_the_model_must_be_the_one_that_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="gpt-4o", input="x")
    assert refused.value.code == "model_not_found"


def test_a_stream_that_is_left_frees_its_row(server: Live, client: openai.OpenAI) -> None:
    before = counters(server)['pando_requests_total{outcome="cancelled"}']
    with braked(server) as brake:
        stream = respond(client, "Half of it", stream=True, max_output_tokens=400, extra_body={"ignore_eos": True})
        brake.let(4)
        while next(stream).type != "response.output_text.delta":
            pass
        stream.close()
        wait_for(lambda: not server.service._tickets)
        brake.let(3)
        wait_for(lambda: not server.service.loop._engine.has_work)
        assert brake.steps <= 7
    assert counters(server)['pando_requests_total{outcome="cancelled"}'] == before + 1


def test_a_stream_that_fails_says_so_at_its_end(server: Live, client: openai.OpenAI) -> None:
    with braked(server) as brake:
        stream = respond(client, "Slow", stream=True, max_output_tokens=100)
        for ticket in server.service._tickets.values():
            ticket._deadline = 0.0  # it has begun, and its time is over
        brake.let(3)
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "request-timeout" in last.response.error.message and last.response.error.code == "server_error"


def test_the_log_and_the_sessions_know_of_responses(tmp_path: Path) -> None:
    with live(log_prompts=True) as server, client_of(server) as client:
        told = respond(client, "Written down", user="me", extra_headers={"x-session-id": "s"})
        server.settle()
        line = next(found for found in map(json.loads, server.log.getvalue().splitlines()) if found.get("path") == "/v1/responses")
    assert (line["outcome"], line["user"], line["n"], line["completion_tokens"]) == ("length", "me", 1, 8)
    assert line["answer"] == told.output_text and told.pando["session_id"] == "s"
