"""The offline interface: prompts of every kind in, answers out, and an engine that stays usable whatever was asked."""

import gc
import inspect
import math
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pando.config import EngineConfig, options
from pando.engine import llm as llm_module
from pando.engine.llm import LLM
from pando.engine.request import Request, SamplingParams
from pando.errors import (
    BadModelFile,
    Closed,
    ForeignProcess,
    InputError,
    InvalidOption,
    InvalidPrompt,
    InvalidSampling,
    PoolTooSmall,
    PromptTooLong,
)
from pando.kernels.reference import Read, attend
from pando.model.decoder import Step

from ..tiny import DEVICE, END, VOCAB, at_rest, greedy, tiny_llm, tiny_model, write_checkpoint

pytestmark = pytest.mark.usefixtures("overlap")

HELLO = "Hello, world. How are you today?"


def ids(llm: LLM, text: str = HELLO) -> list[int]:
    return llm.tokenizer.encode(text)


def direct(tokens: list[int]) -> torch.Tensor:
    """The logits of every position [T, V], from the decoder and the definition of attention, without an engine."""
    decoder = tiny_model().decoder
    with DEVICE:
        count, geometry = len(tokens), decoder.geometry
        shape = (count, geometry.kv_heads, geometry.head_dim)
        layers = [(torch.zeros(shape), torch.zeros(shape)) for _ in decoder.layers]
        at = torch.arange(count)
        reads = [Read(at, 0, at, torch.zeros_like(at))]

        class Pool:
            def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
                return layers[index]

        step = Step(torch.tensor(tokens), at, at, at, lambda q, turned, k, v: attend(q, k, v, reads, at, geometry))
        return decoder.forward(step, Pool()).cpu()


# ---- prompts


def test_a_prompt_may_be_text_or_tokens_alone_or_in_a_list_or_a_mapping() -> None:
    llm = tiny_llm()
    tokens = ids(llm)
    forms: list[Any] = [
        HELLO,
        tokens,
        tuple(tokens),
        {"prompt": HELLO},
        {"prompt_token_ids": tokens},
        [HELLO],
        [tokens],
        [{"prompt": HELLO}],
        [{"prompt_token_ids": tokens}],
    ]
    answers = [llm.generate(form, greedy(6)) for form in forms]
    assert [len(outputs) for outputs in answers] == [1] * len(forms)
    assert {tuple(outputs[0].outputs[0].token_ids) for outputs in answers} == {tuple(answers[0][0].outputs[0].token_ids)}
    assert [outputs[0].prompt_token_ids for outputs in answers] == [tokens] * len(forms)
    assert [outputs[0].prompt for outputs in answers] == [HELLO, None, None, HELLO, None, HELLO, None, HELLO, None]


def test_tokens_may_be_numbers_of_numpy_and_arrays() -> None:
    llm = tiny_llm()
    tokens = ids(llm)
    numbers = np.array(tokens, dtype=np.int32)
    forms: list[Any] = [numbers, list(numbers), [numbers], [list(numbers)], {"prompt_token_ids": numbers}, torch.tensor(tokens)]
    [expected] = llm.generate(tokens, greedy(6))
    for [found] in [llm.generate(form, greedy(6)) for form in forms]:
        assert found.prompt_token_ids == tokens and found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.score(numbers) == pytest.approx(llm.score(tokens), abs=1e-4)  # type: ignore[arg-type]
    assert {type(token) for token in found.prompt_token_ids} == {int}


@pytest.mark.parametrize("wrong", [np.array([[1, 2], [3, 4]]), np.array([1.5, 2.0]), np.array([True, False]), np.array(5), [np.array([])]])
def test_an_array_that_is_no_prompt_is_refused(wrong: Any) -> None:
    """Of several prompts in one array the shorter ones are filled up with something, which is no part of them."""
    with pytest.raises(InvalidPrompt):
        tiny_llm().generate(wrong, greedy(2))


def test_prompts_of_different_kinds_are_answered_together_and_in_order() -> None:
    llm = tiny_llm()
    prompts: list[Any] = ["one", ids(llm, "two"), {"prompt": "three"}]
    together = llm.generate(prompts, greedy(6))
    alone = [tiny_llm().generate(prompt, greedy(6))[0] for prompt in prompts]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]
    assert all(o.finished for o in together)


def test_no_prompts_no_answers() -> None:
    assert tiny_llm().generate([]) == []


@pytest.mark.parametrize(
    "prompt",
    ["", "\ud800", b"bytes", None, 5, [""], [[]], [None], [VOCAB], [-1], [True], [1.5], ["fine", [1, "a"]]],
)
def test_what_is_no_prompt_is_refused_and_the_engine_stays_usable(prompt: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidPrompt):
        llm.generate(prompt, greedy(2))
    assert at_rest(llm)
    assert llm.generate(HELLO, greedy(2))[0].finished


def test_several_texts_where_one_prompt_is_wanted_are_told_apart_from_wrong_tokens() -> None:
    llm = tiny_llm()
    for ask in (llm.stream, llm.score):
        with pytest.raises(InvalidPrompt, match="found a list of texts"):
            ask(["one", "two"])  # type: ignore[arg-type]
    assert at_rest(llm)


def test_none_in_a_mapping_is_the_same_as_leaving_it_out() -> None:
    both, alone = tiny_llm().generate([{"prompt": "ab", "prompt_token_ids": None}, {"prompt": "ab"}], greedy(2))
    assert both.prompt_token_ids == alone.prompt_token_ids


@pytest.mark.parametrize("ask", ["generate", "stream", "score"])
def test_text_that_is_called_tokens_is_refused_with_where_it_goes(ask: str) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidPrompt, match="'prompt_token_ids' is text; give a list of tokens, or the text as 'prompt'"):
        getattr(llm, ask)({"prompt_token_ids": "Hello"})
    assert at_rest(llm)


@pytest.mark.parametrize("prompt", [{}, {"text": "x"}, {"prompt": 5}, {"prompt_token_ids": 5}, {"prompt_token_ids": [VOCAB]}])
def test_a_mapping_that_names_no_prompt_is_refused(prompt: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidPrompt):
        llm.generate(["fine", prompt], greedy(2))
    assert at_rest(llm)


def test_one_bad_prompt_among_good_ones_is_refused_before_any_is_begun() -> None:
    llm = tiny_llm(kv_cache_tokens=128)
    cases: list[tuple[type[InputError], Any]] = [(InvalidPrompt, [VOCAB]), (PromptTooLong, [1] * 600), (PoolTooSmall, [1] * 127)]
    for error, bad in cases:
        with pytest.raises(error):
            llm.generate(["good", bad, "good too"], greedy(4))
        assert llm.engine.stats().steps == 0
        assert at_rest(llm)
    assert len(llm.generate(["good", "good too"], greedy(4))) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [("", "the prompt is empty"), ("a" * 600, "the prompt has 600 tokens"), ([VOCAB], f"{VOCAB} is no token"), (5, "found int")],
)
def test_of_several_prompts_the_one_that_is_refused_is_named(bad: Any, says: str) -> None:
    llm = tiny_llm()
    with pytest.raises(InputError, match=rf"^prompts\[2\]: .*{says}"):
        llm.generate(["good", "good too", bad, "never looked at"], greedy(4))
    with pytest.raises(InputError, match=f"^(?!prompts).*{says}"):  # nobody asks which of one
        llm.generate(bad, greedy(4))


@pytest.mark.parametrize(("bad", "says"), [({"role": "user"}, "message 0"), ({"role": "user", "content": "a" * 600}, "the prompt has")])
def test_of_several_conversations_the_one_that_is_refused_is_named(bad: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=rf"^prompts\[1\]: {says}"):
        tiny_llm().chat([[{"role": "user", "content": "Hi"}], [bad]], greedy(4))


# ---- sampling


def test_each_prompt_may_have_its_own_params() -> None:
    outputs = tiny_llm().generate(["a", "b"], [greedy(3), greedy(5)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 5]


@pytest.mark.parametrize(("params", "says"), [([greedy()], "1 sampling params for 2"), ({"n": 1}, "found dict"), ([1, 2], "found list")])
def test_params_that_do_not_fit_the_prompts_are_refused(params: Any, says: str) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidSampling, match=says):
        llm.generate(["a", "b"], params)
    assert at_rest(llm)


def test_an_answer_says_why_it_ended() -> None:
    llm = tiny_llm()
    [output] = llm.generate(HELLO, greedy(7))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (7, "length")
    third = output.outputs[0].token_ids[2]
    [stopped] = llm.generate(HELLO, greedy(7, stop_token_ids=[third]))
    at = output.outputs[0].token_ids.index(third)
    assert stopped.outputs[0].token_ids == output.outputs[0].token_ids[: at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)
    [ended] = llm.generate(HELLO, SamplingParams(temperature=0, logit_bias={END: 100.0}))
    assert (ended.outputs[0].text, ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ("", [END], "stop")


def test_what_was_closed_answers_no_more_and_says_so() -> None:
    with tiny_llm() as llm:
        talk, stream = [{"role": "user", "content": "hi"}], llm.stream(HELLO, greedy(8))
        next(stream)
    for ask in (
        lambda: next(stream),
        lambda: llm.generate("hi"),
        lambda: llm.chat(talk),
        lambda: llm.stream("hi"),
        lambda: llm.score(HELLO),
    ):
        with pytest.raises(Closed, match="was closed"):
            ask()
    llm.close()  # a second time does no harm
    assert at_rest(llm)


def test_a_stop_string_ends_the_text_before_itself() -> None:
    llm = tiny_llm()
    spelt = dict.fromkeys(ids(llm, "abc"), 60.0)  # nothing else is ever said
    params = {"temperature": 1.0, "seed": 3, "logit_bias": spelt, "max_tokens": 20}
    [whole] = llm.generate(HELLO, SamplingParams(**params))
    said = whole.outputs[0].text
    assert "bbc" in said
    assert set(said) == set("abc")
    [cut] = llm.generate(HELLO, SamplingParams(**params, stop="bbc"))
    assert (cut.outputs[0].text, cut.outputs[0].stop_reason) == (said[: said.index("bbc")], "bbc")
    [kept] = llm.generate(HELLO, SamplingParams(**params, stop="bbc", include_stop_str_in_output=True))
    assert kept.outputs[0].text == said[: said.index("bbc") + 3]


def test_without_max_tokens_an_answer_fills_the_context() -> None:
    llm = tiny_llm(max_model_len=64)
    [output] = llm.generate(HELLO, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64


def test_logprobs_are_those_of_the_model_one_mapping_per_token() -> None:
    llm = tiny_llm()
    [output] = llm.generate(HELLO, greedy(5, logprobs=3))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    scores = direct([*output.prompt_token_ids, *answer.token_ids])[len(output.prompt_token_ids) - 1 :].log_softmax(-1)
    assert len(answer.logprobs) == 5
    for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        best = scores[place].topk(3).indices.tolist()
        assert list(found) == best, "greedy: the chosen token is the likeliest"
        assert [found[each].rank for each in best] == [1, 2, 3]
        assert found[token].logprob == pytest.approx(float(scores[place, token]), abs=1e-4)
    chosen = [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))


def test_logprobs_are_left_out_unless_they_are_wanted() -> None:
    [output] = tiny_llm().generate(HELLO, greedy(2))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    [bare] = tiny_llm().generate(HELLO, greedy(2, logprobs=0))
    assert [len(each) for each in bare.outputs[0].logprobs or ()] == [1, 1]


def test_several_answers_to_one_prompt_differ_and_repeat_with_the_seed() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    [first] = tiny_llm().generate(HELLO, params)
    [again] = tiny_llm(seed=9).generate(HELLO, params)
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) == 3
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in again.outputs]


def test_cached_tokens_are_reported() -> None:
    llm = tiny_llm()
    assert [llm.generate(HELLO, greedy(2))[0].num_cached_tokens for _ in range(2)] == [0, len(ids(llm)) - 1]
    off = tiny_llm(prefix_caching=False)
    assert [off.generate(HELLO, greedy(2))[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_the_salt_of_the_options_is_part_of_every_key() -> None:
    model = tiny_model()
    mine, yours = (tiny_llm(model, cache_salt=salt) for salt in ("mine", "yours"))
    roots = []
    for llm in (mine, yours):
        llm.generate(HELLO, greedy(1))
        roots.append({stem.segment.key for stem in llm.engine.tree.stems()})
    assert roots[0].isdisjoint(roots[1])


# ---- conversations


def test_a_developer_is_the_system_for_the_template_as_on_the_server() -> None:
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [output] = tiny_llm().chat(talk, greedy(2))
    assert output.prompt == "system: Be brief.\nuser: hi\nassistant: "


def test_a_conversation_is_answered_through_the_template() -> None:
    llm = tiny_llm()
    talk = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(talk, greedy(4))
    assert output.prompt == "user: hi\nassistant: "
    assert output.outputs[0].text == llm.generate("user: hi\nassistant: ", greedy(4))[0].outputs[0].text


def test_several_conversations_are_answered_together() -> None:
    llm = tiny_llm()
    talks = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    assert [output.prompt for output in llm.chat(talks, greedy(2))] == ["user: hi\nassistant: ", "user: ho\nassistant: "]


@pytest.mark.parametrize("messages", [[], "hi", [[]], [["hi"]], [{"content": "hi"}], [5]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidPrompt):
        llm.chat(messages)
    assert at_rest(llm)


def test_an_iterator_is_no_conversation() -> None:
    with pytest.raises(InvalidPrompt):
        tiny_llm().chat(iter([{"role": "user", "content": "hi"}]))  # type: ignore[arg-type]


def test_the_second_turn_reuses_the_first() -> None:
    llm = tiny_llm()
    talk = [{"role": "user", "content": "hi"}]
    [first] = llm.chat(talk, greedy(8))
    known = len(first.prompt_token_ids)
    talk += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert llm.chat(talk, greedy(2))[0].num_cached_tokens >= known


# ---- streams


def test_a_stream_says_what_generate_says() -> None:
    llm = tiny_llm()
    events = list(llm.stream(HELLO, greedy(9)))
    [output] = llm.generate(HELLO, greedy(9))
    assert [event.token for event in events] == output.outputs[0].token_ids
    assert "".join(event.text for event in events) == output.outputs[0].text
    assert [event.finish_reason for event in events] == [None] * 8 + ["length"]


def test_a_stream_of_several_answers_ends_with_the_last() -> None:
    events = list(tiny_llm().stream(HELLO, greedy(4, n=3)))
    assert sorted(event.index for event in events) == [0] * 4 + [1] * 4 + [2] * 4


def test_a_bad_prompt_is_refused_when_the_stream_is_asked_for() -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidPrompt):
        llm.stream([VOCAB])
    assert at_rest(llm)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_cancels_the_request(taken: int) -> None:
    llm = tiny_llm()
    events = llm.stream(HELLO, greedy(50))
    for _ in range(taken):
        next(events)
    assert llm.engine.has_work
    events.close()  # type: ignore[attr-defined]
    assert at_rest(llm)


def test_streams_taken_in_turns_lose_nothing_to_one_another() -> None:
    llm = tiny_llm()
    expected = [llm.generate(text, greedy(8))[0].outputs[0].token_ids for text in ("one", "two")]
    streams = [llm.stream(text, greedy(8)) for text in ("one", "two")]
    pairs = list(zip(*streams, strict=True))
    assert [[pair[i].token for pair in pairs] for i in range(2)] == expected


def test_a_stream_goes_on_after_others_were_answered_meanwhile() -> None:
    llm = tiny_llm()
    expected = llm.generate("one", greedy(8))[0].outputs[0].token_ids
    events = llm.stream("one", greedy(8))
    said = [next(events).token]
    llm.generate("two", greedy(30))  # long enough for the first to end
    assert said + [event.token for event in events] == expected
    assert at_rest(llm)


def test_a_conversation_streams_too() -> None:
    llm = tiny_llm()
    talk = [{"role": "user", "content": "hi"}]
    assert "".join(event.text for event in llm.stream_chat(talk, greedy(6))) == llm.chat(talk, greedy(6))[0].outputs[0].text


# ---- scores


@pytest.mark.parametrize("budget", [64, 7])
def test_scores_are_the_logprobs_of_a_forward_pass_cached_or_not(budget: int) -> None:
    llm = tiny_llm(max_num_batched_tokens=budget)
    tokens = ids(llm)
    expected = direct(tokens)[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    for _ in range(2):
        scores = llm.score(tokens)
        assert scores == pytest.approx(expected, abs=1e-4)
        assert math.fsum(scores) < 0
    assert at_rest(llm)


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_what_fills_the_whole_context_is_scored_and_one_token_more_is_refused(positions: str) -> None:
    llm = tiny_llm(tiny_model(positions=positions), max_model_len=64)
    tokens = [(7 * place) % 250 for place in range(65)]
    scores = llm.score(tokens[:64])
    assert scores[:62] == pytest.approx(llm.score(tokens[:63]), abs=1e-4) and len(scores) == 63 and scores[62] < 0
    with pytest.raises(PromptTooLong, match="has 65 tokens and the context holds 64; shorten the prompt by 1 token"):
        llm.score(tokens)
    with pytest.raises(PromptTooLong, match="one of them for the answer"):
        llm.generate(tokens[:64], greedy(1))
    assert at_rest(llm)


def test_the_last_token_of_the_context_is_scored_as_in_a_forward_pass() -> None:
    tokens = ids(tiny_llm())
    expected = direct(tokens)[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert tiny_llm(max_model_len=len(tokens)).score(tokens) == pytest.approx(expected, abs=1e-4)


def test_what_fills_the_context_is_scored_where_the_cache_holds_no_more_than_one() -> None:
    """It waited for the room of an answer, for ever, and whoever came behind it, too."""
    llm = tiny_llm(max_model_len=64, kv_cache_tokens=64)
    llm.engine.add(Request("r", range(64), greedy(1), score=True))
    [event] = [event for _ in range(9) for event in llm.engine.step()]
    assert list(event.prompt_logprobs or ()) == pytest.approx(tiny_llm(max_model_len=64).score(range(64)), abs=1e-4)


def test_a_text_is_scored_as_its_tokens() -> None:
    llm = tiny_llm()
    assert llm.score(HELLO) == pytest.approx(llm.score(ids(llm)), abs=1e-4)


def test_one_token_has_no_score() -> None:
    assert tiny_llm().score([5]) == []


# ---- progress


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    llm = tiny_llm()
    llm.generate(["a", "b", "c"], greedy(2))
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"], greedy(2), use_tqdm=True)
    assert "3/3" in capsys.readouterr().err


# ---- threads, and what cannot be meant


@pytest.mark.parametrize(
    ("cores", "wanted", "used"), [(4.0, None, [4]), (2.9, None, [2]), (0.5, None, [1]), (8.0, None, []), (1.0, 2, [2])]
)
def test_no_more_threads_than_a_container_may_keep_busy_unless_that_is_said(
    monkeypatch: pytest.MonkeyPatch, cores: float, wanted: int | None, used: list[int]
) -> None:
    """With more, those that are stopped when its time is over are waited for by the others, who use up the next one's."""
    told = list[int]()
    monkeypatch.setattr(llm_module, "allowed_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    tiny_llm(threads=wanted)
    assert told == used


def test_several_threads_may_ask_at_the_same_time() -> None:
    llm = tiny_llm()
    prompts = [[(seed * 37 + place * 11) % 250 for place in range(10 + seed)] for seed in range(6)]
    expected = [tiny_llm().generate(prompt, greedy(12))[0].outputs[0].token_ids for prompt in prompts]

    def work(seed: int) -> list[list[int]]:
        found = [llm.generate(prompts[seed], greedy(12))[0].outputs[0].token_ids]
        return [*found, [event.token for event in llm.stream(prompts[seed], greedy(12))]]

    with ThreadPoolExecutor(6) as threads:
        for seed, found in enumerate(threads.map(work, range(6))):
            assert list(map(list, found)) == [list(expected[seed])] * 2
    assert at_rest(llm)


@pytest.mark.parametrize("wrong", [[greedy(1), greedy(1)], {"temperature": 0}])
def test_a_stream_takes_one_set_of_sampling_params(wrong: Any) -> None:
    llm = tiny_llm()
    for ask in (lambda: llm.stream(HELLO, wrong), lambda: llm.stream_chat([{"role": "user", "content": "hi"}], wrong)):
        with pytest.raises(InvalidSampling):
            ask()
    assert at_rest(llm)


def test_a_message_is_no_conversation() -> None:
    llm = tiny_llm()
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(InputError):
            ask({"role": "user", "content": "hi"})
    for wrong in (5, None):
        with pytest.raises(InputError):
            llm.schemas.add(wrong)


def test_a_window_that_the_model_was_not_made_for_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidOption, match="max_model_len is 129 and the model was made for 128"):
        LLM(str(tmp_path), max_model_len=129)
    with pytest.raises(BadModelFile):
        LLM(tmp_path, max_model_len=128)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"kv_cache_dtype": "fp8"}, "unknown option 'kv_cache_dtype'; it is kv_dtype here"),
        ({"model_path": "x"}, "it is model here"),
        ({"enforce_eager": True}, "it is cuda_graphs=False here"),
        ({"tensor_parallel_size": 2}, "Pando runs on one GPU: leave it out"),
        ({"max_num_seq": 4}, "did you mean max_num_seqs?"),
        ({"context_shift": True}, "known are model, device, "),  # only a command has what it is called there
    ],
)
def test_an_option_that_there_is_not_is_refused_with_the_name_that_it_has_here(option: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(told)):
        LLM("nowhere", **option)


@pytest.mark.parametrize(
    ("param", "told"),
    [
        ({"max_new_tokens": 5}, "unknown sampling param 'max_new_tokens'; did you mean max_tokens?"),
        ({"repeat_penalty": 1.1}, "did you mean repetition_penalty?"),
        ({"temprature": 0}, "did you mean temperature?"),
        ({"beams": 4}, "known are n, temperature, "),
        ({"structured_outputs": None}, "give them to generate, chat or the stream"),
        ({"guided_decoding": None}, "give StructuredOutputsParams to generate, chat or the stream"),
        ({"prompt_logprobs": 1}, "llm.score(prompt) gives the logprobs of a prompt"),
        ({"best_of": 4}, "ask for several answers with n"),
    ],
)
def test_a_sampling_param_that_there_is_not_is_refused_with_what_was_meant(param: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSampling, match=re.escape(told)):
        SamplingParams(**param)


def test_help_shows_what_can_be_given() -> None:
    assert [*inspect.signature(LLM).parameters] == [option.name for option in options()]
    assert [*inspect.signature(SamplingParams).parameters] == [param.name for param in fields(SamplingParams)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_is_forked_is_told_to_make_its_own(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_tokens=1024, page_size=16, disk_gib=0.01, disk_dir=str(tmp_path))
    with LLM.from_config(config, tiny_model()) as llm:
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        first = llm.generate([[1, 2, 3] * 10], params)[0].outputs[0].token_ids
        stream = llm.stream([1, 2, 3] * 10, params)
        child = os.fork()
        if not child:  # nothing of a test may go on here
            with suppress(BaseException):
                stream.close()  # type: ignore[attr-defined]  # as Python does it when it ends: nothing is left to say
                try:
                    llm.generate([[1, 2, 3] * 10], params)
                except ForeignProcess as error:
                    llm.close()  # leaves it to the process that made it
                    os._exit(7 if str(os.getppid()) in str(error) and error.__context__ is None else 1)
            os._exit(1)
        until = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 7
        assert [event.token for event in stream] == first
        assert llm.generate([[1, 2, 3] * 10], params)[0].outputs[0].token_ids == first


def test_one_that_is_forgotten_gives_back_its_memory_and_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    below = {"disk_dir": str(tmp_path / "disk"), "remote": str(tmp_path / "remote")}
    config = EngineConfig(kv_cache_tokens=1024, page_size=16, host_gib=0.01, disk_gib=0.01, **below)
    llm = LLM.from_config(config, tiny_model())
    llm.generate([[1, 2, 3] * 20], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert llm.engine.store is not None
    kept = [weakref.ref(each) for each in (llm.engine.pool, llm.engine.store, llm.engine.store.transfer.host)]
    assert {"pando-look", "pando-save"} <= {thread.name for thread in set(threading.enumerate()) - before}
    del llm
    until = time.monotonic() + 30  # what is on its way is finished first
    while time.monotonic() < until and any(each() is not None for each in kept):
        gc.collect()
        time.sleep(0.01)
    assert not [each() for each in kept if each() is not None]
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pando-")]
