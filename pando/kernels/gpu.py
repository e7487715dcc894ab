"""Attention over a plan on a GPU.

A plan becomes tiles of two sizes: reads of many queries fill large tiles, which compute; reads of few fill small ones, which fetch. Each
size is one launch, and the two run side by side. A query that only one tile answers is written at once; the others leave parts, which a
last launch merges. All of a plan lies in int32 arrays whose places stay, and all counts are read on the device: a captured graph outlives
the plan.
"""

import math
from collections.abc import Sequence
from operator import le
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton as kernels
from . import triton_ops as ops
from .gpu_hopper import BESIDE, Hopper, found
from .gpu_tiles import HOPPER, LARGEST, LEAST_KEYS, Size, Tiles, keys_of, sizes, suited, wide
from .launch import Launches, aligned, power_of_two
from .reads import Ints, Reads, joined
from .reference import Geometry
from .rope import turns
from .staging import Staged

LOG2_E = math.log2(math.e)
ALONE_KEYS = 4  # that one query looks at together, while as many again are on their way, and as many behind those
TURNED = 8  # heads that are turned again together
MERGED = (2, 4, 16, 32)  # parts looked at together: few kinds, since each is compiled
FORMS = 64  # of plans that are remembered as they were cut
FETCHERS = 32  # programs that fetch pages from host memory
FETCHED = 4096  # numbers of 4 bytes that a program brings of keys, and as many of values


class Device(NamedTuple):
    where: torch.device
    processors: int
    overlaps: bool  # whether a launch may begin while the one before it runs

    @classmethod
    def of(cls, where: torch.device) -> "Device":
        if where.type != "cuda":
            return cls(where, 1, False)
        facts = torch.cuda.get_device_properties(where)
        return cls(where, facts.multi_processor_count, (facts.major, facts.minor) >= HOPPER)

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.where) if self.where.type == "cuda" else HOPPER

    def launch(self, early: bool = True) -> dict[str, bool]:
        """What a launch is told that may begin while the one before it runs."""
        return {"launch_pdl": early} if self.overlaps else {}


class TritonLowering:
    """A plan as the GPU takes it. Valid until the plan changes; `replace` puts another in its place, where there is room for it."""

    _parts: Tensor

    def __init__(
        self, device: Device, dtype: torch.dtype, reads: Reads, positions: Tensor, geometry: Geometry, spare: float = 1.0,
        before: "TritonLowering | None" = None,
    ) -> None:  # fmt: skip
        """`spare`: so many times the room that these reads take. `before`: of the same kind, and no smaller than that in anything."""
        self._device, self._geometry, self._page_size = device, geometry, reads.page_size
        self._large, self._small = (suited(size, geometry, device.capability) for size in sizes(geometry, dtype, reads, device.processors))
        self._hopper = found(device.where, dtype, geometry, reads.page_size) if self._large == LARGEST else None
        self._keys = keys_of(geometry, dtype, reads.page_size)
        self._shape = geometry.heads, geometry.kv_heads, geometry.heads // geometry.kv_heads, geometry.head_dim, wide(geometry)
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._forms: dict[tuple[int, bytes], Tiles] = {}
        tiles, place = self._cut(reads, len(positions)), device.where
        self._grids = [math.ceil(n * spare) for n in tiles.launches]
        self._room = {name: aligned(math.ceil(len(numbers) * spare)) for name, numbers in zip(tiles._fields, tiles.arrays, strict=False)}
        parts, self._moves = math.ceil(tiles.parts * spare), math.ceil(len(tiles.moved) * spare)  # the queries that are turned again
        if before is not None:
            self._grids = list(map(max, self._grids, before._grids))
            self._room = {name: max(room, before._room[name]) for name, room in self._room.items()}
            parts, self._moves = max(parts, len(before._parts)), max(self._moves, before._moves)
        if self._hopper is not None:
            self._small = self._small._replace(
                warps=self._small.warps if self._small.heads > 1 else max(2, self._small.warps), registers=BESIDE
            )
        self._room["tiles"] = aligned(kernels.FIELDS * (self._grids[0] + self._grids[1]))  # one for every program, if only of zeros
        self._ints = torch.zeros(sum(self._room.values()), dtype=torch.int32, device=place)
        self.staged = Staged(self._ints)
        self._arrays = dict(zip(self._room, self._ints.split(list(self._room.values())), strict=True))
        self._seen, self._ahead = torch.zeros(2, self._room["query"], dtype=torch.int32, device=place)
        self._parts = torch.empty(parts, geometry.heads, geometry.head_dim, device=place)
        self._lses = torch.empty(self._parts.shape[:2], device=place)  # [P, H] fp32, natural logarithm
        most = int(np.diff(tiles.starts).max(initial=0))
        merged = MERGED if self._shape[-1] <= 128 else MERGED[:-1]  # more of them have no room in registers
        self._merged = next((parts for parts in merged if parts >= most), merged[-1])
        self._launch = Launches()
        self._descriptors: dict[tuple[int, int, bool], TensorDescriptor] = {}
        self._turn: Tensor | None = None
        self._write(tiles.arrays)
        self.begin(positions)

    def replace(self, reads: Reads, count: int) -> bool:
        """Takes another plan, for so many tokens, and answers whether it could: it may have no more of anything than there is room for. It
        begins with the next step; who sends what is `staged` with something else spares a launch."""
        tiles = self._cut(reads, count)
        arrays = tiles.arrays
        fits = (
            all(map(le, tiles.launches, self._grids))
            and all(map(le, map(len, arrays), self._room.values()))
            and tiles.parts <= self._parts.shape[0]
            and len(tiles.moved) <= self._moves
        )
        if fits:
            self._write(arrays)
        return fits

    def _cut(self, reads: Reads, count: int) -> Tiles:
        """Prompts of one template have plans of few forms."""
        form = reads.form
        if form is not None and (known := self._forms.get((count, form))) is not None:
            return known.moved_to(reads)
        tiles = Tiles.cut(reads, count, self._geometry, self._large, self._small, self._device.processors)
        if len(self._forms) >= FORMS:
            self._forms.clear()
        if form is not None:
            self._forms[count, form] = tiles
        return tiles

    def _write(self, arrays: Sequence[Ints]) -> None:
        """To one place, which is sent as a whole. What is not filled is zero."""
        host, offset = self.staged.zeros(), 0
        for numbers, room in zip(arrays, self._room.values(), strict=True):
            host[offset : offset + len(numbers)] = numbers
            offset += room

    def begin(self, positions: Tensor) -> None:
        positions = positions.to(self._device.where)  # a step's are there
        if self.staged.is_written:
            self.staged.send()
        a, pairs = self._arrays, max(self._large.rows, self._small.rows) // (self._geometry.heads // self._geometry.kv_heads)
        kernels.begin[(max(1, self._grids[0] + self._grids[1]),)](
            positions, a["tiles"], a["counts"], a["pages"], a["reader"], a["base"], a["room"], self._seen, self._ahead, self._page_size,
            power_of_two(pairs), self._keys, num_warps=1,
        )  # fmt: skip
        freqs = self._geometry.freqs
        if self._moves and freqs is not None:
            moved = a["moved"][: self._moves].to(torch.int64)
            self._turn = turns(positions[moved] - a["shifts"][: self._moves], freqs, self._geometry.factor)

    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g, count = self._geometry, len(q)
        turned = turned.contiguous()
        if self._moves and self._turn is not None:
            turned = self._turn_again(q, turned, self._turn)
        out = torch.empty(count, g.heads, g.head_dim, dtype=q.dtype, device=q.device)
        large, small, merged = self._grids
        if large and self._hopper is not None and k.dtype == q.dtype:
            self._look_apart(self._hopper, large, turned, k, v, out, early=bool(small or merged))
        elif large:
            self._look(self._large, large, turned, k, v, out, is_large=True, early=bool(small or merged), after=False)
        if small and self._small.heads > 1:
            self._look_alone(small, turned, k, v, out, early=bool(merged), after=bool(large))
        elif small:
            self._look(self._small, small, turned, k, v, out, is_large=False, early=bool(merged), after=bool(large))
        if merged:
            self._merge(out)
        return out

    def _turn_again(self, q: Tensor, turned: Tensor, turn: Tensor) -> Tensor:
        """Queries as they are turned for most, and behind them those of placements that are shifted."""
        (count, heads, size), pairs = q.shape, turn.shape[-1]
        both = torch.empty(count + self._moves, heads, size, dtype=q.dtype, device=q.device)
        self._launch(
            ops.turn_again, q.stride(0), (len(both), triton.cdiv(heads, TURNED)), q, turned, self._arrays["moved"],
            torch.view_as_real(turn), both, count, q.stride(0), heads, size, pairs, power_of_two(triton.cdiv(size, 2)), TURNED,
            self._device.overlaps, num_warps=2, **self._device.launch(),
        )  # fmt: skip
        return both

    def _look(
        self, size: Size, tiles: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, is_large: bool, early: bool, after: bool
    ) -> None:
        g, a, overlaps = self._geometry, self._arrays, self._device.overlaps
        alone = not is_large and not self._grids[0] and not size.many
        blocks = (k, v) if size.exact else (self._descriptor(k), self._descriptor(v))
        ahead = size.ahead and k.dtype == q.dtype  # what is widened has no room in registers meanwhile
        programs = min(tiles * g.kv_heads, self._device.processors) if size.many else tiles * g.kv_heads
        self._launch(
            kernels.look, is_large, (programs,), q, k, v, *blocks, q if g.slopes is None else g.slopes, a["tiles"], a["counts"],
            a["pages"], a["query"], self._seen, self._ahead, a["places"], self._parts, self._lses, out, g.scale * LOG2_E,
            *self._shape, self._page_size, size.rows,
            LEAST_KEYS if size.exact else self._keys, size.stages, size.exact, ahead, g.slopes is not None, self._precision,
            is_large, alone, size.many, alone and overlaps, early and overlaps, after and overlaps,
            num_warps=size.warps, maxnreg=size.registers, **self._device.launch(after or alone),
        )  # fmt: skip

    def _look_apart(self, hopper: Hopper, tiles: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, early: bool) -> None:
        g, a = self._geometry, self._arrays
        self._launch(
            hopper.look, None, (min(tiles * g.kv_heads, self._device.processors),), q, self._descriptor(k, hopper),
            self._descriptor(v, hopper), a["tiles"], a["counts"], a["pages"], a["query"], self._seen, a["places"], self._parts, self._lses,
            out, g.scale * LOG2_E, *self._shape[:4], self._page_size, early, **hopper.options,
        )  # fmt: skip

    def _look_alone(self, tiles: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, early: bool, after: bool) -> None:
        g, a, size, overlaps = self._geometry, self._arrays, self._small, self._device.overlaps
        self._launch(
            kernels.look_alone, None, (tiles * g.heads // size.heads,), q, k, v, a["tiles"], a["counts"], a["pages"], a["query"],
            a["places"], self._parts, self._lses, out, g.scale * LOG2_E, g.heads, g.head_dim, self._shape[-1], self._page_size,
            size.heads, ALONE_KEYS, early and overlaps, after and overlaps,
            num_warps=size.warps, maxnreg=size.registers, **self._device.launch(after),
        )  # fmt: skip

    def _merge(self, out: Tensor) -> None:
        g, a, tokens = self._geometry, self._arrays, self._grids[2]
        heads = 4 if tokens * g.heads >= 4096 else 1
        self._launch(
            kernels.merge, None, (tokens, triton.cdiv(g.heads, heads)), self._parts, self._lses, a["starts"], a["tokens"], a["counts"], out,
            g.heads, g.head_dim, self._shape[-1], heads, self._merged, self._device.overlaps, num_warps=max(heads, self._merged // 16),
            **self._device.launch(),
        )  # fmt: skip

    def _descriptor(self, pool: Tensor, hopper: Hopper | None = None) -> TensorDescriptor:
        """Of one layer's keys or values [S, K, D], in blocks of one head."""
        slots, kv_heads, size = pool.shape
        name = pool.data_ptr(), slots, hopper is None
        if name not in self._descriptors:
            width, block = kv_heads * size, [self._keys, self._shape[-1]]
            self._descriptors[name] = hopper.descriptor(pool) if hopper else TensorDescriptor(pool, [slots, width], [width, 1], block)
        return self._descriptors[name]


def probe(device: Device, dtype: torch.dtype, geometry: Geometry, page_size: int, states: torch.dtype | None = None) -> None:
    """Attends once, over next to nothing. Raises whatever a broken compiler or driver raises, before anybody waits for an answer."""
    q = torch.zeros(1, geometry.heads, geometry.head_dim, dtype=dtype, device=device.where)
    pool = torch.zeros(page_size, geometry.kv_heads, geometry.head_dim, dtype=states or dtype, device=device.where)
    reads = joined(page_size, [([0], page_size, 0, [0], [0])])
    if not TritonLowering(device, dtype, reads, torch.zeros(1, dtype=torch.int64), geometry).attend(q, q, pool, pool).isfinite().all():
        raise RuntimeError("they answered no numbers")


def fetch(where: Tensor, k: Tensor, v: Tensor, page_size: int) -> None:
    """Pages of one layer from pinned host memory. `where`: their addresses, and where they go, int64 [2, N]; k and v [S, K, D]. A page's
    bytes are a multiple of 4."""
    sources, pages = where
    half = page_size * k[0].nbytes // 4
    k, v = k.view(torch.int32), v.view(torch.int32)
    kernels.fetch[(min(FETCHERS, len(pages) * triton.cdiv(half, FETCHED)),)](sources, pages, k, v, len(pages), half, FETCHED, num_warps=8)
