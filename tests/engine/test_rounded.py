"""What was kept by a codec that rounds is told of in every answer that rests on it, and in no other."""

import time
from collections.abc import Sequence

import pytest

from pando.engine.engine import Engine
from pando.engine.request import Request, Truncation
from pando.kv.run import Origin, Run
from pando.model.load import Model
from tests.tiny import greedy, run, tiny_engine, tiny_model

ONE, OTHER = [list(range(start, start + 41)) for start in (0, 100)]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def engine_of(model: Model, codec: str = "int8", **options: object) -> Engine:
    return tiny_engine(model, **{"kv_cache_tokens": 200, "page_size": 4, "host_gib": 0.01, "store_codec": codec, **options})


def evict(engine: Engine) -> None:
    while engine.tend() is not None:
        time.sleep(0.002)
    engine.clear_cache()


def told(engine: Engine, prompt: Sequence[int], count: int = 3, **asked: object) -> bool:
    return run(engine, [Request("r", list(prompt), greedy(count), **asked)])["r", 0][-1].reuse.rounded  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["none", "int8", "fp8"])
def test_what_comes_back_from_a_codec_that_rounds_is_not_called_exact(model: Model, codec: str) -> None:
    engine = engine_of(model, codec)
    assert not told(engine, ONE)
    assert not told(engine, ONE), "it is in the pool as it was computed"
    evict(engine)
    assert told(engine, ONE) == (codec != "none")


def test_it_stays_rounded_in_the_pool_and_so_is_what_was_computed_behind_it(model: Model) -> None:
    engine = engine_of(model)
    told(engine, ONE)
    evict(engine)
    longer = [*ONE, *range(60, 75)]
    assert told(engine, longer, count=9)
    assert told(engine, ONE), "from the pool"
    assert told(engine, longer[:-1]), "up to what was computed behind it, a part of a page"


def test_who_reads_nothing_of_it_is_exact_and_so_is_what_has_its_pages_later(model: Model) -> None:
    engine = engine_of(model)
    told(engine, ONE)
    evict(engine)
    assert told(engine, ONE)
    assert not told(engine, OTHER)
    engine.clear_cache()
    many = [[200 + start, *range(start, start + 45)] for start in range(4)]
    assert not any(told(engine, prompt) for prompt in many), "the pool is full of them, and nothing of them was loaded"
    assert not told(engine, many[-1]), "they are found"


def test_what_could_not_be_read_back_and_was_computed_is_exact(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    told(engine, ONE)
    evict(engine)
    assert engine.store is not None
    monkeypatch.setattr(engine.store.host, "reading", lambda keys: (_ for _ in ()).throw(OSError("gone")))
    [*_, last] = run(engine, [Request("r", ONE, greedy(3))])["r", 0]
    assert last.reuse.miss is not None and last.reuse.miss.reason == "lost" and not last.reuse.rounded


def test_modules_and_cut_conversations_that_come_from_below_say_so_too(model: Model) -> None:
    engine = engine_of(model, max_model_len=128)
    module = Run(tuple(range(30)), 0, Origin((), 0))
    assert not told(engine, [7, 8, 9], runs=[module])
    evict(engine)
    assert told(engine, [7, 8, 9], runs=[module])
    history = [*range(100, 190), *range(30)]
    assert not told(engine, history[:90])
    evict(engine)
    assert told(engine, history, truncation=Truncation(keep=8))


def test_a_page_that_is_copied_and_given_to_the_one_who_copies_it_is_remembered(model: Model) -> None:
    """A pool of two pages: a row that begins with a copy of part of one needs both of them itself."""
    engine = engine_of(model, page_size=32, kv_cache_tokens=64)
    text = [*ONE, *range(60, 80)]
    told(engine, text, 2)
    evict(engine)
    assert told(engine, [*text[:60], 7], 2)
    assert told(engine, [*text[:20], *[9] * 30], 2)


def test_a_prompt_is_scored_by_exact_states_whatever_the_pool_has_of_it(model: Model) -> None:
    engine, scored = engine_of(model, max_num_batched_tokens=8), Request("s", ONE, greedy(9), score=True)
    [right] = run(tiny_engine(model, prefix_caching=False), [scored]).values()
    told(engine, ONE)
    evict(engine)
    assert told(engine, [*ONE, 1, 2, 3])
    [found] = run(engine, [scored]).values()
    assert found[0].prompt_logprobs == pytest.approx(right[0].prompt_logprobs, abs=1e-4)
    assert [event.token for event in found] == [event.token for event in right]
    assert not found[-1].reuse.rounded
    assert told(engine, ONE), "what it leaves is what was there"


def test_a_prompt_that_is_scored_and_keeps_its_own_pages_lends_another_no_more_than_one(model: Model) -> None:
    """What it has computed is not the tree's, however many pages it is."""
    prompt, engine = list(range(30)), engine_of(model)
    engine.add(Request("scored", prompt, greedy(20), score=True))
    engine.step()
    found = run(engine, [Request("other", [*prompt, 99], greedy(4))])
    cold = run(engine_of(model), [Request("other", [*prompt, 99], greedy(4))])
    assert [event.token for event in found["other", 0]] == [event.token for event in cold["other", 0]]
    assert found["other", 0][-1].num_cached_tokens == 4, "a page of it was copied"
