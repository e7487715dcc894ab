"""Linear maps on a GPU. A map of few rows is not a product but a read: of all its weights, once.

Torch's products do not reach the rate of the memory there; the kernel that streams weights does, up to a number of rows that differs with
the device and with the shape. For some more rows a product of tiles comes nearer to it than torch's, for some shapes. All of it is
measured.

Weights in 8 bits are half the bytes to stream, and the rows stay as they are. A product of more rows takes 8 bits on both sides: the rows
are rounded as they come, each with a scale.
"""

import logging
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import fp8
from . import triton_ops as kernels
from .fp8 import FP8, Scaled, Weight
from .gpu import Device
from .launch import ALIGNED, Launches, power_of_two
from .ops import Apply

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8)  # rows of input that are timed
TILED = (16, 32, 64)  # the same, as the columns of tiles
REPLAYS = 5

Shape = tuple[int, ...]
Clock = Callable[[Callable[[], object]], float]


class Tile(NamedTuple):
    """Rows of weights that a program streams, and how many numbers of each at a time."""

    rows: int
    block: int
    warps: int


SEVERAL = Tile(4, 1024, 4)
ALIKE = 16  # numbers of which a product of 8 bits wants multiples, on either side
WHOLE = 4096  # numbers of a row that are fetched at once, for a single row of input
TILE_ROWS, TILE_BLOCK = 64, 128  # of weights
ON_THEIR_WAY = 196 * 1024  # bytes of tiles, at most
MOST_STAGES = 7


class GpuLinear:
    def __init__(self, device: Device, most: Mapping[Shape, int], tiled: Mapping[Shape, Collection[int]] | None = None) -> None:
        """`most`: up to how many rows weights of a shape are streamed. `tiled`: which numbers of more rows are multiplied by tiles."""
        self._device, self._most, self._tiled = device, most, tiled or {}

    def __call__(self, weight: Weight, bias: Tensor | None) -> Apply:
        return self._either(weight, bias, product(self._device, weight, bias), gated=False)

    def gated(self, weight: Weight, bias: Tensor | None, otherwise: Apply) -> Apply:
        """A map to gates and what they let through, already gated by silu."""
        return self._either(weight, bias, otherwise, gated=True)

    def _either(self, weight: Weight, bias: Tensor | None, otherwise: Apply, *, gated: bool) -> Apply:
        most, numbers = self._most.get(weight.shape, 0), self._tiled.get(weight.shape, ())
        tiles = by_tiles(self._device, weight, bias, gated=gated) if numbers and has_tiles(weight) else otherwise
        suited = {rows for rows in range(most + 1, TILED[-1] + 1) if next(number for number in TILED if number >= rows) in numbers}

        def apply(x: Tensor) -> Tensor:
            if len(x) <= most:
                return stream(self._device, x, weight, bias, gated=gated)
            return tiles(x) if len(x) in suited else otherwise(x)

        return apply if most or numbers else otherwise


def product(device: Device, weight: Weight, bias: Tensor | None) -> Apply:
    """Torch's, for any number of rows."""
    if isinstance(weight, Tensor):
        return partial(F.linear, weight=weight, bias=bias)
    if not fp8.multiplied(device.where) or any(size % ALIKE for size in weight.shape):
        return fp8.linear(weight, bias)
    codes, scales, outputs = weight.codes.T, weight.scales[None], weight.shape[0]

    def apply(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, outputs)
        rows = rounded(device, x)
        # it answers in bfloat16 only: beside 8 bits on both sides, what that rounds is little, even for other models
        out = torch._scaled_mm(rows.codes, codes, rows.scales[:, None], scales, out_dtype=torch.bfloat16, use_fast_accum=True).to(x.dtype)
        return out if bias is None else out.add_(bias)  # with a bias some shapes are not supported

    return apply


def rounded(device: Device, x: Tensor) -> Scaled:
    """`fp8.scaled`, in one launch."""
    count, size = x.shape
    wide = power_of_two(size)
    made = Scaled(torch.empty(x.shape, dtype=FP8, device=x.device), torch.empty(count, dtype=torch.float32, device=x.device))
    kernels.round_rows[(count,)](
        x.contiguous(), made.codes, made.scales, size, wide, device.overlaps, num_warps=max(1, min(16, wide // 512)), **device.launch()
    )
    return made


def stream(device: Device, x: Tensor, weight: Weight, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    count, size, outputs = *x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    codes, scales = (weight.codes, weight.scales) if isinstance(weight, Scaled) else (weight, weight)
    tile, out = tile_of(count, size, codes.element_size()), x.new_empty(count, outputs)
    kernels.few_rows[(triton.cdiv(outputs, tile.rows // 2 if gated else tile.rows),)](
        x.contiguous(), codes, scales, codes if bias is None else bias, out, count, outputs, size,
        power_of_two(count), tile.rows, tile.block, 16 // codes.element_size(), size <= tile.block,
        codes is not weight, bias is not None, gated, device.overlaps, num_warps=tile.warps, **device.launch(),
    )  # fmt: skip
    return out


def tile_of(count: int, size: int, each: int = 2) -> Tile:
    """Programs that fetch all of their weights before they wait leave the least gap between launches. For more tokens, or longer rows,
    there is no room for that. Of weights that have 1 byte each, twice as many are as many bytes on their way."""
    more = 2 if each == 1 and count == 1 else 1
    if count > 1 or size > WHOLE:
        return SEVERAL._replace(rows=more * SEVERAL.rows)
    block = max(256, power_of_two(size))
    return Tile(2 * more, block, max(1, block // 512))


def has_tiles(weight: Weight) -> TypeGuard[Tensor]:
    """Can a descriptor name them? They have 16 bits, and begin and go on where it wants them to."""
    if not isinstance(weight, Tensor) or weight.dtype.itemsize != 2:
        return False
    return weight.is_contiguous() and weight.data_ptr() % ALIGNED == 0 and weight.shape[1] % ALIKE == 0


def by_tiles(device: Device, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Apply:
    """For 1 to 64 rows of 16 bits."""
    (both, size), launch = weight.shape, Launches()
    outputs = both // 2 if gated else both
    tiles = TensorDescriptor(weight, [both, size], [size, 1], [TILE_ROWS, TILE_BLOCK])

    def apply(x: Tensor) -> Tensor:
        count, out = len(x), x.new_empty(len(x), outputs)
        tokens = max(TILED[0], power_of_two(count))
        stages = min(MOST_STAGES, ON_THEIR_WAY // (2 * TILE_BLOCK * ((1 + gated) * TILE_ROWS + tokens)))
        launch(
            kernels.some_rows, tokens, (triton.cdiv(outputs, TILE_ROWS),), x.contiguous(), tiles, weight if bias is None else bias, out,
            count, outputs, size, tokens, TILE_ROWS, TILE_BLOCK, stages, bias is not None, gated, device.overlaps,
            num_warps=4, **device.launch(),
        )  # fmt: skip
        return out

    return apply


def measured(device: Device, weights: Iterable[Weight], clock: Clock) -> dict[Shape, int]:
    """Up to how many rows weights of each shape are streamed faster than torch multiplies them."""
    alike: dict[Shape, list[Weight]] = {}
    for weight in weights:
        alike.setdefault(weight.shape, []).append(weight)
    return {shape: _most(device, same, clock) for shape, same in alike.items()}


def _most(device: Device, weights: Sequence[Weight], clock: Clock) -> int:
    """All weights of a shape, one after the other: none of them is still in a cache when its turn comes again."""
    most, some = 0, weights[0]
    products = [product(device, weight, None) for weight in weights]
    for rows in ROWS:
        x = torch.randn(rows, some.shape[1], device=device.where).to(some.dtype if isinstance(some, Tensor) else torch.bfloat16)
        streamed = clock(lambda x=x: [stream(device, x, weight, None) for weight in weights])  # type: ignore[misc]
        if streamed > clock(lambda x=x: [apply(x) for apply in products]):  # type: ignore[misc]
            break
        most = rows
    return most


def measured_tiles(device: Device, weights: Iterable[tuple[Weight, Apply | None]], clock: Clock) -> dict[Shape, list[int]]:
    """For which numbers of rows products by tiles are faster than torch's. Weights of gates come with what is done behind torch's."""
    alike: dict[Shape, list[tuple[Tensor, Apply | None]]] = {}
    for weight, gate in weights:
        if device.overlaps and has_tiles(weight):
            alike.setdefault(weight.shape, []).append((weight, gate))
    return {shape: _tiled(device, same, clock) for shape, same in alike.items()}


def _tiled(device: Device, weights: Sequence[tuple[Tensor, Apply | None]], clock: Clock) -> list[int]:
    found, some = list[int](), weights[0][0]
    for rows in TILED:
        x = torch.randn(rows, some.shape[1], device=device.where).to(some.dtype)

        def plain(x: Tensor = x) -> list[Tensor]:
            return [F.linear(x, weight) if gate is None else gate(F.linear(x, weight)) for weight, gate in weights]

        try:
            ours = [by_tiles(device, weight, None, gated=gate is not None) for weight, gate in weights]
            if clock(lambda x=x, ours=ours: [apply(x) for apply in ours]) < clock(plain):  # type: ignore[misc]
                found.append(rows)
        except Exception as error:  # no room on the processors, or whatever else a compiler and a driver raise: torch's products do as well
            log.info("no products of %d rows by tiles: %s: %s", rows, type(error).__name__, " ".join(str(error).split())[:200])
            break
    return found


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
