"""Few numbers between pinned memory and a device.

They go by a kernel and not by a copy engine: that does what it was asked for in order, whoever asked, and a step would wait for all that is
being loaded into the pool, or saved from it, at that moment.
"""

import threading
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from .launch import Launches, kind_of

BLOCK = 1024  # numbers that a program brings


def by_kernel(kernel: Any, source: Tensor, target: Tensor) -> None:
    """Both lie in one piece. In numbers of 4 bytes, where they can be taken for such."""
    there = source if source.is_cuda else target
    one, other = (source, target) if source.dtype == target.dtype == torch.int32 and source.dim() == 1 else _flat(source, target)
    _launch(kernel, (kind_of(one, other), there.device.index), (-(-len(one) // BLOCK),), one, other, len(one), BLOCK)


def _flat(*tensors: Tensor) -> Iterator[Tensor]:
    """All of them as numbers of 4 bytes, or of one."""
    kind = torch.uint8 if any((tensor.nbytes | tensor.data_ptr()) % 4 for tensor in tensors) else torch.int32
    return (tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).view(kind) for tensor in tensors)


_launch = Launches()


@cache
def _kernel(where: torch.device) -> Any:
    """None: there is no Triton, or it does not work here, which attention says."""
    try:
        from .triton import bring as kernel

        with torch.cuda.device(where):
            here, back = torch.arange(8, dtype=torch.int32).pin_memory(), torch.zeros(8, dtype=torch.int32, pin_memory=True)
            there = torch.zeros(8, dtype=torch.int32, device=where)
            by_kernel(kernel, here, there)
            by_kernel(kernel, there, back)
            torch.cuda.synchronize()
        return kernel if torch.equal(here, back) else None
    except Exception:  # a compiler and a driver raise whatever they like
        return None


_passing: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # pinned memory that a device has still to read or write
_lock = threading.Lock()


def passed(source: Tensor, target: Tensor) -> torch.cuda.Event:
    """From one to the other, of which one is on a GPU, when that comes to it. Both lie in one piece, and what is not there is pinned: its
    memory is given to nobody else until then, even if nobody waits any more."""
    there, here = (source, target) if source.is_cuda else (target, source)
    kernel, done = _kernel(there.device), torch.cuda.Event()
    try:
        if kernel is None:
            target.copy_(source, non_blocking=True)
        elif source.numel():
            by_kernel(kernel, source, target)
        done.record(torch.cuda.current_stream(there.device))
        with _lock:
            _passing.append((done, here))
            while _passing and _passing[0][0].query():
                _passing.popleft()
    except BaseException:  # such as Ctrl-C: what was begun is not waited for by any event
        torch.cuda.synchronize(there.device)
        raise
    return done


class Staged:
    """Numbers on their way to a place on a device that stays: a captured graph reads them there, step after step. They are written here, in
    pinned memory, and brought as a whole. What the device does meanwhile is not waited for, but for those before, which come before the
    step that they were for."""

    def __init__(self, there: Tensor) -> None:
        here = torch.zeros(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        self._numbers: NDArray[Any] = here.numpy()
        self._here, self._there = _flat(here, there)  # once: it takes as long as a launch
        self._read: torch.cuda.Event | None = None

    def zeros(self) -> NDArray[Any]:
        """To be written to."""
        if self._read is not None:
            self._read.synchronize()
        self._numbers.fill(0)
        return self._numbers

    def send(self) -> None:
        if self._there.is_cuda:
            self._read = passed(self._here, self._there)
        else:
            self._there.copy_(self._here)
