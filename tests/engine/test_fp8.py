"""A pool and weights in 8 bits: what was written is what is read, in every tier, and never by another kind of pool."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pando import Prompt
from pando.bench.random_model import random_model
from pando.engine.engine import Engine
from pando.engine.request import Request, Truncation
from pando.engine.row import Schedule
from pando.engine.sampler import Choices
from pando.errors import InvalidOption
from pando.kernels import fp8
from pando.model.load import Model
from pando.store.speeds import Speeds

from ..tiny import CPU_ALONE, greedy, run, tiny_config, tiny_engine, tiny_llm, tiny_model
from .test_repair import FOREIGN, RUNS, WORDS, plain
from .test_repair import ask as repaired
from .test_store import ENOUGH, ask, engine_of, evict, tokens_of, words

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCHEMA = """
<schema name="tour" order="free">
  <module name="paris">Paris has a tower and a river.</module>
  <module name="rome">Rome has a forum.</module>
</schema>
"""


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is brought back, although so small a model would sooner compute it."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


class Listener(Engine):
    """Keeps the logits of every step."""

    heard: list[Tensor]

    def _sample(self, schedule: Schedule, logits: Tensor) -> Choices:
        self.heard.append(logits.to(torch.float32, copy=True))
        return super()._sample(schedule, logits)


def scores(model: Model, prompt: list[int], **options: object) -> Tensor:
    """Logarithms of what is expected behind a prompt, and behind each of the tokens that follow."""
    engine = Listener(model, tiny_config(**options))
    engine.heard = []
    run(engine, [Request("x", prompt, greedy(1))])
    return engine.heard[-1].double().log_softmax(-1)


def divergence(exact: Tensor, found: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_a_pool_in_8_bits_answers_the_same_cold_and_from_every_tier(model: Model, tmp_path: Path) -> None:
    prompt = words(1, 70)
    cold = tokens_of(tiny_engine(model, kv_dtype="fp8", prefix_caching=False), prompt)
    first = engine_of(model, tmp_path, kv_dtype="fp8", host_gib=ENOUGH)
    assert tokens_of(first, prompt) == cold
    again = ask(first, prompt)
    assert ([event.token for event in again], again[0].num_cached_tokens, again[0].reuse.tiers) == (cold, 69, {})
    evict(first)
    from_host = ask(first, prompt)
    assert ([event.token for event in from_host], from_host[0].reuse.tiers) == (cold, {"host": 68})
    first.close()
    second = engine_of(model, tmp_path, kv_dtype="fp8")
    from_disk = ask(second, prompt)
    assert [event.token for event in from_disk] == cold and from_disk[0].reuse.tiers["disk"] >= 68
    second.close()


@pytest.mark.gpu
@pytest.mark.skipif(not fp8.multiplied(DEVICE), reason="needs a GPU that knows 8 bits")
def test_on_a_gpu_a_pool_in_8_bits_answers_the_same_cold_and_from_every_tier(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, object] = {"page_size": 16, "kv_dtype": "fp8"}
    model, prompt = tiny_model(size=64, device=DEVICE), words(1, 70)
    cold = tokens_of(tiny_engine(model, **options, prefix_caching=False), prompt)
    engine = tiny_engine(model, **options, host_gib=ENOUGH)
    assert tokens_of(engine, prompt) == tokens_of(engine, prompt) == cold
    evict(engine)
    events = ask(engine, prompt)
    assert [event.token for event in events] == cold and events[0].reuse.tiers["host"] >= 64
    engine.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "its kernels were not used"


def test_pools_of_different_kinds_never_read_each_others_pages(model: Model, tmp_path: Path) -> None:
    prompt = words(2, 70)
    for kinds in (("fp8", "auto"), ("auto", "fp8")):
        folder = tmp_path / kinds[0]
        first = engine_of(model, folder, kv_dtype=kinds[0])
        tokens_of(first, prompt)
        first.close()
        other = engine_of(model, folder, kv_dtype=kinds[1])
        events = ask(other, prompt)
        assert not events[0].reuse.tiers
        assert [event.token for event in events] == tokens_of(tiny_engine(model, kv_dtype=kinds[1], prefix_caching=False), prompt)
        other.close()
        same = engine_of(model, folder, kv_dtype=kinds[0])
        assert ask(same, prompt)[0].reuse.tiers
        same.close()


def test_what_names_a_page_says_what_its_numbers_are(model: Model) -> None:
    names = [tiny_engine(each, kv_dtype=kind).model.digest for each in (model, _rounded()) for kind in ("auto", "fp8")]
    assert len(set(names)) == 4
    assert tiny_engine(tiny_engine(model, kv_dtype="fp8").model, kv_dtype="fp8").model.digest == names[1]


def test_a_pool_in_8_bits_is_a_quarter_of_one_in_32(model: Model) -> None:
    rounded, whole = tiny_engine(model, kv_dtype="fp8"), tiny_engine(model)
    assert (rounded.pool.k.dtype, rounded.pool.nbytes) == (torch.float8_e4m3fn, whole.pool.nbytes // 4)


def test_answers_over_a_pool_in_8_bits_are_near_those_over_a_whole_one(model: Model) -> None:
    prompt = words(3, 200)
    exact, found = scores(model, prompt), scores(model, prompt, kv_dtype="fp8")
    assert 1e-6 < divergence(exact, found) < 0.02


def test_answers_that_part_over_a_pool_in_8_bits_are_each_as_one_alone(model: Model) -> None:
    llm = tiny_llm(model, kv_dtype="fp8")
    one, two = (llm.generate([words(4, 30)], greedy(6, n=count))[0].outputs for count in (1, 2))
    assert [answer.token_ids for answer in two] == [one[0].token_ids] * 2


def test_modules_are_moved_in_a_pool_in_8_bits(model: Model) -> None:
    llm = tiny_llm(model, kv_dtype="fp8")
    llm.schemas.add(SCHEMA)
    prompt = Prompt('<prompt schema="tour"><rome/><paris/> Which is larger?</prompt>')
    first, second = (llm.generate(prompt, greedy(4))[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids and second.reuse.modules == len("Paris has a tower and a river.")


def test_a_conversation_over_a_pool_in_8_bits_loses_its_oldest_part_and_goes_on(model: Model) -> None:
    engine, prompt = tiny_engine(model, kv_dtype="fp8", max_model_len=64), words(5, 56)
    answer = tokens_of(engine, prompt, count=4)
    cut = Request("cut", [*prompt, *answer, *words(6, 20)], greedy(4), truncation=Truncation())
    events = run(engine, [cut])["cut", 0]
    assert len(events) == 4 and events[0].reuse.truncated is not None and events[0].reuse.truncated.moved


def test_a_prompt_over_a_pool_in_8_bits_is_repaired() -> None:
    model = tiny_model(layers=4)
    found = run(tiny_engine(model, kv_dtype="fp8"), [repaired("x", RUNS, WORDS, repair=1.0)])["x", 0]
    exact = run(tiny_engine(model, kv_dtype="fp8"), [Request("x", [t for r in RUNS for t in r.tokens] + list(WORDS), greedy(8))])["x", 0]
    assert [event.token for event in found] == [event.token for event in exact]
    assert found[-1].reuse.repaired == FOREIGN and len(plain(model)) == len(found)


@CPU_ALONE
def test_a_cpu_says_once_that_it_reads_8_bits_slowly(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokens_of(tiny_engine(model, kv_dtype="fp8"), words(7, 9))
    (said,) = (record.message for record in caplog.records)
    assert "--kv-dtype auto" in said


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_8_bits_are_not_rounded_to_8_bits_again(codec: str) -> None:
    with pytest.raises(InvalidOption, match="leave one of the two out"):
        tiny_config(kv_dtype="fp8", store_codec=codec)


@pytest.mark.parametrize(
    ("option", "value"), [("kv_dtype", "fp16"), ("kv_dtype", "float8"), ("quantization", "int4"), ("quantization", True)]
)
def test_kinds_that_there_are_not_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=f"{option} is"):
        tiny_config(**{option: value})


# ---- weights


def _rounded() -> Model:
    return random_model("tiny", CPU, torch.float32, compiled=False, quantization="fp8")


def test_a_model_with_weights_in_8_bits_answers_near_the_plain_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = _rounded()
    (said,) = (record.message for record in caplog.records)
    assert "--quantization none" in said
    whole = random_model("tiny", CPU, torch.float32, compiled=False)
    assert whole.digest != model.digest
    prompt = words(8, 60)
    exact, found = scores(whole, prompt), scores(model, prompt)
    assert 0 < divergence(exact, found) < 1e-3
    assert torch.nn.functional.cosine_similarity(exact - exact.mean(), found - found.mean()).min() > 0.999


def test_reuse_is_exact_with_weights_in_8_bits(tmp_path: Path) -> None:
    model, prompt = _rounded(), words(9, 70)
    cold = tokens_of(tiny_engine(model, prefix_caching=False), prompt)
    engine = engine_of(model, tmp_path, kv_dtype="fp8")
    exact = tokens_of(tiny_engine(model, kv_dtype="fp8", prefix_caching=False), prompt)
    assert tokens_of(engine, prompt) == tokens_of(engine, prompt) == exact
    engine.close()
    assert tokens_of(tiny_engine(model), prompt) == cold
