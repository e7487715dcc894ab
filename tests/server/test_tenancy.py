"""Tenants through HTTP: what one has computed, no other can hit, see or time; unless it is public."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .clients import ask, client_of, counters, fetch
from .live import NAME, Live, live

PUBLIC = "Everybody may know how this begins."  # 8 whole pages of 4 tokens, and 3 tokens
SHARED = len(PUBLIC)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    file = tmp_path_factory.mktemp("public") / "prefix.txt"
    file.write_text(PUBLIC)
    with live(api_key=("key-one", "key-two"), share_prefix=(str(file),)) as server:
        yield server


@pytest.fixture(scope="module")
def one(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server, "key-one") as client:
        yield client


@pytest.fixture(scope="module")
def two(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server, "key-two") as client:
        yield client


def cached(client: openai.OpenAI, prompt: str, salt: str | None = None) -> tuple[int, str | None]:
    """Tokens that were reused for a prompt, and why they were no more."""
    reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=1, temperature=0, extra_body={"cache_salt": salt})
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.pando["tokens"]["device"]
    return reply.pando["tokens"]["device"], reply.pando["miss"] and reply.pando["miss"]["reason"]


def segments(server: Live, key: str) -> list[dict[str, Any]]:
    return fetch(server, "/v1/cache", key=key).json()["segments"]


def test_the_same_prompt_is_never_shared_between_keys(one: openai.OpenAI, two: openai.OpenAI) -> None:
    prompt = "First words of tenant one"
    assert cached(one, prompt) == (0, "cold")
    assert cached(two, prompt) == (0, "cold")  # not even that somebody has it is told
    assert cached(one, prompt) == (len(prompt) - 1, None)
    assert cached(two, prompt) == (len(prompt) - 1, None)


def test_the_same_salt_under_another_key_is_another_tenant(one: openai.OpenAI, two: openai.OpenAI) -> None:
    prompt = "Salted prompt"
    assert cached(one, prompt, "salt") == (0, "cold")
    assert cached(two, prompt, "salt") == (0, "cold")
    assert cached(one, prompt, "salt") == (len(prompt) - 1, None)


def test_a_salt_separates_within_a_key(one: openai.OpenAI) -> None:
    prompt = "Another prompt of tenant one"
    assert cached(one, prompt, "a") == (0, "cold")
    assert cached(one, prompt, "b") == (0, "other_tenant")
    assert cached(one, prompt) == (0, "other_tenant")
    assert cached(one, prompt, "a") == (len(prompt) - 1, None)


def test_a_chat_is_not_shared_either(one: openai.OpenAI, two: openai.OpenAI) -> None:
    assert [ask(client, "Whose is it?").usage.prompt_tokens_details.cached_tokens for client in (one, two, one)] == [0, 0, 29]


def test_nor_is_a_response_and_a_chat_of_the_same_tenant_finds_it(one: openai.OpenAI, two: openai.OpenAI) -> None:
    def asked(client: openai.OpenAI) -> int:
        salt = {"cache_salt": "of responses"}
        reply = client.responses.create(model=NAME, input="Whose response is it?", max_output_tokens=2, temperature=0, extra_body=salt)
        assert reply.usage is not None
        return reply.usage.input_tokens_details.cached_tokens

    assert [asked(one), asked(two)] == [0, 0]
    again = asked(one)
    found = ask(one, "Whose response is it?", extra_body={"cache_salt": "of responses"}).usage.prompt_tokens_details.cached_tokens
    assert found == again > 0


ASKED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "a secret"}}}},
    "object": {"response_format": {"type": "json_object"}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["a secret"]}}},
}


@pytest.mark.parametrize("wanted", ASKED)
def test_a_grammar_is_compiled_for_each_tenant_since_time_would_tell_that_another_asked_for_it(
    server: Live, one: openai.OpenAI, two: openai.OpenAI, wanted: str
) -> None:
    compiled, counts = server.service.prompts._grammars._compiled, list[int]()
    before = set(compiled)
    for client in (one, two, one, two):
        ask(client, "In what form?", **ASKED[wanted])
        counts.append(len({name for name in compiled if name not in before and name[0]}))
    assert counts == [1, 2, 2, 2]


def test_what_is_public_is_shared_and_nothing_behind_it(one: openai.OpenAI, two: openai.OpenAI) -> None:
    prompt = PUBLIC + " But not how it goes on."
    assert cached(one, prompt)[0] == SHARED
    assert cached(two, prompt)[0] == SHARED
    assert cached(one, prompt) == cached(two, prompt) == (len(prompt) - 1, None)
    assert cached(two, prompt, "salt") == (SHARED, "other_tenant")  # another salt of the same key


def test_only_what_is_equal_to_the_public_prompt_is_public(one: openai.OpenAI, two: openai.OpenAI) -> None:
    prompt = PUBLIC[:17] + "... and now something secret"
    assert cached(one, prompt)[0] == cached(two, prompt)[0] == 17


def test_a_view_of_the_cache_shows_ones_own_and_the_public(server: Live, one: openai.OpenAI, two: openai.OpenAI) -> None:
    before = {key: {found["key"] for found in segments(server, key)} for key in ("key-one", "key-two")}
    cached(one, "only tenant one has asked this, and at some length")
    cached(one, "under a salt it is still its own", "some salt")
    mine = {found["key"] for found in segments(server, "key-one")}
    assert len(mine - before["key-one"]) >= 2
    assert {found["key"] for found in segments(server, "key-two")} == before["key-two"]
    public = mine & before["key-two"]
    assert sum(found["tokens"] for found in segments(server, "key-two") if found["key"] in public) >= SHARED


def test_what_is_public_is_pinned_from_the_start(server: Live) -> None:
    assert counters(server, "key-one")["pando_pages_pinned"] == 9
    assert sum(found["pins"] for found in segments(server, "key-two")) > 0


@pytest.mark.parametrize("key", ["key-three", "key-on", "key-one2", "", "KEY-ONE"])
def test_a_wrong_key_is_refused(server: Live, key: str) -> None:
    with client_of(server, key or "x") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert refused.value.code == "invalid_api_key"
    assert "www-authenticate" in refused.value.response.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{NAME}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/cache"),
        ("POST", "/v1/cache/warm"),
        ("POST", "/v1/cache/pin"),
        ("POST", "/v1/cache/unpin"),
        ("GET", "/ready"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/no-such-route"),
    ],
)
def test_every_route_but_health_wants_a_key(server: Live, method: str, path: str) -> None:
    refused = fetch(server, path, {} if method == "POST" else None, headers={})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


def test_health_wants_no_key(server: Live) -> None:
    assert fetch(server, "/health", headers={}).status_code == 200


def test_keys_are_not_in_the_log(server: Live, one: openai.OpenAI) -> None:
    cached(one, "log")
    server.settle()
    assert "key-one" not in server.log.getvalue() and "/v1/completions" in server.log.getvalue()


def test_a_missing_file_of_public_text_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="share_prefix"), live(share_prefix=(str(tmp_path / "none.txt"),)):
        pass


def test_public_text_shorter_than_a_page_is_not_shared_and_the_log_says_so(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("abc")  # a page has 4 tokens
    with live(api_key=("key-one", "key-two"), share_prefix=(str(file),)) as server, client_of(server, "key-one") as one:
        assert "short.txt has 3 tokens, less than a page of 4, and is not shared" in server.log.getvalue()
        assert fetch(server, "/v1/cache", key="key-one").json()["pages"]["pinned"] == 0  # and so nothing is kept for it
        assert cached(one, "abcdef") == (0, "cold")


def test_requests_of_one_id_get_their_own_answers() -> None:
    """Ids are the clients' choice: a router that tries again uses one twice, and another tenant may use it, too."""
    with live(api_key=("ka", "kb")) as server:
        bodies = [{"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True} for text in ("first", "other one", "first")]
        keys = ("ka", "kb", "ka")

        def ask(place: int, name: str | None) -> str:
            headers = {"authorization": f"Bearer {keys[place]}"} | ({"x-request-id": name} if name else {})
            reply = httpx.post(server.url + "/v1/completions", json=bodies[place], headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["text"])

        alone = [ask(place, None) for place in range(3)]
        with ThreadPoolExecutor(3) as pool:
            for _ in range(5):
                assert list(pool.map(lambda place: ask(place, "same"), range(3))) == alone
        server.settle()
        assert server.service._open == 0
