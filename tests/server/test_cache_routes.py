"""Looking at the cache, and steering it: pin, unpin, warm, time to live, quota."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from pando.engine.engine import Engine
from pando.engine.pins import Pin

from .clients import WAIT, ask, braked, client_of, fetch, said, wait_for
from .live import NAME, Live, live

LONG = "A system prompt that many requests begin with, and that should stay. "  # 69 tokens


@pytest.fixture(scope="module")
def module_server() -> Iterator[Live]:
    """A pool of 64 pages, half of which may be pinned."""
    with live(engine={"kv_cache_tokens": 256}, pin_quota=50, api_key=("one", "two")) as server:
        yield server


@pytest.fixture
def server(module_server: Live) -> Live:
    """With nothing in its cache."""
    module_server.settle()
    module_server.service.loop.call(forget).result(WAIT)
    return module_server


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server, "one") as client:
        yield client


def forget(engine: Engine) -> None:
    for pin in list(engine.pins):
        engine.pins.drop(pin)
    engine.clear_cache()


def send(server: Live, path: str, body: Any = None, key: str = "one") -> httpx.Response:
    return fetch(server, path, body, key)


def cached(client: openai.OpenAI, prompt: str) -> int:
    reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=1, temperature=0)
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def press(client: openai.OpenAI) -> None:
    """Needs more pages than there are free or unpinned and unused."""
    for letter in "xyz":
        cached(client, letter * 100)


def test_the_view_is_a_tree_of_segments(server: Live, client: openai.OpenAI) -> None:
    ask(client, LONG + "one")
    ask(client, LONG + "two")
    view = send(server, "/v1/cache").json()
    by_key = {found["key"]: found for found in view["segments"]}
    assert len(by_key) == len(view["segments"]) and not view["truncated"]
    for found in view["segments"]:
        parent = by_key.get(found["parent"])
        assert found["first"] == (parent["first"] + parent["tokens"] if parent else 0)
        assert found["tier"] == "device" and found["age_seconds"] >= found["idle_seconds"] >= 0 and found["readers"] == found["pins"] == 0
    assert sum(found["parent"] is not None for found in view["segments"]) >= 2  # where the two go on differently
    pages = view["pages"]
    assert (pages["size"], pages["total"], pages["pinned"]) == (4, 64, 0) and 0 < pages["cached"] == pages["in_use"] <= 64


def test_a_running_stream_is_a_reader(server: Live, client: openai.OpenAI) -> None:
    with braked(server) as brake:
        seen: list[list[int]] = []

        def look() -> None:
            seen.append([found["readers"] for found in send(server, "/v1/cache").json()["segments"]])

        stream = ask(client, LONG, stream=True, max_tokens=150, extra_body={"ignore_eos": True})
        brake.let(3)  # the prompt takes two steps
        next(stream)
        looking = threading.Thread(target=look)
        looking.start()
        while looking.is_alive():  # it is answered between two steps
            brake.let(bool(server.service.loop._posted))
            looking.join(0.01)
        stream.close()
    look()
    assert max(seen[0]) == 1 and max(seen[1]) == 0


def test_what_requests_read_is_no_pin_and_a_pin_is_told_once(server: Live, client: openai.OpenAI) -> None:
    schema = b'<schema name="read">It opens. <module name="one"> One module.</module><module name="two"> Another.</module></schema>'
    fetch(server, "/v1/schemas?eager=true", content=schema, headers={"authorization": "Bearer one"}).raise_for_status()
    seen: list[list[Any]] = []
    with braked(server) as brake:
        asked = {"prompt_format": "pml", "ignore_eos": True}
        prompt = '<prompt schema="read"><one/><two/> Go on.</prompt>'
        stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=40, n=2, stream=True, extra_body=asked)
        brake.let(8)
        next(stream)
        looking = threading.Thread(target=lambda: seen.append(send(server, "/v1/cache").json()["segments"]))
        looking.start()
        while looking.is_alive():  # it is answered between two steps
            brake.let(bool(server.service.loop._posted))
            looking.join(0.01)
        stream.close()
    assert max(found["readers"] for found in seen[0]) == 2 and not any(found["pins"] for found in seen[0])
    server.settle()
    send(server, "/v1/cache/pin", {"prompt": LONG}).raise_for_status()  # it ends within a page
    assert [(found["first"], found["pins"]) for found in send(server, "/v1/cache").json()["segments"] if found["pins"]] == [(68, 1)]


def test_a_pin_outlives_pressure_until_it_is_taken_away(server: Live, client: openai.OpenAI) -> None:
    pin = send(server, "/v1/cache/pin", {"prompt": LONG}).json()
    assert pin["tokens"] >= 68 and pin["expires_at"] is None
    assert max(found["pins"] for found in send(server, "/v1/cache").json()["segments"]) == 1
    assert send(server, "/v1/cache").json()["pages"]["pinned"] == 18
    press(client)
    assert cached(client, LONG) == 68
    assert send(server, "/v1/cache/unpin", {"id": pin["id"]}).json() == {"id": pin["id"], "unpinned": True}
    assert send(server, "/v1/cache/unpin", {"id": pin["id"]}).json()["unpinned"] is False
    press(client)
    assert cached(client, LONG) < 68


def test_without_a_pin_the_same_pressure_evicts(server: Live, client: openai.OpenAI) -> None:
    cached(client, LONG)
    press(client)
    assert cached(client, LONG) < 68


def test_a_conversation_can_be_pinned(server: Live, client: openai.OpenAI) -> None:
    pin = send(server, "/v1/cache/pin", {"messages": said(LONG), "ttl": "30m"}).json()
    assert pin["expires_at"] > 0
    press(client)
    reply = ask(client, LONG)
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_another_owner_cannot_take_a_pin_away(server: Live, client: openai.OpenAI) -> None:
    pin = send(server, "/v1/cache/pin", {"prompt": LONG}).json()
    assert send(server, "/v1/cache/unpin", {"id": pin["id"]}, key="two").json()["unpinned"] is False
    press(client)
    assert cached(client, LONG) == 68
    assert not any(found["pins"] for found in send(server, "/v1/cache", key="two").json()["segments"])


@pytest.mark.parametrize("options", [{}, {"stop": ["2Q", "Y", "V"], "logit_bias": {f"{token}": -100 for token in range(94, 257)}}])
def test_the_pin_of_a_turn_gives_way_though_its_answer_comes_back_as_other_tokens(options: dict[str, Any]) -> None:
    """Half characters do, and what a stop string was cut off."""
    with live(pin_quota=100) as server:
        kept = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "prompt_cache_options": {"ttl": "1h"}, **options}
        for session in ("one", "two"):
            messages = said(f"The first of the questions of {session}?")
            for _ in range(4):
                reply = fetch(server, "/v1/chat/completions", {**kept, "messages": messages, "session_id": session}).json()
                assert reply["pando"]["pin"] is not None
                messages += [reply["choices"][0]["message"], *said("And another one?")]
            other = fetch(server, "/v1/chat/completions", {**kept, "messages": said(f"Else, by {session}?"), "session_id": session})
            assert other.json()["pando"]["pin"] is not None
        assert server.service.loop.call(lambda engine: len(list(engine.pins))).result(WAIT) == 4


def test_pins_have_a_quota(server: Live, client: openai.OpenAI) -> None:
    assert send(server, "/v1/cache/pin", {"prompt": "a" * 100}).status_code == 200
    refused = send(server, "/v1/cache/pin", {"prompt": "b" * 100})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "pin_quota_exceeded"
    assert "50 of the 32" in refused.json()["error"]["message"]
    assert cached(client, "c" * 100) == 0  # and the server goes on


def test_a_time_to_live_keeps_prompt_and_answer(server: Live, client: openai.OpenAI) -> None:
    reply = ask(client, "Keep this", extra_body={"prompt_cache_options": {"ttl": "30m"}})
    pin = reply.pando["pin"]
    assert pin["tokens"] == reply.usage.total_tokens - 1 and pin["expires_at"] > reply.created + 1000
    press(client)
    again = ask(client, "Keep this")
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1 and again.pando["pin"] is None
    assert send(server, "/v1/cache/unpin", {"id": pin["id"]}).json()["unpinned"] is True


def test_a_stream_tells_its_pin_too(client: openai.OpenAI) -> None:
    last = list(ask(client, "Keep this", stream=True, extra_body={"prompt_cache_options": {"ttl": 60}}))[-1]
    assert last.pando["pin"]["tokens"] > 0


def test_counts_of_pages_are_as_new_as_the_segments_beside_them(
    server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = server.service.loop.stats  # the numbers of the metrics may be so
    monkeypatch.setattr(type(server.service.loop), "stats", property(lambda _: old, lambda *_: None), raising=False)
    ask(client, "For an hour", extra_body={"prompt_cache_options": {"ttl": "1h"}})
    found = send(server, "/v1/cache").json()
    assert found["segments"] and found["pages"]["pinned"] > 0


def test_what_lived_its_time_goes(server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = server.service.loop._engine.scheduler
    now = scheduler.clock()
    monkeypatch.setattr(scheduler, "clock", lambda: now)
    ask(client, "For a second", extra_body={"prompt_cache_options": {"ttl": "1s"}})
    assert send(server, "/v1/cache").json()["pages"]["pinned"] > 0
    monkeypatch.setattr(scheduler, "clock", lambda: now + 1.1)
    wait_for(lambda: send(server, "/v1/cache").json()["pages"]["pinned"] == 0)


def test_an_answer_is_given_even_if_it_cannot_be_kept(server: Live, client: openai.OpenAI) -> None:
    reply = ask(client, "k" * 140, extra_body={"prompt_cache_options": {"ttl": "30m"}})
    assert reply.choices[0].message.content and reply.pando["pin"] is None
    assert "not pinned" in server.log.getvalue()


def test_without_prefix_caching_there_is_an_answer_and_no_pin() -> None:
    with live(engine={"prefix_caching": False}) as server, client_of(server) as client:
        keep = {"prompt_cache_options": {"ttl": "30m"}}
        reply = ask(client, "Keep this", extra_body=keep)
        assert reply.choices[0].message.content and reply.pando["pin"] is None
        assert list(ask(client, "Keep this", stream=True, extra_body=keep))[-1].pando["pin"] is None


def test_what_was_evicted_before_it_could_be_pinned_is_said(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    service, ask_engine = server.service, server.service.ask_engine

    async def evicted(*arguments: object) -> int:
        return 0

    async def starved(work: Callable[[Engine], object]) -> object:
        """A step that finds no room takes the newest pin."""
        found = await ask_engine(work)
        if isinstance(found, Pin):
            await ask_engine(lambda engine: engine.pins.give_way())
        return found

    monkeypatch.setattr(service, "compute", evicted)
    monkeypatch.setattr(service, "ask_engine", starved)
    refused = send(server, "/v1/cache/pin", {"prompt": LONG})
    assert refused.status_code == 400 and "was evicted before it could be pinned" in refused.json()["error"]["message"]
    assert not list(service.loop._engine.pins)


def test_what_was_warmed_need_not_be_computed(server: Live, client: openai.OpenAI) -> None:
    assert send(server, "/v1/cache/warm", {"model": NAME, "prompt": LONG}).json() == {"tokens": 69, "cached_tokens": 0, "pin": None}
    assert cached(client, LONG) == 68
    assert send(server, "/v1/cache/warm", {"prompt": LONG}).json() == {"tokens": 69, "cached_tokens": 68, "pin": None}
    assert cached(client, LONG + "and on") >= 69


def test_a_warm_prompt_with_a_ttl_is_pinned(server: Live, client: openai.OpenAI) -> None:
    send(server, "/v1/cache/warm", {"messages": said(LONG), "ttl": "1h"})
    press(client)
    reply = ask(client, LONG)
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


@pytest.mark.parametrize("route", ["/v1/cache/warm", "/v1/cache/pin"])
def test_what_is_computed_ahead_is_not_cut_and_nobody_is_told_to_ask_for_that(server: Live, route: str) -> None:
    refused = send(server, route, {"model": NAME, "prompt": [1] * 600})
    assert refused.status_code == 400
    told = refused.json()["error"]["message"]
    assert "600 tokens and the context holds 512" in told and "by 89 tokens" in told and "auto" not in told
    refused = send(server, route, {"model": NAME, "prompt": "far too long to be tokenised " * 10_000})
    assert refused.status_code == 400 and "characters" in refused.text and "auto" not in refused.text


def test_what_is_warmed_belongs_to_who_warmed_it(server: Live) -> None:
    send(server, "/v1/cache/warm", {"prompt": LONG})
    with client_of(server, "two") as other:
        assert cached(other, LONG) == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"prompt": "x", "messages": said("x")}, 422),
        ({"prompt": "x", "ttl": "soon"}, 422),
        ({"prompt": "x", "model": "other"}, 404),
        ({"prompt": "x" * 600}, 400),
    ],
    ids=["nothing", "both", "bad ttl", "another model", "too long"],
)
@pytest.mark.parametrize("path", ["warm", "pin"])
def test_bad_bodies_are_refused(module_server: Live, path: str, body: Any, status: int) -> None:
    refused = send(module_server, f"/v1/cache/{path}", body)
    assert refused.status_code == status and refused.json()["error"]["message"]
