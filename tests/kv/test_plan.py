import random

from pando.kv.plan import CostModel, Read, RowView, plan
from pando.kv.segment import Placement, Segment

PAGE = 4
EAGER = CostModel(launch=0, merge=0)  # shares whatever two rows read


def segment(pages: list[int], first: int, tokens: int | None = None) -> Segment:
    count = len(pages) * PAGE if tokens is None else tokens
    return Segment(tuple(bytes([page]) * 32 for page in pages), (0,) * count, tuple(pages), first)


def row(placements: list[Placement], tail: list[int]) -> RowView:
    end = placements[-1].segment.first + len(placements[-1].segment) + placements[-1].shift if placements else 0
    return RowView(placements, tuple(tail), end)


def test_a_shared_prefix_is_one_read_and_each_tail_another() -> None:
    prefix = Placement(segment([0, 1], 0))
    found = plan([row([prefix], [5]), row([prefix], [6])], PAGE, cost=EAGER)
    assert found.shared == (Read((0, 1), 8, 0, (0, 1), (0, 0)),)
    assert found.private == (Read((5,), 4, 8, (0,), (0,)), Read((6,), 4, 8, (1,), (0,)))


def test_a_chain_with_the_same_readers_is_one_read() -> None:
    chain = [Placement(segment([0], 0)), Placement(segment([1, 2], 4))]
    found = plan([row(chain, [5]), row(chain, [6])], PAGE, cost=EAGER)
    assert [read.pages for read in found.shared] == [(0, 1, 2)]


def test_short_links_of_a_long_chain_are_shared_together() -> None:
    chain = [Placement(segment([page], PAGE * page)) for page in range(20)]
    found = plan([row(chain, [50]), row(chain, [51]), row(chain, [52])], PAGE, cost=CostModel(launch=48, merge=2))
    assert [read.tokens for read in found.shared] == [80]


def test_a_fork_is_read_by_its_own_branch_only() -> None:
    trunk, left = Placement(segment([0], 0)), Placement(segment([1], 4))
    rows = [row([trunk, left], [10]), row([trunk, left], [11]), row([trunk], [12])]
    found = plan(rows, PAGE, cost=EAGER)
    assert [(read.pages, read.rows) for read in found.shared] == [((0,), (0, 1, 2)), ((1,), (0, 1))]


def test_what_does_not_pay_joins_the_private_runs() -> None:
    prefix = Placement(segment([0], 0))
    found = plan([row([prefix], [1]), row([prefix], [6])], PAGE, cost=CostModel(launch=100))
    assert not found.shared
    assert [(read.pages, read.tokens, read.first) for read in found.private] == [((0, 1), 8, 0), ((0, 6), 8, 0)]


def test_a_row_alone_has_one_read() -> None:
    found = plan([row([Placement(segment([0, 1], 0)), Placement(segment([2], 8))], [3])], PAGE)
    assert [read.pages for read in found.reads] == [(0, 1, 2, 3)]


def test_a_module_is_one_read_for_rows_that_place_it_differently() -> None:
    module = segment([7, 8], 0)
    rows = [row([Placement(module, 0)], [1]), row([Placement(segment([3], 0)), Placement(module, 4)], [2])]
    found = plan(rows, PAGE, cost=EAGER)
    assert found.shared == (Read((7, 8), 8, 0, (0, 1), (0, 4)),)


def test_a_run_is_not_joined_over_a_page_that_is_not_full() -> None:
    placements = [Placement(segment([0], 0, tokens=3)), Placement(segment([1], 3))]
    found = plan([row(placements, [])], PAGE)
    assert [(read.pages, read.tokens) for read in found.private] == [((0,), 3), ((1,), 4)]


def test_every_row_reads_each_of_its_tokens_exactly_once() -> None:
    chance = random.Random(0)
    for _ in range(200):
        segments = [segment([page], chance.choice([0, 4, 8])) for page in range(12)]
        rows = [
            RowView([Placement(s, chance.choice([0, 0, 4])) for s in chance.sample(segments, chance.randint(0, 5))], (100 + r,), 40)
            for r in range(chance.randint(1, 6))
        ]
        found = plan(rows, PAGE, cost=CostModel(launch=chance.choice([0, 3, 9]), merge=0))
        for index, view in enumerate(rows):
            wanted = {(p.segment.pages[0], p.shift) for p in view.placements} | {(100 + index, 0)}
            read = [
                (page, shift) for r in found.reads for who, shift in zip(r.rows, r.shifts, strict=True) if who == index for page in r.pages
            ]
            assert sorted(read) == sorted(wanted)
