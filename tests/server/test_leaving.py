"""Clients that go away: what they had is free again within a step or two."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pando.engine.answer import Answer
from pando.engine.request import TokenEvent
from pando.engine.sampler import Chosen

from .clients import WAIT, ask, braked, client_of, counters, fetch, said, wait_for
from .live import NAME, Live


@pytest.fixture
def hasty(server: Live) -> Iterator[openai.OpenAI]:
    """A client that waits for a moment only, from when the server has its request."""

    def sent(event: str, info: Any) -> None:
        if event == "http11.send_request_body.complete":
            wait_for(lambda: server.service._tickets)

    def begin(request: httpx.Request) -> None:
        request.extensions["trace"] = sent

    with client_of(server) as client:
        client._client.event_hooks = {"request": [begin]}
        yield client.with_options(timeout=0.3)


def cancelled(server: Live) -> float:
    return counters(server)['pando_requests_total{outcome="cancelled"}']


def have_left(server: Live) -> None:
    """Waits until the server knows that nobody waits, and has told the engine: it answers one after another."""
    wait_for(lambda: not server.service._tickets)
    assert fetch(server, "/health").status_code == 200


def is_all_free(server: Live) -> bool:
    stats = server.service.loop.call(lambda engine: engine.stats()).result(WAIT)
    return stats.running == stats.waiting == 0 and stats.pages_in_use == stats.pages_cached == stats.pages_evictable


def test_no_answer_waits_for_an_acknowledgement_where_a_connection_is_used_again(server: Live) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        held = [connection.transport.get_extra_info("socket") for connection in server.running.server.server_state.connections]  # type: ignore[union-attr]
        assert held and all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in held), "small packets wait for one another"


def test_a_stream_that_is_closed_frees_its_rows(server: Live, client: openai.OpenAI) -> None:
    before, counted = cancelled(server), counters(server)["pando_generated_tokens_total"]
    with braked(server) as brake:
        stream = ask(client, "Half of it", stream=True, max_tokens=400, n=3, extra_body={"ignore_eos": True})
        brake.let(6)
        for _ in range(4):
            next(stream)
        wait_for(lambda: brake.steps == 6)
        stream.close()
        have_left(server)
        brake.let(2)
        wait_for(lambda: not server.service.loop._engine.has_work)
        assert brake.steps <= 8
    assert cancelled(server) == before + 1 and is_all_free(server)
    assert counters(server)["pando_generated_tokens_total"] >= counted + 4


def test_a_stream_that_is_closed_before_its_first_token_leaves_nothing(server: Live, client: openai.OpenAI) -> None:
    before = cancelled(server)
    with braked(server) as brake:
        ask(client, "Nothing of it", stream=True, max_tokens=400).close()
        have_left(server)
        brake.let(2)
        wait_for(lambda: not server.service.loop._engine.has_work)
        assert brake.steps <= 2
    assert cancelled(server) == before + 1 and is_all_free(server)


def test_a_client_that_waits_for_the_whole_and_leaves_frees_its_rows(server: Live, hasty: openai.OpenAI) -> None:
    before = cancelled(server)
    with braked(server) as brake:
        brake.let(3)
        with pytest.raises(openai.APITimeoutError):
            ask(hasty, "All of it", max_tokens=400, extra_body={"ignore_eos": True})
        have_left(server)
        brake.let(2)
        wait_for(lambda: not server.service.loop._engine.has_work)
        assert brake.steps <= 5
    assert cancelled(server) == before + 1 and is_all_free(server)


def test_all_tokens_of_a_whole_that_nobody_waited_for_are_in_the_log(server: Live, hasty: openai.OpenAI) -> None:
    counted = counters(server)["pando_generated_tokens_total"]
    with braked(server) as brake:
        brake.let(7)
        with pytest.raises(openai.APITimeoutError):
            ask(hasty, "Seven of it", max_tokens=400, extra_body={"ignore_eos": True, "user": "seven"})
        have_left(server)
    lines = map(json.loads, server.log.getvalue().splitlines())
    [line] = [line for line in lines if line.get("user") == "seven"]
    assert line["outcome"] == "cancelled"
    assert line["completion_tokens"] == counters(server)["pando_generated_tokens_total"] - counted > 1


def test_who_waits_in_the_queue_can_leave_it(server: Live, hasty: openai.OpenAI) -> None:
    with braked(server) as brake:
        with pytest.raises(openai.APITimeoutError):
            ask(hasty, "Not begun", max_tokens=400)
        have_left(server)
        brake.let(1)
        wait_for(lambda: not server.service.loop._engine.has_work)
    assert is_all_free(server)


@pytest.mark.parametrize("route", ["warm", "pin"])
def test_who_leaves_while_a_prompt_is_computed_takes_the_work_along(server: Live, hasty: openai.OpenAI, route: str) -> None:
    with braked(server) as brake:
        with pytest.raises(openai.APITimeoutError):
            hasty.post(f"/cache/{route}", cast_to=dict, body={"prompt": route * 100})
        have_left(server)
        brake.let(2)
        wait_for(lambda: not server.service.loop._engine.has_work)
    assert is_all_free(server)


def test_others_do_not_notice_who_leaves(server: Live, client: openai.OpenAI) -> None:
    alone = ask(client, "I stay", max_tokens=60).choices[0].message.content

    async def leave(client: openai.AsyncOpenAI, tokens: int) -> None:
        stream = await client.chat.completions.create(model=NAME, messages=said("I leave"), max_tokens=400, stream=True)
        async for _ in stream:
            tokens -= 1
            if not tokens:
                await stream.close()
                return

    async def stay(client: openai.AsyncOpenAI) -> str:
        reply = await client.chat.completions.create(model=NAME, messages=said("I stay"), max_tokens=60, temperature=0)
        return reply.choices[0].message.content

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
            return await asyncio.gather(*(leave(client, 1 + place) if place % 2 else stay(client) for place in range(8)))

    answers = asyncio.run(all_of_them())
    assert answers[::2] == [alone] * 4
    server.settle()
    assert is_all_free(server)


@pytest.mark.parametrize("stream", [False, True])
def test_where_one_answer_fails_the_last_tokens_of_the_others_are_in_the_log(
    server: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """They came with the one that failed, and there is no more of any."""
    taken = Answer._taken

    def fails(self: Answer, chosen: Chosen) -> TokenEvent:
        if self.row.index == 1 and len(self.row.output) == 2:
            raise RuntimeError("a fault")
        return taken(self, chosen)

    monkeypatch.setattr(Answer, "_taken", fails)
    before, user = counters(server)["pando_generated_tokens_total"], f"three answers, {stream}"
    asked = {"prompt": user, "max_tokens": 100, "n": 3, "ignore_eos": True, "seed": 1, "stream": stream, "user": user}
    assert "no token could be chosen or sent" in fetch(server, "/v1/completions", asked).text
    have_left(server)
    [line] = [line for line in map(json.loads, server.log.getvalue().splitlines()) if line.get("user") == user]
    came = counters(server)["pando_generated_tokens_total"] - before
    assert (line["outcome"], line["completion_tokens"]) == ("failed", came - 1), "all but what failed"
