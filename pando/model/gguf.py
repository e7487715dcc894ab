"""A GGUF file, read without trusting it, and converted once into a directory in Hugging Face format.

The header is parsed here, with every count and offset checked against the size of the file, because a reader that believes a count of
2^60 never comes back. Weights are written one tensor at a time: memory holds one tensor, not the model.
"""

import json
import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import BadModelFile, PandoError, UnsupportedModel
from .gguf_blocks import KINDS, NoBlocks, blocks_of
from .gguf_layout import Array, Layout, layout_of
from .gguf_tokenizer import write_tokenizer
from .shelf import Progress, sync

log = logging.getLogger(__name__)

CONVERTER_VERSION = 3  # part of the cache folder's name: raise it when the same file would be converted differently

BLOCKS = "blocks.safetensors"  # the file beside model.safetensors that has quantised weights as codes
_AT_ONCE = 1 << 22  # weights that become codes at a time
_HEADER_LIMIT = 64 << 20  # the largest known vocabularies take 16 MiB
_MAX_NESTING = 4
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_KEPT = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 30: ("BF16", "<u2")}  # what safetensors can hold as it stands


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as numpy and torch write it
    kind: int  # ggml's number for the encoding
    offset: int  # from the start of the file
    size: int  # bytes in the file


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


class _Cursor:
    """Reads forward through the header and refuses to step over its end."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            if len(self.data) < self.size:
                raise BadModelFile(f"{self.path}: the GGUF header is larger than {_HEADER_LIMIT >> 20} MiB; the file is corrupt")
            raise BadModelFile(
                f"{self.path}: truncated: the header needs {self.at + count} bytes, the file has {self.size}; fetch it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self.path}: a string in the header is not UTF-8; the file is corrupt") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise BadModelFile(f"{self.path}: metadata of unknown type {kind}; the file is corrupt or of a newer format")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _array(self, depth: int) -> Any:
        if depth >= _MAX_NESTING:
            raise BadModelFile(f"{self.path}: metadata nested deeper than {_MAX_NESTING} arrays; the file is corrupt")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return [self.value(kind, depth + 1) for _ in range(count)]  # each takes 8 bytes or more, so the end of the file ends the loop


def read(path: Path) -> GGUFFile:
    """The header of a GGUF file: metadata, and where its tensors lie. Every tensor is inside the file, or this raises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(path, file.read(min(size, _HEADER_LIMIT)), size)
    if cursor.data[:4] != b"GGUF":
        raise BadModelFile(f"{path}: not a GGUF file (it begins with {cursor.data[:4]!r}); give a .gguf file or a Hugging Face directory")
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{path}: GGUF version {version}; Pando reads little-endian versions 2 and 3, convert the file again")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number("I"))
    infos = [(cursor.text(), _shape(cursor), cursor.number("I"), cursor.number("Q")) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise BadModelFile(f"{path}: an alignment of {alignment!r}, which is no power of two; the file is corrupt")
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(path, metadata, _placed(path, infos, start, size))


def _shape(cursor: _Cursor) -> tuple[int, ...]:
    count = cursor.number("I")
    if not 1 <= count <= 4:
        raise BadModelFile(f"{cursor.path}: a tensor with {count} dimensions; the file is corrupt")
    shape = tuple(cursor.number("Q") for _ in range(count))[::-1]
    if min(shape) == 0:
        raise BadModelFile(f"{cursor.path}: a tensor of shape {shape}; the file is corrupt")
    return shape


def _placed(path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int) -> dict[str, GGUFTensor]:
    sizes = _encodings()
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if kind not in sizes:
            raise UnsupportedModel(f"{path}: tensor {name} has encoding number {kind}, which Pando does not know; use another quantisation")
        per_group, group_bytes = sizes[kind]
        if shape[-1] % per_group:
            raise BadModelFile(f"{path}: tensor {name} has rows of {shape[-1]}, not a multiple of {per_group}; the file is corrupt")
        count = math.prod(shape) // per_group * group_bytes
        if start + offset + count > size:
            raise BadModelFile(f"{path}: truncated: {name} ends at byte {start + offset + count}, the file has {size}; fetch it again")
        if name in tensors:
            raise BadModelFile(f"{path}: tensor {name} is there twice; the file is corrupt")
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, count)
    claimed = sum(tensor.size for tensor in tensors.values())
    if claimed > size:  # overlapping tensors could make gigabytes out of a small file
        raise BadModelFile(f"{path}: its tensors claim {claimed} bytes, the file has {size}; the file is corrupt")
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for one, other in pairwise(in_order):
        if one.offset + one.size > other.offset:
            raise BadModelFile(f"{path}: the tensors {one.name} and {other.name} share bytes; the file is corrupt")
    return tensors


def _encodings() -> dict[int, tuple[int, int]]:
    """ggml's number -> elements in a group, bytes in a group."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise PandoError("reading GGUF files needs the package gguf; install it with: pip install gguf") from error
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def convert(path: Path, into: Path, progress: Progress) -> None:
    """Writes the files of a model into the existing directory `into`, on disk: settings, weights and what its tokenizer knows."""
    file = read(path)
    try:
        layout = _write_settings(file, into)
    except (TypeError, ValueError, ArithmeticError) as error:  # a list where one number belongs, a number where a text does
        raise BadModelFile(f"{path}: its metadata does not fit together ({error}); the file is corrupt") from error
    _write_weights(file, layout, into, progress)
    for written in [*into.iterdir(), into]:
        sync(written)


def _write_settings(file: GGUFFile, into: Path) -> Layout:
    """All but the weights."""
    path = file.path
    factors = file.tensors.get("rope_freqs.weight")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    layout = layout_of(path, file.metadata, shapes, None if factors is None else _values(path, factors))
    tokens, rows = len(file.metadata.get("tokenizer.ggml.tokens", ())), layout.config["vocab_size"]
    if tokens > rows:
        raise BadModelFile(f"{path}: {tokens} tokens but only {rows} embeddings; the file is corrupt")
    _check_encodings(file)
    (into / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(path, file.metadata, into)
    return layout


def _check_encodings(file: GGUFFile) -> None:
    """Finds out before anything is written whether every encoding in the file can be decoded."""
    for kind in {tensor.kind for tensor in file.tensors.values()}:
        some = next(tensor for tensor in file.tensors.values() if tensor.kind == kind)
        one = _encodings()[kind]
        _decode(file.path, some.name, np.zeros(one[1], np.uint8), kind, (one[0],))


class _Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    code: str  # of its dtype, as safetensors has it
    shape: list[int]
    size: int  # bytes
    values: Callable[[], Array]


def _write_weights(file: GGUFFile, layout: Layout, into: Path, progress: Progress) -> None:
    """Plain, for everybody, and those that are quantised as codes, too, for linear maps of few rows."""

    def entry(source: str, name: str) -> _Entry:
        tensor = file.tensors[source]
        code, dtype = _KEPT.get(tensor.kind, ("F32", "<f4"))
        size = math.prod(tensor.shape) * np.dtype(dtype).itemsize
        return _Entry(name, code, layout.shape(source, tensor.shape), size, lambda: layout.arrange(source, _values(file.path, tensor)))

    def coded(source: str, name: str) -> _Entry:
        tensor = file.tensors[source]
        rows, row_bytes = tensor.shape[0], tensor.shape[1] // 4 * KINDS[tensor.kind]
        return _Entry(name, "U8", [rows, row_bytes], rows * row_bytes, lambda: layout.arrange(source, _blocks(file.path, tensor)))

    plain = [entry(*each) for each in layout.names.items()]
    alone = {"token_embd.weight"} if "output.weight" in file.tensors else set()  # no linear map
    names = [each for each in layout.names.items() if each[0] not in alone and layout.keeps_rows(each[0])]
    codes = [coded(*each) for each in names if _has_blocks(file.tensors[each[0]])]
    total = sum(each.size for each in (*plain, *codes))
    _write(into / "model.safetensors", plain, lambda done: progress(done, total))
    if not codes:
        return
    try:
        before = total - sum(each.size for each in codes)
        _write(into / BLOCKS, codes, lambda done: progress(before + done, total))
    except (NoBlocks, OSError) as error:  # a number that is none, or a full disk
        log.warning("%s is converted without its codes, by which few rows would be computed faster: %s", file.path, error)
        (into / BLOCKS).unlink(missing_ok=True)


def _write(target: Path, entries: Sequence[_Entry], progress: Callable[[int], None]) -> None:
    """The safetensors format, streamed: the length of a JSON header, the header, then the tensors end to end."""
    ends = list(accumulate((entry.size for entry in entries), initial=0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry, (at, end) in zip(entries, pairwise(ends), strict=True):
        header[entry.name] = {"dtype": entry.code, "shape": entry.shape, "data_offsets": [at, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry, end in zip(entries, ends[1:], strict=True):
            out.write(np.ascontiguousarray(entry.values()).data)
            progress(end)


def _has_blocks(tensor: GGUFTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0 and tensor.kind in KINDS


def _blocks(path: Path, tensor: GGUFTensor) -> Array:
    """A part of its rows at a time: beside the codes there is room for a part of the numbers, not for all of them."""
    raw = _read(path, tensor).reshape(tensor.shape[0], -1)
    step = max(1, _AT_ONCE // tensor.shape[1])

    def decoded(part: Array) -> Array:
        return _decode(path, tensor.name, part, tensor.kind, (len(part), tensor.shape[1]))

    parts = (raw[at : at + step] for at in range(0, len(raw), step))
    return np.concatenate([blocks_of(part, tensor.kind, _encodings()[tensor.kind][1], decoded) for part in parts])


def _values(path: Path, tensor: GGUFTensor) -> Array:
    return _decode(path, tensor.name, _read(path, tensor), tensor.kind, tensor.shape)


def _read(path: Path, tensor: GGUFTensor) -> Array:
    """Its bytes: a map of a file that somebody cuts short would end the process."""
    raw = np.fromfile(path, np.uint8, tensor.size, offset=tensor.offset)
    if len(raw) < tensor.size:
        raise BadModelFile(f"{path} ends within tensor {tensor.name}, and did not when its conversion began; fetch it again")
    return raw


def _decode(path: Path, name: str, raw: Array, kind: int, shape: tuple[int, ...]) -> Array:
    """float16 and bfloat16 stay as they are; what is quantised becomes float32, since 16 bits do not hold scale times integer exactly."""
    if kind in _KEPT:
        return raw.view(_KEPT[kind][1]).reshape(shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    encoding = GGMLQuantizationType(kind)
    try:
        values = dequantize(raw.reshape(*shape[:-1], -1), encoding)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{path}: tensor {name} is encoded as {encoding.name}, which Pando cannot decode; use Q8_0 or F16"
        ) from error
    return np.asarray(values, np.float32).reshape(shape)
