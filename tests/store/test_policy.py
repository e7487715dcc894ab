"""Who goes first. Pages are named by letters; a job is a string of them."""

import math

import pytest

from pando.store.policy import FIFO, LRU, POLICIES, Held, Lookahead, Queue, victim


def page(name: str, used: float = 0, depth: int = 0, begun: float = 0) -> Held:
    return Held(name.encode(), 1, depth, used, begun)


def queue(*jobs: str) -> Queue:
    return Queue([[letter.encode() for letter in job] for job in jobs])


def goes(policy, held, waiting=None, pinned=()) -> str:
    found = victim(policy, held, waiting or queue(), {name.encode() for name in pinned})
    return found.key.decode() if found else ""


def test_what_was_used_longest_ago_goes_first() -> None:
    assert goes(LRU(), [page("a", used=3), page("b", used=1), page("c", used=2)]) == "b"


def test_the_conversation_that_began_first_goes_first_however_lately_it_was_used() -> None:
    assert goes(FIFO(), [page("a", begun=1, used=9), page("b", begun=2, used=3)]) == "a"


def test_what_no_job_needs_goes_before_what_one_needs() -> None:
    held = [page("a", used=1), page("b", used=2), page("c", used=3)]
    assert goes(Lookahead(), held, queue("a", "c")) == "b"


def test_among_what_no_job_needs_the_least_recently_used_goes() -> None:
    held = [page("a", used=3), page("b", used=1), page("c", used=2)]
    assert goes(Lookahead(), held, queue("b")) == "c"


def test_where_all_are_needed_the_one_needed_last_goes() -> None:
    held = [page("a", used=1), page("b", used=3), page("c", used=2)]
    assert goes(Lookahead(), held, queue("a", "c", "b")) == "b"


def test_a_page_counts_for_the_first_job_that_needs_it() -> None:
    assert goes(Lookahead(), [page("a"), page("b")], queue("a", "b", "a")) == "b"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_chain_goes_from_its_end(policy) -> None:
    chain = [page("a", depth=0), page("b", depth=1), page("c", depth=2)]
    assert goes(policy, chain) == goes(policy, chain, queue("abc")) == "c"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_pinned_never_goes(policy) -> None:
    held = [page("a", used=1, begun=1), page("b", used=2, begun=2)]
    assert goes(policy, held, pinned="a") == "b" and goes(policy, held, pinned="ab") == ""


def test_a_page_is_needed_until_the_last_job_that_needs_it_has_left() -> None:
    waiting = queue("ab", "a", "b")
    assert waiting.leave(0) == [b"a", b"b"]
    assert waiting.need(b"a") == 1 and waiting.need(b"b") == 2
    assert waiting.leave(2) == [b"b"] and waiting.need(b"b") == math.inf
    assert waiting.jobs == {1: (b"a",)} and waiting.order == [1] and len(waiting) == 1 and 1 in waiting and 2 not in waiting


def test_a_job_that_leaves_from_behind_changes_no_ones_need() -> None:
    waiting = queue("a", "a")
    assert waiting.leave(1) == [] and waiting.need(b"a") == 0


def test_a_job_that_comes_back_stands_where_it_was() -> None:
    waiting = queue("a", "b")
    waiting.leave(0)
    waiting.join(0, [b"a"])
    assert [waiting.jobs[place] for place in waiting.order] == [(b"a",), (b"b",)]
