"""The next step is asked for before the last one is read: what is told is the same, and nothing of a token too many is left."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pando.engine import sampler
from pando.engine.across import Returning
from pando.engine.engine import Engine
from pando.engine.request import Request, SamplingParams, TokenEvent
from pando.model.load import Model

from ..tiny import CPU, END, drain, greedy, prompt, run, tiny_engine, tiny_model
from .test_engine import Only

pytestmark = pytest.mark.gpu

Events = dict[tuple[str, int], list[TokenEvent]]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, where steps overlap by themselves")
    return tiny_model(size=8 if request.param == "cpu" else 64, device=torch.device(request.param))


def told(events: Events) -> dict[tuple[str, int], list[tuple[Any, ...]]]:
    """All that a client sees of an answer but how long it waited."""
    return {name: [tuple(event._replace(waited=0.0)) for event in each] for name, each in events.items()}


def both(model: Model, requests: list[Request], **options: object) -> tuple[Events, Events]:
    """One by one, and overlapping; where nothing had to be evicted, what was kept must be the same, too."""
    one, other = (tiny_engine(model, overlap=overlap, **options) for overlap in (False, True))
    found = run(one, requests), run(other, requests)
    assert other.pages_in_use == other.tree.pages
    assert one.tree.pages == other.tree.pages or "kv_cache_tokens" in options
    return found


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the device, and what is read from it, in order."""
    log: list[str] = []
    forward, read = engine._forward, Returning.read

    def asked(schedule: Any) -> Tensor:
        log.append("ask")
        return forward(schedule)

    def reading(self: Returning) -> Tensor:
        log.append("read")
        return read(self)

    monkeypatch.setattr(engine, "_forward", asked)
    monkeypatch.setattr(Returning, "read", reading)
    return log


# ---- when


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_settled_while_the_device_computes_and_before_it_is_read(
    model: Model, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(model, overlap=overlap)
    log, settle = watch(engine, monkeypatch), engine.scheduler.settle
    monkeypatch.setattr(engine.scheduler, "settle", lambda schedule: (log.append("settle"), settle(schedule)))
    run(engine, [Request("r", prompt(1), greedy(5))])
    seen = [each for each in log if each != "ask"]
    assert seen == ["settle", "read"] * (len(seen) // 2) and len(seen) >= 10


def test_a_step_is_asked_for_before_the_last_one_is_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, overlap=True)
    log = watch(engine, monkeypatch)
    run(engine, [Request("r", prompt(1), greedy(6))])
    assert log == ["ask", *["ask", "read"] * 5, "read"], "and no step too many, where it is known before how long an answer is"


def test_prompts_that_take_several_steps_overlap_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, overlap=True, max_num_batched_tokens=8)
    log = watch(engine, monkeypatch)
    found = run(engine, [Request("r", prompt(1, 30), greedy(3))])
    assert log == ["ask", *["ask", "read"] * 5, "read"]
    assert told(found) == told(run(tiny_engine(model), [Request("r", prompt(1, 30), greedy(3))]))


def test_only_on_a_gpu_steps_overlap_without_being_asked_to(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model)
    log = watch(engine, monkeypatch)
    run(engine, [Request("r", prompt(1), greedy(6))])
    assert log == (["ask", "read"] * 6 if model.device == CPU else ["ask", *["ask", "read"] * 5, "read"])


def test_what_has_to_be_known_for_the_next_choice_is_read_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while the device computes what it is chosen by."""
    text = model.tokenizer.encode("sesame")
    params = SamplingParams(max_tokens=6, top_p=0.9, seed=3, logprobs=1, repetition_penalty=1.3)
    requests = [Request("r", prompt(1), params, constraint=lambda: Only(text)), Request("other", prompt(2), greedy(9))]
    expected = run(tiny_engine(model, overlap=False), requests)
    engine = tiny_engine(model, overlap=True)
    log, choose = watch(engine, monkeypatch), engine.sampler.choose
    monkeypatch.setattr(engine.sampler, "choose", lambda *given: (log.append("choose"), choose(*given))[1])
    assert told(run(engine, requests)) == told(expected)
    order = re.sub("r+", "r", "".join(each[0] for each in log))  # what was chosen has several parts
    assert order == "ac" + "arc" * 6 + "acr" * 2, "while one is bound, a step is asked for, the one before is read, and only then is chosen"


def test_an_answer_that_ends_by_its_grammar_makes_nobody_compute_twice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: model.tokenizer.encode(name) for name in ("yes", "maybe", "certainly")}
    bound = [
        Request(name, prompt(3), SamplingParams(max_tokens=30, seed=1), constraint=partial(Only, text)) for name, text in texts.items()
    ]
    requests = [*bound, Request("other", prompt(2), greedy(20))]
    expected = run(tiny_engine(model, overlap=False), requests)
    engine = tiny_engine(model, overlap=True)
    log = watch(engine, monkeypatch)
    assert told(run(engine, requests)) == told(expected)
    assert log.count("ask") == 20
    engine.clear_cache()
    assert engine.pages_in_use == 0


@pytest.mark.parametrize(
    "params",
    [
        greedy(6, logprobs=2),
        greedy(6, repetition_penalty=1.3),
        greedy(6, frequency_penalty=0.5),
        greedy(6, min_tokens=6),
        SamplingParams(max_tokens=6, top_p=0.9, seed=3, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=6, temperature=1.5, seed=3, ignore_eos=True, logprobs=0, presence_penalty=2.0, min_tokens=3),
    ],
)
def test_what_is_wanted_of_a_token_that_nobody_knows_yet_keeps_no_step_waiting(
    model: Model, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    requests = [Request("r", prompt(1), params), Request("other", prompt(2), greedy(6))]
    expected = run(tiny_engine(model, overlap=False), requests)
    engine = tiny_engine(model, overlap=True)
    log = watch(engine, monkeypatch)
    assert told(run(engine, requests)) == told(expected)
    assert log[:2] == ["ask", "ask"] and log.count("ask") == 6 and sum(pair == ("ask", "ask") for pair in pairwise(log)) == 1, (
        "one ahead, from the first to the last"
    )


@pytest.mark.parametrize("list_of", [16, 512])
def test_penalties_and_logprobs_are_those_of_the_tokens_that_were_told(model: Model, monkeypatch: pytest.MonkeyPatch, list_of: int) -> None:
    """Also where the next step was fed another token, and is computed again."""
    params = [
        SamplingParams(max_tokens=20, seed=row, top_p=0.8, top_k=row % 3 * 10, temperature=0.7 + row / 4, logprobs=row, ignore_eos=True,
                       repetition_penalty=1.2, frequency_penalty=row / 2, presence_penalty=0.5, n=2)
        for row in range(4)
    ]  # fmt: skip
    requests = [Request(str(row), prompt(row), each) for row, each in enumerate(params)]
    expected = run(tiny_engine(model, overlap=False), requests)
    monkeypatch.setattr(sampler, "SHORTLIST", list_of)
    for options in ({}, {"kv_cache_tokens": 120}):
        found = run(tiny_engine(model, overlap=True, **options), requests)
        for name, events in expected.items():
            assert [event.token for event in found[name]] == [event.token for event in events]
            for one, other in zip(found[name], events, strict=True):
                assert one.logprobs is not None and other.logprobs is not None and one.token in one.logprobs
                assert [(token, each.rank) for token, each in one.logprobs.items()] == [
                    (t, each.rank) for t, each in other.logprobs.items()
                ]
                assert [each.logprob for each in one.logprobs.values()] == pytest.approx(
                    [each.logprob for each in other.logprobs.values()], abs=1e-4
                )


def test_a_request_that_comes_joins_the_next_step_that_is_asked_for(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, overlap=True)
    engine.add(Request("first", prompt(1), greedy(20)))
    for _ in range(3):
        engine.step()
    log = watch(engine, monkeypatch)
    engine.add(Request("second", prompt(2), greedy(3)))
    said = [event.request_id for _ in range(3) for event in engine.step()]
    assert log == ["ask", "read"] * 3
    assert said == ["first", "first", "second", "first", "second"]


def test_steps_overlap_while_others_wait_that_have_no_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"max_num_seqs": 2}, {"kv_cache_tokens": 80}):
        engine = tiny_engine(model, overlap=True, **options)
        log = watch(engine, monkeypatch)
        requests = [Request(str(row), prompt(row), greedy(20)) for row in range(6)]
        found = run(engine, requests)
        assert told(found).keys() == told(run(tiny_engine(model), requests)).keys()
        assert log.count("ask") > 30
        begun = sum(pair == ("ask", "ask") for pair in pairwise(log))  # by a step that follows none
        assert begun < log.count("ask") / 4
        monkeypatch.undo()


def test_a_row_that_waited_for_its_beginning_does_not_wait_for_one_behind_it_that_has_no_room(model: Model) -> None:
    engine = tiny_engine(model, overlap=True, kv_cache_tokens=240)
    trunk = prompt(2, 40)
    engine.add(Request("runs", prompt(1), greedy(60)))
    engine.step()
    for request in (
        Request("trunk", trunk, greedy(50)),
        Request("held", [*trunk, 5], greedy(4)),
        Request("large", prompt(3, 190), greedy(4)),
    ):
        engine.add(request)
    said = {event.request_id for _ in range(8) for event in engine.step()}
    assert said == {"runs", "trunk", "held"}
    assert len(drain(engine)["large", 0]) == 4


def test_steps_overlap_beside_an_answer_whose_prompt_was_scored(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, overlap=True)
    log = watch(engine, monkeypatch)
    found = run(engine, [Request("scored", prompt(1), greedy(6), score=True), Request("free", prompt(2), greedy(6))])
    assert log == ["ask", "read", "ask", *["ask", "read"] * 4, "read"], "only the step that scores is read first"
    monkeypatch.undo()
    alone = run(tiny_engine(model, overlap=False), [Request("scored", prompt(1), greedy(6), score=True)])["scored", 0]
    assert [event.token for event in found["scored", 0]] == [event.token for event in alone]
    assert len(alone[0].prompt_logprobs or ()) == 10
    assert found["scored", 0][0].prompt_logprobs == pytest.approx(alone[0].prompt_logprobs, abs=1e-4)


def test_rows_that_are_scored_and_lose_their_pages_are_told_the_same(model: Model) -> None:
    requests = [Request(str(row), prompt(row, 20), greedy(25), score=row % 2 == 0) for row in range(4)]
    expected = run(tiny_engine(model, overlap=False), requests)
    for options in ({"kv_cache_tokens": 100}, {"kv_cache_tokens": 100, "max_num_batched_tokens": 7}):
        engine = tiny_engine(model, overlap=True, **options)
        found = run(engine, requests)
        assert engine.stats().preemptions
        for name, events in expected.items():
            assert [event.token for event in found[name]] == [event.token for event in events]
            scores = events[-1].prompt_logprobs
            assert found[name][-1].prompt_logprobs == (pytest.approx(scores, abs=1e-4) if scores else scores)


def test_a_row_has_room_as_soon_as_a_pin_runs_out(model: Model) -> None:
    engine, now = tiny_engine(model, overlap=True, kv_cache_tokens=160), [0.0]
    engine.scheduler.clock = lambda: now[0]
    kept = Request("kept", prompt(1, 38), greedy(1))
    run(engine, [kept])
    engine.pin(kept.prompt, kept.tenant, 0, 5.0)
    engine.add(Request("runs", prompt(2, 20), greedy(60)))
    engine.step()
    engine.add(Request("waits", prompt(3, 100), greedy(2)))
    said = {event.request_id for _ in range(5) for event in engine.step()}
    assert said == {"runs"}
    now[0] = 6.0
    engine.expire_pins()
    assert "waits" in {event.request_id for _ in range(5) for event in engine.step()}


# ---- the same answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same(model: Model, temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=row, max_tokens=5 + 3 * row, n=1 + row % 3, logit_bias={row: 2.0}) for row in range(7)
    ]
    requests = [Request(str(row), prompt(row % 3, 9 + row), each) for row, each in enumerate(params)]
    for options in ({}, {"max_num_seqs": 3}, {"kv_cache_tokens": 120}, {"max_num_batched_tokens": 9}, {"prefix_caching": False}):
        one, other = both(model, requests, **options)
        assert {name: [event.token for event in each] for name, each in one.items()} == {
            name: [event.token for event in each] for name, each in other.items()
        }


@pytest.mark.parametrize("list_of", [2, 16, 512])
def test_draws_from_a_short_list_are_amended_where_it_was_too_short(model: Model, monkeypatch: pytest.MonkeyPatch, list_of: int) -> None:
    """What was computed behind a wrong token is computed again."""
    params = [SamplingParams(max_tokens=20, seed=row, top_p=0.8, top_k=row % 3 * 10, temperature=0.4 + row / 4, n=2) for row in range(4)]
    requests = [Request(str(row), prompt(row), each) for row, each in enumerate(params)]
    requests.append(Request("free", prompt(9), greedy(25)))
    expected = run(tiny_engine(model), requests)
    monkeypatch.setattr(sampler, "SHORTLIST", list_of)
    engine, retracted = tiny_engine(model, overlap=True), list[int]()
    retract = engine.scheduler.retract
    monkeypatch.setattr(engine.scheduler, "retract", lambda: (retract(), retracted.append(1)))
    found = run(engine, requests)
    assert {name: [event.token for event in each] for name, each in found.items()} == {
        name: [event.token for event in each] for name, each in expected.items()
    }
    assert bool(retracted) == (list_of < 257)
    assert engine.stats().steps < 60 or retracted
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_row_whose_list_is_always_too_short_does_not_make_others_compute_twice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "SHORTLIST", 16)
    engine = tiny_engine(model, overlap=True)
    log = watch(engine, monkeypatch)
    run(
        engine,
        [Request("wide", prompt(1), SamplingParams(max_tokens=20, top_k=40, seed=1, ignore_eos=True)), Request("r", prompt(2), greedy(20))],
    )
    assert log.count("ask") == 21, "20 tokens each, and one step that was fed a wrong one"


def test_an_answer_that_must_be_known_token_by_token_harms_nobody_beside_it(model: Model) -> None:
    text = model.tokenizer.encode("yes!")
    requests = [
        Request("free", prompt(1), greedy(14)),
        Request("bound", prompt(2, 30), SamplingParams(max_tokens=9, seed=1), constraint=lambda: Only(text)),
        Request("scored", prompt(3), greedy(9), score=True),
        Request("drawn", prompt(4), SamplingParams(max_tokens=14, seed=5, ignore_eos=True)),
        Request("held", prompt(5), SamplingParams(max_tokens=14, min_tokens=4, temperature=0, logit_bias={END: 100.0})),
    ]
    for options in ({}, {"max_num_batched_tokens": 9}):
        one, other = both(model, requests, **options)
        assert {name: [(event.token, event.text, event.finish_reason) for event in each] for name, each in one.items()} == {
            name: [(event.token, event.text, event.finish_reason) for event in each] for name, each in other.items()
        }


# ---- a token too many


def spoken(model: Model, seed: int, count: int) -> str:
    return "".join(event.text for event in run(tiny_engine(model), [Request("r", prompt(seed), greedy(count))])["r", 0])


@pytest.mark.parametrize("length", [7, 8, 9, 10, 11, 12])  # of the prompt: the end falls on every place in a page
@pytest.mark.parametrize("how", ["token", "string", "end"])
def test_what_is_computed_behind_the_end_of_an_answer_is_not_told_and_not_kept(model: Model, how: str, length: int) -> None:
    first = run(tiny_engine(model), [Request("r", prompt(1, length), greedy(12))])["r", 0]
    stop = first[5].token
    params = {
        "token": greedy(12, stop_token_ids=[stop]),
        "string": greedy(12, stop=[first[5].text or first[6].text]),
        "end": SamplingParams(temperature=0, max_tokens=12, logit_bias={END: 100.0}),
    }[how]
    requests = [Request("r", prompt(1, length), params), Request("other", prompt(2, length), greedy(12))]
    one, other = both(model, requests)
    assert told(one) == told(other)
    assert one["r", 0][-1].finish_reason == "stop"
    for overlap in (False, True):
        engine = tiny_engine(model, overlap=overlap)
        said = [event.token for event in run(engine, requests)["r", 0]]
        again = run(engine, [Request("again", [*prompt(1, length), *said, 5], greedy(4))])["again", 0]
        assert again[0].num_cached_tokens == length + len(said) - 1
        assert [event.token for event in again] == [
            event.token for event in run(tiny_engine(model), [Request("x", [*prompt(1, length), *said, 5], greedy(4))])["x", 0]
        ]
        engine.clear_cache()
        assert engine.pages_in_use == 0


def test_a_row_without_numbers_ends_alone_although_it_went_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model, overlap=True)
    others = [Request(f"o{row}", prompt(row), greedy(9)) for row in range(2)]
    expected = run(tiny_engine(model), others)
    forward, steps = engine._forward, [0]

    def spoilt(schedule: Any) -> Tensor:
        logits = forward(schedule)
        steps[0] += 1
        for place, row in enumerate(schedule.ready):
            if row.request_id == "bad" and steps[0] > 3:
                logits[place] = torch.nan
        return logits

    monkeypatch.setattr(engine, "_forward", spoilt)
    found = run(engine, [others[0], Request("bad", prompt(7), greedy(9)), others[1]])
    assert found["bad", 0][-1].finish_reason == "error"
    assert [event.finish_reason for event in found["bad", 0]].count("error") == 1
    for name in expected:
        assert [event.token for event in found[name]] == [event.token for event in expected[name]]


# ---- comings and goings


def test_cancelling_with_a_step_in_flight_leaves_nothing_and_harms_nobody(model: Model) -> None:
    expected = run(tiny_engine(model), [Request("stays", prompt(2), greedy(20))])
    for steps in range(1, 12):
        engine = tiny_engine(model, overlap=True)
        engine.add(Request("goes", prompt(1), greedy(50)))
        engine.add(Request("stays", prompt(2), greedy(20)))
        said = [event for _ in range(steps) for event in engine.step()]
        engine.cancel("goes")
        engine.add(Request("comes", prompt(1), greedy(3)))
        later = drain(engine)
        assert not any(name == "goes" for name, _ in later)
        assert [e.token for e in said if e.request_id == "stays"] + [e.token for e in later["stays", 0]] == [
            e.token for e in expected["stays", 0]
        ]
        assert len(later["comes", 0]) == 3
        engine.clear_cache()
        assert engine.pages_in_use == 0


def test_an_engine_that_was_left_with_a_step_in_flight_answers_the_next_request(model: Model) -> None:
    engine = tiny_engine(model, overlap=True)
    engine.add(Request("goes", prompt(1), greedy(50)))
    for _ in range(4):
        engine.step()
    engine.cancel("goes")
    assert not engine.has_work
    asked = [Request("next", prompt(1), greedy(8))]
    assert [event.token for event in run(engine, asked)["next", 0]] == [e.token for e in run(tiny_engine(model), asked)["next", 0]]


def test_a_step_that_nobody_waits_for_any_more_is_not_taken_for_a_slow_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, measured = tiny_engine(model, overlap=True, host_gib=0.01), list[int]()
    assert engine.store is not None
    monkeypatch.setattr(engine.store.speeds, "computed", lambda tokens, seconds: measured.append(tokens))
    engine.add(Request("goes", prompt(1, 60), greedy(2)))
    engine.step()
    engine.cancel("goes")
    run(engine, [Request("next", prompt(2, 50), greedy(2))])
    assert measured == [50]


def test_a_device_that_fails_behind_a_step_in_flight_costs_time_and_no_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device shows when its tokens are read, or when it is asked for more."""
    requests = [Request(str(row), prompt(row), replace(greedy(15), seed=row, temperature=row % 2)) for row in range(4)]
    expected = run(tiny_engine(model), requests)
    for broken in ("read", "choose"):
        engine, said, failed = tiny_engine(model, overlap=True), dict[str, list[int]](), 0
        for request in requests:
            engine.add(request)
        for number in range(200):
            with monkeypatch.context() as patch:
                if number % 6 == 4:
                    patch.setattr(sampler.Choices if broken == "read" else sampler.Sampler, broken, fail)
                try:
                    events = engine.step()
                except RuntimeError:
                    events, failed = [], failed + 1
            for event in events:
                said.setdefault(event.request_id, []).append(event.token)
        assert failed > 3 and not engine.has_work
        assert said == {name: [event.token for event in each] for (name, _), each in expected.items()}
        engine.clear_cache()
        assert engine.pages_in_use == 0


def fail(*given: object, **named: object) -> None:
    raise RuntimeError("device-side assert triggered")
