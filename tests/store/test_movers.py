"""Pages on their way into the pool."""

import ctypes
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from pando.kernels.copies import Addresses
from pando.kv.pages import Pages
from pando.kv.pool import PagePool
from pando.store.codec import codec
from pando.store.movers import Copy, CpuMover, CudaMover, Mover
from pando.store.tier import Shape

LAYERS, PAGES, SIZE = 3, 5, 4


def pool() -> PagePool:
    made = PagePool(Pages(PAGES, SIZE), layers=LAYERS, kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    made.k.normal_()
    made.v.normal_()
    return made


def mover(of: PagePool, monkeypatch: pytest.MonkeyPatch, name: str = "none") -> CudaMover:
    """As on a GPU, but for the copy engines."""

    def copy(to: Addresses, source: Addresses, sizes: Addresses, stream: object) -> None:
        for each in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*each)

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    monkeypatch.setattr("pando.store.movers.copy_many", lambda: copy)
    return CudaMover(of, shape(name), codec(name))


def shape(name: str) -> Shape:
    return Shape(b"model", LAYERS, 2, 8, "bfloat16", SIZE, name)


def slots(name: str, *tokens: int) -> list[torch.Tensor]:
    size = codec(name).layer_bytes(shape(name), SIZE)
    whole = torch.randint(0, 256, (len(tokens), LAYERS, size), dtype=torch.uint8)
    if name == "none":
        whole.view(torch.bfloat16).normal_()
    return list(whole)


def put(by: Mover, copies: list[Copy]) -> None:
    for layer in range(LAYERS):
        by.put(layer, copies)


@pytest.mark.parametrize("stays", [True, False])
def test_addresses_lead_to_where_pages_are_copied_one_by_one(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pool(), pool()
    other.k.copy_(one.k)
    other.v.copy_(one.v)
    tokens = (4, 1, 4, 3)
    copies = [Copy(page, count, data, stays) for page, count, data in zip((3, 0, 4, 1), tokens, slots("none", *tokens), strict=True)]
    put(CpuMover(one, shape("none"), codec("none")), copies)
    put(mover(other, monkeypatch), copies)
    assert torch.equal(one.k.view(torch.int16), other.k.view(torch.int16)) and torch.equal(
        one.v.view(torch.int16), other.v.view(torch.int16)
    )
    half = np.prod((4, 2, 8)) * 2
    assert torch.equal(one.k[1, 12:16].flatten().view(torch.uint8), copies[0].data[1, :half])
    assert torch.equal(one.v[2, 12:16].flatten().view(torch.uint8), copies[0].data[2, half : 2 * half])


def test_what_was_kept_in_8_bits_is_the_same_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pool(), pool()
    other.k.copy_(one.k)
    other.v.copy_(one.v)
    copies = [Copy(page, count, data, True) for page, count, data in zip((3, 0), (4, 2), slots("int8", 4, 2), strict=True)]
    for data in (copy.data for copy in copies):
        data[:] = 1  # scales that are numbers
    before = one.k.clone()
    put(CpuMover(one, shape("int8"), codec("int8")), copies)
    put(mover(other, monkeypatch, "int8"), copies)
    assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)
    assert not torch.equal(one.k[1, 12:16], before[1, 12:16]) and torch.equal(one.k[1, 2:4], before[1, 2:4])


def test_what_does_not_come_any_more_is_not_copied_and_other_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    there = pool()
    before, by = there.k.clone(), mover(there, monkeypatch)
    some = [Copy(page, 4, data, True) for page, data in zip((1, 2), slots("none", 4, 4), strict=True)]
    by.put(0, some)
    by.put(1, some[:1])
    by.put(2, [Copy(0, 4, some[0].data, True)])
    changed = [
        [not torch.equal(there.k[layer, p * 4 : p * 4 + 4], before[layer, p * 4 : p * 4 + 4]) for p in range(3)] for layer in range(LAYERS)
    ]
    assert changed == [[False, True, True], [False, True, False], [True, False, False]]
