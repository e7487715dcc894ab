"""A trace through the scheduler and the store, on a simulated clock.

Who runs, what is found in the tree and in the tiers, what is evicted, loaded, saved and brought up ahead is decided by the engine's own
scheduler and store; a conversation that outgrows the window is cut by the engine's own rules. Computing and moving bytes take the time that
they would take, and do nothing. While rows only decode, the steps up to the next event are taken at once: a row that decodes has one token
to catch up with, and here several.
"""

import gc
import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ..engine.imports import pages_of, wants
from ..engine.layout import ENDLESS
from ..engine.request import Request, SamplingParams, Truncation
from ..engine.row import Row, Schedule
from ..engine.scheduler import Scheduler
from ..engine.truncation import Truncations
from ..errors import InvalidOption
from ..kv.run import Origin, in_place
from ..kv.segment import Key, Lineage, compact, extend_keys, root_key
from ..kv.tree import PrefixTree
from ..store.policy import LRU, Policy
from .conversations import Conversation
from .simulated import Clock, Heap, SimulatedStore, simulated_store

Tell = Callable[[int], object]

HOST, DISK = "host", "disk"
ROOT = root_key(b"simulated", b"")
HOME = Lineage.of(ROOT)
PARAMS = SamplingParams()  # nothing is drawn
TRIES = 100  # steps in which nobody could run, although nothing is on its way
READY = 2**24  # tokens of layouts that are not made again: of all conversations that go on
UNSURE = 16  # steps after which it is looked again whether a row that waits could run


@dataclass(frozen=True)
class Machine:
    """What computes and what moves, and how fast."""

    kv_bytes: int  # of a token
    prefill_rate: float  # tokens/s
    step: float  # seconds of a decoding step, whatever the rows
    batch: int  # rows
    gpus: int
    pool: int  # tokens
    window: int | None = None  # tokens of a context; a conversation that outgrows it drops its oldest half
    page: int = 64  # tokens
    budget: int = 512  # tokens of a step
    host_rate: float = 26e9  # bytes/s, between host memory and the device
    disk_rate: float = 5e9  # bytes/s, between disk and host memory

    def pages(self, size: int) -> int:
        """That fit so many bytes."""
        return size // (self.page * self.kv_bytes)


class Served(NamedTuple):
    """A turn, when its first token is there."""

    prompt: int  # tokens
    context: int  # of them, that may have been found
    device: int  # that were found
    host: int
    disk: int
    waited: float  # seconds until it was admitted
    prefill: float  # seconds from then to its first token

    @property
    def found(self) -> int:
        return self.device + self.host + self.disk


class Busy(NamedTuple):
    """Seconds."""

    all: float = 0.0
    prompts: float = 0.0  # of them, for what is computed and loaded of prompts


@dataclass
class Outcome:
    """All turns in the order of their first tokens, with the seconds in which anything ran before each of them."""

    served: list[Served] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    total: Busy = field(default_factory=Busy)
    steps: int = 0  # of the machine
    taken: int = 0  # of the scheduler: fewer, where several were taken at once
    unsaved: int = 0  # pages


@dataclass(eq=False)
class _Asked:
    """A turn that waits or is being answered."""

    conversation: int
    number: int  # of the turn
    arrived: float
    token: int  # all that it says
    began: float | None = None  # when something was first done for it
    is_served: bool = False  # its first token is there


class Replay:
    def __init__(
        self, machine: Machine, conversations: Sequence[Conversation], clock: Clock, store: SimulatedStore | None, tell: Tell | None = None
    ) -> None:
        """Without a store nothing is kept at all, not even on the device. `tell` hears after every step how many turns are served."""
        self.machine, self.clock, self.store, self._tell = machine, clock, store, tell
        self.outcome = Outcome()
        self._conversations = conversations
        self._arrivals = [(one.arrival, number, 0) for number, one in enumerate(conversations)]
        heapq.heapify(self._arrivals)
        self._tokens: dict[Key, int] = {}  # all that a piece says, again and again
        self._keys: dict[int, tuple[int, list[Key]]] = {}  # of each conversation: what its context begins with, and the keys of its pages
        self._unnamed = 0
        pages, tree = Heap(machine.pool // machine.page, machine.page), PrefixTree(machine.page)
        self.scheduler = Scheduler(
            pages, tree, max_rows=machine.batch, budget=machine.budget, reuse=store is not None, clock=lambda: clock.now, store=store
        )
        window, below = machine.window or ENDLESS, self.scheduler.below
        self._truncations = Truncations(tree, below, window, self.scheduler.clock, "off" if store is None else None, READY)
        self._asked: dict[Row, _Asked] = {}
        self._begun: set[Row] = set()  # rows that something was done for in the last step
        self._idle = 0  # steps without rows, one after the other
        self._hopeless = False  # nobody who waits could run in the last step

    def run(self) -> Outcome:
        collects = gc.isenabled()
        gc.disable()  # what is let go of here is in no circle, and looking for circles takes a tenth of the time
        try:
            while self._arrivals or self._asked:
                while self._arrivals and self._arrivals[0][0] <= self.clock.now:
                    self._ask(*heapq.heappop(self._arrivals))
                self._step()
                if self._tell is not None:
                    self._tell(len(self.outcome.served))
        finally:
            if collects:
                gc.enable()
        self.outcome.unsaved = sum(self.store.counts.unsaved.values()) if self.store is not None else 0
        return self.outcome

    # ---- asking

    def _ask(self, arrival: float, number: int, place: int) -> None:
        turn = self._conversations[number].turns[place]
        said = [(self._token(piece.key), piece.tokens) for piece in turn.context]
        token, answer = self._token(turn.adds[0].key if turn.adds else None), max(1, turn.answer)
        row = self._row([*said, (token, turn.new)], answer, number)
        if self.scheduler.pages.needed(row.last) > self.scheduler.pages.count:
            raise InvalidOption(f"a request of {row.last} tokens does not fit a pool of {self.machine.pool}; simulate a larger machine")
        self._asked[row] = _Asked(number, place, arrival, token)
        self.scheduler.add([row])

    def _token(self, piece: Key | None) -> int:
        if piece is None:
            self._unnamed -= 1
            return self._unnamed
        return self._tokens.setdefault(piece, len(self._tokens))

    def _row(self, said: Sequence[tuple[int, int]], answer: int, number: int) -> Row:
        """Of a prompt: tokens, and how often each is said."""
        prompt = array("i")
        for token, times in said:
            prompt += array("i", (token,)) * times
        before, keys = self._keys.get(number, (None, []))
        if before != prompt[0]:  # otherwise it begins with all that was said before, whose keys are known
            keys = []
        self._keys[number] = prompt[0], keys
        if self.store is not None:
            extend_keys(keys, HOME, prompt, self.machine.page)
        return self._cut(prompt, answer, keys) or Row("", 0, prompt, PARAMS, 0, HOME, len(prompt) + answer, ROOT, keys=keys)

    def _cut(self, prompt: "array[int]", answer: int, keys: list[Key]) -> Row | None:
        """What is left of a prompt that does not fit the window."""
        if self.machine.window is None or len(prompt) + answer <= self.machine.window:
            return None
        asked = Request("", prompt, SamplingParams(max_tokens=answer), truncation=Truncation())
        cut = self._truncations.cut(asked, HOME, keys)
        if cut is None:
            return None
        pages = self.scheduler.pages
        own = len(prompt) - sum(stop - start for start, stop in cut.layout.dropped) - cut.layout.placed
        if pages_of(cut.layout.runs, pages) + pages.needed(own + answer) > pages.count:
            cut = cut.computed("pool")
        self._truncations.remember(prompt, cut.layout, HOME, keys)
        asked = cut.request(asked)
        runs = [run for run in asked.runs if len(run)]
        before = compact(())
        for run in runs:
            before.frombytes(run.packed)
        at = runs[-1].end if runs else 0
        lineage = Lineage.of(Origin(tuple(in_place(runs)), at).key(ROOT)) if runs else HOME
        left = before + compact(asked.prompt)
        row = Row("", 0, left, asked.params, 0, lineage, len(asked.prompt) + answer, ROOT, imported=len(before))
        row.at, row.wants = at, wants(ROOT, runs, self.machine.page, plain=HOME)
        return row

    # ---- a step, or several

    def _step(self) -> None:
        begin, steps = self.clock.now, self._leap()
        schedule = self._scheduled(steps)
        self._note_begun(begin)
        if self.store is not None:
            self.store.go()
        if not schedule.rows:
            self._wait()
            return
        self._idle = 0
        decoding = self._pass(schedule, steps)
        spent, before = self.clock.now - begin, self.outcome.total
        self.outcome.total = Busy(before.all + spent, before.prompts + spent - decoding)
        self.outcome.steps += steps
        self.outcome.taken += 1
        self.scheduler.settle(schedule)
        self._say(schedule.rows)

    def _leap(self) -> int:
        """How many steps can be taken at once: up to the next arrival and the next end of an answer, if all rows decode and no other can
        run."""
        scheduler = self.scheduler
        if not scheduler.running:
            return 1
        most = ENDLESS
        for row in reversed(scheduler.running):  # those that came last compute their prompts
            said = len(row.tokens)
            if row.computed < said - 1 or row.makes is not None:
                return 1
            left = row.last - said
            if left < most:
                most = left
        full = scheduler.is_full
        if any(all(load.done for load in row.loads) for row in scheduler.loading) or (
            scheduler.waiting and not full and not self._hopeless
        ):
            return 1
        then = self._arrivals[0][0] if self._arrivals else math.inf
        if scheduler.loading and self.store is not None:
            then = min(then, self.store.loads_end)
        if then < math.inf:
            most = min(most, math.ceil((then - self.clock.now) / self.machine.step))
        if scheduler.waiting and not full:
            most = min(most, UNSURE)
        return max(1, most)

    def _scheduled(self, steps: int) -> Schedule:
        scheduler, more = self.scheduler, steps - 1
        scheduler.clear_away()
        decoding, before = list(scheduler.running) if more else [], len(scheduler.running) + len(scheduler.loading)
        for row in decoding:
            row.tokens += array("i", (self._asked[row].token,)) * more
        if more:
            scheduler.retract()  # they do not go on by a token, as before
        scheduler.budget = steps * len(decoding) if more else self.machine.budget
        schedule = scheduler.next()
        going = set(schedule.rows) if more else ()
        for row in decoding:
            if row not in going:  # it had to stop
                del row.tokens[-more:]
                del row.keys[len(row.tokens) // self.machine.page :]
        self._hopeless = not more and len(scheduler.running) + len(scheduler.loading) <= before
        return schedule

    def _note_begun(self, now: float) -> None:
        scheduler, rows = self.scheduler, {*self.scheduler.running, *self.scheduler.loading}
        if self.machine.window is not None:
            rows.update(row for row in islice(scheduler.waiting, scheduler.max_rows) if row.found is not None)
        new, self._begun = rows - self._begun, rows
        for row in new:
            asked = self._asked.get(row)
            if asked is not None and asked.began is None:
                asked.began = now

    def _pass(self, schedule: Schedule, steps: int) -> float:
        """Lets the time pass that the steps take; answers what decoding took of it. What is moved meanwhile is taken in after each step."""
        clock, begin, each = self.clock, self.clock.now, self.machine.step
        decoding = steps * each if min(schedule.counts) <= steps else 0.0
        done = 0
        while (then := clock.next) <= begin + (steps - 1) * each and done < steps - 1:
            done = max(done, int((then - begin) / each) - 1) + 1
            while begin + done * each < then:
                done += 1
            clock.pass_to(begin + done * each)
            self.scheduler.tend()
        clock.pass_to(begin + decoding + sum(count for count in schedule.counts if count > steps) / self.machine.prefill_rate)
        while not all(load.done for load in schedule.loads):
            clock.pass_to(clock.next)
        return decoding

    def _wait(self) -> None:
        """Nobody can run before something else happens, or before it is tried again."""
        self._idle += 1
        begin, comes, before = self.clock.now, bool(self.scheduler.loading), self.outcome.total
        then = min(self.clock.next, self._arrivals[0][0] if self._arrivals else math.inf)
        if then < math.inf:
            self.clock.pass_to(then)
        elif self._idle > TRIES:
            raise InvalidOption(f"{len(self._asked)} requests wait and none can run; simulate a larger machine")
        if comes:  # for what is loaded of a prompt
            spent = self.clock.now - begin
            self.outcome.total = Busy(before.all + spent, before.prompts + spent)
        self.scheduler.tend()

    # ---- answering

    def _say(self, rows: Sequence[Row]) -> None:
        """Those that have caught up get their next tokens."""
        everyone = self._asked
        for row in rows:
            tokens = row.tokens
            said = len(tokens)
            if row.computed < said or row.makes is not None:
                continue
            asked = everyone[row]
            if not asked.is_served:
                self._serve(row, asked)
            if said + 1 < row.last:
                tokens.append(asked.token)
            else:
                self._end(row, asked)

    def _end(self, row: Row, asked: _Asked) -> None:
        self.scheduler.remove(row)
        del self._asked[row]
        turns, following = self._conversations[asked.conversation].turns, asked.number + 1
        if following == len(turns):
            self._keys.pop(asked.conversation, None)
        else:
            heapq.heappush(self._arrivals, (self.clock.now + turns[following].think, asked.conversation, following))

    def _serve(self, row: Row, asked: _Asked) -> None:
        assert row.cached is not None and asked.began is not None
        asked.is_served = True
        host, disk = row.tiers.get(HOST, 0), row.tiers.get(DISK, 0)
        prompt, turn = len(row.prompt), self._conversations[asked.conversation].turns[asked.number]
        times = asked.began - asked.arrived, self.clock.now - asked.began
        self.outcome.served.append(Served(prompt, prompt - turn.new, max(0, row.cached - host - disk), host, disk, *times))
        self.outcome.busy.append(self.outcome.total)


def replay(
    machine: Machine, conversations: Sequence[Conversation], policy: Policy, host: int, disk: int, tell: Tell | None = None
) -> Outcome:
    """Capacities are bytes; a disk of none is no tier."""
    clock, pages = Clock(), {HOST: machine.pages(host), DISK: machine.pages(disk)}
    if not pages[HOST]:
        raise InvalidOption(f"{host} bytes of host memory hold no page of {machine.page * machine.kv_bytes}; give more")
    rates = {HOST: machine.host_rate, DISK: machine.disk_rate}
    store = simulated_store(clock, policy, machine.kv_bytes, machine.page, pages, rates, machine.prefill_rate)
    return Replay(machine, conversations, clock, store, tell).run()


def endless(machine: Machine, conversations: Sequence[Conversation], tell: Tell | None = None) -> Outcome:
    """Host memory that holds whatever is ever said."""
    pages = sum(-(-(turn.new + turn.answer) // machine.page) + 2 * (len(turn.context) + 1) for one in conversations for turn in one.turns)
    return replay(machine, conversations, LRU(), pages * machine.page * machine.kv_bytes, 0, tell)


def recomputed(machine: Machine, conversations: Sequence[Conversation], tell: Tell | None = None) -> Outcome:
    return Replay(machine, conversations, Clock(), None, tell).run()
