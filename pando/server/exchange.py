"""One request for answers, from its ticket to its last byte."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.engine import Engine
from ..engine.pins import Pin
from ..engine.request import Tenant
from ..errors import PandoError
from .account import Account
from .answers import ChatAnswers, TextAnswers, TurnAnswers
from .failures import failure
from .journal import Journal
from .replies import encode, event
from .responses import ResponseAnswers
from .service import Service
from .ticket import Ticket
from .tracing import RequestSpan

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

AT_ONCE = 64  # tokens of an answer that nobody sees before its end: few enough to hold up no other request


class EventStream(StreamingResponse):
    """A stream that is closed for certain, even if the client left before its first byte."""

    def __init__(self, tell: Callable[[Write], Awaitable[None]], close: Callable[[], None]) -> None:
        """`tell` writes all of it."""
        super().__init__((), media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._tell, self._close = tell, close

    async def stream_response(self, send: Send) -> None:
        async def write(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._tell(write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class Exchange:
    """Reads a ticket to its end, and closes it; tells the log, the trace and the history how it went."""

    def __init__(
        self,
        service: Service,
        ticket: Ticket,
        answers: ChatAnswers | TextAnswers | ResponseAnswers,
        *,
        tenant: Tenant,
        session: str | None,
        ttl: int | None,
        span: RequestSpan,
        journal: Journal,
        about: dict[str, Any],
    ) -> None:
        self._service, self._ticket, self._answers = service, ticket, answers
        self._tenant, self._session, self._ttl = tenant, session, ttl
        self._span, self._journal, self._about = span, journal, about
        self._account: Account = answers.account
        self._error: PandoError | None = None
        self._closed = False

    async def whole(self, request: Request) -> Response:
        """The whole answer at once, unless the client leaves before."""
        try:
            reply = await unless_gone(request, self._read())
            return gone() if reply is None else Response(reply, media_type="application/json")
        finally:
            self._close()

    async def _read(self) -> bytes:
        try:
            async for batch in self._ticket.batches(AT_ONCE):
                self._first_token()
                self._answers.take(batch)
            await self._settle()
        except PandoError as error:
            self._error = error
            raise
        if self._ticket.asked.params.logprobs is None:
            return encode(self._answers.whole())
        return await self._service.beside(lambda: encode(self._answers.whole()))  # it may be long

    def stream(self) -> EventStream:
        return EventStream(self._tell, self._close)

    async def _tell(self, write: Write) -> None:
        answers = self._answers
        try:
            if opening := answers.opening():
                await write(opening)
            async for batch in self._ticket.batches():
                self._first_token()
                last = not self._ticket.open_answers
                pieces: list[Any] = [*answers.events(batch)]
                if last:
                    await self._settle()
                    answers.conclude(pieces)
                await write(b"".join(map(event, pieces)))
            self._close()  # who has read the end finds the request counted, and its place free
            await write(answers.end())
        except PandoError as error:  # it is too late for a status
            self._error = error
            self._close()
            outcome = self._ticket.outcome
            told = failure(503, str(error), code=outcome if outcome in ("timeout", "stopped") else "failed")
            await write(event(answers.failed(told)))

    def _first_token(self) -> None:
        if not self._account.tokens:
            self._span.first_token()

    async def _settle(self) -> None:
        """After the last token: keeps what was asked to be kept, and remembers the turn."""
        self._ticket.outcome = self._answers.outcome
        asked, answers = self._ticket.asked, self._answers
        prompt = asked.prompts[0]
        tokens = [*prompt.tokens, *answers.answers[0].tokens]
        if self._ttl is not None:
            is_cut = self._account.reuse[0].truncated is not None

            def keep(engine: Engine) -> Pin:
                told = tokens, self._tenant, prompt.public, self._ttl
                return engine.pin(*told, automatic=True, is_cut=is_cut, session=self._session, asked=len(prompt.tokens))

            self._account.hold(await self._service.pin_if_room(keep), self._ttl)
        if isinstance(answers, TurnAnswers) and prompt.bound is None:
            turn = self._tenant.salt, asked.messages, answers.message(), tokens, len(prompt.tokens), self._session
            self._service.workers.submit(self._service.history.remember, *turn)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._service.close(self._ticket)
        self._answers.take(self._ticket.rest())
        self._account.close()
        used, miss = self._account.usage(), self._account.miss()
        outcome = self._ticket.outcome
        self._span.end(
            input_tokens=used["prompt_tokens"],
            output_tokens=used["completion_tokens"],
            cached_tokens=used["prompt_tokens_details"]["cached_tokens"],
            miss=miss["reason"] if miss else None,
            finish_reasons=[] if outcome in ("cancelled", "timeout", "failed", "stopped") else [outcome],
            error=type(self._error).__name__ if self._error else None,
        )
        self._journal.request(
            **self._about,
            outcome=outcome,
            prompt_tokens=used["prompt_tokens"],
            cached_tokens=used["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=used["completion_tokens"],
            miss=miss["reason"] if miss else None,
            drift=miss["drift"] if miss else None,
            first_token_ms=self._account.first_token_ms(),
            seconds=round(time.perf_counter() - self._ticket.arrived, 3),
            session=self._session,
            prompt=self._ticket.asked.prompts[0].text,
            answer=self._answers.answers[0].text,
        )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work brings; None where the client leaves before: the work is cancelled."""
    leaving, doing = asyncio.ensure_future(_leaves(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, doing}, return_when=asyncio.FIRST_COMPLETED)
        return await doing if doing.done() else None
    finally:
        leaving.cancel()
        doing.cancel()


def gone() -> Response:
    """For the log alone: nobody reads it."""
    return Response(status_code=499)


async def _leaves(request: Request) -> None:
    """Ends when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
