"""Which runs a case takes: baselines that record what is asked of them, and a tiny model of our own."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from pando.bench.baseline import Baseline
from pando.bench.cases import PROBE_TOKENS, QUICK, Setting, decode_shared, pages_in_use
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
    [result] = decode_shared(setting(texts, wide, narrow))
    full = [PROBE_TOKENS] + [QUICK.answer] * QUICK.repeats
    assert wide.asked == {"growing": full, "static": full}
    assert narrow.asked == {"growing": [PROBE_TOKENS], "static": [PROBE_TOKENS]}
    assert result.theirs == 0.9
    assert result.note.startswith("against float32, static cache; ")
    assert "bfloat16, growing cache (9.0x slower), bfloat16, static cache (2.2x slower)" in result.note


def test_pages_are_those_of_the_prefix_and_the_tails(texts: Texts) -> None:
    [result] = pages_in_use(setting(texts))
    assert result.met
    assert result.theirs is not None and result.ours < result.theirs
