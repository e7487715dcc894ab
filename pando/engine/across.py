"""Numbers on their way to a device and back, without waiting for it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.staging import passed


def sent(numbers: NDArray[Any], device: torch.device) -> Tensor:
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu" or not here.numel():
        return here.to(device)
    there = torch.empty(here.shape, dtype=here.dtype, device=device)
    passed(here.pin_memory(), there)
    return there


class Returning:
    """A tensor that a device is still computing, on its way to the host."""

    def __init__(self, there: Tensor) -> None:
        self._here, self._arrived = there, None  # type: Tensor, torch.cuda.Event | None
        if there.device.type == "cuda":
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._arrived = passed(there.contiguous(), self._here)

    def read(self) -> Tensor:
        """Waits for what was asked of the device until then, and for nothing that was asked of it since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
