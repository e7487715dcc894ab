"""Sampling values that mean nothing are refused, with the name of what is wrong."""

import math

import pytest

from pando.engine.request import MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from pando.errors import InvalidSampling

REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLES = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
HUGE = pytest.param(10**400, id="huge")  # too large for a float
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def refused(name: str, value: object) -> str:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3, 101, HUGE, True, "1", [1], 1j])
@pytest.mark.parametrize("name", REALS)
def test_a_number_out_of_its_range_or_no_number_is_refused_by_name(name: str, value: object) -> None:
    assert name in refused(name, value)


@pytest.mark.parametrize("value", [1.5, math.nan, math.inf, -(2**64), 2**70, True, "1", [1]])
@pytest.mark.parametrize("name", WHOLES)
def test_a_count_that_is_not_whole_or_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    assert name in refused(name, value)


@pytest.mark.parametrize("value", [None, 0, 1, "yes"])
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    assert name in refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", MAX_N + 1),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),  # of at most 16
        ("logprobs", MAX_LOGPROBS + 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop", b"bytes"),
        ("stop", "x" * (MAX_STOP_CHARS + 1)),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("logit_bias", None),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: 101}),
        ("logit_bias", dict.fromkeys(range(MAX_BIASES + 1), 1.0)),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    assert name.removesuffix("_token_ids") in refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 1) for name in REALS),
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 2**31 - 1),
        ("presence_penalty", -2),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("seed", None),
        ("max_tokens", None),
        ("min_tokens", 16),
        ("logprobs", 0),
        ("stop", "x"),
        ("stop", ("x", "y")),
        ("stop", None),
        ("stop_token_ids", [0]),
        ("logit_bias", {0: -100}),
    ],
)
def test_the_ends_of_every_range_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_a_stop_may_be_text_and_the_message_says_so() -> None:
    assert refused("stop", 5) == "stop is 5; it must be text, or a list"
    assert refused("stop_token_ids", 5) == "stop_token_ids is 5; it must be a list"


def test_a_message_says_what_was_found_and_what_is_allowed() -> None:
    assert refused("temperature", -1) == "temperature is -1; it must be a number from 0 to 100"
    assert "lower it to at most 16" in refused("min_tokens", 17)
