"""Captured steps. Without a GPU, what is captured is simply done again: that tells whether buffers, padding and plans are kept right."""

import gc
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import le
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from pando.engine import graphs as graphs_module
from pando.engine import sampler
from pando.engine.engine import Engine
from pando.engine.graphs import SCARCE, SEEN_BY_OTHERS, SEEN_WITH_PROMPTS, Graphs
from pando.engine.request import Request
from pando.engine.row import Schedule
from pando.engine.sampler import likeliest
from pando.kernels.native import Dense, NativeLowering
from pando.kernels.reads import Reads
from pando.kernels.reference import Geometry
from pando.model.load import Model
from pando.store.speeds import Speeds
from pando.store.transfer import Load
from tests.engine.test_store import evict
from tests.tiny import greedy, native_library, prompt, run, tiny_engine, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("overlap")]


class Plan:
    """A plan of the kernels in C, with room for so much as it needs."""

    staged = None

    def __init__(self, geometry: Geometry, reads: Reads, positions: Tensor, spare: float, before: "Plan | None") -> None:
        room = [int(count * spare) for count in self.needs(reads)]
        self._room = list(map(max, room, before._room)) if before else room
        self._lower = lambda reads, positions: NativeLowering(native_library(), Dense(), reads, positions, geometry)
        self._lowering = self._lower(reads, positions)
        self._next: Reads | None = None

    @staticmethod
    def needs(reads: Reads) -> tuple[int, ...]:
        return (len(reads.tokens),)

    def replace(self, reads: Reads, count: int) -> bool:
        fits = all(map(le, self.needs(reads), self._room))
        if fits:
            self._next = reads
        return fits

    def begin(self, positions: Tensor) -> None:
        if self._next is None:
            self._lowering.begin(positions)
        else:
            self._lowering, self._next = self._lower(self._next, positions), None

    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._lowering.attend(q, turned, k, v)


def captured(engine: Engine, launches: Callable[[Reads], Hashable] = lambda reads: None) -> Graphs:
    pool, decoder = engine.pool, engine.model.decoder
    page = torch.full((pool.k.shape[0], pool.page_size, *pool.k.shape[2:]), float("nan"))  # whoever reads what pads a step will know
    pool.k, pool.v = torch.cat((pool.k, page), dim=1), torch.cat((pool.v, page), dim=1)
    pool._layers = tuple(zip(pool.k, pool.v, strict=True))
    if engine.store is not None:
        moved = engine.store.transfer
        moved.mover.__init__(pool, moved.shape, moved.codec)  # type: ignore[misc]
    lower = lambda reads, at, spare, before: Plan(decoder.geometry, reads, at, spare, before)  # noqa: E731
    engine.graphs = Graphs(decoder, pool, lower, launches, lambda work, layered: work)
    return engine.graphs


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph does the steps of another."""
    monkeypatch.setattr(graphs_module, "SEEN_BY_OTHERS", 0)


def test_captured_steps_answer_as_others_do_while_rows_come_and_go(model: Model) -> None:
    asked = [Request(str(i), prompt(i % 3, 9 + i), greedy(3 + 2 * i)) for i in range(7)]
    engine = tiny_engine(model, max_num_seqs=5)
    graphs = captured(engine)
    found = {name: [event.token for event in events] for name, events in run(engine, asked).items()}
    plain = {name: [event.token for event in events] for name, events in run(tiny_engine(model, max_num_seqs=5), asked).items()}
    assert found == plain
    assert graphs.replays > graphs.captures > 0


def test_a_plan_that_a_graph_has_no_room_for_is_captured_anew(model: Model) -> None:
    engine = tiny_engine(model, max_num_seqs=16)
    graphs = captured(engine)
    for count in (2, 2, 12, 12):
        names = [f"{count} {i}" for i in range(count)]
        events = run(engine, [Request(name, prompt(i, 30), greedy(4)) for i, name in enumerate(names)])
        for i, name in enumerate(names):
            alone = run(tiny_engine(model), [Request("alone", prompt(i, 30), greedy(4))])["alone", 0]
            assert [event.token for event in events[name, 0]] == [event.token for event in alone]
    assert graphs.captures > 2


def test_plans_that_come_in_turns_do_not_send_each_others_graphs_away(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has more reads, the other more pages: what is captured anew has room for both."""
    monkeypatch.setattr(graphs_module, "SPARE", 1.0)
    monkeypatch.setattr(Plan, "needs", lambda self, reads: (len(reads.tokens), len(reads.pages)))
    engine = tiny_engine(model, max_num_seqs=16, max_num_batched_tokens=600)
    graphs, captures = captured(engine), list[int]()
    for turn in range(SEEN_WITH_PROMPTS + 3):
        for rows, length in ((16, 9), (9, 60)):
            run(engine, [Request(f"{turn} {rows} {i}", prompt(i + 20 * turn, length), greedy(6)) for i in range(rows)])
            captures.append(graphs.captures)
    assert captures[-1] == captures[2 * SEEN_WITH_PROMPTS] and graphs.replays > 20


def test_a_plan_that_a_graph_has_no_room_for_is_offered_to_it_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time a plan is cut, which takes longer than much of a step. Whoever decodes within its page keeps its plan."""
    engine, offered = tiny_engine(model, page_size=16, max_num_seqs=4), list[int]()
    graphs = captured(engine)
    run(engine, [Request(f"before {i}", prompt(i, 3), greedy(3)) for i in range(4)])
    monkeypatch.setattr(Plan, "replace", lambda self, reads, count: offered.append(id(reads)) or False)
    engine.add(Request("r", prompt(9, 3), greedy(10)))
    while engine.has_work:
        engine.step()
    assert graphs.captures == 2 and len(offered) == len(set(offered)) <= 2


def test_fewer_rows_go_through_what_was_captured_for_more_until_they_come_often(model: Model) -> None:
    engine = tiny_engine(model, max_num_seqs=16)
    graphs = captured(engine)
    asked = [Request(str(i), prompt(i, 9), greedy(SEEN_BY_OTHERS + 30 if i == 0 else 6 + i // 2)) for i in range(12)]
    found, plain = (run(each, asked) for each in (engine, tiny_engine(model, max_num_seqs=16)))
    assert {name: [e.token for e in found[name]] for name in found} == {name: [e.token for e in plain[name]] for name in plain}
    assert [kind.tokens for kind in graphs._captured] == [16, 1], "two, four and eight rows did not come often"
    assert graphs.captures == 2 and engine.steps - graphs.replays - graphs.captures <= 3, "two with prompts, and the first of all rows"


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_steps_that_come_first_were_captured_before(positions: str) -> None:
    """However many rows and prompts there are: nobody waits for steps that are done one launch after the other, or for a capture."""
    model, options = tiny_model(positions=positions), {"max_num_seqs": 12, "max_num_batched_tokens": 100, "prefix_caching": False}
    engine = tiny_engine(model, **options)
    graphs = captured(engine)
    engine.warm_up()
    ready = graphs.captures
    asked = [Request(str(i), prompt(i, 3 + 17 * i), greedy(3 + 2 * i)) for i in range(15)]
    found, plain = (run(each, asked) for each in (engine, tiny_engine(model, **options)))
    assert {name: [e.token for e in found[name]] for name in found} == {name: [e.token for e in plain[name]] for name in plain}
    assert graphs.captures == ready > 0 and graphs.replays == engine.steps


@pytest.mark.parametrize(("rows", "tokens"), [(1, 8), (3, 17), (12, 100), (17, 100_000), (48, 512), (100, 2048), (40, 24)])
def test_as_many_rows_as_may_run_were_captured_before_too(model: Model, rows: int, tokens: int) -> None:
    """However many these are: a server that is busy does this step more often than any other."""
    engine = tiny_engine(model, max_num_seqs=rows, max_num_batched_tokens=tokens, kv_cache_tokens=4096)
    graphs = captured(engine)
    engine.warm_up()
    ready = graphs.captures
    run(engine, [Request(str(i), prompt(i, 3), greedy(9)) for i in range(rows)])
    assert graphs.captures == ready and graphs.replays == engine.steps
    assert len({entry.logits.untyped_storage().data_ptr() for entry in graphs._captured.values()}) == 1, "all share their logits' memory"


def test_where_there_is_no_memory_to_capture_much_before_it_is_captured_when_it_comes(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(model)
    graphs, plain = captured(engine), tiny_engine(model)

    def capture(work: Callable[[], Any], layered: bool) -> Callable[[], Any]:
        if len(graphs._captured) == 3:
            raise torch.OutOfMemoryError("no room for a fourth one")
        return work

    graphs._capture = capture
    engine.warm_up()
    assert not graphs._captured and "captured anew when they come again" in caplog.text
    found, expected = (run(each, [Request("r", prompt(1, 20), greedy(20))])["r", 0] for each in (engine, plain))
    assert [event.token for event in found] == [event.token for event in expected] and graphs.replays > 10


def test_a_graph_goes_only_when_the_one_that_takes_its_place_is_there(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "replace", lambda *_: False)
    engine = tiny_engine(model)
    graphs, alive = captured(engine), list[int]()
    made: WeakSet[Any] = WeakSet()

    def capture(work: Callable[[], Tensor], layered: bool) -> Callable[[], Tensor]:
        gc.collect()
        alive.append(len(made))
        repeat = partial(work)
        made.add(repeat)
        return repeat

    graphs._capture = capture
    run(engine, [Request("r", prompt(1, 30), greedy(40))])  # its pages fill, and it reads others
    assert len(graphs._captured) == 1
    assert alive[:3] == [0, 1, 1]


@pytest.mark.usefixtures("each_its_own")
def test_captured_steps_of_all_kinds_share_the_memory_of_their_logits(model: Model) -> None:
    engine = tiny_engine(model, max_num_seqs=16)
    graphs = captured(engine)
    run(engine, [Request(str(i), prompt(i, 9), greedy(60 - 3 * i)) for i in range(16)])  # ever fewer rows, and then ever more
    for count in range(1, 17):
        run(engine, [Request(f"{count} {i}", prompt(i, 9), greedy(4)) for i in range(count)])
    rows = {entry.logits.untyped_storage().data_ptr(): len(entry.logits) for entry in graphs._captured.values()}
    assert len(graphs._captured) > 3 and len(rows) == 1


def test_captured_steps_find_the_likeliest_tokens_and_nobody_looks_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, looked = tiny_engine(model), list[int]()
    graphs = captured(engine)

    def look(logits: Tensor) -> sampler.Likeliest:
        looked.append(len(logits))
        return likeliest(logits)

    monkeypatch.setattr(sampler, "likeliest", look)  # what a captured step calls is another name of it
    run(engine, [Request("r", prompt(1, 20), greedy(30))])
    assert graphs.replays > 20 and len(looked) == engine.steps - graphs.replays - graphs.captures
    assert graphs.likeliest is not None and graphs._logits.dtype == model.dtype, "logits are not widened"


def test_a_step_with_a_prompt_is_captured_only_when_its_kind_comes_again_and_again(model: Model) -> None:
    engine = tiny_engine(model)
    graphs = captured(engine)
    counts = []
    for seed in range(SEEN_WITH_PROMPTS + 2):
        run(engine, [Request(str(seed), prompt(seed, 21), greedy(1))])
        counts.append((graphs.captures, graphs.replays))
    assert counts[-4:] == [(0, 0), (1, 0), (1, 1), (1, 2)], "what may never come again is done one by one"


def test_the_middle_of_a_long_prompt_is_captured_and_makes_no_logits(model: Model) -> None:
    asked = [Request(str(seed), prompt(seed, 96), greedy(3)) for seed in range(3)]
    engine = tiny_engine(model, max_num_batched_tokens=16, max_num_seqs=1)
    graphs = captured(engine)
    found, plain = (run(each, asked) for each in (engine, tiny_engine(model, max_num_batched_tokens=16, max_num_seqs=1)))
    assert {name: [event.token for event in each] for name, each in found.items()} == {
        name: [event.token for event in each] for name, each in plain.items()
    }
    (middle,) = (entry for kind, entry in graphs._captured.items() if kind.tokens == 16)
    assert len(middle.logits) == 0 and graphs.replays > 5 * 3 - SEEN_WITH_PROMPTS, "five of the six steps of a prompt"


def test_what_cannot_be_captured_is_done_without_and_said_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(model)
    graphs = captured(engine)

    def broken(work: Callable[[], Tensor], layered: bool) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs._capture = broken
    expected = run(tiny_engine(model), [Request("r", prompt(1, 20), greedy(8))])["r", 0]
    assert [e.token for e in run(engine, [Request("r", prompt(1, 20), greedy(8))])["r", 0]] == [e.token for e in expected]
    assert [record.message for record in caplog.records if "captured" in record.message] != []
    assert len([record for record in caplog.records if "captured" in record.message]) == 1
    assert not graphs._captured and not graphs._logits.untyped_storage().nbytes(), "it may have been memory that was missing"


def test_where_the_memory_ends_captured_steps_are_let_go_before_steps_become_smaller(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(model)
    graphs, forward, budget, ended = captured(engine), engine._forward, engine.scheduler.budget, list[int]()

    def tried(schedule: Schedule) -> Tensor:
        if graphs.replays == 3 and not ended:
            ended.append(len(graphs._captured))
            raise torch.OutOfMemoryError
        return forward(schedule)

    monkeypatch.setattr(engine, "_forward", tried)
    expected = run(tiny_engine(model), [Request("r", prompt(1, 20), greedy(20))])["r", 0]
    assert [e.token for e in run(engine, [Request("r", prompt(1, 20), greedy(20))])["r", 0]] == [e.token for e in expected]
    assert ended == [1] and engine.scheduler.budget == budget and "captured anew" in caplog.text
    assert graphs.replays > 10 and graphs._captured, "they are captured again"


@pytest.mark.usefixtures("each_its_own")
def test_where_there_is_no_memory_for_another_graph_all_are_captured_anew_but_not_for_ever(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(model, max_num_seqs=16)
    graphs, held = captured(engine), list[int]()

    def capture(work: Callable[[], Any], layered: bool) -> Callable[[], Any]:
        held.append(len(graphs._captured))
        if held[-1] == 2:
            raise torch.OutOfMemoryError("no room for a third one")
        return work

    graphs._capture = capture
    asked = [Request(str(i), prompt(i, 9), greedy(60 - 3 * i)) for i in range(16)]  # ever fewer rows
    found, plain = (run(each, asked) for each in (engine, tiny_engine(model, max_num_seqs=16)))
    assert {name: [e.token for e in found[name]] for name in found} == {name: [e.token for e in plain[name]] for name in plain}
    run(engine, [Request(f"again {i}", prompt(i, 9), greedy(60 - 3 * i)) for i in range(16)])
    assert held == [0, 1, 2] * SCARCE and not graphs._captured
    assert [record.message for record in caplog.records if "let go" in record.message] != []
    assert len([record for record in caplog.records if "not captured as graphs" in record.message]) == 1


def returning(engine: Engine, times: int) -> list[list[int]]:
    """A conversation that has left the pool each time it goes on."""
    answers = []
    for turn in range(times):
        answers.append([event.token for event in run(engine, [Request(str(turn), [*prompt(1, 64), turn], greedy(3))])[str(turn), 0]])
        evict(engine)
        engine.pool.k.fill_(float("nan"))  # who does not wait will know
        engine.pool.v.fill_(float("nan"))
    return answers


def expected(model: Model, times: int, **options: object) -> list[list[int]]:
    asked = [Request(str(turn), [*prompt(1, 64), turn], greedy(3)) for turn in range(times)]
    return [[event.token for event in run(tiny_engine(model, prefix_caching=False, **options), [one])[one.request_id, 0]] for one in asked]


def test_a_captured_step_waits_for_each_layer_that_is_on_its_way(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    engine = tiny_engine(model, host_gib=0.01)
    graphs, waited = captured(engine), list[int]()
    plain = Load.wait

    def wait(self: Load, layer: int) -> "torch.cuda.Event | None":
        waited.append(layer)
        return plain(self, layer)

    monkeypatch.setattr(Load, "wait", wait)
    times = SEEN_WITH_PROMPTS + 3
    assert returning(engine, times) == expected(model, times)
    assert [kind.layered for kind in graphs._captured].count(True) == 1
    assert waited == [*range(model.config.layers)] * (times - 1), "once for each turn but the first"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are captured there only")
def test_on_a_gpu_what_is_read_on_its_way_is_captured_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    model = tiny_model(size=64, layers=4, device=torch.device("cuda"))
    options, times = {"page_size": 16, "kv_cache_tokens": 16384}, SEEN_WITH_PROMPTS + 6
    engine = tiny_engine(model, host_gib=0.05, **options)
    assert returning(engine, times) == expected(model, times, **options)
    assert engine.graphs is not None and [kind.layered for kind in engine.graphs._captured].count(True) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are captured there only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_captured_steps_answer_as_others_do(dtype: torch.dtype) -> None:
    model = tiny_model(size=64, device=torch.device("cuda"), dtype=dtype)
    asked = [Request(str(i), prompt(i % 3, 70 + 9 * i), greedy(20 + 5 * i)) for i in range(12)]
    options = {"page_size": 16, "kv_cache_tokens": 16384, "max_num_batched_tokens": 512}
    plain = run(tiny_engine(model, cuda_graphs=False, **options), asked)
    engine = tiny_engine(model, **options)
    found = run(engine, asked)
    assert engine.graphs is not None and engine.graphs.replays > engine.graphs.captures
    same = [[e.token for e in found[name]] == [e.token for e in plain[name]] for name in plain]
    assert all(same) if dtype == torch.float32 else sum(same) >= 10  # in 16 bits, a tie may fall either way


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are captured there only")
def test_on_a_gpu_two_engines_in_one_process_both_capture() -> None:
    model = tiny_model(size=64, device=torch.device("cuda"))
    asked = [Request(str(i), prompt(i % 3, 70 + 9 * i), greedy(20 + 5 * i)) for i in range(12)]
    options = {"page_size": 16, "kv_cache_tokens": 16384, "max_num_batched_tokens": 512}
    engines = [tiny_engine(model, **options) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        one, other = threads.map(lambda engine: run(engine, asked), engines)
    assert {name: [e.token for e in each] for name, each in one.items()} == {name: [e.token for e in each] for name, each in other.items()}
    assert all(engine.graphs is not None and engine.graphs.replays > engine.graphs.captures > 2 for engine in engines)
