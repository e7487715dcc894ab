"""Schemas through HTTP: registered, looked at, asked from and deleted, each key's for itself."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pando.engine.engine import Engine
from pando.engine.schemas import Schemas
from pando.errors import InvalidOption, MarkupError
from pando.markup.schema import Schema
from pando.server import service
from pando.server.schemas import Holdings, TooManySchemas, read
from pando.store.speeds import Speeds

from ..tiny import tiny_engine, tiny_model
from .clients import WAIT, Brake, braked, client_of, exactly, fetch, said, wait_for
from .live import NAME, Live, live

TOUR = """<schema name="tour">
  You show people around.
  <module name="paris">Paris has a tower, a river and very many cats.</module>
  <module name="rome">Rome has a forum, and the cats are larger there.</module>
  <union>
    <module name="short">Answer in one word.</module>
    <module name="long">Answer at length.</module>
  </union>
  <module name="today" cache="false">It rains.</module>
</schema>
"""
BOTH = '<prompt schema="tour"><paris/><rome/> Where are the cats?</prompt>'
TOKENS = len("You show people around.Paris has a tower, a river and very many cats.Rome has a forum, and the cats are larger there.")


@pytest.fixture(scope="module")
def module_server() -> Iterator[Live]:
    with live(api_key=("one", "two")) as server:
        yield server


@pytest.fixture
def server(module_server: Live) -> Live:
    """With nothing in its cache and no schema."""
    module_server.settle()
    for key in ("one", "two"):
        for found in listed(module_server, key):
            assert delete(module_server, found["name"], key).status_code == 200
    module_server.service.loop.call(Engine.clear_cache).result(WAIT)
    return module_server


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server, "one") as client:
        yield client


def post(server: Live, pml: str | bytes, key: str = "one", query: str = "", kind: str | None = "text/xml") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} | ({"content-type": kind} if kind else {})
    return httpx.post(f"{server.url}/v1/schemas{query}", content=pml, headers=headers, timeout=WAIT, verify=False)


def delete(server: Live, name: str, key: str = "one") -> httpx.Response:
    return httpx.delete(f"{server.url}/v1/schemas/{name}", headers={"authorization": f"Bearer {key}"}, timeout=WAIT, verify=False)


def listed(server: Live, key: str = "one") -> list[dict[str, Any]]:
    return fetch(server, "/v1/schemas", key=key).json()["data"]


def states(server: Live, name: str = "tour", key: str = "one", query: str = "") -> dict[str, str]:
    return {found["path"]: found["state"] for found in fetch(server, f"/v1/schemas/{name}{query}", key=key).json()["modules"]}


def complete(client: openai.OpenAI, pml: str | list[str], **options: Any) -> Any:
    more = options.pop("extra_body", {})
    wanted = {"model": NAME, "prompt": pml, "max_tokens": 6, "temperature": 0, "extra_body": {"prompt_format": "pml", **more}, **options}
    return client.completions.create(**wanted)


def chat(client: openai.OpenAI, content: str, **options: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=said(content), **{"max_tokens": 6, "temperature": 0, **options})


# ---- registering


def test_a_schema_is_registered_and_shown(server: Live) -> None:
    reply = post(server, TOUR)
    assert reply.status_code == 200
    made = reply.json()
    told = {"name": "tour", "object": "schema", "source": "client", "layout": "compact", "order": "schema", "encode": "opening", "uses": 0}
    assert told.items() <= made.items()
    assert len(bytes.fromhex(made["digest"])) == 32
    paths = ["(opening)", "paris", "rome", "short", "long", "today"]
    assert [found["path"] for found in made["modules"]] == paths and not made["truncated"]
    by_path = {found["path"]: found for found in made["modules"]}
    rome = by_path["rome"]
    token = server.service.facts["pool_bytes"] // server.service.facts["pool_tokens"]
    assert (rome["tokens"], rome["bytes"], rome["state"], rome["uses"]) == (48, 48 * token, "not encoded", 0)
    assert by_path["today"]["state"] == "computed with each prompt" and by_path["today"]["bytes"] == 0
    assert made["tokens"] == sum(found["tokens"] for found in made["modules"])
    assert made["bytes"] == sum(found["bytes"] for found in made["modules"])
    assert fetch(server, "/v1/schemas/tour", key="one").json() == made
    [card] = listed(server)
    assert card.items() <= made.items() and "modules" not in card


def test_the_same_content_again_is_free(server: Live) -> None:
    first = post(server, TOUR, query="?eager=true").json()
    steps = server.service.loop._engine.steps
    again = post(server, TOUR.replace("<union>", "<!-- a comment is no content --><union>"), query="?eager=true")
    assert again.status_code == 200 and again.json() == first
    assert server.service.loop._engine.steps == steps
    assert len(listed(server)) == 1


def test_other_content_under_the_name_is_a_conflict_and_changes_nothing(server: Live) -> None:
    first = post(server, TOUR).json()
    refused = post(server, TOUR.replace("very many", "no"))
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["code"] == "schema_exists" and "in use" in error["message"] and "choose another name" in error["message"]
    assert fetch(server, "/v1/schemas/tour", key="one").json() == first


def test_of_registrations_at_the_same_moment_one_stays(server: Live) -> None:
    texts = [TOUR.replace("very many", str(number)) for number in range(8)]
    start = threading.Barrier(len(texts))

    def register(text: str) -> tuple[int, str | None]:
        start.wait()
        reply = post(server, text)
        return reply.status_code, reply.json().get("digest")

    with ThreadPoolExecutor(len(texts)) as pool:
        replies = list(pool.map(register, texts))
    assert sorted(status for status, _ in replies) == [200, *[409] * 7]
    [digest] = [digest for status, digest in replies if status == 200]
    assert [found["digest"] for found in listed(server)] == [digest]


def test_malformed_pml_says_what_where_and_shows_the_place(server: Live) -> None:
    refused = post(server, TOUR.replace('  <module name="rome"', '  <modul name="rome"').replace("there.</module>", "there.</modul>"))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["line"], error["column"]) == ("invalid_pml", 4, 3)
    assert "unknown element <modul>" in error["message"] and "did you mean 'module'?" in error["message"]
    source, caret = error["caret"].split("\n")
    assert source.startswith('      <modul name="rome">') and caret == "      ^"
    assert listed(server) == []


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "no element found"),
        (b"\xff\xfe", "not UTF-8"),
        ("x" * 100, "malformed XML"),
        ('<!DOCTYPE schema [<!ENTITY a "b">]><schema name="s">&a;</schema>', "a document type"),
        ("<prompt schema='s'/>", "schema"),
        ('<schema name="s"><module name="a" src="/etc/passwd"/></schema>', "no directory was named"),
        ('<schema name="s"><module name="a">' + "x" * 600 + "</module></schema>", "the model's context has 512"),
        ('<schema name="s">' + '<module name="a">' * 10_000 + "</module>" * 10_000 + "</schema>", "nested deeper than 100"),
    ],
    ids=["nothing", "not text", "no xml", "doctype", "a prompt", "src", "too long", "too deep"],
)
def test_what_is_no_schema_is_refused_and_nothing_of_it_stays(server: Live, body: Any, complaint: str) -> None:
    refused = post(server, body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_pml", refused.text
    assert complaint in refused.json()["error"]["message"]
    assert listed(server) == []


def test_a_file_is_never_read_for_a_schema_from_the_network(server: Live, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("very secret")
    for src in (str(secret), "secret.txt", "../secret.txt", f"file://{secret}"):
        refused = post(server, f'<schema name="s"><module name="a" src="{src}"/></schema>')
        assert refused.status_code == 400 and "very secret" not in refused.text


def test_fifty_megabytes_are_refused_and_the_server_goes_on(server: Live, client: openai.OpenAI) -> None:
    refused = post(server, b'<schema name="s">' + b"x" * (50 << 20))
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"
    post(server, TOUR)
    assert complete(client, BOTH).choices[0].text


def test_a_large_body_that_the_operator_allows_is_still_no_large_schema() -> None:
    with live(max_body_mib=64) as server:
        refused = post(server, b'<schema name="s">' + b"x" * (50 << 20))
        assert refused.status_code == 400 and "at most 16,777,216 are read" in refused.json()["error"]["message"]
        assert listed(server) == []


@pytest.mark.parametrize("kind", ["text/xml", "text/plain; charset=utf-8", "application/xml", "application/pml+xml", None])
def test_any_kind_of_text_will_do(server: Live, kind: str | None) -> None:
    assert post(server, TOUR, kind=kind).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/xml; charset=latin-1", "image/png"])
def test_what_is_sent_as_something_else_is_refused(server: Live, kind: str) -> None:
    refused = post(server, TOUR, kind=kind)
    assert refused.status_code == 400 and "Content-Type: text/xml" in refused.json()["error"]["message"]
    assert post(server, TOUR, kind="text/xml").status_code == 200
    refused = httpx.post(server.url + "/tokenize", content="{}", headers={"authorization": "Bearer one", "content-type": "text/xml"})
    assert refused.status_code == 400 and "application/json" in refused.json()["error"]["message"]


def test_a_registration_that_is_cut_off_leaves_nothing(server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/schemas HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: {len(TOUR)}\r\n\r\n"
    with socket.create_connection((host, int(port)), WAIT) as connection:
        connection.sendall((head + TOUR[: len(TOUR) // 2]).encode())
    assert listed(server) == [] and post(server, TOUR).status_code == 200
    assert '"level": "error"' not in server.log.getvalue()


def test_a_client_that_leaves_while_its_schema_is_encoded_leaves_nothing(server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/schemas?eager=true HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: {len(TOUR)}\r\n\r\n"
    with braked(server) as brake:
        with socket.create_connection((host, int(port)), WAIT) as connection:
            connection.sendall((head + TOUR).encode())
            wait_for(lambda: server.service.loop._engine.has_work)
            assert [card["name"] for card in listed(server)] == ["tour"]
        brake.let(1)
        wait_for(lambda: listed(server) == [])
    server.settle()
    assert post(server, TOUR).status_code == 200


def test_a_registration_that_is_undone_takes_nothing_away_that_others_have_registered_or_used(server: Live) -> None:
    holdings, pml = server.service.schemas, TOUR.encode()
    first = holdings.add(b"o", pml)
    assert holdings.add(b"o", pml) is first
    holdings.undo(b"o", first)
    assert holdings.find(b"o", "tour")[1] is first, "it was registered again"
    holdings.undo(b"o", first)
    assert not list(holdings.each(b"o")), "both have left"
    first = holdings.add(b"o", pml)
    holdings.remove(b"o", "tour")
    second = holdings.add(b"o", pml)
    holdings.undo(b"o", first)
    assert holdings.find(b"o", "tour")[1] is second, "it was deleted, and this is another"
    holdings.undo(b"o", second)
    assert not list(holdings.each(b"o"))
    used = holdings.add(b"o", pml)
    holdings.bind(b"o", BOTH)
    holdings.undo(b"o", used)
    assert holdings.find(b"o", "tour")[1] is used


def test_an_eager_schema_is_encoded_before_the_answer_and_its_progress_is_seen(server: Live, client: openai.OpenAI) -> None:
    replies: list[httpx.Response] = []
    seen: list[dict[str, str]] = []
    with braked(server) as brake:
        posting = threading.Thread(target=lambda: replies.append(post(server, TOUR, query="?eager=true")))
        posting.start()
        wait_for(lambda: server.service.loop._engine.has_work)
        looking, steps = threading.Thread(target=lambda: seen.append(states(server))), server.service.loop._engine.steps
        brake.let(2)  # the opening is made first: whatever is encoded behind it waits
        wait_for(lambda: server.service.loop._engine.steps >= steps + 2)
        looking.start()
        _let_while(brake, looking)
        assert posting.is_alive() or replies
        _let_while(brake, posting)
    assert replies[0].status_code == 200
    assert {found["state"] for found in replies[0].json()["modules"]} == {"cached", "computed with each prompt"}
    assert seen[0]["(opening)"] == "cached"
    reply = complete(client, BOTH)
    assert reply.usage.prompt_tokens_details.cached_tokens == TOKENS


def _let_while(brake: Brake, thread: threading.Thread) -> None:
    while thread.is_alive():
        brake.let(1)
        thread.join(0.01)


def test_a_schema_that_the_pool_cannot_hold_is_not_registered_eagerly() -> None:
    with live(engine={"kv_cache_tokens": 64}) as server:
        text = '<schema name="big">Open. <module name="a">' + "x" * 200 + "</module></schema>"
        refused = post(server, text, query="?eager=true")
        assert refused.status_code == 400 and "raise kv_cache_tokens" in refused.json()["error"]["message"]
        assert listed(server) == []
        assert post(server, text).status_code == 200, "parts of it may still be of use"


def test_what_no_step_can_encode_is_given_up_and_the_server_goes_on(server: Live, client: openai.OpenAI) -> None:
    engine = server.service.loop._engine

    def fail() -> list[Any]:
        raise RuntimeError("no memory")

    engine.step = fail  # type: ignore[method-assign]
    try:
        reply = post(server, TOUR, query="?eager=true")
    finally:
        del engine.step  # the class has it
    assert reply.status_code == 200
    assert {found["state"] for found in reply.json()["modules"]} == {"not encoded", "computed with each prompt"}
    assert complete(client, BOTH).usage.prompt_tokens_details.module_tokens == TOKENS


def test_a_key_has_a_quota_of_schemas(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pando.server.schemas.MAX_SCHEMAS", 2)
    small = [f'<schema name="s{number}"><module name="a">x</module></schema>' for number in range(3)]
    assert [post(server, text).status_code for text in small] == [200, 200, 400]
    refused = post(server, small[2]).json()["error"]
    assert refused["code"] == "schema_quota_exceeded" and "delete one first" in refused["message"]
    assert post(server, small[1]).status_code == 200, "it is there already"
    assert post(server, small[2], key="two").status_code == 200
    assert delete(server, "s0").status_code == 200 and post(server, small[2]).status_code == 200
    monkeypatch.setattr("pando.server.schemas.MAX_SCHEMAS", 10)
    monkeypatch.setattr("pando.server.schemas.MAX_PML_BYTES", 3 * len(small[0]) - 1)
    assert "MiB together" in post(server, small[0]).json()["error"]["message"]


@pytest.mark.parametrize("known", [False, True])
def test_what_is_deleted_while_it_is_registered_counts_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Schemas are registered beside the event loop, and deleted in it."""
    engine, pml, add = tiny_engine(tiny_model()), b'<schema name="s"><module name="a">x</module></schema>', Schemas.add
    held = Holdings(lambda: Schemas(engine))
    if known:
        held.add(b"me", pml)

    def beside(*given: Any, **named: Any) -> Any:
        if known:
            held.remove(b"me", "s")  # it is made anew
        made = add(*given, **named)
        if not known:
            held.remove(b"me", "s")
        return made

    with monkeypatch.context() as patched:
        patched.setattr(Schemas, "add", beside)
        held.add(b"me", pml)
    monkeypatch.setattr("pando.server.schemas.MAX_PML_BYTES", len(pml))
    with pytest.raises(TooManySchemas) if known else nullcontext():
        held.add(b"me", pml.replace(b'"s"', b'"t"'))


@pytest.mark.parametrize(
    "inside",
    [
        "".join(f'<module name="m{i}" encode="causal">a</module>' for i in range(40)),
        "".join(f'<module name="m{i}"><param name="p" len="{1 + i}"/></module>' for i in range(40)),
    ],
    ids=["contexts", "params"],
)
def test_what_a_schema_takes_beside_its_text_has_a_limit(server: Live, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    monkeypatch.setattr("pando.server.schemas.MAX_HELD_BYTES", 8000)
    large = [f'<schema name="large{i}">{inside}</schema>' for i in range(2)]
    answers = [post(server, each) for each in large]
    refused = answers[1].json()["error"]
    assert answers[0].status_code == 200 and answers[1].status_code == 400
    assert refused["code"] == "schema_quota_exceeded" and "delete one first" in refused["message"]
    assert post(server, large[1], key="two").status_code == 200, "another key has its own"
    assert [found["name"] for found in listed(server)] == ["large0"], "nothing of it stays"
    assert delete(server, "large0").status_code == 200 and post(server, large[1]).status_code == 200


# ---- looking and deleting


def test_an_unknown_schema_is_not_found(server: Live) -> None:
    for reply in (fetch(server, "/v1/schemas/tuor", key="one"), delete(server, "tuor")):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "schema_not_found"


def test_uses_and_states_are_told_for_each_module(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    complete(client, BOTH)
    complete(client, '<prompt schema="tour"><rome/><short/> Hm</prompt>')
    shown = fetch(server, "/v1/schemas/tour", key="one").json()
    told = {found["path"]: (found["state"], found["uses"]) for found in shown["modules"]}
    assert shown["uses"] == 2
    assert told == {
        "(opening)": ("cached", 0), "paris": ("cached", 1), "rome": ("cached", 2), "short": ("cached", 1), "long": ("not encoded", 0),
        "today": ("computed with each prompt", 0),
    }  # fmt: skip


def test_scaffolds_say_what_they_take_beside_the_modules(server: Live) -> None:
    shown = post(server, TOUR.replace("</schema>", '<scaffold modules="paris rome"/></schema>')).json()
    [scaffold] = shown["scaffolds"]
    rome = next(found for found in shown["modules"] if found["path"] == "rome")
    assert scaffold == {"modules": ["paris", "rome"], "tokens": rome["tokens"], "bytes": rome["bytes"]}
    assert shown["bytes"] == sum(found["bytes"] for found in shown["modules"]) + scaffold["bytes"]


def test_very_many_modules_are_not_all_listed(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pando.server.schema_routes.MAX_MODULES", 70)
    modules = "".join(f'<module name="m{number}">{number}</module>' for number in range(90))
    shown = post(server, f'<schema name="many">{modules}</schema>').json()
    assert len(shown["modules"]) == 70 and shown["truncated"] and shown["modules"][-1]["path"] == "m69"
    assert shown["tokens"] == sum(len(str(number)) for number in range(90))


def test_a_schema_in_use_is_deleted_and_its_prompts_finish(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    whole = complete(client, BOTH, max_tokens=30, extra_body={"ignore_eos": True}).choices[0].text
    with braked(server) as brake:
        stream = complete(client, BOTH, max_tokens=30, stream=True, extra_body={"ignore_eos": True})
        brake.let(3)
        text = next(stream).choices[0].text
        assert delete(server, "tour").json() == {"name": "tour", "deleted": True}
        assert delete(server, "tour").status_code == 404 and listed(server) == []
        brake.let(100)
        text += "".join(event.choices[0].text for event in stream if event.choices)
    assert text == whole
    with pytest.raises(openai.BadRequestError, match="unknown schema 'tour'"):
        complete(client, BOTH)
    assert post(server, TOUR.replace("very many", "other")).status_code == 200, "the name is free"


def test_what_was_registered_is_shown_although_another_has_its_name_by_now(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, register = post(server, TOUR).json()["digest"], server.service.register

    async def slowly(owner: bytes, pml: bytes, repair: float | None) -> Schema:
        made = await register(owner, pml, repair)
        server.service.schemas.remove(owner, made.name)
        await register(owner, pml.replace(b"very many", b"no"), None)
        return made

    monkeypatch.setattr(server.service, "register", slowly)
    assert post(server, TOUR).json()["digest"] == digest
    assert fetch(server, "/v1/schemas/tour", key="one").json()["digest"] != digest


# ---- asking


def test_of_several_prompts_the_bad_one_is_named(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]:1:23: unknown module <milan>"):
        complete(client, [BOTH, '<prompt schema="tour"><milan/></prompt>'])
    with pytest.raises(openai.BadRequestError, match=r"prompt:1:23: unknown module <milan>"):
        complete(client, '<prompt schema="tour"><milan/></prompt>')


def test_words_behind_a_hole_are_no_module(server: Live, client: openai.OpenAI) -> None:
    post(server, '<schema name="hole" layout="fixed"><module name="a">A module that nobody imports.</module></schema>')
    told = complete(client, '<prompt schema="hole"> What is this?</prompt>').pando
    assert (told["reuse"], told["miss"]["reason"]) == ("none", "cold")
    assert told["miss"]["detail"] == "nothing of this prompt was seen before"


def test_a_prompt_of_modules_says_what_came_from_them(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR.replace("You", "Who"))  # nobody asked for it before
    first, again = complete(client, BOTH), complete(client, BOTH)
    assert first.choices[0].text == again.choices[0].text
    assert first.usage.prompt_tokens == TOKENS + len(" Where are the cats?")
    told = first.usage.prompt_tokens_details
    assert (told.cached_tokens, told.module_tokens, told.reuse) == (0, TOKENS, "modular")
    assert first.pando["reuse"] == "modular" and first.pando["miss"]["reason"] == "cold"
    assert "(opening) had not been encoded yet" in first.pando["miss"]["detail"]
    told = again.usage.prompt_tokens_details
    assert (told.cached_tokens, told.module_tokens, told.reuse) == (again.usage.prompt_tokens - 1, TOKENS, "modular")
    tokens = again.pando["tokens"]
    assert tokens["module"] == 48, "the second module had not seen the first; the first stood where it was encoded"
    assert (tokens["computed"], sum(tokens.values())) == (1, again.usage.prompt_tokens) and again.pando["miss"] is None


def cleared(engine: Engine) -> int:
    """The pages that are left."""
    engine.clear_cache()
    return engine.pages_in_use


@pytest.mark.parametrize("gone", ["all", "rome"])
@pytest.mark.parametrize("repair", [0.0, 0.5, 1.0])
def test_every_token_of_a_prompt_has_one_source_also_where_modules_come_from_host_memory(
    gone: str, repair: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    with live(engine={"host_gib": 0.01}, api_key=("one",)) as server, client_of(server, "one") as client:
        post(server, TOUR)
        complete(client, BOTH)
        server.settle()
        end = time.monotonic() + WAIT
        while server.service.loop.call(cleared).result(WAIT):  # what is still being saved stays
            assert time.monotonic() < end
        before = complete(client, '<prompt schema="tour"><paris/> Cats?</prompt>') if gone == "rome" else None
        reply = complete(client, BOTH, extra_body={"repair": repair})
        tokens, cached = reply.pando["tokens"], reply.usage.prompt_tokens_details.cached_tokens
        assert sum(tokens.values()) == reply.usage.prompt_tokens
        assert cached == reply.usage.prompt_tokens - tokens["computed"]
        assert min(tokens.values()) >= 0
        if not repair:
            assert tokens["module"] == 0, "the one that had not seen the other came from host memory"
            assert (tokens["device"], tokens["host"]) == ((69, cached - 69) if before else (0, cached))


def test_a_module_behind_its_own_context_is_exact(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    reply = complete(client, '<prompt schema="tour"><paris/> Cats?</prompt>')
    plain = client.completions.create(
        model=NAME,
        prompt="You show people around.Paris has a tower, a river and very many cats. Cats?",
        max_tokens=6,
        temperature=0,
    )
    assert reply.choices[0].text == plain.choices[0].text
    assert (reply.usage.prompt_tokens_details.reuse, reply.usage.prompt_tokens_details.module_tokens) == ("exact", 69)
    assert (plain.usage.prompt_tokens_details.reuse, plain.usage.prompt_tokens_details.module_tokens) == ("exact", 0)


def test_a_repaired_prompt_answers_as_the_plain_one(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    text = "You show people around.Paris has a tower, a river and very many cats.Rome has a forum, and the cats are larger there. Cats?"
    plain = client.completions.create(model=NAME, prompt=text, max_tokens=6, temperature=0)
    reply = complete(client, '<prompt schema="tour"><paris/><rome/> Cats?</prompt>', extra_body={"repair": 1.0})
    assert reply.choices[0].text == plain.choices[0].text
    assert (reply.pando["repaired"], reply.usage.prompt_tokens_details.reuse) == (48, "exact")
    half = complete(client, '<prompt schema="tour"><paris/><rome/> Cats?</prompt>', extra_body={"repair": 0.5})
    assert (half.pando["repaired"], half.usage.prompt_tokens_details.reuse) == (24, "modular")


def test_a_schema_says_what_of_its_prompts_is_repaired_unless_they_say(server: Live, client: openai.OpenAI) -> None:
    prompt = '<prompt schema="tour"><paris/><rome/> Cats?</prompt>'
    assert post(server, TOUR).json()["repair"] == 0
    assert post(server, TOUR, query="?repair=0.5").json()["repair"] == 0.5, "the same content, and another share"
    assert fetch(server, "/v1/schemas/tour", key="one").json()["repair"] == 0.5
    assert [complete(client, prompt, extra_body=more).pando["repaired"] for more in ({}, {"repair": 0}, {"repair": 1})] == [24, 0, 48]
    assert chat(client, prompt).pando["repaired"] == 24
    assert post(server, TOUR).json()["repair"] == 0.5, "who does not speak of it changes nothing"
    delete(server, "tour")
    assert post(server, TOUR).json()["repair"] == 0


@pytest.mark.parametrize("share", ["1.5", "-0.1", "nan", "much"])
def test_a_share_that_is_none_is_refused_and_nothing_is_registered(server: Live, share: str) -> None:
    refused = post(server, TOUR, query=f"?repair={share}")
    assert refused.status_code == 422 and "repair" in refused.json()["error"]["message"]
    assert not listed(server)


def test_streams_answers_stops_and_logprobs_do_not_know_of_modules(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    whole = complete(client, BOTH, n=2, logprobs=2)
    assert [choice.text for choice in whole.choices] == [whole.choices[0].text] * 2
    assert len(whole.choices[1].logprobs.tokens) == 6
    events = list(complete(client, BOTH, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage.prompt_tokens_details.module_tokens == TOKENS and events[-1].pando["reuse"] == "modular"
    cut = whole.choices[0].text[2]
    assert complete(client, BOTH, stop=[cut]).choices[0].text == whole.choices[0].text.split(cut)[0]
    echoed = complete(client, BOTH, echo=True, extra_body={"return_token_ids": True})
    assert len(echoed.choices[0].prompt_token_ids) == echoed.usage.prompt_tokens


def test_several_prompts_are_answered_together(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    prompts = [BOTH, '<prompt schema="tour"><rome/> Hm</prompt>', '<prompt schema="tour"><short/></prompt>']
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = complete(client, prompts)
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.prompt_tokens_details.module_tokens == TOKENS + 23 + 48 + 23 + 19


@pytest.mark.parametrize(
    ("prompt", "complaint", "place"),
    [
        ('<prompt schema="nowhere"/>', "unknown schema 'nowhere'", (1, 1)),
        ('<prompt schema="tour">\n  <rom/></prompt>', "did you mean 'rome'?", (2, 3)),
        ('<prompt schema="tour"><short/><long/></prompt>', "two members of one union", (1, 31)),
        ("once upon a time", "malformed XML", (1, 1)),
    ],
)
def test_a_prompt_that_means_nothing_says_where(
    server: Live, client: openai.OpenAI, prompt: str, complaint: str, place: tuple[int, int]
) -> None:
    post(server, TOUR)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt)
    assert isinstance(caught.value.body, dict)
    assert complaint in caught.value.message and caught.value.code == "invalid_pml"
    assert (caught.value.body["line"], caught.value.body["column"]) == place
    assert caught.value.body["caret"].endswith("^")


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"pml": [1, 2, 3]}, openai.UnprocessableEntityError, "must be text, not token ids"),
        ({"extra_body": {"prompt_cache_options": {"ttl": "30m"}}}, openai.BadRequestError, "made of modules; leave it out"),
        ({"echo": True, "logprobs": 1}, openai.BadRequestError, "logprobs of a prompt made of modules"),
        ({"extra_body": {"prompt_format": "xml"}}, openai.UnprocessableEntityError, "prompt_format"),
        ({"extra_body": {"repair": 2}}, openai.UnprocessableEntityError, "repair"),
    ],
    ids=["tokens", "ttl", "scores", "format", "repair"],
)
def test_what_cannot_be_asked_of_modules_is_refused(
    server: Live, client: openai.OpenAI, options: dict[str, Any], error: type[openai.APIStatusError], complaint: str
) -> None:
    post(server, TOUR)
    with pytest.raises(error, match=complaint):
        complete(client, **{"pml": BOTH, **options})


def test_an_echo_is_what_the_model_reads(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    alone = complete(client, BOTH).choices[0].text
    text = complete(client, BOTH, echo=True).choices[0].text
    assert text.endswith(alone) and "Rome" in text and "<" not in text.removesuffix(alone)


# ---- chat

CHAT = """<schema name="guide">
  <system>You show people around.</system>
  <user><module name="rome">Rome has a forum.</module></user>
</schema>"""
ASKED = '<prompt schema="guide"><rome/></prompt>'


def test_a_message_that_is_a_prompt_of_modules_is_answered_as_one(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    reply = chat(client, "\n  " + BOTH)
    assert reply.choices[0].message.content == complete(client, BOTH).choices[0].text
    told = reply.usage.prompt_tokens_details
    assert (told.module_tokens, told.reuse) == (TOKENS, "modular")
    events = list(chat(client, BOTH, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == reply.choices[0].message.content


def test_roles_are_those_of_the_chat_template_and_the_answer_is_the_assistants(server: Live, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with live(chat_template=str(template)) as other, client_of(other) as client:
        assert post(other, CHAT).status_code == 200
        reply = chat(client, ASKED, extra_body={"return_token_ids": True})
        text = fetch(other, "/detokenize", {"tokens": reply.prompt_token_ids}).json()["prompt"]
        assert text == "[system]You show people around.[/][user]Rome has a forum.[/][assistant]"
        messages = [{"role": "system", "content": "You show people around."}, {"role": "user", "content": "Rome has a forum."}]
        plain = client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, temperature=0)  # type: ignore[arg-type]
        assert plain.usage.prompt_tokens == reply.usage.prompt_tokens


def test_the_tokens_of_a_prompt_of_modules_are_those_it_is_answered_with(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    told = fetch(server, "/tokenize", {"messages": said(BOTH)}, key="one").json()["tokens"]
    assert listed(server)[0]["uses"] == 0, "a question about it is no use of it"
    assert told == chat(client, BOTH, extra_body={"return_token_ids": True}).prompt_token_ids


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_what_is_the_chat_templates_is_refused_beside_a_prompt_of_modules(server: Live, path: str) -> None:
    post(server, TOUR)
    tools = [{"type": "function", "function": {"name": "look"}}]
    for options, says in (({"chat_template_kwargs": {"think": True}}, "leave them out"), ({"tools": tools}, "into the schema")):
        refused = fetch(server, path, {"messages": said(BOTH), **options}, key="one")
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/cache/warm", "/v1/cache/pin"])
def test_a_prompt_of_modules_is_not_computed_ahead_as_text(server: Live, path: str) -> None:
    post(server, TOUR)
    refused = fetch(server, path, {"messages": said(BOTH)}, key="one")
    assert refused.status_code == 400 and "register its schema with ?eager=true" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        "<prompt>without a schema</prompt>",
        f"What does {BOTH} mean?",
        '<prompts schema="tour"/>',
        '<prompt><x schema="tour"/></prompt>',
        "<prompt " + "schema " * 20_000,
        '<prompt schema="other"><rome/></prompt> means what?',
        '<prompt schema="other"/> or <prompt schema="other"/>',
        '<prompt schema="other"/> against <prompt schema="other"></prompt>',
        "```xml\n" + BOTH + "\n```",
        '<prompt my-schema="tour"/>',
        '<prompt schema=""/>',
    ],
    ids=["nameless", "quoted", "another word", "within", "long", "before", "two", "both kinds", "code", "another attribute", "empty"],
)
def test_other_messages_are_text_as_before(server: Live, client: openai.OpenAI, content: str) -> None:
    post(server, TOUR)
    if len(content) > 1000:
        with pytest.raises(openai.BadRequestError, match="the context holds"):
            chat(client, content)
        return
    reply = chat(client, content)
    assert reply.usage.prompt_tokens == len(f"user: {content}\nassistant: ") and reply.usage.prompt_tokens_details.module_tokens == 0


@pytest.mark.parametrize("content", ['<prompt schema="other"><rome/></prompt>', "\ufeff\n<prompt schema='tuor' />\n", BOTH])
def test_a_message_that_is_a_prompt_of_an_unknown_schema_is_refused_as_a_completion_is(
    server: Live, client: openai.OpenAI, content: str
) -> None:
    post(server, TOUR)
    if content is BOTH:
        delete(server, "tour")
    told = []
    for asked in (chat, complete):
        with pytest.raises(openai.BadRequestError, match=r"unknown schema '(other|tuor|tour)'") as caught:
            asked(client, content)
        told.append(caught.value.body)
    assert told[0] == told[1] and told[0]["code"] == "invalid_pml"  # type: ignore[index]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (said(BOTH, "Everywhere.", "Really?"), 0),
        ([{"role": "system", "content": "Be brief."}, *said(BOTH)], 1),
        (said("Hello", "Hello!", f"\n {BOTH} "), 2),
        (said("Hello", "Hello!", '<prompt schema="tour">cats & dogs <rome></prompt>'), 2),
    ],
    ids=["next turn", "system", "later", "unsound"],
)
def test_a_prompt_of_modules_among_other_messages_is_refused(
    server: Live, client: openai.OpenAI, messages: list[dict[str, str]], place: int, known: bool
) -> None:
    if known:
        post(server, TOUR)
    with pytest.raises(openai.BadRequestError, match=rf"must be the only message, and messages\[{place}\]"):
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [said(BOTH), said("Hello", "Hello!", BOTH)], ids=["alone", "among others"])
def test_what_looks_like_a_prompt_of_modules_is_text_where_the_client_says_so(
    server: Live, client: openai.OpenAI, messages: list[dict[str, str]]
) -> None:
    post(server, TOUR)
    reply = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_tokens=2,
        extra_body={"prompt_format": "text"},  # type: ignore[arg-type]
    )
    assert reply.usage.prompt_tokens_details.module_tokens == 0


@pytest.mark.parametrize("messages", [said(BOTH), said("Hello", "Hello!", BOTH)], ids=["alone", "among others"])
@pytest.mark.parametrize(("route", "field"), [("responses", "input"), ("cache/warm", "messages"), ("cache/pin", "messages")])
def test_it_is_text_on_every_other_route_too(server: Live, messages: list[dict[str, str]], route: str, field: str) -> None:
    """And the same text, as far as whoever only computes or counts it is concerned."""
    post(server, TOUR)
    plain = fetch(server, "/tokenize", {"messages": messages, "prompt_format": "text"}, key="one").json()["tokens"]
    assert BOTH in fetch(server, "/detokenize", {"tokens": plain}, key="one").json()["prompt"]
    reply = fetch(server, f"/v1/{route}", {field: messages, "prompt_format": "text"}, key="one")
    assert reply.status_code == 200, reply.text
    again = fetch(server, "/v1/chat/completions", {"messages": messages, "prompt_format": "text", "max_tokens": 2}, key="one").json()
    assert again["usage"]["prompt_tokens"] == len(plain)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(plain) - len("assistant: ") - 1


def test_other_messages_among_others_are_text(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    messages = [*said(f"What does {BOTH} mean?", BOTH, f"{BOTH} I see."), {"role": "tool", "content": BOTH, "tool_call_id": "1"}]
    reply = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2, temperature=0)  # type: ignore[arg-type]
    assert reply.usage.prompt_tokens_details.module_tokens == 0
    reply = client.chat.completions.create(model=NAME, messages=[{"role": "system", "content": BOTH}], max_tokens=2, temperature=0)
    assert reply.usage.prompt_tokens_details.module_tokens == 0


def test_a_message_that_names_a_schema_and_is_wrong_says_where(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    with pytest.raises(openai.BadRequestError, match="unknown module <berlin>") as caught:
        chat(client, '<prompt schema="tour"><berlin/></prompt>')
    assert caught.value.code == "invalid_pml"


def test_a_format_holds_for_answers_to_modules_and_tools_are_the_schemas(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    reply = chat(client, BOTH, max_tokens=40, response_format=exactly("a"))
    assert reply.choices[0].message.content == '"a"'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError, match="write them into the schema"):
        chat(client, BOTH, tools=tools)


# ---- owners


def test_two_keys_have_schemas_of_one_name_without_seeing_each_other(server: Live, client: openai.OpenAI) -> None:
    other = TOUR.replace("very many cats", "two dogs")
    assert [post(server, TOUR).status_code, post(server, other, key="two").status_code] == [200, 200]
    mine, yours = (fetch(server, "/v1/schemas/tour", key=key).json() for key in ("one", "two"))
    assert mine["digest"] != yours["digest"]
    with client_of(server, "two") as second:
        shorter = complete(client, BOTH).usage.prompt_tokens - complete(second, BOTH).usage.prompt_tokens
    assert shorter == len("very many cats") - len("two dogs")
    assert delete(server, "tour", key="two").status_code == 200
    assert fetch(server, "/v1/schemas/tour", key="two").status_code == 404
    assert complete(client, BOTH).usage.prompt_tokens_details.reuse == "modular"


def test_states_of_modules_are_their_tenants(server: Live, client: openai.OpenAI) -> None:
    post(server, TOUR)
    post(server, TOUR, key="two")
    complete(client, BOTH)
    with client_of(server, "two") as second:
        assert states(server, key="two")["rome"] == "not encoded"
        assert complete(second, BOTH).usage.prompt_tokens_details.cached_tokens == 0
    assert states(server, query="?cache_salt=x")["rome"] == "not encoded"
    assert complete(client, BOTH, extra_body={"cache_salt": "x"}).usage.prompt_tokens_details.cached_tokens == 0
    assert states(server, query="?cache_salt=x")["rome"] == "cached"
    assert complete(client, BOTH).usage.prompt_tokens_details.cached_tokens > TOKENS


def test_modules_are_counted_by_where_they_came_from(server: Live, client: openai.OpenAI) -> None:
    def counted() -> float:
        return server.metric('pando_prompt_tokens_total{source="module"}', authorization="Bearer one")

    post(server, TOUR, query="?eager=true")
    before = counted()
    complete(client, BOTH)
    assert counted() - before == 48


# ---- the operator's


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "paris.txt").write_text("Paris has a tower.")
    (tmp_path / "city.pml").write_text('<schema name="city">Hi. <module name="paris" src="texts/paris.txt"/></schema>')
    (tmp_path / "tour.pml").write_text(TOUR)
    (tmp_path / "ask.pml").write_text(BOTH)
    (tmp_path / "several.pml").write_text(f"\ufeff<!-- <schema> is elsewhere -->\n{BOTH}\n\n{BOTH}\n")
    return tmp_path


def test_a_schema_of_the_operator_is_everyones_and_may_read_files_below_it(files: Path) -> None:
    with live(schema=(str(files / "city.pml"),), api_key=("one", "two")) as server:
        for key in ("one", "two"):
            [card] = listed(server, key)
            assert (card["name"], card["source"]) == ("city", "operator")
            with client_of(server, key) as client:
                assert complete(client, '<prompt schema="city"><paris/></prompt>').usage.prompt_tokens == len("Hi. Paris has a tower.")
                assert chat(client, '<prompt schema="city"><paris/></prompt>').usage.prompt_tokens_details.module_tokens == 22
                with pytest.raises(openai.BadRequestError, match="did you mean 'city'"):
                    chat(client, '<prompt schema="ctiy"><paris/></prompt>')
        assert delete(server, "city").status_code == 403
        assert post(server, '<schema name="city"/>', query="?repair=0.5").status_code == 403, "nobody repairs for everyone"
        refused = post(server, '<schema name="city">Other</schema>')
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "schema_exists"
        refused = post(server, '<schema name="mine"><module name="paris" src="texts/paris.txt"/></schema>')
        assert refused.status_code == 400, "a file is not read for a client, whatever the operator named"


def test_a_directory_of_schemas_is_registered_and_encoded_at_the_start(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TOLD_EVERY", 0.0)
    small = {"max_num_batched_tokens": 16}  # several steps
    with live(engine=small, schema_dir=str(files), eager_schemas=True, api_key=("one", "two")) as server:
        assert [card["name"] for card in listed(server)] == ["city", "tour"]
        for key in ("one", "two"):
            assert set(states(server, key=key).values()) == {"cached", "computed with each prompt"}
        assert post(server, TOUR).json()["source"] == "operator", "the same content is the one that is here"
        told = re.findall(r"schema city: (\d+) of (\d+) texts are encoded", server.log.getvalue())
        made = [int(done) for done, _ in told]
        assert len({every for _, every in told}) == 1 and made == sorted(made) and made[-1] == int(told[-1][1]) > made[0]
    with live(schema_dir=str(files)) as server:
        assert states(server)["rome"] == "not encoded"


@pytest.mark.parametrize("folder", ["code", "persona", "retrieval", "trip"])
def test_of_each_folder_of_examples_the_schema_is_taken_and_the_prompts_are_not(folder: str) -> None:
    found = read((), str(Path(__file__).parents[2] / "examples" / folder))
    assert [(path.name, element.name) for path, element in found] == [("schema.pml", "schema")]


def test_a_server_with_a_bad_schema_does_not_start(files: Path) -> None:
    def held() -> Holdings:
        return Holdings(lambda: Schemas(tiny_engine(tiny_model())))

    (files / "bad.pml").write_text("<schema name='x'>\n<modul/></schema>")
    with pytest.raises(MarkupError, match=r"bad\.pml:2:1: unknown element <modul>"):
        held().load((), str(files))
    for given in (((str(files / "none.pml"),), None), ((), str(files / "none"))):
        with pytest.raises(InvalidOption, match="none"):
            held().load(*given)
    with pytest.raises(MarkupError, match="schema"):
        held().load((str(files / "ask.pml"),), None)
