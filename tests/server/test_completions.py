"""Plain completions, tokens, models and the state of the server, through the official client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import processors

from pando import __version__
from pando.engine.request import SamplingParams
from pando.model.tokenizer import Tokenizer

from ..tiny import END, tiny_llm, tiny_model, tiny_tokenizer
from .clients import each_client_of, fetch, said
from .live import NAME, Live, live


@pytest.fixture(scope="module", params=["sync", "async"])
def client(server: Live, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with each_client_of(server, request.param) as client:
        yield client


def go_on(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options})


def tokens_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


def test_the_answer_is_the_one_that_the_library_gives(client: openai.OpenAI) -> None:
    reply = go_on(client, "Once upon a time", max_tokens=24)
    assert reply.choices[0].text == tiny_llm().generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    assert reply.object == "text_completion" and reply.choices[0].finish_reason == "length"
    assert go_on(client, "Once upon a time", max_tokens=openai.omit).usage.completion_tokens == 16


def test_prompts_come_in_four_forms(client: openai.OpenAI) -> None:
    one, two = (go_on(client, text).choices[0].text for text in ("first prompt", "second one"))
    assert [choice.text for choice in go_on(client, tokens_of("first prompt")).choices] == [one]
    for prompts in (["first prompt", "second one"], [tokens_of("first prompt"), tokens_of("second one")]):
        reply = go_on(client, prompts)
        assert [(choice.index, choice.text) for choice in reply.choices] == [(0, one), (1, two)]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (22, 16)
        assert sum(reply.pando["tokens"].values()) == 22


def test_n_answers_to_each_of_several_prompts(client: openai.OpenAI) -> None:
    reply = go_on(client, ["left", "right"], n=2, temperature=1, seed=4, echo=True)
    assert [(choice.index, choice.text[:4]) for choice in reply.choices] == [(0, "left"), (1, "left"), (2, "righ"), (3, "righ")]
    texts = ["", "", "", ""]
    for chunk in go_on(client, ["left", "right"], n=2, temperature=1, seed=4, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in reply.choices]


def test_a_stream_ends_with_usage_when_asked(client: openai.OpenAI) -> None:
    whole = go_on(client, "stream of text", max_tokens=12)
    *chunks, last = go_on(client, "stream of text", max_tokens=12, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 12 and last.usage.prompt_tokens_details.cached_tokens == 13
    assert chunks[-1].choices[0].finish_reason == "length" and last.pando["reuse"] == "exact"


def test_an_echo_stands_before_the_answer(client: openai.OpenAI) -> None:
    answer = go_on(client, "echo me").choices[0].text
    assert go_on(client, "echo me", echo=True).choices[0].text == "echo me" + answer
    assert go_on(client, tokens_of("echo me"), echo=True).choices[0].text == "echo me" + answer
    assert "".join(chunk.choices[0].text for chunk in go_on(client, "echo me", echo=True, stream=True)) == "echo me" + answer


def test_logprobs_have_a_place_in_the_text(client: openai.OpenAI) -> None:
    choice = go_on(client, "numbers", logprobs=2, logit_bias={"64": 100}).choices[0]
    assert choice.text == "a" * 8 and choice.logprobs.tokens == ["a"] * 8
    assert choice.logprobs.text_offset == list(range(8))
    assert all(found["a"] == own for own, found in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True))


@pytest.mark.parametrize("options", [{}, {"logit_bias": {"64": 100}, "stop": "aaaab"}], ids=["half characters", "text held back"])
def test_logprobs_have_the_same_place_in_a_stream(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = go_on(client, "places", logprobs=0, max_tokens=24, **options).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in go_on(client, "places", logprobs=0, max_tokens=24, stream=True, **options)]
    assert [offset for one in streamed for offset in one.text_offset] == whole.text_offset
    assert [token for one in streamed for token in one.tokens] == whole.tokens


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_text_leaves_out_take_no_place_in_it(client: openai.OpenAI, stream: bool, skipped: bool) -> None:
    either = {"logit_bias": {"64": 100, str(END): 100}, "temperature": 50, "seed": 1, "max_tokens": 12, "logprobs": 0}
    asked = {**either, "stream": stream, "extra_body": {"ignore_eos": True, "skip_special_tokens": skipped, "top_k": 2}}
    for echo in ("", "<end>echo"):
        reply = go_on(client, echo or "Either", echo=bool(echo), **asked)
        choices = [event.choices[0] for event in reply] if stream else [reply.choices[0]]
        told = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for one in told for token in one.tokens][-12:]
        said = ["" if skipped and token == "<end>" else token for token in tokens]
        assert set(tokens) == {"a", "<end>"} and "".join(choice.text for choice in choices) == echo + "".join(said)
        places = [len(echo) + len("".join(said[:place])) for place in range(12)]
        assert [place for one in told for place in one.text_offset][-12:] == places


def test_an_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    choice = go_on(client, "scored prompt", echo=True, logprobs=1, max_tokens=2).choices[0]
    assert "".join(choice.logprobs.tokens[:13]) == "scored prompt" and len(choice.logprobs.tokens) == 15
    assert choice.logprobs.text_offset[:13] == list(range(13))
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:13] == pytest.approx(tiny_llm().score(tokens_of("scored prompt")), abs=1e-4)
    streamed = [chunk.choices[0].logprobs for chunk in go_on(client, "scored prompt", echo=True, logprobs=1, max_tokens=2, stream=True)]
    assert [token for one in streamed for token in one.tokens] == choice.logprobs.tokens
    assert [offset for one in streamed for offset in one.text_offset] == choice.logprobs.text_offset


def test_what_fills_the_whole_context_is_scored() -> None:
    with live(engine={"max_model_len": 32}) as server:
        asked = {"prompt": "x" * 32, "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = fetch(server, "/v1/completions", asked).json()["choices"][0]
        assert len(choice["logprobs"]["token_logprobs"]) == 32 and choice["text"] == "x" * 32
        assert fetch(server, "/v1/completions", {**asked, "prompt": "x" * 33}).status_code == 400


def test_what_begins_a_sequence_takes_no_place_in_the_text_of_an_echo() -> None:
    """Most models want a token there that no client has sent."""
    settings = json.loads(tiny_tokenizer()._text)
    first = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", END)])
    settings["post_processor"] = json.loads(first.__getstate__())
    tokenizer = Tokenizer(json.dumps(settings), {"bos_token": "<end>", "eos_token": "<end>"}, [], None)
    with live(replace(tiny_model(), tokenizer=tokenizer)) as server, each_client_of(server, "sync") as client:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 2, "logit_bias": {"64": 100}}
        choice = go_on(client, "scored", **asked).choices[0]
        assert choice.text == "scoredaa" and choice.logprobs.tokens == ["<end>", *"scoredaa"]
        assert choice.logprobs.text_offset == [0, *range(8)]
        streamed = [chunk.choices[0].logprobs for chunk in go_on(client, "scored", stream=True, **asked)]
        assert [offset for one in streamed for offset in one.text_offset] == choice.logprobs.text_offset
        spelt = go_on(client, tokenizer.encode("scored"), **asked).choices[0]
        for added in (True, False):
            made = fetch(server, "/tokenize", {"prompt": "scored", "add_special_tokens": added}).json()
            assert made["tokens"] == [END] * added + tokens_of("scored")
        assert spelt.text == "<end>scoredaa" and spelt.logprobs.text_offset == [0, *range(5, 13)]


def test_an_echo_with_logprobs_tells_what_else_could_stand_in_the_prompt(client: openai.OpenAI) -> None:
    """Evaluations ask whether each token of a text is the likeliest there."""
    said = go_on(client, "scored", echo=True, logprobs=2, max_tokens=1).choices[0].logprobs
    assert said.top_logprobs[0] is None
    for place in range(1, 6):
        after = go_on(client, "scored"[:place], logprobs=2, max_tokens=1).choices[0].logprobs.top_logprobs[0]
        told, own = said.top_logprobs[place], said.tokens[place]
        assert {token: told[token] for token in after} == pytest.approx(after, abs=1e-4)
        assert told[own] == said.token_logprobs[place] and set(told) == {*after, own}
    alone = go_on(client, "scored", echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
    assert [set(top) for top in alone.top_logprobs[1:]] == [{token} for token in alone.tokens[1:]]
    chunks = go_on(client, "scored", echo=True, logprobs=2, max_tokens=1, stream=True)
    assert [top for chunk in chunks for top in chunk.choices[0].logprobs.top_logprobs] == said.top_logprobs


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_of_no_tokens_is_the_prompt_alone(client: openai.OpenAI, logprobs: int | None) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": logprobs, "extra_body": {"return_token_ids": True}}
    reply = go_on(client, ["scored", "other"], max_tokens=0, **asked)
    more = go_on(client, ["scored", "other"], max_tokens=1, **asked)
    assert [(one.text, one.finish_reason, one.token_ids) for one in reply.choices] == [("scored", "length", []), ("other", "length", [])]
    assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (0, more.usage.prompt_tokens)
    for one, other in zip(reply.choices, more.choices, strict=True):
        if logprobs is None:
            assert one.logprobs is None
        else:
            assert one.logprobs.tokens == other.logprobs.tokens[:-1] == list(one.text)
            assert one.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:-1], abs=1e-4)
    chunks = list(go_on(client, "scored", max_tokens=0, stream=True, **asked))
    assert ["".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason] == ["scored", "length"]
    with pytest.raises(openai.UnprocessableEntityError, match="echo"):
        go_on(client, "scored", max_tokens=0)


def test_stop_strings_and_stop_tokens_end_an_answer(client: openai.OpenAI) -> None:
    plain = go_on(client, "stop", max_tokens=30, extra_body={"return_token_ids": True}).choices[0]
    assert plain.prompt_token_ids == tokens_of("stop") and len(plain.token_ids) == 30
    stop = next(token for token in plain.token_ids[3:])
    first = plain.token_ids.index(stop)
    ended = go_on(client, "stop", max_tokens=30, extra_body={"stop_token_ids": [stop], "return_token_ids": True}).choices[0]
    assert ended.finish_reason == "stop" and ended.token_ids == plain.token_ids[: first + 1]
    letter = next(char for char in plain.text[3:] if char != "\ufffd")
    ended = go_on(client, "stop", max_tokens=30, stop=[letter]).choices[0]
    assert (ended.text, ended.finish_reason) == (plain.text.partition(letter)[0], "stop")
    kept = go_on(client, "stop", max_tokens=30, stop=[letter], extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == plain.text.partition(letter)[0] + letter


def test_the_model_is_listed_and_found_by_its_name(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "pando")
    assert client.models.retrieve(NAME).max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")


def test_a_benchmark_that_is_told_no_model_finds_one_and_its_root(server: Live) -> None:
    """`vllm bench serve` reads both, and ends with an error of its own where either is missing."""
    listed = fetch(server, "/v1/models").json()
    (card,) = listed["data"]
    assert (listed["object"], card["id"], card["root"]) == ("list", NAME, NAME)


@pytest.mark.parametrize("text", ["plain words", "ünïcödé 🌳 text", "<end> is special", " "])
def test_tokens_become_the_same_text_again(server: Live, text: str) -> None:
    made = fetch(server, "/tokenize", {"model": NAME, "prompt": text}).json()
    assert made == {"tokens": tokens_of(text), "count": len(tokens_of(text)), "max_model_len": 512}
    assert fetch(server, "/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}


def test_special_tokens_that_a_prompt_names_are_those_though_none_is_added_before_it(server: Live) -> None:
    """As in what a chat template has written, which begins as the model wants it."""
    made = fetch(server, "/tokenize", {"prompt": "a<end>b", "add_special_tokens": False}).json()
    assert made["tokens"] == [*tokens_of("a"), END, *tokens_of("b")]


def test_a_conversation_is_tokenised_as_it_is_answered(server: Live, client: openai.OpenAI) -> None:
    made = fetch(server, "/tokenize", {"messages": said("Count me")}).json()
    reply = client.chat.completions.create(model=NAME, messages=said("Count me"), max_tokens=1, extra_body={"return_token_ids": True})
    assert reply.prompt_token_ids == made["tokens"]


def test_the_mark_that_some_editors_begin_a_file_with_is_no_part_of_any_prompt(tmp_path: Path) -> None:
    template, shared = tmp_path / "template.jinja", tmp_path / "shared.txt"
    template.write_text("{{ messages[0].content }}>", encoding="utf-8-sig")
    shared.write_text("Everybody may know this.", encoding="utf-8-sig")
    with live(chat_template=str(template), share_prefix=(str(shared),)) as server:
        asked = {"messages": said("Everybody may know this."), "max_tokens": 1, "return_token_ids": True}
        reply = fetch(server, "/v1/chat/completions", asked).json()
        assert reply["prompt_token_ids"] == tokens_of("Everybody may know this.>")
        assert reply["pando"]["tokens"]["device"] == len(tokens_of("Everybody may know this."))


def test_what_is_no_token_is_refused(server: Live) -> None:
    refused = fetch(server, "/detokenize", {"tokens": [5, 257]})
    assert refused.status_code == 400 and "257 is not a token" in refused.json()["error"]["message"]


def test_the_state_of_the_server_is_told(server: Live) -> None:
    assert fetch(server, "/health").json() == {"status": "ok"}
    assert fetch(server, "/ready").json() == {"status": "ready"}
    assert fetch(server, "/version").json() == {"version": __version__}
    metrics = fetch(server, "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain") and "pando_pages_in_use" in metrics.text
    assert "/v1/chat/completions" in fetch(server, "/openapi.json").json()["paths"]
    assert fetch(server, "/docs").status_code == 200
