"""Numbers on their way to a place on a device that stays: a captured graph reads them there, step after step."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Staged:
    """They are written here, in pinned memory, and copied as a whole. What the device does meanwhile is not waited for, but for the copy
    before, which comes before the step that it was for."""

    def __init__(self, there: Tensor) -> None:
        self._there = there
        self._here = torch.zeros(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        self._numbers: NDArray[Any] = self._here.numpy()
        self._copied = torch.cuda.Event() if there.is_cuda else None

    def zeros(self) -> NDArray[Any]:
        """To be written to."""
        if self._copied is not None:
            self._copied.synchronize()
        self._numbers.fill(0)
        return self._numbers

    def send(self) -> None:
        self._there.copy_(self._here, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._there.device))
