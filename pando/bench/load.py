"""The open loop: requests leave when they were meant to, whatever has become of those before."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from .client import Client, Failure, Message, Reply
from .traffic import MAX_REQUESTS, Conversation

NOT_SENT = "not sent: an earlier turn failed"


@dataclass(frozen=True)
class Outcome:
    """One request. Times are seconds from the start of the run; latencies count from when it was meant to leave."""

    conversation: int
    turn: int
    arrival: float
    start: float  # of the run, on the clock of `reply`
    answer: int  # tokens asked for
    held: float = 0.0  # waiting for a place under the cap on requests in flight
    capped: bool = False  # it found no place when it came
    reply: Reply | None = None  # None: never sent

    @property
    def failure(self) -> Failure | None:
        return self.reply.failure if self.reply else Failure(NOT_SENT)

    @property
    def lag(self) -> float | None:
        """How late the generator itself was."""
        return self._since_arrival(self.reply.sent) - self.held if self.reply else None

    @property
    def first(self) -> float | None:
        return self._since_arrival(self.reply.pieces[0]) if self.reply and self.reply.pieces else None

    @property
    def total(self) -> float | None:
        return self._since_arrival(self.reply.ended) if self.reply else None

    @property
    def tokens(self) -> int:
        """Of the answer; without usage every piece of text is taken for a token."""
        if self.reply is None:
            return 0
        return len(self.reply.pieces) if self.reply.output_tokens is None else self.reply.output_tokens

    @property
    def per_token(self) -> float | None:
        """Of the tokens after the first."""
        if self.reply is None or not self.reply.pieces or self.tokens < 2:
            return None
        return (self.reply.last - self.reply.pieces[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        pieces = self.reply.pieces if self.reply else ()
        return [after - before for before, after in pairwise(pieces)]

    def _since_arrival(self, moment: float) -> float:
        return moment - self.start - self.arrival


@dataclass(frozen=True)
class Run:
    """One rate: what was planned, and what has become of it so far."""

    rate: float
    planned: tuple[Conversation, ...]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.planned)


async def drive(client: Client, run: Run, concurrency: int | None, tell: Callable[[], None]) -> None:
    """Sends everything planned, and returns when every request has come to its end. `tell` is called at each."""
    driver = Driver(client, run, asyncio.Semaphore(concurrency or MAX_REQUESTS), tell)
    async with asyncio.TaskGroup() as group:
        for number, conversation in enumerate(run.planned):
            wait = driver.start + conversation.arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(driver.converse(number, conversation))


class Driver:
    """Open between conversations, closed inside each: a turn waits for the answer it replies to."""

    def __init__(self, client: Client, run: Run, places: asyncio.Semaphore, tell: Callable[[], None]) -> None:
        self._client, self._run, self._places, self._tell = client, run, places, tell
        self.start = time.perf_counter()

    async def converse(self, number: int, conversation: Conversation) -> None:
        history: list[Message] = [{"role": "system", "content": conversation.system}] if conversation.system else []
        arrival, lost = conversation.arrival, False
        for i, turn in enumerate(conversation.turns):
            history.append({"role": "user", "content": turn.text})
            outcome = Outcome(number, i, arrival, self.start, turn.answer)
            if not lost:
                outcome = await self._send(outcome, history)
            self._run.outcomes.append(outcome)
            self._tell()
            lost = outcome.failure is not None
            if outcome.reply is not None and not lost and i + 1 < len(conversation.turns):
                history.append({"role": "assistant", "content": outcome.reply.text})
                arrival = outcome.reply.ended - self.start + conversation.turns[i + 1].think
                await asyncio.sleep(self.start + arrival - time.perf_counter())

    async def _send(self, planned: Outcome, history: list[Message]) -> Outcome:
        came, capped = time.perf_counter(), self._places.locked()
        async with self._places:
            held = time.perf_counter() - came if capped else 0.0
            reply = await self._client.ask(history, planned.answer)
        return replace(planned, held=held, capped=capped, reply=reply)
