"""How bodies arrive: whole, in time, and parsed where it holds up nobody."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from anyio import to_thread
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

LARGE = 2**16  # bytes of a body from which it is parsed beside the event loop, one at a time
MAX_NESTED = 2**16  # objects and lists of such a body: each costs far more memory than its two characters
PATIENCE = 60  # seconds that a body may take to arrive


async def whole_body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {PATIENCE} s; send the request again") from None
    request.state.arrived = time.perf_counter()
    return body


class PatientRequest(Request):
    async def json(self) -> Any:
        """Parses a long body in another thread: while it is parsed, others get their tokens."""
        body = await whole_body(self)
        if len(body) < LARGE:
            return json.loads(body)
        if (nested := body.count(b"{") + body.count(b"[")) > MAX_NESTED:
            raise HTTPException(400, f"the body has {nested} objects and lists; at most {MAX_NESTED} are allowed")
        return await to_thread.run_sync(json.loads, body, limiter=self.app.state.parsing)


class PatientRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(PatientRequest(request.scope, request.receive))

        return handler
