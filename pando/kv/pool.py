"""The device tier: the K and V of every page, for every layer."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .pages import Pages


class Arrival(Protocol):
    def wait(self, layer: int) -> "torch.cuda.Event | None":
        """Until that layer is there; or, on a GPU, until it is known with what event it will be."""
        ...


class Departure(Protocol):
    def computed(self, layers: int) -> None:
        """So many layers hold what they will hold, or will when the device has done what it was asked."""
        ...


class PagePool:
    """Slot `page * page_size + offset` holds one token. A run of neighbouring pages is a plain slice of slots."""

    def __init__(self, pages: Pages, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = pages.page_size
        self.scratch = pages.count * pages.page_size  # on a GPU, where what pads a captured step is written: a page that nobody reads
        self.slots = self.scratch + (pages.page_size if device.type != "cpu" else 0)
        shape = (layers, self.slots, kv_heads, head_dim)
        self.k = _zeros(shape, dtype, device)  # [L, S, K, D]
        self.v = _zeros(shape, dtype, device)
        self._layers = tuple(zip(self.k, self.v, strict=True))  # looked up in every layer of every step
        self.arrivals: Sequence[Arrival] = ()  # what the step that runs reads, and is still on its way
        self.departure: Departure | None = None  # what it fills, and is on its way out

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """To be asked for when those before it are computed."""
        self.reach(index)
        return self._layers[index]

    def reach(self, layer: int) -> None:
        """Those before it are computed, and it is there for whatever is asked of the device from now on."""
        if self.departure is not None:
            self.departure.computed(layer)
        for event in {arrival.wait(layer) for arrival in self.arrivals} if self.arrivals else ():  # what comes together has one event
            if event is not None:
                event.wait()

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of one page into another, in every layer."""
        assert tokens <= self.page_size, (source, target, tokens)
        a, b = source * self.page_size, target * self.page_size
        self.k[:, b : b + tokens] = self.k[:, a : a + tokens]
        self.v[:, b : b + tokens] = self.v[:, a : a + tokens]

    @staticmethod
    def page_bytes(page_size: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed, because a masked slot still takes part in a product, and 0 x NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)  # calloc: memory is committed as pages are written
