"""Many copies between pinned memory and a GPU as one call: its copy engines do them, and take nothing from those who compute."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
CopyMany = Callable[[Addresses, Addresses, Addresses, torch.cuda.Stream], None]  # (to, from, bytes of each, stream)

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: one for all copies; where they come from and go to is not hinted at."""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


def copy_many() -> CopyMany | None:
    """None: the driver is older than CUDA 13 and has no such call."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes, call.restype = (address, address, address, size, address, address, size, address), ctypes.c_int
    attributes, first = _Attributes(order=IN_STREAM_ORDER), size(0)

    def copy(to: Addresses, source: Addresses, sizes: Addresses, stream: torch.cuda.Stream) -> None:
        failed = call(
            to.ctypes.data, source.ctypes.data, sizes.ctypes.data, len(to),
            ctypes.addressof(attributes), ctypes.addressof(first), 1, stream.cuda_stream,
        )  # fmt: skip
        if failed:
            raise RuntimeError(f"copying {len(to)} pieces between pinned memory and the GPU failed (CUDA error {failed})")

    return copy
