"""Every answer says what was reused for it, and why the rest was not."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from pando.model.load import Model
from pando.model.tokenizer import Tokenizer

from ..tiny import END, tiny_model, tiny_tokenizer
from .clients import WAIT, ask, client_of, counters, exactly, quoted, wait_for
from .live import NAME, Live, live

SOURCES = {"computed", "device", "host", "disk", "remote", "module"}


def go_on(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, **{"temperature": 0, "max_tokens": 2, **options})


def cached(reply: Any) -> int:
    """As the usage says it, and the report beside it must say the same."""
    told, tokens = reply.usage.prompt_tokens_details.cached_tokens, reply.pando["tokens"]
    assert set(tokens) == SOURCES and sum(tokens.values()) == reply.usage.prompt_tokens
    assert told == reply.usage.prompt_tokens - tokens["computed"] == tokens["device"]
    assert reply.pando["reuse"] == ("exact" if told else "none")
    return int(told)


def test_the_same_prompt_is_computed_once(client: openai.OpenAI) -> None:
    first, again = go_on(client, "Never twice, please."), go_on(client, "Never twice, please.")
    assert cached(first) == 0 and first.pando["miss"]["reason"] == "cold" and first.pando["miss"]["token"] == 0
    assert cached(again) == 19 and again.pando["miss"] is None  # the last token must be computed to be answered
    assert again.choices[0].text == first.choices[0].text
    assert 0 <= again.pando["queue_ms"] <= again.pando["time_to_first_token_ms"]


def test_a_stream_reports_the_same(client: openai.OpenAI) -> None:
    go_on(client, "Report in a stream")
    last = list(go_on(client, "Report in a stream", stream=True, stream_options={"include_usage": True}))[-1]
    assert cached(last) == 17 and last.pando["miss"] is None


def test_the_time_to_the_first_token_begins_when_the_request_has_arrived(
    server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done before the engine gets it, such as tokenising, counts."""
    prepare = server.service.prompts.completion

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        return prepare(*given)

    monkeypatch.setattr(server.service.prompts, "completion", slowly)
    assert go_on(client, "From the beginning").pando["time_to_first_token_ms"] >= 100


def test_a_longer_prompt_reuses_its_beginning_without_a_miss(client: openai.OpenAI) -> None:
    head = "The beginning of it all"
    answer = go_on(client, head, logit_bias={"64": 100}).choices[0].text
    longer = go_on(client, head + answer + ", and more of it")
    assert cached(longer) >= len(head) and longer.pando["miss"] is None


def test_a_divergence_is_named_with_its_message_and_token(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You are a tree."}, {"role": "user", "content": "How many stems?"}]
    client.chat.completions.create(model=NAME, messages=messages, max_tokens=2)
    messages[1]["content"] = "How many roots?"
    reply = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2)
    same = len("system: You are a tree.\nuser: How many ")
    assert cached(reply) == same
    assert {**reply.pando["miss"], "detail": ""} == {"reason": "diverged", "token": same, "message": 1, "drift": None, "detail": ""}
    assert "the cached tokens differ" in reply.pando["miss"]["detail"]


def test_a_prompt_of_one_token_is_too_short(client: openai.OpenAI) -> None:
    for _ in range(2):
        reply = go_on(client, [64])
        assert cached(reply) == 0 and reply.pando["miss"]["reason"] == "too_short"


def test_scoring_a_prompt_rules_reuse_out(client: openai.OpenAI) -> None:
    go_on(client, "score this prompt")
    reply = go_on(client, "score this prompt", echo=True, logprobs=0)
    assert cached(reply) == 0 and reply.pando["miss"]["reason"] == "off"


def test_another_salt_is_another_tenant(client: openai.OpenAI) -> None:
    go_on(client, "Salted the same", extra_body={"cache_salt": "one"})
    other = go_on(client, "Salted the same", extra_body={"cache_salt": "two"})
    assert cached(other) == 0 and other.pando["miss"]["reason"] == "other_tenant"
    assert cached(go_on(client, "Salted the same", extra_body={"cache_salt": "one"})) == 14


def test_several_prompts_are_accounted_for_together(client: openai.OpenAI) -> None:
    go_on(client, "known prompt")
    reply = go_on(client, ["known prompt", "quite unknown"])
    assert cached(reply) == 11 and reply.usage.prompt_tokens == 25
    assert reply.pando["miss"]["reason"] == "cold"


def test_what_was_evicted_is_told_from_what_is_new() -> None:
    with live(engine={"kv_cache_tokens": 64}) as server, client_of(server) as client:
        prompt = "This prompt will have to make room."
        go_on(client, prompt)
        assert cached(go_on(client, prompt)) == len(prompt) - 1
        go_on(client, "Another one that needs most of the small pool to be here")
        again = go_on(client, prompt)
        assert cached(again) < len(prompt) - 1
        assert again.pando["miss"]["reason"] == "evicted" and "kv-cache-tokens" in again.pando["miss"]["detail"]


def test_without_prefix_caching_every_miss_says_so() -> None:
    with live(engine={"prefix_caching": False}) as server, client_of(server) as client:
        for _ in range(2):
            reply = go_on(client, "Not kept at all")
            assert cached(reply) == 0 and reply.pando["miss"]["reason"] == "off"


# ---- between turns


def remembered(server: Live, turns: int) -> None:
    """A turn is written down beside the event loop."""
    wait_for(lambda: server.service.history.turns >= turns)


@pytest.mark.parametrize(
    "named", [{"extra_body": {"session_id": "s"}}, {"prompt_cache_key": "s"}, {"extra_headers": {"x-session-id": "s"}}], ids=str
)
def test_a_conversation_is_named_in_three_ways(client: openai.OpenAI, named: dict[str, Any]) -> None:
    assert ask(client, "Name", max_tokens=1, **named).pando["session_id"] == "s"
    assert ask(client, "Name", max_tokens=1).pando["session_id"] is None


def test_a_header_names_a_conversation_in_any_script(server: Live) -> None:
    """Clients write UTF-8. Taken for Latin-1, it reads as other characters, of which some cannot be printed."""
    body = {"messages": [{"role": "user", "content": "Name"}], "max_tokens": 1}
    for name in ("Łódź", "東京", "rené"):
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers={"x-session-id": name.encode()})
        assert reply.status_code == 200 and reply.json()["pando"]["session_id"] == name
    odd = httpx.post(server.url + "/v1/chat/completions", json=body, headers={"x-session-id": "rené".encode("latin-1")})
    assert odd.json()["pando"]["session_id"] == "rené"


def test_a_session_id_is_stronger_than_other_names(client: openai.OpenAI) -> None:
    reply = ask(client, "Name", max_tokens=1, prompt_cache_key="k", extra_body={"session_id": "s"}, extra_headers={"x-session-id": "h"})
    assert reply.pando["session_id"] == "s"


def test_a_turn_that_simply_continues_has_no_drift(server: Live, client: openai.OpenAI) -> None:
    turns = server.service.history.turns
    first = ask(client, "Tell me", response_format=exactly("a story"), max_tokens=40)
    remembered(server, turns + 1)
    second = ask(client, "Tell me", first.choices[0].message.content, "Go on", extra_body={"session_id": "story"})
    assert cached(second) == first.usage.total_tokens - 1 and second.pando["miss"] is None


@pytest.mark.parametrize(
    "named", [{"extra_body": {"session_id": "x"}}, {"prompt_cache_key": "y"}, {"extra_headers": {"x-session-id": "z"}}], ids=str
)
def test_a_client_that_changes_history_is_told(server: Live, client: openai.OpenAI, named: dict[str, Any]) -> None:
    turns, question = server.service.history.turns, f"Change {named}"
    answer = ask(client, question, response_format=exactly("an answer"), max_tokens=40, **named).choices[0].message.content
    remembered(server, turns + 1)
    changed = ask(client, question, answer.replace("an", "no"), "And then?", **named)
    miss = changed.pando["miss"]
    assert miss["drift"] == "history_changed" and miss["message"] == 1 and miss["reason"] == "diverged"
    assert miss["token"] == cached(changed) == len(f"user: {question}\nassistant: ") + 1
    assert "unchanged" in miss["detail"]


def test_a_template_that_rewrites_history_is_named(tmp_path: Path) -> None:
    """It marks the last message, which the next turn no longer finds marked."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last %} [now]{% endif %}\n{% endfor %}assistant: "
    (tmp_path / "now.jinja").write_text(template)
    with live(chat_template=str(tmp_path / "now.jinja")) as server, client_of(server) as client:
        answer = ask(client, "First", response_format=exactly("yes"), max_tokens=20).choices[0].message.content
        remembered(server, 1)
        second = ask(client, "First", answer, "Second")
        miss = second.pando["miss"]
        assert miss["drift"] == "template_rewrote_history" and miss["message"] == 0
        assert miss["token"] == cached(second) == len("user: First")
        assert "chat template" in miss["detail"]
        assert '"drift": "template_rewrote_history"' in server.log.getvalue()


def with_merges() -> Model:
    """`aa` is one token to the tokenizer, while the model is free to say `a` twice."""
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"ÿ"})
    names = {name: place for place, name in enumerate([*letters, "aa", "<end>"])}
    library = Vocabulary(models.BPE(names, [("a", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    assert names["<end>"] == END
    return replace(tiny_model(), tokenizer=Tokenizer(library.to_str(), {"eos_token": "<end>"}, [], tiny_tokenizer().template()))


def test_an_answer_that_becomes_other_tokens_is_named() -> None:
    with live(with_merges()) as server, client_of(server) as client:
        letter = server.service.loop._engine.model.tokenizer.encode("a")[0]
        first = ask(client, "Say", logit_bias={str(letter): 100}, extra_body={"return_token_ids": True})
        assert first.choices[0].token_ids == [letter] * 8
        remembered(server, 1)
        second = ask(client, "Say", first.choices[0].message.content, "More")
        miss = second.pando["miss"]
        assert miss["drift"] == "answer_retokenised" and miss["message"] == 1
        assert miss["token"] == cached(second) == first.usage.prompt_tokens
        third = ask(client, "Say", first.choices[0].message.content, "More", second.choices[0].message.content, "Still more")
        assert cached(third) >= second.usage.prompt_tokens - 1  # computed once more, and then reused


def test_another_tenant_s_history_explains_nothing() -> None:
    with live(api_key=("one", "two")) as server, client_of(server, "one") as one, client_of(server, "two") as two:
        ask(one, "Mine", response_format=exactly("secret"), max_tokens=20, extra_body={"session_id": "s"})
        remembered(server, 1)
        reply = ask(two, "Mine", quoted("guess"), "More", extra_body={"session_id": "s"})
        assert cached(reply) == 0 and reply.pando["miss"]["reason"] == "cold" and reply.pando["miss"]["drift"] is None


# ---- counted


def test_the_counters_say_what_the_answers_said() -> None:
    with live() as server, client_of(server) as client:
        go_on(client, "Count these.")  # 12 tokens, cold
        go_on(client, "Count these.")  # 11 of them known
        go_on(client, "Count those.", stream=True).response.read()  # 8 known, then another letter
        ask(client, "Hi", response_format=exactly("x"), max_tokens=20)  # stops
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        server.settle()
        expected = {
            'pando_prompt_tokens_total{source="computed"}': 12 + 1 + 4 + 20,
            'pando_prompt_tokens_total{source="device"}': 11 + 8,
            "pando_cache_hits_total": 2,
            'pando_cache_misses_total{reason="cold"}': 2,
            'pando_cache_misses_total{reason="diverged"}': 1,
            'pando_cache_misses_total{reason="evicted"}': 0,
            "pando_generated_tokens_total": 2 + 2 + 2 + 3,
            'pando_requests_total{outcome="length"}': 3,
            'pando_requests_total{outcome="stop"}': 1,
            'pando_requests_total{outcome="refused"}': 1,
            'pando_requests_refused_total{status="404"}': 1,
            "pando_time_to_first_token_seconds_count": 4,
            "pando_requests_running": 0,
        }
        assert {name: value for name, value in counters(server).items() if name in expected} == expected


def test_what_was_kept_by_a_codec_that_rounds_is_not_called_exact() -> None:
    asked = "A prompt that will be kept by a codec that rounds, and come back."
    with live(engine={"host_gib": 0.01, "store_codec": "int8", "kv_cache_tokens": 512}) as server, client_of(server) as client:
        go_on(client, asked)
        assert go_on(client, asked).pando["reuse"] == "exact"
        wait_for(lambda: server.service.loop.call(lambda engine: engine.tend() is None).result(WAIT))  # all of it is kept
        wait_for(lambda: server.metric('pando_store_saved_pages_total{tier="host"}') >= 3)
        for number in range(12):
            go_on(client, f"{number} others come, and need the room that it has taken in the pool.")
        back = go_on(client, asked)
    assert back.pando["tokens"]["host"] > 48
    assert back.pando["reuse"] == back.usage.prompt_tokens_details.reuse == "rounded"
