"""The gate alone, around applications that behave well and badly."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pando.server import gate
from pando.server.gate import Gate
from pando.server.journal import Journal
from pando.server.tenants import Tenants

MAX_BODY = 2**20


class Client:
    """Sends a request through the gate: what it sends, what it gets, and how many pieces of its body were taken."""

    def __init__(self, app: ASGIApp, *keys: str) -> None:
        self.log = io.StringIO()
        self.refused: list[int] = []
        self.gate = Gate(app, Tenants(keys), Journal(self.log), MAX_BODY, self.refused.append)
        self.got: list[Message] = []
        self.taken = 0

    async def ask(self, *pieces: bytes, method: str = "POST", path: str = "/v1/completions", **headers: str) -> None:
        left = list(pieces) or [b""]

        async def receive() -> Message:
            if not left:
                return {"type": "http.disconnect"}
            self.taken += 1
            body = left.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message: Message) -> None:
            self.got.append(message)

        given = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        scope: Scope = {"type": "http", "method": method, "path": path, "headers": given, "state": {}}
        await self.gate(scope, receive, send)

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.got[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.got[1]["body"])["error"]
        return error


async def well(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and says how it was asked."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    said = {"size": size, "method": scope["method"], "owner": scope["state"]["owner"].hex(), "id": scope["state"]["request_id"]}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def run(work: Awaitable[None]) -> None:
    async def waits() -> None:
        await work

    asyncio.run(waits())


def asked(client: Client, *pieces: bytes, **more: str) -> Client:
    run(client.ask(*pieces, **more))
    return client


def test_a_request_passes_with_an_id_and_its_owner():
    client = asked(Client(well, "one", "two"), b"12", b"345", authorization="Bearer two", x_request_id="mine")
    said = json.loads(client.got[1]["body"])
    assert client.status == 200 and client.headers["x-request-id"] == "mine"
    assert said == {"size": 5, "method": "POST", "owner": Tenants(["two"]).recognise("Bearer two").hex(), "id": "mine"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer three", "Basic one", "one", "Bearer one two", "bearer \xff"])
def test_without_a_valid_key_nothing_but_health_is_reached(header: str | None):
    given = {} if header is None else {"authorization": header}
    client = asked(Client(well, "one", "two"), b"12", **given)
    assert client.status == 401 and client.headers["www-authenticate"] == "Bearer"
    assert client.refused == [401], "refusals are counted"
    assert client.error["code"] == "invalid_api_key" and "Bearer KEY" in client.error["message"]
    for path in ("/metrics", "/docs", "/openapi.json", "/health/", "//health", "/v1/models", "/ready", "/HEALTH"):
        assert asked(Client(well, "one"), method="GET", path=path, **given).status == 401


def test_whoever_watches_over_the_process_needs_no_key():
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert asked(Client(app, "one"), method="GET", path="/health").status == 200


def test_a_head_request_is_asked_as_get():
    assert json.loads(asked(Client(well), method="HEAD").got[1]["body"])["method"] == "GET"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "text/json", "application/"])
def test_a_body_that_does_not_claim_to_be_json_is_refused_with_what_to_do(kind: str):
    client = asked(Client(well), b"{}", content_type=kind)
    assert client.status == 400 and kind in client.error["message"] and "Content-Type: application/json" in client.error["message"]


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/v1/completions", None, 400),
        ("/v1/completions", "text/plain;charset=UTF-8", 400),
        ("/v1/completions", "application/json", 200),
        ("/v1/schemas", None, 400),
        ("/v1/schemas", "Text/Plain;charset=UTF-8", 400),
        ("/v1/schemas", "text/xml", 200),
    ],
)
def test_what_a_browser_sends_for_any_web_page_without_asking_is_refused(path: str, kind: str | None, status: int):
    given = {} if kind is None else {"content_type": kind}
    page = asked(Client(well), b"{}", path=path, origin="https://elsewhere.example", **given)
    assert page.status == status
    assert status == 200 or "the header Content-Type: " in page.error["message"]
    if kind is None:
        assert asked(Client(well), b"{}", path=path).status == 200, "a program need not say it"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/problem+json"])
def test_a_body_that_claims_to_be_json_passes(kind: str):
    assert asked(Client(well), b"{}", content_type=kind).status == 200


def test_a_body_with_too_great_a_length_is_refused_after_it_was_thrown_away():
    client = asked(Client(well), *[b"x" * 2**16] * 20, content_length=str(MAX_BODY + 1))
    assert client.status == 413 and client.headers["connection"] == "close" and client.taken == 20


def test_a_client_that_asks_before_it_sends_is_refused_before_it_sends():
    client = asked(Client(well), b"x", content_length=str(MAX_BODY + 1), expect="100-continue")
    assert client.status == 413 and client.taken == 0


def test_a_body_without_a_length_is_refused_once_it_is_too_large_and_read_to_its_end():
    seen: list[HTTPException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await well(scope, receive, send)
        except HTTPException as error:
            seen.append(error)
            await send({"type": "http.response.start", "status": error.status_code, "headers": []})

    client = asked(Client(app), *[b"x" * 2**16] * 20)
    assert client.status == 413 and client.taken == 20
    assert "1 MiB" in seen[0].detail
    assert asked(Client(app), *[b"x" * 2**16] * 16).status == 200


def test_what_is_thrown_away_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "DRAINED", 3 * 2**16)
    client = asked(Client(well), *[b"x" * 2**16] * 20, content_length=str(MAX_BODY + 1))
    assert client.status == 413 and client.taken == 3


def test_a_client_that_sends_nothing_of_a_refused_body_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "DRAINING", 0.01)
    client = Client(well)

    async def silent() -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            client.got.append(message)

        headers = [(b"content-length", b"99999999")]
        await client.gate({"type": "http", "method": "POST", "path": "/x", "headers": headers, "state": {}}, receive, send)

    asyncio.run(silent())
    assert client.status == 413


@pytest.mark.parametrize("length", ["", "-1", "1e9", "\xb2", "0x10"])
def test_a_length_that_is_no_number_is_left_to_the_count_of_what_comes(length: str):
    assert asked(Client(well), b"12", content_length=length).status == 200


def failing(error: BaseException, begin: bool) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begin:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return app


def test_a_fault_of_ours_is_told_without_its_details_and_logged_with_them():
    client = asked(Client(failing(ValueError("a secret"), begin=False)), x_request_id="mine")
    assert client.status == 500 and "mine" in client.error["message"] and "secret" not in client.error["message"]
    logged = json.loads(client.log.getvalue())
    assert logged["request_id"] == "mine" and "ValueError: a secret" in logged["exception"]


def test_a_fault_in_the_middle_of_an_answer_closes_the_connection():
    client = Client(failing(ValueError("a secret"), begin=True))
    with pytest.raises(ValueError, match="a secret"):
        asked(client)
    assert len(client.got) == 1 and "a secret" in client.log.getvalue()


@pytest.mark.parametrize("begin", [True, False])
def test_a_request_that_the_stopping_server_cuts_short_is_told_so_where_it_still_can_be(begin: bool):
    client = asked(Client(failing(asyncio.CancelledError(), begin)))
    assert client.status == (200 if begin else 503) and len(client.got) == (1 if begin else 2)
    assert client.log.getvalue() == ""
