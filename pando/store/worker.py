"""A thread that moves bytes for the one that computes."""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from .tier import Lost

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds after which a thread that gets nothing done is not waited for any longer


class Worker:
    """One thread that does what is posted to it: what is urgent first, then in order."""

    def __init__(self, name: str) -> None:
        self._tasks: list[tuple[int, int, Callable[[], object]]] = []
        self._posted = 0
        self._stopping = False
        self._name = name
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # begun with the first task

    def post(self, task: Callable[[], object], *, urgent: bool = False) -> None:
        with self._changed:
            self._posted += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            heapq.heappush(self._tasks, (0 if urgent else 1, self._posted, task))
            self._changed.notify()

    def settle(self) -> None:
        """Waits until what was posted so far is done."""
        self._reached().wait()

    def settles(self) -> bool:
        """The same, for a task that may never end: says whether they did in time."""
        return self._reached().wait(PATIENCE)

    def _reached(self) -> threading.Event:
        reached = threading.Event()
        self.post(reached.set)
        return reached

    def stop(self) -> None:
        """After the task that runs. What was posted and not begun is left undone."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @torch.inference_mode()  # memory that was made in this mode may be written in this mode only
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._stopping)
                if self._stopping:
                    return
                task = heapq.heappop(self._tasks)[2]
            try:
                task()
            except Exception:  # an error of ours must not end what all later requests rely on
                log.exception("a transfer failed")
            del task  # whoever waits for the next one keeps nothing alive


def stop(workers: Sequence[Worker]) -> None:
    """Those whose tasks never end are left to themselves: a process ends without them."""
    end = time.monotonic() + PATIENCE
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))


def tried(work: Callable[[], object]) -> Lost | None:
    """Why something could not be moved, if it could not. An error of ours, or no memory, is no reason to stop either."""
    try:
        work()
    except Lost as lost:
        return lost
    except Exception as error:
        log.exception("a transfer failed")
        return Lost("unreadable", type(error).__name__)
    return None
