"""What the tiers below the pool are told of the rows that wait."""

import pytest

from pando.engine.engine import Engine
from pando.engine.request import Request
from pando.kv.run import Origin, Run
from tests.tiny import drain, greedy, tiny_engine, tiny_model

ENOUGH = 0.01  # GiB
PAGE = 4


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(tiny_model(), host_gib=ENOUGH, disk_gib=0, page_size=PAGE, max_num_seqs=1)


def waiting(engine: Engine) -> int:
    """Rows that the store knows of."""
    assert engine.store is not None
    return len(engine.store.ledger.queue)


def ask(name: str, seed: int = 0, tokens: int = 3) -> Request:
    return Request(name, [(seed * 50 + place) % 256 for place in range(30)], greedy(tokens))


def test_the_store_is_not_told_of_a_row_that_runs_in_the_next_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    assert engine.store is not None
    monkeypatch.setattr(engine.store, "join", lambda place, keys: told.append(place))
    module = Run(tuple(range(40, 60)), 0, Origin((), 0))
    for name in "abc":
        engine.add(Request(name, [1, 2, 3], greedy(2), runs=[module]))
        drain(engine)
    assert not told


def test_the_store_knows_what_rows_need_that_wait_until_they_run(engine: Engine) -> None:
    for seed, name in enumerate("abc"):
        engine.add(ask(name, seed))
    assert waiting(engine) == 0, "nobody knows yet who waits"
    engine.step()
    assert waiting(engine) == 2
    assert engine.store is not None
    assert [len(keys) for keys in engine.store.ledger.queue.jobs.values()] == [30 // PAGE] * 2
    drain(engine)
    assert waiting(engine) == 0


def test_the_store_forgets_a_row_that_is_given_up_whether_it_knew_of_it_or_not(engine: Engine) -> None:
    for seed, name in enumerate("abc"):
        engine.add(ask(name, seed))
    engine.cancel("c")
    engine.step()
    assert waiting(engine) == 1
    engine.cancel("b")
    assert waiting(engine) == 0
    drain(engine)


def test_the_store_is_told_before_it_makes_room(engine: Engine) -> None:
    engine.add(ask("a"))
    assert engine.scheduler.below is not None
    engine.scheduler.below.make_room()
    assert waiting(engine) == 1, "what is needed next is not what goes"
    drain(engine)
    assert waiting(engine) == 0
