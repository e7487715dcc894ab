"""From the turns of rows to the schedule of a step. Where all of them go on by a token, it is the last one moved on."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .row import Copy, Row, Schedule

if TYPE_CHECKING:
    from ..store.transfer import Load

Turn = tuple[Row, int, int, int]  # a row in a step: how many of its tokens it has computed, how many it computes, how many there are


class Turns:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._last = Schedule([], np.zeros(0, dtype=np.int64), [], [])
        self._room: NDArray[np.int64] | None = None  # steps that each of its rows can go on in its pages; None: they must be looked at
        self._steady = False  # its rows get their next tokens and compute nothing else: it may be moved on
        self._changed = True

    def change(self) -> None:
        """What rows read is not what it was when the last schedule was made."""
        self._changed = True

    def look(self) -> None:
        """A row of the last schedule may not go on."""
        self._steady = False

    def make(self, turns: Sequence[Turn], copies: Sequence[Copy], loads: "Sequence[Load]") -> Schedule:
        """`loads`: what rows of it read that is still on its way."""
        last, rows, counts = self._last, [row for row, _, _, _ in turns], [new for _, _, new, _ in turns]
        ready = [row for row, start, new, length in turns if start + new == length and row.makes is None]
        rare = [turn for turn in turns if turn[0].repair or turn[0].scored is not None or turn[0].makes is not None]
        repairs = [row for row, _, _, _ in rare if row.repair and row.imports]
        scored = any(row.is_scored_from(start) for row, start, _, _ in rare)
        makers = [row for row, _, _, _ in rare if row.makes is not None]
        several = max(counts, default=1) > 1
        self._last = Schedule(
            rows,
            np.array([start for _, start, _, _ in turns], dtype=np.int64),
            counts,
            ready,
            copies,
            self._changed or several or rows != last.rows or counts != last.counts,
            loads,
            repairs,
            scored,
            plain=not (loads or repairs or scored or makers),
        )
        self._changed, self._room = False, None
        self._steady = bool(rows) and self._last.plain and not several and len(ready) == len(rows)
        return self._last

    def again(self, make_room: Callable[[Row, int], bool]) -> Schedule | None:
        """The last schedule moved on, if nobody went and nothing changed. Rows are looked at only where a page is full: `make_room` gives
        such a row room for so many tokens, if it can."""
        if self._changed or not self._steady:
            return None
        last = self._last
        if self._room is None:
            self._room = np.array([self._goes_on(row, start + 1) for row, start in zip(last.rows, last.starts.tolist(), strict=True)])
        for place in np.flatnonzero(self._room == 0).tolist():
            row, stop = last.rows[place], int(last.starts[place]) + 1
            if stop + 1 >= row.last or not make_room(row, stop + 1):
                return None
            self._room[place] = self._goes_on(row, stop)
        self._room -= 1
        self._last, self._changed = last.again(self._changed), False
        return self._last

    def _goes_on(self, row: Row, stop: int) -> int:
        """For how many steps a row that has computed so many tokens needs no page, and does not come to its end."""
        return min(len(row.pages) * self._page_size, row.last - 1) - stop


def flying(schedule: Schedule) -> Mapping[Row, tuple[int, int]]:
    """For the rows of a step that still runs: how many tokens each will have computed, and how many there will be."""
    stops, ready = (schedule.starts + schedule.counts).tolist(), set(schedule.ready)
    return {row: (stop, len(row.tokens) + (row in ready)) for row, stop in zip(schedule.rows, stops, strict=True)}
