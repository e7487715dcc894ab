"""What every request passes first: it gets an id, shows its key, and may not be larger than allowed."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .failures import failure
from .journal import Journal, request_id
from .replies import encode
from .tenants import Tenants

OPEN = frozenset({"/health"})  # whoever watches over the process has no key
DRAINED = 2**28  # bytes of a refused body that are read and thrown away, so that the client gets to read the refusal


class Gate:
    def __init__(self, app: ASGIApp, tenants: Tenants, journal: Journal, max_body: int) -> None:
        self._app, self._tenants, self._journal, self._max_body = app, tenants, journal, max_body

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
        if owner is None and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            text = "no valid API key was given; send the header Authorization: Bearer KEY"
            await _refuse(401, text, receive, answer, [(b"www-authenticate", b"Bearer")])
            return
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            await _refuse(413, self._too_large(), receive, answer)
            return
        try:
            await self._app(scope, self._counted(receive), answer)
        except Exception as error:
            self._journal.error("a request failed", name, path=scope["path"], exception=error)
            if begun:
                raise  # the answer is half sent: only closing the connection tells the client
            await _refuse(500, f"something is wrong on the server; its log has more under {name}", receive, answer)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than the {self._max_body >> 20} MiB that are allowed; send less, or raise --max-body-mib"


async def _refuse(status: int, text: str, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    left = DRAINED
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b"")) + 1
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    body = encode(failure(status, text))
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": [*given, *(headers or ())]})
    await send({"type": "http.response.body", "body": body})
