"""The tiers as one cache, with more pages than an engine of a test has."""

import time

import torch

from pando.kv.pages import Pages
from pando.kv.pool import PagePool
from pando.store.codec import codec
from pando.store.host import HostTier
from pando.store.ledger import Ledger
from pando.store.movers import mover_of
from pando.store.policy import LRU
from pando.store.sought import Found, Part
from pando.store.store import Store
from pando.store.tier import Shape
from pando.store.transfer import Transfer

from .pages import card, keys


def test_what_a_long_load_brought_is_taken_in_in_a_moment() -> None:
    count, size = 12_000, 8  # pages, and bytes of each
    shape, packed = Shape(model=bytes(32), layers=1, kv_heads=1, head_dim=1, dtype="float32", page_size=1), codec("none")
    pool = PagePool(Pages(count, 1), layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    host, disk = (HostTier(shape, count, size, pinned=False) for _ in range(2))
    disk.name = "disk"
    cards = [card(place, tokens=1) for place in range(count)]
    for one in cards:
        disk.save(one, [memoryview(bytes(size))])
    ledger = Ledger({"host": count * size, "disk": count * size}, LRU())
    ledger.keep("disk", [(key, size) for key in keys(cards)], now=0)
    store = Store(Transfer(shape, packed, mover_of(pool, shape, packed), host, [disk], reserve=0), ledger, [disk], buffer=16)
    load = store.load(Found(tuple(Part(one, "disk") for one in cards), count), keys(cards), range(count))
    store.go()
    assert load.finish() and load.lost is None
    start = time.thread_time()
    store.pump()
    assert time.thread_time() - start < 1
    assert ledger.find(keys(cards)) == ["host"] * count
    store.close()
