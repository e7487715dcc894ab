"""What a request's reader is woken for."""

import asyncio
import time

import pytest

from pando.engine.request import FinishReason, SamplingParams, TokenEvent
from pando.server.prompts import Asked, Prompt
from pando.server.ticket import Lost, Ticket, TimedOut

ASKED = Asked([Prompt((1, 2), None)], SamplingParams())


def token(number: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("r/0", 0, number, "x", finish_reason=finish)


async def told(ticket: Ticket, steps: int, at_once: int, finish: FinishReason = "length") -> list[list[int]]:
    """The tokens of each time that somebody is woken, where each step brings one."""
    found: list[list[int]] = []

    async def read() -> None:
        async for batch in ticket.batches(at_once):
            found.append([event.token for _, event, _ in batch])

    reading = asyncio.ensure_future(read())
    for number in range(steps):
        for _ in range(3):  # whoever was woken has read
            await asyncio.sleep(0)
        ticket.put(token(number, finish if number == steps - 1 else None), time.perf_counter())
    try:
        await asyncio.wait_for(reading, 10)
    except Lost:
        found.append([])
    return found


def new(seconds: float = 100) -> Ticket:
    return Ticket("r", ASKED, time.perf_counter() + seconds)


def test_a_stream_hears_of_every_token_and_who_waits_for_the_whole_of_the_first_of_some_at_once_and_of_the_end() -> None:
    assert asyncio.run(told(new(), 7, 1)) == [[0], [1], [2], [3], [4], [5], [6]]
    assert asyncio.run(told(new(), 7, 4)) == [[0], [1, 2, 3, 4], [5, 6]]


def test_what_nobody_has_read_of_an_answer_that_broke_off_can_still_be_counted() -> None:
    ticket = new()
    assert asyncio.run(told(ticket, 4, 64, "error")) == [[0], []]
    assert [event.token for _, event, _ in ticket.rest()] == [1, 2], "what could not be told is no token"
    assert ticket.outcome == "failed" and ticket.rest() == []


def test_who_waits_for_many_tokens_is_late_in_time() -> None:
    ticket = new(1)

    async def read() -> None:
        ticket.put(token(0), time.perf_counter())
        async for _ in ticket.batches(64):
            ticket.put(token(1), time.perf_counter())

    with pytest.raises(TimedOut):
        asyncio.run(asyncio.wait_for(read(), 10))
    assert [event.token for _, event, _ in ticket.rest()] == [1]
