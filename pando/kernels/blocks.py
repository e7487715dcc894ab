"""Weights as codes of 4 or 8 bits, which is how quantised checkpoints have them. Linear maps of few rows read these instead of plain ones,
since such maps wait for memory: a fifth of the bytes, and the very same weights. Where a model runs in float32 and its checkpoint is in
bfloat16, its numbers are such codes, too: half of the bytes.

A row of a matrix is a row of blocks. A block has a scale and an offset in float32, then the codes of 32 weights or of 16; a weight is
code * scale + offset. Nibbles go from 0 to 15: the first 16 of a block are the lower halves of its bytes, the others the upper ones. Codes
of 8 bits go from -128 to 127, and are stored as 128 more.
"""

from typing import Any

import numpy as np

# Bytes of four weights, by which the kinds are told apart. SHORT: 8 bits, in blocks of 16. HALVES: bfloat16, which needs no block.
NIBBLES, BYTES, SHORT, HALVES = 3, 5, 6, 8
Array = np.ndarray[Any, Any]


def kind_of(size: int, inputs: int) -> int:
    """Of rows that take so many bytes for so many weights."""
    kind = size * 4 // inputs if inputs % 32 == 0 else 0
    if kind not in (NIBBLES, BYTES, SHORT, HALVES) or size * 4 != kind * inputs:
        raise ValueError(f"{size} bytes for {inputs} weights are no row of blocks")
    return kind


def encode(kind: int, codes: Array, scales: Array, offsets: Array) -> Array:
    """Whole numbers [N, K], and what belongs to each block [N, K / 32] or [N, K / 16], as bytes [N, K / 4 * kind]."""
    group = 16 if kind == SHORT else 32
    parts = np.stack((scales, offsets), axis=-1).astype("<f4").view(np.uint8)  # [N, K / group, 8]
    grouped = codes.reshape(len(codes), -1, group)
    stored = grouped[..., :16] | grouped[..., 16:] << 4 if kind == NIBBLES else grouped + 128
    return np.concatenate((parts, stored.astype(np.uint8)), axis=-1).reshape(len(codes), -1)


def decode(blocks: Array, inputs: int) -> tuple[Array, Array, Array]:
    """What `encode` was given: codes, scales and offsets."""
    kind = kind_of(blocks.shape[1], inputs)
    group = 16 if kind == SHORT else 32
    each = blocks.reshape(len(blocks), inputs // group, -1)
    scales, offsets = np.moveaxis(np.ascontiguousarray(each[..., :8]).view("<f4"), -1, 0)
    stored = each[..., 8:]
    codes = np.concatenate((stored & 15, stored >> 4), axis=-1).astype(np.int16) if kind == NIBBLES else stored.astype(np.int16) - 128
    return codes.reshape(len(blocks), inputs), scales, offsets


def plain(blocks: Array, inputs: int) -> Array:
    """The weights [N, K] in float32. A code times a scale has no more digits than that holds, so only the sum is rounded."""
    if kind_of(blocks.shape[1], inputs) == HALVES:
        return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)
    codes, scales, offsets = decode(blocks, inputs)
    grouped = codes.reshape(len(codes), scales.shape[1], -1).astype(np.float32)
    return (grouped * scales[..., None] + offsets[..., None]).reshape(codes.shape)


def shortened(blocks: Array, inputs: int) -> Array:
    """The same as SHORT, which every kind can become: weights of several kinds make one matrix."""
    codes, scales, offsets = decode(blocks, inputs)
    times = inputs // 16 // scales.shape[1]
    return encode(SHORT, codes, scales.repeat(times, axis=1), offsets.repeat(times, axis=1))
