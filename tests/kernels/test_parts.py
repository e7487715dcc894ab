"""What the paths find in parts of a plan: an answer and the natural logarithm of its softmax sum, fp32, [T, H], whoever merges them."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pando.kernels import reference
from pando.kernels.cpu import Lowering, Part, Run, Square, _Tails
from pando.kernels.native import Dense, NativeLowering
from pando.kernels.reads import joined
from pando.kernels.reference import merge
from pando.kernels.rope import rotate, turns

from ..tiny import native_library
from .test_attention import PATHS, Case, tolerance

Asked = tuple[Tensor, Tensor, Tensor, Tensor]  # q, the same rotated, k, v


def nothing(q: Tensor) -> Part:
    return torch.zeros(q.shape), torch.full(q.shape[:2], -math.inf)


def parts_of_torch(lowering: Lowering, asked: Asked) -> Iterator[tuple[Tensor, Part]]:
    """Queries, and what a part answers them."""
    everyone = torch.arange(len(asked[0]))
    for part in lowering.parts:
        out, lse = part.read(*asked)
        assert lse.dtype == torch.float32 and lse.shape == out.shape[:2]
        yield everyone if part.queries is None else everyone[part.queries], (out.float(), lse)


def parts_of_c(lowering: NativeLowering, asked: Asked) -> Iterator[tuple[Tensor, Part]]:
    """Those of torch's kernel among them. In C, a part is a sum that no one has divided yet, beside the logarithm to base 2 of what weighs
    1 in it."""
    lowering.attend(*asked)
    parts, peaks, sums, (of, starts) = lowering._parts, lowering._peaks, lowering._sums, (lowering._tiling.of, lowering._tiling.starts)
    assert parts.dtype == peaks.dtype == sums.dtype == torch.float32 and peaks.shape == sums.shape == parts.shape[:2]
    empty = sums == 0
    lses = torch.where(empty, -math.inf, peaks * math.log(2) + sums.log())
    outs = torch.where(empty[..., None], 0.0, parts / sums[..., None])
    for token in range(len(starts) - 1):
        for part in map(int, of[starts[token] : starts[token + 1]]):
            yield torch.tensor([token]), (outs[[part]], lses[[part]])


def found(lowering: Lowering | NativeLowering, asked: Asked) -> Part:
    """All parts of a path, merged as the definition says."""
    out, lse = nothing(asked[0])
    for queries, part in parts_of_c(lowering, asked) if isinstance(lowering, NativeLowering) else parts_of_torch(lowering, asked):
        out[queries], lse[queries] = merge(out[queries], lse[queries], *part)
    return out, lse


def questions(case: Case) -> Asked:
    geometry = case.geometry
    q = torch.randn(len(case.positions), geometry.heads, geometry.head_dim).to(case.dtype)
    return q, q if geometry.freqs is None else rotate(q, turns(case.positions, geometry.freqs)), case.k, case.v


def check(part: Part, case: Case, q: Tensor) -> None:
    """Is it the whole?"""
    out, lse = reference.look(q.double(), case.k, case.v, case.list, case.positions, case.geometry)
    assert lse.isfinite().all() and lse.shape == q.shape[:2]
    assert (part[0] - out).abs().max() < tolerance(case.dtype)
    assert (part[1] - lse).abs().max() < 2 * tolerance(case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_every_cpu_path_leaves_the_natural_logarithm_of_its_sums(positions: str, dtype: torch.dtype) -> None:
    kinds, several = set[type](), 0
    for seed in range(4):
        case = Case(seed, positions, dtype, tails=(0, 3, 65))
        asked = questions(case)
        for lowering in case.paths().values():
            check(found(lowering, asked), case, asked[0])
            if isinstance(lowering, Lowering):
                kinds |= {type(part) for part in lowering.parts}
            else:
                several += lowering._tiling.parts > len(asked[0])
    assert kinds == {Run, Square, _Tails} and several > 5


@pytest.mark.parametrize("dense", [dense for dense in PATHS.values() if dense is not None], ids=str)
def test_parts_of_one_path_merge_with_those_of_another_to_the_whole(dense: Dense) -> None:
    """Reads are dealt out in turn: to torch's kernel, to the kernel in C, and to the definition."""
    for seed in (2, 3, 6):
        case = Case(seed, "rope", tails=(0, 3, 65))
        asked, geometry = questions(case), case.geometry
        dealt = [joined(case.page, case._reads[first::3]) for first in range(3)]
        paths = Lowering(dealt[0], case.positions, geometry), NativeLowering(native_library(), dense, dealt[1], case.positions, geometry)
        whole = reference.look(asked[0], case.k, case.v, [*dealt[2].each()], case.positions, geometry)
        for path in paths:
            whole = merge(*whole, *found(path, asked))
        check(whole, case, asked[0])
