import random

import pytest

from pando.kv.pages import Pages


def test_pages_are_taken_in_one_run() -> None:
    pages = Pages(16, 4)
    assert pages.take(5) == [0, 1, 2, 3, 4]


def test_a_row_grows_in_place_beside_others() -> None:
    pages = Pages(32, 4)
    rows = [pages.take(2, expect=3) for _ in range(4)]
    for _ in range(3):
        for row in rows:
            row += pages.take(1, after=row[-1])
    for row in rows:
        assert row == list(range(row[0], row[0] + 5))


def test_claimed_pages_are_used_when_nothing_else_is_free() -> None:
    pages = Pages(8, 4)
    first = pages.take(2, expect=6)
    assert sorted(first + pages.take(6)) == list(range(8))


def test_an_ended_row_claims_nothing() -> None:
    pages = Pages(8, 4)
    row = pages.take(2, expect=4)
    pages.unclaim(row[-1])
    pages.give(row)
    assert pages.take(8) == list(range(8))


def test_scattered_pages_are_found_when_there_is_no_run() -> None:
    pages = Pages(8, 4)
    everything = pages.take(8)
    pages.give(everything[::2])
    assert sorted(pages.take(4)) == [0, 2, 4, 6]
    assert pages.free == 0


def test_giving_a_page_back_twice_is_caught() -> None:
    pages = Pages(4, 4)
    taken = pages.take(1)
    pages.give(taken)
    with pytest.raises(AssertionError, match="twice"):
        pages.give(taken)


def test_no_page_is_ever_in_two_hands() -> None:
    chance = random.Random(0)
    pages, rows = Pages(64, 4), []
    for _ in range(500):
        if rows and chance.random() < 0.4:
            row = rows.pop(chance.randrange(len(rows)))
            pages.unclaim(row[-1])
            pages.give(row)
        elif pages.free >= 4:
            rows.append(pages.take(chance.randint(1, 4), expect=chance.randint(0, 4)))
        elif rows and pages.free:
            rows[0] += pages.take(1, after=rows[0][-1])
        held = [page for row in rows for page in row]
        assert len(held) == len(set(held)) == 64 - pages.free
