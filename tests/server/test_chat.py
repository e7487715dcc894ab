"""Chat through the official client: what is asked for is what is answered."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pando.engine.request import SamplingParams

from ..tiny import END, tiny_llm
from .clients import WAIT, ask, each_client_of, exactly, quoted, said
from .live import NAME, Live


@pytest.fixture(scope="module", params=["sync", "async"])
def client(server: Live, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with each_client_of(server, request.param) as client:
        yield client


def offline(*contents: str, **params: Any) -> str:
    return tiny_llm().chat(said(*contents), SamplingParams(**params))[0].outputs[0].text


def test_the_answer_is_the_one_that_the_library_gives(client: openai.OpenAI) -> None:
    reply = ask(client, "Hello", max_tokens=24)
    assert reply.choices[0].message.content == offline("Hello", temperature=0, max_tokens=24)
    assert reply.object == "chat.completion" and reply.model == NAME and reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (23, 24, 47)


def test_the_pieces_of_a_stream_make_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, "Stream", max_tokens=24).choices[0].message.content
    chunks = list(ask(client, "Stream", max_tokens=24, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)
    assert [hasattr(chunk, "pando") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_usage_is_null_in_every_event_of_a_stream_but_the_last(client: openai.OpenAI) -> None:
    *chunks, last = ask(client, "Usage", stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set and chunk.choices for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 8
    assert sum(last.pando["tokens"].values()) == last.usage.prompt_tokens == 23


def test_n_answers_share_one_prompt(client: openai.OpenAI) -> None:
    one = ask(client, "Several", temperature=1, seed=1, n=3)
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in one.choices}) == 3
    assert one.usage.completion_tokens == 24 and one.usage.prompt_tokens == 25
    assert one.choices[0].message.content == ask(client, "Several", temperature=1, seed=1).choices[0].message.content


def test_a_stream_keeps_n_answers_apart(client: openai.OpenAI) -> None:
    whole = ask(client, "Apart", temperature=1, seed=1, n=3)
    texts = ["", "", ""]
    for chunk in ask(client, "Apart", temperature=1, seed=1, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("stop", ["wor", ["never", "wor"], ["world", "wor"], [" wor"]])
def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI, stop: Any) -> None:
    """Every letter is a token here, so that each stop string lies across several."""
    before = quoted("hello world").partition(stop if isinstance(stop, str) else stop[-1])[0]
    options = {"response_format": exactly("hello world"), "max_tokens": 40, "stop": stop}
    reply = ask(client, "Stop", **options)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (before, "stop")
    streamed = [chunk.choices[0].delta.content or "" for chunk in ask(client, "Stop", stream=True, **options)]
    assert "".join(streamed) == before


def test_what_only_looked_like_a_stop_string_is_not_lost(client: openai.OpenAI) -> None:
    options = {"response_format": exactly("hello worm"), "max_tokens": 40, "stop": "world"}
    assert ask(client, "Stop", **options).choices[0].message.content == quoted("hello worm")
    streamed = [chunk.choices[0].delta.content or "" for chunk in ask(client, "Stop", stream=True, **options)]
    assert "".join(streamed) == quoted("hello worm")


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    first, again, other = (ask(client, "Seed", temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.5},
        {"top_k": 2},
        {"min_p": 0.4},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {64: 8.0}},
    ],
    ids=lambda params: next(iter(params)),
)
def test_sampling_options_reach_the_engine(client: openai.OpenAI, params: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 40}
    body = {name: {str(key): bias for key, bias in value.items()} if isinstance(value, dict) else value for name, value in params.items()}
    answer = ask(client, "Options", **shared, extra_body=body).choices[0].message.content
    assert answer == offline("Options", **shared, **params)
    assert answer != offline("Options", **shared)


def test_a_bias_forbids_and_forces_tokens(client: openai.OpenAI) -> None:
    told = {"return_token_ids": True}
    plain = ask(client, "Bias", max_tokens=1, extra_body=told).choices[0].token_ids[0]
    assert ask(client, "Bias", max_tokens=1, logit_bias={str(plain): -100}, extra_body=told).choices[0].token_ids != [plain]
    assert ask(client, "Bias", logit_bias={"64": 100}, extra_body=told).choices[0].token_ids == [64] * 8


def test_the_end_of_an_answer_can_be_ignored(client: openai.OpenAI) -> None:
    ends = {"logit_bias": {str(END): 100}}
    reply = ask(client, "End", **ends)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("", "stop", 1)
    on = ask(client, "End", **ends, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 8)


def test_max_completion_tokens_is_stronger_than_max_tokens(client: openai.OpenAI) -> None:
    assert ask(client, "Long", max_completion_tokens=3).usage.completion_tokens == 3
    until_full = client.chat.completions.create(model=NAME, messages=said("x" * 480), extra_body={"ignore_eos": True})
    assert until_full.usage.total_tokens == 512 and until_full.choices[0].finish_reason == "length"


def test_logprobs_are_those_of_the_tokens_of_the_answer(client: openai.OpenAI) -> None:
    reply = ask(client, "Logprobs", logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens == len(reply.choices[0].token_ids)
    assert bytes(byte for one in content for byte in one.bytes).decode(errors="replace") == reply.choices[0].message.content
    for one in content:
        assert [found.logprob for found in one.top_logprobs] == sorted((found.logprob for found in one.top_logprobs), reverse=True)
        assert one.top_logprobs[0].bytes == one.bytes and one.top_logprobs[0].logprob == one.logprob <= 0  # greedy
        assert len(one.top_logprobs) == 3 and sum(math.exp(found.logprob) for found in one.top_logprobs) <= 1.0001
    streamed = [
        one
        for chunk in ask(client, "Logprobs", logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.bytes for one in streamed] == [one.bytes for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-4)


def test_without_logprobs_there_are_none_and_without_top_no_alternatives(client: openai.OpenAI) -> None:
    assert ask(client, "Few").choices[0].logprobs is None
    content = ask(client, "Few", logprobs=True).choices[0].logprobs.content
    assert len(content) == 8 and not any(one.top_logprobs for one in content)


def test_the_end_of_an_answer_has_no_logprob(client: openai.OpenAI) -> None:
    """Not even where text that might have begun a stop string comes out with it."""
    ends = {"logit_bias": {str(END): 100, "64": 90}, "stop": "ab", "logprobs": True}
    choice = ask(client, "End", **ends, extra_body={"min_tokens": 2}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("aa", "stop")
    assert [one.token for one in choice.logprobs.content] == ["a", "a"]


def test_token_ids_are_told_when_asked_for(client: openai.OpenAI) -> None:
    reply = ask(client, "Ids", extra_body={"return_token_ids": True})
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens
    chunks = list(ask(client, "Ids", stream=True, extra_body={"return_token_ids": True}))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == reply.choices[0].token_ids
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks] == [reply.prompt_token_ids] + [None] * (len(chunks) - 1)
    assert not hasattr(ask(client, "Ids").choices[0], "token_ids")


def test_content_may_come_in_parts_and_null_is_as_good_as_nothing(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Pa"}, {"type": "text", "text": "rts"}]}]
    reply = client.chat.completions.create(
        model=NAME, messages=parts, temperature=0, max_tokens=8, stop=None, seed=None, user=None, extra_body={"tools": None, "n": None}
    )
    assert reply.choices[0].message.content == ask(client, "Parts").choices[0].message.content


def test_the_user_is_noted_in_the_log(server: Live, client: openai.OpenAI) -> None:
    ask(client, "Secret words", user="somebody-7")
    server.settle()
    assert '"user": "somebody-7"' in server.log.getvalue() and "Secret words" not in server.log.getvalue()


def test_many_at_once_get_each_their_own_answer(server: Live, client: openai.OpenAI) -> None:
    names = [f"Question {place}" for place in range(8)]
    alone = [ask(client, name).choices[0].message.content for name in names]

    async def one(client: openai.AsyncOpenAI, name: str, stream: bool) -> str:
        made = client.chat.completions.create(model=NAME, messages=said(name), temperature=0, max_tokens=8, stream=stream)
        if not stream:
            return (await made).choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in await made])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
            return await asyncio.gather(*(one(client, name, place % 2 == 0) for place, name in enumerate(names)))

    assert asyncio.run(all_of_them()) == alone


def test_a_request_id_comes_back_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=NAME, messages=said("Id"), max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"
