"""The whole engine on a GPU: its answers are the CPU's, and where its memory ends, steps become smaller."""

import gc
import logging
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pando import Prompt
from pando.engine.engine import Engine
from pando.engine.llm import LLM
from pando.engine.pace import measure
from pando.engine.request import Request, TokenEvent, Truncation
from pando.engine.row import Schedule
from pando.errors import InvalidOption
from pando.model.load import Model, load
from pando.store.speeds import Speeds

from ..tiny import CPU, greedy, run, tiny_engine, tiny_llm, tiny_model, write_checkpoint
from .test_store import settled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the engine runs on it")]

CUDA = torch.device("cuda")
SIZE, PAGE, WINDOW = 64, 16, 256  # of a head: one shape for all tests, since each is compiled; tokens
OPTIONS: dict[str, object] = {"page_size": PAGE, "max_model_len": WINDOW, "max_num_batched_tokens": 128}
MIB = 2**20
SCHEMA = """
<schema name="tour">
  You show people around, and you never tire of it.
  <module name="paris">Paris has a tower, a river and very many cats.</module>
  <module name="rome">Rome has a forum, and the cats are larger there.</module>
</schema>
"""


def words(seed: int, count: int) -> list[int]:
    return [(seed * 37 + place * place * 11 + place * seed) % 256 for place in range(count)]


def on(device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    return tiny_model(dtype=dtype, size=SIZE, device=device)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is brought back, although so small a model would sooner compute it."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)


# ---- the same answers


def facts(events: list[TokenEvent]) -> tuple[Any, ...]:
    """What was said, and what of the prompt was only near to it. How much was there already depends on when it came."""
    return [event.token for event in events], events[0].reuse.truncated, events[0].reuse.modules


def answers(llm: LLM, asked: list[Request]) -> list[tuple[Any, ...]]:
    found = run(llm.engine, asked)
    return [facts(found[request.request_id, 0]) for request in asked]


def together(llm: LLM) -> Iterator[tuple[Any, ...]]:
    """Rows over one trunk, over a part of it, and over nothing in common, that come and go."""
    trunk = words(1, 100)
    asked = [Request(f"trunk {row}", [*trunk, *words(10 + row, 5 + 4 * row)], greedy(16 + 2 * row)) for row in range(5)]
    asked += [Request("half", [*trunk[:50], *words(20, 9)], greedy(20)), Request("other", words(21, 130), greedy(12))]
    yield from answers(llm, asked)


def modules(llm: LLM) -> Iterator[tuple[Any, ...]]:
    llm.schemas.add(SCHEMA)
    both, one = ('<prompt schema="tour"><paris/><rome/> Where are the cats?</prompt>', '<prompt schema="tour"><rome/> And here?</prompt>')
    for output in llm.generate([Prompt(both), Prompt(one), Prompt(both)], greedy(10)):
        yield output.outputs[0].token_ids, output.reuse.modules


def outgrown(llm: LLM) -> Iterator[tuple[Any, ...]]:
    """A conversation that does not fit the window any more: its beginning goes, and the rest is read where it was computed."""
    history, cut = words(3, 180), 0
    for turn in range(6):
        [events] = run(llm.engine, [Request(f"turn {turn}", list(history), greedy(8), truncation=Truncation(keep=PAGE))]).values()
        yield facts(events)
        cut += events[0].reuse.truncated is not None and events[0].reuse.truncated.moved > 0
        history += [*(event.token for event in events), *words(30 + turn, 20)]
    assert cut > 1


def back(llm: LLM) -> Iterator[tuple[Any, ...]]:
    """From host memory, when the pool has nothing any more."""
    settled(llm.engine)
    llm.engine.clear_cache()
    yield from answers(llm, [Request(f"back {row}", [*words(1, 100), *words(40 + row, 6)], greedy(10)) for row in range(3)])
    assert llm.engine.store is not None and llm.engine.store.counts.loaded["host"] >= 6 * PAGE


def story(model: Model, **options: object) -> tuple[list[tuple[Any, ...]], Engine]:
    with tiny_llm(model, host_gib=0.05, **OPTIONS, **options) as llm:
        told = [each for part in (together, modules, outgrown, back) for each in part(llm)]
        return told, llm.engine


@pytest.fixture(scope="module")
def told_by_the_cpu() -> list[tuple[Any, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speeds, "pays", lambda *_: True)
        return story(on(CPU))[0]


@pytest.fixture(scope="module")
def model() -> Model:
    return on(CUDA)


@pytest.mark.parametrize(("attention", "cuda_graphs", "overlap"), [*product(("auto", "shared", "flat"), (True, False), (True, False))])
def test_greedy_tokens_are_those_of_the_cpu(
    model: Model, told_by_the_cpu: list[tuple[Any, ...]], attention: str, cuda_graphs: bool, overlap: bool
) -> None:
    told, engine = story(model, attention=attention, cuda_graphs=cuda_graphs, overlap=overlap)
    assert told == told_by_the_cpu
    assert engine.batcher.lower is not None, "the definition answered, and not the kernels"
    assert (engine.graphs is not None and engine.graphs.replays > engine.graphs.captures) == cuda_graphs
    assert attention == "auto" or (engine.stats().shared_reads > 0) == (attention == "shared")


def logits_of(model: Model, **options: object) -> Tensor:
    """Of prompts in one step over what they share, of one token behind each of them, and of one behind moved states."""
    engine, heard = tiny_engine(model, **OPTIONS, **options), list[Tensor]()
    forward, trunk = engine._forward, words(1, 100)

    def hearing(schedule: Schedule) -> Tensor:
        logits = forward(schedule)
        heard.extend([logits.cpu().clone()] if schedule.ready else [])
        return logits

    engine._forward = hearing  # type: ignore[method-assign]
    prompts = [[*trunk, *words(10 + row, 3 + row)] for row in range(4)]
    run(engine, [Request("trunk", trunk, greedy(1))])
    run(engine, [Request(f"prompt {row}", prompt, greedy(1)) for row, prompt in enumerate(prompts)])
    run(engine, [Request(f"next {row}", [*prompt, 7], greedy(1)) for row, prompt in enumerate(prompts)])
    run(engine, [Request("cut", [*trunk, 9, 8, 7], greedy(1), drop=[(PAGE, 3 * PAGE)])])
    return torch.cat(heard)


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("attention", ["shared", "flat"])
def test_logits_in_bfloat16_are_within_rounding_of_the_definition(attention: str) -> None:
    """In torch's own products on a CPU it is 3 roundings of all numbers together: of the weights, and of what passes two layers."""
    exact = logits_of(on(CPU), attention="reference")
    found = logits_of(on(CUDA, torch.bfloat16), attention=attention, overlap=False)
    assert error(found, exact) < 4.5 * torch.finfo(torch.bfloat16).eps


def test_logits_in_float32_are_the_definitions(model: Model) -> None:
    assert error(logits_of(model, overlap=False), logits_of(on(CPU), attention="reference")) < 1e-5


def test_a_model_that_is_loaded_from_files_answers_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))
    write_checkpoint(tmp_path, SIZE)
    said = []
    for device in ("cuda", "cpu"):
        loaded = load(str(tmp_path), device=device, dtype="float32", compiled=False)
        assert loaded.device.type == loaded.decoder.embed.device.type == device
        [events] = run(tiny_engine(loaded, page_size=PAGE), [Request("r", words(1, 40), greedy(20))]).values()
        said.append([event.token for event in events])
    assert said[0] == said[1]
    assert load(str(tmp_path), device="auto", dtype="auto").decoder.embed.dtype == torch.bfloat16


def test_how_fast_prompts_are_computed_is_measured_and_leaves_nothing(model: Model) -> None:
    engine = tiny_engine(model, host_gib=0.05, **OPTIONS)
    measure(engine)
    assert engine.store is not None and engine.store.speeds.patience(1) is not None
    assert engine.pages.free == engine.pages.count


# ---- memory


@pytest.fixture
def leave() -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes of the GPU's memory beyond what is taken now."""

    def left(count: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + count) / torch.cuda.mem_get_info()[1])

    yield left
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_where_the_memory_ends_steps_become_smaller_and_answers_stay_the_same(
    model: Model, leave: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("pando"), "propagate", True)
    requests = [Request(str(row), words(row, 60), greedy(12)) for row in range(6)]
    expected = run(tiny_engine(model, **OPTIONS), requests)
    engine = tiny_engine(model, **{**OPTIONS, "max_num_batched_tokens": 256})
    forward = engine._forward

    def heavy(schedule: Schedule) -> Tensor:
        """Takes 16 MiB a token, as a large model would."""
        torch.empty(sum(schedule.counts) * 16 * MIB, dtype=torch.uint8, device=CUDA)
        return forward(schedule)

    monkeypatch.setattr(engine, "_forward", heavy)
    leave(1600 * MIB)
    found = run(engine, requests)
    assert {name: [event.token for event in each] for name, each in found.items()} == {
        name: [event.token for event in each] for name, each in expected.items()
    }
    assert engine.scheduler.budget in (32, 64) and "did not fit into the memory" in caplog.text
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_step_that_does_not_fit_beside_the_cache_is_refused_at_the_start(model: Model, leave: Callable[[int], None]) -> None:
    leave(256 * MIB)
    with pytest.raises(InvalidOption, match="a step of 1048576 tokens and 16 rows does not fit beside a KV cache of"):
        tiny_engine(model, **{**OPTIONS, "max_num_batched_tokens": 2**20})
    [events] = run(tiny_engine(model, **OPTIONS), [Request("r", words(1, 20), greedy(4))]).values()
    assert len(events) == 4, "what fits is served"


def test_the_cache_takes_its_share_of_what_is_free(model: Model) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine = tiny_engine(model, **OPTIONS, kv_cache_tokens=None, gpu_memory_utilization=0.02)
    assert 0.015 * free < engine.pool.nbytes < 0.021 * free
