"""The sampler against a slow, obvious twin, and what a user is promised about it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pando.engine.across import sent
from pando.engine.draw import SHORTLIST, uniforms
from pando.engine.request import Constraint, SamplingParams
from pando.engine.sampler import NO_TOKEN, Choice, Chosen, Sampler, check, likeliest
from pando.errors import InvalidSampling

GREEDY = SamplingParams(temperature=0)


@dataclass
class Row:
    params: SamplingParams = GREEDY
    seed: int = 0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    constraint: Constraint | None = None


def sample(sampler: Sampler, logits: Tensor, rows: Sequence[Choice]) -> list[Chosen]:
    return sampler.choose(logits, rows).read()[0]


def choose(logits: Tensor, rows: Sequence[Choice]) -> list[Chosen]:
    return sample(Sampler(logits.shape[1], torch.device("cpu")), logits.clone(), rows)


def tokens(logits: Tensor, rows: Sequence[Choice]) -> list[int]:
    return [chosen.token for chosen in choose(logits, rows)]


# The twin: one row, float64, every rule spelled out.


def slow_logits(logits: Tensor, row: Row) -> np.ndarray:
    x = logits.double().numpy().copy()
    params = row.params
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(row.output) < params.min_tokens:
        x[row.blocked] = -np.inf
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(row.output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def slow_support(x: np.ndarray, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """The kept tokens, likeliest first, and their renormalised probabilities."""
    scaled = x / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(x)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if probs[i] >= params.min_p * probs.max() and probs[i] > 0]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        share = probs[order] / probs[order].sum()
        before = np.concatenate(([0.0], np.cumsum(share)[:-1]))
        order = [i for i, mass in zip(order, before, strict=True) if mass < params.top_p]
    return order, probs[order] / probs[order].sum()


def check_against_twin(logits: Tensor, row: Row, token: int) -> None:
    x = slow_logits(logits, row)
    if row.params.greedy:
        assert token == int(x.argmax())
        return
    order, probs = slow_support(x, row.params)
    if not 0 < row.params.top_k < len(x) and row.params.top_p >= 1:  # without either, the draw runs in order of id
        by_id = np.argsort(order)
        order, probs = [order[i] for i in by_id], probs[by_id]
    assert token in order
    high = np.cumsum(probs)
    place = order.index(token)
    chance = uniforms(np.array([row.seed % 2**64], np.uint64), np.array([len(row.output)]))[0]
    assert high[place] - probs[place] - 1e-5 <= chance <= high[place] + 1e-5  # fp32 sums against fp64


def random_params(random: np.random.Generator, vocab: int) -> SamplingParams:
    def maybe(value: float, otherwise: float) -> float:
        return float(value) if random.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=maybe(random.uniform(0.2, 2), 0.0),
        top_p=maybe(random.uniform(0.05, 0.99), 1.0),
        top_k=int(maybe(int(random.integers(1, 2 * vocab)), 0)),
        min_p=maybe(random.uniform(0.001, 0.3), 0.0),
        repetition_penalty=maybe(random.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(random.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(random.uniform(-2, 2), 0.0),
        logit_bias={int(i): float(random.uniform(-5, 5)) for i in random.integers(0, vocab, size=int(maybe(3, 0)))},
        min_tokens=int(maybe(4, 0)),
    )


@pytest.mark.parametrize("case", range(40))
def test_a_batch_of_anything_equals_the_slow_twin_row_by_row(case: int) -> None:
    random = np.random.default_rng(case)
    vocab = int(random.choice([7, 100, 256, 300, SHORTLIST, SHORTLIST + 1, 3000]))
    rows = [
        Row(
            random_params(random, vocab),
            seed=int(random.integers(-(2**63), 2**63 - 1)),
            prompt=random.integers(0, vocab, size=20).tolist(),
            output=random.integers(0, vocab, size=int(random.integers(0, 8))).tolist(),
            blocked=[0, 1],
        )
        for _ in range(int(random.integers(1, 12)))
    ]
    logits = torch.from_numpy(random.normal(0, random.choice([0.3, 3, 10]), (len(rows), vocab)).astype(np.float32))
    for row, x, token in zip(rows, logits, tokens(logits, rows), strict=True):
        check_against_twin(x, row, token)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.6),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=8, top_p=0.7, min_p=0.05, temperature=1.5),
    ],
)
def test_exactly_the_kept_tokens_can_be_drawn(params: SamplingParams) -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(1))
    drawn = tokens(x.expand(4000, -1), [Row(params, seed=seed) for seed in range(4000)])
    order, _ = slow_support(x.double().numpy(), params)
    assert set(drawn) == set(order)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.95), SamplingParams(top_k=12, temperature=0.7)])
def test_tokens_are_drawn_as_often_as_they_are_likely(params: SamplingParams) -> None:
    count = 10_000
    x = torch.randn(30, generator=torch.Generator().manual_seed(2))
    drawn = Counter(tokens(x.expand(count, -1), [Row(params, seed=seed) for seed in range(count)]))
    order, probs = slow_support(x.double().numpy(), params)
    chi_square = sum((drawn[token] - count * p) ** 2 / (count * p) for token, p in zip(order, probs, strict=True))
    assert chi_square < len(order) + 6 * math.sqrt(2 * len(order))


def test_positions_of_one_seed_are_as_random_as_seeds() -> None:
    positions = np.arange(20_000)
    draws = uniforms(np.zeros(20_000, np.uint64), positions)
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 60
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_a_seeded_row_draws_the_same_alone_and_in_any_company() -> None:
    vocab = 1000
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.normal(0, 2, (24, vocab)).astype(np.float32))
    rows = [Row(random_params(random, vocab), seed=i, prompt=[1, 2, 3], output=[4] * i) for i in range(24)]
    together = choose(logits, rows)
    for i in range(24):
        assert choose(logits[i : i + 1], [rows[i]]) == together[i : i + 1]
    assert choose(logits.flip(0), rows[::-1]) == together[::-1]


def test_the_position_moves_the_draw() -> None:
    flat = torch.zeros(1, 1000)
    drawn = {tokens(flat, [Row(SamplingParams(), seed=7, output=[0] * length)])[0] for length in range(50)}
    assert len(drawn) > 40


def test_top_k_of_one_is_greedy_even_on_ties() -> None:
    logits = torch.randn(64, 900, generator=torch.Generator().manual_seed(3)).round()  # many ties
    one = SamplingParams(top_k=1, temperature=1.7)
    assert tokens(logits, [Row(one, seed=i) for i in range(64)]) == tokens(logits, [Row() for _ in range(64)])


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.003)])
def test_of_equal_logits_the_lower_ids_are_kept(params: SamplingParams) -> None:
    flat = torch.zeros(300, 1000)
    assert set(tokens(flat, [Row(params, seed=i) for i in range(300)])) == {0, 1, 2}


def test_a_flat_distribution_wider_than_the_short_list_is_cut_where_it_should_be() -> None:
    x = torch.linspace(0, -0.5, 4 * SHORTLIST)
    params = SamplingParams(top_p=0.75)
    order, _ = slow_support(x.double().numpy(), params)
    drawn = tokens(x.expand(2000, -1), [Row(params, seed=i) for i in range(2000)])
    assert SHORTLIST < len(order) - 20 < max(drawn) < len(order)


def test_counts_grow_step_by_step_as_if_counted_afresh() -> None:
    vocab = 12
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.1, frequency_penalty=0.2)
    random = np.random.default_rng(9)
    sampler = Sampler(vocab, torch.device("cpu"))
    rows = [Row(params, prompt=[i, i + 1]) for i in range(6)] + [Row()]
    for step in range(40):
        if step == 10:
            sampler.forget(rows.pop(0))
            rows.append(Row(params, prompt=[11]))  # takes the slot that was freed
        logits = torch.from_numpy(random.normal(0, 1, (len(rows), vocab)).astype(np.float32))
        for row, x, chosen in zip(rows, logits, sample(sampler, logits.clone(), rows), strict=True):
            check_against_twin(x, row, chosen.token)
            row.output.append(chosen.token)


def test_another_batch_of_the_same_size_is_judged_by_its_own_params() -> None:
    sampler = Sampler(3, torch.device("cpu"))
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    assert sample(sampler, logits.clone(), [Row()])[0].token == 0
    assert sample(sampler, logits.clone(), [Row(replace(GREEDY, logit_bias={2: 10.0}))])[0].token == 2


def test_frequency_penalty_ends_a_loop() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    said = [0, 0]
    assert tokens(logits, [Row(replace(GREEDY, frequency_penalty=0.1), output=said)]) == [1]
    assert tokens(logits, [Row(GREEDY, output=said)]) == [0]


def test_the_prompt_is_penalised_by_repetition_only() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    assert tokens(logits, [Row(replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0), prompt=[0])]) == [0]
    assert tokens(logits, [Row(replace(GREEDY, repetition_penalty=1.1), prompt=[0])]) == [1]


def test_an_answer_cannot_end_before_its_min_tokens() -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0]])
    params = replace(GREEDY, min_tokens=2)
    assert tokens(logits, [Row(params, output=[0], blocked=[1])]) == [2]
    assert tokens(logits, [Row(params, output=[0, 0], blocked=[1])]) == [1]


def test_logprobs_are_the_models_own_whatever_the_temperature_and_bias() -> None:
    x = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = x.log_softmax(-1).tolist()
    params = SamplingParams(temperature=0, logit_bias={3: 100.0}, repetition_penalty=2.0, logprobs=2)
    plain, scored = choose(x.expand(2, -1), [Row(), Row(params, prompt=[0])])
    assert plain == Chosen(0)
    assert scored.token == 3
    assert scored.logprob == pytest.approx(expected[3])
    assert scored.top is not None
    assert [(token, rank) for token, _, rank in scored.top] == [(3, 4), (0, 1), (1, 2)]
    assert [logprob for _, logprob, _ in scored.top] == pytest.approx([expected[3], expected[0], expected[1]])


def test_logprobs_do_not_name_a_token_twice_and_ties_rank_by_id() -> None:
    params = replace(GREEDY, logprobs=3, logit_bias={1: 1.0})
    (chosen,) = choose(torch.zeros(1, 5), [Row(params)])
    assert chosen.top is not None
    assert [(token, rank) for token, _, rank in chosen.top] == [(1, 2), (0, 1), (2, 3)]


def test_no_alternatives_still_gives_the_chosen_logprob() -> None:
    (chosen,) = choose(torch.zeros(1, 4), [Row(replace(GREEDY, logprobs=0))])
    assert chosen.top == [(0, chosen.logprob, 1)]
    assert chosen.logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(logprobs=1), SamplingParams(top_p=0.5), SamplingParams(top_k=3, min_p=0.1)])
def test_a_row_without_usable_logits_has_no_token_and_harms_no_other(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(4))
    rows = [Row(params, seed=i) for i in range(3)]
    sound = choose(logits, rows)
    logits[1] = bad
    assert choose(logits, rows) == [sound[0], Chosen(NO_TOKEN), sound[2]]


def test_one_nan_is_enough_to_refuse_a_row() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 7] = math.nan
    assert tokens(logits, [Row(), Row()]) == [NO_TOKEN, 0]
    assert tokens(logits, [Row(SamplingParams()), Row()])[0] == NO_TOKEN


def test_a_batch_of_none_is_answered_with_nothing() -> None:
    assert choose(torch.zeros(0, 10), []) == []


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    check(SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[99]), 100)
    with pytest.raises(InvalidSampling, match="logit_bias names token 100 of a vocabulary of 100"):
        check(SamplingParams(logit_bias={100: 1.0}), 100)
    with pytest.raises(InvalidSampling, match="stop_token_ids names token 200"):
        check(SamplingParams(stop_token_ids=[200]), 100)


# ---- logits of 16 bits, of which the likeliest may be known


def test_logits_of_16_bits_are_chosen_from_as_if_they_had_32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 900).to(torch.bfloat16)
    rows = [
        Row(),
        Row(SamplingParams(temperature=0, logit_bias={5: 3.0, 7: 0.001})),
        Row(SamplingParams(temperature=0.8, top_p=0.9), seed=3),
        Row(SamplingParams(temperature=1.0), seed=4),
        Row(SamplingParams(temperature=0, repetition_penalty=1.1), output=[int(logits[4].argmax())]),
        Row(SamplingParams(temperature=0, logprobs=3)),
    ]
    for some in (rows, rows[:1] * 6):
        assert choose(logits, some) == choose(logits.float(), some)


def test_what_is_known_to_be_likeliest_is_taken_where_nothing_else_is_asked() -> None:
    sampler, logits = Sampler(4, torch.device("cpu")), torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    known = torch.tensor([2]), torch.tensor([2])
    assert sampler.choose(logits, [Row()], known=known).read()[0][0].token == 2
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=0, logit_bias={3: 50.0})):
        drawn = sampler.choose(logits.clone(), [Row(params, seed=1)], known=known).read()[0][0].token
        assert drawn == sample(sampler, logits.clone(), [Row(params, seed=1)])[0].token


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_has_no_token(nothing: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1] = nothing
    tokens, told = likeliest(logits)
    assert told.tolist() == [0, NO_TOKEN] and 0 <= int(tokens[1]) < 5


class Only:
    """May become nothing but some tokens. Of others than the first so many it does not know."""

    is_broken = False

    def __init__(self, allowed: Sequence[int], known: int) -> None:
        bits = np.zeros(-(-known // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        self._bits = np.packbits(bits, bitorder="little").view(np.int32)

    def allowed(self) -> "np.ndarray":
        return self._bits

    def accept(self, token: int) -> bool:
        return False


def test_what_rows_may_become_is_sent_at_once_and_each_takes_the_likeliest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.arange(300, dtype=torch.float32).repeat(4, 1)
    rows = [Row(constraint=Only([3, 37, 39], 300)), Row(), Row(constraint=Only([255, 7], 256)), Row(constraint=Only(range(64), 64))]
    sampler, shapes = Sampler(300, torch.device("cpu")), list[tuple[int, ...]]()
    sampler._group(rows)

    def counted(numbers: np.ndarray, device: torch.device) -> Tensor:
        shapes.append(numbers.shape)
        return sent(numbers, device)

    monkeypatch.setattr("pando.engine.sampler.sent", counted)
    assert [chosen.token for chosen in sample(sampler, logits, rows)] == [39, 299, 255, 63]
    assert shapes == [(3, 38)], "a bit for each token, of all rows together"
