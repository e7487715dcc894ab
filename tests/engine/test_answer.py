"""From tokens to text, and when an answer ends: what is streamed, and what is held back."""

import logging
import random
import sys
from typing import Any

import numpy as np
import pytest

from pando.engine.answer import Answer
from pando.engine.request import Request, SamplingParams, TokenEvent
from pando.engine.row import Row
from pando.engine.sampler import NO_TOKEN, Chosen

from ..tiny import END, greedy, run, tiny_engine, tiny_tokenizer

TOKENIZER = tiny_tokenizer()  # a token is a byte


def answer(prompt: str = "?", room: int = 1000, **options: object) -> Answer:
    tokens = TOKENIZER.encode(prompt)
    row = Row("r", 0, tokens, SamplingParams(**options), 0, b"", len(tokens) + room)  # type: ignore[arg-type]
    return Answer(row, TOKENIZER, TOKENIZER.eos)


def told(listener: Answer, text: str, *more: int) -> list[TokenEvent]:
    """Events until the answer ends."""
    events = []
    for token in (*TOKENIZER.encode(text), *more):
        events.append(listener.take(Chosen(token)))
        if events[-1].finish_reason is not None:
            break
    return events


def text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def test_text_streams_as_it_comes() -> None:
    assert [event.text for event in told(answer(), "abc")] == ["a", "b", "c"]


def test_half_a_character_is_never_shown() -> None:
    events = told(answer(), "aé€😀b")
    assert [event.text for event in events if event.text] == ["a", "é", "€", "😀", "b"]


def test_a_character_that_is_never_finished_is_shown_as_a_replacement_at_the_end() -> None:
    half = TOKENIZER.encode("é")[0]
    events = told(answer(room=2), "a", half)
    assert text(events) == "a�"
    assert events[-1].finish_reason == "length"


def test_a_stop_string_over_several_tokens_is_cut_off_and_never_shown_in_part() -> None:
    events = told(answer(stop="END"), "helloEND and more")
    assert [event.text for event in events] == ["h", "e", "l", "l", "o", "", "", ""]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "END")


def test_what_only_looked_like_a_stop_string_is_shown_once_it_is_clear() -> None:
    events = told(answer(stop="END"), "an ENEND")
    assert [event.text for event in events] == ["a", "n", " ", "", "", "EN", "", ""]
    assert text(events) == "an EN"


def test_what_is_held_back_is_shown_when_the_answer_ends_otherwise() -> None:
    assert text(told(answer(stop="END"), "an EN", END)) == "an EN"
    assert text(told(answer(stop="END"), "an EN")) == "an "
    assert text(told(answer(room=5, stop="END"), "an EN")) == "an EN"


def test_of_several_stop_strings_the_first_in_the_text_ends_it() -> None:
    events = told(answer(stop=["three", "two"]), "one two three")
    assert (text(events), events[-1].stop_reason) == ("one ", "two")


def test_the_stop_string_is_shown_where_that_is_wanted() -> None:
    events = told(answer(stop=["two"], include_stop_str_in_output=True), "one two three")
    assert text(events) == "one two"


def test_a_stop_string_may_be_cut_through_a_character() -> None:
    events = told(answer(stop="€"), "a€b")
    assert text(events) == "a"
    assert len(events) == 4


@pytest.mark.parametrize("included", [False, True])
def test_whatever_is_said_the_text_ends_where_the_first_stop_does(included: bool) -> None:
    chance = random.Random(1)
    stopped = 0
    for _ in range(300):
        said = "".join(chance.choice("aab") for _ in range(30))
        stops = ["".join(chance.choice("aab") for _ in range(chance.randint(1, 6))) for _ in range(chance.randint(1, 3))]
        events = told(answer(stop=stops, include_stop_str_in_output=included, room=30), said)
        ends = [said.find(stop) + len(stop) for stop in stops if stop in said]
        shown, so_far = [], ""
        for event in events:
            so_far += event.text
            shown.append(so_far)
        if not ends:
            assert text(events) == said
            continue
        stopped += 1
        end = min(ends)
        begin = min(end - len(stop) for stop in stops if said[:end].endswith(stop))
        assert text(events) == said[: end if included else begin]
        assert all(len(part) <= begin for part in shown[:-1]), "a part of the stop string was shown"
    assert stopped > 100


def test_the_end_token_ends_an_answer_and_is_not_shown() -> None:
    events = told(answer(), "ab", END)
    assert (text(events), events[-1].finish_reason, events[-1].stop_reason) == ("ab", "stop", None)
    assert events[-1].token == END


def test_the_end_token_is_passed_over_where_it_is_to_be_ignored() -> None:
    events = told(answer(ignore_eos=True), "a", END, *TOKENIZER.encode("b"))
    assert (text(events), events[-1].finish_reason) == ("ab", None)
    shown = told(answer(ignore_eos=True, skip_special_tokens=False), "a", END, *TOKENIZER.encode("b"))
    assert text(shown) == "a<end>b"


def test_a_stop_token_ends_an_answer_and_says_which() -> None:
    [stop] = TOKENIZER.encode("!")
    events = told(answer(stop_token_ids=[stop]), "ab!c")
    assert (text(events), events[-1].finish_reason, events[-1].stop_reason) == ("ab", "stop", stop)
    assert text(told(answer(stop_token_ids=[stop], include_stop_str_in_output=True), "ab!c")) == "ab!"


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize(("included", "said"), [(False, "ab"), (True, "ab<end>")])
def test_a_stop_that_names_a_special_token_ends_an_answer_there_though_it_is_not_shown(skipped: bool, included: bool, said: str) -> None:
    how = {"skip_special_tokens": skipped, "include_stop_str_in_output": included}
    events = told(answer(stop=["bc", "<end>"], ignore_eos=True, **how), "ab", END, *TOKENIZER.encode("c"))
    assert (text(events), events[-1].finish_reason, events[-1].stop_reason) == (said, "stop", "<end>")
    late = told(answer(stop="<end>", ignore_eos=True, min_tokens=3, **how), "a", END, *TOKENIZER.encode("b"), END)
    assert text(late) == ("ab" if skipped else "a<end>b") + "<end>" * included and late[-1].stop_reason == "<end>"


def test_a_stop_that_is_the_models_own_end_ends_an_answer_as_that() -> None:
    events = told(answer(stop="<end>"), "ab", END)
    assert (text(events), events[-1].finish_reason, events[-1].stop_reason) == ("ab", "stop", None)


def test_before_min_tokens_nothing_stops_an_answer() -> None:
    [stop] = TOKENIZER.encode("!")
    events = told(answer(stop=["b"], stop_token_ids=[stop], min_tokens=5), "ab!cdeb")
    assert text(events) == "ab!cde"
    assert events[-1].stop_reason == "b"


def test_an_answer_ends_when_there_is_no_more_room() -> None:
    events = told(answer(room=3), "abcdef")
    assert (text(events), events[-1].finish_reason) == ("abc", "length")


def test_a_stop_string_with_the_last_token_counts_as_a_stop() -> None:
    assert told(answer(room=3, stop="c"), "abc")[-1].finish_reason == "stop"


def test_a_token_that_could_not_be_chosen_ends_an_answer_as_an_error() -> None:
    listener = answer(stop="xy")
    told(listener, "ax")
    event = listener.take(Chosen(NO_TOKEN))
    assert (event.finish_reason, event.text) == ("error", "x")
    assert listener.row.output == TOKENIZER.encode("ax"), "it is no token of the answer"


class Broken:
    """A grammar that fails at the second token."""

    def __init__(self) -> None:
        self.left = 1

    def allowed(self) -> Any:
        return np.full(9, -1, dtype=np.int32)

    is_broken = False

    def accept(self, token: int) -> bool:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no such rule")
        return False


class Lost(Broken):
    """A grammar that nobody can follow any further than its second token, where the answer may only end."""

    @property
    def is_broken(self) -> bool:  # type: ignore[override]
        return self.left < 0

    def accept(self, token: int) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_that_left_its_grammar_broke_off_and_did_not_stop(ends: bool) -> None:
    listener = answer()
    listener.row.constraint = Lost()
    events = [listener.take(Chosen(token)) for token in (*TOKENIZER.encode("a"), END if ends else TOKENIZER.encode("b")[0])]
    assert [event.finish_reason for event in events] == [None, "length"]
    assert "".join(event.text for event in events) == ("a" if ends else "ab")


def test_an_answer_that_cannot_go_on_ends_as_an_error_and_says_why_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("pando"), "propagate", True)
    listener = answer()
    listener.row.constraint = Broken()
    events = told(listener, "abc")
    assert [(event.text, event.finish_reason) for event in events] == [("a", None), ("", "error")]
    assert "answer 0 of request r cannot go on" in caplog.text and "no such rule" in caplog.text


@pytest.mark.usefixtures("overlap")
def test_an_answer_that_cannot_go_on_costs_the_others_of_its_step_no_token_and_no_cache() -> None:
    prompts = {name: [place * 7 + ord(name[0]) for place in range(12)] for name in ("first", "broken", "last")}
    expected = {name: run(tiny_engine(), [Request(name, prompt, greedy(8))])[name, 0] for name, prompt in prompts.items()}
    engine = tiny_engine()
    found = run(engine, [Request(name, prompts[name], greedy(8), constraint=Broken if name == "broken" else None) for name in prompts])
    for name in ("first", "last"):
        assert [event.token for event in found[name, 0]] == [event.token for event in expected[name]]
    assert [event.finish_reason for event in found["broken", 0]] == [None, "error"]
    assert engine.tree.pages > 0, "nothing is wrong with what was computed"
    assert run(engine, [Request("again", [*prompts["broken"], 1], greedy(1))])["again", 0][0].num_cached_tokens == 12


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    whole = TOKENIZER.encode("é")
    row = Row("r", 0, [1, whole[0]], SamplingParams(), 0, b"", sys.maxsize)
    assert Answer(row, TOKENIZER, ()).take(Chosen(whole[1])).text == "é"


def test_logprobs_carry_the_text_of_their_tokens() -> None:
    a, b = TOKENIZER.encode("ab")
    event = answer(logprobs=1).take(Chosen(a, -0.5, [(a, -0.5, 1), (b, -1.5, 2)]))
    assert event.logprobs is not None
    assert {token: (each.logprob, each.rank, each.decoded_token) for token, each in event.logprobs.items()} == {
        a: (-0.5, 1, "a"),
        b: (-1.5, 2, "b"),
    }
