"""Who computes what in a step, decided without a model: nothing here needs torch."""

import random
from collections.abc import Iterator

from pando.engine.request import SamplingParams
from pando.engine.row import Row, Schedule
from pando.engine.scheduler import Scheduler
from pando.kv.pages import Pages
from pando.kv.segment import Lineage
from pando.kv.tree import PrefixTree

PAGE = 4
ROOT = b"root"


def scheduler(pages: int = 100, *, rows: int = 8, budget: int = 32, reuse: bool = True) -> Scheduler:
    return Scheduler(Pages(pages, PAGE), PrefixTree(PAGE), max_rows=rows, budget=budget, reuse=reuse)


def row(name: str, prompt: list[int], more: int = 8, root: bytes = ROOT) -> Row:
    return Row(name, 0, prompt, SamplingParams(), 0, Lineage.of(root), len(prompt) + more)


def play(work: Scheduler) -> Schedule:
    """One step in which every row that has caught up says the number of its tokens, and ends when it may say no more."""
    schedule = work.next()
    work.settle(schedule)
    for each in schedule.rows:
        if each.computed == len(each.tokens):
            each.output.append(len(each.tokens) % 50)
            each.tokens.append(each.output[-1])
            if len(each.tokens) >= each.last:
                work.remove(each)
    return schedule


def played(work: Scheduler, most: int = 1000) -> Iterator[Schedule]:
    for _ in range(most):
        if not work.running and not work.waiting:
            return
        yield play(work)
    raise AssertionError(f"{len(work.running)} rows still run and {len(work.waiting)} wait after {most} steps")


def names(rows: list[Row]) -> list[str]:
    return [each.request_id for each in rows]


def owned(work: Scheduler) -> int:
    """Pages that rows have for themselves."""
    return sum(len(each.pages) - each.settled // PAGE for each in work.running)


def test_a_step_computes_no_more_than_its_budget_and_a_long_prompt_takes_several() -> None:
    work = scheduler(budget=10)
    work.add([row("long", list(range(25)), more=1)])
    assert [schedule.counts for schedule in played(work)] == [[10], [10], [5]]


def test_rows_that_decode_come_before_those_that_catch_up() -> None:
    work = scheduler(budget=6)
    work.add([row("a", [1, 2, 3])])
    play(work)
    work.add([row("b", list(range(10, 30)))])
    for _ in range(3):
        schedule = play(work)
        assert dict(zip(names(schedule.rows), schedule.counts, strict=True)) == {"a": 1, "b": 5}


def test_requests_start_in_the_order_of_their_arrival() -> None:
    work = scheduler(rows=2)
    work.add([row(name, [number] * 3) for number, name in enumerate("abcd")])
    first_seen = list(dict.fromkeys(name for schedule in played(work) for name in names(schedule.rows)))
    assert first_seen == ["a", "b", "c", "d"]


def test_no_more_rows_run_than_allowed() -> None:
    work = scheduler(rows=3)
    work.add([row(str(number), [number] * 3) for number in range(10)])
    assert max(len(schedule.rows) for schedule in played(work)) == 3


def test_a_row_whose_beginning_is_being_computed_waits_for_it() -> None:
    work = scheduler(budget=8)
    trunk = list(range(20))
    work.add([row("first", [*trunk, 90]), row("second", [*trunk, 91]), row("other", [99] * 3)])
    assert names(play(work).rows) == ["first"]  # the budget went to it
    steps = [dict(zip(names(s.rows), s.counts, strict=True)) for s in played(work)]
    began = next(step for step in steps if "second" in step)
    assert began["second"] == 1, "everything but its last token was there"
    assert "other" in steps[1], "one that shares nothing does not wait behind one that is held"


def test_without_reuse_nothing_waits_and_nothing_is_kept() -> None:
    work = scheduler(reuse=False)
    work.add([row("a", list(range(12))), row("b", list(range(12)))])
    assert play(work).counts == [12, 12]
    assert work.tree.pages == 0
    list(played(work))
    assert work.pages.free == work.pages.count


def test_a_row_is_told_what_was_there_only_when_it_is_first_admitted() -> None:
    work = scheduler(pages=8)
    old, young = row("old", [1] * 10, more=16), row("young", [2] * 10, more=16)
    work.add([old, young])
    list(played(work))
    assert work.preemptions, "the pool was too large for the test"
    assert (old.cached, young.cached) == (0, 0)


def test_under_pressure_the_cache_goes_before_any_row() -> None:
    work = scheduler(pages=8)
    work.add([row("before", [7] * 20, more=1)])
    list(played(work))
    assert work.tree.pages == 5
    work.add([row("a", [1] * 10, more=6), row("b", [2] * 10, more=6)])
    list(played(work))
    assert work.preemptions == 0


def test_the_row_that_arrived_last_gives_way_and_comes_back_first() -> None:
    work = scheduler(pages=11)
    rows = [row(name, [number] * 8, more=20) for number, name in enumerate("abc")]
    work.add(rows)
    while not work.preemptions:
        play(work)
    assert names(work.running) == ["a", "b"]
    assert names(list(work.waiting)) == ["c"]
    work.add([row("late", [9] * 3)])
    assert names(list(work.waiting)) == ["c", "late"]
    list(played(work))
    assert [len(each.output) for each in rows] == [20, 20, 20]


def test_a_decode_step_of_unchanged_rows_says_so_until_a_page_is_full() -> None:
    work = scheduler()
    work.add([row("a", [1, 2, 3, 4, 5], more=20), row("b", [6, 7, 8, 9, 10], more=20)])
    changed = [play(work).changed for _ in range(12)]
    assert changed[:2] == [True, True]  # they begin; they decode for the first time
    assert [step for step, each in enumerate(changed) if each] == [0, 1, 4, 8]


def test_a_fork_copies_the_part_of_a_page_and_shares_the_rest() -> None:
    work = scheduler()
    prompt = list(range(10))
    rows = [Row("r", index, prompt, SamplingParams(n=3), index, Lineage.of(ROOT), 20) for index in range(3)]
    work.add(rows)
    assert play(work).rows == rows[:1]
    schedule = play(work)
    assert [copy.tokens for copy in schedule.copies] == [1, 1]  # of two in the page, the last is computed again for its logits
    assert [copy.target for copy in schedule.copies] == [rows[1].pages[2], rows[2].pages[2]]
    assert len({each.pages[2] for each in rows}) == 3
    assert all(each.pages[:2] == rows[0].pages[:2] for each in rows)


def test_tenants_share_nothing() -> None:
    for other, cached in ((ROOT, 9), (b"another", 0)):
        work = scheduler()
        work.add([row("a", [1] * 10)])
        list(played(work))
        asked = row("b", [1] * 10, root=other)
        work.add([asked])
        list(played(work))
        assert asked.cached == cached


def test_removing_a_row_gives_its_pages_to_the_tree_and_the_pool() -> None:
    work = scheduler()
    running, waiting = row("running", [1] * 10), row("waiting", [1] * 10)
    work.add([running, waiting])
    play(work)
    work.remove(waiting)
    work.remove(running)
    work.remove(running)  # twice is no error
    assert not work.running
    assert not work.waiting
    assert work.pages.count - work.pages.free == work.tree.pages == 3
    work.pages.give(work.tree.clear())
    assert work.pages.free == work.pages.count


def test_whatever_the_load_everything_ends_and_no_page_is_lost() -> None:
    preempted = 0
    for seed in range(150):
        chance = random.Random(seed)
        pages, budget, most = chance.randint(6, 30), chance.choice([1, 3, 8, 64]), chance.choice([1, 2, 5])
        work = scheduler(pages, rows=most, budget=budget)
        trunk = [chance.randrange(50) for _ in range(pages * PAGE)]
        rows = []
        for number in range(chance.randint(1, 10)):
            size = chance.randint(1, pages * PAGE - 1)
            own = chance.randint(0, size)
            prompt = trunk[:own] + [chance.randrange(50) for _ in range(size - own)]
            rows.append(row(str(number), prompt, more=chance.randint(1, pages * PAGE - size), root=chance.choice([ROOT, ROOT, b"other"])))
        dropped = _run(work, rows, chance, budget, most)
        preempted += work.preemptions
        for each in rows:
            assert each in dropped or len(each.tokens) == each.last, f"seed {seed}"
        work.pages.give(work.tree.clear())
        assert work.pages.free == pages, f"seed {seed}: a page was lost"
    assert preempted > 30


def _run(work: Scheduler, rows: list[Row], chance: random.Random, budget: int, most: int) -> list[Row]:
    """Adds rows over time and drops a few; checks at each step what must always hold."""
    to_come, dropped = list(rows), []
    for _ in range(20_000):
        while to_come and chance.random() < 0.4:
            work.add([to_come.pop(0)])
        if not to_come and not work.running and not work.waiting:
            return dropped
        oldest = work.running[0] if work.running else None
        schedule = play(work)
        assert sum(schedule.counts) <= budget
        assert len(schedule.rows) <= most
        assert oldest is None or oldest not in work.waiting, "the oldest row was preempted"
        assert work.pages.count - work.pages.free == work.tree.pages + owned(work)
        if chance.random() < 0.01 and work.running:
            dropped.append(chance.choice(work.running))
            work.remove(dropped[-1])
    raise AssertionError("the scheduler never came to rest")
