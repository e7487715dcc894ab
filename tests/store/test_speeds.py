"""Is loading sooner than computing?"""

from types import SimpleNamespace

import pytest

from pando.store import speeds as module
from pando.store.speeds import HOPE, LEAST, LONGER, MEASURED, STEPS, Meter, Moved, Speeds

FAST, SLOW = Moved(1000, 0.001), Moved(1000, 10.0)
WANTED = {"disk": 1000}
TOKENS = 100  # of which each takes 10 ms


@pytest.fixture(autouse=True)
def unhurried() -> None:
    """Here it is told what takes how long."""


def speeds() -> Speeds:
    made = Speeds()
    made.computed(10, 0.1)
    return made


def test_loading_is_taken_to_pay_until_it_is_known_not_to() -> None:
    assert Speeds().pays(WANTED, TOKENS) and speeds().pays(WANTED, TOKENS)
    unknown = Speeds()
    unknown.gave_up("disk", SLOW)
    assert unknown.pays(WANTED, TOKENS), "nobody knows how long computing takes"


def test_a_tier_that_is_slow_from_the_start_is_known_after_two_loads() -> None:
    found = speeds()
    found.moved("disk", SLOW)
    assert found.pays(WANTED, TOKENS), "the first load prepares things, and may be slow for that"
    found.moved("disk", SLOW)
    assert not found.pays(WANTED, TOKENS) and found.pays({"host": 1000}, TOKENS)


def test_a_tier_that_becomes_slow_is_known_after_two_loads_and_one_by_chance_does_not_count() -> None:
    found = speeds()
    for _ in range(9):
        found.moved("disk", FAST)
    found.moved("disk", SLOW)
    assert found.pays(WANTED, TOKENS)
    found.moved("disk", FAST)
    found.moved("disk", SLOW)
    assert not found.pays(WANTED, TOKENS)


def test_a_load_that_was_given_up_is_enough() -> None:
    found = speeds()
    for _ in range(9):
        found.moved("disk", FAST)
    found.gave_up("disk", SLOW)
    assert not found.pays(WANTED, TOKENS)


def test_a_slow_tier_is_tried_again_and_believed_when_it_is_fast() -> None:
    found = speeds()
    found.gave_up("disk", SLOW)
    tries = next(number for number in range(1000) if found.pays(WANTED, TOKENS))
    assert HOPE**tries < 0.1 < HOPE ** (tries - 3)
    found.moved("disk", FAST)
    found.moved("disk", FAST)
    assert found.pays({"disk": 100_000}, TOKENS)


def test_a_load_may_take_longer_than_computing_but_not_much() -> None:
    assert Speeds().patience(TOKENS) is None
    assert speeds().patience(TOKENS) == LONGER * TOKENS * 0.01
    assert speeds().patience(1) == LEAST


def test_of_a_load_from_several_tiers_each_has_its_own_time_and_a_share_of_the_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    meter = Meter()
    for tier, size, seconds in (("host", 100, 0.0), ("disk", 300, 0.02), ("disk", 0, 0.01), ("remote", 0, 0.01)):
        began, now = now, now + seconds
        meter.add(tier, size, began)
    now += 0.0401
    read = meter.read()
    assert read.keys() == {"host", "disk"} and (read["host"].size, read["disk"].size) == (100, 300)
    assert 0.01 <= read["host"].seconds < read["disk"].seconds and read["disk"].seconds >= 0.06
    assert Meter().read() == {}


def test_a_read_buffer_holds_what_does_not_come_while_the_new_tokens_are_computed() -> None:
    found = speeds()
    assert found.in_time(0.79, TOKENS) and not found.in_time(0.81, TOKENS), "a second to compute, and a margin"
    assert not found.in_time(0.5, TOKENS // 2)


def test_a_step_takes_as_long_as_the_shortest_of_the_latest_without_prompts() -> None:
    found = Speeds()
    assert found.in_time(0.0, 1) and not found.in_time(0.001, 1), "nobody knows how long one takes"
    found.stepped(1, 0, 0.1)
    assert not found.in_time(0.001, 1), "nor how long to wait for what does not come"
    found.computed(1000, 0.001)
    for seconds in (0.001, *[0.1] * STEPS):
        found.stepped(40, 0, seconds)
    found.stepped(41, 1000, 0.01)
    assert found.in_time(0.079, 1) and not found.in_time(0.081, 1)
    found.stepped(1, 0, 0.05)
    assert not found.in_time(0.079, 1) and found.in_time(0.039, 1)


def test_only_steps_of_many_tokens_of_prompts_tell_how_long_a_prompt_takes() -> None:
    found = Speeds()
    found.stepped(1000, 0, 1.0)
    found.stepped(1000, MEASURED - 1, 1.0)
    assert found.patience(1000) is None
    found.stepped(MEASURED + 8, MEASURED, (MEASURED + 8) * 0.1)
    assert found.patience(1000) == pytest.approx(LONGER * 100)


def test_what_others_wait_for_has_twice_the_time_that_was_thought() -> None:
    assert (Speeds().grace(0.01), Speeds().grace(100.0)) == (LEAST, LONGER * 100.0)
