"""A directory has one bound for all who write to it: what is beyond it goes, whoever wrote that, and whoever held it learns of it."""

import math
import time
from collections.abc import Callable, Container
from functools import partial
from queue import SimpleQueue

from ..kv.segment import Key
from .disk import DiskTier
from .facts import Room
from .ledger import Ledger
from .tier import Lost, NoRoom
from .touches import every
from .worker import Worker

SHARE = 16  # a directory is looked at whenever one in so many of the pages that it may hold is new
MOST = 256  # or so many are
AGAIN = 60.0  # seconds after which a bound that was lowered is as it was
VAIN = 4  # pages that did not fit although others went, in a row: until then, no more go


class Sharing:
    def __init__(
        self, disk: DiskTier, bound: int, page_bytes: int, ledger: Ledger, writer: Worker, done: SimpleQueue[Callable[[], None]]
    ) -> None:
        """`done`: what the ledger's thread is to do."""
        self._disk, self._bound, self._ledger, self._writer, self._done = disk, bound, ledger, writer, done
        self._often, self._wrote = max(1, min(MOST, bound // page_bytes // SHARE)), 0
        self._page_bytes, self._file_bytes = page_bytes, disk.file_bytes(page_bytes)
        self._looks = time.monotonic() + every(ledger.ttl)  # again, by then
        self._capacity, self._until, self._vain = ledger.capacities.get(disk.name, 0), math.inf, 0
        disk.gives_way = True

    @property
    def room(self) -> Room:
        """What pages of this shape take there, as far as it is known, and what all of them may."""
        return Room(self._disk.used, self._bound)

    def written(self, lost: Lost | None, again: bool, unwritten: Container[Key]) -> bool:
        """One more page was, or why it was not, for the first time or `again`; says whether it is worth another try. What waits to be
        written is held, and not there yet."""
        if lost is None:
            self._wrote_one(unwritten)
        return isinstance(lost, NoRoom) and self._disk.name in self._ledger.capacities and self._lowers(lost, again)

    def _wrote_one(self, unwritten: Container[Key]) -> None:
        self._wrote += 1
        self._vain = 0
        is_due = not self._wrote % self._often or time.monotonic() >= self._looks
        if not is_due or self._disk.is_full:  # then it is what was there before
            return
        self._looks = time.monotonic() + every(self._ledger.ttl)
        tier, needed = self._disk.name, frozenset(self._ledger.queue.needs)
        held = [page.key for page in self._ledger.held(tier) if page.key not in unwritten]

        def work() -> None:
            self._done.put(partial(self._ledger.drop, self._disk.share(self._bound, needed, held, self._ledger.ttl), tier))

        self._writer.post(work)

    # ---- a file system that is full before the bound is reached

    def _lowers(self, lost: NoRoom, again: bool) -> bool:
        """As much as is there is the bound now, so that others go for the page. Not if they went already; nor if that is in vain: somebody
        else takes the room, or they leave none."""
        tier, sizes = self._disk.name, self._ledger.capacities
        self._vain += not again  # until it is written: those that are tried at the same time are in vain together
        self._until = min(self._until, time.monotonic() + AGAIN)
        if again or self._vain > VAIN:
            return False
        sizes[tier] = min(sizes[tier], max(self._ledger.used[tier], lost.there // self._file_bytes * self._page_bytes))
        return True

    def lift(self) -> None:
        """There may be room again, and the bound is as it was."""
        if time.monotonic() > self._until:
            self._ledger.capacities[self._disk.name] = self._capacity
            self._until, self._vain = math.inf, 0

    def make_way(self) -> None:
        """What the ledger let go may not be enough, or nothing: then it is as with the bound."""
        tier, needed = self._disk.name, frozenset(self._ledger.queue.needs)

        def work() -> None:
            self._done.put(partial(self._ledger.drop, self._disk.make_way(self._file_bytes, needed), tier))

        self._writer.post(work)
