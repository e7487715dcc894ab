"""What is left of a history that was cut: which of its tokens, and the runs that their states are read from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..kv.run import Origin, Run
from .request import Span

ENDLESS = 2**62


class Move(NamedTuple):
    """What was left of a history, cut once more: these parts went, and so many tokens behind the runs had states and became a run."""

    ranges: tuple[Span, ...]
    held: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What is left of a history."""

    spans: tuple[Span, ...] = ()  # of its tokens before `end`, those that stay
    end: int = 0  # from there on all of them do
    runs: tuple[Run, ...] = ()  # the first of what is left, wherever that was encoded; the others are computed behind them
    moves: tuple[Move, ...] = ()  # that made these runs
    plain: "Layout | None" = None  # of what was left before the first of them, when there were no runs

    def parts(self, start: int = 0, stop: int = ENDLESS) -> Iterator[Span]:
        """Where in the history the tokens from one place to another of what is left are."""
        place = 0
        for first, end in (*self.spans, (self.end, ENDLESS)):
            low, high = max(start, place), min(stop, place + end - first)
            if low < high:
                yield first + low - place, first + high - place
            place += end - first

    def left(self, history: Sequence[int], stop: int = ENDLESS, start: int = 0) -> list[int]:
        """The tokens themselves, or those from one place to another."""
        found: list[int] = []
        for first, end in self.parts(start, stop):
            found += history[first:end]
        return found

    def length(self, history: int) -> int:
        """How many tokens are left of so many."""
        return history - self.end + sum(stop - start for start, stop in self.spans)

    def pieces(self, left: Sequence[int], held: int) -> list[Run]:
        """What is left as runs, as far as its states are held: so many tokens behind the runs."""
        at = self.placed
        own = Run(tuple(left[at : at + held]), at, Origin(self.runs, at))
        return [*self.runs, *([own] if held else [])]

    def moved(self, left: Sequence[int], move: Move) -> "Layout":
        """The same without some parts, and with runs of all that is held of the rest."""
        runs = self.pieces(left, move.held)
        for start, stop in reversed(move.ranges):
            runs = _out_of(runs, start, stop)
        return replace(self.without(move.ranges, runs), moves=(*self.moves, move), plain=self.plain or self)

    def packed(self) -> bytes:
        """How it was made, without any tokens."""
        first = self.plain or self
        return json.dumps([first.spans, first.end, self.moves]).encode()

    @classmethod
    def recalled(cls, packed: bytes, history: Sequence[int]) -> "Layout":
        """What was remembered, with the tokens that it needs."""
        spans, end, moves = json.loads(packed)
        layout = cls(tuple((start, stop) for start, stop in spans), end)
        for ranges, held in moves:
            layout = layout.moved(layout.left(history, layout.placed + held), Move(tuple((start, stop) for start, stop in ranges), held))
        return layout

    def computed(self) -> "Layout":
        """The same tokens, and none of their states."""
        return Layout(self.spans, self.end)

    @property
    def placed(self) -> int:
        """So many of its first tokens are those of the runs."""
        return sum(map(len, self.runs))

    @property
    def dropped(self) -> tuple[Span, ...]:
        ends = [0, *(stop for _, stop in self.spans)]
        starts = [*(start for start, _ in self.spans), self.end]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def without(self, ranges: Sequence[Span], runs: Sequence[Run]) -> "Layout":
        """The same without these parts of what is left. `runs` are what is left then, as far as its states are held."""
        known = sum(stop - start for start, stop in self.spans)
        held = sum(map(len, runs)) + sum(stop - start for start, stop in ranges) if runs else 0
        end = max(ranges[-1][1], known, held)
        kept = zip([0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), end], strict=True)
        spans = tuple(span for start, stop in kept for span in self.parts(start, stop))
        return Layout(spans, next(self.parts(end))[0], tuple(runs))


def _out_of(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The same runs without what stands between two positions; what stands behind moves up."""
    found = []
    for run in runs:
        if run.position < start:
            found.append(run.part(0, start - run.position))
        if run.end > stop:
            rest = run.part(max(0, stop - run.position), len(run))
            found.append(rest.moved(rest.position - (stop - start)))
    return found
