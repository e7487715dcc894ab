"""Who may use an engine: one thread at a time, of the process that made it, as long as that lives; and undisturbed."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakSet

from ..errors import ForeignProcess

PATIENCE = 10.0  # seconds that the end of a process waits for the end of steps
LOOK = 0.5  # seconds after which one who waits looks whether the process ends


class Lock:
    """A process that is forked from that one has neither the engine's threads nor those of torch, and would wait for them for ever. One
    that ends stops its other threads wherever they are, and in the middle of a step that is an abort: they end before the next one."""

    def __init__(self, may_break: Callable[[], bool]) -> None:
        """`may_break`: can whoever has it be interrupted now, and not only when he lets go of it?"""
        self._process, self._lock, self._interrupts = os.getpid(), threading.RLock(), _Interrupts(may_break)
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
            if self._owner == me:
                self._depth += 1
                return
            self._interrupts.hold()
            if self._lock.acquire(timeout=LOOK):
                self._owner, self._depth = me, 1
                return
            self._interrupts.let_go()
        raise SystemExit  # of this thread, which says nothing: whoever joins it does not wait for ever

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
            self._interrupts.let_go()

    def keep(self) -> None:
        """No other thread gets it any more, once it is let go of."""
        self._keeper = threading.get_ident()

    def settle(self, until: float) -> None:
        """Waits for the end of a step."""
        self._lock.acquire(timeout=max(0.0, until - time.monotonic()))


class _Interrupts:
    """Ctrl-C is held back while what is cached changes hands: cut short, that would be half of what it should be. Whoever presses it again
    need not wait, where it may break in. Whether it is held back says the handler alone: a garbage collector may come in between."""

    def __init__(self, may_break: Callable[[], bool]) -> None:
        self._may_break = may_break
        self._before: Callable[[int, FrameType | None], Any] | None = None  # what is done about it, while it is not held back
        self._came = False

    def hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # it breaks into no other
            return
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and before != self._note:
            self._before, self._came = before, False
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came and self._before is not None and self._may_break():
            self._before(number, frame)
        self._came = True

    def let_go(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._before)
            if self._came:
                signal.raise_signal(signal.SIGINT)


_locks: WeakSet[Lock] = WeakSet()


@atexit.register
def _keep_all() -> None:
    until, ours = time.monotonic() + PATIENCE, [lock for lock in _locks if lock.is_ours]
    for lock in ours:
        lock.keep()
    for lock in ours:
        lock.settle(until)
