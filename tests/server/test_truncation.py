"""Conversations that outgrow the context, over HTTP."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from pando.server.overflow import MAX_SESSIONS, Overflow

from ..tiny import greedy, tiny_llm, tiny_model
from .clients import braked, client_of, fetch, wait_for
from .live import NAME, Live, live

WINDOW = 512
SYSTEM = "Be brief and kind, and answer in one word."
OPENING = f"system: {SYSTEM}\nuser: "


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(engine={"max_model_len": WINDOW}) as running:
        yield running


class Talk:
    """A client that sends the whole conversation with each turn."""

    def __init__(self, client: openai.OpenAI, name: str, **options: Any) -> None:
        self.client, self.options = client, options
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        self.name = name

    def turn(self, **options: Any) -> Any:
        self.messages.append({"role": "user", "content": f"{self.name} says this in turn {len(self.messages)}."})
        body = {"ignore_eos": True, "truncation": "auto", **self.options, **options}
        stream = body.pop("stream", False)
        asked = {"model": NAME, "messages": self.messages, "temperature": 0, "max_tokens": 8}
        made = self.client.chat.completions.create(**asked, stream=stream, extra_body=body)
        reply = made if not stream else list(made)[-1]
        self.messages.append({"role": "assistant", "content": "A short answer, and always the same."})
        return reply

    def until_cut(self) -> Any:
        while (reply := self.turn()).pando["truncated"] is None:
            assert len(self.messages) < 20
        return reply


def test_a_conversation_past_the_context_goes_on(client: openai.OpenAI) -> None:
    talk = Talk(client, "Anna")
    first = talk.until_cut()
    assert first.pando["reuse"] == first.usage.prompt_tokens_details.reuse == "truncated"
    told = first.pando["truncated"]
    assert told["recomputed"] is None and told["moved_tokens"] > 20
    assert first.usage.prompt_tokens <= WINDOW // 2
    assert first.usage.prompt_tokens_details.cached_tokens > len(OPENING)
    second = talk.turn()
    assert second.pando["truncated"]["dropped_tokens"] == told["dropped_tokens"], "it is recognised"
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    dropped = [talk.turn().pando["truncated"]["dropped_tokens"] for _ in range(12)]
    assert dropped == sorted(dropped) and dropped[-1] > 3 * told["dropped_tokens"]


def test_tokens_are_counted_without_the_dropped_ones(server: Live, client: openai.OpenAI) -> None:
    talk = Talk(client, "Berta")
    reply = talk.until_cut()
    whole = fetch(server, "/tokenize", {"messages": talk.messages[:-1]}).json()
    assert reply.usage.prompt_tokens == whole["count"] - reply.pando["truncated"]["dropped_tokens"]
    assert sum(reply.pando["tokens"].values()) == reply.usage.prompt_tokens


def test_what_is_left_of_a_conversation_can_be_pinned() -> None:
    with live(engine={"max_model_len": WINDOW, "kv_cache_tokens": 3 * WINDOW}, pin_quota=60) as server, client_of(server) as client:
        talk, replies = Talk(client, "Carla", prompt_cache_options={"ttl": "30m"}), list[Any]()
        while len(cut := [reply for reply in replies if reply.pando["truncated"] is not None]) < 2:
            replies.append(talk.turn())
            talk.messages[-1]["content"] = replies[-1].choices[0].message.content
            assert replies[-1].pando["pin"]["tokens"] == replies[-1].usage.total_tokens - 1, "all that was read and answered"
        second = cut[-1]
        for number in range(8):  # pressure
            client.completions.create(model=NAME, prompt=f"{number} filler " * 40, max_tokens=1, temperature=0)
        again = client.chat.completions.create(
            model=NAME, messages=talk.messages[:-1], temperature=0, max_tokens=8, extra_body={"ignore_eos": True, "truncation": "auto"}
        )
        assert again.usage.prompt_tokens == second.usage.prompt_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
        assert again.choices[0].message.content == second.choices[0].message.content


def test_a_stream_says_it_too(client: openai.OpenAI) -> None:
    talk = Talk(client, "Clara")
    talk.until_cut()
    last = talk.turn(stream=True, stream_options={"include_usage": True})
    assert last.pando["truncated"]["dropped_tokens"] and last.pando["reuse"] == "truncated"


def test_a_prompt_that_does_not_fit_is_refused_unless_the_client_allows_it(server: Live, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "much " * 200}]
    for more in ({}, {"truncation": "disabled"}, {"truncation": None}):
        refused = fetch(server, "/v1/chat/completions", {"messages": messages, **more})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert 'truncation="auto"' in refused.json()["error"]["message"]
    refused = fetch(server, "/v1/completions", {"prompt": "much " * 200})
    assert 'truncation="auto"' in refused.json()["error"]["message"]
    huge = fetch(server, "/v1/completions", {"prompt": "much " * 100_000})
    assert huge.status_code == 400 and 'truncation="auto"' in huge.json()["error"]["message"]
    nonsense = fetch(server, "/v1/chat/completions", {"messages": messages, "truncation": "always"})
    assert nonsense.status_code in (400, 422) and "truncation" in nonsense.json()["error"]["message"]


def test_who_was_never_here_is_answered_from_what_is_left(server: Live) -> None:
    prompt = "A long prompt that nobody has seen. " * 24
    reply = fetch(server, "/v1/completions", {"prompt": prompt, "truncation": "auto", "temperature": 0, "max_tokens": 4}).json()
    assert reply["pando"]["truncated"]["recomputed"] == "cold" and reply["pando"]["truncated"]["moved_tokens"] == 0
    assert reply["pando"]["reuse"] == "none" and reply["usage"]["prompt_tokens_details"]["reuse"] == "exact"
    assert reply["usage"]["prompt_tokens"] == len(prompt) - reply["pando"]["truncated"]["dropped_tokens"]


def test_the_last_message_stays_whole(server: Live) -> None:
    question = "Which of these things did I say first, and which one did I say last, and why? " * 3
    talk = [{"role": "system", "content": SYSTEM}, *({"role": "user", "content": f"Thing {i}."} for i in range(40))]
    body = {"messages": [*talk, {"role": "user", "content": question}], "truncation": "auto", "max_tokens": 4, "temperature": 0}
    reply = fetch(server, "/v1/chat/completions", body).json()
    left = reply["usage"]["prompt_tokens"]
    assert left >= len(OPENING) + len(question) + len("\nassistant: ") and left > WINDOW // 2 + 8


def test_an_edited_history_says_where_it_diverged(client: openai.OpenAI) -> None:
    talk = Talk(client, "Dora")
    talk.until_cut()
    talk.messages[-3] = {"role": "user", "content": "Dora never said that, and now she has."}
    miss = talk.turn().pando["miss"]
    assert miss["reason"] == "diverged" and miss["message"] >= len(talk.messages) - 6


def test_a_session_says_it_once(client: openai.OpenAI) -> None:
    talk = Talk(client, "Emma", session_id="emma")
    talk.until_cut()
    assert talk.turn(truncation=None).pando["truncated"]
    with pytest.raises(openai.BadRequestError, match="truncation"):
        talk.turn(truncation="disabled")
    talk.messages = talk.messages[:-2]
    with pytest.raises(openai.BadRequestError, match="truncation"):
        talk.turn(truncation=None)


def test_a_session_that_two_requests_use_at_once_goes_on_for_both(server: Live, client: openai.OpenAI) -> None:
    """The same conversation in two windows: asked at once, first the same and then other questions, until both are truncated, and on."""
    talks = [Talk(client, "Gina", session_id="gina", truncation=choice) for choice in ("auto", None)]  # one says it, for both
    alone = [tiny_llm(max_model_len=WINDOW) for _ in talks]
    cold = tiny_llm(max_model_len=WINDOW, prefix_caching=False)
    cut = dict.fromkeys(talks, 0)
    with ThreadPoolExecutor(len(talks)) as threads:
        for number in range(9):
            if number == 2:
                talks[1].name = "Gina, who would like to know something else, "
            with braked(server):
                asked = [threads.submit(talk.turn) for talk in talks]
                wait_for(lambda: len(server.service._tickets) == len(talks))
            for talk, llm, reply in zip(talks, alone, [each.result() for each in asked], strict=True):
                answer, told = reply.choices[0].message.content, reply.pando["truncated"]
                [same] = llm.chat(talk.messages[:-1], greedy(8), truncation="auto")
                wanted = None if same.reuse.truncated is None else same.reuse.truncated.dropped
                assert answer == same.outputs[0].text and (told and told["dropped_tokens"]) == wanted, "as in a session of its own"
                if told is None:
                    assert answer == cold.chat(talk.messages[:-1], greedy(8))[0].outputs[0].text and reply.pando["reuse"] != "truncated"
                cut[talk] += told is not None
                talk.messages[-1]["content"] = answer
                miss = reply.pando["miss"]
                assert miss is None or (miss["reason"] in ("cold", "diverged") and miss["drift"] in (None, "answer_retokenised"))
    assert min(cut.values()) >= 2, "both were truncated, and went on"
    assert Talk(client, "Gina", session_id="gina").turn().pando["reuse"] == "exact", "and it may begin anew"


def test_the_operator_may_allow_it_for_everyone() -> None:
    with live(engine={"max_model_len": WINDOW}, truncation="auto") as server:
        prompt = "A long prompt that nobody has seen. " * 24
        assert fetch(server, "/v1/completions", {"prompt": prompt}).json()["pando"]["truncated"]["dropped_tokens"]
        assert fetch(server, "/v1/completions", {"prompt": prompt, "truncation": "disabled"}).status_code == 400


def test_sessions_are_remembered_up_to_a_number() -> None:
    overflow = Overflow("disabled")
    assert overflow.allows("auto", b"a", "one") and overflow.allows(None, b"a", "one")
    assert not overflow.allows(None, b"b", "one"), "another tenant's"
    for name in range(MAX_SESSIONS):
        overflow.allows("auto", b"a", f"{name}")
        overflow.allows(None, b"a", f"silent {name}")
    assert not overflow.allows(None, b"a", "one")
    assert len(overflow._sessions) == MAX_SESSIONS


def test_the_header_names_a_session_as_the_field_does(server: Live) -> None:
    asked, header = {"prompt": "A long prompt that nobody has seen yet. " * 24, "max_tokens": 4}, {"x-session-id": "fay"}
    assert fetch(server, "/v1/completions", {**asked, "truncation": "auto"}, headers=header).status_code == 200
    assert fetch(server, "/v1/completions", asked, headers=header).json()["pando"]["truncated"]["dropped_tokens"]
    assert fetch(server, "/v1/completions", {**asked, "session_id": "fay"}).status_code == 200
    assert fetch(server, "/v1/completions", asked).status_code == 400


def test_what_a_session_said_outlives_the_server(tmp_path: Path) -> None:
    asked, kept = {"prompt": "A prompt as long as they come. " * 24, "max_tokens": 4}, {"disk_gib": 0.01, "disk_dir": str(tmp_path)}
    named = [{**asked, "session_id": name} for name in ("gus", "hal")]
    with live(engine={"max_model_len": WINDOW, **kept}) as server:
        assert [fetch(server, "/v1/completions", {**each, "truncation": "auto"}).status_code for each in named] == [200, 200]
    with live(engine={"max_model_len": WINDOW, **kept}) as server:
        assert fetch(server, "/v1/completions", named[0]).json()["pando"]["truncated"]["dropped_tokens"]
        assert fetch(server, "/v1/completions", {**named[1], "truncation": "disabled"}).status_code == 400
        assert fetch(server, "/v1/completions", {**named[0], "cache_salt": "another"}).status_code == 400
    with live(engine={"max_model_len": WINDOW, **kept}) as server:
        assert [fetch(server, "/v1/completions", each).status_code for each in named] == [200, 400], "the last thing that each said"


class Board:
    """Notes that a test can look at, and damage."""

    def __init__(self) -> None:
        self.notes: dict[bytes, bytes] = {}

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return {key: self.notes[key] for key in keys if key in self.notes}

    def keep(self, key: bytes, tenant: bytes, note: bytes) -> None:
        self.notes[key] = note


def test_more_sessions_than_are_remembered_are_noted_and_what_is_damaged_is_no_choice() -> None:
    board = Board()
    overflow = Overflow("disabled", board)
    for name in range(MAX_SESSIONS + 1):
        overflow.allows("auto", b"a", f"{name}")
    assert overflow.allows(None, b"a", "0") and not overflow.allows(None, b"b", "0")
    another = Overflow("disabled", board)
    board.notes = dict.fromkeys(board.notes, next(iter(board.notes.values())))
    assert sum(another.allows(None, b"a", f"{name}") for name in range(20)) <= 1, "one of them is its own"


def test_what_a_session_said_holds_on_a_server_with_another_default() -> None:
    board = Board()
    assert Overflow("auto", board).allows("auto", b"a", "one") and Overflow("auto", board).allows(None, b"a", "silent")
    assert [Overflow("disabled", board).allows(None, b"a", name) for name in ("one", "silent")] == [True, False]


def test_prompts_made_of_modules_and_scored_ones_cannot_be_truncated(server: Live) -> None:
    scored = {"prompt": "x" * 800, "truncation": "auto", "echo": True, "logprobs": 1}
    refused = fetch(server, "/v1/completions", scored)
    assert refused.status_code == 400 and "logprobs" in refused.json()["error"]["message"]
    modular = fetch(server, "/v1/completions", {"prompt": "<prompt/>", "prompt_format": "pml", "truncation": "auto"})
    assert modular.status_code == 400 and "made of modules" in modular.json()["error"]["message"]


def test_a_model_that_cannot_move_its_states_says_so() -> None:
    with live(tiny_model(positions="learned"), engine={"max_model_len": WINDOW}) as server, client_of(server) as client:
        reply = Talk(client, "Frida").until_cut()
        assert reply.pando["truncated"]["recomputed"] == "positions" and reply.usage.prompt_tokens_details.reuse == "exact"
