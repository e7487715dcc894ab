"""Which runs a case takes: baselines that record what is asked of them, and a tiny model of our own."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from pando.bench.baseline import Baseline
from pando.bench.cases import CLOSE, PROBE_TOKENS, QUICK, Setting, decode_shared, decode_unshared, pages_in_use, prompt_modules
from pando.bench.foundation import CASES
from pando.bench.workloads import Texts

from ..tiny import tiny_llm


class Recorded:
    """Rates are given; `asked` keeps the number of tokens of every run."""

    def __init__(self, name: str, growing: float, static: float) -> None:
        self.name, self.rates = name, {"growing": growing, "static": static}
        self.asked: dict[str, list[int]] = {"growing": [], "static": []}

    def prefill(self, tokens: Sequence[int]) -> tuple[None, None]:
        return None, None

    def time_shared(self, kept: Any, questions: Sequence[Sequence[int]], count: int) -> float:
        self.asked["growing"].append(count)
        return self.rates["growing"]

    def time_shared_static(self, kept: Any, questions: Sequence[Sequence[int]], count: int) -> float:
        self.asked["static"].append(count)
        return self.rates["static"]


@pytest.fixture
def texts() -> Texts:
    return Texts("It was a long book. " * 100, "", ("What is it?", "Who?"), {})


def setting(texts: Texts, *baselines: Recorded) -> Setting:
    llm = tiny_llm(max_num_batched_tokens=512)
    return Setting(llm, llm, cast(list[Baseline], list(baselines)), texts, QUICK)


def test_a_baseline_that_a_probe_shows_to_be_hopeless_is_not_measured_and_the_best_is(texts: Texts) -> None:
    wide, narrow = Recorded("float32", growing=0.5, static=0.9), Recorded("bfloat16", growing=0.1, static=0.4)
    result, _, few, _ = decode_shared(setting(texts, wide, narrow))
    full = [PROBE_TOKENS] + [QUICK.answer] * QUICK.repeats
    assert wide.asked == {"growing": 2 * full, "static": 2 * full}  # for the large batch and for the small one
    assert narrow.asked == {"growing": 2 * [PROBE_TOKENS], "static": 2 * [PROBE_TOKENS]}
    for compared in (result, few):
        assert compared.theirs == 0.9
        assert compared.note.startswith("against float32, static cache; ")
        assert "bfloat16, growing cache (9.0x slower), bfloat16, static cache (2.2x slower)" in compared.note


def test_a_shared_context_is_also_measured_against_our_own_flat_reads_of_it(texts: Texts) -> None:
    many, many_flat, few, few_flat = decode_shared(setting(texts, Recorded("float32", growing=0.5, static=0.9)))
    assert [many.target, many_flat.target, few.target, few_flat.target] == [">= 5x", ">= 2.5x", ">= 3.4x", ""]
    for theirs, flat in ((many, many_flat), (few, few_flat)):
        assert set(flat.samples) == {"Pando", "Pando, flat"}
        assert "Pando, flat" not in theirs.samples
        assert flat.ours == theirs.ours
        assert flat.met is (None if flat is few_flat else flat.ratio is not None and flat.ratio >= 2.5)
        assert "shared reads: 1 (Pando), 0 (Pando, flat)" in flat.note


def test_where_nothing_is_shared_both_read_alike_and_many_runs_show_the_noise(texts: Texts) -> None:
    results, runs = decode_unshared(setting(texts)), CLOSE * QUICK.repeats
    assert [result.case for result in results] == [
        "decode, batch 1 over 256 tokens of its own, against flat",
        "decode, batch 2 over 64 tokens of their own, against flat",
    ]
    for result in results:
        assert {name: len(rates) for name, rates in result.samples.items()} == {"Pando": runs, "Pando, flat": runs}
        assert result.target == ">= 0.98x"
        assert f"median of {runs} pairs from " in result.note
        assert "shared reads: 0 (Pando), 0 (Pando, flat)" in result.note


def test_pages_are_those_of_the_prefix_and_the_tails(texts: Texts) -> None:
    [result] = pages_in_use(setting(texts))
    assert result.met
    assert result.theirs is not None and result.ours < result.theirs


def test_modules_are_part_of_the_bench(texts: Texts) -> None:
    results = prompt_modules(setting(texts))
    assert [result.unit for result in results] == ["ms", "ms", "times"]
    assert "modules" in CASES
