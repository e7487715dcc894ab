"""One HTTP request at the engine: what came for it, and who waits for that."""

import asyncio
import time
from collections.abc import AsyncIterator

from ..engine.request import TokenEvent
from ..errors import PandoError
from .failures import Stopped
from .metrics import Outcome
from .prompts import Asked

Arrival = tuple[int, TokenEvent, float]  # the place of its prompt, a token, and when it came, on the clock of `time.perf_counter`
UNTOLD = "no token could be chosen or sent: the model computed no number, or the log says what failed; try again, or use another dtype"


class TimedOut(PandoError):
    pass


class Lost(PandoError):
    """The engine could not answer."""


class Ticket:
    """An engine request for each of its prompts, and their tokens as they come."""

    def __init__(self, request_id: str, asked: Asked, deadline: float) -> None:
        self.asked = asked
        self.names = {f"{request_id}/{place}": place for place in range(len(asked.prompts))}
        self.open_answers = asked.params.n * len(asked.prompts)
        self.arrived = time.perf_counter()
        self.first: float | None = None
        self.outcome: Outcome = "cancelled"
        self._deadline = deadline
        self._inbox: list[Arrival] = []
        self._at_once = 1  # tokens for which the reader is woken
        self._reader: asyncio.Future[None] | None = None
        self._is_due = False  # it is to look at what came
        self._failure: PandoError | None = None

    def put(self, event: TokenEvent, now: float) -> None:
        self._inbox.append((self.names[event.request_id], event, now))
        if self.first is None:
            self.first = now
            self._wake()
        elif event.finish_reason is not None or len(self._inbox) >= self._at_once:
            self._wake()

    def fail(self, error: PandoError) -> None:
        self._failure = error
        if self.open_answers:
            self.outcome = "stopped" if isinstance(error, Stopped) else "timeout" if isinstance(error, TimedOut) else "failed"
        self._wake()

    def _wake(self) -> None:
        self._is_due = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def batches(self, at_once: int = 1) -> AsyncIterator[list[Arrival]]:
        """What came since the last time, until every answer has ended. The first token is told at once, and the end of an answer; of the
        others a reader may want several at a time: to be woken for each costs more than all that is done with it."""
        self._at_once, loop = at_once, asyncio.get_running_loop()
        late = TimedOut("the request took longer than allowed; ask for fewer tokens, or raise --request-timeout")
        timer = loop.call_later(self._deadline - time.perf_counter(), self.fail, late)  # one for all tokens
        try:
            while self.open_answers:
                if not self._is_due:
                    self._reader = loop.create_future()
                    await self._reader
                if time.perf_counter() >= self._deadline:  # before a busy loop has come to the timer
                    self.fail(late)
                if self._failure is not None:
                    raise self._failure
                ends = [event.finish_reason for _, event, _ in self._inbox if event.finish_reason is not None]
                self.open_answers -= len(ends)
                if "error" in ends:
                    self.outcome = "failed"
                    raise Lost(UNTOLD)
                found, self._inbox, self._is_due = self._inbox, [], False
                yield found
        finally:
            timer.cancel()

    def rest(self) -> list[Arrival]:
        """What came and nobody has read, when nobody will."""
        found, self._inbox = self._inbox, []
        return [arrival for arrival in found if arrival[1].finish_reason != "error"]  # which is no token
