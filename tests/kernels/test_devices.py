"""The kernels fit the memory of processors that are not here: Triton compiles them for any device, and says what they need."""

from importlib.util import find_spec
from typing import Any

import pytest

from pando.kernels.reference import Geometry

from . import elsewhere

SHARING: dict[str, tuple[elsewhere.Case, int]] = {  # at most so many KiB
    "Turing": (("attention", [75, 32, 8, 128, "float16"]), 64),
    "Ada": (("attention", [89, 32, 8, 128, "bfloat16"]), 99),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton")
    cases = {name: case for name, (case, _) in SHARING.items()}
    if all(map(find_spec, ("triton.experimental", "triton.experimental.gluon"))):
        cases["Hopper"] = "hopper", []
    return dict(zip(cases, elsewhere.found(list(cases.values())), strict=True))


@pytest.mark.parametrize("device", SHARING)
def test_attention_needs_no_more_shared_memory_than_a_processor_has(found: dict[str, Any], device: str) -> None:
    needed, most = found[device], SHARING[device][1]
    assert {name for name, _ in needed} >= {"begin", "look", "merge"}
    assert len({shared for name, shared in needed if name == "look"}) >= 2  # large tiles and small ones
    assert max(shared for _, shared in needed) <= most * 1024


def test_large_tiles_are_compiled_for_hopper_and_leave_shared_memory_to_others(found: dict[str, Any]) -> None:
    pytest.importorskip("triton.experimental.gluon")
    warps, shared, multiplies, fetches = found["Hopper"]
    assert (warps, multiplies, fetches) == (12, True, True)
    assert shared < (228 - 64) * 1024


def test_before_ampere_wide_heads_have_fewer_rows_and_large_groups_fit_a_tile() -> None:
    pytest.importorskip("triton")
    from pando.kernels.gpu_tiles import LARGE, LARGEST, SHORT, suited

    def rows(heads: int, size: int) -> int:
        return suited(LARGE, Geometry(heads, 1, size, 1.0), (7, 5)).rows

    assert [rows(8, 64), rows(8, 128), rows(8, 256), rows(60, 256)] == [64, 64, 32, 64]
    assert suited(LARGEST, Geometry(8, 1, 128, 1.0), (8, 0)) == LARGEST
    assert suited(SHORT, Geometry(8, 1, 256, 1.0), (7, 5)) == SHORT
