"""A trace through the policies and the ledger that the store decides by, with simulated times of compute and transfer.

Continuous batching as an engine of one queue does it: first come, first served; a row that is admitted computes what it lacks of its prompt
while the others wait, then decodes a token a step with them. What it computed is kept from then on, and its answer when it ends. Nothing
stays on the device, so that every token found is found in the tiers. Steps between two events are taken at once.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..kv.segment import Key
from ..store.ledger import Ledger, Page
from ..store.policy import LRU, Policy
from .conversations import Conversation, Piece, Turn

HOST, DISK = "host", "disk"
ENDLESS = 2**62  # bytes


@dataclass(frozen=True)
class Machine:
    """What computes and what moves, and how fast."""

    kv_bytes: int  # of a token
    prefill_rate: float  # tokens/s
    step: float  # seconds of a decoding step, whatever the rows
    batch: int  # rows
    gpus: int
    page: int = 16  # tokens; what is kept takes whole ones
    host_rate: float = 26e9  # bytes/s, from host memory to the device
    disk_rate: float = 5e9  # bytes/s, from disk to host memory

    def size(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page * self.kv_bytes

    def prefill(self, new: int, host: int, disk: int) -> float:
        """Seconds until a prompt's states are there: of its tokens, so many must be computed, and others are in a tier. Loading overlaps
        with computing; what is on disk is computed where that is sooner."""
        load, fetch = host * self.kv_bytes / self.host_rate, disk * self.kv_bytes / self.disk_rate
        return min(max(new / self.prefill_rate, load + fetch), max((new + disk) / self.prefill_rate, load))


@dataclass(frozen=True)
class Served:
    """A turn, when its first token is there."""

    prompt: int  # tokens
    context: int  # of them, that may have been found
    host: int  # that were found
    disk: int
    waited: float  # seconds until it was admitted
    prefill: float  # seconds from then to its first token


@dataclass
class Outcome:
    """All turns in the order in which they were admitted, and the seconds in which anything ran, up to each of them and in all."""

    served: list[Served] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    total: float = 0.0
    fetched: int = 0  # bytes brought up ahead


class _Job(NamedTuple):
    """Compares by its place."""

    place: int
    arrival: float
    conversation: Conversation
    number: int  # of the turn

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.number]


class Replay:
    def __init__(self, machine: Machine, conversations: Sequence[Conversation], ledger: Ledger | None) -> None:
        """Without a ledger nothing is kept."""
        self.machine, self.ledger = machine, ledger
        self.outcome = Outcome()
        self._arrivals = [(one.arrival, number, one, 0) for number, one in enumerate(conversations)]
        heapq.heapify(self._arrivals)
        self._numbers = len(conversations)
        self._waiting: list[_Job] = []  # a heap, of which the first is the next
        self._running: list[tuple[float, _Job]] = []  # by the step after which they end
        self._places = 0
        self._now = self._steps = 0.0
        self._fetching: tuple[float, list[Page]] | None = None  # when it will be there
        self._queue_changed = False

    def run(self) -> Outcome:
        while self._arrivals or self._waiting or self._running:
            self._arrive()
            self._fetch()
            if self._waiting and len(self._running) < self.machine.batch:
                self._admit(heapq.heappop(self._waiting))
            else:
                self._advance()
        return self.outcome

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            arrival, _, conversation, number = heapq.heappop(self._arrivals)
            job = _Job(self._places, arrival, conversation, number)
            self._places += 1
            self._queue_changed = True
            heapq.heappush(self._waiting, job)
            if self.ledger:
                self.ledger.join(job.place, _keys(job.turn.context))

    def _admit(self, job: _Job) -> None:
        turn = job.turn
        found = self._found(job)
        self._queue_changed = True
        host = sum(piece.tokens for piece, tier in zip(turn.context, found, strict=False) if tier == HOST)
        disk = sum(piece.tokens for piece, tier in zip(turn.context, found, strict=False) if tier == DISK)
        seconds = self.machine.prefill(max(1, turn.prompt - host - disk), host, disk)
        self.outcome.served.append(Served(turn.prompt, turn.prompt - turn.new, host, disk, self._now - job.arrival, seconds))
        self._now += seconds
        self.outcome.total += seconds
        self.outcome.busy.append(self.outcome.total)
        self._keep(turn.context)
        heapq.heappush(self._running, (self._steps + turn.answer, job))

    def _found(self, job: _Job) -> list[str]:
        if not self.ledger:
            return []
        self.ledger.leave(job.place)
        return self.ledger.find(_keys(job.turn.context))

    def _advance(self) -> None:
        """To the next arrival or the next end of an answer."""
        ends = self._now + (self._running[0][0] - self._steps) * self.machine.step if self._running else math.inf
        comes = self._arrivals[0][0] if self._arrivals else math.inf
        then = max(self._now, min(ends, comes))
        if self._running:
            self.outcome.total += then - self._now
            self._steps += (then - self._now) / self.machine.step
        self._now = then
        if ends <= comes:
            self._steps, job = heapq.heappop(self._running)
            self._end(job)

    def _end(self, job: _Job) -> None:
        if job.turn.adds:
            self._keep(job.turn.context + job.turn.adds)
        following = job.number + 1
        if following < len(job.conversation.turns):
            self._numbers += 1
            arrival = self._now + job.conversation.turns[following].think
            heapq.heappush(self._arrivals, (arrival, self._numbers, job.conversation, following))

    def _keep(self, chain: Sequence[Piece]) -> None:
        """In every tier: host memory, and written behind."""
        if self.ledger:
            pages = [Page(piece.key, self.machine.size(piece.tokens)) for piece in chain]
            for tier in self.ledger.capacities:
                self.ledger.keep(tier, pages, self._now)

    def _fetch(self) -> None:
        """One chain after the other comes up from disk, whatever else happens."""
        while self._fetching and self._fetching[0] <= self._now:
            there, chain = self._fetching
            if self.ledger:
                self.ledger.keep(HOST, chain, there)
            self._fetching = self._next_fetch(there)
        if not self._fetching and self._queue_changed:
            self._fetching = self._next_fetch(self._now)
        self._queue_changed = False

    def _next_fetch(self, start: float) -> tuple[float, list[Page]] | None:
        chain = next(self.ledger.prefetch(), None) if self.ledger else None
        if not self.ledger or not chain:
            return None
        missing = sum(page.size for page in chain if self.ledger.find([page.key]) != [HOST])
        self.outcome.fetched += missing
        return start + missing / self.machine.disk_rate, chain


def _keys(chain: Iterable[Piece]) -> list[Key]:
    return [piece.key for piece in chain]


def replay(machine: Machine, conversations: Sequence[Conversation], policy: Policy, host: int, disk: int) -> Outcome:
    """Capacities are bytes; a disk of none is no tier."""
    capacities = {HOST: host, DISK: disk} if disk else {HOST: host}
    return Replay(machine, conversations, Ledger(capacities, policy)).run()


def endless(machine: Machine, conversations: Sequence[Conversation]) -> Outcome:
    return replay(machine, conversations, LRU(), ENDLESS, 0)


def recomputed(machine: Machine, conversations: Sequence[Conversation]) -> Outcome:
    return Replay(machine, conversations, None).run()


def optimum(chains: Sequence[Sequence[Piece]], capacity: int) -> list[int]:
    """Belady's: how many tokens of each chain are found, served in this order, if what is needed last leaves first. Pages count the same,
    and `capacity` is a number of them: nobody with as many finds more pages."""
    uses: dict[Key, list[int]] = {}
    for number, piece in enumerate(piece for chain in chains for piece in chain):
        uses.setdefault(piece.key, []).append(number)
    for places in uses.values():
        places.reverse()
    held: dict[Key, float] = {}  # and when it is needed next
    heap: list[tuple[float, Key]] = []
    found = []
    for chain in chains:
        tokens, whole = 0, True
        for key, count in chain:
            whole = whole and key in held
            tokens += count if whole else 0
            uses[key].pop()
            held[key] = uses[key][-1] if uses[key] else math.inf
            heapq.heappush(heap, (-held[key], key))
            while len(held) > capacity:
                when, last = heapq.heappop(heap)
                if held.get(last) == -when:
                    del held[last]
        found.append(tokens)
    return found
