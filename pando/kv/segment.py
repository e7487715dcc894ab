"""Segments and their keys.

A key names everything the K and V of a run of tokens depend on: the model, the tenant, and every token before and in it. Keys are
chained page by page (SHA-256 over the key before and the page's tokens), so that the key of a run's last page names the whole context,
and cutting a segment in two never needs a new key.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, compress, count
from operator import ne
from typing import NamedTuple, overload

Key = bytes  # 32 bytes


@lru_cache(maxsize=256)
def root_key(model: bytes, salt: bytes) -> Key:
    """The empty context of one tenant of one model. Lengths are part of the digest, so that no two pairs collide."""
    return hashlib.sha256(b"pando" + len(model).to_bytes(8, "little") + model + salt).digest()


def packed(numbers: Sequence[int]) -> bytes:
    """As int32."""
    return numbers.tobytes() if isinstance(numbers, array) and numbers.typecode == "i" else struct.pack(f"{len(numbers)}i", *numbers)


def compact(numbers: Sequence[int]) -> "array[int]":
    """As an array. Lists are looked through from end to end whenever Python collects garbage: a thousand long prompts take it a third of
    a second."""
    made = array("i")
    made.frombytes(packed(numbers))  # to make it of the numbers takes twice as long
    return made


def page_key(context: Key, tokens: Sequence[int]) -> Key:
    return hashlib.sha256(context + packed(tokens)).digest()


class Lineage(NamedTuple):
    """Whose context it is. The first `public` pages are everyone's: their keys grow from `root`. From there on they grow from `owner`, too,
    so that tenants who begin with the same public text share that, and nothing behind it."""

    root: Key
    owner: Key
    public: int = 0  # pages

    @classmethod
    def of(cls, tenant: Key) -> "Lineage":
        return cls(tenant, tenant)


def extend_keys(keys: list[Key], lineage: Lineage, tokens: Sequence[int], page_size: int) -> None:
    """Appends the keys of the full pages of `tokens` that `keys` does not have yet."""
    if (len(keys) + 1) * page_size > len(tokens):
        return
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        context = keys[-1] if keys else lineage.root
        if len(keys) == lineage.public and lineage.owner != lineage.root:
            context += lineage.owner
        keys.append(page_key(context, tokens[start : start + page_size]))


def worth_having(page_size: int) -> int:
    """Of a page that goes on differently, so many tokens are worth a copy, or a load: fewer are alike by chance, and sooner computed with
    the others."""
    return max(1, page_size // 8)


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common beginning."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


class Tokens(Sequence[int]):
    """A run's tokens, page by page: to lengthen it or to take its end away copies none of them, however long it is."""

    __slots__ = ("pages",)

    def __init__(self, pages: tuple[tuple[int, ...], ...]) -> None:
        """All but the last are full."""
        self.pages = pages

    @classmethod
    def of(cls, tokens: Sequence[int], page_size: int) -> "Tokens":
        return cls(tuple(tuple(tokens[start : start + page_size]) for start in range(0, len(tokens), page_size)))

    def __len__(self) -> int:
        return (len(self.pages) - 1) * len(self.pages[0]) + len(self.pages[-1]) if self.pages else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pages)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return self.pages[0][0] if place == 0 and self.pages else tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


@dataclass(frozen=True, eq=False)
class Segment:
    """An immutable run of tokens whose K and V lie in `pages`, stored at positions `first`, `first + 1`, and so on."""

    keys: tuple[Key, ...]  # one per page; the last is the segment's key
    tokens: Sequence[int]
    pages: tuple[int, ...]
    first: int

    @property
    def key(self) -> Key:
        return self.keys[-1]

    @cached_property
    def page_bytes(self) -> bytes:
        """The pages as int32: joining bytes is the quickest way to the pages of many segments."""
        return packed(self.pages)

    @cached_property
    def again(self) -> "Segment":
        """What a row reads that places this segment a second time: the same, under a name of its own, for no read has a row twice."""
        return replace(self)

    @cached_property
    def _heads(self) -> dict[int, "Segment"]:
        return {}

    def head(self, tokens: int) -> "Segment":
        """Its first so many tokens: the same object for everyone who asks, so that they share its read."""
        if tokens == len(self):
            return self
        if tokens not in self._heads:
            self._heads[tokens] = replace(self, tokens=self.tokens[:tokens])
        return self._heads[tokens]

    def __len__(self) -> int:
        return len(self.tokens)


class Placement(NamedTuple):
    """A segment in a request, `shift` positions behind where it was stored. No cached byte moves: readers rotate their queries."""

    segment: Segment
    shift: int = 0
