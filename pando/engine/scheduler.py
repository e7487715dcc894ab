"""Which tokens are computed in the next step, and where their K and V go.

There are no phases: every running row has tokens to catch up with, one when it decodes, many when it is new. Rows that decode come first,
then the others share what is left of the step's budget, then waiting rows are admitted in the order of their arrival.

It cannot get stuck: a request that does not fit the pool alone is refused before it comes here, and a row that lacks a page takes it from
the cache, then from the row that arrived last. Where pins leave it none, it is `starved`, and the engine lifts them. A row that loses its
pages hands what it has computed to the tree and waits before who came later; its tokens are never lost, its states only for want of room.
"""

import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..kv.pages import Pages
from ..kv.segment import Key
from ..kv.tree import PrefixTree
from .below import Below
from .holding import Holding
from .imports import Want
from .makers import Makers
from .misses import Misses
from .row import Copy, Row, Schedule
from .turns import Turn, Turns, flying

if TYPE_CHECKING:
    from ..store.store import Store

LEAST = 32  # tokens of a step: prompts of fewer at a time would take for ever


class Scheduler:
    def __init__(
        self,
        pages: Pages,
        tree: PrefixTree,
        *,
        max_rows: int,
        budget: int,
        reuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
        store: "Store | None" = None,
    ) -> None:
        self.pages, self.tree = pages, tree
        self.max_rows, self.budget, self.reuse, self.clock = max_rows, budget, reuse, clock
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # in the order of arrival
        self.loading: list[Row] = []  # rows whose context is on its way, while others run
        self._landed: list[Row] = []  # of those, whose pages the tree gets with the next step: first those who borrowed them are answered
        self.preemptions, self._now, self._arrivals = 0, 0.0, itertools.count(1)
        self.turns, self._misses = Turns(pages.page_size), Misses(tree, reuse)
        self.starved = False  # nobody runs or is on its way, and there is no room for the first that waits
        self._stuck_at: int | None = None  # pages that could be had when nobody could be admitted: until there are more, or a row goes
        self.below = Below(store, tree) if store is not None else None
        self.makers = Makers(tree, self.waiting, self.running, self.loading, self._arrivals)
        self._holding = Holding(pages, tree, self.turns, self.below, self.makers.is_lacked, reuse=reuse)

    # ---- requests come and go

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            row.arrival, row.arrived = next(self._arrivals), row.arrived or self.clock()
            self.waiting.append(row)
            if self.below is not None:
                self.below.join(row)

    def remove(self, row: Row) -> None:
        """A row that is finished or no longer wanted; what it computed stays in the tree."""
        self.clear_away()
        self.makers.forget(row)
        if row in self.running or row in self.loading:
            (self.running if row in self.running else self.loading).remove(row)
            self._release(row)
        elif row in self.waiting:
            self.waiting.remove(row)
            self._holding.let_go(row)
            self._stuck_at = None
        if self.below is not None and row.makes is None:
            self.below.leave(row)

    def forget_states(self, asked: Collection[Row]) -> None:
        """After a step that did not finish: whoever is asked for, in whichever list, begins again, and nothing cached is trusted."""
        if self.below is not None:
            self.below.store.go()  # what was not begun would never end
        for row in dict.fromkeys((*self.running, *self.loading, *self.waiting, *asked, *self.makers)):
            if row.load is not None and self.below is not None:
                self.below.stop(row)
            row.stem, row.pages, row.settled, row.computed, row.imports, row.comes = None, [], 0, 0, (), ()
            row.arrival, row.arrived = row.arrival or next(self._arrivals), row.arrived or self.clock()
        for rows in (self.running, self.loading, self.waiting, self._landed):
            rows.clear()
        self.makers.tell_only(asked)
        self.waiting.extend(sorted((*asked, *self.makers), key=lambda row: (row.arrival, row.makes is None)))
        self.pages.reset()
        if self.below is not None:
            self.pages.withhold(self.below.forget_pool())
        self.tree.reset()
        self.turns.change()

    def shrink(self) -> bool:
        """Steps are half as large from now on; says whether they can be."""
        before = self.budget, self.max_rows
        if self.budget > LEAST:
            self.budget = max(LEAST, self.budget // 2)
        else:
            self.max_rows = max(1, self.max_rows // 2)
        return before != (self.budget, self.max_rows)

    # ---- a step

    def next(self) -> Schedule:
        schedule = self._made(None)
        assert schedule is not None
        return schedule

    def ahead(self, before: Schedule) -> Schedule | None:
        """The step behind one that still runs, made before the tokens of that one are known: its rows go on as if none of them ended. Not
        where that one has to be looked at first, nor where a row would have to stop for a page."""
        return self._made(before) if before.plain else None

    def retract(self) -> None:
        """The last step that was made counts for nothing: its rows compute it again."""
        self.turns.change()
        if self.below is not None:
            self.below.retract()

    def _made(self, before: Schedule | None) -> Schedule | None:  # None: `before`, which still runs, has to be looked at first
        self._now = self.clock()
        self.clear_away()
        self.waiting.extend(self.makers.decided(self.below, self._now) if self.makers.asks else ())
        is_stuck = self._stuck_at is not None and self._holding.to_be_had <= self._stuck_at
        someone_comes = self.loading or (self.waiting and not is_stuck and len(self.running) < self.max_rows)
        if not someone_comes and (again := self.turns.again(self._holding.give_room)) is not None:
            return again if self.below is None else self.below.depart(again)
        if self._take_arrived(is_ahead=before is not None):
            return None
        flown = {} if before is None else flying(before)
        places = [(row, *flown.get(row, (row.computed, len(row.tokens)))) for row in self.running]
        turns, copies = dict[Row, Turn](), list[Copy]()
        budget, pressed, size = self.budget, False, self.pages.page_size
        for row, start, length in sorted(places, key=lambda place: place[2] - place[1] > 1):
            count = min(length - start, budget)
            if not count or row.stem is None or (row in flown and length >= row.last):
                continue  # it has lost its pages to one before it, or comes to its end
            if before is not None and (row.loads or not self._holding.give_room(row, start + count)):
                return None
            if start + count > len(row.pages) * size:
                pressed = not self._make_room(row, start + count) or pressed
            if row.stem is not None:
                turns[row] = row, start, count, length
                budget -= count
        self.makers.look_ahead(turns)
        if not pressed:
            self._admit(budget, turns, copies)
        loads = self.below.hold_up_nobody(turns, self.running, self.loading, self.budget) if self.below is not None else []
        if before is not None and not turns:
            return None
        schedule = self.turns.make([turns[row] for row in self.running if row in turns], copies, loads)
        return schedule if self.below is None else self.below.depart(schedule)

    def _take_arrived(self, *, is_ahead: bool) -> bool:
        """Rows run when their context is there, or comes in time. Says whether one could, if the step before had been looked at."""
        for row in [row for row in self.loading if row.load is not None and row.load.late]:
            self._shun(row)
        for row in [row for row in self.loading if row.brings and (row.load is None or row.load.done or row.load.late)]:
            self._take_in(row)
        coming = [row for row in self.loading if not row.brings]
        arrived = self.below.in_time(coming, self.budget) if self.below is not None and self.running else coming  # alone, all wait
        if is_ahead and any(not load.done for row in arrived for load in row.loads):
            return True
        for row in arrived:
            self.loading.remove(row)
            self._run(row)
            if row.load is not None and row.load.done:
                self._end_load(row)
        return False

    def _end_load(self, row: Row) -> None:
        assert self.below is not None and row.load is not None
        if row.load.late or not self.below.end(row):
            self._shun(row)
        else:
            self._holding.hand_over(row, self._now)  # so that others find it before this row's first step is settled

    def _take_in(self, row: Row, *, later: bool = False) -> None:
        """What was brought up is there: others are told, and it is the tree's, now or later. What did not come whole is made instead."""
        if row.load is not None and (self.below is None or row.load.late or not self.below.end(row)):
            self._shun(row)
        elif row.behind:
            self._make_instead(row)
        else:
            self.makers.pass_on(row)
            self._landed.append(row) if later else self.remove(row)

    def clear_away(self) -> None:
        """What was brought up and borrowed is the tree's: to be done before anyone looks there, or takes something away."""
        if self._landed:
            landed, self._landed = self._landed, []
            for row in [row for row in landed if row in self.loading]:
                self.remove(row)
            self.tend()

    def _make_instead(self, row: Row) -> Row:
        assert row.makes is not None
        self.remove(row)
        self.waiting.appendleft(maker := self.makers.begin(row.tenant, row.makes, row.arrival, None, self._now))
        return maker

    def wait(self) -> None:
        """Nobody can run before something has come up, or has given back the pages that it still fills for nobody."""
        if self.below is not None:
            self.below.wait([load for row in self.loading for load in row.loads])

    def _shun(self, row: Row) -> None:
        """What a row waits for does not come: it begins again in other pages, and computes."""
        row.lose(row.loaded, row.settled)
        if row.brings:
            self._make_instead(row).is_shunned = True
        else:
            row.is_shunned = True
            self._preempt(row)

    def unload(self) -> None:
        """A step found that some of what it was to read did not come. Nothing of it counts, and its rows compute what is missing."""
        for row in (*self.running, *(row for row in self.loading if self.makers.borrowers(row))):
            if row.load is not None and (row.load.done or row.load.lost):
                (self._take_in if row.brings else self._end_load)(row)
        self.retract()
        self.tend()  # the store knows of the loss before it is asked again

    def detach(self) -> None:
        """Nothing below the pool is asked any more: what is on its way to it arrives, and rows compute what is missing."""
        assert self.below is not None
        try:
            for row in [row for row in (*self.running, *self.loading) if row.load is not None]:
                self._preempt(row)
            all(load.finish() for load, _ in self.below.limbo)  # those behind one that does not end wait for it, too
            self.tend()
            self.below.close()
        finally:  # whoever is interrupted leaves the rest: it is not known how much of it was done
            self.below = self._holding.below = None

    def settle(self, schedule: Schedule) -> None:
        """What was computed belongs to the row; pages that are full now belong to the tree."""
        for row in schedule.repairs:  # they have a copy now
            self._holding.let_go(row)
        for row in [row for row in self.loading if row.load in schedule.loads] if schedule.loads else ():
            self._take_in(row, later=True)  # what rows borrowed: every layer was waited for
        for row, count in zip(schedule.rows, schedule.counts, strict=True):
            if row.stem is None:
                continue  # it ended while the step ran
            if row.load is not None and self.below is not None:
                self.below.end(row)  # every layer of it was waited for
            row.computed += count
            if self.reuse and row.computed - row.settled >= self.pages.page_size and not self._holding.keeps_own(row):
                self._holding.hand_over(row, self._now)
        for row in () if schedule.plain else [row for row in schedule.rows if row.makes is not None and not row.behind]:
            self.makers.pass_on(row)
            self.remove(row)
        if self.below is not None and schedule.departure is not None:
            self.below.store.dismiss(schedule.departure)
        if not self._landed:
            self.tend()

    def tend(self) -> None:
        """Takes in what was moved between the tiers in the meantime."""
        if self.below is not None:
            is_more_room, returned = self.below.pump(), self.below.returned()
            self.pages.give(returned)
            self._stuck_at = None if is_more_room or returned else self._stuck_at

    def _admit(self, budget: int, turns: dict[Row, Turn], copies: list[Copy]) -> None:
        skipped, idle = list[Row](), 0  # of them, those with nobody to come forward: makers may wait for one another, many behind one row
        self._stuck_at, self.starved, ahead = None, False, self._holding.ahead(self.running, self.loading)
        while budget and self.waiting and self._has_place(self.waiting[0]) and idle < self.max_rows:
            row = self.waiting.popleft()
            if self.below is not None and self.below.awaits(row, self._now):
                skipped.append(row)
                idle += 1
                continue
            makers = self.makers.gather(row, self.below, self._now, alone=self._is_idle)
            if makers and self.makers.may_lend(row, makers, self.below, budget):
                self.waiting.extendleft((row, *reversed(makers)))  # it comes again when they are on their way
                continue
            is_early = makers is not None and (self.makers.are_coming if self._is_idle else self.makers.are_made)(row)
            if (makers is not None and not is_early) or self._holding.is_held(row, ahead):
                self.waiting.extendleft(reversed(makers or []))
                skipped.append(row)
                idle += not makers
                continue
            if row.repair_cost > budget and any(new > 1 for _, _, new, _ in turns.values()):
                self.waiting.appendleft(row)  # a repair is not done in parts: it has a step to itself, but for rows that decode
                break
            is_placed = self._place(row, copies)
            if not is_placed and not self.running and self._holding.give_way(row, (*skipped, *self.waiting)):
                is_placed = self._place(row, copies)
            if not is_placed:
                self.waiting.appendleft(row)
                self._stuck_at = None if skipped else self._holding.to_be_had  # those before it may need less room
                self.starved = not (self.running or self.loading)
                break
            ahead.add(row)
            if row in self.running:
                budget = max(1, budget - row.repair_cost) if row.repair and row.imports else budget
                new = min(row.behind, budget)
                turns[row] = row, row.computed, new, len(row.tokens)
                self.makers.finish(turns[row])
                budget -= new
        self.waiting.extendleft(reversed(skipped))

    @property
    def _is_idle(self) -> bool:
        """Is there nobody who would have to wait for what is on its way to another?"""
        return all(row.loads for row in self.running)

    @property
    def is_full(self) -> bool:
        return len(self.running) + len(self.loading) >= self.max_rows and len(self._seated) >= self.max_rows  # fewer sit than are there

    @property
    def _seated(self) -> set[int]:
        """Rows that have a place, by their arrivals: while others bring up what a row reads, it has one, and they have none beside it."""
        return {row.arrival for row in (*self.running, *self.loading)}

    def _has_place(self, row: Row) -> bool:
        return row.brings or not self.is_full or row.arrival in self._seated

    def make(self, tenant: Key, asked: Sequence[Want]) -> int:
        """Queues what is missing of runs that nobody waits for yet; answers how many there are."""
        before = len(self.makers)
        self.waiting.extend(self.makers.begin_missing(tenant, asked, self.below, self.clock()))
        return len(self.makers) - before

    def stop_making(self) -> None:
        for row in self.makers.stop():  # whoever still needs something of it asks again
            self.remove(row)

    def _place(self, row: Row, copies: list[Copy]) -> bool:
        """Gives a row its place and its room; says whether there was any. It runs now, or when its context has come."""
        if row.brings:
            begins = self._holding.bring(row, self._now, spare=len(self.running))
            self.loading += [row] if begins else []
            return begins
        limit = len(row.tokens) - 1 if self.reuse and row.scored is None else 0
        match = self._holding.seat(row, limit, self._now, spare=len(self.running))  # a page for each, or it would soon be preempted again
        if match is None:
            return False
        row.is_new = row.cached is None
        self.makers.lend(row)
        limit = 0 if match.length - row.at < row.repaired_end else limit
        copies += self._holding.fill(row, match, limit, self.running)
        if row.repair:
            self._holding.seat_repaired(row, self._now)
        if row.cached is None:
            row.cached = row.computed + row.had
            self._misses.tell(row, match, limit)
            row.waited = self._now - row.arrived
            self._misses.remember(row)
        if self.below is not None and row.makes is None:
            self.below.leave(row)
        if row.loads and not self._is_idle:
            self.loading.append(row)
        else:
            self._run(row)
        return True

    def _run(self, row: Row) -> None:
        insort(self.running, row, key=lambda row: row.arrival)
        self.turns.change()

    def _make_room(self, row: Row, tokens: int) -> bool:
        """Gives a row pages for so many tokens; says whether no other row had to stop for it. The row itself may be the one that stops."""
        alone = True
        while not self._holding.give_room(row, tokens):
            alone = False
            victim = max((*self.running, *self.loading), key=lambda other: other.arrival)
            self._preempt(victim)
            if row.stem is None:
                return False
        return alone

    def _preempt(self, row: Row) -> None:
        if row.stem is None:
            return  # whoever it borrowed from went before it
        (self.running if row in self.running else self.loading).remove(row)
        self._release(row)
        later = (place for place, other in enumerate(self.waiting) if other.arrival > row.arrival)
        self.waiting.insert(next(later, len(self.waiting)), row)  # before whoever came later; one who came earlier may hold what it needs
        self.preemptions += 1

    def _release(self, row: Row) -> None:
        borrowers = self.makers.borrowers(row)
        (self.turns.change if borrowers else self.turns.look)()
        self._holding.release(row, self._now)
        for other in self.makers.take_back(row, borrowers, self._now):
            self._preempt(other)
        self._stuck_at = None
