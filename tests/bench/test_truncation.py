"""`pando bench truncation`: that each way is what it says; how well and how fast anything is, no test can say."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
import torch

from pando.bench import truncation
from pando.bench.truncation import MOVED, NAIVE, QUICK, RECOMPUTED, ROOTLESS, Bench
from pando.engine.request import Tenant
from pando.errors import InvalidOption
from pando.kernels import reference
from pando.model.decoder import Step
from pando.model.load import Model

from ..tiny import tiny_model

TOKENS = Random(3).choices(range(256), k=1200)
WINDOW, PAGE = QUICK.window, QUICK.window // 16


@pytest.fixture
def bench() -> Bench:
    return Bench(tiny_model(max_positions=1024), TOKENS, QUICK)


def naive_by_hand(model: Model, pool: object, slots: dict[int, int], tokens: list[int], new: list[int], free: list[int]) -> float:
    """Nats of what follows: keys where they were, queries from the end of what is left on, and no key is ahead of anyone."""
    positions = torch.arange(len(tokens), len(tokens) + len(new) - 1)
    every = torch.arange(len(new) - 1)
    kept = torch.tensor([slots[place] for place in range(len(tokens))])
    own = torch.tensor(free[: len(new) - 1])
    reads = [reference.Read(kept, 0, every, torch.zeros_like(every)), reference.Read(own, len(tokens), every, torch.zeros_like(every))]
    geometry = model.decoder.geometry
    step = Step(
        torch.tensor(new[:-1]),
        positions,
        own,
        every,
        lambda q, turned, k, v: reference.attend(q, k, v, reads, positions, geometry),
    )
    logits = model.decoder.forward(step, pool)  # type: ignore[arg-type]
    scores = logits.log_softmax(-1).gather(1, torch.tensor(new[1:])[:, None])
    return -float(scores[-QUICK.scored :].sum())


def test_naive_truncation_reads_old_keys_at_new_positions(bench: Bench) -> None:
    size, scored, half = WINDOW, QUICK.scored, WINDOW // 2
    found = bench._window(TOKENS)[NAIVE]
    engine = bench.engine
    held = (size - 1) // PAGE * PAGE
    kept = [*range(PAGE), *range(PAGE + half, held)]
    pages = {}  # by the position of their first token
    for stem in engine.tree.stems():
        if stem.segment.tokens == tuple(TOKENS[stem.segment.first : stem.end]):
            pages |= {stem.segment.first + PAGE * i: page for i, page in enumerate(stem.segment.pages)}
    slots = {place: pages[old // PAGE * PAGE] * PAGE + old % PAGE for place, old in enumerate(kept)}
    free = [page * PAGE + place for page in engine.pages.take(8, None, 0) for place in range(PAGE)]
    by_hand = naive_by_hand(engine.model, engine.pool, slots, kept, TOKENS[held : size + scored], free)
    assert found == pytest.approx(by_hand, rel=1e-4)


def test_every_way_is_another_and_recomputing_is_the_plain_prompt(bench: Bench) -> None:
    found = bench._window(TOKENS)
    assert len({round(nats, 3) for nats in found.values()}) == 4
    first, half = PAGE, WINDOW // 2
    left = [*TOKENS[:first], *TOKENS[first + half : WINDOW + QUICK.scored]]
    other = Bench(bench.engine.model, TOKENS, QUICK)
    assert found[RECOMPUTED] == pytest.approx(other._surprise(left[:-1], left[-QUICK.scored :]), rel=1e-5)
    assert set(found) == {RECOMPUTED, MOVED, ROOTLESS, NAIVE}


def test_the_turn_that_overflows_is_held_against_the_same_tokens_with_nothing_cached(bench: Bench) -> None:
    first, share = bench.first_token()
    assert {name: len(found) for name, found in first.samples.items()} == {MOVED: 2, RECOMPUTED: 2}
    assert (first.target, share.target) == (">= 8x", ">= 90")
    assert 80 < share.ours < 100, "what the window ended with was known, as it is in no turn that overflows"
    for place in (1, 2):
        request, before = bench._left(place, bench._history(place), [(PAGE, PAGE + 64)]), bench.engine.totals.tokens
        bench._timed(replace(request, tenant=Tenant(b"new" + request.tenant.salt)))
        assert bench.engine.totals.tokens - before == len(request.prompt) == WINDOW - 1 - 64 + QUICK.new, "someone else's cache was used"


def test_perplexity_is_told_for_each_way_and_judged(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    *ways, near = bench.perplexity()
    assert [result.case.rsplit(", ", 1)[1] for result in ways] == [MOVED, ROOTLESS, NAIVE]
    assert near.target == "<= 0.5" and near.ours == pytest.approx(100 * abs(ways[0].ours / (ways[0].theirs or 0) - 1))
    assert "window 2: recomputed" in capsys.readouterr().out
    assert {way: len(each) for way, each in near.samples.items()} == dict.fromkeys((RECOMPUTED, MOVED, ROOTLESS, NAIVE), QUICK.windows)
    mean = exp(fmean(map(log, near.samples[MOVED])))
    assert mean == pytest.approx(ways[0].ours), "each window's own, and not the mean up to it"


def test_how_far_the_mean_can_be_trusted_is_told() -> None:
    assert truncation._spread([3.01, 3.0, 3.02], [3.0, 3.0, 3.0]) == "+1.00 % +- 0.58 (standard error); single windows from +0.0 to +2.0 %"
    assert truncation._spread([3.01], [3.0]) == "one window says little"


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(truncation, "load", lambda *given, **options: tiny_model(max_positions=1024))
    text, file = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Once upon a time there was a window that was full. " * 40, encoding="utf-8")
    assert truncation.main(["--quick", "--text", str(text), "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found["results"]) == 6 and found["machine"]["text"] == "text.txt"
    assert "not computed again" in capsys.readouterr().out


def test_too_little_text_and_nonsense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="2 windows and 2 turns need 512"):
        Bench(tiny_model(), TOKENS[:100], QUICK)
    with pytest.raises(InvalidOption, match="--windows"):
        truncation.main(["--windows", "0"])


def test_small_sizes_may_be_repeated_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[truncation.Sizes] = []

    class Seen(Bench):
        def __init__(self, model: Model, tokens: Sequence[int], sizes: truncation.Sizes) -> None:
            made.append(sizes)
            raise InvalidOption("seen")

    monkeypatch.setattr(truncation, "load", lambda *given, **options: tiny_model())
    monkeypatch.setattr(truncation, "Bench", Seen)
    for given in ([], ["--windows", "3", "--repeats", "4"]):
        with pytest.raises(InvalidOption, match="seen"):
            truncation.main(["--quick", *given])
    assert made == [QUICK, replace(QUICK, windows=3, repeats=4)]
