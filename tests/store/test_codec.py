from dataclasses import replace

import pytest
import torch

from pando.errors import InvalidOption
from pando.store.codec import codec

from .pages import SHAPE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def drawn(dtype: str, tokens: int, seed: int = 0, heads: int = 2, dim: int = 4):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn((2, 3, tokens, heads, dim), generator=generator)
    k *= torch.logspace(-2, 2, dim)  # channels of very different size, as keys have
    return k.to(DTYPES[dtype]), v.to(DTYPES[dtype])


def there_and_back(name: str, k, v, dtype: str):
    shape = replace(SHAPE, dtype=dtype, codec=name, kv_heads=k.shape[2], head_dim=k.shape[3])
    made = codec(name)
    data = made.encode(k, v)
    assert data.dtype == torch.uint8 and data.shape == (k.shape[0], made.layer_bytes(shape, k.shape[1]))
    return made.decode(data, shape, k.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_none_gives_back_every_bit(dtype, tokens):
    k, v = drawn(dtype, tokens)
    k[0, 0], v[-1, -1] = float("nan"), float("inf")
    for given, back in zip((k, v), there_and_back("none", k, v, dtype), strict=True):
        assert back.dtype == given.dtype
        assert torch.equal(back.contiguous().view(torch.uint8), given.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_int8_is_off_by_half_a_step_of_its_channel_or_token(dtype, tokens):
    k, v = drawn(dtype, tokens)
    rounding = torch.finfo(DTYPES[dtype]).eps
    back_k, back_v = there_and_back("int8", k, v, dtype)
    for given, back, over in ((k, back_k, 1), (v, back_v, 3)):
        size = given.float().abs().amax(over, keepdim=True)
        assert back.dtype == given.dtype
        assert ((back.float() - given.float()).abs() <= size * (0.5 / 127 + rounding) * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_off_by_a_sixteenth_of_the_number(dtype):
    k, v = drawn(dtype, 8)
    back_k, back_v = there_and_back("fp8", k, v, dtype)
    for given, back, over in ((k, back_k, 1), (v, back_v, 3)):
        tiniest = given.float().abs().amax(over, keepdim=True) / 448 * 2**-10  # half of the smallest step
        allowed = given.float().abs() * (2**-4 + torch.finfo(DTYPES[dtype]).eps) + tiniest
        assert ((back.float() - given.float()).abs() <= allowed * 1.001).all()


@pytest.mark.parametrize("name", ["none", "int8", "fp8"])
def test_the_largest_of_each_channel_stays_within_rounding(name):
    k, v = drawn("float32", 8)
    back, _ = there_and_back(name, k, v, "float32")
    assert torch.allclose(back.abs().amax(1), k.abs().amax(1), rtol=1e-6)


@pytest.mark.parametrize("name", ["none", "int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_zeros_stay_zeros(name, tokens):
    k, v = torch.zeros(2, 3, tokens, 2, 4)
    for back in there_and_back(name, k, v, "float32"):
        assert torch.equal(back, torch.zeros_like(back))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_comes_back_as_none_and_spoils_nothing_else(name, value):
    k, v = drawn("float32", 8)
    clean_k, clean_v = there_and_back(name, k, v, "float32")
    k[1, 2, 1, 3] = v[1, 2, 1, 3] = value
    back_k, back_v = there_and_back(name, k, v, "float32")
    assert back_k[1, 2, 1, 3].isnan() and back_v[1, 2, 1, 3].isnan()
    assert back_k.isnan().sum() == back_v.isnan().sum() == 1
    assert torch.equal(back_k[0], clean_k[0]) and torch.equal(back_v[:, :2], clean_v[:, :2])


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e38])
def test_the_smallest_and_largest_numbers_stay_finite(name, size):
    k = torch.full((1, 4, 1, 2), size)
    for back in there_and_back(name, k, -k, "float32"):
        assert ((back.abs() - size).abs() <= size * 1e-6 + torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("name", ["none", "int8", "fp8"])
def test_one_layer_can_be_decoded_from_anywhere(name):
    """As it lies in a buffer between others, at an odd place, or with odd heads."""
    k, v = drawn("float16", 3, heads=3, dim=5)
    shape = replace(SHAPE, dtype="float16", codec=name, kv_heads=3, head_dim=5)
    made = codec(name)
    data = made.encode(k, v)
    whole = made.decode(data, shape, 3)
    buffer = torch.zeros(data.shape[1] + 2, dtype=torch.uint8)
    buffer[2:] = data[1]
    for one, all_layers in zip(made.decode(buffer[None, 2:], shape, 3), whole, strict=True):
        assert torch.equal(one[0], all_layers[1])


def test_eight_bits_take_about_half():
    shape = replace(SHAPE, kv_heads=8, head_dim=128, page_size=64)
    exact = codec("none").layer_bytes(shape, 64)
    for name in ("int8", "fp8"):
        assert codec(name).layer_bytes(shape, 64) < 0.53 * exact


def test_an_unknown_codec_is_refused():
    with pytest.raises(InvalidOption, match="none, fp8 or int8"):
        codec("zip")
