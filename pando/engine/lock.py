"""Who may use an engine: one thread at a time, of the process that made it, as long as that lives."""

import atexit
import os
import threading
import time
from weakref import WeakSet

from ..errors import ForeignProcess

PATIENCE = 10.0  # seconds that the end of a process waits for the end of steps
LOOK = 0.5  # seconds after which one who waits looks whether the process ends


class Lock:
    """A process that is forked from that one has neither the engine's threads nor those of torch, and would wait for them for ever. One
    that ends stops its other threads wherever they are, and in the middle of a step that is an abort: they end before the next one."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()
        self._keeper: int | None = None  # the thread that ends the process
        self._owner: int | None = None
        self._depth = 0
        _locks.add(self)

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self._process

    def __enter__(self) -> None:
        if not self.is_ours:
            raise ForeignProcess(
                f"this LLM was made in process {self._process}, and process {os.getpid()}, forked from it, cannot use it; "
                "make one in each process that needs it, or start processes with multiprocessing's spawn"
            )
        me = threading.get_ident()
        while self._keeper in (None, me) or self._owner == me:  # who has it goes on to the end of the step
            if self._lock.acquire(timeout=LOOK):
                self._owner, self._depth = me, self._depth + 1
                return
        raise SystemExit  # of this thread, which says nothing: whoever joins it does not wait for ever

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._owner = self._owner if self._depth else None
        self._lock.release()

    def keep(self) -> None:
        """No other thread gets it any more, once it is let go of."""
        self._keeper = threading.get_ident()

    def settle(self, until: float) -> None:
        """Waits for the end of a step."""
        self._lock.acquire(timeout=max(0.0, until - time.monotonic()))


_locks: WeakSet[Lock] = WeakSet()


@atexit.register
def _keep_all() -> None:
    until, ours = time.monotonic() + PATIENCE, [lock for lock in _locks if lock.is_ours]
    for lock in ours:
        lock.keep()
    for lock in ours:
        lock.settle(until)
