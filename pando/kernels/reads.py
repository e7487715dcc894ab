"""The reads of a step as a few int32 arrays: what a plan becomes once, and every layer of every step takes until the plan changes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .reference import Read

Ints = NDArray[np.int32]

FORMED = 2048  # pages and queries, up to which reads have a form


class Reads(NamedTuple):
    """Read r looks at `tokens[r]` keys in the pages from `page_starts[r]` to `page_starts[r + 1]`, the first of them stored at position
    `first[r]`, for the queries from `query_starts[r]` to `query_starts[r + 1]`, which stand `shifts` behind where it was stored."""

    page_size: int
    pages: Ints  # all reads' pages, one read behind the other
    page_starts: Ints  # [R + 1]
    tokens: Ints  # [R]
    first: Ints  # [R]
    queries: Ints  # of all reads: which of the step's tokens
    query_starts: Ints  # [R + 1]
    shifts: Ints  # one per query
    unseen: int = 0  # of all keys together: those that nobody saw when the plan was made, since they were not there yet

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def brought(self) -> Ints:
        """The queries of each read, counted."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @property
    def distinct(self) -> int:
        """Pages, each of them once. Few are counted sooner by themselves than among all numbers that pages have."""
        few = len(self.pages) <= FORMED
        return len(set(self.pages.tolist())) if few else int(np.count_nonzero(np.bincount(self.pages)))

    @property
    def form(self) -> bytes | None:
        """All but which pages they are: what is cut of one suits the others of its form. None: it takes as long to tell as to cut."""
        if len(self.pages) + len(self.queries) > FORMED:
            return None
        numbers = self.page_starts, self.tokens, self.first, self.queries, self.query_starts, self.shifts
        facts = np.array((self.page_size, self.distinct, self.unseen, *map(len, numbers)))
        return b"".join((facts.tobytes(), *(each.tobytes() for each in numbers)))

    def read(self, r: int) -> Read:
        """As the definition takes it."""
        pages = self.pages[self.page_starts[r] : self.page_starts[r + 1]].astype(np.int64)
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[: self.tokens[r]]
        mine = slice(self.query_starts[r], self.query_starts[r + 1])
        queries, shifts = (torch.from_numpy(x[mine].astype(np.int64)) for x in (self.queries, self.shifts))
        return Read(torch.from_numpy(slots), int(self.first[r]), queries, shifts)

    def each(self) -> Iterator[Read]:
        return map(self.read, range(len(self)))


def joined(page_size: int, reads: Sequence[tuple[Sequence[int], int, int, Sequence[int], Sequence[int]]], unseen: int = 0) -> Reads:
    """From (pages, tokens, first, queries, shifts) of each read: for few of them, and for tests."""
    pages, tokens, first, queries, shifts = zip(*reads, strict=True) if reads else ((),) * 5
    lists = _flat(pages), _starts(pages), _flat([tokens]), _flat([first]), _flat(queries), _starts(queries), _flat(shifts)
    return Reads(page_size, *lists, unseen)


def _flat(lists: Sequence[Sequence[int]]) -> Ints:
    return np.array([number for numbers in lists for number in numbers], dtype=np.int32)


def _starts(lists: Sequence[Sequence[int]]) -> Ints:
    return np.cumsum([0, *map(len, lists)]).astype(np.int32)
