"""One request to an OpenAI-compatible server, streamed and timed. Any such server: nothing here is Pando's own."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from .events import Events

Endpoint = Literal["chat", "completions"]
Message = dict[str, str]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
IDLE_SECONDS = 2.0  # servers close idle connections, many after 5 s: a request that meets the closing would be ours to answer for
INVALID = "invalid JSON in the stream"
SHOWN = 200  # characters of a server's complaint


@dataclass(frozen=True)
class Target:
    """A server and how it wants to be asked."""

    url: str
    model: str
    endpoint: Endpoint
    timeout: float  # seconds of one request
    key: str = field(default="", repr=False)
    ignore_eos: bool = True
    usage: bool = True


@dataclass(frozen=True)
class Failure:
    reason: str  # what failures are counted by
    detail: str = ""
    retry_after: str | None = None


@dataclass(frozen=True)
class Reply:
    """What came back and when, on the clock of `time.perf_counter`. None where the server did not tell."""

    sent: float
    ended: float
    last: float  # the last piece of the answer, seen or not
    pieces: tuple[float, ...]  # each piece with text
    text: str
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    failure: Failure | None


class Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Reading:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.texts: list[str] = []
        self.last = 0.0
        self.complete = False
        self.usage: dict[str, Any] = {}

    def take(self, data: str, now: float) -> None:
        if data == "[DONE]":
            self.complete = True
            return
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Failed(Failure(INVALID, data[:SHOWN])) from error
        if not isinstance(body, dict) or body.get("error"):
            raise Failed(Failure("error in the stream", complaint(body)))
        if isinstance(usage := body.get("usage"), dict):
            self.usage = usage
        choices = body.get("choices") or []
        if not isinstance(choices, list):
            raise Failed(Failure(INVALID, f"choices are {choices!r}"[:SHOWN]))
        for choice in choices:
            self._choice(choice, now)

    def _choice(self, choice: Any, now: float) -> None:
        try:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            seen = text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
            self.complete |= choice.get("finish_reason") is not None
        except AttributeError as error:
            raise Failed(Failure(INVALID, f"a choice is {choice!r}"[:SHOWN])) from error
        self.last = now
        if seen:
            self.pieces.append(now)
            self.texts.append(str(text))

    def reply(self, sent: float, ended: float, failure: Failure | None) -> Reply:
        if failure is None and not self.complete:
            failure = Failure("stream ended early", f"after {len(self.pieces)} pieces of text")
        details = self.usage.get("prompt_tokens_details")
        output = _count(self.usage, "completion_tokens")
        if failure is None and not self.pieces and not output:
            failure = Failure("empty answer")
        return Reply(
            sent=sent,
            ended=ended,
            last=self.last or ended,
            pieces=tuple(self.pieces),
            text="".join(self.texts),
            prompt_tokens=_count(self.usage, "prompt_tokens"),
            output_tokens=output,
            cached_tokens=_count(details, "cached_tokens") if isinstance(details, dict) else None,
            failure=failure,
        )


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def complaint(body: Any) -> str:
    """The message of an error in OpenAI's form, or whatever stands there."""
    error = body.get("error") if isinstance(body, dict) else body
    found = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(found if found is not None else body).split())[:SHOWN]


def connect(key: str) -> httpx.AsyncClient:
    """As many connections as there are requests, kept alive, straight to the server: a proxy would be measured as well."""
    headers = {"accept-encoding": "identity", "user-agent": "pando-bench"} | ({"authorization": f"Bearer {key}"} if key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)


class Client:
    def __init__(self, http: httpx.AsyncClient, target: Target) -> None:
        self._http = http
        self.target = target

    async def ask(self, messages: Sequence[Message], answer: int) -> Reply:
        """Never raises for what the server or the network does: that is a failure, and is counted."""
        body = json.dumps(request_body(self.target, messages, answer)).encode()
        reading, failure = Reading(), None
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._stream(body, reading)
        except TimeoutError:
            failure = Failure("timeout", f"no complete answer within {self.target.timeout:g} s")
        except Failed as failed:
            failure = failed.failure
        except httpx.ConnectError as error:
            failure = Failure("no connection", str(error)[:SHOWN])
        except httpx.RequestError as error:
            failure = Failure("connection broke", f"{type(error).__name__}: {error}"[:SHOWN])
        return reading.reply(sent, time.perf_counter(), failure)

    async def _stream(self, body: bytes, reading: Reading) -> None:
        url, headers = self.target.url + PATHS[self.target.endpoint], {"content-type": "application/json"}
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise Failed(await _refusal(response))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise Failed(Failure("not a stream", f"content type {kind[:SHOWN] or 'missing'}"))
            events = Events()
            async for piece in response.aiter_raw():
                now = time.perf_counter()
                for data in events.feed(piece):
                    reading.take(data, now)


async def _refusal(response: httpx.Response) -> Failure:
    text = (await response.aread()).decode("utf-8", errors="replace")
    try:
        detail = complaint(json.loads(text))
    except ValueError:
        detail = " ".join(text.split())[:SHOWN]
    return Failure(f"HTTP {response.status_code}", detail, response.headers.get("retry-after"))


def request_body(target: Target, messages: Sequence[Message], answer: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": target.model, "max_tokens": answer, "temperature": 0, "stream": True}
    if target.endpoint == "chat":
        body["messages"] = list(messages)
    else:
        body["prompt"] = "".join(message["content"] + "\n" for message in messages)
    if target.usage:
        body["stream_options"] = {"include_usage": True}
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body
