"""What every request passes first: it gets an id, shows its key, and may not be larger than allowed."""

import asyncio
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .failures import failure
from .journal import Journal, request_id
from .replies import encode
from .tenants import Tenants

OPEN = frozenset({"/health"})  # whoever watches over the process has no key
JSON = re.compile(r"application/(.+\+)?json\s*(;|$)")
PML_PATH = "/v1/schemas"  # the one route whose body is not JSON
PML = re.compile(r"(text/[\w.+-]+|application/([\w.-]+\+)?xml)\s*(;\s*charset\s*=\s*\"?(utf-8|us-ascii)\"?\s*)?$")
DRAINED = 2**28  # bytes of a refused body that are read and thrown away, so that the client gets to read the refusal
DRAINING = 30.0  # seconds that this may take


class Gate:
    def __init__(self, app: ASGIApp, tenants: Tenants, journal: Journal, max_body: int, refused: Callable[[int], None]) -> None:
        self._app, self._tenants, self._journal, self._max_body, self._refused = app, tenants, journal, max_body, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = request_id(headers.get("x-request-id"))
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        owner = self._tenants.recognise(headers.get("authorization"))
        scope.setdefault("state", {})["request_id"] = name
        scope["state"]["owner"] = owner
        if (objection := self._objection(scope, headers, owner)) is not None:
            # A client that asks before it sends a body need not send it.
            await self._refuse(*objection, answer, None if "expect" in headers else receive)
            return
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # the server below leaves out the body
        try:
            await self._app(asked, self._counted(receive), answer)
        except asyncio.CancelledError:  # running requests had their time to end
            if not begun:
                await self._refuse(503, "the server has stopped; ask another server, or try again later", answer)
        except Exception as error:
            self._journal.error("a request failed", name, path=scope["path"], exception=error)
            if begun:
                raise  # the answer is half sent: only closing the connection tells the client
            await self._refuse(500, f"something went wrong on the server; its log has more under the id {name}", answer)

    def _objection(self, scope: Scope, headers: Headers, owner: bytes | None) -> tuple[int, str] | None:
        """What the head of a request is refused for."""
        if owner is None and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            return 401, "no valid API key was given; send the header Authorization: Bearer KEY"
        length, kind = headers.get("content-length", "0"), headers.get("content-type")
        if length.isdecimal() and int(length) > self._max_body:
            return 413, self._too_large()
        if scope["method"] == "POST" and (packing := headers.get("content-encoding", "")).lower() not in ("", "identity"):
            return 400, f"the body is sent with Content-Encoding {packing[:80]!r}; send it as it is"
        is_page = "origin" in headers
        if scope["method"] == "POST" and (kind is not None or is_page):
            return _unread(kind or "", scope["path"], is_page)
        return None

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                if message.get("more_body"):
                    await _discard(receive)
                raise HTTPException(413, self._too_large(), {"connection": "close"})
            return message

        return counted

    async def _refuse(self, status: int, text: str, send: Send, body: Receive | None = None) -> None:
        """`body`: what the client may still send of it is thrown away, but the refusal is sent before."""
        self._refused(status)
        said = encode(failure(status, text))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode()), (b"connection", b"close")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": said, "more_body": body is not None})
        if body is not None:
            await _discard(body)
            await send({"type": "http.response.body"})

    def _too_large(self) -> str:
        return f"the body is larger than the {self._max_body >> 20} MiB that are allowed; send less, or raise --max-body-mib"


def _unread(kind: str, path: str, is_page: bool) -> tuple[int, str] | None:
    """What a kind of body is refused for. What has none, or is plain text, a browser sends for any web page, and asks nobody before: such a
    page could use the server of whoever looks at it."""
    if path == PML_PATH:
        fits, advice = PML.match(kind.lower()), "send PML in UTF-8, and the header Content-Type: text/xml"
        fits = None if is_page and kind.lower().startswith("text/plain") else fits
    else:
        fits, advice = JSON.match(kind.lower()), "send JSON, not files or forms, and the header Content-Type: application/json"
    return None if fits else (400, f"the body is sent {f'as {kind[:80]!r}' if kind else 'without a Content-Type'}; {advice}")


async def _discard(receive: Receive) -> None:
    """Closing a connection on a client that still sends resets it, and the client never reads why."""
    left = DRAINED
    try:
        async with asyncio.timeout(DRAINING):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b"")) + 1
                if not message.get("more_body"):  # nor does a client that has left send more
                    return
    except TimeoutError:
        return
