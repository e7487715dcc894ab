"""Linear maps on a GPU. A map of few rows is not a product but a read: of all its weights, once.

Torch's products do not reach the rate of the memory there; the kernel that streams weights does, up to a number of rows that differs with
the device and with the shape. It is measured.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import triton_ops as kernels
from .gpu import Device
from .ops import Apply

ROWS = (1, 2, 4, 8)  # rows of input that are timed
REPLAYS = 5

Shape = tuple[int, ...]
Clock = Callable[[Callable[[], object]], float]


class Tile(NamedTuple):
    """Rows of weights that a program streams, and how many numbers of each at a time."""

    rows: int
    block: int
    warps: int


SEVERAL = Tile(4, 1024, 4)
WHOLE = 4096  # numbers of a row that are fetched at once, for a single row of input


class GpuLinear:
    def __init__(self, device: Device, most: Mapping[Shape, int]) -> None:
        """`most`: up to how many rows weights of a shape are streamed."""
        self._device, self._most = device, most

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Apply:
        return self._either(weight, bias, partial(F.linear, weight=weight, bias=bias), gated=False)

    def gated(self, weight: Tensor, bias: Tensor | None, otherwise: Apply) -> Apply:
        """A map to gates and what they let through, already gated by silu."""
        return self._either(weight, bias, otherwise, gated=True)

    def _either(self, weight: Tensor, bias: Tensor | None, otherwise: Apply, *, gated: bool) -> Apply:
        most = self._most.get(weight.shape, 0)

        def apply(x: Tensor) -> Tensor:
            return stream(self._device, x, weight, bias, gated=gated) if len(x) <= most else otherwise(x)

        return apply if most else otherwise


def stream(device: Device, x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    count, size, outputs = *x.shape, len(weight) // 2 if gated else len(weight)
    tile, out = tile_of(count, size), x.new_empty(count, outputs)
    kernels.few_rows[(triton.cdiv(outputs, tile.rows // 2 if gated else tile.rows),)](
        x.contiguous(), weight, weight if bias is None else bias, out, count, outputs, size,
        triton.next_power_of_2(max(1, count)), tile.rows, tile.block, 16 // x.element_size(), size <= tile.block,
        bias is not None, gated, device.overlaps, num_warps=tile.warps, **device.launch(),
    )  # fmt: skip
    return out


def tile_of(count: int, size: int) -> Tile:
    """Programs that fetch all of their weights before they wait leave the least gap between launches. For more tokens, or longer rows,
    there is no room for that."""
    if count > 1 or size > WHOLE:
        return SEVERAL
    block = max(256, triton.next_power_of_2(size))
    return Tile(2, block, max(1, block // 512))


def measured(device: Device, weights: Iterable[Tensor], clock: Clock) -> dict[Shape, int]:
    """Up to how many rows weights of each shape are streamed faster than torch multiplies them."""
    alike: dict[Shape, list[Tensor]] = {}
    for weight in weights:
        alike.setdefault(weight.shape, []).append(weight)
    return {shape: _most(device, same, clock) for shape, same in alike.items()}


def _most(device: Device, weights: Sequence[Tensor], clock: Clock) -> int:
    """All weights of a shape, one after the other: none of them is still in a cache when its turn comes again."""
    most = 0
    for rows in ROWS:
        x = torch.randn(rows, weights[0].shape[1], device=device.where).to(weights[0].dtype)
        streamed = clock(lambda x=x: [stream(device, x, weight, None) for weight in weights])  # type: ignore[misc]
        if streamed > clock(lambda x=x: [F.linear(x, weight) for weight in weights]):  # type: ignore[misc]
            break
        most = rows
    return most


def replayed(work: Callable[[], object]) -> float:
    """Milliseconds of something captured as a graph, as short steps are: asking for each of its launches would take longer than they do."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(float(first.elapsed_time(second)) for first, second in pairwise(marks))
