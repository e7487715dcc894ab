"""Weights and pools in 8 bits: against what they were rounded from, and the GPU's kernels against the definition, through Triton's
interpreter where there is no GPU."""

from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pando.kernels import fp8, reference
from pando.kernels.fp8 import FP8, LARGEST, Scaled, scaled
from pando.kernels.linear import CpuLinear
from pando.kernels.native import NativeOps
from pando.kernels.ops import TorchOps
from pando.kernels.rope import frequencies, turns
from pando.model.decoder import plain_linear

from ..tiny import native_library
from .test_attention import Case

if TYPE_CHECKING:
    from pando.kernels.gpu import Device  # imports Triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF_A_STEP = 2.0**-4  # of a number with 3 bits behind the point
ROUNDED = 1.01 if DEVICE.type == "cuda" else 2.5  # times the error of rounding: the interpreter rounds down
LEAST = 2.0**-10  # half of the least step that there is
needs_gpu = pytest.mark.skipif(not fp8.multiplied(DEVICE), reason="needs a GPU that multiplies 8 bits")


@pytest.fixture(autouse=True)
def always_the_same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def gpu_linear(interpreted: None) -> ModuleType:
    from pando.kernels import gpu_linear

    return gpu_linear


def device(gpu_linear: ModuleType) -> "Device":
    found: Device = gpu_linear.Device.of(DEVICE)
    return found


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes."""
    return (torch.randn(shape, device=DEVICE) * torch.logspace(-6, 3, shape[0], device=DEVICE)[:, None]).to(dtype)


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_in_8_bits_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    x = draw(19, 300, dtype=dtype)
    found = scaled(x)
    assert found.codes.dtype == FP8 and found.scales.dtype == torch.float32 and found.nbytes == 19 * 300 + 19 * 4
    step = (HALF_A_STEP * x.double().abs()).clamp(min=LEAST * found.scales.double()[:, None])
    assert ((found.plain(torch.float64) - x.double()).abs() <= 1.001 * step).all()
    assert torch.equal(found.codes.float().abs().amax(1), torch.full((19,), LARGEST, device=DEVICE)), "no row reaches as far as it could"


def test_rows_are_rounded_each_for_itself_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(10, 40)
    whole = scaled(x)
    monkeypatch.setattr(fp8, "ROWS", 3)
    cut = scaled(x)
    assert torch.equal(whole.scales, cut.scales) and torch.equal(whole.codes.view(torch.uint8), cut.codes.view(torch.uint8))


def test_a_row_of_zeros_stays_one() -> None:
    assert not scaled(torch.zeros(2, 16)).plain(torch.float32).any()


def test_where_nothing_multiplies_8_bits_weights_are_made_plain() -> None:
    weight, bias, x = scaled(torch.randn(48, 32)), torch.randn(48), torch.randn(5, 32)
    exact = F.linear(x, weight.plain(torch.float32), bias)
    for linear in (plain_linear, CpuLinear([torch.randn(48, 32)], 0, None)):
        assert torch.equal(linear(weight, bias)(x), exact)
    assert off(exact, F.linear(x, torch.zeros(48, 32), bias)) > 0.1


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("size", [40, 576])
def test_rows_are_rounded_in_one_launch(gpu_linear: ModuleType, size: int) -> None:
    x = draw(7, size)
    found, exact = gpu_linear.rounded(device(gpu_linear), x), scaled(x)
    assert torch.allclose(found.scales, exact.scales, rtol=1e-6)
    assert off(found.plain(torch.float32), x) < ROUNDED * off(exact.plain(torch.float32), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_weights_of_8_bits_are_streamed_past_few_rows(gpu_linear: ModuleType, dtype: torch.dtype, tokens: int) -> None:
    for outputs, inputs in ((34, 72), (6, 2100), (4, 5000)):
        x, weight = torch.randn(tokens, inputs, device=DEVICE).to(dtype), scaled(draw(outputs, inputs))
        bias, plain = torch.randn(outputs, device=DEVICE).to(dtype), weight.plain(torch.float64)
        near = 1e-5 if dtype == torch.float32 else 8e-3
        assert off(gpu_linear.stream(device(gpu_linear), x, weight, None), F.linear(x.double(), plain)) < near
        assert off(gpu_linear.stream(device(gpu_linear), x, weight, bias), F.linear(x.double(), plain, bias.double())) < near
        gated = TorchOps().gate("silu")(F.linear(x.double(), plain))
        assert off(gpu_linear.stream(device(gpu_linear), x, weight, None, gated=True), gated) < 4 * near


@pytest.mark.gpu
def test_a_map_streams_so_many_rows_and_multiplies_more(gpu_linear: ModuleType) -> None:
    weight = scaled(torch.randn(64, 32, device=DEVICE))
    apply = gpu_linear.GpuLinear(device(gpu_linear), {(64, 32): 2})(weight, None)
    for rows in (0, 1, 2, 3, 9):
        x = torch.randn(rows, 32, device=DEVICE)
        exact = F.linear(x, weight.plain(torch.float32))
        assert apply(x).shape == (rows, 64)
        assert not rows or off(apply(x), exact) < 0.06  # a product rounds rows, too


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 48), (512, 1408), (4096, 11008), (40, 24)])  # the last is nothing that a GPU multiplies in 8 bits
def test_a_product_of_8_bits_is_that_of_what_they_stand_for(gpu_linear: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = scaled(torch.randn(shape, device=DEVICE)), torch.randn(shape[0], device=DEVICE).to(dtype)
    for rows in (1, 2, 17, 130):
        x = torch.randn(rows, shape[1], device=DEVICE).to(dtype)
        made = gpu_linear.rounded(device(gpu_linear), x).plain(torch.float64) if shape != (40, 24) else x.double()
        found = gpu_linear.product(device(gpu_linear), weight, bias)(x)
        assert found.dtype == dtype
        assert off(found, F.linear(made, weight.plain(torch.float64), bias.double())) < 4e-3


# ---- the pool


def written(ops: TorchOps, qkv: Tensor, kv_heads: int) -> Tensor:
    turn = turns(torch.tensor([5, 900, 2]), frequencies(qkv.shape[2], 1e4)[0]).to(DEVICE)
    pool = torch.zeros(2, 64, kv_heads, qkv.shape[2], device=DEVICE).to(FP8)
    ops.rotate_and_store(qkv, turn, torch.tensor([7, 3, 40], device=DEVICE), *pool)
    return pool


def some_states() -> Tensor:
    qkv = torch.randn(3, 6 + 2 * 2, 32, device=DEVICE)
    qkv[0, 8, 1], qkv[1, 9, 0], qkv[2, 8, 5] = 1e4, -1e4, torch.nan
    return qkv


def test_what_8_bits_do_not_reach_becomes_the_largest_and_nan_stays_nan() -> None:
    k, v = written(TorchOps(), some_states(), 2).float()
    assert (v[7, 0, 1], v[3, 1, 0]) == (LARGEST, -LARGEST)
    assert v[40, 0, 5].isnan() and v.isnan().sum() == 1 and k.isfinite().all()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about a CPU")
def test_c_leaves_a_pool_of_8_bits_to_torch() -> None:
    qkv = some_states()
    assert torch.equal(written(NativeOps(native_library()), qkv, 2).view(torch.uint8), written(TorchOps(), qkv, 2).view(torch.uint8))


@pytest.mark.gpu
def test_a_gpu_writes_the_pool_as_the_definition_does(gpu_linear: ModuleType) -> None:
    from pando.kernels.gpu_ops import TritonOps

    qkv = some_states()
    found, exact = (written(ops, qkv, 2).float() for ops in (TritonOps(device(gpu_linear)), TorchOps()))
    if DEVICE.type == "cuda":  # the interpreter knows no NaN of 8 bits
        assert torch.equal(found.isnan(), exact.isnan())
    found, exact = (x.where(~exact.isnan(), 0.0) for x in (found, exact))
    assert (found.abs().amax(), found.count_nonzero()) == (LARGEST, exact.count_nonzero())
    near = (found - exact).abs() <= (2 * HALF_A_STEP * exact.abs()).clamp(min=2 * LEAST)  # a step, where an angle differs a little
    assert near.all() if DEVICE.type == "cuda" else near.float().mean() > 0.9  # the interpreter forgets to carry


def test_the_definition_reads_a_pool_of_8_bits_as_the_numbers_it_holds() -> None:
    case = Case(4, "rope", tails=(11,), rows=3)
    case.k, case.v = case.k.to(FP8), case.v.to(FP8)
    q = torch.randn(len(case.positions), case.geometry.heads, case.geometry.head_dim)
    found, exact = (
        reference.attend(q, k, v, case.list, case.positions, case.geometry) for k, v in ((case.k, case.v), (case.k.float(), case.v.float()))
    )
    assert torch.equal(found, exact) and found.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "tail"), [(3, 65), (20, 5)])
def test_a_gpu_reads_a_pool_of_8_bits_as_the_definition_does(gpu_linear: ModuleType, rows: int, tail: int) -> None:
    from pando.kernels import gpu

    from .test_triton import check

    for size in (64, 16):
        case = Case(3, "rope", decoding=True, shape=(4, size, 16 // size or 1), tails=(tail,), rows=rows, page=16)
        case.k, case.v = case.k.to(FP8), case.v.to(FP8)
        check(gpu, case)


def test_a_scaled_weight_tells_its_size() -> None:
    made = Scaled(torch.zeros(4, 6, dtype=FP8), torch.ones(4))
    assert made.shape == (4, 6) and made.plain(torch.bfloat16).dtype == torch.bfloat16
