"""What is refused, and how the official client sees it."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from .clients import WEATHER, ask, braked, counters, fetch, said, wait_for
from .live import NAME, Live, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """One row, and nobody may wait for it."""
    with live(engine={"max_num_seqs": 1}, max_queue=0, max_body_mib=1) as server:
        yield server


@pytest.fixture
def soon_late(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of this test may take a second; others have time, however slow a machine is."""
    monkeypatch.setattr(server.service, "config", replace(server.service.config, request_timeout=1))


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-99' is not served here; 'tiny' is") as refused:
        client.chat.completions.create(model="gpt-99", messages=said("Hi"))
    assert refused.value.type == "not_found_error"


def test_an_unknown_model_is_told_from_an_unknown_route_by_its_code(server: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-99", messages=said("Hi"))
    assert refused.value.code == "model_not_found"
    assert fetch(server, "/v1/models/gpt-99").json()["error"]["code"] == "model_not_found"
    assert fetch(server, "/v1/responses", {}).json()["error"]["code"] is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 1000}}, "logit_bias.1"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"extra_body": {"prompt_cache_options": {"ttl": "forever"}}}, "prompt_cache_options.ttl"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(**{"model": NAME, "messages": said("Hi"), "max_tokens": 1, **options})
    assert refused.value.param == param and refused.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_refused_with_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"618 tokens and the context holds 512.*by 107 tokens") as refused:
        ask(client, "x" * 600)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("length", [600, 60_000], ids=["by its tokens", "by its characters"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(server: Live, path: str, length: int) -> None:
    """LiteLLM turns to a model with a longer context where it finds the first of them in the body as Python prints it, and others where
    they find the second, whatever the code is."""
    refused = fetch(server, path, {"messages": said("x" * length), "prompt": "x" * length})
    assert refused.status_code == 400
    assert "exceeds the available context size" in str(refused.json()) and "maximum context length is 512 tokens" in str(refused.json())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"logit_bias": {"999": 1}}, "999"), ({"prompt": [300]}, "300 is no token"), ({"prompt": ""}, "empty")],
    ids=["bias", "token", "nothing"],
)
def test_what_only_the_engine_can_know_is_a_bad_request(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": NAME, "prompt": "x", "max_tokens": 1, **options})


def test_one_bad_prompt_among_several_refuses_all(server: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="999"):
        client.completions.create(model=NAME, prompt=[[1, 2, 3], [999]], max_tokens=100)
    server.settle()
    assert ask(client, "And on").choices


def test_malformed_json_is_a_bad_request(server: Live) -> None:
    refused = fetch(server, "/v1/completions", headers={"content-type": "application/json"}, content=b'{"prompt": ')
    assert refused.status_code == 400 and "not valid JSON" in refused.json()["error"]["message"]


def test_a_large_body_is_refused(server: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="1 MiB") as refused:
        ask(client, "x" * 2**20)
    assert refused.value.status_code == 413


def test_an_unknown_route_is_not_found(server: Live) -> None:
    refused = fetch(server, "/v1/embeddings", {})
    assert refused.status_code == 404 and "there is no route POST /v1/embeddings" in refused.json()["error"]["message"]


def test_who_sends_a_file_is_told_that_no_route_takes_one(client: openai.OpenAI) -> None:
    for send in (
        lambda: client.audio.transcriptions.create(model=NAME, file=b"a sound"),
        lambda: client.files.create(file=b"a", purpose="batch"),
    ):
        with pytest.raises(openai.BadRequestError, match="send JSON, not files or forms"):
            send()


def test_who_comes_when_all_rows_are_taken_may_try_again(server: Live, client: openai.OpenAI) -> None:
    answered: list[Any] = []
    with braked(server) as brake:
        first = threading.Thread(target=lambda: answered.append(ask(client, "First come")))
        first.start()
        wait_for(lambda: server.service._tickets)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client, "Second come")
        assert refused.value.code == "rate_limit_exceeded" and int(refused.value.response.headers["retry-after"]) >= 1
        brake.let(100)
        first.join()
    assert answered[0].choices[0].message.content
    assert ask(client, "Second come").choices[0].message.content


def total(server: Live) -> float:
    return sum(value for name, value in counters(server).items() if name.startswith("pando_requests_total{"))


@pytest.mark.usefixtures("soon_late")
def test_a_request_that_takes_too_long_is_given_up(server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    before, all_before = counters(server)['pando_requests_total{outcome="timeout"}'], total(server)
    with braked(server):
        with pytest.raises(openai.InternalServerError, match="request-timeout") as late:
            ask(client, "Too slow")
        assert late.value.status_code == 503 and late.value.code == "timeout"
        assert late.value.response.headers["x-should-retry"] == "false", "it would take as long again, twice"
        assert not server.service._tickets
    assert counters(server)['pando_requests_total{outcome="timeout"}'] == before + 1
    assert total(server) == all_before + 1, "it is counted once"
    monkeypatch.undo()
    assert ask(client, "Fast enough").choices


def test_a_stream_that_takes_too_long_says_so_at_its_end(server: Live, client: openai.OpenAI) -> None:
    with braked(server) as brake:
        stream = ask(client, "Slow stream", stream=True, max_tokens=100)
        for ticket in server.service._tickets.values():
            ticket._deadline = 0.0  # it has begun, and its time is over
        brake.let(3)
        with pytest.raises(openai.APIError, match="request-timeout"):
            list(stream)
    assert ask(client, "Fast enough").choices


@pytest.mark.parametrize(("state", "told"), [("loading", "still being loaded"), ("draining", "shutting down")])
def test_before_and_after_its_time_the_server_says_so(
    server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, state: str, told: str
) -> None:
    monkeypatch.setattr(server.service, "state", state)
    with pytest.raises(openai.InternalServerError, match=told) as refused:
        ask(client, "Too early, or too late")
    assert refused.value.status_code == 503 and refused.value.code == "not_ready" and refused.value.response.headers["retry-after"]
    ready = fetch(server, "/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": state})
    assert fetch(server, "/health").status_code == 200


def test_what_the_engine_cannot_compute_is_a_failure_of_the_server(server: Live, client: openai.OpenAI) -> None:
    """And after it, the engine answers others."""
    engine = server.service.loop._engine

    def fail() -> Any:
        raise RuntimeError("no memory")

    engine.step = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(openai.InternalServerError, match="engine failed") as failed:
            ask(client, "Unlucky")
        assert failed.value.status_code == 503 and failed.value.code == "failed"
    finally:
        del engine.step
    server.settle()
    assert ask(client, "Lucky").choices[0].message.content
