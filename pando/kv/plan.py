"""The reads of one step: each shared run of pages once, whatever the number of rows; then one private run per row.

A row is a list of placements and a tail, the pages it is writing. Segments with the same readers at the same shifts, one behind the
other, are one read. Sharing costs a launch and a merge, so a segment is shared only where that pays; otherwise it joins the private run
of each of its readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .segment import Placement


@dataclass(frozen=True)
class RowView:
    """A row as the plan sees it."""

    placements: Sequence[Placement]
    tail: tuple[int, ...]  # pages that only this row reads
    tail_first: int  # position of the tail's first token


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

    launch: int = 48  # tokens that could be read in the time a further read costs
    merge: int = 2  # per row and head of a group

    def pays(self, tokens: int, rows: int, group: int) -> bool:
        return tokens * (rows - 1) > self.launch + self.merge * group * rows


@dataclass(frozen=True)
class Plan:
    shared: tuple[Read, ...]
    private: tuple[Read, ...]

    @property
    def reads(self) -> tuple[Read, ...]:
        return self.shared + self.private


def plan(rows: Sequence[RowView], page_size: int, group: int = 1, cost: CostModel | None = None) -> Plan:
    cost = cost or CostModel()
    readers = _readers(rows)
    shared: list[Read] = []
    private: list[Read] = []
    decided: dict[int, bool] = {}  # segment: is it shared? The first row that meets it decides for all of its readers
    for index, row in enumerate(rows):
        own: list[Read] = []
        for chain in _chains(row.placements, readers, page_size):
            of = readers[id(chain[0].segment)]
            if id(chain[0].segment) not in decided:
                pays = cost.pays(sum(len(p.segment) for p in chain), len(of), group)
                decided.update({id(p.segment): pays for p in chain})
                if pays:
                    shared.append(_read(chain, tuple(r for r, _ in of), tuple(s for _, s in of)))
            own += [_read([p], (index,), (p.shift,)) for p in chain if not decided[id(p.segment)]]
        if row.tail:
            own.append(Read(row.tail, len(row.tail) * page_size, row.tail_first, (index,), (0,)))
        private += _joined(own, page_size)
    return Plan(tuple(shared), tuple(private))


Readers = dict[int, list[tuple[int, int]]]  # by the segment's identity: (row, shift) of each reader


def _readers(rows: Sequence[RowView]) -> Readers:
    found: Readers = {}
    for index, row in enumerate(rows):
        for placement in row.placements:
            found.setdefault(id(placement.segment), []).append((index, placement.shift))
    return found


def _chains(placements: Sequence[Placement], readers: Readers, page_size: int) -> list[list[Placement]]:
    """Neighbours with the same readers, cut where a page is not full or positions jump."""
    chains: list[list[Placement]] = []
    for placement in placements:
        last = chains[-1][-1] if chains else None
        if (
            last is not None
            and readers[id(last.segment)] == readers[id(placement.segment)]
            and len(last.segment) % page_size == 0
            and last.segment.first + len(last.segment) == placement.segment.first
        ):
            chains[-1].append(placement)
        else:
            chains.append([placement])
    return chains


def _read(chain: Sequence[Placement], rows: tuple[int, ...], shifts: tuple[int, ...]) -> Read:
    pages = tuple(page for p in chain for page in p.segment.pages)
    return Read(pages, sum(len(p.segment) for p in chain), chain[0].segment.first, rows, shifts)


def _joined(reads: Sequence[Read], page_size: int) -> list[Read]:
    """One row's private reads, neighbours made one."""
    out: list[Read] = []
    for read in reads:
        last = out[-1] if out else None
        if last is not None and last.shifts == read.shifts and last.first + last.tokens == read.first and last.tokens % page_size == 0:
            out[-1] = Read(last.pages + read.pages, last.tokens + read.tokens, last.first, last.rows, last.shifts)
        else:
            out.append(read)
    return out
