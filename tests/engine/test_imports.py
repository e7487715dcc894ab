"""Rows whose context is a list of runs: modules, arguments between them, and the words at the end."""

import random

import pytest
import torch

from pando.engine import makers
from pando.engine.engine import Engine
from pando.engine.imports import find
from pando.engine.request import Request, Tenant, TokenEvent
from pando.errors import InvalidOption, InvalidPrompt, PoolTooSmall, PromptTooLong
from pando.kv.run import Origin, Run

from ..tiny import drain, greedy, run, tiny_engine, tiny_model

PAGE = 4


def words(seed: int, count: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(256) for _ in range(count))


OPENING = Run(words(1, 10), 0, Origin((), 0))


def module(seed: int, count: int, position: int, first: int | None = None, context: tuple[Run, ...] = (OPENING,)) -> Run:
    """Encoded behind a context, and placed anywhere."""
    return Run(words(seed, count), position, Origin(context, context[-1].end if first is None and context else first or 0))


def ask(name: str, runs: list[Run], prompt: tuple[int, ...] = words(9, 6), tokens: int = 8, **more: object) -> Request:
    return Request(name, prompt, greedy(tokens), runs=runs, **more)  # type: ignore[arg-type]


def answer(engine: Engine, request: Request) -> list[int]:
    return tokens_of(run(engine, [request]))[request.request_id, 0]


def tokens_of(events: dict[tuple[str, int], list[TokenEvent]]) -> dict[tuple[str, int], list[int]]:
    return {name: [event.token for event in found] for name, found in events.items()}


@pytest.fixture(params=["rope", "alibi"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return tiny_engine(tiny_model(positions=request.param))


def test_a_causal_chain_of_modules_answers_as_the_plain_prompt_does(engine: Engine) -> None:
    a = module(2, 7, 10)
    b = module(3, 13, 17, context=(OPENING, a))
    plain = answer(tiny_engine(engine.model), Request("plain", [*OPENING.tokens, *a.tokens, *b.tokens, *words(9, 6)], greedy(8)))
    found = run(engine, [ask("chain", [OPENING, a, b])])["chain", 0]
    assert [event.token for event in found] == plain
    assert found[-1].reuse.modules == 0, "nothing of it was approximate"
    assert found[-1].num_prompt_tokens == 36


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_long_chain_of_modules_is_made_however_few_rows_may_run(rows: int) -> None:
    chain = [OPENING]
    for seed in range(2, 7):
        chain.append(module(seed, 7, chain[-1].end, context=tuple(chain)))
    plain = answer(tiny_engine(), Request("plain", [*(token for one in chain for token in one.tokens), *words(9, 6)], greedy(8)))
    assert answer(tiny_engine(max_num_seqs=rows), ask("chain", chain)) == plain
    assert run(tiny_engine(max_num_seqs=rows), [ask("last", chain[-1:])], steps=200)["last", 0]


def test_a_prompt_that_ends_with_a_module_answers_as_the_plain_prompt_does(engine: Engine) -> None:
    a = module(2, 7, 10)
    for end in (a, module(3, 8, 17, context=(OPENING, a)), module(4, 1, 17, context=(OPENING, a))):
        runs = [OPENING, a] if end is a else [OPENING, a, end]
        plain = answer(tiny_engine(engine.model), Request("plain", [t for one in runs for t in one.tokens], greedy(8)))
        assert answer(engine, ask(f"chain {len(end)}", runs, ())) == plain


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a_module_at_the_end_is_made_whole_and_once(engine: Engine, length: int) -> None:
    """Only its last token is computed again, for the answer."""
    end = module(2, length, 10)
    first = run(engine, [ask("first", [OPENING, end], ())])["first", 0]
    assert engine.holds(end, Tenant())
    before = engine.totals.tokens
    again = run(engine, [ask("again", [OPENING, end], (), tokens=1)])["again", 0]
    assert engine.totals.tokens - before == 1
    assert (again[0].token, again[0].num_cached_tokens) == (first[0].token, 10 + length - 1)
    inside = run(engine, [ask("inside", [OPENING, end], tokens=1)])["inside", 0]
    assert inside[0].num_cached_tokens == 10 + length, "nor is it made again where something follows it"


def test_a_module_at_the_end_of_one_prompt_and_in_the_middle_of_another_is_read_once(engine: Engine) -> None:
    long = module(2, 160, 10)
    requests = [ask("end", [OPENING, long], ()), ask("middle", [OPENING, long])]
    for request in requests:
        engine.add(request)
    shared: set[tuple[int, ...]] = set()
    while engine.has_work:
        engine.step()
        shared |= {read.rows for read in engine.batcher.plan.shared_reads if read.tokens >= 156}
    assert shared == {(0, 1)}


def test_words_between_modules_are_computed_where_they_stand(engine: Engine) -> None:
    """Also as a whole: new words behind everything before them are the plain prompt again."""
    runs = [OPENING, Run(words(5, 9), 10), Run(words(6, 3), 19)]
    plain = answer(tiny_engine(engine.model), Request("plain", [*OPENING.tokens, *words(5, 9), *words(6, 3), *words(9, 6)], greedy(8)))
    assert answer(engine, ask("in place", runs)) == plain


def test_a_module_elsewhere_answers_as_if_it_had_been_encoded_there(engine: Engine) -> None:
    """It sees the same tokens either way; only positions differ, and they count as differences alone."""
    alone = Run(words(2, 11), 30, Origin((), 0))
    there = Run(words(2, 11), 30, Origin((), 30))
    moved, stored = (answer(tiny_engine(engine.model), ask("x", [OPENING, one])) for one in (alone, there))
    assert moved == stored
    near = answer(tiny_engine(engine.model), ask("x", [OPENING, Run(words(2, 11), 10, Origin((), 0))]))
    assert moved != near or engine.model.decoder.geometry.freqs is None, "the place does not matter to this model, so this shows nothing"


def test_a_module_at_many_positions_is_encoded_once_and_read_once(engine: Engine) -> None:
    text = words(2, 40)
    requests = [
        ask(f"{i}", [OPENING, Run(text, 10 + 5 * i, Origin((OPENING,), 10))], words(20 + i, 3), position=60 + 5 * i) for i in range(8)
    ]
    alone = {
        f"{i}": answer(tiny_engine(engine.model), ask(f"{i}", list(requests[i].runs), tuple(requests[i].prompt), position=60 + 5 * i))
        for i in range(8)
    }
    for request in requests:
        engine.add(request)
    shared: set[tuple[tuple[int, ...], ...]] = set()
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event.token)
        shared |= {(read.rows, read.shifts) for read in engine.batcher.plan.shared_reads if read.tokens == 40}
    assert found == alone
    assert (tuple(range(8)), tuple(5 * i for i in range(8))) in shared
    assert sum(stem.segment.tokens[:PAGE] == text[:PAGE] for stem in engine.tree.stems()) == 1


def test_new_text_between_modules_is_no_miss(engine: Engine) -> None:
    first, last = module(2, 21, 10), module(3, 6, 36)

    def asked(name: str, seed: int) -> list[Run]:
        return [OPENING, first, Run(words(seed, 5), 31), last]

    before = run(engine, [ask("before", [OPENING, first])])["before", 0][-1].reuse
    assert before.miss is not None and (before.miss.reason, before.miss.token) == ("cold", 0)
    told = run(engine, [ask("last", asked("last", 70))])["last", 0][-1].reuse
    assert told.miss is not None and (told.miss.reason, told.miss.token) == ("cold", 36), "the module, and not the text before it"
    assert run(engine, [ask("again", asked("again", 71))])["again", 0][-1].reuse.miss is None


def test_a_module_is_there_for_the_next_request_and_its_tokens_count_as_cached(engine: Engine) -> None:
    runs = [OPENING, module(2, 21, 10), module(3, 6, 31)]
    first = run(engine, [ask("first", runs)])["first", 0][-1]
    assert (first.num_cached_tokens, first.reuse.miss.reason if first.reuse.miss else None) == (0, "cold")
    second = run(engine, [ask("second", [OPENING, module(3, 6, 10), module(2, 21, 16)], words(30, 5))])["second", 0][-1]
    assert second.num_cached_tokens == 37
    assert second.reuse.miss is None
    assert second.reuse.modules == 21, "the shorter one stands right behind the opening, where it was encoded: that is exact"


def test_the_same_prompt_again_reuses_its_own_words_too(engine: Engine) -> None:
    runs = [OPENING, module(2, 21, 10)]
    answer(engine, ask("first", runs, words(9, 12)))
    assert run(engine, [ask("second", runs, words(9, 12))])["second", 0][-1].num_cached_tokens == 31 + 11


def test_modules_are_encoded_in_one_batch() -> None:
    engine = tiny_engine(max_num_batched_tokens=256)
    engine.add(ask("x", [OPENING, *(module(2 + i, 8, 10 + 8 * i) for i in range(5))]))
    rows = []
    while engine.has_work:
        engine.step()
        rows.append(engine.facts.rows)
    assert rows[:2] == [7, 1], "the opening, five modules behind it, and the row behind all of these"


def interleaved(texts: int) -> list[Run]:
    """Modules, and a text of the prompt's own behind each."""
    runs: list[Run] = [OPENING]
    for place in range(texts):
        runs.append(module(20 + place, 5 + place % 4, runs[-1].end))
        runs.append(Run(words(40 + place, 1 + place % 6), runs[-1].end))
    return runs


HOW = [{}, {"attention": "flat"}, {"attention": "shared"}, {"attention": "reference"}, {"native": False}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_texts_between_modules_are_computed_in_one_step_and_answered_as_if_one_by_one(positions: str, how: dict[str, object]) -> None:
    model, asked, told = tiny_model(positions=positions), interleaved(9), []
    for budget in (8, 24, 512):
        engine = tiny_engine(model, max_num_batched_tokens=budget, **how)
        engine.encode([run for run in asked if run.origin is not None], Tenant())
        drain(engine)
        engine.add(ask("x", asked))
        first = engine.step()
        assert bool(first) == (budget == 512)
        events = [*first, *drain(engine)["x", 0]]
        reuse = events[-1].reuse
        told.append(([event.token for event in events], events[-1].num_cached_tokens, reuse.modules, reuse.miss))
        assert answer(engine, ask("again", asked)) == told[-1][0]
    assert told[0] == told[1] == told[2]


def test_who_reads_what_a_step_did_not_compute_after_all_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step memory runs out, and those behind it are smaller; the next request is cancelled while others read its texts."""
    asked, right = interleaved(9), answer(tiny_engine(max_num_batched_tokens=8), ask("x", interleaved(9)))
    engine = tiny_engine(max_num_batched_tokens=256, overlap=True)
    forward, left = engine.model.decoder.forward, iter([torch.OutOfMemoryError(), torch.OutOfMemoryError()])

    def failing(*given: object) -> torch.Tensor:
        for error in left:
            raise error
        return forward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model.decoder, "forward", failing)
    assert answer(engine, ask("x", asked)) == right and engine.scheduler.budget == 64
    engine.clear_cache()
    for name in ("first", "second", "third"):
        engine.add(ask(name, asked))
    engine.step()
    engine.cancel("first")
    found = tokens_of(run(engine, [ask("fourth", asked)]))
    assert found["fourth", 0] == right and all(tokens == right[-len(tokens) :] for tokens in found.values())


def test_what_is_lent_stays_where_it_is_although_the_tree_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is made again with less room, so that it computes a part of what was lent; what is scored brought the tree the same."""
    text = words(2, 24)
    asked = ask("x", [Run(text, 0, Origin((), 0)), Run(words(3, 5), 24, Origin((), 0))])
    engine = tiny_engine(max_num_batched_tokens=128, kv_cache_tokens=128, overlap=False)
    engine.add(Request("scored", text[:20], greedy(1), score=True))
    engine.add(asked)
    assert len(engine.scheduler.next().rows) == 4, "also the row that reads what two others compute"
    engine.scheduler.retract()
    monkeypatch.setattr(engine.scheduler, "budget", 40)
    engine.step()
    monkeypatch.setattr(engine.scheduler, "budget", 128)
    others = [Request(f"{place}", words(50 + place, 14 + place), greedy(3)) for place in range(4)]  # in whatever pages are free
    assert tokens_of(run(engine, others))["x", 0] == answer(tiny_engine(max_num_batched_tokens=8), asked)


def test_of_modules_that_wait_for_one_another_only_the_next_looks_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [OPENING]
    for seed in range(40):
        chain.append(module(50 + seed, 3, chain[-1].end, context=tuple(chain)))
    looks: list[Run] = []
    monkeypatch.setattr(makers, "find", lambda tree, want, now: looks.append(want.run) or find(tree, want, now))
    engine = tiny_engine()
    engine.encode(chain, Tenant())
    drain(engine)
    assert all(engine.holds(each, Tenant()) for each in chain)
    assert len(looks) <= 41 + 41 * 40 / 2, "each once when it is asked for, and once by each of those behind it"


def test_of_many_texts_between_modules_few_are_begun_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is behind all before it, and has a list of them."""
    asked, right = interleaved(40), answer(tiny_engine(), ask("x", interleaved(40)))
    monkeypatch.setattr(makers, "MOST_READ", 100)
    engine, listed, found = tiny_engine(), list[int](), list[int]()
    engine.add(ask("x", asked))
    while engine.has_work:
        found += [event.token for event in engine.step()]
        listed.append(sum(len(maker.wants) for maker in engine.scheduler.makers))
    assert found == right
    assert max(listed) < 100 + len(asked), "of some 3,000 in all"


def test_several_answers_share_what_stands_before_them(engine: Engine) -> None:
    request = Request("n", words(9, 6), greedy(4, n=3), runs=[OPENING, module(2, 21, 10)])
    found = tokens_of(run(engine, [request]))
    assert len(found) == 3 and found["n", 0] == found["n", 1] == found["n", 2]


def test_a_placeholder_is_seen_by_what_follows_it_and_not_kept(engine: Engine) -> None:
    """A module with a slot: its second half was encoded behind the placeholder, which no prompt ever reads."""
    a = module(2, 6, 10)
    hole = Run(words(7, 5), 16)
    b = Run(words(3, 9), 21, Origin((OPENING, a, hole), 21))
    found = run(engine, [ask("x", [OPENING, a, Run(words(8, 3), 16), b])])["x", 0]
    assert found[-1].reuse.modules == 9
    assert not any(
        stem.segment.tokens == hole.tokens[: len(stem.segment.tokens)] for stem in engine.tree.stems() if len(stem.segment.tokens)
    )
    truth = Run(words(3, 9), 21, Origin((OPENING, a, Run(hole.tokens, 16, Origin((OPENING, a), 16))), 21))
    assert answer(tiny_engine(engine.model), ask("x", [OPENING, a, Run(words(8, 3), 16), truth])) == [event.token for event in found]


def test_tenants_do_not_share_modules(engine: Engine) -> None:
    runs = [OPENING, module(2, 21, 10)]
    answer(engine, ask("a", runs, tenant=Tenant(b"a", b"a")))
    assert run(engine, [ask("b", runs, tenant=Tenant(b"b", b"b"))])["b", 0][-1].num_cached_tokens == 0
    assert run(engine, [ask("c", runs, tenant=Tenant(b"a", b"a"))])["c", 0][-1].num_cached_tokens >= 31


def test_the_cache_shows_modules_to_their_owner(engine: Engine) -> None:
    runs = [OPENING, module(2, 21, 10)]
    engine.encode(runs, Tenant(b"a", b"anna"))
    drain(engine)
    answer(engine, ask("x", runs, tenant=Tenant(b"a", b"anna")))
    shown = {token for stem, _ in engine.segments(b"anna") for token in stem.segment.tokens}
    assert shown >= {*OPENING.tokens, *words(2, 21), *words(9, 6)}
    assert not engine.segments(b"bert")


def test_under_pressure_modules_are_evicted_and_made_again_and_answers_stay_the_same() -> None:
    model = tiny_model()
    chance = random.Random(0)
    requests = []
    for i in range(24):
        picked = chance.sample(range(12), 3)
        runs, place = [OPENING], 10
        for name in picked:
            runs.append(module(40 + name, 9 + name, place))
            place = runs[-1].end
        requests.append(ask(f"{i}", runs, words(100 + i, 5), 6))
    roomy = tokens_of(run(tiny_engine(model), requests))
    small = tiny_engine(model, kv_cache_tokens=144, max_num_seqs=4)
    assert tokens_of(run(small, requests, 4000)) == roomy
    evicted = run(small, [requests[0]])["0", 0][-1]
    assert evicted.reuse.miss is None or evicted.reuse.miss.reason == "evicted"
    small.clear_cache()
    assert small.pages_in_use == 0, "something is still pinned"


@pytest.mark.parametrize("seed", range(6))
def test_a_full_pool_of_plain_prompts_and_modules_never_gets_stuck(seed: int) -> None:
    """A row holds what it has found, and waits for rows that make the rest: they may not wait behind one that needs that room."""
    model, chance, requests = tiny_model(), random.Random(seed), []
    for i in range(30):
        if chance.random() < 0.4:
            prompt = words(200 + chance.randrange(6), chance.choice([5, 40, 90]))
            requests.append(Request(f"{i}", prompt, greedy(chance.choice([1, 8, 30]))))
            continue
        runs, place = [OPENING], 10
        for name in chance.sample(range(8), chance.randint(1, 3)):
            runs.append(module(40 + name, 4 + 7 * name, place))
            place = runs[-1].end
        requests.append(ask(f"{i}", runs, words(100 + i, 5), chance.choice([1, 8])))
    roomy = tokens_of(run(tiny_engine(model), requests))
    small = tiny_engine(model, kv_cache_tokens=256, max_num_seqs=6)
    found: dict[str, list[int]] = {}
    waiting = list(requests)
    for _ in range(4000):
        if waiting and chance.random() < 0.3:
            small.add(waiting.pop(0))
        for event in small.step() if small.has_work else ():
            found.setdefault(event.request_id, []).append(event.token)
        if not waiting and not small.has_work:
            break
    assert {(name, 0): tokens for name, tokens in found.items()} == roomy


def test_what_a_running_request_reads_cannot_be_evicted(engine: Engine) -> None:
    runs = [OPENING, module(2, 21, 10)]
    engine.add(ask("x", runs, tokens=20))
    for _ in range(8):
        engine.step()
    held = engine.pages_in_use
    engine.clear_cache()
    assert engine.pages_in_use >= held - 1
    found = [event.token for event in drain(engine)["x", 0]]
    assert found == answer(tiny_engine(engine.model), ask("x", runs, tokens=20))[-len(found) :]


def test_a_cancelled_request_leaves_nothing_pinned(engine: Engine) -> None:
    engine.add(ask("x", [OPENING, module(2, 21, 10), module(3, 30, 31)]))
    engine.step()
    engine.cancel("x")
    drain(engine)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_step_that_fails_forgets_modules_and_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    runs = [OPENING, module(2, 21, 10)]
    wanted = answer(tiny_engine(engine.model), ask("x", runs))
    engine.add(ask("x", runs))
    forward, calls = engine.model.decoder.forward, iter(range(100))

    def fails_once(*given: object) -> torch.Tensor:
        if next(calls) == 3:
            raise RuntimeError("no memory")
        return forward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model.decoder, "forward", fails_once)
    found: list[int] = []
    while engine.has_work:
        try:
            found += [event.token for event in engine.step()]
        except RuntimeError:
            assert not engine.tree.pages
    assert found == wanted


def test_positions_that_are_learned_cannot_move() -> None:
    engine = tiny_engine(tiny_model(positions="learned"))
    with pytest.raises(InvalidPrompt, match=r'encoded at position 10 was asked for at 30.*layout="fixed"'):
        engine.add(ask("x", [OPENING, module(2, 8, 30)]))
    fixed = [OPENING, Run(words(2, 8), 30, Origin((OPENING,), 30))]
    assert len(answer(engine, ask("x", fixed))) == 8


def test_what_makes_no_sense_is_refused_and_leaves_nothing(engine: Engine) -> None:
    overlapping = [OPENING, module(2, 8, 10), module(3, 8, 12)]
    for request, error, message in (
        (ask("x", overlapping), InvalidPrompt, "begins inside the one before it"),
        (ask("x", [OPENING, module(2, 8, 10)], position=17), InvalidPrompt, "begin inside the run before them"),
        (ask("x", [OPENING, module(2, 8, 600)]), PromptTooLong, r"context holds 512.*by \d+ tokens$"),
        (ask("x", [OPENING, Run((999,), 10)]), InvalidPrompt, "999 is no token"),
        (ask("x", [OPENING, module(2, 8, 10)], score=True), InvalidPrompt, "logprobs of a prompt made of modules"),
    ):
        with pytest.raises(error, match=message):
            engine.add(request)
    with pytest.raises(PoolTooSmall):
        tiny_engine(kv_cache_tokens=32).add(ask("x", [OPENING, module(2, 20, 10)]))
    behind = Run(words(3, 8), 10, Origin((OPENING, Run(words(2, 60), 10, Origin((OPENING,), 10))), 70))
    with pytest.raises(PoolTooSmall):  # it cannot be made, though it could be read
        tiny_engine(kv_cache_tokens=64).add(ask("x", [OPENING, behind]))
    with pytest.raises(PoolTooSmall):
        tiny_engine(kv_cache_tokens=64).encode([behind], Tenant())
    with pytest.raises(InvalidOption, match="prefix_caching"):
        tiny_engine(prefix_caching=False).add(ask("x", [OPENING, module(2, 20, 10)]))
    assert not engine.has_work
