"""Scores that rise or fall from block to block of keys: what was weighed before is scaled to a new peak when it must be, and only then."""

import pytest
import torch

from pando.kernels import reference
from pando.kernels.native import Dense, NativeLowering
from pando.kernels.reads import joined
from pando.kernels.reference import Geometry, alibi_slopes

from ..tiny import native_library
from .test_attention import poisoned, tolerance

KEYS, BLOCK, SIZE = 330, 64, 64


@pytest.mark.parametrize("step", [-20, 3, 7.9, 8.1, 20])  # powers of 2 from one block to the next
@pytest.mark.parametrize("count", [1, 12])  # queries: too few for tile instructions, and enough
@pytest.mark.parametrize("library", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, "-DTILES_IN_C")])
def test_weights_are_right_wherever_the_largest_score_lies(library: tuple[torch.dtype, *tuple[str, ...]], count: int, step: float) -> None:
    for slopes in (None, alibi_slopes(6)):
        check(library, Geometry(6, 2, SIZE, SIZE**-0.5, slopes=slopes), count, step)


@pytest.mark.parametrize("heads", [(6, 2, 12), (8, 1, 2)])  # several groups of queries, and one that follows itself
@pytest.mark.parametrize("options", [(), ("-DTILES_IN_C",)])
def test_weights_are_right_where_a_score_rises_beyond_what_a_float_can_weigh(options: tuple[str, ...], heads: tuple[int, int, int]) -> None:
    check((torch.bfloat16, *options), Geometry(*heads[:2], SIZE, SIZE**-0.5), heads[2], 200)


def check(library: tuple[torch.dtype, *tuple[str, ...]], geometry: Geometry, count: int, step: float) -> None:
    dtype = library[0]
    torch.manual_seed(count)
    k, v = torch.randn(2, KEYS, geometry.kv_heads, SIZE)
    q = torch.randn(count, geometry.heads, SIZE)
    q[..., 0] = 8.0
    k[..., 0] = (torch.arange(KEYS) // BLOCK * step)[:, None] / (8.0 * geometry.scale * 1.4427)
    k, v, q = k.to(dtype), v.to(dtype), q.to(dtype)
    positions = KEYS - 1 - 13 * torch.arange(count)  # some see less than others, and end in the middle of a block
    reads = joined(1, [(range(KEYS), KEYS, 0, range(count), [0] * count)])
    lowering = NativeLowering(native_library(*library), Dense(), reads, positions, geometry)
    exact = reference.attend(q.double(), k.double(), v.double(), list(reads.each()), positions, geometry)
    assert (poisoned(lowering, positions, q, q, k, v).double() - exact).abs().max() < tolerance(dtype)
