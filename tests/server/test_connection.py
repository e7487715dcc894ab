"""What comes before a request is one: heads that are too long or never end, from whoever has no key."""

import socket
from urllib.parse import urlsplit

import pytest

from pando.server import connection
from pando.server.connection import MAX_HEAD

from .clients import WAIT, fetch
from .live import Live

GET = b"GET /health HTTP/1.1\r\nHost: pando\r\n"
POST = b"POST /health HTTP/1.1\r\nHost: pando\r\nTransfer-Encoding: chunked\r\n\r\n"


def sent(server: Live, *parts: bytes) -> bytes:
    """What comes back until the server closes the connection, or nothing more of it for a while."""
    address = urlsplit(server.url)
    said = b""
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while piece := connection.recv(2**16):
                said += piece
        except ConnectionError:  # it is closed while there is more to send
            pass
    return said


@pytest.mark.parametrize(
    "parts",
    [
        [GET, b"X: ", *[b"x" * 2**20] * 32],
        [GET, *[b"x:y\r\n" * 2**16] * 64],
        [b"GET /", *[b"x" * 2**20] * 32],
        [GET, b"x:y\r\n" * (MAX_HEAD // 2), b"\r\n"],
        [POST, b"0\r\nX: ", *[b"x" * 2**20] * 32],
        [POST, b"0\r\n", *[b"x:y\r\n" * 2**16] * 64],
        [POST, b"1;", *[b"x" * 2**20] * 32],
    ],
    ids=["one header", "many headers", "an address", "a whole head", "a trailer", "many trailers", "a chunk's extension"],
)
def test_what_stands_around_a_body_has_a_limit(server: Live, parts: list[bytes]) -> None:
    said = sent(server, *parts)
    assert said.count(b"HTTP/1.1 ") <= 2 and (not said or b"HTTP/1.1 400 " in said), said[:200]
    assert fetch(server, "/health").status_code == 200


def test_a_long_head_is_read_and_so_are_bodies_after_it(server: Live) -> None:
    long = GET + b"X: " + b"x" * (MAX_HEAD - 100) + b"\r\n"
    assert sent(server, long + b"\r\n", long + b"Connection: close\r\n\r\n").count(b"HTTP/1.1 200 ") == 2
    chunks = b"1\r\nx\r\n" * MAX_HEAD + b"0\r\n\r\n"
    said = sent(server, POST.replace(b"/health", b"/tokenize").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), chunks)
    assert b"the body is not valid JSON" in said


@pytest.mark.parametrize(
    "begun", [b"", GET, GET + b"\r\n" + GET, GET + b"Content-Length: 9\r\n\r\n"], ids=["none", "a head", "a second", "a body"]
)
def test_who_asks_for_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, server: Live, begun: bytes) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as client:
        client.sendall(begun)
        client.settimeout(0.1)
        for _ in range(int(WAIT * 10)):  # a byte now and then must not keep it
            try:
                if not client.recv(2**16):
                    return
            except TimeoutError:
                if begun:
                    client.sendall(b"x")
            except ConnectionError:
                return
    pytest.fail("it is still there")
