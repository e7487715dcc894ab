"""Replays whose every number can be worked out by hand. Pages are letters of ten tokens; a context is a string of them."""

import gc
import json
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pando.bench import trace
from pando.bench.conversations import Conversation, Piece, Shape, Turn, read, sharegpt
from pando.bench.optimum import optimum
from pando.bench.replay import Busy, Machine, Outcome, Replay, Served, endless, recomputed, replay
from pando.bench.simulated import Clock, simulated_store
from pando.engine.row import Row
from pando.engine.scheduler import Scheduler
from pando.errors import InvalidOption
from pando.kv.segment import extend_keys
from pando.kv.tree import PrefixTree
from pando.store.policy import POLICIES
from pando.store.sought import Offer, Sought
from pando.store.tier import Card

# A page is 10 bytes, is computed in 10 seconds, comes from host memory in 1 and from disk in 5.
MACHINE = Machine(kv_bytes=1, prefill_rate=1, step=1, batch=1, gpus=1, pool=1000, page=10, budget=1000, host_rate=10, disk_rate=2)
LLAMA = replace(trace.MACHINES["llama-13b"], page=64)
GIB = 2**30


def context(names: str) -> tuple[Piece, ...]:
    return tuple(Piece(name.encode(), 10) for name in names)


def asks(arrival: float, names: str, new: int = 0, answer: int = 1) -> Conversation:
    return Conversation(arrival, (Turn(context(names), new, answer, (), 0.0),))


def found(outcome: Outcome) -> list[tuple[int, int, int]]:
    return [(turn.device, turn.host, turn.disk) for turn in outcome.served]


# ---- time


def test_a_lonely_request_takes_what_its_tokens_take() -> None:
    outcome = recomputed(MACHINE, [asks(5, "ab", new=3, answer=7)])
    [turn] = outcome.served
    assert (turn.prompt, turn.context, turn.waited, turn.prefill) == (23, 20, 0, 23)
    assert outcome.total == (23 + 6, 23), "nothing runs before it comes, and its first token comes with its prompt"
    assert (outcome.steps, outcome.taken) == (7, 2)


def test_a_context_that_is_in_the_pool_is_found_there() -> None:
    first, second = endless(MACHINE, [asks(0, "ab", new=4), asks(100, "ab", new=4)]).served
    assert (first.found, first.prefill) == (0, 24)
    assert (second.device, second.found, second.prefill) == (20, 20, 4)


def test_what_the_pool_let_go_of_is_loaded_while_the_rest_is_computed() -> None:
    outcome = endless(replace(MACHINE, pool=30), [asks(0, "ab", new=4), asks(100, "cd", new=4), asks(200, "ab", new=4)])
    assert found(outcome)[2] == (0, 20, 0)
    assert outcome.served[2].prefill == 4, "two pages come in 2 seconds, and 4 tokens are computed in 4"


def test_a_row_whose_context_is_on_its_way_does_not_hold_up_the_others() -> None:
    machine = replace(MACHINE, pool=80, batch=2, host_rate=1, prefill_rate=0.1)
    said = [asks(0, "ab", new=4), asks(500, "cdefgh"), asks(1200, "x", answer=60), asks(1310, "ab", new=4)]
    outcome = endless(machine, said)
    assert found(outcome)[3] == (0, 20, 0)
    assert outcome.served[3].prefill == pytest.approx(20 + 40, abs=2), "two pages come in 20 seconds, and 4 tokens are computed in 40"
    assert outcome.total.prompts == pytest.approx(10 * (24 + 60 + 10 + 4)), "the other decodes while they come"


def test_what_is_on_disk_is_computed_where_that_is_sooner() -> None:
    said = [asks(100 * number, name) for number, name in enumerate("abca")]
    for rate, tokens in ((2.0, 9), (0.5, 0)):
        outcome = replay(replace(MACHINE, pool=20, disk_rate=rate), said, POLICIES["lru"], host=10, disk=100)
        assert found(outcome)[3] == (0, 0, tokens), "but for its last token, which is answered"


def test_rows_decode_together_and_a_new_one_makes_them_wait() -> None:
    machine = replace(MACHINE, batch=2)
    outcome = recomputed(machine, [asks(0, "a", answer=20), asks(15, "b", answer=20), asks(16, "c", answer=1)])
    assert [turn.waited for turn in outcome.served] == [0, 0, 23], "the first ends at 10 + 5 + 11 + 13, when the third is admitted"
    assert outcome.total.all == 10 + 5 + 11 + 13 + 11 + 5, "the second has 5 tokens left when the third has been prefilled"


def test_a_long_prompt_takes_several_steps() -> None:
    outcome = recomputed(replace(MACHINE, batch=2, budget=8), [asks(0, "ab"), asks(1, "c")])
    assert [turn.prefill for turn in outcome.served] == [20 + 4, 8 + 2 + 4], "the third step has 4 tokens of each"


def test_the_next_turn_comes_a_pause_after_the_answer() -> None:
    said = Piece(b"a", 15)
    turns = (Turn((), 10, 5, (said,), 0.0), Turn((said,), 1, 5, (), think=30))
    outcome = endless(MACHINE, [Conversation(0, turns)])
    assert [turn.found for turn in outcome.served] == [0, 14], "of the last token of an answer there are no states"
    assert outcome.served[1].waited == 0 and outcome.total.all == 10 + 4 + 2 + 4


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_are_taken_at_once_are_those_that_would_be_taken_one_by_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = sharegpt(Shape(12, rate=2, think=5, window=4096), seed=2)
    machine = replace(LLAMA, batch=4, pool=20_000)
    quick = replay(machine, said, POLICIES[policy], 8 * GIB, 400 * GIB)
    monkeypatch.setattr(Replay, "_leap", lambda self: 1)
    slow = replay(machine, said, POLICIES[policy], 8 * GIB, 400 * GIB)
    assert slow.taken == slow.steps > 3 * quick.taken
    assert sum(turn.found for turn in quick.served) == pytest.approx(sum(turn.found for turn in slow.served), rel=0.02)
    assert quick.total.all == pytest.approx(slow.total.all, rel=0.02)


def test_rows_have_the_keys_of_what_they_say_whatever_was_known_of_the_conversation_before(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()

    def add(self: Scheduler, rows: list[Row]) -> None:
        for row in rows:
            keys = list[bytes]()
            extend_keys(keys, row.lineage, row.tokens, LLAMA.page)
            assert row.keys == keys
            checked.append(len(keys))
        ask(self, rows)

    ask = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", add)
    said = sharegpt(Shape(30, rate=2, think=5, window=4096), seed=2)
    assert any(turn.context and turn.context[0] != one.turns[0].adds[0] for one in said for turn in one.turns), "some were cut"
    endless(LLAMA, said)
    assert len(checked) == sum(len(one.turns) for one in said) and max(checked) > 20


def test_a_replay_that_fails_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(InvalidOption):
        recomputed(replace(MACHINE, pool=10), [asks(0, "ab")])
    assert gc.isenabled()


def test_host_memory_that_cannot_hold_a_page_is_refused() -> None:
    with pytest.raises(InvalidOption, match="9 bytes of host memory hold no page"):
        replay(MACHINE, [asks(0, "ab")], POLICIES["lru"], 9, 0)


def test_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    with pytest.raises(InvalidOption, match="larger machine"):
        recomputed(replace(MACHINE, pool=20), [asks(0, "abc")])


def test_what_is_urgent_comes_between_what_is_not_and_ends_when_its_time_has_passed() -> None:
    clock, done = Clock(), list[tuple[str, float]]()
    hand = clock.hand("load")

    def task(name: str, seconds: float) -> None:
        clock.spend(seconds)
        clock.later(lambda name: done.append((name, clock.now)), name)

    hand.post(lambda: task("first", 5))
    clock.pass_to(1)
    hand.post(lambda: task("second", 5))
    hand.post(lambda: task("urgent", 1), urgent=True)
    clock.pass_to(5.5)
    assert done == [("first", 5)]
    clock.pass_to(20)
    assert done[1:] == [("urgent", 6), ("second", 11)] and clock.now == 20


# ---- what is found


@pytest.mark.parametrize(("policy", "tokens"), [("lru", 0), ("fifo", 0), ("lookahead", 18)])
def test_a_circle_larger_than_the_tier_is_found_only_by_who_looks_ahead(policy: str, tokens: int) -> None:
    """All wait from the start. LRU and FIFO drop each page just before it is needed."""
    outcome = replay(replace(MACHINE, pool=20), [asks(0, name) for name in "abcabc"], POLICIES[policy], host=20, disk=0)
    assert sum(turn.found for turn in outcome.served) == tokens <= sum(optimum([context(name) for name in "abcabc"], 4))


def test_what_waits_on_disk_is_brought_up_before_its_turn_comes() -> None:
    said = [*(asks(0, name) for name in "abc"), asks(100, "xyz", answer=50), *(asks(101, name) for name in "abc")]
    for policy, tiers in (("lookahead", (0, 9, 0)), ("lru", (0, 0, 9))):
        outcome = replay(replace(MACHINE, pool=80), said, POLICIES[policy], host=30, disk=1000)
        assert found(outcome)[4:] == [tiers] * 3, policy


def test_the_short_end_of_a_conversation_is_brought_up_too() -> None:
    before, after = Piece(b"a", 28 + 10), Piece(b"z", 60)
    talk = Conversation(0, (Turn((), 28, 10, (before,), 0.0), Turn((before,), 5, 1, (), think=300)))
    machine = replace(MACHINE, page=20, pool=80, host_rate=100, disk_rate=20)
    said = [talk, Conversation(100, (Turn((after,), 0, 2, (), 0.0),)), Conversation(330, (Turn((Piece(b"y", 60),), 0, 20, (), 0.0),))]
    outcome = replay(machine, said, POLICIES["lookahead"], host=60, disk=4000)
    assert (outcome.served[-1].host, outcome.served[-1].disk) == (37, 0)


def test_whatever_an_endless_cache_finds_is_found_where_the_disk_holds_it_all() -> None:
    said = sharegpt(Shape(40, rate=10, think=3, window=4096), seed=1)
    machine = replace(LLAMA, batch=6, pool=26_000)
    most = endless(machine, said)
    for name in ("lookahead", "lru"):
        outcome = replay(machine, said, POLICIES[name], 5 * GIB, 4000 * GIB)
        assert outcome.unsaved == 0, name
        assert sum(turn.found for turn in outcome.served) == pytest.approx(sum(turn.found for turn in most.served), rel=0.001)
        assert name == "lookahead" or sum(turn.disk for turn in outcome.served) > 0


def test_what_left_host_memory_before_it_was_loaded_is_there_again_and_known_to_be() -> None:
    """Otherwise nobody would ever give its room back."""
    clock, stem = Clock(), PrefixTree(10).root(b"root")
    store = simulated_store(clock, POLICIES["lru"], 1, 10, {"host": 1, "disk": 9}, {"host": 10, "disk": 2}, prefill_rate=0.01)

    def let_time_pass() -> None:
        while store.busy:
            store.pump()
            clock.pass_to(min(clock.next, clock.now + 100))
        store.pump()

    for name in (b"a", b"b"):
        store.offer(Offer(stem, (name,), ((Card(name, b"root", b"", tuple(range(10))), 0),)))
        let_time_pass()
        if name == b"a":
            seen = store.look(Sought([b"a"], range(10), b"root", [b"root"], b"", 10))
    assert seen.parts[0].tier == "host" and store.ledger.find([b"a"]) == ["disk"]
    store.discard([b"b"])
    load = store.load(seen, [b"a"], [0])
    store.go()
    clock.pass_to(clock.now + 100)
    let_time_pass()
    assert load.done and load.lost is None
    assert len(store.host) == len(list(store.ledger.held("host"))) == 1


def test_a_conversation_that_outgrew_the_window_needs_its_newest_half_alone() -> None:
    [one] = sharegpt(Shape(conversations=1, window=40), seed=3)
    for turn in one.turns:
        assert sum(piece.tokens for piece in turn.context) <= 40


def test_the_engines_truncation_moves_what_is_left_of_a_conversation() -> None:
    said = sharegpt(Shape(30, rate=4, think=20), seed=5)
    moved = endless(replace(LLAMA, window=4096, batch=4, pool=50_000), said)
    assert max(turn.prompt for turn in moved.served) <= 4096 < max(turn.prompt for one in said for turn in one.turns)
    later = [turn for turn in moved.served if turn.context]
    assert sum(turn.context - turn.found < LLAMA.page for turn in later) > 0.9 * len(later)
    assert all(turn.found < turn.prompt for turn in moved.served)


def test_a_conversation_that_was_cut_brings_up_no_more_than_it_reads() -> None:
    said = sharegpt(Shape(30, rate=4, think=20), seed=5)
    machine, clock = replace(LLAMA, window=4096, batch=4, pool=26_000), Clock()
    pages = {"host": machine.pages(4 * GIB), "disk": machine.pages(400 * GIB)}
    rates = {"host": machine.host_rate, "disk": machine.disk_rate}
    store = simulated_store(clock, POLICIES["lookahead"], machine.kv_bytes, machine.page, pages, rates, machine.prefill_rate)
    outcome = Replay(machine, said, clock, store).run()
    read = sum(turn.host + turn.disk for turn in outcome.served)
    assert 0.2 * sum(turn.prompt for turn in outcome.served) < read
    assert sum(store.counts.loaded.values()) < 1.1 * read, "but for who had to stop, and began again"


# ---- Belady's optimum


def test_the_optimum_keeps_what_is_needed_next() -> None:
    assert optimum([context(name) for name in "abcab"], 1) == [0, 0, 0, 10, 0]
    assert optimum([context(name) for name in "abcab"], 2) == [0, 0, 0, 10, 10], "c is never needed again, and never let in"


def test_the_optimum_keeps_the_beginning_of_a_chain() -> None:
    assert optimum([context("abc"), context("abc")], 2) == [0, 20]


TRACES = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(names=TRACES, pages=st.integers(1, 12), gap=st.sampled_from([0, 3, 30]))
def test_no_policy_finds_more_than_the_optimum_or_an_endless_cache(names: list[str], pages: int, gap: int) -> None:
    chains = [tuple(Piece(name[: i + 1].encode(), 10) for i in range(len(name))) for name in names]
    said = [Conversation(gap * i, (Turn(chain, 0, 3, (), 0.0),)) for i, chain in enumerate(chains)]
    machine = replace(MACHINE, pool=60, step=10)
    most = sum(turn.found for turn in endless(machine, said).served)
    best = sum(optimum(chains, 6 + pages))
    for policy in POLICIES.values():
        outcome = replay(machine, said, policy, 10 * pages, 0)
        assert sum(turn.found for turn in outcome.served) <= min(best, most)


# ---- conversations


def test_generated_conversations_have_the_published_statistics() -> None:
    said = sharegpt(Shape(conversations=9000), seed=0)
    turns = [len(one.turns) for one in said]
    lengths = [sum(turn.new + turn.answer for turn in one.turns) for one in said]
    assert sum(count > 1 for count in turns) / 9000 == pytest.approx(0.73, abs=0.01)
    assert statistics.fmean(turns) == pytest.approx(5.75, abs=0.15)
    assert sum(length > 2048 for length in lengths) / 9000 == pytest.approx(0.47, abs=0.015)
    assert sum(length > 4096 for length in lengths) / 9000 == pytest.approx(0.30, abs=0.015)
    assert said[-1].arrival == pytest.approx(9000, rel=0.05)


def test_with_another_pause_the_same_is_said() -> None:
    short, long = (sharegpt(Shape(conversations=50, think=think), seed=1) for think in (10, 100))
    assert [one.arrival for one in short] == [one.arrival for one in long]
    assert [[turn.context for turn in one.turns] for one in short] == [[turn.context for turn in one.turns] for one in long]
    assert [turn.think * 10 for one in short for turn in one.turns] == pytest.approx([turn.think for one in long for turn in one.turns])


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]},
        {"timestamp": 1000, "input_length": 512, "output_length": 4, "hash_ids": [0]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read(file)
    assert (first.arrival, second.arrival) == (1, 2)
    assert [piece.tokens for piece in second.turns[0].context] == [512, 88]
    assert first.turns[0].context[0].key == second.turns[0].context[0].key


@pytest.mark.parametrize(
    "line",
    [
        *("", "7", "{}", "[" * 100_000, '{"timestamp": -1, "input_length": 1'),
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [18446744073709551616]}',
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InvalidOption, match="line 2"):
        read(file)


# ---- the command


def test_the_command_compares_all_policies_and_judges(capsys, tmp_path) -> None:
    kept = tmp_path / "found.json"
    options = ["--conversations", "12", "--warmup", "10", "--host-gib", "8", "--disk-gib", "40", "--think-seconds", "5,50", "--jobs", "2"]
    assert trace.main(["--generate", "sharegpt", *options, "--json", str(kept)]) == 0
    lines = json.loads(kept.read_text())["lines"]
    assert [line["policy"] for line in lines] == ["lookahead", "lru", "fifo", "endless", "recompute"] * 2
    assert {line["think"] for line in lines} == {5, 50}
    most = {line["think"]: line["whole"] for line in lines if line["policy"] == "endless"}
    assert all(line["tokens"] == 0 for line in lines if line["policy"] == "recompute") and min(most.values()) > 0.5
    assert len(json.loads(kept.read_text())["results"]) == 4
    assert "of hits in host memory" in capsys.readouterr().out


def test_the_command_says_how_far_it_is_and_how_long_it_took(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "EVERY", 0.0)
    assert trace.main(["--generate", "sharegpt", "--conversations", "3", "--warmup", "0", "--policy", "lru", "--jobs", "1"]) == 0
    told = capsys.readouterr().err.splitlines()
    far = [int(line.split()[1]) for line in told if line.startswith("  lru: ") and "turns, " in line and " of tokens" not in line]
    turns = sum(len(one.turns) for one in sharegpt(Shape(3), seed=0))
    assert far == sorted(far) and far[-1] == turns > 1 and len(far) > turns, "after every step here, and ten seconds apart otherwise"
    assert told[-1].startswith("  3 replays in ") and told[-1].endswith(" s")


def test_a_picture_is_drawn_of_what_was_found(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        trace.Line("lru", 8, 40, 5, 9, 0.5, 0.4, 0.1, 0.8, 0.1, 0.2, 3, 100, 1, 10),
        trace.Line("Belady", 8, 0, None, 9, 0.6, 0.5, 0, 1),
    ]
    trace.draw(lines, "two replays", tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_a_file_is_compared_with_the_optimum(capsys, tmp_path) -> None:
    """Requests that begin alike, and circles of three that a pool with room for one of them and two pages of host memory do not hold."""
    file, kept = tmp_path / "trace.jsonl", tmp_path / "found.json"
    requests = [{"timestamp": i, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1 + i % 3]} for i in range(9)]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert trace.main([str(file), "--host-gib", "0.5", "--jobs", "1", "--json", str(kept)]) == 0
    shares = {line["policy"]: line["tokens"] for line in json.loads(kept.read_text())["lines"]}
    assert list(shares) == ["lookahead", "lru", "fifo", "Belady", "endless", "recompute"]
    assert shares["recompute"] == 0 < shares["lru"] <= shares["endless"] <= shares["Belady"] == pytest.approx((8 + 6) / 18)
    assert ">= LRU" in capsys.readouterr().out


def test_money_is_hours_times_prices() -> None:
    outcome = recomputed(replace(MACHINE, pool=3700, budget=3600), [asks(0, "a" * 360)])
    line = trace.summary(outcome, "none", host=1e9 / 2**30, disk=1e12 / 2**30, machine=MACHINE, think=None, warm=0)
    assert line.gpu_hours == pytest.approx(1) and line.cost == pytest.approx(5 + 0.0088 + 0.082)
    assert line.prefill_rate == pytest.approx(1)


def test_turns_of_the_warm_up_count_nowhere() -> None:
    outcome = endless(MACHINE, [asks(0, "a"), asks(100, "ab"), asks(200, "cd")])
    line = trace.summary(outcome, "endless", 0, 0, machine=MACHINE, think=None, warm=1)
    assert (line.turns, line.whole, line.tokens) == (2, 0, 10 / 40)
    assert line.first_mean == pytest.approx((10 + 20) / 2) and line.gpu_hours == pytest.approx((10 + 20) / 3600)


def test_a_context_was_there_if_less_than_a_page_of_it_was_computed() -> None:
    outcome = endless(MACHINE, [asks(0, "ab"), asks(100, "ab"), asks(200, "abc")])
    assert trace.summary(outcome, "endless", 0, 0, machine=MACHINE, think=None, warm=0).whole == pytest.approx(1 / 3)


@pytest.mark.parametrize(("whole", "host", "met"), [(0.87, 0.99, [True, True]), (0.85, 0.98, [False, False])])
def test_lookahead_is_held_to_what_was_promised(whole: float, host: float, met: list[bool]) -> None:
    lines = [trace.Line("lookahead", 1, 2, 60, 9, whole, 0.5, 0.01, host), trace.Line("endless", 0, 0, 60, 9, 0.99, 0.5, 0, 1)]
    assert [result.met for result in trace.judged(lines, generated=True)] == met


def test_where_an_endless_cache_finds_less_lookahead_must_be_near_it() -> None:
    for whole, met in ((0.68, True), (0.66, False)):
        lines = [trace.Line("lookahead", 1, 2, 60, 9, whole, 0.5, 0, 1), trace.Line("endless", 0, 0, 60, 9, 0.70, 0.5, 0, 1)]
        assert trace.judged(lines, generated=True)[0].met is met


def test_on_a_file_lookahead_is_compared_with_lru_at_the_same_size() -> None:
    shares = (("lookahead", 1, 0.2), ("lru", 1, 0.3), ("lru", 2, 0.1))
    lines = [trace.Line(name, host, 0, None, 9, 0, tokens, 0, 1) for name, host, tokens in shares]
    assert [result.met for result in trace.judged(lines, generated=False)] == [False]


def test_turns_that_are_answered_with_the_last_of_the_warm_up_have_no_rate() -> None:
    together = Busy(1.0, 1.0)
    outcome = Outcome([Served(8, 0, 0, 0, 0, 0.0, 1.0)] * 2, [together] * 2, Busy(2.0, 1.0))
    line = trace.summary(outcome, "lru", 1, 0, machine=MACHINE, think=None, warm=1)
    assert (line.turns, line.prefill_rate) == (1, None)
    assert trace.shown([line])


@pytest.mark.parametrize(
    "argv",
    [[], ["x", "--generate", "sharegpt"], ["nowhere.jsonl"], ["--generate", "sharegpt", "--conversations", "5", "--warmup", "99999"]],
)
def test_what_cannot_be_replayed_is_refused(argv: list[str]) -> None:
    with pytest.raises(InvalidOption):
        trace.main(argv)
