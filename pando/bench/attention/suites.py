"""The built-in suites of `pando bench attention`. One query token per row; `32/8 32,2048,128` is 32 query and 8 key heads, 32 rows behind
2,048 shared tokens, each with 128 of its own."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from .cases import Case, Part

FEATURED = (
    *((32, 1024, 64), (32, 2048, 128), (32, 4096, 128), (64, 8192, 128), (256, 2048, 128), (256, 8192, 128), (256, 16384, 128)),
    *((1024, 2048, 128), (1024, 16384, 128), (1, 4096, 128), (4, 4096, 128), (32, 0, 2048)),
)  # batch, prefix, suffix
BATCHES = (1, 4, 32, 64, 256, 1024)
PREFIXES = (0, 1024, 2048, 4096, 8192, 16384)
SUFFIXES = (64, 128, 2048)


class Heads(NamedTuple):
    hq: int
    hkv: int
    d: int = 128
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.hq}/{self.hkv}" + ("" if self.d == 128 else f" d{self.d}")


MHA, GQA, MQA, NARROW = Heads(32, 32), Heads(32, 8), Heads(8, 1), Heads(16, 1)
DEFAULT_MODEL = Heads(9, 3, 64)


def single(heads: Heads, batch: int, prefix: int, suffix: int) -> Case:
    """One level: a shared prefix and a tail of each row's own; without a suffix all rows end in the prefix itself."""
    tails = batch if suffix else 0
    roots = [Part(None, prefix)] if prefix else []
    segments = (*roots, *[Part(0 if prefix else None, suffix)] * tails)
    rows = range(len(roots), len(roots) + tails) if tails else [0] * batch
    return Case(f"{heads} {batch},{prefix},{suffix}", *heads, segments, tuple(rows))


def tree(heads: Heads, levels: Sequence[tuple[int, int]]) -> Case:
    """Levels of (segments in all, tokens of each), every level spread evenly below the one above; a row for each leaf."""
    parts: list[Part] = []
    above: list[int | None] = [None]
    for count, tokens in levels:
        parents = [above[index * len(above) // count] for index in range(count)]
        above = [len(parts) + index for index in range(count)]
        parts += [Part(parent, tokens) for parent in parents]
    name = f"{heads} " + " > ".join(f"{count}x{tokens}" for count, tokens in levels)
    return Case(name, *heads, tuple(parts), tuple(index for index in above if index is not None))


def beams(heads: Heads, prompt: int, depth: int, step: int, leaving: int) -> Case:
    """A search that goes on from one of its beams again and again: a deep trunk, which a few rows leave at every step."""
    parts, rows = [Part(None, prompt)], list[int]()
    trunk = 0
    for _ in range(depth):
        parts.append(Part(trunk, step))
        trunk = len(parts) - 1
        rows += range(len(parts), len(parts) + leaving)
        parts += [Part(trunk, step)] * leaving
    return Case(f"{heads} beams {prompt} > {depth} deep x{step}, {leaving} leave", *heads, tuple(parts), tuple(rows))


def _peers() -> list[Case]:
    return [single(heads, *sizes) for heads in (MHA, GQA, MQA) for sizes in FEATURED]


def _single() -> list[Case]:
    return [single(heads, *sizes) for heads in (MHA, GQA, NARROW, MQA) for sizes in product(BATCHES, PREFIXES, SUFFIXES)]


def _trees() -> list[Case]:
    found = []
    for heads in (MHA, GQA, NARROW, MQA, Heads(32, 8, 64), Heads(28, 4), DEFAULT_MODEL):
        found += [
            tree(heads, [(1, 4096), (8, 512), (64, 128)]),
            tree(heads, [(1, 1024), (2, 2048), (32, 256)]),
            tree(heads, [(4, 2048), (64, 128)]),
            beams(heads, 1024, depth=16, step=64, leaving=2),
            single(heads, 32, 0, 1024),
        ]
    return found


def _hydragen() -> list[Case]:
    return [single(MQA, *sizes) for sizes in product((64, 256, 1024), (1024, 4096, 16384), (128, 512, 2048))]


def _chunk() -> list[Case]:
    heads = MHA._replace(dtype="float16")
    return [single(heads, 32, tokens * share // 100, tokens - tokens * share // 100) for tokens in (1024, 2048, 4096) for share in SHARES]


SHARES = (0, 50, 75, 100)  # per cent


def _relay() -> list[Case]:
    return [single(MHA._replace(dtype="float16"), 32, prefix, 128) for prefix in (64, 128, 256, 512, 1024, 2048, 4096)]


def _cpu() -> list[Case]:
    shared = [single(DEFAULT_MODEL, batch, 2048, 64) for batch in (32, 16, 8, 1)]
    return [*shared, tree(DEFAULT_MODEL, [(1, 1024), (4, 256), (16, 64)]), *(single(DEFAULT_MODEL, batch, 0, 512) for batch in (32, 8))]


def _plan() -> list[Case]:
    return [tree(DEFAULT_MODEL, [(10, 1024), (1000, 64)])]


class Suite(NamedTuple):
    about: str
    cases: Callable[[], list[Case]]


SUITES = {
    "peers": Suite("one shared level, the sizes that published kernels are compared at: 32/32, 32/8 and 8/1 heads", _peers),
    "single": Suite("one shared level: every batch, prefix and suffix of a grid; 32/32, 32/8, 16/1 and 8/1 heads", _single),
    "trees": Suite("several levels, several roots, a deep chain of beams, nothing shared; also 64 wide heads and odd groups", _trees),
    "hydragen": Suite("Hydragen's micro-benchmark: 8/1 heads, over batch, prefix and suffix", _hydragen),
    "chunk": Suite("ChunkAttention's table 3: 32 rows, of whose context 0, 50, 75 and 100 % are shared", _chunk),
    "relay": Suite("RelayAttention's figure 5: 32 rows with 128 tokens of their own, over the length of the shared prompt", _relay),
    "cpu": Suite("the default model's heads, small enough for a CPU", _cpu),
    "plan": Suite("the default model's heads, a thousand rows over 1,010 segments: how long is planned?", _plan),
}
