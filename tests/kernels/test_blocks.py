"""Weights as codes: what a block is, and that linear maps which read codes multiply by the very same numbers."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pando.kernels import blocks, linear
from pando.kernels.blocks import BYTES, HALVES, NIBBLES, SHORT
from pando.kernels.linear import ROWS, CpuLinear
from pando.kernels.native import Coded, Dense, NativeLowering, NativeOps, coded_linear, native_linear
from pando.kernels.ops import Maps
from pando.kernels.reads import joined
from pando.kernels.reference import Geometry
from pando.kernels.rope import frequencies, turns

from ..tiny import native_library
from .steps import by_steps

KINDS = [NIBBLES, BYTES, SHORT]
ALL_KINDS = [*KINDS, HALVES]
TILES = (torch.bfloat16, "-DTILES_IN_C")
LIBRARIES = [(torch.float32,), (torch.float32, "-DWIDTH=4"), (torch.float32, "-DWIDTH=8"), (torch.bfloat16,), TILES]


def random_parts(kind: int, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales of as many digits as checkpoints have, and offsets."""
    make = np.random.default_rng(outputs * inputs + kind)
    lowest, highest, group = (0, 15, 32) if kind == NIBBLES else (-128, 127, 16 if kind == SHORT else 32)
    codes = make.integers(lowest, highest, (outputs, inputs), endpoint=True).astype(np.int16)
    codes[0, :2] = lowest, highest
    scales, offsets = make.standard_normal((2, outputs, inputs // group)).astype(np.float16).astype(np.float32) / 100
    return codes, scales.astype(np.float16).astype(np.float32), offsets


def random_weight(kind: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain, and as codes."""
    if kind == HALVES:
        weight = torch.randn(outputs, inputs).to(torch.bfloat16)
        return weight.to(dtype), weight.view(torch.uint8)
    made = blocks.encode(kind, *random_parts(kind, outputs, inputs))
    return torch.from_numpy(blocks.plain(made, inputs)).to(dtype), torch.from_numpy(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_holds_codes_a_scale_and_an_offset(kind: int) -> None:
    codes, scales, offsets = random_parts(kind, 6, 96)
    made = blocks.encode(kind, codes, scales, offsets)
    assert made.dtype == np.uint8 and made.shape == (6, 96 // 4 * kind)
    assert blocks.kind_of(made.shape[1], 96) == kind
    assert all(map(np.array_equal, blocks.decode(made, 96), (codes, scales, offsets)))
    group = 96 // scales.shape[1]
    exact = codes.astype(np.float64) * scales.repeat(group, 1) + offsets.repeat(group, 1)
    assert np.array_equal(blocks.plain(made, 96), exact.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_become_short_blocks_of_the_same_weights(kind: int) -> None:
    made = blocks.encode(kind, *random_parts(kind, 5, 64))
    short = blocks.shortened(made, 64)
    assert blocks.kind_of(short.shape[1], 64) == SHORT
    assert np.array_equal(blocks.plain(short, 64), blocks.plain(made, 64))


def test_numbers_of_16_bits_are_codes_as_they_are() -> None:
    weight, codes = random_weight(HALVES, 6, 64)
    assert blocks.kind_of(codes.shape[1], 64) == HALVES
    assert np.array_equal(blocks.plain(codes.numpy(), 64), weight.numpy())


@pytest.mark.parametrize(("size", "inputs"), [(48, 63), (47, 64), (64, 64), (0, 32), (12, 16), (256, 64)])
def test_bytes_that_are_no_blocks_are_refused(size: int, inputs: int) -> None:
    with pytest.raises(ValueError, match="no row of blocks"):
        blocks.kind_of(size, inputs)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_map_of_codes_has_the_very_weights(library: tuple[Any, ...], kind: int) -> None:
    """Each input but one is zero, so that what comes out is a weight."""
    for outputs in (21, 48):  # 16 at a time may go through tiles
        weight, codes = random_weight(kind, outputs, 96)
        apply = coded_linear(native_library(*library), weight, None, codes)
        for rows in (1, 96):  # one by one, and many at a time
            found = torch.cat([apply(part) for part in torch.eye(96, dtype=library[0]).split(rows)])
            assert torch.equal(found.T, weight.to(library[0]))


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("rows", [2, 16, 33, 64, 65, 130])
def test_by_tiles_codes_and_plain_weights_give_the_same_to_the_last_bit(kind: int, rows: int) -> None:
    defined, here = native_library(*TILES), native_library(torch.bfloat16)
    for c in (defined, here) if here.tiles else (defined,):
        for inputs in (32, 64, 96, 576):
            weight, codes = random_weight(kind, 32, inputs, torch.bfloat16)
            x, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(32).bfloat16()
            assert torch.equal(coded_linear(c, weight, bias, codes)(x), native_linear(c, weight, bias)(x))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17])
def test_a_map_of_codes_is_the_map_of_the_weight(library: tuple[Any, ...], kind: int, rows: int) -> None:
    dtype, c = library[0], native_library(*library)
    for outputs, inputs in ((64, 576), (7, 32), (3, 160), (1, 96)):
        weight, codes = random_weight(kind, outputs, inputs)
        x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
        for given in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
            out = coded_linear(c, weight, given, codes)(x)
            assert out.shape == exact.shape
            added = F.linear(x.double().abs(), weight.double().abs()) + 1  # what roundings of a sum are to be measured by
            assert ((out.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * added).all()


def test_a_map_of_codes_keeps_them_alive_and_the_weight_not() -> None:
    weight, codes = random_weight(NIBBLES, 64, 64)
    x, gone = torch.randn(1, 64), weakref.ref(weight)
    apply, expected = coded_linear(native_library(), weight, torch.ones(64), codes.clone()), F.linear(x, weight) + 1
    del weight
    gc.collect()
    filler = [torch.zeros(64, 48, dtype=torch.uint8) for _ in range(50)]
    assert torch.allclose(apply(x), expected, atol=1e-5) and filler
    assert gone() is None


def told(monkeypatch: pytest.MonkeyPatch, *best: str) -> None:
    """The measurement comes out so, for each of the numbers of rows."""

    def found(samples: object, forms: dict[str, object]) -> dict[int, dict[str, float]]:
        return {rows: {form: 1.0 if form == each else 3.0 for form in forms} for rows, each in zip(ROWS, best, strict=True)}

    monkeypatch.setattr(linear, "_measure", found)


def test_codes_are_read_where_that_is_quickest_and_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, "coded", "coded", "coded", "native", "torch")
    weight, codes = random_weight(NIBBLES, 40, 64)
    make = CpuLinear([weight], 0, native_library(), {weight.data_ptr(): codes})
    few, some = make.serves("coded"), make.serves("native")
    assert few is not None and some is not None and make.serves("packed") is None
    assert [(few(rows), some(rows)) for rows in (1, 16, 17, 64, 65)] == [(True, False)] * 2 + [(False, True)] * 2 + [(False, False)]
    plain = torch.randn(40, 64)
    for each in (weight, plain):
        apply = make(each, None)
        for rows in (1, 5, 40, 100):
            x = torch.randn(rows, 64)
            assert torch.allclose(apply(x), F.linear(x, each), atol=1e-4)
    codes.zero_()  # seen by those who read them
    x = torch.randn(1, 64)
    assert not make(weight, None)(x).any() and make(plain, None)(x).any() and make(weight, None)(torch.randn(40, 64)).any()


def test_without_any_codes_they_are_no_form() -> None:
    weight, codes = random_weight(NIBBLES, 40, 64)
    known = {weight.data_ptr(): codes}
    assert "coded" in CpuLinear([weight], 0, native_library(), known).forms
    assert "coded" in CpuLinear([torch.randn(40, 64), weight], 0, native_library(), known).forms, "some weights have them"
    assert "coded" not in CpuLinear([weight], 0, native_library(), {}).forms
    assert "coded" not in CpuLinear([weight], 0, None, known).forms


def test_codes_and_a_packed_layout_leave_no_plain_weight_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """But while a model is loaded there is, so that the layout has to be spared."""
    told(monkeypatch, "coded", "coded", "coded", "packed", "packed")
    weight, codes = random_weight(NIBBLES, 40, 64)
    assert CpuLinear([weight], weight.nbytes - 1, native_library(), {weight.data_ptr(): codes})(weight, None)(weight).shape == (40, 40)
    make = CpuLinear([weight], weight.nbytes, native_library(), {weight.data_ptr(): codes})
    apply, gone = make(weight, None), weakref.ref(weight)
    assert make.spare == 0
    few, exact = torch.randn(1, 64), weight.double()
    many = torch.randn(40, 64)
    assert torch.allclose(apply(few).double(), F.linear(few.double(), exact), atol=1e-5)
    assert torch.allclose(apply(many).double(), F.linear(many.double(), exact), atol=1e-5)
    del weight
    gc.collect()
    assert gone() is None


def coded_maps(dtype: torch.dtype) -> tuple[Maps, dict[int, torch.Tensor]]:
    """Of 4 and 2 heads of 32, with maps of all kinds, biases, and norms of queries and keys."""
    made = [random_weight(*each, dtype=dtype) for each in ((NIBBLES, 256, 96), (SHORT, 96, 128), (BYTES, 128, 96), (HALVES, 96, 64))]
    qkv, o, up, down = ((weight, torch.randn(len(weight)).to(dtype)) for weight, _ in made)
    norm, qk_norm = torch.ones(96, dtype=dtype), (1 + torch.randn(6, 32) / 4).to(dtype)
    known = {weight.data_ptr(): codes for weight, codes in made}
    return Maps(norm, qkv, qk_norm, o, norm, up, down, 4, 2, 32, 1e-5), known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_layer_of_codes_in_one_call_is_its_steps_one_by_one(dtype: torch.dtype, rows: int) -> None:
    c, (maps, known), geometry = native_library(dtype), coded_maps(dtype), Geometry(4, 2, 32, 32**-0.5, frequencies(32, 1e4)[0])
    ops = NativeOps(c, None, Coded(known, lambda rows: rows < 9))
    at = 20 + torch.arange(rows)
    turn, slots = turns(at, frequencies(32, 1e4)[0]), 16 + at
    pools, x = torch.randn(2, 144, 2, 32).to(dtype), torch.randn(rows, 96).to(dtype)
    lowering = NativeLowering(c, Dense(), joined(16, [(list(range(1, 9)), 20 + rows, 0, range(rows), [0] * rows)]), at, geometry)

    given = (maps.qkv, maps.o, maps.up, maps.down)
    by_codes = [coded_linear(c, weight, bias, known[weight.data_ptr()]) for weight, bias in given]
    stream, (k, v) = x.clone(), pools.clone()
    found = by_steps(ops, maps, by_codes, stream, None, turn, slots, lowering.attend, k, v)

    whole, others, (other_k, other_v) = ops.whole(maps), x.clone(), pools.clone()
    assert whole is not None
    done = whole(others, None, turn, slots, lowering.attend, other_k, other_v)
    if rows == 9:
        assert done is None and torch.equal(others, x), "more rows than codes are the best for"
        return
    assert done is not None
    for mine, one_by_one in ((done, found), (others, stream), (other_k, k), (other_v, v)):
        assert mine.isfinite().all() and torch.equal(mine, one_by_one)


def test_a_layer_of_which_one_map_has_no_codes_is_not_done_by_codes() -> None:
    """Its plain weight may be let go, and another form be quicker."""
    maps, known = coded_maps(torch.float32)
    assert NativeOps(native_library(), None, Coded(known, lambda rows: True)).whole(maps) is not None
    del known[maps.down[0].data_ptr()]
    assert NativeOps(native_library(), None, Coded(known, lambda rows: True)).whole(maps) is None
