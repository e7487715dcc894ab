"""A thread that moves bytes for the one that computes."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from .tier import Lost

log = logging.getLogger(__name__)

Task = Callable[[], object]

PATIENCE = 10.0  # seconds after which a thread that gets nothing done is not waited for any longer


class Worker:
    """One thread that does what is posted to it: what is urgent first, then in order. Nobody waits for a lock to post anything, or to stop
    it: whoever does may be a garbage collector, or be interrupted (Ctrl-C) before or behind it, but not in the middle."""

    def __init__(self, name: str) -> None:
        self._posts = SimpleQueue[tuple[bool, Task]]()
        self._urgent, self._others = deque[Task](), deque[Task]()  # which only the thread knows
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()  # at once: where a process may have no more threads, what is posted would be waited for in vain

    def post(self, task: Task, *, urgent: bool = False) -> None:
        self._posts.put((urgent, task))

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
        self._stopping = True
        self.post(_nothing)

    def join(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @torch.inference_mode()  # memory that was made in this mode may be written in this mode only
    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:  # an error of ours must not end what all later requests rely on
                log.exception("a transfer failed")
            del task  # whoever waits for the next one keeps nothing alive

    def _next(self) -> Task | None:
        """Waits for something to do; nothing, if it is to stop."""
        while not self._stopping:
            try:
                urgent, task = self._posts.get(block=not (self._urgent or self._others))
            except Empty:
                return (self._urgent or self._others).popleft()
            (self._urgent if urgent else self._others).append(task)
        return None


def _nothing() -> None:
    """Wakes a thread."""


def start(owner: object, make: Callable[[str], Worker], *names: str) -> "tuple[weakref.finalize[..., object], list[Worker]]":
    """Threads, and what ends them, as it does when nobody has the owner any more: whoever forgets to close that loses what is on its way,
    and nothing else. Where there is no thread left for one of them, those that began end, too."""
    workers: list[Worker] = []
    end = weakref.finalize(owner, stop, workers)
    for name in names:
        workers.append(make(name))
    return end, workers


def stop(workers: Sequence[Worker]) -> None:
    """Those whose tasks never end are left to themselves: a process ends without them."""
    end = time.monotonic() + PATIENCE
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))


def tried(work: Task) -> Lost | None:
    """Why something could not be moved, if it could not. An error of ours, or no memory, is no reason to stop either."""
    try:
        work()
    except Lost as lost:
        return lost
    except Exception as error:
        log.exception("a transfer failed")
        return Lost("unreadable", type(error).__name__)
    return None
