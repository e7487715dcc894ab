"""The tier in host memory: slabs of page slots, pinned where a GPU copies from them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..kv.segment import Key
from .tier import Card, Ends, Lost, Shape

SLAB = 256 * 2**20  # bytes that are taken at a time, when they are first needed


class _Kept:
    def __init__(self, card: Card, slot: int, payload: Tensor) -> None:
        self.card, self.slot, self.payload = card, slot, payload
        self.readers = 0
        self.dropped = False  # its slot is free when the last reader is done


class HostReader:
    """A page that stays where it is until this is closed. `payload` is the slot itself, for those who copy from it: [L, layer_bytes]."""

    def __init__(self, tier: "HostTier", kept: _Kept) -> None:
        self.card, self.payload = kept.card, kept.payload
        self._tier = tier
        self._kept: _Kept | None = kept

    def layer(self, index: int, into: memoryview) -> None:
        np.frombuffer(into, np.uint8)[:] = self.payload[index, : into.nbytes].numpy()

    def close(self) -> None:
        if self._kept is not None:
            self._tier.release(self._kept)
            self._kept = None


class HostTier:
    """Pages in slots of one size: `layer_bytes` is what a layer of a full page takes, and a short end uses the beginning of each layer."""

    name = "host"

    def __init__(self, shape: Shape, pages: int, layer_bytes: int, pinned: bool) -> None:
        self.pages = pages
        self._shape = shape
        self._each = max(1, SLAB // (shape.layers * layer_bytes))  # pages of a slab
        self._size, self._pinned = (self._each, shape.layers, layer_bytes), pinned
        self._slabs: dict[int, Tensor] = {}
        if pinned:  # at the start: while memory is pinned, a GPU can be asked for nothing
            for first in range(0, pages, self._each):
                self._slot(first)
        self._free = list(range(pages - 1, -1, -1))
        self._kept: dict[Key, _Kept] = {}
        self._begun: dict[Key, int] = {}  # the slots of pages that are being written
        self._ends = Ends()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def free(self) -> int:
        """Slots that a page can be written to."""
        return len(self._free)

    def look(self, keys: Sequence[Key]) -> int:
        with self._lock:
            return next((place for place, key in enumerate(keys) if key not in self._kept), len(keys))

    def ends(self, parent: Key) -> Sequence[Card]:
        with self._lock:
            return self._ends.behind(parent)

    def open(self, key: Key) -> HostReader:
        with self._lock:
            if (kept := self._kept.get(key)) is None:
                raise Lost("absent")
            kept.readers += 1
            return HostReader(self, kept)

    @contextmanager
    def reading(self, keys: Sequence[Key]) -> Iterator[list[Tensor | None]]:
        """The slots [L, layer_bytes] of those pages that are here, for who copies from them: they stay where they are meanwhile."""
        with self._lock:
            found = [self._kept.get(key) for key in keys]
            for kept in found:
                if kept is not None:
                    kept.readers += 1
        try:
            yield [None if kept is None else kept.payload for kept in found]
        finally:
            with self._lock:
                for kept in found:
                    if kept is not None:
                        self._leave(kept)

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        slot = self.begin(card)
        if slot is None:
            return
        try:
            for row, layer in zip(slot.numpy(), layers, strict=True):
                row[: layer.nbytes] = np.frombuffer(layer, np.uint8)
        except BaseException:
            self.abort(card)
            raise
        self.commit(card)

    def drop(self, keys: Sequence[Key]) -> None:
        """They are not found any more from now on; the slot of one that is read is free when its last reader is closed."""
        if not keys:
            return
        with self._lock:
            for key in keys:
                if (kept := self._kept.pop(key, None)) is None:
                    continue
                self._ends.drop(kept.card.parent, key)
                kept.dropped = True
                if not kept.readers:
                    self._free.append(kept.slot)

    def close(self) -> None:
        """Nothing outlives it."""

    def _slot(self, slot: int) -> Tensor:
        which, place = divmod(slot, self._each)
        if which not in self._slabs:
            empty = torch.empty(self._size, dtype=torch.uint8, pin_memory=True) if self._pinned else None
            self._slabs[which] = empty if empty is not None else torch.from_numpy(np.zeros(self._size, np.uint8))
        return self._slabs[which][place]

    def release(self, kept: _Kept) -> None:
        with self._lock:
            self._leave(kept)

    def _leave(self, kept: _Kept) -> None:
        kept.readers -= 1
        if kept.dropped and not kept.readers:
            self._free.append(kept.slot)

    # ---- for those who copy to the slab themselves

    def begin(self, card: Card) -> Tensor | None:
        """A slot [L, layer_bytes] to write the page to, then `commit` or `abort`; None where that is done or begun. Raises Lost where all
        are taken."""
        with self._lock:
            if card.key in self._kept or card.key in self._begun:
                return None
            if not self._free:
                raise Lost("full", f"all {self.pages} pages of host memory are taken")
            found = self._slot(self._free[-1])  # it may take memory, and fail
            self._begun[card.key] = self._free.pop()
            return found

    def commit(self, card: Card) -> None:
        """The page is written: from now on it is found."""
        with self._lock:
            slot = self._begun.pop(card.key)
            self._kept[card.key] = _Kept(card, slot, self._slot(slot))
            if len(card.tokens) < self._shape.page_size:
                self._ends.add(card)

    def abort(self, card: Card) -> None:
        with self._lock:
            self._free.append(self._begun.pop(card.key))
