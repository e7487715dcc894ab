"""Conversations that outgrow the window: the oldest part goes, and the rest is not computed again."""

import random
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pando.engine.below import WORTH_KEEPING
from pando.engine.engine import Engine
from pando.engine.layout import Layout
from pando.engine.request import Request, SamplingParams, Span, Tenant, TokenEvent, Truncation
from pando.engine.row import Schedule
from pando.engine.sampler import Choices
from pando.engine.truncation import Truncations, dropped
from pando.errors import InvalidOption, InvalidPrompt, PoolTooSmall, PromptTooLong
from pando.kernels import reference
from pando.kv.pages import Pages
from pando.kv.pool import PagePool
from pando.kv.run import Origin, Run
from pando.kv.segment import Key, Lineage, extend_keys
from pando.kv.tree import PrefixTree
from pando.model.config import Rope
from pando.model.decoder import Step, geometry
from pando.model.load import Model
from pando.store import transfer
from pando.store.disk import DiskTier
from pando.store.speeds import Speeds
from pando.store.store import Store
from pando.store.tier import tenant_tag
from pando.store.transfer import Load

from ..store.pages import purge
from ..tiny import drain, greedy, run, tiny_engine, tiny_llm, tiny_model
from .test_store import Expected, Stuck, evict, settled

PAGE, WINDOW, KEEP = 4, 128, 8
AUTO = Truncation(keep=KEEP)


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(count)]


def ask(name: str, prompt: list[int], tokens: int = 6, how: Truncation | None = AUTO, **more: object) -> Request:
    return Request(name, prompt, greedy(tokens), truncation=how, **more)  # type: ignore[arg-type]


def events(engine: Engine, request: Request) -> list[TokenEvent]:
    return run(engine, [request])[request.request_id, 0]


def answer(engine: Engine, request: Request) -> list[int]:
    return [event.token for event in events(engine, request)]


def small(model: Model | None = None, **options: object) -> Engine:
    return tiny_engine(model, **{"max_model_len": WINDOW, **options})


class Talk:
    """A client that brings the whole history with each turn."""

    def __init__(self, engine: Engine, seed: int = 1, opening: int = 90) -> None:
        self.engine, self.seed, self.turns = engine, seed, 0
        self.history = words(seed, opening)

    def turn(self, new: int = 12, tokens: int = 6, **more: object) -> TokenEvent:
        if self.turns:
            self.history += words(100 * self.seed + self.turns, new)
        self.turns += 1
        found = events(self.engine, ask(f"{self.seed}/{self.turns}", list(self.history), tokens, **more))
        self.history += [event.token for event in found]
        self.said = [event.token for event in found]
        return found[-1]

    def until_cut(self) -> TokenEvent:
        while (event := self.turn()).reuse.truncated is None:
            assert len(self.history) < 2 * WINDOW
        return event


@pytest.fixture(params=["rope", "alibi"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(positions=request.param)


# ---- the states are those of the longer prompt, elsewhere


def by_hand(model: Model, history: list[int], new: list[int], start: int, stop: int) -> Tensor:
    """The logits behind `new`, which reads a history without some of its tokens: only the decoder and the definition of attention."""
    known, total = len(history), len(history) + len(new)
    pages = Pages(-(-total // PAGE), PAGE)
    facts = model.config
    pool = PagePool(pages, layers=facts.layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim, dtype=model.dtype, device=model.device)

    def forward(tokens: list[int], first: int, slots: Tensor, given: list[tuple[int, int, int, int]]) -> Tensor:
        positions = first + torch.arange(len(tokens))
        every = torch.arange(len(tokens))
        reads = [reference.Read(torch.arange(low, high), at, every, torch.full_like(every, shift)) for low, high, at, shift in given]
        facts = model.decoder.geometry
        step = Step(
            torch.tensor(tokens), positions, slots, every[-1:], lambda q, turned, k, v: reference.attend(q, k, v, reads, positions, facts)
        )
        return model.decoder.forward(step, pool)

    forward(history, 0, torch.arange(known), [(0, known, 0, 0)])
    away, at = stop - start, known - (stop - start)
    reads = [(0, start, 0, 0), (stop, known, stop, -away), (known, total, at, 0)]
    return forward(new, at, torch.arange(known, total), [read for read in reads if read[0] < read[1]])


class Heard(Engine):
    """Keeps the logits that a token is chosen by."""

    def _sample(self, schedule: Schedule, logits: Tensor) -> Choices:
        if len(logits):
            self.logits = logits.to(torch.float32, copy=True)
        return super()._sample(schedule, logits)


def check(truth: Model, model: Model, attention: str, span: Span) -> None:
    made = small(model, attention=attention)
    made.__class__ = Heard
    assert isinstance(made, Heard)
    history, new = words(1, 100), words(2, 9)
    events(made, ask("plain", history, 1))
    found = events(made, ask("cut", history + new, 1, None, drop=[span]))[0]
    with truth.device:
        wanted = by_hand(truth, history, new, *span).float()
    torch.testing.assert_close(made.logits, wanted, rtol=1e-4, atol=1e-4)
    told = found.reuse.truncated
    assert told is not None and told.ranges == (span,) and told.recomputed is None
    assert (found.num_cached_tokens, told.moved) == (100 - told.dropped, 100 - span[1])
    events(made, ask("recomputed", [*history[: span[0]], *history[span[1] :], *new], 1))
    assert (made.logits - wanted).abs().max() > 1e-2, "it is no approximation, so this shows nothing"


@pytest.mark.parametrize("attention", ["auto", "shared", "reference"])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
@pytest.mark.parametrize("span", [(8, 64), (0, 32), (12, 16)])
def test_a_truncated_prompt_reads_the_old_states_at_new_positions(positions: str, attention: str, span: Span) -> None:
    check(tiny_model(positions=positions, dtype=torch.float64), tiny_model(positions=positions), attention, span)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["type"],
)
def test_scaled_rotations_move_too(scaling: dict[str, float | str]) -> None:
    models = tiny_model(dtype=torch.float64), tiny_model()
    for model in models:
        model.decoder.geometry = geometry(replace(model.config, rope=Rope(10000.0, 8, scaling)), model.device)
    check(*models, "auto", (8, 64))


def test_two_parts_are_dropped_and_what_stands_between_them_stays(model: Model) -> None:
    engine, history = small(model), words(1, 100)
    events(engine, ask("plain", history, 1))
    found = events(engine, ask("cut", history + words(2, 9), 6, None, drop=[(8, 32), (40, 60)]))[-1]
    told = found.reuse.truncated
    assert told is not None and (told.dropped, told.moved, found.num_cached_tokens) == (44, 48, 56)
    runs = [
        Run(tuple(history[:8]), 0, Origin((), 0)),
        Run(tuple(history[32:40]), 8, Origin((), 32, tuple(history[:32]))),
        Run(tuple(history[60:100]), 16, Origin((), 60, tuple(history[:60]))),
    ]
    by_runs = answer(small(model), Request("runs", words(2, 9), greedy(6), runs=runs))
    again = answer(engine, ask("again", history + words(2, 9), 6, None, drop=[(8, 32), (40, 60)]))
    assert again == by_runs, "the same, made from nothing"


def test_what_is_not_held_of_the_rest_is_computed_and_parts_of_it_are_left_out(model: Model) -> None:
    engine, history = small(model), words(1, 60)
    events(engine, ask("plain", history, 1))
    found = events(engine, ask("cut", history + words(2, 50), 6, None, drop=[(8, 32), (80, 96)]))[-1]
    told = found.reuse.truncated
    assert told is not None and told.ranges == ((8, 32), (80, 96))
    assert (found.num_cached_tokens, found.num_prompt_tokens) == (36, 70)
    runs = [Run(tuple(history[:8]), 0, Origin((), 0)), Run(tuple(history[32:60]), 8, Origin((), 32, tuple(history[:32])))]
    rest = (history + words(2, 50))[60:80] + (history + words(2, 50))[96:]
    by_runs = answer(small(model), Request("runs", rest, greedy(6), runs=runs))
    assert answer(engine, ask("again", history + words(2, 50), 6, None, drop=[(8, 32), (80, 96)])) == by_runs


# ---- conversations


def test_the_turn_that_overflows_computes_nothing_but_its_new_words_and_what_was_half_a_page(model: Model) -> None:
    talk = Talk(small(model), opening=110)
    talk.turn()
    before = talk.engine.totals.tokens
    event = talk.turn(new=14, tokens=1)
    told = event.reuse.truncated
    assert told is not None and told.ranges[0][0] == KEEP
    assert event.num_prompt_tokens <= WINDOW // 2
    assert talk.engine.totals.tokens - before == 14 + 1 + 3, "115 tokens were held, and 112 are whole pages"
    assert event.num_cached_tokens == event.num_prompt_tokens - 18
    assert (event.reuse.modules, event.reuse.miss, told.moved) == (0, None, event.num_cached_tokens - KEEP)


def test_the_next_turn_brings_the_whole_history_and_is_recognised(model: Model) -> None:
    talk = Talk(small(model))
    first = talk.until_cut()
    second = talk.turn()
    assert first.reuse.truncated and second.reuse.truncated
    assert second.reuse.truncated.ranges == first.reuse.truncated.ranges
    assert second.num_prompt_tokens == first.num_prompt_tokens + 6 + 12
    assert second.num_cached_tokens == second.num_prompt_tokens - 13
    assert second.reuse.truncated.moved == first.reuse.truncated.moved, "what was said since is where it was computed"


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_conversation_goes_on_and_on(model: Model, attention: str) -> None:
    """Each time that it overflows again, what was computed behind the moved states is moved in its turn."""
    talk, drops = Talk(small(model, attention=attention)), [0]
    for _ in range(40):
        event = talk.turn()
        told = event.reuse.truncated
        assert event.num_prompt_tokens + 6 <= WINDOW
        if told is None:
            continue
        assert told.recomputed is None
        again = told.dropped > drops[-1]
        assert event.num_prompt_tokens - event.num_cached_tokens <= 13 + (PAGE - 1) * again, "only what is new is computed"
        assert told.dropped >= drops[-1]
        drops += [told.dropped] if again else []
    assert len(drops) > 8, "it was cut again and again"
    assert talk.history[:KEEP] == words(1, KEEP)
    talk.engine.clear_cache()
    assert talk.engine.pages_in_use == 0


@pytest.mark.parametrize("tiers", [False, True])
def test_ends_that_are_worth_keeping_are_moved_too(model: Model, tiers: bool) -> None:
    """Then nothing is computed but what is new, and what stands behind begins in the middle of a page."""
    talk = Talk(tiny_engine(model, page_size=32, max_model_len=400, host_gib=0.01 if tiers else 0), opening=250)
    cuts, unaligned = list[int](), 0
    for _ in range(40):
        event = talk.turn(new=23)
        told = event.reuse.truncated
        if told is not None:
            again = told.dropped > sum(cuts)
            cuts += [told.dropped - sum(cuts)] if again else []
            unaligned += bool(told.dropped % 32)
            assert told.recomputed is None and told.moved
            assert event.num_prompt_tokens - event.num_cached_tokens <= 24 + 15 * again + 20 * tiers  # what is loaded lacks short ends
        if tiers:
            settled(talk.engine)
            talk.engine.clear_cache()
    assert len(cuts) > 3 and unaligned


def test_all_kernels_agree_on_a_long_conversation(model: Model) -> None:
    talks = [Talk(small(model, attention=attention)) for attention in ("auto", "shared", "flat", "reference")]
    for _ in range(20):
        for talk in talks:
            talk.turn()
    assert all(talk.history == talks[0].history for talk in talks)


def test_a_prompt_that_fits_is_left_alone(model: Model) -> None:
    engine = small(model)
    found = events(engine, ask("x", words(1, WINDOW - 6), 6))
    assert found[-1].reuse.truncated is None
    assert [event.token for event in found] == answer(small(model), ask("x", words(1, WINDOW - 6), 6, None))


def test_an_answer_of_any_length_counts_on_a_part_of_the_window() -> None:
    for length, cut in ((WINDOW - 32, False), (WINDOW - 31, True)):
        engine = small()
        params = SamplingParams(temperature=0, max_tokens=None)
        engine.add(Request("x", words(1, length), params, truncation=AUTO))
        [row] = engine.answers
        assert (row.truncated is not None) == cut


def test_several_answers_share_the_moved_states(model: Model) -> None:
    talk = Talk(small(model), opening=110)
    talk.turn()
    prompt = talk.history + words(7, 10)
    found = run(talk.engine, [Request("n", prompt, greedy(5, n=3), truncation=AUTO)])
    assert len({tuple(event.token for event in each) for each in found.values()}) == 1 and len(found) == 3
    assert all(each[-1].reuse.truncated and each[-1].reuse.truncated.moved == 40 for each in found.values())


def test_two_conversations_that_were_cut_alike_share_one_read(model: Model) -> None:
    engine = small(model, attention="shared", max_num_batched_tokens=256)
    history = words(1, 117)
    events(engine, ask("plain", history, 1))
    for i in range(3):
        engine.add(ask(f"{i}", history + words(2 + i, 8), 6))
    shared = set()
    while engine.has_work:
        engine.step()
        shared |= {(read.rows, read.shifts) for read in engine.batcher.plan.shared_reads}
    assert any(rows == (0, 1, 2) and len(set(shifts)) == 1 and shifts[0] < 0 for rows, shifts in shared)


# ---- what is said last stays, and the beginning


def test_what_was_said_last_stays_whole_as_long_as_that_leaves_room() -> None:
    how = Truncation(keep=KEEP, recent=90)
    assert dropped(200, 8, 6, how, WINDOW, PAGE) == 100, "up to what was said last, and not down to half of the window"
    assert dropped(300, 8, 6, Truncation(keep=KEEP, recent=250), WINDOW, PAGE) == 180, "only as much of it as must go"
    assert dropped(200, 8, 6, Truncation(keep=KEEP), WINDOW, PAGE) == 136
    assert dropped(200, 8, 6, Truncation(keep=KEEP, share=0.8), WINDOW, PAGE) == 100


def test_the_first_tokens_stay_even_if_nobody_asks_for_it() -> None:
    talk = Talk(small(), opening=120)
    talk.turn(how=Truncation())
    told = talk.turn(how=Truncation()).reuse.truncated
    assert told is not None and told.ranges[0][0] == PAGE


def test_a_beginning_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(PromptTooLong, match=r"the first 128 tokens stay.*shorten the system prompt or the last message"):
        small().add(ask("x", words(1, 140), 6, Truncation(keep=126)))


def test_a_prompt_that_does_not_fit_is_refused_unless_something_may_be_dropped() -> None:
    with pytest.raises(PromptTooLong, match=r'shorten the prompt by 13 tokens, or ask for truncation="auto"'):
        small().add(ask("x", words(1, 140), how=None))
    with pytest.raises(PromptTooLong, match=r"shorten the prompt by 9 tokens$"):
        small().add(ask("x", words(1, 140), how=None, drop=[(8, 12)]))


def test_a_beginning_that_ends_within_the_last_page_stays_and_answers_are_shorter() -> None:
    found = events(small(), ask("x", words(1, 125), 6, Truncation(keep=125)))
    assert len(found) == WINDOW - 125


@pytest.mark.parametrize("size", [81, 82, 83, 84, 97, 98, 99])
def test_a_long_system_prompt_and_a_short_question_are_answered(size: int) -> None:
    llm = tiny_llm(max_model_len=WINDOW, page_size=16)
    messages = [{"role": "system", "content": "x" * size}, {"role": "user", "content": "y"}]
    [reply] = llm.chat(messages, greedy(30), truncation="auto")
    assert reply.outputs[0].token_ids


def test_a_prompt_that_cannot_be_cut_by_what_a_remote_has_fails_no_step(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = small(model, remote=str(tmp_path / "remote"))
    others = [ask(f"other {number}", words(9 + number, 20), 30, None) for number in range(4)]
    for request in others:
        engine.add(request)
    engine.add(ask("bad", words(1, 140)))
    assert len(engine.cutting) == 1, "a remote is asked"

    def fails(self: Truncations, *rest: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Truncations, "remember", fails)
    found = drain(engine)
    assert [event.token for event in found["bad", 0]]
    for request in others:
        said = [event.token for event in found[request.request_id, 0]]
        assert said == answer(small(model), ask("alone", list(request.prompt), 30, None))


# ---- where states cannot be moved they are computed again


def test_a_history_that_nobody_knows_is_shortened_and_computed(model: Model) -> None:
    engine, history = small(model), words(1, 150)
    found = events(engine, ask("cold", history))
    told = found[-1].reuse.truncated
    assert told is not None and (told.moved, told.recomputed) == (0, "cold")
    assert told.ranges == ((8, 96),)
    left = history[:8] + history[96:]
    assert [event.token for event in found] == answer(small(model), ask("plain", left, how=None)), "exact, for what is left"
    longer = history + [event.token for event in found] + words(2, 10)
    later = events(engine, ask("later", longer))[-1]
    assert later.reuse.truncated is not None
    assert (later.reuse.truncated.ranges, later.reuse.truncated.recomputed) == (told.ranges, None), "it is recognised all the same"
    assert later.num_cached_tokens == later.num_prompt_tokens - 11


def test_a_conversation_that_began_cold_moves_its_states_when_it_overflows_again(model: Model) -> None:
    talk = Talk(small(model), opening=150)
    told = talk.turn().reuse.truncated
    assert told is not None and told.recomputed == "cold"
    first = told.dropped
    for _ in range(8):
        event = talk.turn()
        assert event.reuse.truncated is not None and event.reuse.truncated.recomputed is None
        assert event.num_cached_tokens >= event.num_prompt_tokens - 13 - (PAGE - 1)
    assert event.reuse.truncated.dropped > first and event.reuse.truncated.moved


@pytest.mark.parametrize(("options", "positions", "reason"), [({}, "learned", "positions"), ({"prefix_caching": False}, "rope", "off")])
def test_where_states_cannot_move_the_reason_is_told(options: dict[str, object], positions: str, reason: str) -> None:
    model = tiny_model(positions=positions)
    talk = Talk(small(model, **options))
    event = talk.until_cut()
    told = event.reuse.truncated
    assert told is not None and (told.recomputed, told.moved) == (reason, 0)
    prompt = talk.history[: -len(talk.said)]
    left = [token for place, token in enumerate(prompt) if not any(start <= place < stop for start, stop in told.ranges)]
    assert talk.said == answer(small(model), ask("plain", left, how=None))
    later = talk.turn()
    assert later.reuse.truncated is not None and later.reuse.truncated.ranges == told.ranges


def test_a_pool_without_room_for_what_was_dropped_is_no_reason_to_refuse() -> None:
    talk = Talk(small(kv_cache_tokens=WINDOW))
    told = talk.until_cut().reuse.truncated
    assert told is not None and told.recomputed == "pool"
    assert all(talk.turn().reuse.truncated for _ in range(10))


def test_a_pool_smaller_than_the_context_is_the_window(model: Model) -> None:
    talk = Talk(small(model, kv_cache_tokens=WINDOW, max_model_len=4 * WINDOW))
    told = talk.until_cut().reuse.truncated
    assert told is not None
    prompt = talk.history[: -len(talk.said)]
    left = [token for place, token in enumerate(prompt) if not any(start <= place < stop for start, stop in told.ranges)]
    assert len(left) + len(talk.said) <= WINDOW
    assert told.moved or talk.said == answer(small(model), ask("plain", left, how=None))
    assert all(talk.turn().reuse.truncated for _ in range(10)) and len(talk.history) > WINDOW
    with pytest.raises(PoolTooSmall, match="shorten the prompt"):
        talk.engine.add(ask("whole", talk.history, how=None))
    longest = [events(engine, ask("long", words(5, 3 * WINDOW), 2 * WINDOW)) for engine in (talk.engine, small(model))]
    assert len(longest[0]) == len(longest[1]) > WINDOW // 8, "an answer is as long as it may be, whatever the window is"


def test_a_prompt_too_short_to_be_cut_is_answered_as_far_as_the_pool_holds(model: Model) -> None:
    """A longer one is, and so is this one where the context is the window."""
    pool, context = small(model, kv_cache_tokens=WINDOW, max_model_len=4 * WINDOW), small(model)
    for length in (WINDOW // 2, WINDOW * 5 // 8, WINDOW * 3 // 4):
        asked = ask(f"{length}", words(5, length), WINDOW)
        told = events(pool, asked)
        assert told[-1].finish_reason == "length" and told[-1].reuse.truncated is None
        assert [event.token for event in told] == answer(context, asked)
    with pytest.raises(PoolTooSmall, match="lower max_tokens"):
        pool.add(ask("disabled", words(5, WINDOW // 2), WINDOW, how=None))


def test_states_made_behind_states_made_behind_others_are_made_anew_before_the_pool_is_too_small_for_them_all() -> None:
    talk, reasons = Talk(small(kv_cache_tokens=5 * WINDOW)), list[str | None]()
    for _ in range(40):
        told = talk.turn().reuse.truncated
        reasons += [told.recomputed] if told is not None else []
    assert set(reasons) == {None, "pool"} and reasons.count("pool") < len(reasons) / 4


def test_the_first_cut_after_an_eviction_says_that_there_were_states(model: Model) -> None:
    talk = Talk(small(model))
    while True:
        talk.engine.clear_cache()
        if (event := talk.turn()).reuse.truncated is not None:
            break
    assert event.reuse.truncated.recomputed == "evicted"
    cold = events(small(model), ask("cold", talk.history))[-1].reuse.truncated
    assert cold is not None and cold.recomputed == "cold"


def test_after_eviction_a_conversation_is_computed_again_and_goes_on(model: Model) -> None:
    talk = Talk(small(model))
    first = talk.until_cut().reuse.truncated
    talk.engine.clear_cache()
    event = talk.turn()
    told = event.reuse.truncated
    assert told and first and (told.ranges, told.recomputed, told.moved) == (first.ranges, "evicted", 0)
    assert event.reuse.miss is not None and event.reuse.miss.reason == "evicted"
    later = talk.turn()
    assert later.num_cached_tokens == later.num_prompt_tokens - 13


def test_states_that_are_kept_below_the_pool_are_brought_back_and_moved(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were computed behind moved ones."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)  # on a busy machine a model of this size is sooner computed
    talk, again = Talk(small(model, host_gib=0.01)), 0
    for _ in range(16):
        event = talk.turn()
        told = event.reuse.truncated
        if told is not None:
            again += 1
            assert told.moved and told.recomputed is None
            assert event.num_prompt_tokens - event.num_cached_tokens <= 13 + 3 * PAGE, "but for ends that are not worth keeping"
            assert sum(event.reuse.tiers.values()) > 0.8 * event.num_cached_tokens
        settled(talk.engine)
        talk.engine.clear_cache()
    assert again > 10


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_cut_conversation_that_left_the_pool_answers_as_from_the_pool_and_loads_only_what_it_reads(
    model: Model, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that it dropped, and nothing of what its states were computed behind."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    place = {"host_gib": 0.01} if tier == "host" else {"disk_gib": 0.01, "disk_dir": str(tmp_path)}
    stays, leaves, cuts = Talk(small(model)), Talk(small(model, **place)), set[int]()
    for _ in range(24):
        before = loaded(leaves.engine)
        wanted, event = stays.turn(), leaves.turn()
        assert leaves.said == stays.said
        assert event.reuse.truncated == wanted.reuse.truncated
        came, told = loaded(leaves.engine) - before, event.reuse.truncated
        if told is not None:
            cuts.add(told.dropped)
            assert told.moved and 0 < came <= sum(event.reuse.tiers.values()) + PAGE <= event.num_prompt_tokens
        settled(leaves.engine)
        leaves.engine.clear_cache()
    assert len(cuts) > 3 and max(cuts) > 2 * WINDOW, "it was cut again and again"
    assert leaves.engine.pages_in_use == 0
    leaves.engine.close()


@pytest.mark.parametrize("page", [PAGE, 32])
def test_a_cut_conversation_goes_on_after_a_restart_as_if_there_had_been_none(
    model: Model, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    options: dict[str, object] = {"page_size": page, "max_model_len": WINDOW if page == PAGE else 256}
    place = {"disk_gib": 0.01, "disk_dir": str(tmp_path)}
    stays, leaves, cuts = Talk(small(model, **options), opening=110), Talk(small(model, **options, **place), opening=110), set[int]()
    for _ in range(12 if page == PAGE else 20):
        leaves.engine.close()
        leaves.engine = small(model, **options, **place)
        wanted, event = stays.turn(), leaves.turn()
        assert leaves.said == stays.said
        assert event.reuse.truncated == wanted.reuse.truncated
        if event.reuse.truncated is not None:
            cuts.add(event.reuse.truncated.dropped)
            assert event.reuse.truncated.moved and event.reuse.truncated.recomputed is None and event.reuse.miss is None
            assert sum(event.reuse.tiers.values()) == event.reuse.tiers["disk"] == event.num_cached_tokens
            assert event.num_prompt_tokens - event.num_cached_tokens <= 13 + 2 * WORTH_KEEPING, "and ends that are not worth keeping"
    assert len(cuts) > 1, "it was cut again and again"
    leaves.engine.close()


def kept_cut(model: Model, folder: Path, **more: object) -> Talk:
    """A conversation that was cut, and what a new process finds of it on disk."""
    talk = Talk(small(model, disk_gib=0.01, disk_dir=str(folder), **more), opening=110)
    talk.until_cut()
    talk.engine.close()
    talk.engine = small(model, disk_gib=0.01, disk_dir=str(folder), **more)
    return talk


def test_what_was_made_of_the_latest_cuts_is_what_would_be_made_again(model: Model) -> None:
    made, again = Talk(small(model)), Talk(small(model))
    again.engine.truncations = again.engine.cutting._truncations = Truncations(
        again.engine.tree, again.engine.scheduler.below, WINDOW, again.engine.scheduler.clock, None, ready=0
    )
    cuts = 0
    for _ in range(30):
        mine, theirs = made.turn(), again.turn()
        assert (made.said, mine.reuse) == (again.said, theirs.reuse)
        cuts += mine.reuse.truncated is not None and mine.reuse.truncated.recomputed is None
        if cuts:
            layouts = [recalled(talk) for talk in (made, again)]
            assert all(layout is not None and layout.runs for layout in layouts)
            [spans, others] = [[(run.tokens, run.position, run.digest) for run in layout.runs] for layout in layouts if layout is not None]
            assert spans == others and layouts[0] is recalled(made) and layouts[1] is not recalled(again)
    assert cuts > 20


def test_layouts_that_are_kept_as_they_were_made_are_bounded_in_tokens() -> None:
    tree = PrefixTree(PAGE)
    truncations = Truncations(tree, None, WINDOW, lambda: 0.0, None, ready=3 * WINDOW)
    home, kept = Lineage.of(b"tenant"), list[Layout]()
    for seed in range(8):
        history, keys = words(seed, WINDOW), list[Key]()
        extend_keys(keys, home, history, PAGE)
        kept.append(Layout(((0, PAGE),), WINDOW // 2))
        truncations.remember(history, kept[-1], home, keys)
    found = [truncations._recall(words(seed, WINDOW), home, []) for seed in range(8)]
    assert all(mine is not None and mine.spans == theirs.spans for mine, theirs in zip(found, kept, strict=True)), "none is forgotten"
    assert [mine is theirs for mine, theirs in zip(found, kept, strict=True)] == [False] * 2 + [True] * 6


def recalled(talk: Talk, tenant: Tenant | None = None) -> Layout | None:
    return talk.engine.truncations._recall(talk.history, talk.engine.admission.lineage(tenant or Tenant(), 0), [])


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "foreign", "gone", "text"])
def test_what_was_remembered_on_disk_and_is_damaged_or_foreign_cuts_nothing(damage: str, tmp_path: Path) -> None:
    model = tiny_model()
    other = Talk(small(model, disk_gib=0.01, disk_dir=str(tmp_path)), seed=2, opening=110)
    other.until_cut()
    other.engine.close()
    talk = kept_cut(model, tmp_path)
    assert recalled(talk) is not None
    with sqlite3.connect(tmp_path / "v1/index.sqlite") as index:
        notes = index.execute("SELECT id, note FROM notes ORDER BY id").fetchall()
        assert len(notes) == 2
        for number, (name, note) in enumerate(notes):
            flipped = [bytes([*note[:place], note[place] ^ 1, *note[place + 1 :]]) for place in (0, 31, 32, 36, len(note) - 1)]
            bad = {"short": note[:-3], "empty": b"", "foreign": notes[1 - number][1], "gone": None, "text": "[[[0, 8]], 96, []]"}
            for given in flipped if damage == "flipped" else [bad[damage]]:
                index.execute("DELETE FROM notes WHERE id = ?" if given is None else f"UPDATE notes SET note = ? WHERE id = {name}",
                              (name if given is None else given,))  # fmt: skip
                index.commit()
                assert number == 0 or recalled(talk) is None
    index.close()
    prompt = [*talk.history, *words(7, 9)]
    found = events(talk.engine, ask("next", prompt))
    assert [event.token for event in found] == Expected(model).of_the_rest(talk.engine, ask("next", prompt))
    talk.engine.close()


def test_what_was_remembered_on_disk_is_the_tenants_alone_and_goes_with_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = kept_cut(tiny_model(), tmp_path, ttl=1000)
    assert recalled(talk) is not None and recalled(talk, Tenant(b"other")) is None
    store = talk.engine.store
    assert store is not None and store.notes is not None
    monkeypatch.setattr(store.notes, "_clock", lambda: time.time() + 1001)
    assert recalled(talk) is None, "nobody used it for too long"
    monkeypatch.undo()
    assert recalled(talk) is not None
    disk = store.below[0]
    assert isinstance(disk, DiskTier) and purge(disk, tenant_tag(b"other")) == 0 and recalled(talk) is not None
    assert purge(disk, tenant_tag(b"")) > 0 and recalled(talk) is None
    talk.engine.close()


def loaded(engine: Engine) -> int:
    assert engine.store is not None
    return sum(engine.store.facts().loaded.values())


def test_kept_states_that_turn_out_to_be_damaged_are_made_again_as_they_were(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    stays, leaves = Talk(small(model)), Talk(small(model, disk_gib=0.01, disk_dir=str(tmp_path)))
    for talk in (stays, leaves):
        while (told := talk.turn().reuse.truncated) is None or told.dropped < WINDOW:
            pass
    settled(leaves.engine)
    leaves.engine.clear_cache()
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 600 and "sqlite" not in file.name):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
    store = leave_host(leaves.engine)
    wanted, event = stays.turn(), leaves.turn()
    assert leaves.said == stays.said and event.reuse.truncated == wanted.reuse.truncated
    assert store.facts().lost["corrupt"]
    again = leaves.turn()
    assert again.num_prompt_tokens - again.num_cached_tokens == 13, "what was made again is there again"
    settled(leaves.engine)
    leaves.engine.clear_cache()
    assert leaves.engine.pages_in_use == 0
    leaves.engine.close()


def leave_host(engine: Engine) -> Store:
    """What is on disk is in host memory no longer."""
    assert engine.store is not None
    above = [page.key for page in engine.store.ledger.held("host")]
    engine.store.ledger.drop(above, "host")
    engine.store.host.drop(above)
    return engine.store


def stick(engine: Engine) -> Stuck:
    """Whatever the engine kept is on disk alone, and the disk does not answer."""
    evict(engine)
    store = leave_host(engine)
    stuck = Stuck(store.below[0])
    store.below, store.transfer.tiers["disk"] = (stuck,), stuck
    return stuck


@pytest.mark.parametrize("alone", [True, False])
def test_kept_states_that_do_not_come_are_made_again_as_they_were(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    stays, leaves = Talk(small(model), opening=110), Talk(small(model, disk_gib=0.01, disk_dir=str(tmp_path)), opening=110)
    for talk in (stays, leaves):
        talk.until_cut()
    engine, stuck = leaves.engine, stick(leaves.engine)
    monkeypatch.setattr(transfer, "LATE", 0.05)
    if not alone:
        engine.add(ask("other", words(23, 5), 100, None))
        engine.step()
        assert engine.store is not None
        engine.store._now = lambda: time.monotonic() + 0.01 * engine.steps  # type: ignore[method-assign]
    wanted, event = stays.turn(), leaves.turn()
    assert leaves.said == stays.said and event.reuse.truncated == wanted.reuse.truncated
    assert dict(event.reuse.tiers) == {}
    stuck.free.set()
    evict(engine)
    assert engine.pages_in_use == 0
    engine.close()


def test_a_tier_that_does_not_answer_is_not_waited_for_again_however_often_a_conversation_was_cut(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    stays, leaves = Talk(small(model), opening=110), Talk(small(model, disk_gib=0.01, disk_dir=str(tmp_path)), opening=110)
    for talk in (stays, leaves):
        talk.until_cut()
        for _ in range(8):
            talk.turn()
    engine, stuck = leaves.engine, stick(leaves.engine)
    monkeypatch.setattr(transfer, "LATE", 0.05)
    loads, load = list[Load](), engine.store.load
    monkeypatch.setattr(engine.store, "load", lambda *given: (loads.append(load(*given)), loads[-1])[1])
    stays.turn()
    leaves.turn()
    assert leaves.said == stays.said
    assert len(loads) == 3 and any(each.late for each in loads), "of what it reads, and not of what that was made behind"
    stuck.free.set()
    evict(engine)
    assert engine.pages_in_use == 0
    engine.close()


def test_what_was_dropped_gives_its_pages_to_others_while_the_rest_is_read(model: Model) -> None:
    talk = Talk(small(model, kv_cache_tokens=60 * PAGE), opening=110)
    talk.turn()
    engine = talk.engine
    engine.add(ask("cut", talk.history + words(7, 10), 30))
    while not engine.scheduler.running:
        engine.step()
    [row] = engine.scheduler.running
    assert row.truncated is not None and row.truncated.dropped == 64 and not row.truncated.recomputed
    read = {page for found in row.imports for segment in found.path() for page in segment.pages}
    assert engine.tree.pages - engine.tree.evictable() == len(read) + row.settled // PAGE
    drain(engine)


def test_states_that_go_between_asking_and_running_are_made_again() -> None:
    """Behind what was dropped, as they were: the answer is the same."""
    talk = Talk(small(), opening=110)
    talk.turn()
    prompt = talk.history + words(7, 10)
    wanted = answer(talk.engine, ask("wanted", prompt))
    talk.engine.clear_cache()
    talk.turns, talk.history = 0, words(1, 110)
    talk.turn()
    talk.engine.add(ask("late", prompt))
    talk.engine.clear_cache()
    found = drain(talk.engine)["late", 0]
    assert [event.token for event in found] == wanted
    assert found[-1].reuse.miss is not None and found[-1].reuse.miss.reason == "evicted"


@pytest.mark.parametrize("seed", range(3))
def test_a_truncated_row_that_is_preempted_answers_the_same(seed: int) -> None:
    model, found = tiny_model(), []
    for tokens in (4096, 300):
        engine = small(model, kv_cache_tokens=tokens)
        talk = Talk(engine, opening=110)
        talk.turn()
        others = [ask(f"{i}", words(50 + 10 * seed + i, 40), 60, None) for i in range(3)]
        cut = run(engine, [*others, ask("cut", talk.history + words(7, 10), 30)])
        found.append({name: [event.token for event in each] for name, each in cut.items()})
        assert cut["cut", 0][-1].reuse.truncated and cut["cut", 0][-1].reuse.truncated.moved
    assert engine.scheduler.preemptions
    assert found[0] == found[1]
    prompt = talk.history + words(7, 10) + found[1]["cut", 0] + words(8, 4)
    assert events(engine, ask("next", prompt))[-1].reuse.truncated, "recognised"


# ---- other histories


def test_an_edited_history_reuses_what_is_shared_and_says_where_it_diverged(model: Model) -> None:
    talk = Talk(small(model), opening=110)
    talk.turn()
    edited = [*talk.history[:100], (talk.history[100] + 1) % 256, *talk.history[101:], *words(7, 10)]
    event = events(talk.engine, ask("edited", edited))[-1]
    told = event.reuse.truncated
    assert told is not None and told.moved
    assert event.reuse.miss is not None
    assert (event.reuse.miss.reason, told.whole(event.reuse.miss.token)) == ("diverged", 100)
    assert event.num_cached_tokens == 100 - told.dropped


def test_an_edit_behind_the_moved_states_reuses_what_is_shared_and_says_where_it_diverged(model: Model) -> None:
    talk = Talk(small(model))
    talk.until_cut()
    place = len(talk.history) - 3
    edited = [*talk.history[:place], (talk.history[place] + 1) % 256, *talk.history[place + 1 :], *words(7, 10)]
    event = events(talk.engine, ask("edited", edited))[-1]
    told, miss = event.reuse.truncated, event.reuse.miss
    assert told is not None and miss is not None
    assert (miss.reason, told.whole(miss.token)) == ("diverged", place)


def test_an_edit_within_an_end_that_the_disk_has_too_says_where_it_diverged(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    engine = small(model, disk_gib=0.01, disk_dir=str(tmp_path), page_size=32, max_model_len=256)
    talk = Talk(engine, opening=246)
    talk.turn()
    settled(engine)
    place = 247  # of an end that begins at 224
    edited = [*talk.history[:place], (talk.history[place] + 1) % 256, *talk.history[place + 1 :], *words(7, 10)]
    event = events(engine, ask("edited", edited))[-1]
    told, miss = event.reuse.truncated, event.reuse.miss
    assert told is not None and told.moved and miss is not None
    assert (miss.reason, told.whole(miss.token)) == ("diverged", place)
    engine.close()


def test_a_history_that_ends_where_the_moved_states_do_is_answered(model: Model) -> None:
    talk = Talk(small(model))
    talk.until_cut()
    remembered = recalled(talk)
    assert remembered is not None
    event = events(talk.engine, ask("shorter", talk.history[: remembered.end], 30))[-1]
    assert event.reuse.truncated is not None
    assert event.num_cached_tokens == event.num_prompt_tokens - 1 == remembered.placed - 1


def test_tenants_share_neither_states_nor_what_is_remembered(model: Model) -> None:
    engine, history = small(model), words(1, 117)
    anna, bert = Tenant(b"a", b"a"), Tenant(b"b", b"b")
    events(engine, ask("anna", history, 1, tenant=anna))
    prompt = history + words(2, 10)
    reasons = [events(engine, ask(f"{who}", prompt, tenant=who))[-1].reuse.truncated for who in (anna, bert)]
    assert reasons[0] and reasons[1]
    assert (reasons[0].recomputed, reasons[1].recomputed) == (None, "cold")


def test_a_public_beginning_is_found_where_it_is_everyones(model: Model) -> None:
    engine, history = small(model), words(1, 117)
    anna = Tenant(b"a", b"a")
    events(engine, ask("anna", history, 1, tenant=anna, public=20))
    event = events(engine, ask("longer", history + words(2, 10), tenant=anna, public=20))[-1]
    told = event.reuse.truncated
    assert told is not None and told.ranges[0][0] == 20 and told.moved, "all of it stays"
    assert event.num_cached_tokens == event.num_prompt_tokens - 11


@pytest.mark.parametrize("span", [(8, 16), (8, 20), (8, 40)])
def test_what_stands_behind_a_public_part_that_was_dropped_stays_each_tenants_own(
    model: Model, span: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    engine, history = small(model, host_gib=0.01), words(1, 100)
    anna, bert, carl = (Tenant(name, name) for name in (b"a", b"b", b"c"))
    for who in (anna, bert):
        events(engine, ask(f"{who}", history, 1, tenant=who, public=20))
    found = []
    for _ in range(2):
        for who in (anna, bert):
            found.append(events(engine, ask("cut", history + words(2, 9), 6, None, drop=[span], tenant=who, public=20)))
            told = found[-1][-1].reuse.truncated
            assert told is not None and told.moved == 100 - span[1]
        settled(engine)
        engine.clear_cache()
    assert len({tuple(event.token for event in each) for each in found}) == 1
    assert all(each[-1].num_cached_tokens - sum(each[-1].reuse.tiers.values()) == 0 for each in found[2:3])
    other = events(engine, ask("other", history + words(2, 9), 6, None, drop=[span], tenant=carl, public=20))[-1].reuse.truncated
    assert other is not None and other.moved == max(0, 20 - span[1]), "what is public, and no more"


def test_what_stands_in_the_place_of_a_public_part_that_was_dropped_is_not_public() -> None:
    engine, history = small(tiny_model(positions="learned")), words(1, 100)
    for who, cached in ((b"a", 0), (b"b", 8)):
        event = events(engine, ask("cut", history, 1, None, drop=[(8, 16)], tenant=Tenant(who, who), public=20))[-1]
        assert event.num_cached_tokens == cached


def test_little_is_remembered_of_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pando.engine.truncation.REMEMBERED", 4)
    engine = small()
    talks = [Talk(engine, seed) for seed in range(6)]
    for talk in talks:
        talk.until_cut()
    assert len(engine.truncations._notes) == 4
    assert all(len(note) < 100 for note in engine.truncations._notes.values()), "the tokens come with the history"
    known, unknown = talks[-1].turn(), talks[0].turn()
    assert known.num_prompt_tokens - known.num_cached_tokens == 13 < unknown.num_prompt_tokens - unknown.num_cached_tokens


def test_a_known_prompt_that_is_cut_has_diverged_from_nothing() -> None:
    engine, prompt = small(), words(1, 100)
    answer(engine, ask("whole", prompt))
    assert events(engine, ask("cut", prompt, how=None, drop=[(8, 40)]))[-1].reuse.miss is None
    miss = events(engine, ask("other", [*prompt[:90], 1, 2, 3], how=None, drop=[(8, 40)]))[-1].reuse.miss
    assert miss is not None and miss.reason == "diverged"


# ---- what makes no sense


@pytest.mark.parametrize(
    ("drop", "told"),
    [
        ([(-1, 4)], "no part of a prompt"),
        ([(8, 8)], "no part of a prompt"),
        ([(12, 8)], "no part of a prompt"),
        ([(8, 20), (16, 24)], "in order, without overlaps"),
        ([(16, 24), (8, 12)], "in order, without overlaps"),
        ([(8, 100)], "the prompt has 100 tokens, the last of which is needed"),
        ([(8, 1000)], "the prompt has 100 tokens"),
        ([(8, 12.5)], "pair of whole numbers"),
        ([(8, True)], "pair of whole numbers"),
        ([(8,)], "pair of whole numbers"),
        ([8], "pair of whole numbers"),
        (5, "a list of pairs of whole numbers"),
    ],
)
def test_parts_that_cannot_be_dropped_are_refused(drop: object, told: str) -> None:
    engine = small()
    with pytest.raises(InvalidPrompt, match=told):
        engine.add(ask("x", words(1, 100), how=None, drop=drop))
    assert not engine.has_work


def test_a_beginning_that_fills_the_window_alone_is_refused_in_words_that_make_sense() -> None:
    engine = small()
    with pytest.raises(PromptTooLong, match="the first 131 tokens stay, and there are no others that could make room in a context of 128"):
        engine.add(ask("x", words(1, 131), how=Truncation(keep=131)))
    with pytest.raises(PromptTooLong, match="the first 128 tokens stay, and what may be dropped of the other 3 does not make room"):
        engine.add(ask("x", words(1, 131), how=Truncation(keep=126)))


def test_the_pin_of_a_turn_gives_way_to_that_of_the_next_however_the_conversation_was_cut() -> None:
    engine = small()
    engine.pins.quota = engine.pages.count
    talk, cuts = Talk(engine), 0
    for _ in range(12):
        event = talk.turn()
        cut = event.reuse.truncated
        cuts += cut is not None
        pin = engine.pin(talk.history, Tenant(), 0, 60, automatic=True, is_cut=cut is not None)
        assert pin.tokens == len(talk.history) - (cut.dropped if cut is not None else 0) - 1, "the last token has no states yet"
        assert list(engine.pins) == [pin]
        assert len(pin.pages) <= engine.pages.needed(pin.tokens) + 2, "of what was dropped nothing is held; there may be two unfilled pages"
    assert cuts > 4
    engine.clear_cache()
    again = events(engine, ask("again", talk.history))
    assert again[0].num_cached_tokens >= pin.tokens - 1
    engine.pins.drop(pin)
    engine.clear_cache()
    assert engine.pages.free == engine.pages.count


def test_the_logprobs_of_a_prompt_that_fits_are_told_though_it_might_be_cut() -> None:
    engine, prompt = small(), words(1, 120)
    whole = run(engine, [ask("x", prompt, how=None, score=True)])["x", 0][0]
    allowed = run(engine, [ask("y", prompt, score=True)])["y", 0][0]
    assert whole.prompt_logprobs is not None and whole.prompt_logprobs == allowed.prompt_logprobs and allowed.reuse.truncated is None


def test_what_does_not_go_together_is_refused() -> None:
    engine, prompt = small(), words(1, 100)
    with pytest.raises(InvalidPrompt, match="give one of the two"):
        engine.add(ask("x", prompt, drop=[(8, 16)]))
    with pytest.raises(InvalidPrompt, match="made of modules"):
        engine.add(ask("x", prompt, runs=[Run((1, 2), 0, Origin((), 0))]))
    with pytest.raises(InvalidPrompt, match="logprobs"):
        engine.add(ask("x", words(1, 131), score=True))
    with pytest.raises(InvalidPrompt, match="logprobs"):
        engine.add(ask("x", prompt, how=None, score=True, drop=[(8, 16)]))
    with pytest.raises(InvalidPrompt, match="no token of this model"):
        engine.add(ask("x", [*prompt, 999]))
    for values in ({"keep": -1}, {"keep": 1.5}, {"recent": True}, {"share": 0}, {"share": 1.5}):
        with pytest.raises(InvalidOption, match=next(iter(values))):
            Truncation(**values)  # type: ignore[arg-type]
    assert not engine.has_work


def test_parts_are_narrowed_to_whole_pages_and_the_response_says_to_what() -> None:
    engine = small()
    narrowed = events(engine, ask("x", words(1, 100), how=None, drop=[(5, 19), (21, 23)]))[-1].reuse.truncated
    assert narrowed is not None and narrowed.ranges == ((8, 16),)
    nothing = events(engine, ask("y", words(1, 100), how=None, drop=[(5, 7)]))[-1].reuse.truncated
    assert nothing is not None and nothing.dropped == 0


def test_a_layout_knows_where_its_tokens_were() -> None:
    layout = Layout(((0, 8), (20, 30)), 40)
    assert layout.left(list(range(50))) == [*range(8), *range(20, 30), *range(40, 50)]
    assert layout.dropped == ((8, 20), (30, 40))
    again = layout.without([(8, 12)], ())
    assert again.left(list(range(50))) == [*range(8), *range(24, 30), *range(40, 50)]
    assert (again.dropped, again.end) == (((8, 24), (30, 40)), 40)
    further = layout.without([(8, 20)], ())
    assert further.left(list(range(50))) == [*range(8), *range(42, 50)]
    assert (further.dropped, further.end) == (((8, 42),), 42)


# ---- offline


def test_a_chat_goes_on_past_the_window_and_keeps_its_system_prompt() -> None:
    llm = tiny_llm(max_model_len=200)
    talk = [{"role": "system", "content": "Be brief and kind."}]
    dropped_tokens = 0
    for turn in range(12):
        talk.append({"role": "user", "content": f"This is what I say in turn {turn}."})
        [output] = llm.chat(talk, greedy(8), truncation="auto")
        told = output.reuse.truncated
        if told is not None:
            opening = "system: Be brief and kind.\nuser: "
            assert told.ranges[0][0] >= len(opening) and told.ranges[0][0] < len(opening) + 4
            assert output.num_cached_tokens
            dropped_tokens = told.dropped
        talk.append({"role": "assistant", "content": "x" * 8})
    assert dropped_tokens > 100


def test_offline_prompts_are_cut_as_asked() -> None:
    llm = tiny_llm(max_model_len=WINDOW)
    prompt = words(1, 100)
    [cut] = llm.generate(prompt, greedy(4), drop=[(8, 16)])
    assert cut.reuse.truncated is not None and cut.reuse.truncated.dropped == 8
    [auto] = llm.generate([words(2, 200)], greedy(4), truncation="auto")
    assert auto.reuse.truncated is not None and auto.reuse.truncated.recomputed == "cold"
    streamed = list(llm.stream(words(2, 200), greedy(4), truncation=Truncation(keep=16)))
    assert streamed[-1].reuse.truncated is not None
    with pytest.raises(PromptTooLong, match="truncation"):
        llm.generate([words(2, 200)], greedy(4))
    with pytest.raises(InvalidOption, match=r"truncation is 'always'; it must be auto, disabled"):
        llm.generate(prompt, greedy(4), truncation="always")  # type: ignore[arg-type]
