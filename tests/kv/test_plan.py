import random
from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest

from pando.kv.plan import ALWAYS, NEVER, CostModel, Plan, Read, RowView, plan
from pando.kv.segment import Placement, Segment

PAGE = 4


def segment(pages: list[int], first: int, tokens: int | None = None) -> Segment:
    count = len(pages) * PAGE if tokens is None else tokens
    return Segment(tuple(bytes([page % 256]) * 32 for page in pages), (0,) * count, tuple(pages), first)


def row(placements: list[Placement], tail: list[int]) -> RowView:
    end = placements[-1].segment.first + len(placements[-1].segment) + placements[-1].shift if placements else 0
    return RowView(placements, tuple(tail), end)


def test_a_shared_prefix_is_one_read_and_each_tail_another() -> None:
    prefix = Placement(segment([0, 1], 0))
    found = plan([row([prefix], [5]), row([prefix], [6])], PAGE, cost=ALWAYS)
    assert found.shared_reads == (Read((0, 1), 8, 0, (0, 1), (0, 0)),)
    assert found.private_reads == (Read((5,), 4, 8, (0,), (0,)), Read((6,), 4, 8, (1,), (0,)))


def test_a_chain_with_the_same_readers_is_one_read() -> None:
    chain = [Placement(segment([0], 0)), Placement(segment([1, 2], 4))]
    found = plan([row(chain, [5]), row(chain, [6])], PAGE, cost=ALWAYS)
    assert [read.pages for read in found.shared_reads] == [(0, 1, 2)]


def test_short_links_of_a_long_chain_are_shared_together() -> None:
    chain = [Placement(segment([page], PAGE * page)) for page in range(20)]
    found = plan([row(chain, [50]), row(chain, [51]), row(chain, [52])], PAGE, cost=CostModel(launch=48, merge=2))
    assert [read.tokens for read in found.shared_reads] == [80]


def test_a_fork_is_read_by_its_own_branch_only() -> None:
    trunk, left = Placement(segment([0], 0)), Placement(segment([1], 4))
    rows = [row([trunk, left], [10]), row([trunk, left], [11]), row([trunk], [12])]
    found = plan(rows, PAGE, cost=ALWAYS)
    assert [(read.pages, read.rows) for read in found.shared_reads] == [((0,), (0, 1, 2)), ((1,), (0, 1))]


def test_as_many_readers_are_not_yet_the_same_readers() -> None:
    """Two rows read the trunk and two the branch, but only one reads both."""
    trunk, branch = Placement(segment([0], 0)), Placement(segment([1], 4))
    found = plan([row([trunk], [10]), row([trunk, branch], [11]), row([branch], [12])], PAGE, cost=ALWAYS)
    assert [(read.pages, read.rows) for read in found.shared_reads] == [((0,), (0, 1)), ((1,), (1, 2))]


def test_a_segment_behind_several_others_continues_none_of_them() -> None:
    """Each of two rows reads it behind another trunk; one of the trunks has as many readers."""
    one, other, both = Placement(segment([0], 0)), Placement(segment([1], 0)), Placement(segment([2], 4))
    found = plan([row([one, both], [10]), row([other, both], [11]), row([one], [12])], PAGE, cost=ALWAYS)
    assert [(read.pages, read.rows) for read in found.shared_reads] == [((0,), (0, 2)), ((2,), (0, 1))]


def test_what_does_not_pay_joins_the_private_runs() -> None:
    prefix = Placement(segment([0], 0))
    found = plan([row([prefix], [1]), row([prefix], [6])], PAGE, cost=CostModel(launch=100))
    assert not found.shared
    assert [(read.pages, read.tokens, read.first) for read in found.private_reads] == [((0, 1), 8, 0), ((0, 6), 8, 0)]


def test_many_rows_share_segments_that_few_would_not() -> None:
    """As on a GPU with 16 query heads over one key head: 64 tokens for each of the 16 that one more row costs, while they are few."""
    dear, prefix = CostModel(launch=64, merge=64), Placement(segment([*range(200)], 0))  # 800 tokens
    for count, is_shared in ((2, False), (16, False), (32, True), (300, True)):
        found = plan([row([prefix], [1000 + number]) for number in range(count)], PAGE, 16, dear)
        assert bool(found.shared) == is_shared, count
    assert not plan([row([prefix], [1000 + number]) for number in range(300)], PAGE, 16, NEVER).shared


def test_rows_that_merge_anyway_share_shorter_segments_too() -> None:
    dear = CostModel(launch=0, merge=20)
    trunk, twig = Placement(segment([*range(100, 120)], 0)), Placement(segment([*range(8)], 80))
    assert not plan([row([twig], [50]), row([twig], [51])], PAGE, cost=dear).shared
    behind = [row([trunk, twig], [50]), row([trunk, twig], [51]), row([trunk], [52])]
    for cost in (dear, CostModel(launch=64, merge=20)):  # which is there anyway, too
        assert [read.tokens for read in plan(behind, PAGE, cost=cost).shared_reads] == [80, 32]
    assert [read.tokens for read in plan(behind, PAGE, cost=CostModel(launch=48, merge=2)).shared_reads] == [80], "parts are cheap"
    beside = plan([row([trunk, twig], [50]), row([trunk], [51]), row([twig], [52])], PAGE, cost=dear)
    assert [read.tokens for read in beside.shared_reads] == [80], "one of those who read the twig would merge for it alone"


def test_a_row_alone_has_one_read() -> None:
    for cost in (CostModel(), ALWAYS, NEVER, CostModel(-1, 0)):
        found = plan([row([Placement(segment([0, 1], 0)), Placement(segment([2], 8))], [3])], PAGE, cost=cost)
        assert [read.pages for read in found.reads] == [(0, 1, 2, 3)]
        assert not found.shared


def test_a_module_is_one_read_for_rows_that_place_it_differently() -> None:
    module = segment([7, 8], 0)
    rows = [row([Placement(module, 0)], [1]), row([Placement(segment([3], 0)), Placement(module, 4)], [2])]
    found = plan(rows, PAGE, cost=ALWAYS)
    assert found.shared_reads == (Read((7, 8), 8, 0, (0, 1), (0, 4)),)


def test_a_module_placed_between_two_segments_does_not_part_them() -> None:
    trunk, branch, module = Placement(segment([0], 0)), Placement(segment([1], 4)), Placement(segment([7], 0), 100)
    found = plan([row([trunk, branch], [2]), row([trunk, module, branch], [3])], PAGE, cost=ALWAYS)
    assert found.shared_reads == (Read((0, 1), 8, 0, (0, 1), (0, 0)),)
    assert found.private_reads == (Read((2,), 4, 8, (0,), (0,)), Read((7,), 4, 0, (1,), (100,)), Read((3,), 4, 8, (1,), (0,)))


def test_what_was_stored_side_by_side_and_is_moved_differently_is_two_reads() -> None:
    """A read has one shift for each of its rows."""
    module, text = Placement(segment([7], 0), 8), Placement(segment([1], 4))
    own = Read((7,), 4, 0, (0,), (8,)), Read((1, 2), 8, 4, (0,), (0,))
    assert plan([row([module, text], [2])], PAGE).reads == own
    assert plan([row([module, text], [2]), row([], [3])], PAGE, cost=NEVER).reads[:2] == own
    found = plan([row([module, text], [2]), row([module, text], [3])], PAGE, cost=ALWAYS)
    assert found.shared_reads == (Read((7,), 4, 0, (0, 1), (8, 8)), Read((1,), 4, 4, (0, 1), (0, 0)))


def test_where_a_row_ends_the_next_one_does_not_go_on() -> None:
    """It begins with a module that was made for the position behind the first one's tail."""
    found = plan([row([], [1]), row([Placement(segment([2], 4))], [3])], PAGE, cost=NEVER)
    assert found.reads == (Read((1,), 4, 0, (0,), (0,)), Read((2, 3), 8, 4, (1,), (0,)))


def test_the_reads_are_the_same_in_whatever_order_a_row_names_what_it_reads() -> None:
    """As a prompt that imports the modules of a schema in another order, which stand where the schema has them."""
    placed = [Placement(segment([page], first), shift) for page, first, shift in ((0, 0, 8), (1, 4, 8), (2, 0, 20), (3, 4, 20), (4, 0, 0))]
    for order in permutations(placed):
        rows = [RowView(order, (9,), 4), row([], [8])]
        for found in plan(rows[:1], PAGE), plan(rows, PAGE):
            assert {read.pages for read in found.reads} - {(8,)} == {(0, 1), (2, 3), (4, 9)}


def test_a_text_behind_a_module_is_one_read_with_the_tail() -> None:
    start, module, text = Placement(segment([0], 0)), Placement(segment([7], 0), 4), Placement(segment([1], 8))
    found = plan([row([start, module, text], [2])], PAGE)
    assert sorted(read.pages for read in found.reads) == [(0,), (1, 2), (7,)]


def test_a_row_that_places_a_segment_twice_reads_it_twice() -> None:
    """A read with a row in it twice would answer one of the two only."""
    module = segment([7, 8], 0)
    twice = [Placement(module, 0), Placement(module, 8)]
    alone = plan([row(twice, [1])], PAGE, cost=ALWAYS)
    assert sorted(read.shifts for read in alone.reads if read.pages == (7, 8)) == [(0,), (8,)]
    found = plan([row(twice, [1]), row([Placement(module, 4)], [2]), row(twice, [3])], PAGE, cost=ALWAYS)
    assert Counter(shift for read in found.shared_reads for shift in zip(read.rows, read.shifts, strict=True)) == Counter(
        [(0, 0), (0, 8), (1, 4), (2, 0), (2, 8)]
    )
    assert all(len(set(read.rows)) == len(read.rows) for read in found.reads)


def test_a_run_is_not_joined_over_a_page_that_is_not_full() -> None:
    placements = [Placement(segment([0], 0, tokens=3)), Placement(segment([1], 3))]
    found = plan([row(placements, [])], PAGE)
    assert [(read.pages, read.tokens) for read in found.private_reads] == [((0,), 3), ((1,), 4)]


def test_rows_that_read_nothing_have_no_read() -> None:
    nothing = segment([], 0, tokens=0)
    assert not len(plan([], PAGE)) and not len(plan([row([], []), row([Placement(nothing)], [])], PAGE))
    prefix, rest = Placement(segment([0], 0)), Placement(segment([1], 4))
    found = plan([row([], []), row([prefix, Placement(segment([], 4, tokens=0)), rest], [2]), row([], [])], PAGE)
    assert found.reads == (Read((0, 1, 2), 12, 0, (1,), (0,)),)


@pytest.mark.parametrize("groups", [3, 255, 256, 257, 300])
def test_each_group_of_many_has_a_read_of_its_own_with_its_rows_in_order(groups: int) -> None:
    shared = [segment([group], 0) for group in range(groups)]
    rows = [row([Placement(shared[index % groups])], [groups + index]) for index in range(3 * groups)]
    found = plan(rows, PAGE, cost=ALWAYS)
    assert [(read.pages, read.rows) for read in found.shared_reads] == [
        ((group,), (group, groups + group, 2 * groups + group)) for group in range(groups)
    ]


# ---- random trees, and modules anywhere


def forest(chance: random.Random) -> list[RowView]:
    """Rows over a random tree of segments, some with modules behind; every page belongs to one segment or one tail."""
    free = iter(range(100_000))

    def grown(tokens: int, first: int) -> Segment:
        return segment([next(free) for _ in range(-(-tokens // PAGE))], first, tokens)

    lengths = [0, 1, PAGE - 1, PAGE, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE, 10 * PAGE]
    paths: list[list[Placement]] = [[]]
    for _ in range(chance.randint(1, 12)):
        trunk = chance.choice(paths)
        paths.append([*trunk, Placement(grown(chance.choice(lengths), sum(len(each.segment) for each in trunk)))])
    modules = [grown(chance.choice(lengths), chance.choice([0, 4])) for _ in range(3)]
    rows = []
    for _ in range(chance.choice([1, 2, 5, 12, 60])):
        placements = list(chance.choice(paths))
        end = sum(len(each.segment) for each in placements)
        for module in chance.choices(modules, k=chance.choice([0, 0, 1, 2])):
            placements.append(Placement(module, end - module.first))
            end += len(module)
        rows.append(RowView(placements, tuple(next(free) for _ in range(chance.choice([0, 1, 1, 2]))), end))
    return rows


def pages_read(found: Plan, index: int) -> Counter[tuple[int, int]]:
    """By one row: each page, with its shift."""
    of_row = [(read, shift) for read in found.reads for who, shift in zip(read.rows, read.shifts, strict=True) if who == index]
    return Counter((page, shift) for read, shift in of_row for page in read.pages)


@pytest.mark.parametrize("cost", [ALWAYS, NEVER, CostModel(), CostModel(3, 0), CostModel(9, 1), CostModel(-40, 9)])
def test_every_row_reads_each_of_its_tokens_exactly_once(cost: CostModel) -> None:
    for seed in range(40):
        rows = forest(random.Random(seed))
        found = plan(rows, PAGE, cost=cost)
        for index, view in enumerate(rows):
            own = Counter((page, each.shift) for each in view.placements for page in each.segment.pages)
            assert pages_read(found, index) == own + Counter((page, 0) for page in view.tail)
            tokens = sum(len(each.segment) for each in view.placements) + len(view.tail) * PAGE
            assert sum(read.tokens * read.rows.count(index) for read in found.reads) == tokens
        for read in found.reads:
            assert len(read.pages) == -(-read.tokens // PAGE) and len(set(read.rows)) == len(read.rows) == len(read.shifts)


def test_each_page_that_two_rows_have_is_in_a_shared_read_and_only_there() -> None:
    shared = 0
    for seed in range(60):
        rows = forest(random.Random(seed))
        found = plan(rows, PAGE, cost=ALWAYS)
        readers = Counter(page for view in rows for page in {page for each in view.placements for page in each.segment.pages})
        twice = {each.segment for view in rows for each in view.placements if sum(e.segment is each.segment for e in view.placements) > 1}
        repeated = {page for each in twice for page in each.pages}
        many = {page for page, count in readers.items() if count > 1} - repeated
        times = Counter(page for read in found.shared_reads for page in read.pages)
        assert {page: times[page] for page in many} == dict.fromkeys(many, 1)
        assert not many & {page for read in found.private_reads for page in read.pages}
        assert all(len(read.rows) > 1 for read in found.shared_reads) and all(len(read.rows) == 1 for read in found.private_reads)
        shared += found.shared
    assert shared > 60


@pytest.mark.parametrize("cost", [ALWAYS, NEVER, CostModel(), CostModel(9, 1), CostModel(-40, 9)])
def test_no_two_reads_could_be_one(cost: CostModel) -> None:
    for seed in range(60):
        found = plan(forest(random.Random(seed)), PAGE, cost=cost)
        ends = {(read.rows, read.shifts, read.first + read.tokens) for read in found.reads if read.tokens % PAGE == 0}
        assert not ends & {(read.rows, read.shifts, read.first) for read in found.reads}


def test_a_row_reads_alone_what_it_reads_beside_others_that_share_nothing() -> None:
    several = 0
    for seed in range(60):
        rows = forest(random.Random(seed))
        beside = plan([*rows, row([], [])], PAGE, cost=NEVER)
        for index, view in enumerate(rows):
            alone = plan([view], PAGE, cost=ALWAYS)
            assert [replace(read, rows=(index,)) for read in alone.reads] == [read for read in beside.reads if read.rows == (index,)]
            several += len(alone) > 1
    assert several > 60
