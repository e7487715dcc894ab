"""Who hears of what is used, and how often."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pando.kv.segment import Key
from pando.store import touches
from pando.store.touches import EVERY, Touches

KEYS = [bytes([number]) * 32 for number in range(9)]


class Desk:
    """Does at once what it is asked to."""

    def post(self, task: Callable[[], object]) -> None:
        task()


def told_of(ttl: float | None, now: list[float]) -> tuple[Touches, list[Sequence[Key]]]:
    heard: list[Sequence[Key]] = []
    worker: Any = Desk()
    return Touches([heard.append], worker, ttl, lambda: now[0]), heard


def test_what_stands_before_a_page_that_is_saved_is_used_and_told_now_and_then() -> None:
    now = [0.0]
    used, heard = told_of(None, now)
    used.follow(KEYS[:2], set(KEYS[:2]))
    assert heard == [], "nothing stands before them"
    used.follow(KEYS[:3], {KEYS[2]})
    assert heard == [KEYS[:2]]
    for end in range(4, 7):  # an answer goes on
        now[0] += EVERY / 4
        used.follow(KEYS[:end], {KEYS[end - 1]})
    assert len(heard) == 1
    now[0] += EVERY / 4
    used.follow(KEYS[:7], {KEYS[6]})
    assert heard[1:] == [KEYS[:6]]
    used.follow([*KEYS[:2], KEYS[8]], {KEYS[8]})  # another one, behind the same beginning
    assert heard[2:] == [KEYS[:2]]
    used.follow([*KEYS[:2], KEYS[7]], {KEYS[7]})
    assert len(heard) == 3


def test_it_is_told_often_enough_for_the_time_that_it_may_stay_unused() -> None:
    now = [0.0]
    used, heard = told_of(16.0, now)
    for _ in range(16):
        now[0] += 1
        used.follow(KEYS[:2], {KEYS[1]})
    assert heard == [KEYS[:1]] * 16


def test_of_chains_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "REMEMBERED", 4)
    used, heard = told_of(None, [0.0])
    for key in KEYS[1:]:
        used.follow([KEYS[0], key], {key})
    assert heard == [KEYS[:1]] and len(used._told) == 4
