"""The engine as its users meet it: what is computed, what is kept, what is refused, and that one request never harms another."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pando.engine import admission, scores
from pando.engine.admission import PUBLIC
from pando.engine.engine import Engine
from pando.engine.facts import StepFacts
from pando.engine.request import Miss, Request, SamplingParams, Tenant, TokenEvent, Truncation
from pando.engine.row import Schedule
from pando.errors import InputError, InvalidOption, InvalidPrompt, InvalidSampling, PoolTooSmall, PromptTooLong, QuotaExceeded
from pando.model.decoder import Decoder, Step
from pando.model.load import Model

from ..tiny import DEVICE, END, VOCAB, drain, greedy, run, tiny_engine, tiny_model, tokens

pytestmark = pytest.mark.usefixtures("overlap")

PAGE = 4
TRUNK = [(7 * place + place // 9) % 256 for place in range(40)]  # ten pages


class Watched:
    """A decoder that counts the tokens it computes, and whose logits a test may spoil."""

    def __init__(self, decoder: Decoder, spoil: Callable[[Step, Tensor], None] = lambda step, logits: None) -> None:
        self._decoder, self._spoil = decoder, spoil
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, step: Step, pool: Any) -> Tensor:
        self.tokens += len(step.tokens)
        logits = self._decoder.forward(step, pool)
        self._spoil(step, logits)
        return logits


def watched(model: Model | None = None, **options: Any) -> tuple[Engine, Watched]:
    model = model or tiny_model()
    decoder = Watched(model.decoder)
    engine = tiny_engine(replace(model, decoder=decoder), **options)  # type: ignore[arg-type]
    decoder.tokens = 0  # a GPU computes the largest step before it serves
    return engine, decoder


def ask(engine: Engine, prompt: list[int], count: int = 1, **more: Any) -> list[TokenEvent]:
    """One request, alone."""
    return run(engine, [Request("only", prompt, greedy(count), **more)])["only", 0]


def peak(engine: Engine, requests: list[Request]) -> int:
    """The most pages in use after any step."""
    for request in requests:
        engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.pages_in_use)
    return most


# ---- sharing


def test_what_is_kept_of_long_prompts_is_not_looked_through_for_garbage() -> None:
    engine = tiny_engine(max_num_seqs=4)
    for name in range(3):
        engine.add(Request(str(name), [7] * 200, greedy(5)))
    engine.step()
    gc.collect()
    held = [thing for row in engine.answers for thing in gc.get_referents(row)]
    assert len(engine.answers) == 3
    assert not [thing for thing in held if gc.is_tracked(thing) and len(gc.get_referents(thing)) >= 200]


def test_two_requests_that_arrive_together_compute_what_they_share_once() -> None:
    engine, decoder = watched()
    run(engine, [Request("a", [*TRUNK, 1, 2, 3], greedy(1)), Request("b", [*TRUNK, 9, 8, 7], greedy(1))])
    assert decoder.tokens == len(TRUNK) + 3 + 3
    assert engine.pages_in_use == len(TRUNK) // PAGE + 1 + 1


@pytest.mark.parametrize(("alike", "step", "cached"), [(128, 2, 128), (131, 2, 128), (136, 3, 136)])
def test_a_request_waits_for_tokens_that_another_computes_only_if_it_will_take_them(alike: int, step: int, cached: int) -> None:
    """Few tokens of a page that goes on differently are computed, not copied."""
    engine = tiny_engine(page_size=64, kv_cache_tokens=64 * 32, max_num_batched_tokens=128, overlap=False)
    begins = [token % 250 for token in range(alike)]
    engine.add(Request("first", [*begins, 251, *range(20)], greedy(2)))
    engine.add(Request("second", [*begins, 252, *range(20)], greedy(2)))
    [second] = [row for row in engine.answers if row.request_id == "second"]
    taken = next(count for count in range(1, 20) if (engine.step(), second.cached is not None)[1])
    assert (taken, second.cached) == (step, cached)


def test_the_same_request_twice_computes_only_the_last_token_again() -> None:
    engine, decoder = watched()
    said = run(engine, [Request("a", TRUNK, greedy(1)), Request("b", TRUNK, greedy(1))])
    assert decoder.tokens == len(TRUNK) + 1
    assert tokens(said["a", 0]) == tokens(said["b", 0])


def test_requests_that_share_less_than_a_page_share_that_much() -> None:
    engine, decoder = watched()
    run(engine, [Request("a", [1, 2, 3, 50], greedy(1)), Request("b", [1, 2, 60, 70, 80], greedy(1))])
    assert decoder.tokens == 4 + 3


@pytest.mark.parametrize("warm", [True, False])
def test_requests_over_one_prefix_use_its_pages_once_and_their_tails(warm: bool) -> None:
    question, answer, rows = 3, 5, 32
    engine, decoder = watched(max_num_seqs=rows, max_num_batched_tokens=256)
    if warm:
        ask(engine, TRUNK)
        assert engine.pages_in_use == len(TRUNK) // PAGE
    requests = [Request(f"r{row}", [*TRUNK, row, 1, 2], greedy(answer)) for row in range(rows)]
    stored = question + answer - 1  # nobody computes the last token of an answer
    tail = -(-stored // PAGE)
    assert peak(engine, requests) == len(TRUNK) // PAGE + rows * tail
    assert decoder.tokens == len(TRUNK) + rows * stored


def test_without_reuse_every_request_stands_alone() -> None:
    engine, decoder = watched(prefix_caching=False, max_num_batched_tokens=256)
    requests = [Request(f"r{row}", [*TRUNK, row], greedy(2)) for row in range(4)]
    assert peak(engine, requests) == 4 * -(-(len(TRUNK) + 2) // PAGE)
    assert decoder.tokens == 4 * (len(TRUNK) + 1 + 1)
    assert engine.pages_in_use == engine.tree.pages == 0
    assert ask(engine, TRUNK)[0].num_cached_tokens == 0


def test_a_fork_shares_the_pages_of_its_prompt_and_copies_only_the_part_of_one() -> None:
    engine, decoder = watched()
    copies: list[int] = []
    copy = engine.pool.copy
    engine.pool.copy = lambda source, target, count: (copies.append(count), copy(source, target, count))[1]  # type: ignore[method-assign,func-returns-value]
    prompt, rows, answer = TRUNK[:10], 4, 3
    assert peak(engine, [Request("r", prompt, greedy(answer, n=rows))]) == len(prompt) // PAGE + rows
    assert copies == [1] * (rows - 1)  # the page holds two of the prompt's tokens; the last is computed for its logits
    assert decoder.tokens == len(prompt) + (rows - 1) + rows * (answer - 1)


def test_tenants_with_different_salts_share_nothing() -> None:
    for salt, cached in ((b"mine", len(TRUNK) - 1), (b"theirs", 0), (b"", 0)):
        engine, decoder = watched()
        first = ask(engine, TRUNK, 4, tenant=Tenant(b"mine"))
        before = decoder.tokens
        again = ask(engine, TRUNK, 4, tenant=Tenant(salt))
        assert again[0].num_cached_tokens == cached
        assert decoder.tokens - before == len(TRUNK) - cached + 3
        assert tokens(first) == tokens(again)


def test_tenants_share_what_is_public_and_nothing_behind_it() -> None:
    model = tiny_model()
    for public in (0, 3, 8, 9, 20, len(TRUNK)):  # whole pages, and a part of one
        engine = tiny_engine(model)
        alone = ask(tiny_engine(model), [*TRUNK, 1, 2, 3], 6)
        ask(engine, TRUNK[:public] or TRUNK[:1], 1, tenant=PUBLIC)
        for salt in (b"mine", b"theirs"):
            said = ask(engine, [*TRUNK, 1, 2, 3], 6, tenant=Tenant(salt), public=public)
            assert said[0].num_cached_tokens == (public if public >= PAGE else 0), (public, salt)
            assert tokens(said) == tokens(alone)
        again = ask(engine, [*TRUNK, 1, 2, 9], 6, tenant=Tenant(b"mine"), public=public)
        assert again[0].num_cached_tokens == len(TRUNK) + 2


def test_tenants_that_run_together_do_not_copy_from_each_other() -> None:
    engine = tiny_engine()
    ask(engine, TRUNK[:8], 1, tenant=PUBLIC)
    requests = [Request(salt.decode(), [*TRUNK[:8], 5, 6, 7], greedy(4), Tenant(salt), public=8) for salt in (b"a", b"b", b"c")]
    said = run(engine, requests)
    assert [events[0].num_cached_tokens for events in said.values()] == [8, 8, 8]


def reason(events: list[TokenEvent]) -> tuple[str, int] | None:
    miss = events[0].reuse.miss
    return miss and (miss.reason, miss.token)


def test_a_miss_has_a_reason() -> None:
    engine = tiny_engine(kv_cache_tokens=64)
    assert reason(ask(engine, TRUNK)) == ("cold", 0)
    assert reason(ask(engine, TRUNK)) is None
    assert reason(ask(engine, [*TRUNK, 1, 2, 3])) is None, "it goes on, and all that was known was found"
    assert reason(ask(engine, [*TRUNK[:22], 99, 98, 97])) == ("diverged", 22)
    assert reason(ask(engine, [*TRUNK[:20], 77, 98, 97])) == ("diverged", 20)
    assert reason(ask(engine, [200])) == ("too_short", 0)
    assert reason(ask(engine, [250 - place for place in range(60)])) == ("cold", 0)
    found = reason(ask(engine, TRUNK))
    assert found and found[0] == "evicted"
    assert ask(engine, TRUNK, score=True)[0].reuse.miss == Miss("off", 0)
    assert reason(ask(tiny_engine(prefix_caching=False), TRUNK)) == ("off", 0)


def test_a_context_of_the_same_owner_under_another_salt_is_told_and_not_shared() -> None:
    for prompt in (TRUNK, TRUNK[:3]):
        engine = tiny_engine()
        ask(engine, prompt, tenant=Tenant(b"x", b"owner"))
        ask(engine, [9, 9, 9, 9, 9], tenant=Tenant(b"y", b"owner"))
        assert reason(ask(engine, prompt, tenant=Tenant(b"y", b"owner"))) == ("other_tenant", 0)
        assert reason(ask(engine, prompt, tenant=Tenant(b"z", b"stranger"))) == ("cold", 0), "strangers are not told"
        assert reason(ask(engine, prompt, tenant=Tenant(b"y", b"owner"))) is None


# ---- pins


def test_a_pinned_context_outlives_pressure_until_it_expires() -> None:
    now = [0.0]
    engine = tiny_engine(kv_cache_tokens=160)
    engine.scheduler.clock = lambda: now[0]
    prompt = TRUNK[:18]
    ask(engine, prompt)
    pin = engine.pin(prompt, Tenant(), 0, ttl=60)
    assert (pin.tokens, len(pin.pages), engine.stats().pages_pinned) == (18, 5, 5)
    for turn in range(12):
        ask(engine, [(turn * 40 + place) % 256 for place in range(40)], 8)
    assert ask(engine, prompt)[0].num_cached_tokens == 17
    engine.clear_cache()
    assert ask(engine, prompt)[0].num_cached_tokens == 17
    now[0] = 61.0
    engine.expire_pins()
    assert engine.stats().pages_pinned == 0
    engine.clear_cache()
    assert ask(engine, prompt)[0].num_cached_tokens == 0


@pytest.mark.parametrize(("prompt", "answer"), [(150, 4), (20, 134)])
def test_pins_give_way_to_a_request_that_would_wait_for_ever(prompt: int, answer: int, caplog: pytest.LogCaptureFixture) -> None:
    """It needs the whole pool, at once or when it has grown; pins that came with requests go first."""
    engine = tiny_engine(kv_cache_tokens=160)
    for place, automatic in ((0, False), (100, True), (200, False)):
        asked = [place + token for token in range(6)]
        ask(engine, asked)
        engine.pin(asked, Tenant(), 0, None, automatic=automatic)
    assert [pin.automatic for pin in engine.pins] == [False, True, False]
    tokens = [(7 * token) % 256 for token in range(prompt)]
    expected = [event.token for event in ask(tiny_engine(), tokens, answer)]
    assert [event.token for event in ask(engine, tokens, answer)] == expected
    assert not list(engine.pins) and caplog.text.count("a pin of 6 tokens is taken away") == 3
    assert [event.token for event in ask(engine, [1, 2, 3])] == [event.token for event in ask(tiny_engine(), [1, 2, 3])]


@pytest.mark.parametrize("automatic", [True, False])
def test_only_as_many_pins_give_way_as_must(automatic: bool) -> None:
    engine = tiny_engine(kv_cache_tokens=160)
    pins = []
    for place in (0, 100):
        asked = [place + token for token in range(6)]
        ask(engine, asked)
        pins.append(engine.pin(asked, Tenant(), 0, None, automatic=automatic and not place))
    ask(engine, [(7 * token) % 256 for token in range(146)], 4)
    assert list(engine.pins) == [pins[1] if automatic else pins[0]]


def test_pins_have_a_quota_and_an_owner() -> None:
    engine = tiny_engine(kv_cache_tokens=160)  # 40 pages, of which 10 may be pinned
    mine, theirs = Tenant(b"mine", b"me"), Tenant(b"theirs", b"them")
    ask(engine, TRUNK, tenant=mine)
    pin = engine.pin(TRUNK, mine, 0, None)
    assert engine.pin(TRUNK[:20], mine, 0, None).pages <= pin.pages, "a page pinned twice counts once"
    ask(engine, [1, 2, 3], tenant=theirs)
    with pytest.raises(QuotaExceeded, match="of the 10 that pins may hold"):
        engine.pin([1, 2, 3], theirs, 0, None)
    with pytest.raises(QuotaExceeded, match="pinning 1 page would make 11 of the 10"):
        engine.pin([1, 2, 3], theirs, 0, None)
    assert engine.pins.get(pin.pin_id, b"them") is None
    assert engine.pins.get(pin.pin_id, b"me") is pin
    engine.pins.drop(pin)
    assert engine.stats().pages_pinned == 5


def test_the_pin_of_a_turn_gives_way_to_that_of_the_next() -> None:
    engine = tiny_engine(kv_cache_tokens=160)
    asked = engine.pin(TRUNK[:4], Tenant(), 0, None)
    for length in (10, 10, 19, 26):
        ask(engine, TRUNK[:length])
        engine.pin(TRUNK[:length], Tenant(), 0, 60, automatic=True)
    other = engine.pin([1, 2, 3], Tenant(b"another"), 0, 60, automatic=True)
    assert [pin.tokens for pin in engine.pins if pin is not other] == [asked.tokens, 26]


def test_the_pin_of_a_short_conversation_gives_way_to_no_other_conversation() -> None:
    engine = tiny_engine(kv_cache_tokens=160)
    for prompt in ([1, 2, 3], TRUNK[:10]):
        ask(engine, prompt)
        engine.pin(prompt, Tenant(), 0, 60, automatic=True)
    assert [pin.tokens for pin in engine.pins] == [3, 10]


def test_a_pin_holds_no_more_than_was_asked_for() -> None:
    engine = tiny_engine()
    ask(engine, TRUNK)
    assert len(engine.pin(TRUNK[:6], Tenant(), 0, None).pages) == 2


def test_a_turn_that_exceeds_the_quota_leaves_the_last_ones_pin() -> None:
    engine = tiny_engine(kv_cache_tokens=160)
    engine.pins.quota = 3
    ask(engine, TRUNK)
    pin = engine.pin(TRUNK[:9], Tenant(), 0, 60, automatic=True)
    with pytest.raises(QuotaExceeded):
        engine.pin(TRUNK[:20], Tenant(), 0, 60, automatic=True)
    assert list(engine.pins) == [pin]


def test_pins_that_are_refused_leave_nothing_in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    monkeypatch.setattr("pando.engine.pins.MAX_PINS", 0)
    for number in range(9):
        with pytest.raises(QuotaExceeded, match="unpin one first"):
            engine.pin(TRUNK, Tenant(bytes([number])), 0, None)
    assert not list(engine.tree.stems())


def test_tenants_of_whom_nothing_is_cached_leave_nothing_in_the_tree() -> None:
    engine = tiny_engine(prefix_caching=False)
    for number in range(20):
        ask(engine, TRUNK, tenant=Tenant(str(number).encode()))
    assert engine.tree._roots == {}


def test_an_owner_sees_its_own_segments_and_the_public_ones() -> None:
    engine = tiny_engine()
    ask(engine, TRUNK[:8], tenant=PUBLIC)
    ask(engine, [*TRUNK[:8], 1, 2, 3, 4, 5], tenant=Tenant(b"a", b"me"), public=8)
    ask(engine, [*TRUNK[:8], 6, 7, 8, 9, 5], tenant=Tenant(b"b", b"them"), public=8)
    seen = {stem.segment.tokens[:1] for stem, _ in engine.segments(b"me")}
    assert seen == {(TRUNK[0],), (1,), (5,)}


def test_salts_that_nothing_is_cached_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MANY_OWNERS", 8)
    engine = tiny_engine(kv_cache_tokens=64)
    for number in range(200):
        ask(engine, TRUNK[:20], tenant=Tenant(str(number).encode()))
    assert len(engine.admission.owners) < 40


def test_whoever_makes_them_too_many_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MANY_OWNERS", 4)
    engine = tiny_engine()
    for number in range(12):
        tenant = Tenant(b"salt %d" % number, b"owner %d" % number)
        ask(engine, TRUNK[:20], tenant=tenant)
        assert engine.segments(tenant.owner), number


# ---- constraints


def test_what_a_request_does_to_its_logits_costs_nobody_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    ask(engine, TRUNK)
    monkeypatch.setattr(Only, "allowed", lambda self: np.zeros(9, dtype=np.int32))
    said = run(engine, [Request("bound", TRUNK[:9], greedy(4), constraint=lambda: Only([1]))])
    assert said["bound", 0][-1].finish_reason == "error"
    assert ask(engine, TRUNK)[0].num_cached_tokens == len(TRUNK) - 1


class Only:
    """Allows one text."""

    def __init__(self, tokens: list[int]) -> None:
        self.left = list(tokens)

    def allowed(self) -> Any:
        bits = np.zeros(9 * 4, dtype=np.uint8)
        bits[self.left[0] // 8] |= 1 << self.left[0] % 8
        return bits.view(np.int32)

    is_broken = False

    def accept(self, token: int) -> bool:
        assert token == self.left.pop(0)
        return not self.left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_answer_says_what_it_may_and_stops_when_it_is_complete(temperature: float) -> None:
    engine = tiny_engine()
    params = SamplingParams(temperature=temperature, max_tokens=20, n=2, logprobs=1, repetition_penalty=1.5)
    yes = engine.model.tokenizer.encode("yes!")
    said = run(engine, [Request("free", TRUNK, greedy(8)), Request("bound", TRUNK, params, constraint=lambda: Only(yes))])
    for index in range(2):
        assert "".join(event.text for event in said["bound", index]) == "yes!"
        assert said["bound", index][-1].finish_reason == "stop"
    assert tokens(said["free", 0]) == tokens(ask(tiny_engine(), TRUNK, 8)), "the others are free"


def test_a_complete_answer_ends_before_min_tokens() -> None:
    engine = tiny_engine()
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=10, ignore_eos=True)
    said = run(engine, [Request("bound", TRUNK, params, constraint=lambda: Only([65, END]))])
    assert tokens(said["bound", 0]) == [65, END]


def test_cached_tokens_are_reported() -> None:
    engine = tiny_engine()
    assert [event.num_cached_tokens for event in ask(engine, TRUNK, 3)] == [0, 0, 0]
    assert ask(engine, TRUNK)[0].num_cached_tokens == len(TRUNK) - 1
    assert ask(engine, [*TRUNK[:22], 255, 255])[0].num_cached_tokens == 22
    assert ask(engine, [255, *TRUNK])[0].num_cached_tokens == 0
    assert ask(engine, TRUNK)[0].num_prompt_tokens == len(TRUNK)


def test_what_was_answered_is_cached_too() -> None:
    engine = tiny_engine()
    said = tokens(ask(engine, TRUNK, 10))
    assert ask(engine, [*TRUNK, *said, 5])[0].num_cached_tokens == len(TRUNK) + 9


def test_clearing_the_cache_spares_what_runs() -> None:
    engine = tiny_engine()
    expected = tokens(ask(tiny_engine(), TRUNK, 12))
    ask(engine, [9] * 20)
    engine.add(Request("r", TRUNK, greedy(12)))
    said = tokens(engine.step())
    engine.clear_cache()
    assert engine.pages_in_use == -(-(len(TRUNK) + 1) // PAGE)
    said += tokens(drain(engine)["r", 0])
    assert said == expected


# ---- reading once


TOKEN = 2 * 2 * 2 * 8 * 4  # bytes of K and V of a token: 2 layers, 2 heads of 8, float32


def stepped(engine: Engine, ends: list[list[int]], answer: int) -> list[StepFacts]:
    """The facts of each step in which requests are answered that begin with the trunk, which is known."""
    ask(engine, TRUNK)
    before = engine.totals
    for row, end in enumerate(ends):
        engine.add(Request(f"r{row}", [*TRUNK, *end], greedy(answer)))
    found = []
    while engine.has_work:
        engine.step()
        found += [engine.facts] if engine.facts.rows else []
    assert engine.totals == tuple(map(sum, zip(before, *found, strict=True)))
    return found


def test_three_rows_over_one_prefix_read_it_once() -> None:
    engine = tiny_engine(page_size=8, attention="shared")
    plans = engine.stats().plans
    found = stepped(engine, [[row, 1, 2] for row in range(3)], 5)
    saved = 40 * (3 - 1)
    assert found == [
        StepFacts(3, 9, 1, 3, (3 * 43 - saved) * TOKEN, 3 * 43 * TOKEN),  # a prompt's row counts once, with the three tokens it brings
        *(StepFacts(3, 3, 1, 3, (3 * seen - saved) * TOKEN, 3 * seen * TOKEN) for seen in (44, 45, 46, 47)),
    ]
    assert engine.stats().plans - plans == 3, "the trunk, the prompts, and one for all that follows"
    stats = engine.stats()
    assert (stats.shared_reads, stats.shared_rows, stats.attention) == (5, 15, "shared")
    alone = 40  # the trunk was computed before by one row
    assert stats.flat_bytes == (alone + 3 * (43 + 44 + 45 + 46 + 47)) * TOKEN
    assert stats.read_bytes == stats.flat_bytes - 5 * saved * TOKEN


def test_reads_at_two_depths_are_both_counted() -> None:
    engine = tiny_engine(page_size=8, attention="shared")
    deeper = [*range(100, 108)]
    run(engine, [Request("deeper", [*TRUNK, *deeper], greedy(1))])
    found = stepped(engine, [[*deeper, 1], [*deeper, 2], [3]], 2)
    flat = 49 + 49 + 41
    assert found[0] == StepFacts(3, 3, 2, 3 + 2, (flat - 40 * 2 - 8) * TOKEN, flat * TOKEN)


def test_in_mode_flat_nothing_is_shared_and_nothing_saved() -> None:
    engine = tiny_engine(page_size=8, attention="flat")
    found = stepped(engine, [[row, 1, 2] for row in range(3)], 5)
    assert found == [StepFacts(3, 9 if seen == 43 else 3, 0, 0, 3 * seen * TOKEN, 3 * seen * TOKEN) for seen in (43, 44, 45, 46, 47)]
    assert (engine.stats().shared_reads, engine.stats().attention) == (0, "flat")


def test_a_step_without_rows_reads_nothing() -> None:
    engine = tiny_engine(attention="shared")
    stepped(engine, [[1], [2]], 3)
    totals = engine.totals
    engine.step()
    assert engine.facts == StepFacts()
    assert engine.totals == totals


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("native", [False, True])
def test_reading_once_and_reading_by_each_row_give_the_same_tokens(native: bool) -> None:
    model = tiny_model(native=native)
    requests = [Request(f"r{row}", [*TRUNK, *range(row % 3), row], greedy(20 + row, n=1 + row % 2)) for row in range(6)]
    said, facts = {}, {}
    for attention in ("auto", "shared", "flat", "reference"):
        engine = tiny_engine(model, attention=attention)
        said[attention] = {name: tokens(events) for name, events in run(engine, requests).items()}
        facts[attention] = engine.totals
    assert said["auto"] == said["shared"] == said["flat"] == said["reference"]
    assert len({tuple(answer) for answer in said["flat"].values()}) > 1, "the model says the same to everything"
    assert facts["shared"].shared_reads >= facts["auto"].shared_reads > 0 == facts["flat"].shared_reads
    assert facts["shared"].flat_bytes == facts["flat"].flat_bytes == facts["flat"].read_bytes > facts["shared"].read_bytes


# ---- time


def test_rows_that_only_decode_on_need_no_new_plan(overlap: bool) -> None:
    engine = tiny_engine(page_size=16)
    for row in range(3):
        engine.add(Request(f"r{row}", [row, 1, 2], greedy(20)))
    for _ in range(3):
        engine.step()
    before = engine.stats().plans
    for _ in range(10):
        engine.step()
    assert engine.stats().plans == before
    assert engine.stats().steps == 13 - overlap, "one of them is not settled"
    for _ in range(3):  # the first page is full
        engine.step()
    assert engine.stats().plans == before + 1


def test_a_step_without_work_is_no_event() -> None:
    engine = tiny_engine()
    assert engine.step() == []
    assert not engine.has_work


def test_a_prompt_longer_than_the_budget_takes_several_steps_and_answers_the_same() -> None:
    engine = tiny_engine(max_num_batched_tokens=7)
    assert tokens(ask(engine, TRUNK, 6)) == tokens(ask(tiny_engine(), TRUNK, 6))
    assert engine.stats().steps == -(-len(TRUNK) // 7) + 5


def test_who_may_choose_nothing_ends_with_an_error_and_takes_nothing_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    run(engine, [Request("kept", list(range(60)), greedy(4))])
    before = engine.tree.pages
    forward = engine.model.decoder.forward
    never = torch.zeros(VOCAB).index_fill(0, torch.tensor([7]), -torch.inf).to(DEVICE)
    monkeypatch.setattr(engine.model.decoder, "forward", lambda step, pool: forward(step, pool) + never)  # the one that is not blocked
    nothing = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=[token for token in range(VOCAB) if token != 7])
    assert run(engine, [Request("r", [5, 6, 7], nothing)])["r", 0][-1].finish_reason == "error"
    assert engine.tree.pages >= before > 0


def test_preemption_loses_no_tokens() -> None:
    requests = [Request(f"r{row}", [row] * 9, greedy(30)) for row in range(4)]
    expected = run(tiny_engine(), requests)
    engine = tiny_engine(kv_cache_tokens=60)
    said = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert {key: tokens(events) for key, events in said.items()} == {key: tokens(events) for key, events in expected.items()}


def test_eviction_under_pressure_leaves_running_rows_right(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(ask(tiny_engine(), TRUNK, 50))
    engine = tiny_engine(kv_cache_tokens=128)
    engine.add(Request("long", TRUNK, greedy(50)))
    said: list[int] = []
    evicted: list[int] = []
    evict = engine.tree.evict
    monkeypatch.setattr(engine.tree, "evict", lambda count: (freed := evict(count), evicted.extend(freed))[0])
    for step in range(50):
        engine.add(Request(f"s{step}", [step + 100] * 8, greedy(1)))
        said += [event.token for event in engine.step() if event.request_id == "long"]
    said += tokens(drain(engine).get(("long", 0), []))
    assert evicted
    assert engine.stats().preemptions == 0
    assert said == expected


def test_cancelling_frees_rows_and_pages() -> None:
    engine = tiny_engine(max_num_seqs=2)
    for name in ("runs", "goes", "waits"):
        engine.add(Request(name, [len(name), *TRUNK], greedy(50)))
    for _ in range(4):
        engine.step()
    engine.cancel("goes")
    engine.cancel("waits")
    engine.cancel("never heard of")
    assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    assert {event.request_id for event in engine.step()} == {"runs"}
    engine.cancel("runs")
    assert not engine.has_work
    assert engine.pages_in_use == engine.stats().pages_cached > 0
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_cancelling_cancels_every_answer_of_a_request() -> None:
    engine = tiny_engine()
    engine.add(Request("r", TRUNK, greedy(50, n=3)))
    for _ in range(3):
        engine.step()
    engine.cancel("r")
    assert not engine.has_work
    assert engine.step() == []


# ---- what is refused


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1, True], [1.0], ["a"], [None], [1, 10**30]])
def test_what_is_no_prompt_of_this_model_is_refused(prompt: list[Any]) -> None:
    engine = tiny_engine()
    with pytest.raises(InvalidPrompt):
        engine.add(Request("r", prompt, greedy()))
    assert not engine.has_work


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers() -> None:
    engine = tiny_engine(max_model_len=32)
    with pytest.raises(PromptTooLong, match=r"has 40 tokens and the context holds 32.*shorten the prompt by 9 tokens"):
        engine.add(Request("r", TRUNK, greedy()))
    with pytest.raises(PromptTooLong, match=r"shorten the prompt by 1 token,"):
        engine.add(Request("r", TRUNK[:32], greedy()))
    assert len(ask(engine, TRUNK[:31], 5)) == 1  # the rest of the context


def test_a_pool_too_small_for_a_request_says_how_much_is_needed() -> None:
    engine = tiny_engine(kv_cache_tokens=48)
    with pytest.raises(
        PoolTooSmall, match="may need 50 tokens of KV cache and the pool has 48; raise kv_cache_tokens to at least 50, or lower max_tokens"
    ):
        engine.add(Request("r", TRUNK, greedy(10)))
    assert len(ask(engine, TRUNK, 8)) == 8


def test_a_prompt_that_fills_the_pool_is_refused_whatever_its_answer_may_be() -> None:
    engine = tiny_engine(kv_cache_tokens=40)
    with pytest.raises(PoolTooSmall, match="or shorten the prompt"):
        engine.add(Request("r", TRUNK, SamplingParams(max_tokens=None)))


def test_a_prompt_that_fills_the_pool_is_refused_with_the_word_of_truncation_where_that_helps() -> None:
    engine, asked = tiny_engine(kv_cache_tokens=40), Request("r", TRUNK, SamplingParams(max_tokens=4, temperature=0))
    with pytest.raises(PoolTooSmall, match=r'shorten the prompt, or ask for truncation="auto", which drops its oldest part$'):
        engine.add(asked)
    with pytest.raises(PoolTooSmall, match=r"or shorten the prompt$"):  # what is scored is not cut
        engine.add(replace(asked, score=True))
    engine.add(replace(asked, truncation=Truncation()))
    assert engine.has_work


def test_a_context_larger_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(InvalidOption, match="max_model_len is 513 and the model was made for 512"):
        tiny_engine(max_model_len=513)


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={VOCAB: 1}), SamplingParams(stop_token_ids=[VOCAB])])
def test_tokens_that_the_model_does_not_have_are_refused(params: SamplingParams) -> None:
    with pytest.raises(InvalidSampling, match=f"token {VOCAB} of a vocabulary of {VOCAB}"):
        tiny_engine().add(Request("r", [1], params))


def test_a_request_that_may_not_choose_any_token_is_refused() -> None:
    engine, most = tiny_engine(), [token for token in range(VOCAB) if token != END]  # an end may not come before min_tokens, either
    with pytest.raises(InvalidSampling, match=f"are all {VOCAB} tokens of the vocabulary, so none is left before min_tokens"):
        engine.add(Request("r", [1], SamplingParams(temperature=0, min_tokens=2, stop_token_ids=most)))
    for params in (SamplingParams(stop_token_ids=most), SamplingParams(min_tokens=2, stop_token_ids=most[1:])):
        assert run(engine, [Request("r", [1], params)])["r", 0][-1].finish_reason in ("stop", "length")


def test_a_refused_request_leaves_the_others_as_they_were() -> None:
    engine = tiny_engine(kv_cache_tokens=60)
    good = [Request(f"good{row}", [row, *TRUNK[:9]], greedy(10)) for row in range(2)]
    expected = run(tiny_engine(), good)
    engine.add(good[0])
    for prompt in ([], [999], [1] * 600, TRUNK * 2):
        with pytest.raises(InputError):
            engine.add(Request("bad", prompt, greedy()))
    engine.step()
    said = run(engine, good[1:])
    assert {name for name, _ in said} == {"good0", "good1"}
    assert tokens(said["good1", 0]) == tokens(expected["good1", 0])
    engine.clear_cache()
    assert engine.pages_in_use == 0


# ---- a row whose numbers are none


def test_a_row_without_numbers_ends_as_an_error_and_alone() -> None:
    model = tiny_model()

    def spoil(step: Step, logits: Tensor) -> None:
        logits[step.tokens[step.wanted] == 200] = torch.nan

    engine = tiny_engine(replace(model, decoder=Watched(model.decoder, spoil)))  # type: ignore[arg-type]
    others = [Request(f"o{row}", [*TRUNK, row], greedy(8)) for row in range(3)]
    said = run(engine, [others[0], Request("bad", [*TRUNK, 200], greedy(8)), *others[1:]])
    assert [(event.finish_reason, event.text) for event in said["bad", 0]] == [("error", "")]
    expected = run(tiny_engine(model), others)
    for request in others:
        assert tokens(said[request.request_id, 0]) == tokens(expected[request.request_id, 0])


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("together", [True, False])
def test_states_that_are_no_numbers_stay_with_the_row_that_computed_them(together: bool, attention: str) -> None:
    """Unlike spoilt logits, these are in the pool, in pages that others use after it."""
    model = tiny_model()
    model.decoder.embed[200] = torch.nan
    engine = tiny_engine(model, attention=attention)
    bad = Request("bad", [9] * 5 + [200] + [8] * 20, greedy(8))
    others = [Request(f"o{row}", TRUNK[row : 2 + 4 * row], greedy(12)) for row in range(5)]
    expected = run(tiny_engine(model, attention=attention), others)
    if together:
        said = run(engine, [bad, *others])
        assert said["bad", 0][-1].finish_reason == "error"
    else:
        run(engine, [bad])
        engine.clear_cache()
        said = run(engine, others)
    for request in others:
        assert tokens(said[request.request_id, 0]) == tokens(expected[request.request_id, 0])


@pytest.mark.parametrize("together", [True, False])
def test_a_beginning_shared_with_a_row_without_numbers_is_good_for_others(together: bool) -> None:
    model = tiny_model()
    model.decoder.embed[200] = torch.nan
    engine = tiny_engine(model)
    bad, good = Request("bad", [*TRUNK[:12], 200, 1, 2, 3], greedy(8)), Request("good", [*TRUNK[:12], 5, 6], greedy(8))
    if not together:
        assert run(engine, [bad])["bad", 0][-1].finish_reason == "error"
    said = run(engine, [bad, good] if together else [good])
    assert tokens(said["good", 0]) == tokens(run(tiny_engine(model), [good])["good", 0])
    assert said["good", 0][-1].finish_reason == "length"


# ---- chosen tokens


def test_an_answer_ends_with_the_end_token_unless_that_is_ignored() -> None:
    engine = tiny_engine()
    always = {END: 100.0}
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias=always)
    [event] = run(engine, [Request("r", [1], params)])["r", 0]
    assert (event.token, event.finish_reason, event.text) == (END, "stop", "")
    assert tokens(run(engine, [Request("r", [1], replace(params, ignore_eos=True))])["r", 0]) == [END] * 5


def test_min_tokens_keeps_an_answer_from_ending_early() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias={END: 100.0})
    said = run(tiny_engine(), [Request("r", [1], params)])["r", 0]
    assert tokens(said).index(END) == 4
    assert said[-1].finish_reason == "stop"


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context_or_the_pool() -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert len(run(tiny_engine(max_model_len=50), [Request("r", TRUNK, params)])["r", 0]) == 10
    assert len(run(tiny_engine(kv_cache_tokens=44), [Request("r", TRUNK, params)])["r", 0]) == 4


def test_a_seed_makes_an_answer_its_own_and_none_makes_it_the_engines() -> None:
    def said(engine_seed: int, seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=seed)
        return tokens(run(tiny_engine(seed=engine_seed), [Request("r", TRUNK, params)])["r", 0])

    assert said(0, 5) == said(1, 5) != said(0, 6)
    assert said(0, None) == said(0, None) != said(1, None)


def test_what_was_told_of_a_prompts_logprobs_stays_as_it_was_told() -> None:
    """A row that is preempted after its first token scores its prompt again, part by part."""
    engine, told = tiny_engine(kv_cache_tokens=100, max_num_batched_tokens=8), list[TokenEvent]()
    engine.add(Request("first", list(range(100, 110)), greedy(60)))  # it grows, and takes the room of who came later
    engine.add(Request("scored", list(range(40)), greedy(30, logprobs=1), score=True))
    while engine.has_work:
        told += [event for event in engine.step() if event.request_id == "scored"]
        for event in told:
            assert event.prompt_logprobs is not None and len(event.prompt_logprobs) == len(event.prompt_top) == 39
    assert engine.stats().preemptions


def test_a_prompt_is_scored_the_same_when_its_row_is_preempted() -> None:
    """It begins again, since its logits are needed; nothing is scored twice."""
    asked = Request("scored", TRUNK, greedy(24), score=True)
    [expected] = {tuple(event.prompt_logprobs or ()) for event in run(tiny_engine(), [asked])["scored", 0]}
    assert len(expected) == len(TRUNK) - 1
    engine = tiny_engine(kv_cache_tokens=80)
    said = run(engine, [Request("older", [3] * 12, greedy(50)), asked])
    assert engine.stats().preemptions > 0
    assert list(said["scored", 0][-1].prompt_logprobs or ()) == pytest.approx(list(expected), abs=1e-4)


def test_however_many_tokens_of_a_prompt_are_scored_together_they_are_scored_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(together: int, wanted: int | None) -> TokenEvent:
        monkeypatch.setattr(scores, "TOGETHER", together)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=wanted)
        return run(tiny_engine(), [Request("scored", TRUNK, params, score=True)])["scored", 0][0]

    plain, few, many = scored(1000, None), scored(3, 2), scored(1000, 2)
    assert not plain.prompt_top and len(many.prompt_top) == len(TRUNK) - 1
    assert many.prompt_logprobs == pytest.approx(plain.prompt_logprobs, abs=1e-5)
    assert few.prompt_logprobs == pytest.approx(many.prompt_logprobs, abs=1e-5)
    assert [[token for token, _, _ in top] for top in few.prompt_top] == [[token for token, _, _ in top] for top in many.prompt_top]
    for token, logprob, top in zip(TRUNK[1:], many.prompt_logprobs or (), many.prompt_top, strict=True):
        assert top[0][:2] == (token, logprob) and {1, 2} <= {rank for _, _, rank in top}


def test_a_step_that_is_cut_short_leaves_no_wrong_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a step ends (Ctrl-C, no memory), the rows go on to the same tokens, and nothing cached is wrong."""
    model = tiny_model()
    prompts = [[*range(30), 100 + i] for i in range(3)]
    requests = [Request(f"r{i}", prompt, greedy(20)) for i, prompt in enumerate(prompts)]
    expected = {key: [event.token for event in events] for key, events in run(tiny_engine(model), requests).items()}
    for place in ("_forward", "_sample", "_settle"):
        engine = tiny_engine(model)
        for request in requests:
            engine.add(request)
        said: dict[tuple[str, int], list[int]] = {}
        interrupted = 0
        for number in range(80):
            with monkeypatch.context() as broken:
                if number % 7 == 3:
                    broken.setattr(engine, place, _interrupt)
                try:
                    events = engine.step()
                except KeyboardInterrupt:
                    interrupted, events = interrupted + 1, []
            for event in events:
                said.setdefault((event.request_id, event.index), []).append(event.token)
        assert said == expected
        assert interrupted > 3
        again = run(engine, [Request(f"again{i}", prompt, greedy(20)) for i, prompt in enumerate(prompts)])
        assert [[event.token for event in events] for events in again.values()] == list(expected.values())
        engine.clear_cache()
        assert engine.pages_in_use == 0


def test_what_was_said_before_a_step_is_cut_short_is_heard_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token, too: nobody would wait for another."""
    model, asked = tiny_model(), [Request("ends", [1, 2, 3], greedy(1)), Request("goes on", [4, 5, 6], greedy(3))]
    expected = {key: [event.token for event in events] for key, events in run(tiny_engine(model), asked).items()}
    for requests in (asked, asked[:1]):
        engine = tiny_engine(model)
        for request in requests:
            engine.add(request)
        with monkeypatch.context() as broken:
            broken.setattr(engine.scheduler, "remove", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                drain(engine)
        assert engine.has_work
        said = {key: [event.token for event in events] for key, events in drain(engine).items()}
        assert said == {key: tokens for key, tokens in expected.items() if key[0] in {request.request_id for request in requests}}
        assert [event.token for event in run(engine, [Request("again", [1, 2, 3], greedy(1))])["again", 0]] == expected["ends", 0]
        assert not engine.scheduler.running and not engine.scheduler.waiting
        engine.clear_cache()
        assert engine.pages_in_use == 0


def _interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_cancellation_in_the_middle_of_a_step_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    for name in ("goes", "stays"):
        engine.add(Request(name, [1, 2, 3, ord(name[0])], greedy(5)))
    engine.step()
    forward = engine._forward

    asked = []

    def cancelling(schedule: Schedule) -> torch.Tensor:
        engine.cancel("goes")
        asked.append(schedule)
        return forward(schedule)

    monkeypatch.setattr(engine, "_forward", cancelling)
    while not asked:
        engine.step()
    assert {row.request_id for row in engine.answers} == {"stays"}
    monkeypatch.undo()
    assert len(drain(engine)["stays", 0]) >= 1


def test_a_pool_that_does_not_fit_the_memory_is_refused_with_numbers() -> None:
    with pytest.raises(InvalidOption, match=r"needs .* GiB and .* GiB are free; lower kv_cache_tokens to at most \d+"):
        tiny_engine(kv_cache_tokens=2**31)


def test_an_end_token_beyond_the_vocabulary_harms_nobody() -> None:
    model = tiny_model()
    model.tokenizer.eos = (*model.tokenizer.eos, 10**6, -1)
    events = run(tiny_engine(model), [Request("r", [1, 2, 3], SamplingParams(temperature=0, min_tokens=3, max_tokens=4))])
    assert len(events["r", 0]) == 4


def test_a_salt_named_public_is_as_private_as_any() -> None:
    engine, _ = watched()
    ask(engine, TRUNK, 1, tenant=Tenant(b"public"))
    assert ask(engine, TRUNK, 1, tenant=PUBLIC)[0].num_cached_tokens == 0
