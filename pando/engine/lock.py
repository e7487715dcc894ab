"""Who may use an engine: one thread at a time, of the process that made it."""

import os
import threading

from ..errors import ForeignProcess


class Lock:
    """A process that is forked from that one has neither the engine's threads nor those of torch, and would wait for them for ever."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self._process

    def __enter__(self) -> None:
        if not self.is_ours:
            raise ForeignProcess(
                f"this LLM was made in process {self._process}, and process {os.getpid()}, forked from it, cannot use it; "
                "make one in each process that needs it, or start processes with multiprocessing's spawn"
            )
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
