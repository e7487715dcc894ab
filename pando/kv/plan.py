"""The reads of one step: each shared run of pages once, whatever the number of rows; then one private run per row.

A row is a list of placements and a tail, the pages it is writing: its entries. An entry is linked to the one before it in its row if the
same read could serve both: the same shift, no gap between their positions, and no page that is half full. A segment whose every entry is
linked to the same segment, which has no further readers, continues that one: such chains are one read. Sharing costs a launch and a merge,
so a chain is shared only where that pays; otherwise its entries join the private runs of their rows, and there, too, linked entries are one
read.

Where there are several rows, nothing here loops over entries in Python: a view keeps its own as bytes, and a thousand of those are joined
and read as one array.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .segment import Placement

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
FACTS = Struct("5q")  # of an entry: name, shift, first, tokens, pages
TAIL = 0  # instead of a name: the last entry of a row, of which nobody else knows
MANY, EACH = 8000, 20  # `launch` and `merge` for many rows: what each of them adds is less when a device is full anyway (H200)
PART = 4  # tokens that could be read in the time that one part more costs, of a row that merges anyway, for each head of a group (H200)


class Entries(NamedTuple):
    """What the rows read, one row behind the other."""

    name: Numbers  # of the segment
    shift: Numbers
    first: Numbers
    tokens: Numbers
    pages: Numbers  # how many
    row: Numbers


def _place(placement: Placement) -> tuple[bool, int, int]:
    """Unmoved ones last: the tail may go on where they end."""
    segment, shift = placement
    return shift == 0, shift, segment.first


@dataclass(frozen=True)
class RowView:
    """A row as the plan sees it. Nothing of it changes: a row that does is seen anew."""

    placements: Sequence[Placement]
    tail: tuple[int, ...]  # pages that only this row reads
    tail_first: int  # position of the tail's first token
    facts: bytes = field(init=False, repr=False)  # of its entries
    pages: bytes = field(init=False, repr=False)  # of all of them

    def __post_init__(self) -> None:
        facts, pages, seen = [], [], set()
        for placement in sorted(self.placements, key=_place):
            segment, shift = placement
            while segment in seen:
                segment = segment.again
            seen.add(segment)
            if tokens := len(segment.tokens):
                facts.append(FACTS.pack(id(segment), shift, segment.first, tokens, len(segment.pages)))
                pages.append(segment.page_bytes)
        facts.append(FACTS.pack(TAIL, 0, self.tail_first, 0, len(self.tail)))
        pages.append(array("i", self.tail).tobytes())
        object.__setattr__(self, "facts", b"".join(facts))
        object.__setattr__(self, "pages", b"".join(pages))


@dataclass(frozen=True)
class Read:
    pages: tuple[int, ...]
    tokens: int  # slots of the pages that may be read; a tail's last ones are yet to be written
    first: int  # the position at which the first of them was stored
    rows: tuple[int, ...]
    shifts: tuple[int, ...]  # one per row


@dataclass(frozen=True)
class CostModel:
    """When does one read for n rows beat n reads? When the passes over the segment that it saves outweigh the launch and the merge."""

    launch: float = 48  # tokens that could be read in the time a further read costs
    merge: float = 2  # per row and head of a group

    def pays(self, tokens: Numbers, rows: Numbers, group: int, *, merging: bool = False) -> Flags:
        """`merging`: these rows merge something anyway, and one part more is little."""
        launch, merge = (0, PART) if merging else (self.launch, self.merge)
        few, many = launch + merge * group * rows, max(launch, MANY) + min(merge, EACH) * group * rows
        found: Flags = tokens * (rows - 1) > np.minimum(few, many)
        return found


ALWAYS = CostModel(0, 0)  # shares whatever two rows read
NEVER = CostModel(math.inf)
DEFAULT = CostModel()


@dataclass(frozen=True, eq=False)
class Plan:
    """Read r looks at `tokens[r]` tokens in the pages from `page_starts[r]` to `page_starts[r + 1]`, stored from position `first[r]` on,
    for the rows from `row_starts[r]` to `row_starts[r + 1]`. No read has a row twice."""

    page_size: int
    shared: int  # so many of the reads, the first ones, serve several rows
    pages: Ints
    page_starts: Ints  # [R + 1]
    tokens: Ints  # [R]
    first: Ints  # [R]
    rows: Ints
    row_starts: Ints  # [R + 1]
    shifts: Ints  # one per row

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def reads(self) -> tuple[Read, ...]:
        """For people and tests."""
        pages, rows, shifts = (tuple(column.tolist()) for column in (self.pages, self.rows, self.shifts))
        found = []
        for r, (tokens, first) in enumerate(zip(self.tokens.tolist(), self.first.tolist(), strict=True)):
            mine = slice(self.row_starts[r], self.row_starts[r + 1])
            found.append(Read(pages[self.page_starts[r] : self.page_starts[r + 1]], tokens, first, rows[mine], shifts[mine]))
        return tuple(found)

    @property
    def shared_reads(self) -> tuple[Read, ...]:
        return self.reads[: self.shared]

    @property
    def private_reads(self) -> tuple[Read, ...]:
        return self.reads[self.shared :]


def plan(rows: Sequence[RowView], page_size: int, group: int = 1, cost: CostModel = DEFAULT) -> Plan:
    if len(rows) < 2:
        return _flat(rows, page_size)
    # An array [E] has a value for each entry, one [S] for each segment or tail, in the order in which entries first name them.
    entries, pages = _entries(rows, page_size)
    linked = _linked(entries, page_size)  # [E]
    segment, origin, readers = _segments(entries.name)  # [E], [S], [S]
    continues = _continues(linked, segment, origin, readers)  # [S]
    heads, chain = np.flatnonzero(~continues), np.cumsum(~continues) - 1
    tokens, count = _sums(entries.tokens[origin], heads), readers[heads]  # of each chain
    pays = cost.pays(tokens, count, group) & (count > 1)
    if cost.merge > PART and pays.any():
        merges = np.zeros(len(rows), np.bool_)
        merges[entries.row[pays[chain][segment]]] = True
        all_merge = np.bincount(segment[merges[entries.row]], minlength=len(origin)) == readers
        pays |= all_merge[heads] & cost.pays(tokens, count, group, merging=True)
    shared = pays[chain]  # [S]

    lead = shared & ~continues  # [S]
    among = np.flatnonzero(lead[segment])
    among = among[_order(segment[among])]  # for each shared read, an entry of each of its rows
    private = ~shared[segment]  # [E]
    own = np.flatnonzero(private)
    opens = ~(linked[own] & private[own - 1])

    members = np.concatenate((origin[shared], own))  # the entries that are read, one behind the other
    starts = np.flatnonzero(np.concatenate((lead[shared], opens)))  # where among them a read begins
    who = np.concatenate((among, own[opens]))
    page_counts = entries.pages[members]
    return Plan(
        page_size=page_size,
        shared=int(np.count_nonzero(pays)),
        pages=pages[ranges(_starts(entries.pages)[members], page_counts)],
        page_starts=_starts(_sums(page_counts, starts)).astype(np.int32),
        tokens=_sums(entries.tokens[members], starts).astype(np.int32),
        first=entries.first[members[starts]].astype(np.int32),
        rows=entries.row[who].astype(np.int32),
        row_starts=_starts(np.concatenate((readers[lead], np.ones(len(who) - len(among), np.int64)))).astype(np.int32),
        shifts=entries.shift[who].astype(np.int32),
    )


def _flat(rows: Sequence[RowView], page_size: int) -> Plan:
    """Of one row, or none: each run of linked entries is a read, and their pages stand in order already."""
    tokens, first, shifts, pages = list[int](), list[int](), list[int](), list[int]()
    for name, shift, start, length, count in FACTS.iter_unpack(b"".join([row.facts for row in rows])):
        length = count * page_size if name == TAIL else length
        if tokens and shift == shifts[-1] and start == first[-1] + tokens[-1] and tokens[-1] % page_size == 0:
            tokens[-1] += length
            pages[-1] += count
        elif length:
            tokens.append(length)
            first.append(start)
            shifts.append(shift)
            pages.append(count)
    return Plan(
        page_size=page_size,
        shared=0,
        pages=np.frombuffer(b"".join([row.pages for row in rows]), np.int32),
        page_starts=np.array([0, *accumulate(pages)], np.int32),
        tokens=np.array(tokens, np.int32),
        first=np.array(first, np.int32),
        rows=np.zeros(len(tokens), np.int32),
        row_starts=np.arange(len(tokens) + 1, dtype=np.int32),
        shifts=np.array(shifts, np.int32),
    )


def _entries(rows: Sequence[RowView], page_size: int) -> tuple[Entries, Ints]:
    """Of all rows, and their pages."""
    facts = np.frombuffer(b"".join([row.facts for row in rows]), np.int64).reshape(-1, 5)
    name, shift, first, tokens, counts = facts.T.copy()
    is_tail = name == TAIL
    tails = is_tail.nonzero()[0]
    tokens[tails] = counts[tails] * page_size
    entries = Entries(name, shift, first, tokens, counts, is_tail.cumsum() - is_tail)
    if not tokens.all():  # a row without a tail
        entries = Entries(*(column[tokens > 0] for column in entries))
    return entries, np.frombuffer(b"".join([row.pages for row in rows]), np.int32)


def _segments(name: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Numbers segments and tails in the order in which they are met: that of each entry; then of each its first entry, and how many."""
    is_origin = name == TAIL
    order = np.flatnonzero(~is_origin)
    order = order[np.argsort(name[order])]
    same = name[order]
    begins = np.concatenate((same[:1] != TAIL, same[1:] != same[:-1]))
    origin = np.minimum.reduceat(order, np.flatnonzero(begins)) if len(order) else order
    is_origin[origin] = True
    segment = np.cumsum(is_origin) - 1
    segment[order] = segment[origin][np.cumsum(begins) - 1]
    return segment, np.flatnonzero(is_origin), np.bincount(segment)


def _linked(entries: Entries, page_size: int) -> Flags:
    """Could one read serve an entry and the one before it?"""
    _, shift, first, tokens, _, row = entries
    linked = np.zeros(len(row), np.bool_)
    same = (row[1:] == row[:-1]) & (shift[1:] == shift[:-1]) & (first[1:] == (first + tokens)[:-1])
    linked[1:] = same & (tokens[:-1] % page_size == 0)
    return linked


def _continues(linked: Flags, segment: Numbers, origin: Numbers, readers: Numbers) -> Flags:
    """Is every entry of a segment linked to the same one before it, and does that have no other readers? Then the two have the same rows at
    the same shifts, and the numbers of the two follow one another."""
    before = np.concatenate((segment[-1:], segment[:-1]))
    leader = before[origin]
    same = linked & (before == leader[segment])
    always: Flags = np.bincount(segment[same], minlength=len(origin)) == readers
    alone: Flags = readers == readers[leader]
    return always & alone


def _order(numbers: Numbers) -> Numbers:
    """That sorts small numbers, equal ones as they stand: the narrower, the faster."""
    return np.argsort(numbers.astype(np.min_scalar_type(int(numbers.max(initial=0)))), kind="stable")


def ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """start, start + 1, and so on from each start, as many as its count, one behind the other."""
    found: Numbers = (starts - counts.cumsum() + counts).repeat(counts)
    found += np.arange(len(found))
    return found


def _starts(counts: Numbers) -> Numbers:
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return starts


def _sums(numbers: Numbers, starts: Numbers) -> Numbers:
    """From each start to the next."""
    return np.add.reduceat(numbers, starts) if len(starts) else starts
