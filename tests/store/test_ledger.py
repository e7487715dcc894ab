"""What is where, and what must go. Pages are letters of one byte each; a chain is a string of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pando.store.ledger import Gone, Kept, Ledger, Page
from pando.store.policy import FIFO, LRU, POLICIES, Lookahead, victim


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def chain(names: str, size: int = 1) -> list[Page]:
    return [Page(key, size) for key in keys(names)]


def there(ledger: Ledger, tier: str) -> str:
    return "".join(sorted(page.key.decode() for page in ledger.held(tier)))


def gone(kept: Kept) -> list[tuple[str, str]]:
    return [(key.decode(), tier) for key, tier in kept.gone]


def two_tiers(host: int, disk: int, policy=None, ttl: float | None = None) -> Ledger:
    return Ledger({"host": host, "disk": disk}, policy or LRU(), ttl)


# ---- figure 9 of CachedAttention


def test_figure_9_step_by_step() -> None:
    """Job 1 runs. Jobs 2 to 9 wait; two of them are in host memory, four on disk: a window of six."""
    ledger = two_tiers(2, 4, Lookahead())
    for name in "24":
        ledger.keep("host", chain(name), now=0)
    for name in "3569":
        ledger.keep("disk", chain(name), now=0)
    for job in range(2, 10):
        ledger.join(job, keys(str(job)))

    first = next(ledger.prefetch())
    assert first == chain("3"), "job 2 is in host memory; job 3 is not, and is fetched"
    assert gone(ledger.keep("disk", chain("4"), now=1)) == [("9", "disk")], "job 9 is let go, and job 4 takes its place"
    kept = ledger.keep("host", first, now=1)
    assert gone(kept) == [("4", "host")], "it is on disk now"
    assert kept.entered == (b"3",)
    assert there(ledger, "host") == "23" and there(ledger, "disk") == "3456"

    assert list(ledger.prefetch()) == [], "two jobs fill host memory"
    ledger.leave(2)
    assert next(ledger.prefetch()) == chain("4"), "the window has moved on"


# ---- one tier


def test_room_is_made_only_where_it_is_needed() -> None:
    ledger = Ledger({"host": 3}, LRU())
    assert ledger.keep("host", chain("ab"), now=0).gone == ()
    assert ledger.keep("host", chain("x"), now=1).gone == ()
    kept = ledger.keep("host", chain("y"), now=2)
    assert gone(kept) == [("b", "host")] and ledger.used["host"] == 3


def test_a_chain_longer_than_the_tier_is_kept_as_far_as_it_fits() -> None:
    ledger = Ledger({"host": 3}, LRU())
    kept = ledger.keep("host", chain("abcde"), now=0)
    assert kept.entered == (b"a", b"b", b"c")
    assert ledger.find(keys("abcde")) == ["host"] * 3


def test_a_page_larger_than_the_tier_is_refused_and_nothing_leaves_for_it() -> None:
    ledger = Ledger({"host": 3}, LRU())
    ledger.keep("host", chain("a"), now=0)
    kept = ledger.keep("host", chain("b", size=4), now=1)
    assert kept.entered == kept.gone == ()
    assert there(ledger, "host") == "a"


def test_what_is_not_needed_does_not_displace_what_is() -> None:
    ledger = Ledger({"host": 2}, Lookahead())
    ledger.keep("host", chain("ab"), now=0)
    ledger.join(1, keys("ab"))
    assert ledger.keep("host", chain("x"), now=1).entered == () and there(ledger, "host") == "ab"
    ledger.leave(1)
    assert ledger.keep("host", chain("x"), now=2).entered == (b"x",) and there(ledger, "host") == "ax"


def test_a_pinned_page_stays_until_it_is_unpinned_as_often() -> None:
    ledger = Ledger({"host": 1}, LRU())
    ledger.keep("host", chain("a"), now=0)
    ledger.pin(keys("a"))
    ledger.pin(keys("a"))
    ledger.unpin(keys("a"))
    assert ledger.keep("host", chain("b"), now=1).entered == ()
    ledger.unpin(keys("a"))
    assert ledger.keep("host", chain("b"), now=2).entered == (b"b",) and there(ledger, "host") == "b"


def test_a_shared_beginning_outlives_its_conversations() -> None:
    for policy in POLICIES.values():
        ledger = Ledger({"host": 3}, policy)
        for now, name in enumerate("abcdef"):
            ledger.keep("host", chain("s" + name), now)
        assert ledger.find(keys("sf")) == ["host", "host"], policy


def test_fifo_goes_by_the_beginning_of_a_conversation_and_lru_by_its_last_turn() -> None:
    for policy, left in ((FIFO(), "abx"), (LRU(), "Aax")):
        ledger = Ledger({"host": 3}, policy)
        for now, turn in enumerate(("a", "b", "aA", "x")):
            ledger.keep("host", chain(turn), now)
        assert there(ledger, "host") == "".join(sorted(left)), policy


def test_a_page_that_stands_deeper_in_another_chain_goes_before_those_it_stands_behind() -> None:
    ledger = Ledger({"host": 2}, LRU())
    ledger.keep("host", chain("b"), now=0)
    ledger.keep("host", chain("ab"), now=0)
    assert gone(ledger.keep("host", chain("x"), now=1)) == [("b", "host")]


# ---- several tiers


def test_what_was_not_written_further_down_is_let_go_with_host_memory() -> None:
    ledger = two_tiers(1, 2)
    ledger.keep("host", chain("a"), now=0)
    assert gone(ledger.keep("host", chain("b"), now=1)) == [("a", "host")]
    assert ledger.find(keys("a")) == []


def test_what_was_written_behind_is_only_dropped_from_host_memory() -> None:
    ledger = two_tiers(1, 2)
    ledger.keep("host", chain("a"), now=0)
    ledger.keep("disk", chain("a"), now=0)
    assert gone(ledger.keep("host", chain("b"), now=1)) == [("a", "host")]
    assert ledger.find(keys("a")) == ["disk"]


def test_a_page_is_asked_for_by_its_name_alone() -> None:
    ledger = Ledger({"host": 3, "disk": 3}, POLICIES["lru"])
    ledger.keep("disk", chain("a"), now=0)
    assert ledger.has(b"a") and ledger.has(b"a", "disk")
    assert not ledger.has(b"a", "host") and not ledger.has(b"b")


def test_a_page_is_found_in_the_uppermost_tier_that_has_it() -> None:
    ledger = two_tiers(9, 9)
    ledger.keep("disk", chain("abc"), now=0)
    ledger.keep("host", chain("a"), now=1)
    assert ledger.find(keys("abcd")) == ["host", "disk", "disk"]
    ledger.drop(keys("b"))
    assert ledger.find(keys("abc")) == ["host"], "what is behind a gap is of no use"


def test_a_page_that_was_lost_on_disk_may_still_be_in_host_memory() -> None:
    ledger = two_tiers(9, 9)
    ledger.keep("host", chain("a"), now=0)
    ledger.keep("disk", chain("a"), now=0)
    ledger.drop(keys("a"), "disk")
    assert ledger.find(keys("a")) == ["host"] and ledger.used == {"host": 1, "disk": 0}


def test_pages_that_alone_enter_belong_to_the_chain_that_they_continue() -> None:
    ledger = Ledger({"host": 2, "disk": 3}, FIFO())
    ledger.keep("disk", chain("a"), now=1)
    ledger.keep("disk", chain("x"), now=2)
    assert ledger.keep("host", chain("ab"), now=3, only=keys("b")).entered == (b"b",)
    ledger.keep("disk", chain("ab"), now=3, only=keys("b"))
    assert ledger.find(keys("ab")) == ["disk", "host"], "of what is on disk, nothing was copied to host memory"
    assert gone(ledger.keep("disk", chain("y"), now=4)) == [("b", "disk")], "it began before x, and ends with b"


def test_what_was_there_before_a_restart_goes_in_the_order_of_its_last_use() -> None:
    ledger = two_tiers(1, 3)
    for name, depth, used in (("b", 1, 5.0), ("a", 0, 5.0), ("c", 0, 6.0)):
        ledger.restore("disk", Page(name.encode(), 1), depth, used)
    assert ledger.find(keys("ab")) == ["disk", "disk"]
    assert gone(ledger.keep("disk", chain("x"), now=7)) == [("b", "disk")]


# ---- time to live


def test_what_was_not_used_for_too_long_is_let_go_everywhere() -> None:
    ledger = two_tiers(9, 9, ttl=10)
    ledger.keep("host", chain("ab"), now=0)
    ledger.keep("disk", chain("ab"), now=0)
    ledger.use(keys("a"), now=5)
    assert ledger.expire(now=9) == []
    assert ledger.expire(now=10) == [Gone(b"b", "host"), Gone(b"b", "disk")]
    assert ledger.find(keys("a")) == ["host"] and ledger.used == {"host": 1, "disk": 1}


def test_a_clock_that_is_set_back_holds_up_nothing() -> None:
    ledger = Ledger({"host": 3}, LRU(), ttl=10)
    ledger.keep("host", chain("ab"), now=1000)
    ledger.keep("host", chain("c"), now=0)
    ledger.use(keys("a"), now=5)
    assert ledger.expire(now=9) == []
    assert [page.key for page in ledger.expire(now=10)] == keys("bc")
    assert [page.key for page in ledger.expire(now=15)] == keys("a")


def test_what_was_used_before_a_clock_was_set_back_still_leaves_in_its_turn() -> None:
    ledger = Ledger({"host": 2}, LRU(), ttl=10)
    for place, name in enumerate("abc"):
        ledger.keep("host", chain(name), now=1000 + place)
    assert gone(ledger.keep("host", chain("d"), now=0)) == [("b", "host")]
    ledger.use(keys("c"), now=5)
    assert gone(ledger.keep("host", chain("e"), now=5)) == [("d", "host")]


def test_what_has_expired_goes_before_anything_else() -> None:
    ledger = Ledger({"host": 2}, FIFO(), ttl=10)
    ledger.keep("host", chain("a"), now=0)
    ledger.keep("host", chain("b"), now=1)
    ledger.use(keys("a"), now=9)
    assert gone(ledger.keep("host", chain("c"), now=12)) == [("b", "host")]


def test_what_is_pinned_does_not_expire() -> None:
    ledger = Ledger({"host": 2}, LRU(), ttl=10)
    ledger.keep("host", chain("a"), now=0)
    ledger.pin(keys("a"))
    assert ledger.expire(now=50) == []
    ledger.unpin(keys("a"))
    assert ledger.expire(now=59) == [] and ledger.expire(now=60) == [Gone(b"a", "host")]


# ---- prefetch


def test_prefetch_follows_the_queue_as_far_as_host_memory_holds() -> None:
    ledger = two_tiers(3, 9, Lookahead())
    for name in ("ab", "c", "d"):
        ledger.keep("disk", chain(name), now=0)
    ledger.join(1, keys("c"))
    ledger.join(2, keys("ab"))
    ledger.join(3, keys("d"))
    assert list(ledger.prefetch()) == [chain("c"), chain("ab")]


def test_jobs_that_share_pages_need_room_for_them_once() -> None:
    ledger = two_tiers(3, 9, Lookahead())
    ledger.keep("disk", chain("sa"), now=0)
    ledger.keep("disk", chain("sb"), now=0)
    ledger.join(1, keys("sa"))
    ledger.join(2, keys("sb"))
    assert list(ledger.prefetch()) == [chain("sa"), chain("sb")]


def test_nothing_behind_a_missing_page_is_fetched() -> None:
    ledger = two_tiers(9, 9, Lookahead())
    ledger.keep("disk", chain("abc"), now=0)
    ledger.drop(keys("b"))
    ledger.join(1, keys("abc"))
    assert list(ledger.prefetch()) == [chain("a")]


@pytest.mark.parametrize("policy", [LRU(), FIFO()])
def test_who_does_not_look_ahead_does_not_prefetch(policy) -> None:
    ledger = two_tiers(9, 9, policy)
    ledger.keep("disk", chain("a"), now=0)
    ledger.join(1, keys("a"))
    assert list(ledger.prefetch()) == []


# ---- whatever happens

LETTERS = "abcdef"
CONVERSATIONS = st.builds("".join, st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5))
STEPS = st.one_of(
    st.tuples(st.just("keep"), st.sampled_from(["host", "disk"]), CONVERSATIONS),
    st.tuples(st.just("use"), st.just(""), CONVERSATIONS),
    st.tuples(st.sampled_from(["join", "leave", "pin", "unpin", "prefetch", "expire"]), st.just(""), CONVERSATIONS),
)


def prefixes(name: str) -> list[Page]:
    """As keys are chained: a page's key names everything before it. Sizes differ, and are the same for the same key."""
    return [Page(name[: i + 1].encode(), 1 + sum(name[: i + 1].encode()) % 3) for i in range(len(name))]


def test_a_chain_does_not_displace_its_own_beginning() -> None:
    """Its later pages are needed by a waiting job, and its first one is not: as of a conversation that has outgrown its window."""
    ledger = two_tiers(5, 3, POLICIES["lookahead"], None)
    for now, name in enumerate(("a", "b")):
        ledger.keep("host", prefixes(name), now)
    ledger.join(0, [page.key for page in prefixes("bba")][1:])
    assert b"bba" not in ledger.keep("host", prefixes("bba"), 2).entered
    assert ledger.find([b"b"]) == ["host"]


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    sizes=st.tuples(st.integers(3, 12), st.integers(3, 20)),  # room for any one page
    ttl=st.sampled_from([None, 7.0]),
    truncated=st.booleans(),
    steps=st.lists(STEPS, max_size=60),
)
def test_whatever_happens_the_books_are_right(policy, sizes, ttl, truncated, steps) -> None:
    """Truncated: jobs need the later pages of a chain alone, as of a conversation that has outgrown its window."""
    ledger = two_tiers(*sizes, POLICIES[policy], ttl)
    pinned: list[list[bytes]] = []
    places = itertools.count()
    for now, (what, tier, name) in enumerate(steps):
        pages = prefixes(name)
        names = [page.key for page in pages]
        before = {key: set(page.tiers) for key, page in ledger._pages.items()}
        held_by_pins = {key for each in pinned for key in each}
        kept, into = Kept((), ()), tier
        if what == "keep":
            kept = ledger.keep(tier, pages, now)
            assert set(kept.entered) <= {page.key for page in ledger.held(tier)}
            missing = [page for page in pages if not ledger.has(page.key, tier)]
            assert not missing or ledger.used[tier] + missing[0].size > ledger.capacities[tier]
        elif what == "use":
            ledger.use(names, now)
        elif what == "join":
            ledger.join(next(places), names[truncated:])
        elif what == "leave" and len(ledger.queue):
            ledger.leave(ledger.queue.order[len(name) % len(ledger.queue)])
        elif what == "pin" and len(pinned) < 2:
            pinned.append(names)
            ledger.pin(names)
        elif what == "unpin" and pinned:
            ledger.unpin(pinned.pop())
        elif what == "prefetch":
            for fetched in itertools.islice(ledger.prefetch(), 1):
                kept, into = ledger.keep("host", fetched, now), "host"
        elif what == "expire":
            kept = Kept((), tuple(ledger.expire(now)))
        check(ledger, before, held_by_pins, kept, into)
        assert truncated or all(len(key) == 1 or key[:-1] in ledger._pages for key in ledger._pages), "no chain is cut"


def check(ledger: Ledger, before: dict[bytes, set[str]], pinned: set[bytes], kept: Kept, into: str) -> None:
    for tier, capacity in ledger.capacities.items():
        assert ledger.used[tier] == sum(page.size for page in ledger.held(tier)) <= capacity
    for key, tier in kept.gone:
        assert key not in pinned, "what is pinned stays"
        before[key].remove(tier)
    for key in kept.entered:
        before.setdefault(key, set()).add(into)
    said = {key: tiers for key, tiers in before.items() if tiers}
    assert said == {key: page.tiers for key, page in ledger._pages.items()}, "whoever does what is said has what is in the books"
    for tier in ledger.capacities:
        expected = victim(ledger.policy, ledger.held(tier), ledger.queue, ledger._pins)
        found = ledger._victim(tier)
        assert found is expected
        if found is not None:
            ledger._push(tier, found)
    assert [[page.key for page in chain] for chain in ledger.prefetch()] == slow_prefetch(ledger)


def slow_prefetch(ledger: Ledger) -> list[list[bytes]]:
    """The definition: job by job, as far as all they need is no more than the tier holds."""
    chains, needed = [], dict[bytes, int]()
    for place in ledger.queue.order if ledger.policy.looks_ahead else ():
        names = ledger.queue.jobs[place]
        found = [ledger._pages[key] for key in names[: len(ledger.find(names))]]
        needed |= {page.key: page.size for page in found}
        if sum(needed.values()) > ledger.capacities["host"]:
            break
        if any("host" not in page.tiers for page in found):
            chains.append([page.key for page in found])
    return chains
