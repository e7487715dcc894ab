"""Replays whose every number can be worked out by hand. Pages are letters of ten tokens; a context is a string of them."""

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pando.bench import trace
from pando.bench.conversations import Conversation, Piece, Shape, Turn, read, sharegpt
from pando.bench.replay import HOST, Machine, Replay, endless, optimum, recomputed, replay
from pando.errors import InvalidOption
from pando.store.ledger import Ledger
from pando.store.policy import POLICIES

# A page is 10 bytes, is computed in 10 seconds, comes from host memory in 1 and from disk in 5.
MACHINE = Machine(kv_bytes=1, prefill_rate=1, step=1, batch=1, gpus=1, page=10, host_rate=10, disk_rate=2)


def context(names: str) -> tuple[Piece, ...]:
    return tuple(Piece(name.encode(), 10) for name in names)


def asks(arrival: float, names: str, new: int = 0, answer: int = 1) -> Conversation:
    return Conversation(arrival, (Turn(context(names), new, answer, (), 0.0),))


def found(outcome) -> list[tuple[int, int]]:
    return [(turn.host, turn.disk) for turn in outcome.served]


# ---- time


def test_a_lonely_request_takes_what_its_tokens_take() -> None:
    outcome = recomputed(MACHINE, [asks(5, "ab", new=3, answer=7)])
    [turn] = outcome.served
    assert (turn.prompt, turn.context, turn.waited, turn.prefill) == (23, 20, 0, 23)
    assert outcome.total == 23 + 7, "nothing runs before it comes"


def test_what_is_found_is_loaded_while_the_rest_is_computed() -> None:
    first, second = endless(MACHINE, [asks(0, "ab", new=4), asks(100, "ab", new=4)]).served
    assert (first.host, first.prefill) == (0, 24)
    assert (second.host, second.prefill) == (20, 4), "two pages come in 2 seconds, and 4 tokens are computed in 4"


def test_what_is_on_disk_is_computed_where_that_is_sooner() -> None:
    assert MACHINE.prefill(new=2, host=0, disk=10) == 5
    slow = Machine(kv_bytes=1, prefill_rate=1, step=1, batch=1, gpus=1, host_rate=10, disk_rate=0.5)
    assert slow.prefill(new=2, host=0, disk=10) == 12


def test_rows_decode_together_and_a_new_one_makes_them_wait() -> None:
    machine = Machine(kv_bytes=1, prefill_rate=1, step=1, batch=2, gpus=1, page=10)
    outcome = recomputed(machine, [asks(0, "a", answer=20), asks(15, "b", answer=20), asks(16, "c", answer=1)])
    assert [turn.waited for turn in outcome.served] == [0, 0, 24], "the first ends at 10 + 5 + 10 + 15, when the third is admitted"
    assert outcome.total == 10 + 5 + 10 + 15 + 10 + 5, "the second has 5 tokens left when the third has been prefilled"


def test_the_next_turn_comes_a_pause_after_the_answer() -> None:
    turns = (Turn((), 10, 5, context("a"), 0.0), Turn(context("a"), 1, 5, (), think=30))
    outcome = endless(MACHINE, [Conversation(0, turns)])
    assert found(outcome) == [(0, 0), (10, 0)]
    assert outcome.served[1].waited == 0 and outcome.total == 10 + 5 + 1 + 5


# ---- what is found


@pytest.mark.parametrize(("policy", "tokens"), [("lru", 0), ("fifo", 0), ("lookahead", 20)])
def test_a_circle_larger_than_the_tier_is_found_only_by_who_looks_ahead(policy: str, tokens: int) -> None:
    """All wait from the start. LRU and FIFO drop each page just before it is needed."""
    outcome = replay(MACHINE, [asks(0, name) for name in "abcabc"], POLICIES[policy], host=20, disk=0)
    assert sum(host for host, _ in found(outcome)) == tokens <= sum(optimum([context(name) for name in "abcabc"], 2))


def test_what_waits_on_disk_is_brought_up_before_its_turn_comes() -> None:
    said = [*(asks(0, name) for name in "abcd"), asks(100, "xyz", answer=50), *(asks(101, name) for name in "abcd")]
    for policy, tiers in (("lookahead", (10, 0)), ("lru", (0, 10))):
        outcome = replay(MACHINE, said, POLICIES[policy], host=30, disk=1000)
        assert found(outcome)[5:] == [tiers] * 4, policy


def test_a_conversation_that_outgrew_the_window_needs_its_newest_half_alone() -> None:
    [one] = sharegpt(Shape(conversations=1, window=40), seed=3)
    for turn in one.turns:
        assert sum(piece.tokens for piece in turn.context) <= 40


# ---- Belady's optimum


def test_the_optimum_keeps_what_is_needed_next() -> None:
    assert optimum([context(name) for name in "abcab"], 1) == [0, 0, 0, 10, 0]
    assert optimum([context(name) for name in "abcab"], 2) == [0, 0, 0, 10, 10], "c is never needed again, and never let in"


def test_the_optimum_keeps_the_beginning_of_a_chain() -> None:
    assert optimum([context("abc"), context("abc")], 2) == [0, 20]


TRACES = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(names=TRACES, pages=st.integers(1, 12), gap=st.sampled_from([0, 3, 30]))
def test_no_policy_finds_more_than_the_optimum_or_an_endless_cache(names: list[str], pages: int, gap: int) -> None:
    chains = [tuple(Piece(name[: i + 1].encode(), 10) for i in range(len(name))) for name in names]
    said = [Conversation(gap * i, (Turn(chain, 0, 3, (), 0.0),)) for i, chain in enumerate(chains)]
    machine = Machine(kv_bytes=1, prefill_rate=1, step=10, batch=3, gpus=1, page=10)
    most = sum(turn.host for turn in endless(machine, said).served)
    best = sum(optimum(chains, pages))
    assert best <= most
    for policy in POLICIES.values():
        ledger = Ledger({HOST: 10 * pages}, policy)
        assert sum(turn.host for turn in Replay(machine, said, ledger).run().served) <= best
        assert ledger.used[HOST] <= 10 * pages


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
    ["", "7", "{}", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', '{"timestamp": -1, "input_length": 1'],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InvalidOption, match="line 2"):
        read(file)


# ---- the command


def test_the_command_compares_all_policies_and_judges(capsys, tmp_path) -> None:
    kept = tmp_path / "found.json"
    options = ["--conversations", "60", "--warmup", "20", "--host-gib", "8", "--disk-gib", "40", "--think-seconds", "5,50"]
    assert trace.main(["--generate", "sharegpt", *options, "--json", str(kept)]) == 0
    lines = json.loads(kept.read_text())["lines"]
    assert [line["policy"] for line in lines] == ["lookahead", "lru", "fifo", "endless", "recompute"] * 2
    assert {line["think"] for line in lines} == {5, 50}
    most = {line["think"]: line["whole"] for line in lines if line["policy"] == "endless"}
    assert all(line["tokens"] == 0 for line in lines if line["policy"] == "recompute") and min(most.values()) > 0.5
    assert len(json.loads(kept.read_text())["results"]) == 4
    assert "of hits in host" in capsys.readouterr().out


def test_a_picture_is_drawn_of_what_was_found(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    lines = [trace.Line("lru", 8, 40, 5, 9, 0.5, 0.4, 0.9, 0.1, 0.2, 3, 100, 1, 10), trace.Line("Belady", 8, 0, None, 9, 0.6, 0.5, 1)]
    trace.draw(lines, "two replays", tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_a_file_is_compared_with_the_optimum(capsys, tmp_path) -> None:
    file, kept = tmp_path / "trace.jsonl", tmp_path / "found.json"
    requests = [{"timestamp": i, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1 + i % 3]} for i in range(9)]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert trace.main([str(file), "--host-gib", "0.5", "--json", str(kept)]) == 0  # three pages
    shares = {line["policy"]: line["tokens"] for line in json.loads(kept.read_text())["lines"]}
    assert shares["endless"] == pytest.approx((8 + 6) / 18)
    assert shares["lru"] == pytest.approx(8 / 18), "three that follow each other, and room for two"
    assert shares["lookahead"] == shares["Belady"] == pytest.approx((8 + 4) / 18)


def test_money_is_hours_times_prices() -> None:
    outcome = recomputed(MACHINE, [asks(0, "a" * 360)])
    line = trace.summary(outcome, "none", host=1e9 / 2**30, disk=1e12 / 2**30, machine=MACHINE, think=None, warm=0)
    assert line.gpu_hours == pytest.approx(3601 / 3600) and line.cost == pytest.approx(3601 / 3600 * (5 + 0.0088 + 0.082))


def test_turns_of_the_warm_up_count_nowhere() -> None:
    outcome = endless(MACHINE, [asks(0, "a"), asks(100, "a"), asks(200, "ab")])
    line = trace.summary(outcome, "endless", 0, 0, machine=MACHINE, think=None, warm=1)
    assert (line.turns, line.whole, line.tokens) == (2, 0.5, 20 / 30)
    assert line.first_mean == pytest.approx((1 + 10) / 2) and line.gpu_hours == pytest.approx((1 + 1 + 1 + 10 + 1) / 3600)


@pytest.mark.parametrize(("whole", "host", "met"), [(0.87, 0.99, [True, True]), (0.85, 0.98, [False, False])])
def test_lookahead_is_held_to_what_was_promised(whole: float, host: float, met: list[bool]) -> None:
    lines = [trace.Line("lookahead", 1, 2, 60, 9, whole, 0.5, host), trace.Line("endless", 0, 0, 60, 9, 0.99, 0.5, 1)]
    assert [result.met for result in trace.judged(lines, generated=True)] == met


def test_where_an_endless_cache_finds_less_lookahead_must_be_near_it() -> None:
    for whole, met in ((0.68, True), (0.66, False)):
        lines = [trace.Line("lookahead", 1, 2, 60, 9, whole, 0.5, 1), trace.Line("endless", 0, 0, 60, 9, 0.70, 0.5, 1)]
        assert trace.judged(lines, generated=True)[0].met is met


def test_on_a_file_lookahead_is_compared_with_lru_at_the_same_size() -> None:
    lines = [
        trace.Line(name, host, 0, None, 9, 0, tokens, 1) for name, host, tokens in (("lookahead", 1, 0.2), ("lru", 1, 0.3), ("lru", 2, 0.1))
    ]
    assert [result.met for result in trace.judged(lines, generated=False)] == [False]


@pytest.mark.parametrize(
    "argv",
    [[], ["x", "--generate", "sharegpt"], ["nowhere.jsonl"], ["--generate", "sharegpt", "--conversations", "5", "--warmup", "99999"]],
)
def test_what_cannot_be_replayed_is_refused(argv: list[str]) -> None:
    with pytest.raises(InvalidOption):
        trace.main(argv)
