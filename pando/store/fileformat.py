"""One kept page as bytes, in a file and on a remote server alike: a header, then its layers, one after another.

    fixed part    magic, version, counts, the keys of the page and of the one before it, tenant, and the shape with the model's digest
    tokens        int32 each
    layer sums    the CRC-32 of each layer, 4 bytes each
    padding       zeros, so that the payload begins at a multiple of 64
    header sum    the CRC-32 of everything before it
    payload       layer 0, layer 1, and so on, all of the same size

Numbers are little-endian. CRC-32 finds every damage within 32 neighbouring bits, and misses one in four thousand million of the others. It
guards against accidents; against people who may write here there is no guard but the rights of the directory.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kv.segment import Key
from .tier import Card, Lost, Shape

VERSION = 1
MAGIC = b"PANDOKV\0"

Name = tuple[str, Key]  # the tag of a shape, and a key: what a page is found by
PROBE = 4096  # one read of so many bytes has the header of most pages

_LEAD = struct.Struct("<8sI")  # the same in every version
_FIXED = struct.Struct("<8sI IIIIIQ 32s32s32s32s 16s16s")
_SUM = struct.Struct("<I")
_ALIGNMENT = 64
_MOST = 2**12  # tokens of a page, and layers: no options and no model have more, and a header that says so is not read to its end


@dataclass(frozen=True)
class Header:
    card: Card
    shape: Shape
    layer_bytes: int
    sums: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where the payload begins."""
        return _start(len(self.card.tokens), self.shape.layers)

    @property
    def size(self) -> int:
        """Of all of it, header and payload."""
        return file_size(len(self.card.tokens), self.shape, self.layer_bytes)

    @property
    def name(self) -> Name:
        return tag(self.shape), self.card.key

    @property
    def is_end(self) -> bool:
        """Is it the unfilled page at the end of a sequence?"""
        return len(self.card.tokens) < self.shape.page_size

    def offset(self, layer: int) -> int:
        return self.start + layer * self.layer_bytes

    def check(self, layer: int, data: memoryview) -> None:
        """Raises Lost unless these are the bytes that were kept."""
        if zlib.crc32(data) != self.sums[layer]:
            raise Lost("corrupt", f"layer {layer} of page {self.card.key.hex()[:12]} does not agree with its checksum")


def tag(shape: Shape) -> str:
    """A name for the shape that a directory or a remote key can have."""
    facts = f"{shape.layers} {shape.kv_heads} {shape.head_dim} {shape.dtype} {shape.page_size} {shape.codec}"
    return hashlib.sha256(shape.model + facts.encode()).hexdigest()[:16]


def file_size(tokens: int, shape: Shape, layer_bytes: int) -> int:
    return _start(tokens, shape.layers) + shape.layers * layer_bytes


def header_for(card: Card, shape: Shape, layers: Sequence[memoryview]) -> Header:
    assert len(layers) == shape.layers and len({layer.nbytes for layer in layers}) == 1, "one buffer for each layer, of one size"
    return Header(card, shape, layers[0].nbytes, tuple(zlib.crc32(layer) for layer in layers))


def pack(header: Header) -> bytes:
    card, shape = header.card, header.shape
    counts = len(card.tokens), shape.layers, shape.kv_heads, shape.head_dim, shape.page_size, header.layer_bytes
    keys = card.key, card.parent, card.tenant, shape.model
    fixed = _FIXED.pack(MAGIC, VERSION, *counts, *keys, shape.dtype.encode(), shape.codec.encode())
    lists = struct.pack(f"<{len(card.tokens)}i{shape.layers}I", *card.tokens, *header.sums)
    body = (fixed + lists).ljust(header.start - _SUM.size, b"\0")
    return body + _SUM.pack(zlib.crc32(body))


def read_header(read: Callable[[int, int], bytes], size: int) -> Header:
    """Of `size` bytes, of which `read(offset, length)` gives a part; raises Lost unless it is sound and none of them is missing."""
    data = read(0, min(PROBE, size))
    if len(data) < _LEAD.size:
        raise Lost("short", f"{size} bytes, less than a header")
    magic, version = _LEAD.unpack_from(data)
    if magic != MAGIC:
        raise Lost("corrupt", "it does not begin like a page")
    if version != VERSION:
        raise Lost("version", f"format version {version}, and this is {VERSION}")
    if len(data) < _FIXED.size:
        raise Lost("short", f"{size} bytes, less than a header")
    tokens, layers = struct.unpack_from("<II", data, _LEAD.size)
    start = _start(tokens, layers)
    if start > size:
        raise Lost("short", f"{size} bytes, and its header alone should have {start}")
    if max(tokens, layers) > _MOST:
        raise Lost("corrupt", f"a page of {tokens} tokens and {layers} layers, and there are none with more than {_MOST}")
    if start > len(data):
        data += read(len(data), start - len(data))
    if len(data) < start or zlib.crc32(data[: start - _SUM.size]) != _SUM.unpack_from(data, start - _SUM.size)[0]:
        raise Lost("corrupt", "the header does not agree with its checksum")
    header = _unpack(data)
    if header.size != size:
        raise Lost("short" if size < header.size else "corrupt", f"{size} bytes, and it should have {header.size}")
    return header


def expect(header: Header, name: Name) -> None:
    """Raises Lost where it is sound, and not what was asked for: a page of this shape's tag, with this key."""
    if tag(header.shape) != name[0]:
        raise Lost("foreign", "it was made by another model, or for a cache of another shape")
    if header.card.key != name[1]:
        raise Lost("foreign", f"page {header.card.key.hex()[:12]} lies where {name[1].hex()[:12]} should")


def _unpack(data: bytes) -> Header:
    _, _, tokens, layers, kv_heads, head_dim, page_size, layer_bytes, key, parent, tenant, model, dtype, codec = _FIXED.unpack_from(data)
    lists = struct.unpack_from(f"<{tokens}i{layers}I", data, _FIXED.size)
    shape = Shape(model, layers, kv_heads, head_dim, _text(dtype), page_size, _text(codec))
    return Header(Card(key, parent, tenant, lists[:tokens]), shape, layer_bytes, lists[tokens:])


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


def _start(tokens: int, layers: int) -> int:
    unpadded = _FIXED.size + 4 * tokens + 4 * layers + _SUM.size
    return -(-unpadded // _ALIGNMENT) * _ALIGNMENT
