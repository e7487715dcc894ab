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

Pair = tuple[Tensor, Tensor]  # from where, to where


def by_kernel(kernel: Any, source: Tensor, target: Tensor, other: Pair | None = None) -> None:
    """Both lie in one piece; and another pair in the same launch. In numbers of 4 bytes, where they can be taken for such."""
    there, one, two = source if source.is_cuda else target, _ints(source, target), None if other is None else _ints(*other)
    counts, more = (len(one[0]), 0 if two is None else len(two[0])), two or one
    blocks = sum(-(-count // BLOCK) for count in counts)
    _launch(kernel, (kind_of(*one, *more), there.device.index), (blocks,), *one, counts[0], *more, counts[1], BLOCK)


def _ints(source: Tensor, target: Tensor) -> Pair:
    if source.dtype == target.dtype == torch.int32 and source.dim() == 1:
        return source, target
    one, other = _flat(source, target)
    return one, other


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


def passed(source: Tensor, target: Tensor, other: Pair | None = None) -> torch.cuda.Event:
    """From one to the other, of which one is on a GPU, when that comes to it. Both lie in one piece, and what is not there is pinned: its
    memory is given to nobody else until then, even if nobody waits any more. And another pair, to the GPU as well."""
    there, here = (source, target) if source.is_cuda else (target, source)
    kernel, done = _kernel(there.device), torch.cuda.Event()
    try:
        if kernel is None:
            for one, two in ((source, target), other) if other is not None else ((source, target),):
                two.copy_(one, non_blocking=True)
        elif source.numel():
            by_kernel(kernel, source, target, other)
        done.record(torch.cuda.current_stream(there.device))
        with _lock:
            _passing.extend((done, each) for each in ((here,) if other is None else (here, other[0])))
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
        self.is_written = False  # and not sent

    def zeros(self) -> NDArray[Any]:
        """To be written to."""
        if self._read is not None:
            self._read.synchronize()
        self._numbers.fill(0)
        self.is_written = True
        return self._numbers

    def send(self, other: "Staged | None" = None) -> None:
        """And what was written elsewhere, if anything, by the same launch."""
        some = [self, other] if other is not None and other.is_written else [self]
        if self._there.is_cuda:
            first, *more = [(each._here, each._there) for each in some]
            read = passed(*first, *more)
        for each in some:
            if self._there.is_cuda:
                each._read = read
            else:
                each._there.copy_(each._here)
            each.is_written = False
