"""Reuse never changes an answer: the same requests with everything on, and with everything off, token for token."""

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from pando import Prompt
from pando.engine.engine import Engine
from pando.engine.request import Request, SamplingParams

from .tiny import CPU, DEVICE, greedy, run, tiny_engine, tiny_llm, tiny_model

Answers = dict[tuple[str, int], list[int]]
PAGE, HEAD = 4, 8  # of tokens, and of numbers; kernels of a GPU take no fewer than:
GPU_PAGE, GPU_HEAD = 16, 64
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the engine runs on it")]


def workload(chance: random.Random, page: int = PAGE) -> list[Request]:
    """Requests that share beginnings of every length, some forked, some identical."""
    long, short, most = 30 * page // PAGE, 12 * page // PAGE, 36 * page // PAGE
    trunks = [[chance.randrange(256) for _ in range(long)] for _ in range(2)]
    requests = []
    for number in range(chance.randint(2, 10)):
        prompt = chance.choice(trunks)[: chance.randint(0, long)] + [chance.randrange(256) for _ in range(chance.randint(1, short))]
        if requests and chance.random() < 0.2:
            prompt = list(chance.choice(requests).prompt)
        requests.append(Request(f"r{number}", prompt, greedy(chance.randint(1, most), n=chance.choice([1, 1, 3]))))
    return requests


def played(engine: Engine, requests: list[Request], chance: random.Random, seen: Counter[str]) -> Answers:
    """Requests join while others run, and some are cancelled half way; what was said until then still counts."""
    waiting, said = list(requests), {}
    held = engine.tree.pages
    for _ in range(5000):
        while waiting and chance.random() < 0.5:
            engine.add(waiting.pop(0))
        if waiting or engine.has_work:
            for event in engine.step():
                said.setdefault((event.request_id, event.index), []).append(event.token)
            seen["shared"] += engine.batcher.plan.shared
            seen["evicted"] += engine.tree.pages < held
            held = engine.tree.pages
            if chance.random() < 0.01 and engine.answers:
                engine.cancel(next(iter(engine.answers)).request_id)
                seen["cancelled"] += 1
        else:
            return said
    raise AssertionError("the engine never came to rest")


@functools.cache
def plain(positions: str, seed: int, page: int, size: int) -> dict[str, list[int]]:
    """What each request of a workload says by torch's kernels on a CPU, one step after the other, with nothing shared: whatever else is
    varied, it is found once. The answers of a greedy fork are alike, so one of them is enough."""
    model = tiny_model(positions=positions, native=False, size=size, device=CPU)
    engine = tiny_engine(model, prefix_caching=False, attention="reference", overlap=False)
    said = run(engine, [replace(request, params=replace(request.params, n=1)) for request in workload(random.Random(seed), page)])
    return {name: [event.token for event in events] for (name, _), events in said.items()}


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(
    ("positions", "kernels"),
    [
        *(("rope", "torch"), ("rope", "native"), ("alibi", "torch"), ("learned", "torch")),
        *(pytest.param(positions, "triton", marks=GPU) for positions in ("rope", "alibi", "learned")),
    ],
)
def test_reuse_on_and_off_give_the_same_tokens(positions: str, kernels: str, request: pytest.FixtureRequest) -> None:
    """The answers of torch's kernels with nothing shared are expected of the compiled ones, too."""
    page, size = (GPU_PAGE, GPU_HEAD) if kernels == "triton" else (PAGE, HEAD)
    device = {"torch": DEVICE, "native": CPU, "triton": torch.device("cuda")}[kernels]
    model = tiny_model(positions=positions, native=kernels == "native", size=size, device=device)
    if kernels == "native":
        assert model.library is not None
        request.getfixturevalue("all_threads")
    seen: Counter[str] = Counter()
    reading = {"attention": "shared" if kernels == "triton" else "auto"}  # so little is hardly worth it there
    for seed in range(5):
        chance = random.Random(seed)
        requests = workload(chance, page)
        tokens, budget = (chance.choice(counts) * page // PAGE for counts in ([80, 80, 120, 2000], [7, 33, 64]))
        engine = tiny_engine(model, page_size=page, kv_cache_tokens=tokens, max_num_batched_tokens=budget, **reading)
        assert kernels != "triton" or engine.batcher.lower is not None, "the definition answers, and not the kernels"
        expected = plain(positions, seed, page, size)
        for _ in range(2):  # the second time over what the first left behind
            for (name, index), answer in played(engine, requests, chance, seen).items():
                assert answer == expected[name][: len(answer)], f"seed {seed}, {name}, answer {index}"
                seen["forked"] += index > 0
        seen["cached"] += engine.tree.pages
        seen["preempted"] += engine.stats().preemptions
        engine.clear_cache()
        assert engine.pages_in_use == 0, "a page was lost"
        assert len({tuple(answer) for answer in expected.values()}) > 1, "the model says the same to everything"
    assert seen["preempted"] > 5
    for what in ("shared", "cached", "evicted", "cancelled", "forked"):
        assert seen[what], f"nothing was {what}"


@pytest.mark.usefixtures("overlap")
def test_seeded_sampling_is_the_same_alone_and_in_company() -> None:
    model = tiny_model()
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, top_p=0.9, n=2)
    asked = Request("asked", [1, 2, 3, 4, 5, 6], params)
    alone = run(tiny_engine(model), [asked])
    chance = random.Random(1)
    others = [Request(f"o{i}", [1, 2, 3, 4, chance.randrange(256)], SamplingParams(temperature=1.0, max_tokens=25)) for i in range(6)]
    together = run(tiny_engine(model, max_num_batched_tokens=16), [*others, asked])
    for index in range(2):
        assert [e.token for e in alone["asked", index]] == [e.token for e in together["asked", index]]
    assert [e.token for e in alone["asked", 0]] != [e.token for e in alone["asked", 1]]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 computes it the slow way
def test_in_sixteen_bits_reuse_stays_within_the_rounding() -> None:
    """Logprobs of the same continuation, cold and over a cached prefix."""
    model = tiny_model(dtype=torch.bfloat16)
    prompt = list(range(40, 90))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    engine = tiny_engine(model)
    cold = run(engine, [Request("cold", prompt, params)])["cold", 0][0]
    warm = run(engine, [Request("warm", prompt, params)])["warm", 0][0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 49)
    assert cold.logprobs is not None
    assert warm.logprobs is not None
    for token in cold.logprobs.keys() & warm.logprobs.keys():
        assert warm.logprobs[token].logprob == pytest.approx(cold.logprobs[token].logprob, abs=0.15)
    assert len(cold.logprobs.keys() & warm.logprobs.keys()) >= 4


CHAIN = """
<schema name="chain" layout="fixed" encode="causal">
  Before everything.
  <module name="one"> The first of them.<module name="inner"> And what it holds.</module></module>
  Between them.
  <module name="two"> The second one.</module>
</schema>
"""


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("words", ["", " And now something new."])
@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_a_prompt_that_is_the_whole_of_a_causal_schema_is_answered_as_its_text(positions: str, words: str) -> None:
    """Module by module, from the cache or not: all of it was encoded behind just what it stands behind."""
    model = tiny_model(positions=positions)
    llm, params = tiny_llm(model), greedy(12, logprobs=5)
    llm.schemas.add(CHAIN)
    asked = Prompt(f'<prompt schema="chain"><one><inner/></one><two/>{words}</prompt>')
    text = "Before everything. The first of them. And what it holds.Between them. The second one." + words
    [plain] = tiny_llm(model, prefix_caching=False, attention="reference").generate(text, params)
    for cached in (0, len(text) - 1):
        [found] = llm.generate(asked, params)
        assert (found.prompt_token_ids, found.num_cached_tokens, found.reuse.modules) == (plain.prompt_token_ids, cached, 0)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        for ours, theirs in zip(found.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True):
            assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
                {token: one.logprob for token, one in theirs.items()}, abs=1e-4
            )
