"""How bodies arrive: whole, in time, and parsed where it holds up nobody. The log says what of them no route knows."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from anyio import to_thread
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from ..errors import nearest
from .limits import Body

log = logging.getLogger(__name__)

LARGE = 2**16  # bytes of a body from which it is parsed beside the event loop, one at a time
MAX_NESTED = 2**16  # objects and lists of such a body: each costs far more memory than its two characters
PATIENCE = 60  # seconds that a body may take to arrive
MAX_IGNORED = 64  # unknown fields that the log names, each once for a kind of body: clients choose them
MAX_FIELD_CHARS = 64


async def whole_body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {PATIENCE} s; send the request again") from None
    request.state.arrived = time.perf_counter()
    return body


class Ignored:
    """Fields that no route knows: one may be misspelt, and its client would never know."""

    def __init__(self) -> None:
        self._told: set[tuple[type[Body], str]] = set()

    def tell(self, sent: object, form: type[Body], asked: str) -> None:
        """`asked`: what has them, in words. Also of objects in objects; lists may be long, and hold what clients made up."""
        known = {field.alias or name: field for name, field in form.model_fields.items()}
        for name, value in sent.items() if isinstance(sent, dict) else ():
            if len(self._told) == MAX_IGNORED:
                break
            if name in known and isinstance(value, dict) and (inner := _form_of(known[name].annotation)) is not None:
                self.tell(value, inner, f"{name} of {asked}")
            if name in known or value is None or name in form.ignored or name in form.refused:
                continue
            short = name[:MAX_FIELD_CHARS]
            if (form, short) not in self._told:
                self._told.add((form, short))
                meant = f'; did you mean "{close}"?' if (close := nearest(short, known)) else ""
                log.warning("ignored an unknown field %s of %s%s", json.dumps(short), asked, meant)


def _form_of(annotation: Any) -> type[Body] | None:
    """The only kind of object that a field may be."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    found = {form for each in get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) if (form := _form_of(each))}
    return found.pop() if len(found) == 1 else None


class PatientRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, form: type[Body] | None) -> None:
        super().__init__(scope, receive)
        self._body_form = form

    async def json(self) -> Any:
        found = await self._parsed()
        if self._body_form is not None:
            self.app.state.ignored.tell(found, self._body_form, f"{self.method} {self.scope['path']}")
        return found

    async def _parsed(self) -> Any:
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
        form: Any = next((param.field_info.annotation for param in self.dependant.body_params), None)

        async def handler(request: Request) -> Response:
            return await handle(PatientRequest(request.scope, request.receive, form))

        return handler
