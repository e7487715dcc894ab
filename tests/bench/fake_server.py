"""A server of OpenAI's kind that answers at once, badly or not at all, as a test tells it. A word is a token."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]


@dataclass
class Behaviour:
    """What the server does, and what it has seen. `act` names what becomes of a request, by its number and body."""

    act: Callable[[int, Body], str] = lambda number, body: "answer"
    delay: float = 0.0  # seconds before the first token
    together: int = 0  # no answer begins before so many are in flight; those that ask for one token are not held
    tells_usage: bool = True
    tells_cached: bool = True
    models: Any = field(default_factory=lambda: {"data": [{"id": "parrot"}]})
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    prompts: list[list[str]] = field(default_factory=list)

    def cached(self, words: list[str]) -> int:
        return max((shared(words, other) for other in self.prompts), default=0)


def shared(one: list[str], other: list[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class FakeServer:
    def __init__(self) -> None:
        self.behaviour = Behaviour()
        completions = [Route(path, self.complete, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions")]
        app = Starlette(routes=[*completions, Route("/v1/models", self.models), Route("/version", self.version)])
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def models(self, request: Request) -> Response:
        return JSONResponse(self.behaviour.models)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "7.7"})

    async def complete(self, request: Request) -> Response:
        told, body = self.behaviour, await request.json()
        told.bodies.append(body)
        told.headers.append(dict(request.headers))
        action = told.act(len(told.bodies) - 1, body)
        if action.isdigit():
            headers = {"retry-after": "3"} if action == "429" else {}
            return JSONResponse({"error": {"message": f"no {action}"}}, int(action), headers)
        if action == "whole":
            return JSONResponse({"choices": [{"message": {"content": "all at once"}}]})
        return StreamingResponse(self.stream(told, body, action), media_type="text/event-stream")

    async def stream(self, told: Behaviour, body: Body, action: str) -> AsyncIterator[str]:
        told.in_flight += 1
        told.most_in_flight = max(told.in_flight, told.most_in_flight)
        try:
            await asyncio.sleep(told.delay)
            while told.most_in_flight < told.together and body["max_tokens"] > 1:
                await asyncio.sleep(0.005)
            async for chunk in self.chunks(told, body, action):
                yield chunk
        finally:
            told.in_flight -= 1

    async def chunks(self, told: Behaviour, body: Body, action: str) -> AsyncIterator[str]:
        words = prompt_of(body).split()
        cached = told.cached(words)
        told.prompts.append(words)
        yield ": thinking\r\n\r\n"
        yield event(piece(body, "", role=True))
        for i in range(body["max_tokens"]):
            if action == "hang":
                await asyncio.sleep(60)
            yield event(piece(body, f"t{len(words)}.{i} "))
            if action == "break":
                raise ConnectionResetError
            if action == "nonsense":
                yield "data: {not json\n\n"
            if action == "complain":
                yield event({"error": {"message": "out of breath", "type": "server_error"}})
            if action == "end early":
                return
        yield event(piece(body, "", finish="length"))
        if told.tells_usage and body.get("stream_options", {}).get("include_usage"):
            details = {"prompt_tokens_details": {"cached_tokens": cached} if told.tells_cached else None}
            yield event({"choices": [], "usage": {"prompt_tokens": len(words), "completion_tokens": body["max_tokens"], **details}})
        yield "data: [DONE]\n\n"


def prompt_of(body: Body) -> str:
    return body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])


def piece(body: Body, text: str, finish: str | None = None, role: bool = False) -> Body:
    if "prompt" in body:
        return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    delta = {"role": "assistant", "content": text} if role else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


def event(body: Body) -> str:
    return f"data: {json.dumps(body)}\n\n"
