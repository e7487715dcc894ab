"""From rows to attention: whatever is shared, whichever path reads it, the answer is that of rows that read alone."""

import random
from collections.abc import Callable

import pytest
import torch

from pando.engine.batch import Lowered, lowering_for, reads_of
from pando.engine.request import Request
from pando.kernels import reference
from pando.kernels.cpu import Lowering
from pando.kernels.native import DENSE_QUERIES, DENSE_SQUARE, Dense, NativeLowering
from pando.kernels.reads import Reads
from pando.kernels.reference import Geometry, alibi_slopes
from pando.kernels.rope import frequencies, rotate, turns
from pando.kv.plan import ALWAYS, NEVER, CostModel, RowView, plan
from pando.kv.segment import Placement, Segment

from ..tiny import CPU_ALONE, greedy, native_library, run, tiny_engine, tiny_model

PAGE = 4
LENGTHS = [0, 1, PAGE - 1, PAGE, PAGE, PAGE + 1, 2 * PAGE, 10 * PAGE]  # of a segment
COUNTS = {"decode": [1], "mixed": [1, 1, 5], "prefill": [3, DENSE_QUERIES + 1, DENSE_SQUARE + 1]}  # tokens that a row brings
pytestmark = pytest.mark.usefixtures("all_threads")

ENOUGH = 1e-4  # sums over hundreds of keys, and angles of hundreds of turns, are fp32


class Forest:
    """Rows over a random tree, with modules placed behind, and tails of their own. What was never written is NaN."""

    def __init__(self, seed: int, positions: str, kind: str) -> None:
        self.random = random.Random(f"{seed} {positions} {kind}")
        torch.manual_seed(seed)
        self.group = self.random.choice([1, 3, 4, 7, 8])
        heads = 2 * self.group
        freqs = frequencies(16, 1e4)[0] if positions == "rope" else None
        self.geometry = Geometry(heads, 2, 16, 0.25, freqs, 1.0, alibi_slopes(heads) if positions == "alibi" else None)
        self.free = list(range(3000))
        self.random.shuffle(self.free)
        self.k, self.v = torch.full((2, len(self.free) * PAGE, 2, 16), torch.nan)
        self._rows(kind)

    def _rows(self, kind: str) -> None:
        paths = self._tree()
        modules = [self._segment(self.random.choice(LENGTHS), self.random.choice([0, 3])) for _ in range(3)]
        self.views, self.counts, at = [], list[int](), list[int]()
        for _ in range(self.random.choice([1, 6, 9, 40] if kind == "decode" else [1, 5, 6, 7])):
            placements = list(self.random.choice(paths))
            end = sum(len(each.segment) for each in placements)
            for module in self.random.choices(modules, k=self.random.choice([0, 1, 2])):  # maybe one of them twice
                end += self.random.choice([0, 5])
                placements.append(Placement(module, end - module.first))
                end += len(module)
            before, count = self.random.choice(LENGTHS), self.random.choice(COUNTS[kind])
            tail = self._pages(before + count + self.random.choice([0, PAGE]))
            self._write(tail, before + count)
            self.views.append(RowView(placements, tail, end))
            self.counts.append(count)
            at += range(end + before, end + before + count)
        self.positions = torch.tensor(at)

    def _tree(self) -> list[list[Placement]]:
        paths: list[list[Placement]] = [[]]
        for _ in range(self.random.randint(1, 5)):
            trunk = self.random.choice(paths)
            first = sum(len(each.segment) for each in trunk)
            paths.append([*trunk, Placement(self._segment(self.random.choice(LENGTHS), first))])
        return paths[1:]

    def _segment(self, tokens: int, first: int) -> Segment:
        pages = self._pages(tokens)
        self._write(pages, tokens)
        return Segment((bytes(32),) * len(pages), (0,) * tokens, pages, first)

    def _pages(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // PAGE)))

    def _write(self, pages: tuple[int, ...], tokens: int) -> None:
        slots = torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)][:tokens], dtype=torch.int64)
        self.k[slots], self.v[slots] = torch.randn(2, tokens, 2, 16)

    def exact(self, q: torch.Tensor) -> torch.Tensor:
        flat = list(reads_of(plan(self.views, PAGE, cost=NEVER), self.counts).each())
        return reference.attend(q.double(), self.k, self.v, flat, self.positions, self.geometry)  # as wide as the queries are


def paths(reads: Reads, positions: torch.Tensor, geometry: Geometry) -> dict[str, Lowering | NativeLowering]:
    found: dict[str, Lowering | NativeLowering] = {"torch": Lowering(reads, positions, geometry)}
    for dense in (Dense(), Dense(columns=False), Dense(True, True), Dense(True, False), Dense(False, True)):
        found[f"native, {dense}"] = NativeLowering(native_library(), dense, reads, positions, geometry)
    return found


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_every_path_answers_the_same_whatever_is_shared(positions: str, kind: str) -> None:
    shared, moved, repeated = 0, 0, 0
    for seed in range(16):
        case = Forest(seed, positions, kind)
        q = torch.randn(len(case.positions), case.geometry.heads, 16)
        turned = q if case.geometry.freqs is None else rotate(q, turns(case.positions, case.geometry.freqs))
        exact = case.exact(q)
        assert exact.isfinite().all()
        found = plan(case.views, PAGE, case.group, CostModel(9, 0.5) if seed % 4 == 0 else ALWAYS)
        reads = reads_of(found, case.counts)
        assert (reference.attend(q, case.k, case.v, list(reads.each()), case.positions, case.geometry) - exact).abs().max() < ENOUGH
        for name, lowering in paths(reads, case.positions, case.geometry).items():
            assert (lowering.attend(q, turned, case.k, case.v) - exact).abs().max() < ENOUGH, (name, seed)
        shared += found.shared > 0
        moved += bool(found.shifts.any())
        repeated += any(len({each.segment for each in view.placements}) < len(view.placements) for view in case.views)
    assert shared >= 8 and moved >= 8 and repeated >= 2, "the plans are too simple"


def test_rows_that_bring_one_token_are_the_queries() -> None:
    case = Forest(1, "none", "decode")
    found = plan(case.views, PAGE, cost=ALWAYS)
    reads = reads_of(found, case.counts)
    assert reads.queries is found.rows and reads.query_starts is found.row_starts
    assert len(reads) == len(found) > 0


def test_each_token_of_a_row_reads_what_its_row_reads() -> None:
    prefix = Segment((bytes(32),), (0,) * PAGE, (7,), 0)
    rows = [RowView([Placement(prefix, shift)], (tail,), PAGE) for shift, tail in ((0, 1), (8, 2), (0, 3))]
    reads = list(reads_of(plan(rows, PAGE, cost=ALWAYS), [1, 3, 2]).each())
    assert [read.queries.tolist() for read in reads] == [[0, 1, 2, 3, 4, 5], [0], [1, 2, 3], [4, 5]]
    assert reads[0].shifts.tolist() == [0, 8, 8, 8, 0, 0]
    assert [read.slots.tolist() for read in reads] == [list(range(page * PAGE, (page + 1) * PAGE)) for page in (7, 1, 2, 3)]


# ---- a plan holds until something changes


def test_a_plan_is_made_anew_only_when_a_row_joins_leaves_or_fills_a_page() -> None:
    engine = tiny_engine(page_size=16)
    for name, length in (("a", 3), ("b", 5)):
        engine.add(Request(name, list(range(length, 2 * length)), greedy(24)))
    plans = []
    for step in range(20):
        if step == 4:
            engine.add(Request("c", [9, 9], greedy(4)))  # stays for four steps, the first of which computes its prompt
        before = engine.stats().plans
        engine.step()
        plans += [step] * (engine.stats().plans - before)
    # the prompts and the first tokens; c comes, decodes and goes; b fills a page with its 16th token, a two steps later
    assert plans == [0, 1, 4, 5, 8, 12, 14]


@CPU_ALONE
def test_a_plan_is_lowered_once_for_all_steps_that_it_holds() -> None:
    engine, lowered = tiny_engine(page_size=16), list[Reads]()
    made = engine.batcher.lower or Lowering

    def lower(reads: Reads, positions: torch.Tensor, geometry: Geometry) -> Lowered:
        lowered.append(reads)
        return made(reads, positions, geometry)

    engine.batcher.lower = lower
    run(engine, [Request(str(i), [3 + i, 4, 5], greedy(24)) for i in range(2)])
    stats = engine.stats()
    assert len(lowered) == stats.plans < stats.steps / 4


def test_kernels_are_told_how_much_of_the_pages_nobody_has_written_yet() -> None:
    """A GPU's choose their tiles by it."""
    engine = tiny_engine(page_size=16)
    for name, length in (("a", 3), ("b", 21)):
        engine.add(Request(name, list(range(length, 2 * length)), greedy(24)))
    engine.step()
    assert engine.batcher._batch.reads.unseen == 3 * 16 - 3 - 21


def test_a_row_is_seen_anew_when_its_segment_is_cut() -> None:
    """Else a row that came first would not share with one that has only the beginning of its prompt in common."""
    engine = tiny_engine()
    engine.batcher.cost = ALWAYS
    engine.add(Request("first", list(range(16)), greedy(20)))
    for _ in range(3):
        engine.step()
    (row,) = engine.scheduler.running
    seen = row.view(PAGE)
    assert row.view(PAGE) is seen
    engine.add(Request("second", [*range(8), *range(50, 58)], greedy(20)))
    for _ in range(2):
        engine.step()
    assert row.view(PAGE) is not seen
    assert [(read.tokens, read.rows) for read in engine.batcher.plan.shared_reads] == [(8, (0, 1))]


@pytest.mark.parametrize(("broken", "reason"), [(ImportError("no triton"), "cannot be imported"), (RuntimeError("no ptxas"), "no ptxas")])
def test_a_gpu_whose_kernels_do_not_work_takes_the_definition_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: Exception, reason: str
) -> None:
    from pando.kernels import gpu

    def fails(*given: object) -> None:
        raise broken

    monkeypatch.setattr(gpu, "probe", fails)
    geometry = Geometry(4, 2, 64, 0.125)
    assert lowering_for(torch.device("meta"), torch.float32, geometry, 64, None) is None
    assert reason in caplog.text
    assert len(caplog.records) == 1


class Refused(Exception):
    """As a compiler raises it: of a shape that no probe has tried."""

    __module__ = "triton.runtime.errors"


class Late:
    """Reads whose kernel is made when it is first launched, and cannot be."""

    def begin(self, positions: torch.Tensor) -> None: ...

    def attend(self, *given: torch.Tensor) -> torch.Tensor:
        raise Refused("out of resource: shared memory")


@CPU_ALONE
@pytest.mark.parametrize("late", [False, True])
def test_a_kernel_that_cannot_be_made_for_a_later_plan_costs_time_and_no_answer(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked = [Request(str(i), [(7 * i + j) % 256 for j in range(20 + 9 * i)], greedy(12)) for i in range(4)]
    expected = run(tiny_engine(), asked)
    engine, seen = tiny_engine(), list[int]()
    made = engine.batcher.lower or Lowering

    def lower(reads: Reads, positions: torch.Tensor, geometry: Geometry) -> Lowered:
        seen.append(len(positions))
        if len(seen) == 4 and not late:
            raise Refused("out of resource: shared memory")
        return made(reads, positions, geometry) if len(seen) < 4 else Late()

    engine.batcher.lower = lower
    found = run(engine, asked)
    assert {name: [event.token for event in each] for name, each in found.items()} == {
        name: [event.token for event in each] for name, each in expected.items()
    }
    assert len(seen) == 4 and [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Pando's own GPU kernels of attention could not do a step; from now on the slow definition does them: "
        "Refused: out of resource: shared memory"
    ]
    assert not engine.batcher.falls_back(Refused("again")), "the definition would be tried for ever"
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_gpu_is_not_given_pages_that_its_kernels_cannot_take(caplog: pytest.LogCaptureFixture) -> None:
    assert lowering_for(torch.device("meta"), torch.float32, Geometry(4, 2, 64, 0.125), 12, None) is None
    assert "multiple of 16 tokens, not 12" in caplog.text


@CPU_ALONE
def test_an_engine_does_whole_layers_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last, of which only some tokens are wanted."""
    model, done = tiny_model(layers=4), list[bool]()
    for layer in model.decoder.layers:

        def watched(*given: torch.Tensor, whole: Callable[..., torch.Tensor | None] | None = layer.whole) -> torch.Tensor | None:
            assert whole is not None
            found = whole(*given)
            done.append(found is not None)
            return found

        monkeypatch.setattr(layer, "whole", watched)
    engine = tiny_engine(model)
    run(engine, [Request(str(i), [3 + i, 4, 5], greedy(6)) for i in range(3)])
    assert done == [True] * 3 * engine.steps
