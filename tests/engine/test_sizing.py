"""How large the cache may be, whether a step fits beside it, and what happens if it does not."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pando.config import EngineConfig
from pando.engine import sampler, sizing
from pando.engine.engine import Engine
from pando.engine.request import Request
from pando.engine.row import Schedule
from pando.engine.sizing import check_step, page_count, rows_of
from pando.errors import InvalidOption
from pando.model.load import Model

from ..tiny import DEVICE, VOCAB, greedy, run, tiny_config, tiny_engine, tiny_model

PAGE = 2 * 2 * 4 * 2 * 8 * 4  # bytes: K and V, 2 layers, 4 tokens, 2 heads of 8, float32


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ran earlier in this process keeps the log to its journal."""
    monkeypatch.setattr(logging.getLogger("pando"), "propagate", True)


def on_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> Model:
    """A model that says it is on a GPU with so much memory left."""
    monkeypatch.setattr(sizing, "free_memory", lambda device: free)
    return replace(tiny_model(), device=torch.device("cuda"))


def test_a_gpus_cache_takes_its_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, 1000 * PAGE)
    assert page_count(model, tiny_config(kv_cache_tokens=None), 512) == 850
    assert page_count(model, tiny_config(kv_cache_tokens=None, gpu_memory_utilization=0.5), 512) == 500
    assert page_count(model, tiny_config(kv_cache_tokens=400, gpu_memory_utilization=0.5), 512) == 100


def test_a_cache_that_does_not_fit_is_refused_with_what_all_of_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, 1000 * PAGE)
    with pytest.raises(InvalidOption, match=rf"{2**40} tokens needs {2**40 // 4 * PAGE / 2**30:.1f} GiB and .* to at most 4000$"):
        page_count(model, tiny_config(kv_cache_tokens=2**40), 512)


def test_a_share_that_holds_no_page_is_refused_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch, 9 * PAGE)
    with pytest.raises(InvalidOption, match="raise gpu_memory_utilization"):
        page_count(model, tiny_config(kv_cache_tokens=None, gpu_memory_utilization=0.1), 512)


def test_a_cache_smaller_than_a_context_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = on_gpu(monkeypatch, 100 * PAGE)
    assert page_count(model, tiny_config(kv_cache_tokens=None, gpu_memory_utilization=1.0), 512) == 100
    assert "holds 400 tokens and a request may have 512" in caplog.text
    caplog.clear()
    page_count(model, tiny_config(kv_cache_tokens=None, gpu_memory_utilization=1.0), 400)
    assert not caplog.records


def test_a_cache_that_finds_no_memory_although_it_seemed_free_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("pando.kv.pool._zeros", full)
    with pytest.raises(InvalidOption, match=r"a KV cache of 0.0 GiB does not fit .* lower gpu_memory_utilization \(it is 0.85\)"):
        tiny_engine()


def test_a_step_that_does_not_fit_beside_the_cache_is_said_at_the_start() -> None:
    def too_large(step: Any, pool: Any) -> Tensor:
        assert (len(step.tokens), len(step.wanted)) == (64, 16)
        raise torch.OutOfMemoryError

    engine = tiny_engine()
    model = replace(engine.model, decoder=SimpleNamespace(forward=too_large))  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"a step of 64 tokens and 16 rows does not fit .* lower gpu_memory_utilization \(it is 0.85\)"):
        check_step(model, tiny_config(), engine.pool)


def test_a_step_whose_tokens_cannot_be_chosen_beside_the_cache_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a short list does not settle top_p, all rows are sorted while the next step is on its way."""
    engine, sorted_rows, steps = tiny_engine(), list[int](), [0]
    shortlist = sampler.shortlist

    def sorting(x: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Any:
        if width == VOCAB:
            sorted_rows.append(len(x))
            assert steps == [2], "it is asked for the next step before it reads this one"
            raise torch.OutOfMemoryError
        return shortlist(x, floor, top_k, top_p, width)

    def counted(step: Any, pool: Any) -> Tensor:
        steps[0] += 1
        return torch.rand(len(step.wanted), VOCAB, device=DEVICE)

    monkeypatch.setattr(sampler, "SHORTLIST", 16)
    monkeypatch.setattr(sampler, "shortlist", sorting)
    model = replace(engine.model, decoder=SimpleNamespace(forward=counted))  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="a step of 64 tokens and 16 rows does not fit"):
        check_step(model, tiny_config(), engine.pool)
    assert sorted_rows == [16]
    monkeypatch.undo()
    check_step(model, tiny_config(), engine.pool)


@pytest.mark.parametrize(("fit", "rows"), [(300, 256), (200, 128), (64, 64)])
def test_where_nobody_says_how_many_rows_run_there_are_as_many_as_a_step_fits_for(
    monkeypatch: pytest.MonkeyPatch, fit: int, rows: int
) -> None:
    engine, model = tiny_engine(), on_gpu(monkeypatch, 1000 * PAGE)
    limited_rows(monkeypatch, fit)
    assert rows_of(model, tiny_config(max_num_seqs=None), engine.pool) == rows


@pytest.mark.parametrize(("fit", "said"), [(63, None), (200, 256)])
def test_too_many_rows_are_refused_where_somebody_said_how_many_or_few_are_too_many(
    monkeypatch: pytest.MonkeyPatch, fit: int, said: int | None
) -> None:
    engine, model = tiny_engine(), on_gpu(monkeypatch, 1000 * PAGE)
    limited_rows(monkeypatch, fit)
    with pytest.raises(InvalidOption, match=f"{said or 64} rows do not fit"):
        rows_of(model, tiny_config(max_num_seqs=said), engine.pool)


def limited_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """No step of more rows fits beside the KV cache."""

    def check(model: Model, config: EngineConfig, pool: object) -> None:
        if config.max_num_seqs is None or config.max_num_seqs > most:
            raise InvalidOption(f"{config.max_num_seqs} rows do not fit")

    monkeypatch.setattr(sizing, "check_step", check)


def limited(engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """No step of more tokens than that fits into its memory."""
    forward = engine._forward

    def tried(schedule: Schedule) -> Tensor:
        if sum(schedule.counts) > tokens:
            raise torch.OutOfMemoryError
        return forward(schedule)

    monkeypatch.setattr(engine, "_forward", tried)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("tokens", [40, 9])
def test_where_a_step_does_not_fit_smaller_ones_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: int
) -> None:
    requests = [Request(str(row), [(row * 31 + place) % 256 for place in range(20)], greedy(12)) for row in range(12)]
    if tokens == 9:  # not even the shortest step of prompts fits: there are fewer rows, with prompts that do
        requests = [replace(request, prompt=request.prompt[:2]) for request in requests]
    expected = run(tiny_engine(), requests)
    engine = tiny_engine(max_num_batched_tokens=256)
    limited(engine, monkeypatch, tokens)
    found = run(engine, requests)
    assert {name: [event.token for event in each] for name, each in found.items()} == {
        name: [event.token for event in each] for name, each in expected.items()
    }
    assert "did not fit into the memory; from now on it has at most" in caplog.text
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_what_does_not_fit_even_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    limited(engine, monkeypatch, 0)
    engine.add(Request("r", [1, 2, 3], greedy(2)))
    for _ in range(5):  # the budget is halved, then the number of rows
        assert engine.step() == []
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert (engine.scheduler.budget, engine.scheduler.max_rows) == (32, 1)
