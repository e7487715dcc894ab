"""The codes of quantised GGUF tensors, in Pando's own blocks.

GGUF has a layout for every encoding, and the package gguf knows them all. So none is taken apart here: codes are what a tensor would decode
to if all of its scales were one, scales what it would if all codes were one, offsets what it would if all were zero. What that gives is
compared with the tensor itself, number by number, and refused where it differs.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..kernels.blocks import BYTES, NIBBLES, SHORT, Array, encode, plain

Bytes = dict[int, bytes]  # where in a group of the encoding which bytes stand

ONE, ZERO = b"\x00\x3c", b"\0\0"  # in float16
_SCALES = b"\1" * 4 + b"\0" * 4 + b"\1" * 4  # eight times one, and no offset, in six bits each


class _Recipe(NamedTuple):
    kind: int
    units: Bytes  # scales of one, offsets of zero
    zeros: Bytes  # codes that mean zero
    ones: Bytes  # codes that mean one, and offsets of zero
    lowest: int = 0  # what the smallest code means


_RECIPES = {
    2: _Recipe(NIBBLES, {0: ONE}, {2: b"\x88" * 16}, {2: b"\x99" * 16}, -8),  # Q4_0
    3: _Recipe(NIBBLES, {0: ONE + ZERO}, {4: b"\0" * 16}, {2: ZERO + b"\x11" * 16}),  # Q4_1
    6: _Recipe(BYTES, {0: ONE}, {2: b"\xff" * 4 + b"\0" * 16}, {2: b"\xff" * 4 + b"\x11" * 16}),  # Q5_0
    7: _Recipe(BYTES, {0: ONE + ZERO}, {4: b"\0" * 20}, {2: ZERO + b"\0" * 4 + b"\x11" * 16}),  # Q5_1
    8: _Recipe(BYTES, {0: ONE}, {2: b"\0" * 32}, {2: b"\1" * 32}),  # Q8_0
    12: _Recipe(NIBBLES, {0: ONE + ZERO + _SCALES}, {16: b"\0" * 128}, {2: ZERO, 16: b"\x11" * 128}),  # Q4_K
    13: _Recipe(BYTES, {0: ONE + ZERO + _SCALES}, {16: b"\0" * 160}, {2: ZERO, 16: b"\0" * 32 + b"\x11" * 128}),  # Q5_K
    14: _Recipe(SHORT, {192: b"\1" * 16 + ONE}, {0: b"\0" * 128 + b"\xaa" * 64}, {0: b"\x11" * 128 + b"\xaa" * 64}),  # Q6_K
}


KINDS = {encoding: recipe.kind for encoding, recipe in _RECIPES.items()}


class NoBlocks(ValueError):
    """They would not be the same numbers."""


def blocks_of(raw: Array, encoding: int, group_bytes: int, decoded: Callable[[Array], Array]) -> Array:
    """Of a matrix, row by row as bytes of the file; `decoded` makes its numbers of such bytes, [N, K]."""
    recipe, values = _RECIPES[encoding], decoded(raw)

    def if_it_had(bytes_: Bytes) -> Array:
        changed = raw.reshape(len(raw), -1, group_bytes).copy()
        for at, each in bytes_.items():
            changed[..., at : at + len(each)] = np.frombuffer(each, np.uint8)
        return decoded(changed.reshape(raw.shape))

    step = 16 if recipe.kind == SHORT else 32
    codes = if_it_had(recipe.units).astype(np.int16) - recipe.lowest
    scales, offsets = (if_it_had(each)[:, ::step] for each in (recipe.ones, recipe.zeros))
    made = encode(recipe.kind, codes, scales, offsets + recipe.lowest * scales)
    if not np.array_equal(plain(made, values.shape[1]), values):
        raise NoBlocks("they would be other numbers")
    return made
