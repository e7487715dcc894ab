"""What clients get is what the official client's own types expect, in every form."""

import json
import math
from typing import Any

import pytest
from fastapi import FastAPI
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from pando.engine.request import Logprob
from pando.server import failures, logprobs, replies, views, wire
from pando.server.logprobs import Scored

ENVELOPE = replies.Envelope("chatcmpl-1", 1_700_000_000, "tiny")
USAGE = replies.usage(10, 3, 8)
REPORT: replies.PandoReport = {
    "reuse": "exact",
    "tokens": {"computed": 2, "device": 8, "host": 0, "disk": 0, "remote": 0, "module": 0},
    "repaired": 0,
    "truncated": None,
    "miss": {"reason": "diverged", "token": 8, "message": 1, "drift": "answer_retokenised", "detail": "send it back unchanged"},
    "time_to_first_token_ms": 12.5,
    "queue_ms": 0.1,
    "session_id": "s",
    "pin": {"id": "pin-1", "tokens": 8, "expires_at": 1_700_001_800},
}
SPELT = {1: b"Hel", 2: b"lo", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"!"}
LIKELY = {1: Logprob(-0.5, 1), 2: Logprob(-1.5, 2), 5: Logprob(-9.0, 7)}


def sent(reply: Any) -> Any:
    return json.loads(replies.encode(reply))


def test_a_chat_completion_is_what_the_client_expects() -> None:
    told = logprobs.chat_logprobs([Scored.chosen(1, LIKELY)], 2, SPELT.__getitem__)
    body = sent(ENVELOPE.chat([replies.chat_choice(0, "Hel", "stop", logprobs=told, token_ids=[1])], USAGE, REPORT, [9, 8]))
    found = ChatCompletion.model_validate(body)
    assert (found.id, found.object, found.created, found.model) == ("chatcmpl-1", "chat.completion", 1_700_000_000, "tiny")
    assert found.choices[0].message.content == "Hel" and found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].logprobs is not None and found.choices[0].logprobs.content is not None
    first = found.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("Hel", -0.5, [72, 101, 108])
    assert [one.token for one in first.top_logprobs] == ["Hel", "lo"]
    assert body["pando"] == REPORT and body["prompt_token_ids"] == [9, 8] and body["choices"][0]["token_ids"] == [1]


def test_usage_adds_up_and_tells_what_was_cached() -> None:
    found = CompletionUsage.model_validate(USAGE)
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (10, 3, 13)
    assert found.prompt_tokens_details is not None and found.prompt_tokens_details.cached_tokens == 8
    assert found.completion_tokens_details is not None and found.completion_tokens_details.reasoning_tokens == 0


def test_tool_calls_come_without_content_and_with_arguments_as_text() -> None:
    called = replies.call("call_1", "look", '{"city":"Paris"}')
    alone, beside = replies.chat_choice(0, "", "tool_calls", [called]), replies.chat_choice(1, "Let me see.", "tool_calls", [called])
    found = ChatCompletion.model_validate(sent(ENVELOPE.chat([alone, beside], USAGE, REPORT)))
    assert [choice.message.content for choice in found.choices] == [None, "Let me see."]
    (first,) = found.choices[0].message.tool_calls or ()
    assert first.type == "function" and (first.id, first.function.name) == ("call_1", "look")
    assert json.loads(first.function.arguments) == {"city": "Paris"}


def test_what_was_answered_can_be_sent_back() -> None:
    called = replies.call("call_1", "look", "{}")
    for choice in (replies.chat_choice(0, "", "stop"), replies.chat_choice(0, "", "tool_calls", [called])):
        found = ChatCompletion.model_validate(sent(ENVELOPE.chat([choice], USAGE, REPORT))).choices[0].message
        for again in (found.model_dump(), found.model_dump(exclude_unset=True)):
            assert wire.ChatBody.model_validate({"messages": [again]}).conversation()[0]["role"] == "assistant"


def test_fields_that_openai_sends_as_null_are_sent_as_null() -> None:
    whole = sent(ENVELOPE.chat([replies.chat_choice(0, "a", "length")], USAGE, REPORT))["choices"][0]
    assert whole == {
        "index": 0,
        "message": {"role": "assistant", "content": "a", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    piece = sent(ENVELOPE.chat_chunk([replies.chat_delta(0, {"content": "a"})]))
    assert piece["choices"] == [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}]
    assert "usage" not in piece and "pando" not in piece
    text = sent(ENVELOPE.text([replies.text_choice(0, "a")]))
    assert text["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert "usage" not in text and "pando" not in text


def test_a_stream_of_chat_is_what_the_client_expects() -> None:
    asked = replies.Envelope("chatcmpl-1", 1, "tiny", tells_usage=True)
    named: replies.CallDelta = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    more: replies.CallDelta = {"index": 0, "function": {"arguments": "{}"}}
    told = logprobs.chat_logprobs([Scored.chosen(2, LIKELY)], 0, SPELT.__getitem__)
    stream = [
        asked.chat_chunk([replies.chat_delta(0, {"role": "assistant", "content": ""})], prompt_token_ids=[9]),
        asked.chat_chunk([replies.chat_delta(0, {"content": "lo"}, logprobs=told, token_ids=[2])]),
        asked.chat_chunk([replies.chat_delta(0, {"tool_calls": [named]})]),
        asked.chat_chunk([replies.chat_delta(0, {"tool_calls": [more]})]),
        asked.chat_chunk([replies.chat_delta(0, {}, "tool_calls")]),
        asked.chat_chunk([], USAGE, REPORT),
    ]
    bodies = [sent(chunk) for chunk in stream]
    found = [ChatCompletionChunk.model_validate(body) for body in bodies]
    assert [chunk.object for chunk in found] == ["chat.completion.chunk"] * 6
    assert [body["usage"] for body in bodies] == [None] * 5 + [USAGE]
    assert found[1].choices[0].logprobs is not None
    assert bodies[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    (first,) = found[2].choices[0].delta.tool_calls or ()
    assert first.id == "call_1" and first.function is not None and first.function.name == "look"
    (then,) = found[3].choices[0].delta.tool_calls or ()
    assert then.id is None and then.function is not None and then.function.arguments == "{}"
    assert found[4].choices[0].finish_reason == "tool_calls" and found[5].choices == []


def test_a_plain_completion_is_what_the_client_expects_in_a_stream_and_without_one() -> None:
    told = logprobs.text_logprobs([Scored.chosen(1, LIKELY), Scored.chosen(5, LIKELY)], SPELT.__getitem__, 0)
    whole = sent(ENVELOPE.text([replies.text_choice(0, "Hel!", "stop", told, [1, 5], [9])], USAGE, REPORT))
    found = Completion.model_validate(whole)
    assert found.object == "text_completion" and found.choices[0].text == "Hel!"
    told_back = found.choices[0].logprobs
    assert told_back is not None and told_back.tokens == ["Hel", "!"] and told_back.token_logprobs == [-0.5, -9.0]
    assert told_back.text_offset == [0, 3]
    assert told_back.top_logprobs == [{"Hel": -0.5, "lo": -1.5, "!": -9.0}] * 2
    assert whole["choices"][0]["token_ids"] == [1, 5] and whole["choices"][0]["prompt_token_ids"] == [9] and whole["pando"] == REPORT

    asked = replies.Envelope("cmpl-1", 1, "tiny", tells_usage=True)
    pieces = [
        sent(asked.text([replies.text_choice(0, "a")])),
        sent(asked.text([replies.text_choice(0, "", "length")])),
        sent(asked.text([], USAGE)),
    ]
    assert [piece["usage"] for piece in pieces] == [None, None, USAGE]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[:2]] == [None, "length"]
    assert Completion.model_validate(pieces[1]).choices[0].text == "" and Completion.model_validate(pieces[2]).choices == []


def test_the_prompt_of_an_echo_has_logprobs_but_for_its_first_token() -> None:
    told = logprobs.text_logprobs([Scored(1, None, {}), Scored(2, -2.0, {})], SPELT.__getitem__, 0)
    assert told == {"tokens": ["Hel", "lo"], "token_logprobs": [None, -2.0], "top_logprobs": [None, None], "text_offset": [0, 3]}


def test_halves_of_a_character_are_told_apart_and_written_in_bytes() -> None:
    halves = [Scored(token, -1.0, {token: Logprob(-1.0, 1)}) for token in (3, 4, 5)]
    told = logprobs.text_logprobs(halves, SPELT.__getitem__, 10)
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert told["text_offset"] == [10, 10, 11]
    content = logprobs.chat_logprobs(halves, 1, SPELT.__getitem__)["content"]
    assert [one["bytes"] for one in content] == [[0xC3], [0xA9], [0x21]]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_a_token_that_cannot_be_has_a_logprob_that_json_can_say(logprob: float) -> None:
    scored = [Scored.chosen(1, {1: Logprob(logprob, 1)})]
    assert sent(logprobs.chat_logprobs(scored, 1, SPELT.__getitem__))["content"][0]["logprob"] == -9999.0
    assert sent(logprobs.text_logprobs(scored, SPELT.__getitem__, 0))["token_logprobs"] == [-9999.0]


def test_an_event_is_one_line_whatever_the_text() -> None:
    written = replies.event(ENVELOPE.text([replies.text_choice(0, "a\n\ndata: [DONE]\r\n\u2028é")]))
    assert written.startswith(b"data: {") and written.endswith(b"}\n\n")
    assert written.count(b"\n") == 2 and b"\r" not in written
    assert json.loads(written[6:])["choices"][0]["text"] == "a\n\ndata: [DONE]\r\n\u2028é"


@pytest.mark.parametrize("code", [0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029])
def test_an_event_is_one_line_also_for_whoever_splits_a_stream_as_python_splits_text(code: int) -> None:
    text = f"é\\{chr(code)}ÂÅ\u2027\u202a"  # some of whose bytes are those of such characters
    written = replies.event(ENVELOPE.text([replies.text_choice(0, text)]))
    line, end = written.decode().splitlines()
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == text and not end


@pytest.mark.parametrize("text", ["plain", '"quoted"\\', "line\nand \u2028 and \x85", "\U0001f333", replies.MARK, ""])
@pytest.mark.parametrize("tells_usage", [False, True])
def test_an_event_put_together_around_its_text_is_the_one_that_is_written_at_once(text: str, tells_usage: bool) -> None:
    envelope = replies.Envelope(f"id {replies.MARK}", 1, f'a model named "{replies.MARK}"', tells_usage)

    def in_chat(text: str) -> object:
        return envelope.chat_chunk([replies.chat_delta(1, {"content": text})])

    def plain(text: str) -> object:
        return envelope.text([replies.text_choice(1, text)])

    for make in (in_chat, plain):
        assert replies.Around(make).event(text) == replies.event(make(text))


def test_ids_are_new_each_time_and_say_what_they_are_of() -> None:
    assert replies.chat_id() != replies.chat_id()
    assert replies.chat_id().startswith("chatcmpl-") and len(replies.chat_id()) == 9 + 32
    assert replies.text_id().startswith("cmpl-") and len(replies.text_id()) == 5 + 32


def test_models_are_what_the_client_expects() -> None:
    assert Model.model_validate(sent(views.model_card("tiny", 1_700_000_000, 512))).id == "tiny"


REPLIES = (
    replies.ChatCompletion, replies.ChatChunk, replies.TextCompletion, replies.PinReply, views.ModelList, views.TokenizeReply,
    views.DetokenizeReply, views.Health, views.Ready, views.Version, views.CacheView, views.WarmReply, views.UnpinReply,
    failures.FailureBody,
)  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_every_reply_can_be_documented(reply: Any) -> None:
    assert TypeAdapter(reply).json_schema()["properties"]


def test_the_replies_that_are_built_have_the_shape_that_is_documented() -> None:
    chat = ENVELOPE.chat([replies.chat_choice(0, "a", "stop", [replies.call("1", "f", "{}")])], USAGE, REPORT, [1])
    TypeAdapter(replies.ChatCompletion).validate_json(replies.encode(chat), strict=True)
    told = logprobs.text_logprobs([Scored.chosen(1, LIKELY)], SPELT.__getitem__, 0)
    text = ENVELOPE.text([replies.text_choice(0, "a", "stop", told, [1], [2])], USAGE, REPORT)
    TypeAdapter(replies.TextCompletion).validate_json(replies.encode(text), strict=True)
    deltas = logprobs.chat_logprobs([Scored.chosen(1, LIKELY)], 2, SPELT.__getitem__)
    chunk = ENVELOPE.chat_chunk([replies.chat_delta(0, {"content": "a"}, None, deltas, [1])], pando=REPORT)
    TypeAdapter(replies.ChatChunk).validate_json(replies.encode(chunk), strict=True)


def test_bodies_and_replies_make_an_openapi_document() -> None:
    app = FastAPI()

    @app.post("/chat", response_model=replies.ChatCompletion)
    def chat(body: wire.ChatBody) -> None: ...

    @app.post("/text", response_model=replies.TextCompletion, responses={400: {"model": failures.FailureBody}})
    def text(body: wire.CompletionBody) -> None: ...

    @app.get("/cache", response_model=views.CacheView)
    def cache() -> None: ...

    schemas = app.openapi()["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["temperature"]["description"]
    assert {"ChatCompletion", "TextCompletion", "FailureBody", "SegmentView"} <= set(schemas)
