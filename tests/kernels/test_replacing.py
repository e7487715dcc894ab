"""A plan in the place of another that wanted other launches: a captured graph does steps that it was not captured for."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from pando.kernels.gpu_tiles import LARGE, LARGEST, LONE, SHORT, SMALL, Size

from . import test_attention
from .test_attention import Case
from .test_triton import PAGE, OnDevice

pytestmark = pytest.mark.gpu

EMPTY = torch.empty
TOKENS = 10  # of every step: plans of fewer are padded
LARGER = LARGE._replace(rows=32)  # as many as float32 has
KINDS = {
    "two sizes": (LARGER, SMALL, "rope"),
    "small tiles": (SMALL, SMALL, "alibi"),
    "the last block ahead": (LARGER, SMALL._replace(stages=3, ahead=True), "rope"),
    "large tiles": (LARGER, LARGER, "alibi"),
    "tiles one after the other": (LARGEST._replace(rows=32), SMALL, "rope"),
    "short ends": (LARGER, SHORT, "alibi"),
    "single queries": (LARGER, LONE, "rope"),
}


class Padded(OnDevice):
    """Steps of as many tokens as the first one: those that pad it read nothing, and answer zeros."""

    def begin(self, positions: torch.Tensor) -> None:
        super().begin(padded(positions))

    def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        q, turned, k, v = tensors
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", poisoned)
            out = super().attend(padded(q), padded(turned), k, v)
        assert not out[len(q) :].any(), "what pads a step was answered"
        return out[: len(q)]


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows, rows.new_ones(TOKENS - len(rows), *rows.shape[1:])))


def poisoned(*shape: int, **options: Any) -> torch.Tensor:
    found = EMPTY(*shape, **options)
    return found.fill_(torch.nan) if found.is_floating_point() else found


def plan(seed: int, rows: int, positions: str, group: int) -> Case:
    """Reads of one query and of several, of few keys and of some, by one row or by several, moved or not."""
    decoding, shape = random.Random(seed).random() < 0.4, (group, 16, 2 if group == 1 else 1)
    return Case(seed, positions, shape=shape, rows=rows, decoding=decoding, tails=(0, 3, 70), page=PAGE)


@pytest.mark.parametrize(("large", "small", "positions"), KINDS.values(), ids=KINDS)
def test_a_plan_takes_the_place_of_one_that_wanted_other_launches(
    gpu: ModuleType, large: Size, small: Size, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, queries in (("SOME", 3), ("MANY", 6)):
        monkeypatch.setattr(test_attention, name, queries)
    monkeypatch.setattr(gpu, "sizes", lambda *_: (large, small))
    first, *others = (plan(*each, positions, 1 if small == LONE else 4) for each in ((0, 3), (7, 3), (12, 3), (12, 1), (4, 2)))
    first.positions = padded(first.positions)
    path = Padded(gpu, first, spare=3.0)
    for case in others:
        assert path.lowering.replace(case.reads, TOKENS)
        case.check({"triton": path}, case.positions)  # type: ignore[dict-item]
    assert {bool(case.reads.shifts.any()) for case in others} == {True, False}
