"""Which page leaves a tier first. Pure choices: a policy is an order, and what is first in it goes.

Lookahead goes by the waiting queue: what no waiting job needs leaves before what one needs, and of that, what is needed last. The queue is
served in order, so whatever is not in it yet is needed after everything that is. The window of CachedAttention's section 3.3, `(C_host +
C_disk) / S_kv` jobs, is how many of them fit on average; leaving from the queue's tail keeps those that do fit, and needs no average.

Pages are chained, and one whose predecessor is gone is of no use, but to those who begin at it: they have dropped what stood before. So
chains leave from their ends: every job that needs a page needs those before it, from where it begins, whoever uses a page uses those, and
at the same time of use the deepest is first.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..kv.segment import Key

Order = tuple[float, ...]


@dataclass(eq=False, slots=True)
class Held:
    """A page, in one tier or several. The ledger's: it alone changes it."""

    key: Key
    size: int  # bytes
    depth: int  # its place in its chain
    used: float  # when last
    begun: float  # when its chain was, or the youngest of those that contain it
    next: Key | None = None  # the page that followed it first
    tiers: set[str] = field(default_factory=set)


class Queue:
    """What waits to be served, each job with the pages it needs. A job's place is its number: the smallest is next."""

    def __init__(self, jobs: Iterable[Sequence[Key]] = ()) -> None:
        self.jobs: dict[int, tuple[Key, ...]] = {}  # by their place
        self.order: list[int] = []  # of the places
        self.needs: dict[Key, list[int]] = {}  # the places of the jobs that need it, the first one first
        for place, keys in enumerate(jobs):
            self.join(place, keys)

    def join(self, place: int, keys: Sequence[Key]) -> None:
        assert place not in self.jobs, f"job {place} waits already"
        self.jobs[place] = tuple(dict.fromkeys(keys))
        insort(self.order, place)
        for key in self.jobs[place]:
            needs = self.needs.get(key)
            if needs is None:
                self.needs[key] = [place]
            else:
                insort(needs, place)

    def leave(self, place: int) -> list[Key]:
        """Answers which pages are needed later than before, or no longer."""
        del self.order[bisect_left(self.order, place)]
        later = []
        for key in self.jobs.pop(place):
            needs = self.needs[key]
            if needs[0] == place:
                later.append(key)
            if len(needs) == 1:
                del self.needs[key]
            else:
                del needs[bisect_left(needs, place)]
        return later

    def need(self, key: Key) -> float:
        """The place of the first job that needs it, or infinity."""
        needs = self.needs.get(key)
        return needs[0] if needs else math.inf

    def __contains__(self, place: int) -> bool:
        return place in self.jobs

    def __len__(self) -> int:
        return len(self.jobs)


class Policy(Protocol):
    @property
    def looks_ahead(self) -> bool:
        """Is what waiting jobs need brought up before they run?"""
        ...

    def order(self, page: Held, need: float) -> Order:
        """The smallest goes first. `need` is the queue's answer. It may become smaller only where `need` grows, `depth` changes or a clock
        is set back."""
        ...


class Lookahead:
    looks_ahead = True

    def order(self, page: Held, need: float) -> Order:
        return (-need, page.used, -page.depth)


class LRU:
    looks_ahead = False

    def order(self, page: Held, need: float) -> Order:
        return (page.used, -page.depth)


class FIFO:
    """By conversation: its pages leave in the order of when it began, whatever was added to it since."""

    looks_ahead = False

    def order(self, page: Held, need: float) -> Order:
        return (page.begun, -page.depth)


POLICIES: dict[str, Policy] = {"lookahead": Lookahead(), "lru": LRU(), "fifo": FIFO()}


def victim(policy: Policy, held: Iterable[Held], queue: Queue, pinned: Container[Key] = ()) -> Held | None:
    """What goes next, or None where everything is pinned. This is the definition; the ledger finds the same page without looking at all."""
    free = (page for page in held if page.key not in pinned)
    return min(free, key=lambda page: (policy.order(page, queue.need(page.key)), page.key), default=None)
