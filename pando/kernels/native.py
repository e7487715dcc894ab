"""The C kernels of native.c and its headers: compiled once per machine, loaded with ctypes, on torch's own threads.

Where there is no C compiler, or the result does not load, `load` says why and torch's kernels do the same work in more calls.
"""

import ctypes
import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import lt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import kind_of
from .compiling import compiled
from .cpu import Run, Square, split_own
from .ops import Activation, Apply, Attend, FusedOps, Maps, TorchOps, Whole
from .reads import Reads, joined
from .reference import Geometry
from .tiling import Left, Tiling
from .timing import in_turns

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
TYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
ROWS, LARGEST_HEAD, DEPTH, LANES = 256, 256, 32, 16  # as in attend.h, native.c and tiles.h
VECTOR_ROWS = 96  # packed queries that look together by vectors; by tiles as many as there may be, for the fewest passes over the keys
NEVER = 1 << 30
LINE = 32  # numbers of 16 bits in a line of the cache
FEWEST = 8  # packed queries that may be lanes of vectors, three quarters of which are full
TILE_KEYS = 512  # the fewest keys for which a read is split, if it would leave threads without work
DENSE_QUERIES, DENSE_SQUARE = 16, 64  # queries from which torch's kernel may be the faster one
RUN_QUERIES, SQUARE_QUERIES, PROBE_KEYS = 32, 128, 2048  # of the reads that are timed: a batch over a prefix, a prompt
LOG2_E = math.log2(math.e)  # inside the kernel weights are powers of 2


class Work(ctypes.Structure):
    """What the attention of attend.h is given."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "slopes", "tiles", "chains", "slots", "query", "seen")),
        *((name, ctypes.c_void_p) for name in ("starts", "of", "moved", "turns", "queries", "parts", "peaks", "sums")),
        *((name, ctypes.c_int32) for name in ("count", "longer", "tokens", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("columns", "moves", "together")),
        ("scale", ctypes.c_float),
    ]


class Layer(ctypes.Structure):
    """What its `layer` is given of one."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "qkv", "qkv_bias", "qk_norm", "o", "o_bias")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "up", "up_bias", "down", "down_bias")),
        *((name, ctypes.c_int32) for name in ("qkv_kind", "o_kind", "up_kind", "down_kind")),
        *((name, ctypes.c_int32) for name in ("size", "inner", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Unavailable:
    reason: str


def load(dtype: torch.dtype, folder: Path, options: Sequence[str] = ()) -> "Library | Unavailable":
    """The compiled kernels for a dtype; compiled into `folder`, with further options for the compiler, if they are not there yet."""
    if dtype not in TYPES:
        return Unavailable(f"they are not made for {dtype}")
    named = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""
    try:
        compiler = shlex.split(named)  # "ccache gcc" is two words
    except ValueError as error:
        return Unavailable(f"the variable CC is {named!r}, which is no command ({error})")
    if not compiler:
        return Unavailable("there is no C compiler (cc, gcc or clang) on the PATH")
    flags = (*FLAGS, *TYPES[dtype], *options)
    try:
        return Library(dtype, compiled(compiler, flags, folder))
    except subprocess.CalledProcessError as error:
        return Unavailable(f"{named} failed: {error.stderr.decode(errors='replace').strip()[-300:]}")
    except (OSError, subprocess.TimeoutExpired, AttributeError) as error:
        return Unavailable(str(error))


def _share_openmp() -> None:
    """Makes the OpenMP runtime that torch brought visible to libraries loaded later."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(errors="surrogateescape").splitlines() if maps.exists() else []  # names of files are bytes
    names = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line}
    for name in sorted(names):
        if ".so" in name and Path(name).name.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


class Library:
    def __init__(self, dtype: torch.dtype, path: Path) -> None:
        _share_openmp()
        library = ctypes.CDLL(str(path))
        p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        self.dtype = dtype
        self.linear = _declare(library.linear, p, p, p, p, i, i, i)
        self.rms_norm = _declare(library.rms_norm, p, p, p, i, i, ctypes.c_int64, f)
        self.silu_gate = _declare(library.silu_gate, p, p, i, i)
        self.rotate_and_store = _declare(library.rotate_and_store, p, p, i, p, p, p, p, i, i, i, i)
        self.rotate = _declare(library.rotate, p, ctypes.c_int64, p, p, i, p, i, i, i)
        self.attend = _declare(library.attend, p, p, p, p)
        self.layer = _declare(library.layer, p, p, p, p, p, p, p, i, p, p, p, i)
        self.linear_blocks = _declare(library.linear_blocks, p, p, i, p, p, p, i, i, i)
        self.tiles, self.columns = bool(library.has_tiles()), max(FEWEST, library.width() * 3 // 4)


def _declare(function: "ctypes._NamedFuncPointer", *types: type) -> "ctypes._NamedFuncPointer":
    function.argtypes, function.restype = types, None
    return function


def native_linear(library: Library, weight: Tensor, bias: Tensor | None) -> Apply:
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    run, w, b = library.linear, weight.data_ptr(), None if bias is None else bias.data_ptr()

    def apply(x: Tensor, keeps: tuple[Tensor, Tensor | None] = (weight, bias)) -> Tensor:  # the kernel has only their addresses
        x = x.contiguous()
        y = x.new_empty(len(x), outputs)
        run(x.data_ptr(), w, b, y.data_ptr(), len(x), inputs, outputs)
        return y

    return apply


def coded_linear(library: Library, weight: Tensor, bias: Tensor | None, blocks: Tensor) -> Apply:
    """Of the weight no more than the shape is wanted."""
    outputs, inputs = weight.shape
    run, w, b, kind = library.linear_blocks, blocks.data_ptr(), None if bias is None else bias.data_ptr(), kind_of(blocks.shape[1], inputs)

    def apply(x: Tensor, keeps: tuple[Tensor, Tensor | None] = (blocks, bias)) -> Tensor:
        x = x.contiguous()
        y, desk = x.new_empty(len(x), outputs), x.new_empty(x.shape, dtype=torch.float32)
        run(x.data_ptr(), w, kind, b, y.data_ptr(), desk.data_ptr(), len(x), inputs, outputs)
        return y

    return apply


class Coded(NamedTuple):
    """Weights that are there as codes, too."""

    blocks: Mapping[int, Tensor]  # by the address of the plain one
    is_best: Callable[[int], bool]  # are they the ones to multiply so many rows by?


class NativeOps(FusedOps):
    def __init__(self, library: Library, is_best: Callable[[int], bool] | None = lambda rows: True, coded: Coded | None = None) -> None:
        """`is_best`: are the linear maps of so many rows those of C, and plain? None: they never are."""
        self.library, self._is_best, self._coded = library, is_best, coded

    def whole(self, maps: Maps) -> Whole | None:
        """One call instead of ten: what Python does between them is a tenth of a small model's step, and its other threads hold it up."""
        made = [(self._is_best, *_layer(maps, {}))] if self._is_best is not None else []
        weights = [weight.data_ptr() for weight, _ in (maps.qkv, maps.o, maps.up, maps.down)]
        if self._coded is not None and all(each in self._coded.blocks for each in weights):
            made.append((self._coded.is_best, *_layer(maps, self._coded.blocks)))
        if not made:
            return None
        forms = [(is_best, ctypes.addressof(layer)) for is_best, layer, _ in made]
        size, inner, queries = len(maps.norm), maps.down[0].shape[1], maps.heads * maps.head_dim
        width = size + 2 * queries + 2 * maps.kv_heads * maps.head_dim + 3 * inner
        width += 2 * max(size, inner, queries) if self.library.dtype == torch.bfloat16 else 0
        run = self.library.layer

        def apply(
            x: Tensor, more: Tensor | None, turn: Tensor, slots: Tensor, attend: Attend, k: Tensor, v: Tensor,
            keeps: object = made,  # C has only their addresses
        ) -> Tensor | None:  # fmt: skip
            rows, plan = len(x), _plan_of(attend)
            place = next((place for is_best, place in forms if is_best(rows)), None)
            if plan is None or place is None or k.dtype != x.dtype:
                return None
            desk, out = x.new_empty(rows * width + LINE), torch.empty_like(x) if more is None else more
            added = None if more is None else more.data_ptr()
            run(
                place, plan, x.data_ptr(), added, out.data_ptr(), desk.data_ptr(),
                turn.data_ptr(), turn.shape[-1], slots.data_ptr(), k.data_ptr(), v.data_ptr(), rows,
            )  # fmt: skip
            return out

        return apply

    def rms_norm(self, weight: Tensor, eps: float) -> Apply:
        run, size, w = self.library.rms_norm, len(weight), weight

        def apply(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            run(x.data_ptr(), w.data_ptr(), y.data_ptr(), len(x), size, x.stride(0), eps)
            return y

        return apply

    def gate(self, activation: Activation) -> Apply:
        if activation != "silu":
            return super().gate(activation)
        run = self.library.silu_gate

        def apply(x: Tensor) -> Tensor:
            x = x.contiguous()
            size = x.shape[1] // 2
            y = x.new_empty(len(x), size)
            run(x.data_ptr(), y.data_ptr(), len(x), size)
            return y

        return apply

    def rotate_and_store(self, qkv: Tensor, turn: Tensor | None, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """C knows no pool of another dtype than the model's: torch writes that."""
        if k.dtype != qkv.dtype:
            return TorchOps.rotate_and_store(self, qkv, turn, slots, k, v)
        return super().rotate_and_store(qkv, turn, slots, k, v)

    def turn_and_store(self, qkv: Tensor, turn: Tensor, slots: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> None:
        count, heads, size = turned.shape
        self.library.rotate_and_store(
            qkv.data_ptr(), turn.data_ptr(), turn.shape[-1], slots.data_ptr(), turned.data_ptr(), k.data_ptr(), v.data_ptr(),
            count, heads, k.shape[1], size,
        )  # fmt: skip


def _layer(maps: Maps, blocks: Mapping[int, Tensor]) -> tuple[Layer, list[Tensor | None]]:
    """What C is given of one, with maps that are there as codes as such; and what it has the addresses of."""
    weights = [weight.contiguous() for weight, _ in (maps.qkv, maps.o, maps.up, maps.down)]
    codes = [blocks.get(weight.data_ptr()) for weight in weights]
    kinds = [0 if each is None else kind_of(each.shape[1], weight.shape[1]) for each, weight in zip(codes, weights, strict=True)]
    qkv, o, up, down = (weight if each is None else each for each, weight in zip(codes, weights, strict=True))
    biases = [None if bias is None else bias.contiguous() for _, bias in (maps.qkv, maps.o, maps.up, maps.down)]
    qk_norm = None if maps.qk_norm is None else maps.qk_norm.contiguous()
    kept = [maps.norm, qkv, biases[0], qk_norm, o, biases[1], maps.mlp_norm, up, biases[2], down, biases[3]]
    sizes = len(maps.norm), maps.down[0].shape[1], maps.heads, maps.kv_heads, maps.head_dim
    return Layer(*(None if each is None else each.data_ptr() for each in kept), *kinds, *sizes, maps.eps), kept


def supports(geometry: Geometry) -> bool:
    return geometry.heads // geometry.kv_heads <= VECTOR_ROWS and geometry.head_dim <= LARGEST_HEAD


class Dense(NamedTuple):
    """Which reads of many queries torch's kernel answers faster here: it may have matrix instructions that C has no words for. And whether
    C had better make queries the lanes of its vectors, and not what they are made of."""

    runs: bool = False
    squares: bool = False
    columns: bool = True

    @classmethod
    def measure(cls, library: Library, geometry: Geometry) -> "Dense":
        k, v = torch.randn(2, PROBE_KEYS, geometry.kv_heads, geometry.head_dim).to(library.dtype)
        kinds = (cls(columns=False), cls(), cls(True, True))
        spent = list[dict[Dense, float]]()
        for count, before in ((RUN_QUERIES, PROBE_KEYS), (SQUARE_QUERIES, 0)):  # queries behind the keys, and among them
            q = torch.randn(count, geometry.heads, geometry.head_dim).to(library.dtype)
            reads = joined(PROBE_KEYS, [([0], before or count, 0, range(count), [0] * count)])
            lowered = {dense: NativeLowering(library, dense, reads, before + torch.arange(count), geometry) for dense in kinds}
            spent.append(in_turns({dense: partial(lowering.attend, q, q, k, v) for dense, lowering in lowered.items()}))
        by_rows, by_columns, by_torch = ([times[dense] for times in spent] for dense in kinds)
        columns = sum(by_columns) < sum(by_rows)
        runs, squares = map(lt, by_torch, by_columns if columns else by_rows)
        return cls(runs, squares, columns)


class NativeLowering:
    """A plan as the C kernel takes it. Valid until the plan changes.

    Reads that torch's kernel answers faster go there; the C kernel merges what they answer with its own parts.
    """

    def __init__(self, library: Library, dense: Dense, reads: Reads, positions: Tensor, geometry: Geometry) -> None:
        self._library, self._geometry, self._count = library, geometry, len(positions)
        self._columns = library.columns if dense.columns else NEVER
        self._dense: list[tuple[Run | Square, slice]] = []
        left = self._share_out(reads, dense, positions)
        threads = torch.get_num_threads()
        tiles = library.tiles and geometry.head_dim % DEPTH == 0
        rows, heads = (ROWS, LARGEST_HEAD // geometry.head_dim) if tiles else (VECTOR_ROWS, 1)
        self._tiling = Tiling(reads, left, self._count, geometry, rows=rows, keys=TILE_KEYS, threads=threads, heads=heads, chained=tiles)
        floats = partial(torch.empty, dtype=torch.float32, device="cpu")  # for C: a process may have other defaults
        self._parts = floats(self._tiling.parts, geometry.heads, geometry.head_dim)
        scores = floats(2, self._tiling.parts * geometry.heads + LANES)[:, :-LANES]  # as many more may be read
        self._peaks, self._sums = (each.view(-1, geometry.heads) for each in scores)
        moved, shape = len(self._tiling.readers_moved), (geometry.heads, geometry.head_dim)
        self._out = torch.empty(self._count, *shape, dtype=library.dtype, device="cpu")
        self._queries = torch.empty(self._count + moved if moved else 0, *shape, dtype=library.dtype, device="cpu")
        self.begin(positions)

    def _share_out(self, reads: Reads, dense: Dense, positions: Tensor) -> Left:
        """Gives to torch's kernel what it does faster; answers what is left."""
        begin, end, owners = np.zeros(len(reads), np.int64), reads.tokens.astype(np.int64), list[int]()
        many = np.flatnonzero((np.diff(reads.query_starts) >= DENSE_QUERIES) & (reads.tokens > 0)) if dense.runs or dense.squares else ()
        for r in map(int, many):
            whole, own = split_own(reads.read(r), positions.numpy())
            before = len(whole.slots) if whole is not None else 0
            if whole is not None and dense.runs:
                self._give(Run(whole, self._count, self._geometry), whole.queries.tolist(), owners)
                begin[r] = before
            if own is not None and dense.squares and len(own.queries) >= DENSE_SQUARE:
                self._give(Square(own, self._count, self._geometry), own.queries.tolist(), owners)
                end[r] = before
        return Left(begin, end, np.array(owners, dtype=np.int64))

    def _give(self, part: Run | Square, queries: list[int], owners: list[int]) -> None:
        self._dense.append((part, slice(len(owners), len(owners) + len(queries))))
        owners += queries

    def begin(self, positions: Tensor) -> None:
        self._tiling.begin(positions.numpy())
        for part, place in self._dense:
            part.begin(positions)
            self._sums[place] = 1.0
        self._work = self._arguments()
        self._place = ctypes.addressof(self._work)

    def _arguments(self) -> Work:
        """All of the kernel's that stay the same from layer to layer."""
        tiling, g = self._tiling, self._geometry
        arrays = (tiling.tiles, tiling.chains, tiling.slots, tiling.query, tiling.seen, tiling.starts, tiling.of)
        slopes = None if g.slopes is None else g.slopes.data_ptr()
        moved: tuple[int | None, ...] = (None, None, None)
        if tiling.turn is not None:
            moved = tiling.readers_moved.ctypes.data, tiling.turn.data_ptr(), self._queries.data_ptr()
        return Work(
            None, None, None, self._out.data_ptr(), slopes, *(array.ctypes.data for array in arrays), *moved,
            self._parts.data_ptr(), self._peaks.data_ptr(), self._sums.data_ptr(),
            len(tiling.chains) - 1, tiling.longer, self._count, g.heads, g.kv_heads, g.head_dim, self._columns,
            0 if tiling.turn is None else len(tiling.turn), tiling.together, g.scale * LOG2_E,
        )  # fmt: skip

    def attend(self, q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in `Lowering`, but that what it answers is written over by the next call."""
        for part, place in self._dense:
            out, lse = part.read(q, turned, k, v)
            peaks = self._peaks[place]
            assert lse.shape == peaks.shape and lse.dtype == peaks.dtype == torch.float32
            self._parts[place] = out
            torch.mul(lse, LOG2_E, out=peaks)  # the C kernel has logarithms to base 2, from here on and nowhere else: it answers none
        turned = turned.contiguous() if self._tiling.turn is None else self._with_moved(q, turned)
        self._library.attend(self._place, turned.data_ptr(), k.data_ptr(), v.data_ptr())
        return self._out

    @property
    def plan(self) -> int | None:
        """Where C finds what it needs to attend in any layer, if it can do so alone."""
        return None if self._dense else self._place

    def _with_moved(self, q: Tensor, turned: Tensor) -> Tensor:
        """The step's queries, and behind them those of moved placements."""
        turn, which, queries = self._tiling.turn, self._tiling.readers_moved, self._queries
        assert turn is not None
        queries[: self._count] = turned
        self._library.rotate(
            q.data_ptr(), q.stride(0), which.ctypes.data, turn.data_ptr(), turn.shape[-1], queries[self._count :].data_ptr(),
            len(which), *turned.shape[1:],
        )  # fmt: skip
        return queries


def _plan_of(attend: Attend) -> int | None:
    lowering = getattr(attend, "__self__", None)
    return lowering.plan if isinstance(lowering, NativeLowering) else None
