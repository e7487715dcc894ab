"""Web pages of the origins that an operator names, and those of no other, may call the server."""

from collections.abc import Iterator

import httpx
import pytest

from .live import Live, live

HERE, ELSEWHERE = "https://here.example", "https://elsewhere.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(cors_origins=(HERE,), api_key=("secret",)) as server:
        yield server


def asked(server: Live, method: str, path: str, origin: str, **headers: str) -> httpx.Response:
    return httpx.request(method, server.url + path, headers={"origin": origin, **headers}, verify=False)


def test_a_browser_that_asks_first_is_told_that_it_may_call(server: Live) -> None:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    told = asked(server, "OPTIONS", "/v1/chat/completions", HERE, **wanted)
    assert told.status_code == 200 and told.headers["access-control-allow-origin"] == HERE
    assert "POST" in told.headers["access-control-allow-methods"] and "authorization" in told.headers["access-control-allow-headers"]
    assert asked(server, "OPTIONS", "/v1/chat/completions", ELSEWHERE, **wanted).status_code == 400


@pytest.mark.parametrize(("key", "status"), [("secret", 200), ("wrong", 401)])
def test_a_page_of_such_an_origin_may_read_the_answer_its_headers_and_errors(server: Live, key: str, status: int) -> None:
    told = asked(server, "GET", "/v1/models", HERE, authorization=f"Bearer {key}")
    assert told.status_code == status and told.headers["access-control-allow-origin"] == HERE
    assert told.headers["x-request-id"] and told.headers["access-control-expose-headers"] == "*"


def test_a_page_of_another_origin_may_not(server: Live) -> None:
    assert "access-control-allow-origin" not in asked(server, "GET", "/v1/models", ELSEWHERE, authorization="Bearer secret").headers
