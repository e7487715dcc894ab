"""Who may use an engine: one thread at a time, of the process that made it, as long as that lives."""

import atexit
import os
import threading
from weakref import WeakSet

from ..errors import ForeignProcess

PATIENCE = 10.0  # seconds that the end of a process waits for the end of a step


class Lock:
    """A process that is forked from that one has neither the engine's threads nor those of torch, and would wait for them for ever. One
    that ends stops its other threads wherever they are, and in the middle of a step that is an abort: they stop before the next one."""

    def __init__(self) -> None:
        self._process, self._lock, self._kept_by = os.getpid(), threading.RLock(), None  # type: int, threading.RLock, int | None
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
        if self._kept_by not in (None, threading.get_ident()):
            threading.Event().wait()  # for ever, which is not long
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def keep(self) -> None:
        """No other thread gets it any more."""
        self._kept_by = threading.get_ident()
        self._lock.acquire(timeout=PATIENCE)


_locks: WeakSet[Lock] = WeakSet()


@atexit.register
def _keep_all() -> None:
    for lock in [lock for lock in _locks if lock.is_ours]:
        lock.keep()
