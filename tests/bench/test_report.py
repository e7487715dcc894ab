"""Statistics of a load test, from outcomes made by hand."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pando.bench.client import Failure, Reply
from pando.bench.load import NOT_SENT, Outcome, Run
from pando.bench.report import UNFINISHED, as_json, describe, spread, summarise, sweep
from pando.bench.traffic import Conversation, Turn

START = 1000.0  # of the run, on its clock


def outcome(
    arrival: float = 0.0,
    *,
    tokens: int | None = 3,
    prompt: int | None = 10,
    cached: int | None = 0,
    later: float = 0.0,
    **changes: object,
) -> Outcome:
    """Sent 1 s late; the first of three tokens 2 s after it was meant to leave, one each second after; all of it `later`."""
    meant = START + arrival + later
    pieces = (meant + 2, meant + 3, meant + 4)
    failure = changes.pop("failure", None)
    assert failure is None or isinstance(failure, Failure)
    reply = Reply(meant + 1, meant + 5, meant + 4, pieces, "a b c", prompt, tokens, cached, failure)
    given = {"conversation": 0, "turn": 0, "arrival": arrival, "start": START, "answer": 3, "reply": reply} | changes
    return Outcome(**given)  # type: ignore[arg-type]


def run(*outcomes: Outcome, planned: int | None = None, turns: int = 1) -> Run:
    planned = len(outcomes) // turns if planned is None else planned
    return Run(2.0, (Conversation(0.0, "", (Turn("hello", 3, 0.0),) * turns),) * planned, list(outcomes))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = spread(values)
    assert found is not None and (found.p50, found.p90, found.p99) == pytest.approx([cuts[share - 1] for share in (50, 90, 99)], abs=1e-6)
    assert found.largest == max(values)


def test_one_value_is_every_percentile_and_none_is_no_spread() -> None:
    assert spread([4.0]) == spread([4.0, None])
    assert spread([4.0]).p99 == 4.0  # type: ignore[union-attr]
    assert spread([None]) is None


def test_latencies_count_from_when_a_request_was_meant_to_leave() -> None:
    found = summarise(run(outcome(arrival=7.0)))
    assert found.first and found.total and found.per_token and found.lag and found.gap
    assert (found.first.p50, found.total.p50, found.per_token.p50, found.gap.p50) == (2, 5, 1, 1)
    assert found.lag.p50 == 1


def test_waiting_for_the_cap_is_not_the_generators_own_lateness() -> None:
    found = summarise(run(outcome(held=0.75, capped=True), outcome()))
    assert found.capped == 1
    assert found.held and found.held.mean == 0.75
    assert found.lag and found.lag.largest == 1 and found.lag.mean == (0.25 + 1) / 2


def test_failed_requests_are_counted_by_reason_and_nowhere_else() -> None:
    busy = Failure("HTTP 429", "come back later", "3")
    slow = outcome(failure=Failure("timeout"), tokens=900, prompt=900, later=50.0)
    found = summarise(run(outcome(), slow, outcome(failure=busy), outcome(failure=busy), outcome(reply=None)))
    assert found.failures == {"HTTP 429": 2, "timeout": 1, NOT_SENT: 1}
    assert found.examples == {"HTTP 429": "come back later"}
    assert (found.answered, found.output_tokens, found.prompt_tokens) == (1, 3, 10)
    assert found.first and found.per_token and found.gap and found.total
    assert (found.first.largest, found.per_token.largest, found.gap.largest, found.total.largest) == (2, 1, 1, 5)
    assert sum(found.failures.values()) + found.answered == found.planned


def test_what_was_not_finished_is_counted() -> None:
    assert summarise(run(outcome(), planned=3)).failures == {UNFINISHED: 2}


def test_throughput_is_over_the_time_from_the_first_arrival_to_the_last_end() -> None:
    found = summarise(run(outcome(arrival=1.0), outcome(arrival=6.0)))
    assert found.seconds == 10
    assert (found.requests_per_second, found.output_per_second, found.tokens_per_second) == (0.2, 0.6, 2.6)


def test_the_cached_share_counts_replies_that_leave_out_a_zero() -> None:
    assert summarise(run(outcome(cached=None), outcome(cached=5))).cached_share == 0.25
    assert summarise(run(outcome(cached=None))).cached_share is None
    assert "not told by the server" in describe(run(outcome(cached=None)))


def test_without_usage_pieces_are_counted_and_the_table_says_so() -> None:
    bare = run(outcome(tokens=None, prompt=None, cached=None))
    found = summarise(bare)
    assert (found.output_tokens, found.prompt_tokens, found.tokens_per_second) == (3, None, None)
    assert "counted in pieces of text" in describe(bare)
    assert "counted in pieces of text" not in describe(run(outcome()))


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert summarise(run(outcome(tokens=1))).per_token is None


def test_turns_are_shown_apart() -> None:
    both = run(outcome(cached=0), outcome(turn=1, cached=8), turns=2)
    assert [summarise(both, turn).cached_share for turn in (0, 1)] == [0.0, 0.8]
    lines = describe(both).splitlines()
    assert [line.split()[:4] for line in lines[-2:]] == [["1", "1", "10", "0.0%"], ["2", "1", "10", "80.0%"]]


def test_a_run_without_any_answer_can_be_shown() -> None:
    empty = run(planned=2)
    assert f"2 x {UNFINISHED}" in describe(empty)
    assert sweep([empty]).splitlines()[-1].split() == ["2", "0", "2", "0", "0"]


def test_the_json_has_every_request_and_no_number_that_is_none() -> None:
    endless = Run(math.inf, run(outcome()).planned, [outcome()])
    text = json.dumps(as_json({"model": "parrot"}, [run(outcome(), outcome(reply=None)), endless]), allow_nan=False)
    first, second = json.loads(text)["runs"]
    assert [request["failure"] and request["failure"]["reason"] for request in first["requests"]] == [None, NOT_SENT]
    assert first["summary"]["first"]["p50"] == 2
    assert second["rate"] == second["summary"]["rate"] == "inf"
