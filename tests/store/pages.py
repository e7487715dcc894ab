"""Pages for tests: small, and different from each other."""

import hashlib
import random
from collections.abc import Sequence
from contextlib import closing

from pando.kv.segment import Key, page_key, root_key
from pando.store.disk import DiskTier
from pando.store.folder import Folder
from pando.store.tier import Card, Reader, Shape

SHAPE = Shape(model=hashlib.sha256(b"a model").digest(), layers=3, kv_heads=2, head_dim=4, dtype="bfloat16", page_size=8)
LAYER = 2 * SHAPE.page_size * SHAPE.kv_heads * SHAPE.head_dim * 2
TENANT = hashlib.sha256(b"tenant").digest()
ROOT = root_key(SHAPE.model, b"")


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def card(first: int = 0, tokens: int = SHAPE.page_size, parent: Key = ROOT, tenant: bytes = TENANT) -> Card:
    words = tuple(range(first, first + tokens))
    return Card(page_key(parent, words), parent, tenant, words)


def chain(pages: int, start: int = 0, tenant: bytes = TENANT) -> list[Card]:
    cards: list[Card] = []
    for place in range(pages):
        cards.append(card(start + place, parent=cards[-1].key if cards else root_key(SHAPE.model, tenant), tenant=tenant))
    return cards


def layers(of: Card, shape: Shape = SHAPE, size: int = LAYER) -> list[memoryview]:
    """The same bytes for the same key, always; a short end has less of them."""
    draw = random.Random(of.key)
    return [memoryview(draw.randbytes(size * len(of.tokens) // shape.page_size)) for _ in range(shape.layers)]


def read(reader: Reader, size: int = LAYER, shape: Shape = SHAPE) -> list[bytes]:
    try:
        buffers = [bytearray(size * len(reader.card.tokens) // shape.page_size) for _ in range(shape.layers)]
        for index, buffer in enumerate(buffers):
            reader.layer(index, memoryview(buffer))
        return [bytes(buffer) for buffer in buffers]
    finally:
        reader.close()


def data(of: Card) -> list[bytes]:
    return [bytes(layer) for layer in layers(of)]


def keys(cards: Sequence[Card]) -> list[Key]:
    return [one.key for one in cards]


def pin(disk: DiskTier, keys: Sequence[Key], pinned: bool = True) -> None:
    disk._folder.pin([(disk._tag, key) for key in keys], pinned)


def purge(disk: DiskTier, tenant: bytes) -> int:
    """As `pando cache purge` does, in another process."""
    with closing(Folder(disk._folder._directory)) as folder:
        names = [(entry.shape, entry.key) for entry in folder.entries("tenant = ?", [tenant])]
        return folder.purge(names, "tenant = ?", [tenant])
