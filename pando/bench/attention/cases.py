"""Cases of `pando bench attention`: a tree of segments, and the rows that read it. Anyone may bring them, as JSON."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ...errors import InvalidOption

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
MOST_HEADS, LARGEST_HEAD = 1024, 1024
MOST_TOKENS = 1 << 26  # of a segment, and of all of them together
MOST_SEGMENTS = MOST_ROWS = 1 << 16
MOST_READ = 1 << 30  # tokens of all rows' contexts
MOST_PATHS = 1 << 22  # segments of all rows' paths
LONGEST_FILE = 64 << 20  # bytes
LONGEST_NAME = 200
KINDS: dict[type, str] = {str: "a text", list: "a list", int: "a whole number"}

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A segment of a case, behind its parent."""

    parent: int | None
    tokens: int


@dataclass(frozen=True)
class Case:
    """`rows` names each row's last segment: a row's context is the path to it, and its query stands at the end."""

    name: str
    hq: int
    hkv: int
    d: int
    dtype: str
    segments: tuple[Part, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_heads(self)
        _check_tree(self)

    @property
    def group(self) -> int:
        return self.hq // self.hkv

    def path(self, leaf: int) -> list[int]:
        """From the root to a segment."""
        found, place = [], leaf
        while True:
            found.append(place)
            parent = self.segments[place].parent
            if parent is None:
                return found[::-1]
            place = parent

    @cached_property
    def order(self) -> list[int]:
        """Parents before their children."""
        done: dict[int, None] = {}
        for leaf in range(len(self.segments)):
            fresh = dict[int, None]()
            place: int | None = leaf
            while place is not None and place not in done:
                if place in fresh:
                    raise _wrong(self.name, f"segment {place} is behind itself; parents must lead to one that has null")
                fresh[place] = None
                place = self.segments[place].parent
            done.update(dict.fromkeys(reversed(fresh)))
        return list(done)

    @cached_property
    def first(self) -> list[int]:
        """The position at which each segment begins."""
        first, ends = [0] * len(self.segments), [0] * len(self.segments)
        for place in self.order:
            parent = self.segments[place].parent
            first[place] = 0 if parent is None else ends[parent]
            ends[place] = first[place] + self.segments[place].tokens
        return first

    @cached_property
    def depth(self) -> list[int]:
        depth = [0] * len(self.segments)
        for place in self.order:
            parent = self.segments[place].parent
            depth[place] = 0 if parent is None else depth[parent] + 1
        return depth

    @cached_property
    def readers(self) -> list[list[int]]:
        """The rows whose path each segment lies on."""
        readers: list[list[int]] = [[] for _ in self.segments]
        for row, leaf in enumerate(self.rows):
            readers[leaf].append(row)
        for place in reversed(self.order):
            parent = self.segments[place].parent
            if parent is not None:
                readers[parent] += readers[place]
        return [sorted(rows) for rows in readers]

    def length(self, row: int) -> int:
        """Tokens of a row's context."""
        leaf = self.rows[row]
        return self.first[leaf] + self.segments[leaf].tokens

    @cached_property
    def read_tokens(self) -> int:
        """What all rows read together: a token as often as it has readers."""
        return sum(len(rows) * part.tokens for rows, part in zip(self.readers, self.segments, strict=True))

    @property
    def shared_share(self) -> float:
        """The part of these that more than one row reads."""
        shared = sum(len(rows) * part.tokens for rows, part in zip(self.readers, self.segments, strict=True) if len(rows) > 1)
        return shared / self.read_tokens


def _check_heads(case: Case) -> None:
    if not case.name or len(case.name) > LONGEST_NAME:
        raise _wrong(case.name, f"its name has {len(case.name)} characters; give it 1 to {LONGEST_NAME}")
    if not case.name.isprintable():
        raise _wrong(case.name, "its name has characters that are not printed; it must fit a line of a table")
    for name, value, most in (("hq", case.hq, MOST_HEADS), ("hkv", case.hkv, MOST_HEADS), ("d", case.d, LARGEST_HEAD)):
        if not 1 <= value <= most:
            raise _wrong(case.name, f"{name} is {value}; it must be from 1 to {most}")
    if case.hq % case.hkv:
        raise _wrong(case.name, f"{case.hq} query heads cannot share {case.hkv} key heads evenly; make hq a multiple of hkv")
    if case.dtype not in DTYPES:
        raise _wrong(case.name, f"its dtype is {case.dtype!r}; it must be one of {', '.join(DTYPES)}")


def _check_tree(case: Case) -> None:
    for name, count, most in (("segments", len(case.segments), MOST_SEGMENTS), ("rows", len(case.rows), MOST_ROWS)):
        if not 1 <= count <= most:
            raise _wrong(case.name, f"it has {count} {name}; it must have from 1 to {most}")
    for index, part in enumerate(case.segments):
        if part.parent is not None and not 0 <= part.parent < len(case.segments):
            raise _wrong(case.name, f"the parent of segment {index} is {part.parent}, and there are {len(case.segments)} segments, from 0")
        if not 0 <= part.tokens <= MOST_TOKENS:
            raise _wrong(case.name, f"segment {index} has {part.tokens} tokens; it must have from 0 to {MOST_TOKENS}")
    if sum(part.tokens for part in case.segments) > MOST_TOKENS:
        raise _wrong(case.name, f"its segments have more than {MOST_TOKENS} tokens together; make it smaller")
    _ = case.order  # which there must be
    for row, leaf in enumerate(case.rows):
        if not 0 <= leaf < len(case.segments):
            raise _wrong(case.name, f"row {row} ends in segment {leaf}, and there are {len(case.segments)} segments, from 0")
        if case.length(row) == 0:
            raise _wrong(case.name, f"row {row} has no tokens to read; give one of its segments some")
    if sum(map(case.length, range(len(case.rows)))) > MOST_READ:
        raise _wrong(case.name, f"its rows read more than {MOST_READ} tokens together; make it smaller")
    if sum(case.depth[leaf] + 1 for leaf in case.rows) > MOST_PATHS:
        raise _wrong(case.name, f"its rows read more than {MOST_PATHS} segments together; make it smaller")


def _wrong(name: str, what: str) -> InvalidOption:
    return InvalidOption(f"case {name[:LONGEST_NAME]!r}: {what}")


def read_cases(file: Path) -> list[Case]:
    """One object, or a list of them."""
    try:
        if file.stat().st_size > LONGEST_FILE:
            raise InvalidOption(f"--cases {file}: larger than {LONGEST_FILE >> 20} MiB; split it")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidOption(f"--cases {file}: cannot be read as JSON ({error})") from error
    entries = found if isinstance(found, list) else [found]
    if not entries:
        raise InvalidOption(f"--cases {file}: holds no case")
    cases = [_case(entry, f"--cases {file}: entry {index}") for index, entry in enumerate(entries)]
    [(name, times)] = Counter(case.name for case in cases).most_common(1)
    if times > 1:
        raise InvalidOption(f"--cases {file}: {name!r} is the name of several cases; name each differently")
    return cases


def _case(entry: object, place: str) -> Case:
    if not isinstance(entry, dict):
        raise InvalidOption(f"{place} is no object with the fields name, hq, hkv, d, dtype, segments, rows")
    name, dtype = (_typed(entry.get(field), str, f"{place}: {field!r}") for field in ("name", "dtype"))
    hq, hkv, d = (_typed(entry.get(field), int, f"{place}: {field!r}") for field in ("hq", "hkv", "d"))
    parts, leaves = (_typed(entry.get(field), list, f"{place}: {field!r}") for field in ("segments", "rows"))
    segments = tuple(_part(part, f"{place}, segment {index}") for index, part in enumerate(parts))
    rows = tuple(_typed(leaf, int, f"{place}: row {index}") for index, leaf in enumerate(leaves))
    dtype = dtype.removeprefix("torch.")
    return Case(name, hq, hkv, d, SHORT.get(dtype, dtype), segments, rows)


def _part(part: object, place: str) -> Part:
    if not isinstance(part, dict) or "parent" not in part:
        raise InvalidOption(f'{place} must be {{"parent": an index or null, "tokens": a number}}')
    parent = None if part["parent"] is None else _typed(part["parent"], int, f"{place}: 'parent'")
    return Part(parent, _typed(part.get("tokens"), int, f"{place}: 'tokens'"))


def _typed(value: object, kind: type[T], place: str) -> T:
    if type(value) is not kind:  # True is no number here
        raise InvalidOption(f"{place} must be {KINDS[kind]}, not {'missing' if value is None else json.dumps(value)[:40]}")
    return value
