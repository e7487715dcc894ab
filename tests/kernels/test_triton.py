"""The GPU kernels against the definition, over random plans: through Triton's interpreter where there is no GPU."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from .test_attention import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    from pando.kernels import triton

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            from triton.runtime import interpreter

            once = interpreter._patch_lang_tensor

            def with_index(tensor: type, scope: object) -> None:
                """As NumPy wants it since 2.4: an array of one element is no number by itself."""
                once(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

            patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield triton


class OnDevice:
    """A lowering on the device, for a case whose tensors are in host memory. The answer is poisoned before it is written."""

    def __init__(self, kernels: ModuleType, case: Case) -> None:
        freqs, slopes = (None if x is None else x.to(DEVICE) for x in (case.geometry.freqs, case.geometry.slopes))
        geometry = case.geometry._replace(freqs=freqs, slopes=slopes)
        self.lowering = kernels.TritonLowering(DEVICE, case.reads, case.positions, geometry)

    def begin(self, positions: torch.Tensor) -> None:
        self.lowering.begin(positions)
        for result in (self.lowering._parts, self.lowering._peaks, self.lowering._sums):
            result.fill_(torch.nan)

    def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.lowering.attend(*(x.to(DEVICE) for x in tensors)).cpu()


SEEDS = range(12) if DEVICE.type == "cuda" else range(1, 5)
TAILS = (0, 3, 4, 11, 63, 64, 65, 300) if DEVICE.type == "cuda" else (0, 3, 4, 65)


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_the_gpu_path_equals_the_definition_over_random_plans(kernels: ModuleType, positions: str) -> None:
    moved = 0
    for seed in SEEDS:
        case = Case(seed, positions, tails=TAILS)
        moved += case.moves
        case.check({"triton": OnDevice(kernels, case)}, case.positions)  # type: ignore[dict-item]
    assert moved, "none of the plans placed a segment elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32])
@pytest.mark.parametrize("group", [1, 3, 8, 71])
def test_the_gpu_path_takes_heads_of_every_shape(kernels: ModuleType, group: int, dtype: torch.dtype) -> None:
    for size in (64, 80, 128, 256) if DEVICE.type == "cuda" else (64, 80):
        case = Case(group + size, "alibi", dtype, decoding=DEVICE.type == "cpu", shape=(group, size), tails=TAILS[:4], rows=3)
        case.check({"triton": OnDevice(kernels, case)}, case.positions)  # type: ignore[dict-item]


def test_a_plan_of_many_rows_over_one_prefix(kernels: ModuleType) -> None:
    rows = 300 if DEVICE.type == "cuda" else 20
    case = Case(3, "rope", decoding=True, shape=(4, 64), tails=(5,), rows=rows)
    case.check({"triton": OnDevice(kernels, case)}, case.positions)  # type: ignore[dict-item]
    for read in case.reads[-rows:]:
        case.write(read.slots[6:7])
    case.check({"triton": OnDevice(kernels, case)}, case.positions + 1)  # type: ignore[dict-item]
