"""A directory has one bound for all who write to it: what is beyond it goes, whoever wrote that, and whoever held it learns of it."""

from collections.abc import Callable, Container
from functools import partial
from queue import SimpleQueue

from ..kv.segment import Key
from .disk import DiskTier
from .facts import Room
from .ledger import Ledger
from .worker import Worker

SHARE = 16  # a directory is looked at whenever one in so many of the pages that it may hold is new
MOST = 256  # or so many are


class Sharing:
    def __init__(
        self, disk: DiskTier, bound: int, page_bytes: int, ledger: Ledger, writer: Worker, done: SimpleQueue[Callable[[], None]]
    ) -> None:
        """`done`: what the ledger's thread is to do."""
        self._disk, self._bound, self._ledger, self._writer, self._done = disk, bound, ledger, writer, done
        self._often, self._wrote = max(1, min(MOST, bound // page_bytes // SHARE)), 0

    @property
    def room(self) -> Room:
        """What pages of this shape take there, as far as it is known, and what all of them may."""
        return Room(self._disk.used, self._bound)

    def wrote(self, unwritten: Container[Key]) -> None:
        """One more page. What waits to be written is held, and not there yet."""
        self._wrote += 1
        if self._wrote % self._often or self._disk.is_full:  # then it is what was there before
            return
        tier, needed = self._disk.name, frozenset(self._ledger.queue.needs)
        held = [page.key for page in self._ledger.held(tier) if page.key not in unwritten]

        def work() -> None:
            self._done.put(partial(self._ledger.drop, self._disk.share(self._bound, needed, held), tier))

        self._writer.post(work)
