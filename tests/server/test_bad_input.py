"""Whatever clients send or do: each gets a clear answer, the server lives, and others do not notice."""

import contextlib
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pando.model.tokenizer import Tokenizer

from .clients import braked
from .live import Live, live

GOOD = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
WAIT = 30.0  # seconds; only a failing test waits so long
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    before = set(threading.enumerate())
    with live() as server:
        yield server
        ours = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("pando-")]
        assert len(ours) <= 5, ours  # the engine's, and four that tokenise
        assert '"level": "error"' not in server.log.getvalue()
        assert server.service._open == 0 and not server.service._tickets
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT if thread.name.startswith("pando-") else 0)  # one that was told to end may need a moment
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pando-")]


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT) as client:
        yield client


@pytest.fixture(scope="module")
def alone(client: httpx.Client) -> str:
    """What the good request is answered when nothing else happens."""
    with client.stream("POST", "/v1/completions", json=GOOD) as response:
        return told(list(response.iter_lines()))


@pytest.fixture(autouse=True)
def _others_do_not_notice(server: Live, client: httpx.Client, alone: str) -> Iterator[None]:
    """A good request begins before whatever a test does, ends after it, and its answer is the one that it gets alone."""
    with client.stream("POST", "/v1/completions", json=GOOD) as response:
        lines = response.iter_lines()
        begun = [next(lines)]
        yield
        assert told(begun + list(lines)) == alone
    server.settle()
    engine = server.service.loop._engine
    assert engine.pages_in_use == engine.tree.pages


def told(lines: list[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"] and len(error["message"]) <= 1000 and error["type"].endswith("error")
    return error


def plain(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


def spoken(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}).encode()


def formed(schema: object) -> bytes:
    return spoken(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


COMPLETIONS = {
    "broken off": (b'{"prompt": ', 400, "not valid JSON"),
    "no JSON": (b"hello", 400, "not valid JSON"),
    "nothing": (b"", 422, "no body"),
    "null": (b"null", 422, "should be an object"),
    "a list": (b"[]", 422, "should be an object"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
    "nested without end": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "objects and lists"),
    "nested without end, unasked": (b'{"prompt": "a", "x": ' + b'{"y":' * 50_000 + b"1" + b"}" * 50_000 + b"}", 400, "nested"),
    "a number of 10,000 digits": (b'{"prompt": "a", "max_tokens": 1' + b"0" * 10_000 + b"}", 400, "numbers"),
    "a number of 400 digits": (b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}", 422, "max_tokens: "),
    "a real number of 400 digits": (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", 422, "temperature: "),
    "a seed of 400 digits": (b'{"prompt": "a", "seed": -1' + b"0" * 400 + b"}", 422, "seed: "),
    "a token of 400 digits": (b'{"prompt": [1' + b"0" * 400 + b"]}", 422, "prompt.0: "),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 422, "temperature: .*finite"),
    "Infinity": (b'{"prompt": "a", "top_p": Infinity}', 422, "top_p: .*finite"),
    "minus Infinity in a bias": (b'{"prompt": "a", "logit_bias": {"1": -Infinity}}', 422, "logit_bias.1: .*finite"),
    "1e999": (b'{"prompt": "a", "min_p": 1e999}', 422, "min_p: .*finite"),
    "negative tokens": (plain(max_tokens=-1), 422, "max_tokens: "),
    "no answers": (plain(n=0), 422, "n: "),
    "a million answers": (plain(n=10**6), 422, "n: "),
    "a negative temperature": (plain(temperature=-0.1), 422, "temperature: "),
    "text for a number": (plain(max_tokens="many"), 422, "max_tokens: "),
    "a truth for a number": (plain(n=True), 422, "n: "),
    "a number for text": (plain(prompt=7), 422, "prompt: "),
    "an object for text": (plain(prompt={}), 422, "prompt: "),
    "a mixed prompt": (plain(prompt=["a", 1]), 422, "prompt.1: "),
    "10,000 stop strings": (plain(stop=[f"stop {i}" for i in range(10_000)]), 422, "stop: .*16.*10000"),
    "a stop string without end": (plain(stop="a" * 100_000), 422, "stop: "),
    "an empty stop string": (plain(stop=[""]), 422, "stop.0: "),
    "100,000 biases": (plain(logit_bias={str(i): 1 for i in range(100_000)}), 422, "logit_bias: "),
    "a bias for a word": (plain(logit_bias={"word": 1}), 422, "logit_bias.word: "),
    "half a surrogate pair": (b'{"prompt": "a\\ud800b"}', 422, "prompt: "),
    "half a surrogate pair to stop at": (b'{"prompt": "a", "stop": ["\\udc00"]}', 422, "stop.0: "),
    "half a surrogate pair for a model": (b'{"prompt": "a", "model": "\\ud800"}', 422, "model: "),
    "half a surrogate pair for a salt": (b'{"prompt": "a", "cache_salt": "\\ud800"}', 422, "cache_salt: "),
    "half a surrogate pair for a name": (b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}', 422, "logit_bias"),
    "a model that is not served": (plain(model="gpt-7"), 404, "'gpt-7' is not served here"),
    "an empty prompt": (plain(prompt=""), 400, "prompt is empty"),
    "one of two prompts empty": (plain(prompt=["a", ""]), 400, r"^prompt\[1\]: the prompt is empty"),
    "one of two prompts too long": (plain(prompt=["a", "a" * 600]), 400, r"prompt\[1\]: the prompt has 600 tokens"),
    "one of two prompts without end": (plain(prompt=["a" * 100_000, "a"]), 400, r"prompt\[0\]: the prompt has 100000 characters"),
    "no prompts": (plain(prompt=[]), 422, "prompt: "),
    "too long a prompt": (plain(prompt="a" * 600), 400, "600 tokens and the context holds 512"),
    "too many tokens": (plain(prompt=[1] * 512), 400, "512 tokens and the context holds 512"),
    "a token beyond the vocabulary": (plain(prompt=[1, 257]), 400, "257 is no token"),
    "a negative token": (plain(prompt=[-1]), 422, "prompt.0: "),
    "a bias beyond the vocabulary": (plain(logit_bias={"300": 1}), 400, "logit_bias names token 300"),
    "a stop token beyond the vocabulary": (plain(stop_token_ids=[300]), 400, "stop_token_ids names token 300"),
    "no token left to begin with": (plain(stop_token_ids=list(range(257)), min_tokens=1), 400, "none is left before min_tokens"),
    "too many prompts": (plain(prompt=["a"] * 1000), 422, "prompt: "),
    "prompts times answers": (plain(prompt=["a"] * 64, n=64), 422, "n: .*4096"),
    "control characters for a session": (plain(session_id="a\nb"), 422, "session_id: .*printable"),
    "a ttl without end": (plain(prompt_cache_options={"ttl": "999999999d"}), 422, "prompt_cache_options.ttl: "),
}
CHATS = {
    "an unknown role": (spoken(messages=[{"role": "wizard", "content": "a"}]), 422, "messages.0.role: "),
    "no messages": (spoken(messages=[]), 422, "messages: "),
    "a message without content": (spoken(messages=[{"role": "user"}]), 422, "messages.0: .*content"),
    "an image": (spoken(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 422, "messages.0.content.0: .*text part"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 422, "messages.0.content: "),
    "tools that the template does not take": (spoken(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "takes no tools"),
    "a schema of an unknown type": (formed({"type": "nonsense"}), 400, "nonsense"),
    "a schema with a broken reference": (formed({"$ref": "#/nowhere"}), 400, "nowhere"),
    "a schema of 100 KB": (formed({"description": "a" * 100_000}), 422, "at most 65536 bytes"),
    "a pattern that is none": (formed({"type": "string", "pattern": "(("}), 400, "schema"),
}


@pytest.mark.parametrize(("body", "status", "words"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_completion_that_cannot_be_is_refused_in_words(client: httpx.Client, body: bytes, status: int, words: str):
    error = refused(client.post("/v1/completions", content=body), status)
    assert re.search(words, error["message"])
    field = re.match(r"(\w+)[.:]", words)
    assert field is None or error["param"].startswith(field[1])


@pytest.mark.parametrize(("body", "status", "words"), CHATS.values(), ids=CHATS)
def test_a_conversation_that_cannot_be_is_refused_in_words(client: httpx.Client, body: bytes, status: int, words: str):
    assert re.search(words, refused(client.post("/v1/chat/completions", content=body), status)["message"])


def test_a_schema_nested_too_deep_is_refused(client: httpx.Client):
    deep = b'{"items":' * 500 + b"{}" + b"}" * 500
    body = formed("DEEP").replace(b'"DEEP"', deep)
    assert "nested" in refused(client.post("/v1/chat/completions", content=body), 400)["message"]


def test_what_may_look_strange_is_answered(client: httpx.Client):
    strange = [
        plain(prompt="\0\x1b[2J\U0001f600\ufffe"),
        plain(unknown={"field": [1, 2, {}]}),
        b'{"prompt": "a", "prompt": "b", "max_tokens": 2}',
        plain(stop=None, seed=None, logit_bias=None),
        plain().decode().encode("utf-16"),
        plain(seed=2**64 - 1, top_k=2**31 - 1, min_tokens=2),
    ]
    for body in strange:
        response = client.post("/v1/completions", content=body)
        assert response.status_code == 200, response.text


# ---- fields that no route knows


def warned(server: Live) -> list[str]:
    return [line["message"] for line in map(json.loads, server.log.getvalue().splitlines()) if "unknown field" in line.get("message", "")]


def test_a_misspelt_field_is_answered_and_the_log_says_once_for_each_route_what_was_meant() -> None:
    with live() as server, httpx.Client(base_url=server.url, timeout=WAIT) as client:
        nothing = {"top_a": None, "suffix": "", "store": True}
        wrong = plain(max_tokens=1, max_token=9, temprature=0, zzz={"a": 1}, **nothing)
        for _ in range(2):
            assert client.post("/v1/completions", content=wrong).status_code == 200
        client.post("/v1/chat/completions", content=spoken(max_tokens=1, zzz=2, reasoning_effort="low"))
        assert warned(server) == [
            'ignored an unknown field "max_token" of POST /v1/completions; did you mean "max_tokens"?',
            'ignored an unknown field "temprature" of POST /v1/completions; did you mean "temperature"?',
            'ignored an unknown field "zzz" of POST /v1/completions',
            'ignored an unknown field "zzz" of POST /v1/chat/completions',
            'ignored an unknown field "reasoning_effort" of POST /v1/chat/completions',
        ]


def test_a_misspelt_field_within_an_object_is_told_with_where_it_stands() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "shema": {}, "strict": True}, "schema": None}
    with live() as server, httpx.Client(base_url=server.url, timeout=WAIT) as client:
        for _ in range(2):
            body = spoken(max_tokens=1, response_format=form, stream_options={"include_usages": True}, logit_bias={"7": 1}, stream=True)
            assert client.post("/v1/chat/completions", content=body).status_code == 200
        assert warned(server) == [
            'ignored an unknown field "shema" of json_schema of response_format of POST /v1/chat/completions; did you mean "schema"?',
            'ignored an unknown field "include_usages" of stream_options of POST /v1/chat/completions; did you mean "include_usage"?',
        ]


def test_names_of_unknown_fields_take_no_more_of_the_log_than_they_may() -> None:
    with live() as server, httpx.Client(base_url=server.url, timeout=WAIT) as client:
        nasty = '\n"\x1b[31m\u202e' + "a" * 100_000
        assert client.post("/v1/completions", content=plain(max_tokens=1, **{nasty: 1})).status_code == 200
        for each in range(3):
            many = {f"x{each}-{i}": 1 for i in range(1000)}
            assert client.post("/v1/completions", content=plain(max_tokens=1, **many)).status_code == 200
        found = warned(server)
        assert found[0].startswith(r'ignored an unknown field "\n\"\u001b[31m\u202eaaa') and len(found[0]) < 200
        assert len(found) == 64


# ---- HTTP


def connect(server: Live) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def request(body: bytes, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: tests", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def all_of(connection: socket.socket) -> bytes:
    """Whatever the server says until it closes."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def raw(server: Live, *parts: bytes) -> bytes:
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
        return all_of(connection)


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in pieces"])
def test_a_body_of_100_mb_is_refused_and_its_sender_can_read_why(server: Live, chunked: bool):
    piece = b" " * MIB
    head = ["POST /v1/completions HTTP/1.1", "Host: tests", "Connection: close"]
    if chunked:
        head, sent = [*head, "Transfer-Encoding: chunked"], b"%x\r\n" % MIB + piece + b"\r\n"
    else:
        head, sent = [*head, f"Content-Length: {100 * MIB}"], piece
    said = raw(server, "\r\n".join([*head, "", ""]).encode(), *[sent] * 100, b"0\r\n\r\n" if chunked else b"")
    status, _, body = said.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 413 ")
    assert "larger than the 8 MiB" in json.loads(body)["error"]["message"]


def test_a_client_that_asks_before_it_sends_100_mb_need_not_send_them(server: Live):
    said = raw(server, request(b"", "Expect: 100-continue").replace(b"Content-Length: 0", b"Content-Length: 104857600"))
    assert said.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_says_it_has_100_mb_is_refused_before_it_comes(server: Live):
    with connect(server) as connection:
        connection.settimeout(5)  # it is thrown away for longer than that
        connection.sendall(request(b"").replace(b"Content-Length: 0", b"Content-Length: 104857600") + b" " * MIB)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_is_just_allowed_is_read(client: httpx.Client):
    body = plain()
    error = refused(client.post("/v1/completions", content=body + b" " * (8 * MIB - len(body) + 1)), 413)
    assert error["code"] == "request_too_large"
    assert client.post("/v1/completions", content=body + b" " * (8 * MIB - len(body))).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x16\x03\x01\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        request(b"").replace(b"Content-Length: 0", b"Content-Length: -5"),
        request(b"").replace(b"Content-Length: 0", b"Content-Length: 1" + b"0" * 40),
        request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"ZZ\r\n\r\n",
        request(b"", "Transfer-Encoding: chunked"),
        request(plain(), "x-request-id: a\x01b"),
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: tests\r\n\r\n",
        request(plain()) + b"GARBAGE\r\n\r\n",
    ],
    ids=["bytes", "HTTP/2", "negative", "huge", "chunk", "smuggled", "control", "long", "pipelined"],
)
def test_what_is_not_http_is_answered_400_and_the_connection_closed(server: Live, sent: bytes):
    assert raw(server, sent).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/schemas"])
def test_a_body_that_is_packed_is_refused_with_what_to_do(client: httpx.Client, path: str):
    kind = {"content-type": "text/xml" if path == "/v1/schemas" else "application/json"}
    for packing in ("gzip", "br", "zstd", "gzip, identity"):
        response = client.post(path, content=gzip.compress(plain()), headers={**kind, "content-encoding": packing})
        assert f"Content-Encoding {packing!r}; send it as it is" in refused(response, 400)["message"]


def test_a_body_that_says_that_it_is_not_packed_is_read(client: httpx.Client):
    for name in ("identity", "Identity", ""):
        assert client.post("/v1/completions", content=plain(), headers={"content-encoding": name}).status_code == 200


def test_absurd_headers_are_refused_or_replaced_and_never_repeated(client: httpx.Client):
    url = "/v1/completions"
    assert "x-session-id" in refused(client.post(url, content=plain(), headers={"x-session-id": "a" * 30_000}), 400)["message"]
    for odd in ("a" * 1000, "two words", "a;b", "\xe9t\xe9", ""):
        response = client.post(url, content=plain(), headers={"x-request-id": odd.encode("latin-1")})
        assert response.status_code == 200 and re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])
    assert client.post(url, content=plain(), headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    odd_headers = {"content-type": "Application/JSON; charset=utf-8", "accept": "image/png", "traceparent": "00-zz"}
    assert client.post(url, content=plain(), headers=odd_headers).status_code == 200
    assert "application/json" in refused(client.post(url, content=plain(), headers={"content-type": "text/plain"}), 400)["message"]


def test_the_error_of_a_part_that_is_no_text_names_that_part(client: httpx.Client):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    body = spoken(messages=[{"role": "system", "content": "Look."}, {"role": "user", "content": parts}])
    error = refused(client.post("/v1/chat/completions", content=body), 422)
    assert error["param"] == "messages.1.content.1" and error["message"].endswith("this server reads text only")


def test_other_methods_and_paths_are_answered(client: httpx.Client):
    put = client.put("/v1/completions", content=plain())
    assert (
        refused(put, 405)["message"]
        == "there is no route PUT /v1/completions, but this path takes POST; GET /openapi.json lists the routes"
    )
    assert put.headers["allow"] == "POST"
    put = client.put("/v1/schemas", content=plain())
    assert "PUT /v1/schemas, but this path takes GET and POST; GET /openapi.json" in refused(put, 405)["message"]
    assert put.headers["allow"] == "GET, POST, HEAD"
    refused(client.options("/v1/completions"), 405)
    refused(client.get("/v1/completions"), 405)
    assert refused(client.get("/nowhere"), 404)["message"] == "there is no route GET /nowhere; GET /openapi.json lists the routes"
    refused(client.get("/v1/models/%ff%00%0a"), 404)
    head = client.head("/health")
    assert head.status_code == 200 and head.content == b"" and int(head.headers["content-length"]) > 0


def test_http_1_0_is_answered_and_closed(server: Live):
    status, _, body = raw(server, request(plain(), version="1.0")).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200 ") and json.loads(body)["choices"]


# ---- clients that leave


LONG = {**GOOD, "max_tokens": 450}
CANCELLED = 'pando_requests_total{outcome="cancelled"}'


def test_a_client_that_vanishes_while_it_sends_leaves_nothing(server: Live):
    for sent in (b"", b"POST /v1/comp", request(plain(), "x: y")[:-5]):
        with connect(server) as connection:
            connection.sendall(sent)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_closes_its_side_counts_as_gone(server: Live, stream: bool):
    with braked(server), connect(server) as connection:  # it does not come to its end before
        connection.sendall(request(json.dumps({**LONG, "stream": stream}).encode()))
        connection.shutdown(socket.SHUT_WR)
        said = all_of(connection)
    assert b"[DONE]" not in said and b'"usage"' not in said
    server.settle()


def test_a_client_that_leaves_in_the_middle_frees_its_rows(server: Live):
    cancelled = server.metric(CANCELLED)
    with braked(server) as brake:
        with connect(server) as connection:
            connection.sendall(request(json.dumps({**LONG, "n": 4}).encode()))
            brake.let(40)
            assert connection.recv(100)
        until(lambda: server.metric(CANCELLED) == cancelled + 1)  # before it comes to its end
    server.settle()
    assert server.metric(CANCELLED) == cancelled + 1


def test_a_reader_who_takes_nothing_holds_no_row_and_in_the_end_no_connection(monkeypatch: pytest.MonkeyPatch, alone: str):
    monkeypatch.setattr("pando.server.serve.STALLED", 500)
    with live() as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(request(json.dumps({**LONG, "n": 8, "logprobs": 20}).encode()))
        assert connection.recv(100)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=GOOD, timeout=WAIT) as response:
            assert told(list(response.iter_lines())) == alone
        until(lambda: not server.service.loop._engine.has_work)
        server.settle()  # the connection is still open, and much is still to be read
        until(lambda: not server.running.server.server_state.connections)


def until(happened: Any) -> None:
    end = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- chat templates


TEMPLATE = """{% macro again(x) %}{{ again(x) }}{% endmacro %}{% for m in messages %}
{% if m.content == 'refuse' %}{{ raise_exception('not this one') }}{% endif %}
{% if m.content == 'loop' %}{% for i in range(10 ** 9) %}{{ i }}{% endfor %}{% endif %}
{% if m.content == 'missing' %}{{ m.nothing.at.all }}{% endif %}
{% if m.content == 'divide' %}{{ 1 // 0 }}{% endif %}
{% if m.content == 'escape' %}{{ m.__class__.__mro__ }}{% endif %}
{% if m.content == 'recurse' %}{{ again(m) }}{% endif %}
{% if m.content == 'type' %}{{ m.content + 1 }}{% endif %}
{{ m.content }}{% endfor %}"""


def test_a_chat_template_that_fails_refuses_the_conversation_and_nothing_else(tmp_path: Any):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    with live(chat_template=str(tmp_path / "template.jinja")) as server, contextlib.closing(httpx.Client(base_url=server.url)) as client:
        for word in ("refuse", "loop", "missing", "divide", "escape", "recurse", "type"):
            answer = client.post("/v1/chat/completions", content=spoken(messages=[{"role": "user", "content": word}]))
            assert "the chat template refuses this conversation" in refused(answer, 400)["message"], word
        assert client.post("/v1/chat/completions", content=spoken()).status_code == 200
        assert "error" not in server.log.getvalue()


def test_what_a_chat_template_asks_for_by_name_is_told_to_it(tmp_path: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think is false %}[no]{% endif %}{{ deep.a[0] if deep is defined }}"
    (tmp_path / "template.jinja").write_text(template + "{% if add_generation_prompt %}>{% endif %}")
    with live(chat_template=str(tmp_path / "template.jinja")) as server, contextlib.closing(httpx.Client(base_url=server.url)) as client:

        def text(**options: Any) -> str:
            body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": options}
            found = client.post("/tokenize", json=body).json()["tokens"]
            answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}).json()
            assert answer["prompt_token_ids"] == found
            warmed = client.post("/v1/cache/warm", json=body).json()
            assert warmed["tokens"] == len(found) - 1, "without the beginning of an answer"
            return str(client.post("/detokenize", json={"tokens": found}).json()["prompt"])

        assert text() == "Hi>" and text(think=False) == "Hi[no]>" and text(think=True, deep={"a": ["x"]}, unknown=1) == "Hix>"
        for options, said in (({"messages": []}, "should not have messages"), ({"x": "y" * 2**17}, "at most 65536 bytes"), (3, "")):
            told = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": options}
            assert said in refused(client.post("/v1/chat/completions", json=told), 422)["message"]


def test_a_body_of_very_many_objects_is_refused(client: httpx.Client) -> None:
    body = b'{"prompt": "x", "ignored": [' + b"{}," * 2**17 + b"0]}"
    assert "objects and lists" in refused(client.post("/v1/completions", content=body), 400)["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "_encoding", lambda *given: pytest.fail("it was tokenised"))
    for path, body in (
        ("completions", {"prompt": "x" * 2**20}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 2**20}]}),
    ):
        assert refused(client.post(f"/v1/{path}", json=body), 400)["code"] == "context_length_exceeded"
