"""The pool's pages as bytes: how they are copied out of it and into it, beside the computation."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.copies import copy_many
from ..kv.pool import PagePool
from .codec import Codec
from .tier import Shape


class Copy(NamedTuple):
    """Into a page of the pool: so many tokens, whose bytes stand at the beginning of each layer of [L, layer_bytes]."""

    page: int
    tokens: int
    data: Tensor
    stays: bool  # in pinned memory, if there is a GPU


Numbers = NDArray[np.uint64]


class Pieces(NamedTuple):
    """Copies of keys and of values as addresses, for layer 0."""

    to: Numbers
    source: Numbers
    stride: int  # bytes from a layer to the next one, of the source
    sizes: Numbers

    @classmethod
    def of(cls, copies: "Sequence[Copy]", pool: PagePool) -> "Pieces":
        """All of them come from slots of one size."""
        facts = [copy.page for copy in copies], [copy.tokens for copy in copies], [copy.data.data_ptr() for copy in copies]
        page, tokens, source = (np.array(numbers, dtype=np.uint64) for numbers in facts)
        slot = np.uint64(pool.k.nbytes // pool.k.shape[:2].numel())
        size, start = tokens * slot, page * np.uint64(pool.page_size) * slot
        k, v = (np.uint64(each.data_ptr()) for each in (pool.k, pool.v))
        to, source, sizes = map(np.concatenate, ((k + start, v + start), (source, source + size), (size, size)))
        return cls(to, source, copies[0].data.stride(0), sizes)

    def at(self, layer: int, layer_bytes: int) -> tuple[Numbers, Numbers]:
        """Where to and where from; `layer_bytes`: of the pool, keys or values."""
        return self.to + np.uint64(layer * layer_bytes), self.source + np.uint64(layer * self.stride)


class Take(NamedTuple):
    """Out of a page of the pool: some layers of its first tokens."""

    page: int
    tokens: int
    layers: range
    into: Tensor  # [L, layer_bytes], each layer in its place; in pinned memory, if there is a GPU


class Mover(Protocol):
    """The pool's pages as bytes."""

    def mark(self) -> "torch.cuda.Event | None":
        """What was computed so far; `take` waits for it."""
        ...

    def take(self, takes: "Sequence[Take]", computed: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        """Answers with what event they are there; where it raises, nothing is on its way."""
        ...

    def follow(self, computed: "torch.cuda.Event | None") -> None:
        """What is put from now on is put after that."""
        ...

    def put(self, layer: int, copies: "Sequence[Copy]") -> None:
        """One layer's bytes into pages. Where the next layer's come from and go to the same, it is the same sequence."""
        ...

    def fence(self) -> "torch.cuda.Event | None":
        """What was put so far."""
        ...

    def drain(self) -> None:
        """Waits until all of it is there."""
        ...


class CpuMover:
    """By numpy, which copies in the thread that asks: torch would start a second pool of threads and take the cores from the model."""

    def __init__(self, pool: PagePool, shape: Shape, codec: Codec) -> None:
        self._pool, self._shape, self._codec = pool, shape, codec
        self._slot_bytes = pool.k[0, 0].nbytes
        self._k, self._v = (each.view(torch.uint8).numpy().reshape(shape.layers, -1) for each in (pool.k, pool.v))

    def mark(self) -> None: ...

    def fence(self) -> None: ...

    def drain(self) -> None: ...

    def follow(self, computed: "torch.cuda.Event | None") -> None: ...

    def take(self, takes: "Sequence[Take]", computed: "torch.cuda.Event | None") -> None:
        for page, tokens, layers, into in takes:
            some, start, size = slice(layers.start, layers.stop), page * self._pool.page_size * self._slot_bytes, tokens * self._slot_bytes
            if self._shape.codec == "none":
                kept = into.numpy()
                kept[some, :size] = self._k[some, start : start + size]
                kept[some, size : 2 * size] = self._v[some, start : start + size]
            else:
                slots = slice(page * self._pool.page_size, page * self._pool.page_size + tokens)
                data = self._codec.encode(self._pool.k[some, slots], self._pool.v[some, slots])
                into[some, : data.shape[1]] = data

    def put(self, layer: int, copies: "Sequence[Copy]") -> None:
        for page, tokens, data, _ in copies:
            start, size = page * self._pool.page_size * self._slot_bytes, tokens * self._slot_bytes
            if self._shape.codec == "none":
                kept = data.numpy()[layer]
                self._k[layer, start : start + size] = kept[:size]
                self._v[layer, start : start + size] = kept[size : 2 * size]
            else:
                slots = slice(page * self._pool.page_size, page * self._pool.page_size + tokens)
                k, v = self._codec.decode(data[layer : layer + 1, : self._codec.layer_bytes(self._shape, tokens)], self._shape, tokens)
                self._pool.k[layer, slots], self._pool.v[layer, slots] = k[0], v[0]


class CudaMover:
    """On streams of its own, from and to pinned memory."""

    def __init__(self, pool: PagePool, shape: Shape, codec: Codec) -> None:
        self._pool, self._shape, self._codec = pool, shape, codec
        self._loads, self._saves = torch.cuda.Stream(pool.k.device), torch.cuda.Stream(pool.k.device)
        self._copy_many = copy_many()
        self._given: Sequence[Copy] = ()  # what is being put, and how
        self._pieces: Pieces | None = None
        self._others: list[Copy] = []

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._pool.k.device))
        return event

    def follow(self, computed: "torch.cuda.Event | None") -> None:
        if computed is not None:
            self._loads.wait_event(computed)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._loads)
        return event

    def drain(self) -> None:
        self._loads.synchronize()

    def take(self, takes: "Sequence[Take]", computed: "torch.cuda.Event | None") -> torch.cuda.Event:
        event = torch.cuda.Event()
        with torch.cuda.stream(self._saves):
            if computed is not None:
                self._saves.wait_event(computed)
            try:
                (self._take_encoded if self._copy_many is None or self._shape.codec != "none" else self._take_many)(takes)
            except BaseException:
                self._saves.synchronize()  # who hears of it may give their memory away
                raise
            event.record(self._saves)
        return event

    def _take_many(self, takes: "Sequence[Take]") -> None:
        assert self._copy_many is not None
        facts = [
            (take.page, take.tokens, layer, take.into.data_ptr() + layer * take.into.stride(0)) for take in takes for layer in take.layers
        ]
        page, tokens, layer, target = np.array(facts, dtype=np.uint64).T
        slot = np.uint64(self._pool.k[0, 0].nbytes)
        size, start = tokens * slot, layer * np.uint64(self._pool.k[0].nbytes) + page * np.uint64(self._pool.page_size) * slot
        k, v = (np.uint64(each.data_ptr()) for each in (self._pool.k, self._pool.v))
        self._copy_many(np.concatenate((target, target + size)), np.concatenate((k + start, v + start)), np.tile(size, 2), self._saves)

    def _take_encoded(self, takes: "Sequence[Take]") -> None:
        """A layer of all pages at a time: a page at a time would be many more kernels, all layers of all pages much more memory."""
        places: dict[tuple[int, int], list[Take]] = {}
        for take in takes:
            for layer in take.layers:
                places.setdefault((layer, take.tokens), []).append(take)
        for (layer, tokens), some in places.items():
            starts = [take.page * self._pool.page_size for take in some]
            k, v = (torch.stack([pool[layer, start : start + tokens] for start in starts]) for pool in (self._pool.k, self._pool.v))
            for take, data in zip(some, self._codec.encode(k, v), strict=True):
                take.into[layer, : len(data)].copy_(data, non_blocking=True)

    def put(self, layer: int, copies: "Sequence[Copy]") -> None:
        """What lies in pinned memory comes by one call: one for each would hold up the thread that computes."""
        if copies is not self._given:
            direct, self._others = list[Copy](), list[Copy]()
            least = 0 if self._copy_many is not None else self._pool.page_size
            for copy in copies:
                is_direct = copy.stays and copy.tokens >= least and self._shape.codec == "none"
                (direct if is_direct else self._others).append(copy)
            self._given, self._pieces = copies, Pieces.of(direct, self._pool) if direct else None
        with torch.cuda.stream(self._loads):
            if self._pieces is not None:
                self._put_directly(layer, self._pieces)
            for page, tokens, data, _ in self._others:
                slots = slice(page * self._pool.page_size, page * self._pool.page_size + tokens)
                k, v, row = self._pool.k[layer, slots], self._pool.v[layer, slots], data[layer]
                if self._shape.codec == "none":
                    k.view(torch.uint8).view(-1).copy_(row[: k.nbytes], non_blocking=True)
                    v.view(torch.uint8).view(-1).copy_(row[k.nbytes : 2 * k.nbytes], non_blocking=True)
                else:
                    row = row[: self._codec.layer_bytes(self._shape, tokens)]
                    new = self._codec.decode(row.to(k.device, non_blocking=True)[None], self._shape, tokens)
                    k.copy_(new[0][0])
                    v.copy_(new[1][0])

    def _put_directly(self, layer: int, pieces: Pieces) -> None:
        to, source = pieces.at(layer, self._pool.k[0].nbytes)
        if self._copy_many is not None:
            self._copy_many(to, source, pieces.sizes, self._loads)
            return
        from ..kernels.gpu import fetch

        pages = len(to) // 2
        keys = (to[:pages] - np.uint64(self._pool.k[layer].data_ptr())) // pieces.sizes[:pages]
        where = torch.from_numpy(np.stack((source[:pages], keys)).astype(np.int64)).pin_memory()
        fetch(where.to(self._pool.k.device, non_blocking=True), self._pool.k[layer], self._pool.v[layer], self._pool.page_size)


def mover_of(pool: PagePool, shape: Shape, codec: Codec) -> Mover:
    return (CpuMover if pool.k.device.type == "cpu" else CudaMover)(pool, shape, codec)
