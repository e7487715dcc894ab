"""The engine in a thread of its own: others post requests and questions to it, and it hands back tokens, step by step."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .engine import Engine
from .facts import Stats, StepFacts
from .request import Request, TokenEvent

log = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES = 3  # steps that may fail with no token between them before the requests in them are given up
IDLE = 1.0  # seconds after which pins are looked at although nobody asks for anything
FRESH = 0.25  # seconds for which the numbers of `stats` may stand while the engine works


class EngineLoop:
    """`make` brings the engine, in the thread where it will run: CPU kernels keep a pool of threads for each thread that ever called them,
    and two pools would fight over the same cores. `deliver` gets the tokens of a step, `give_up` the requests that no step could answer,
    `observe` how long a step took; all are called in the engine's thread and must not wait."""

    def __init__(
        self,
        make: Callable[[], Engine],
        deliver: Callable[[Sequence[TokenEvent]], None],
        give_up: Callable[[Sequence[str]], None],
        observe: Callable[[float, StepFacts], None] = lambda seconds, facts: None,
    ) -> None:
        self._make = make
        self._engine: Engine
        self._deliver, self._give_up, self._observe = deliver, give_up, observe
        self._posted: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._wake = threading.Event()
        self._stopping = self._ended = False
        self._failures = 0
        self.stats = Stats()
        self._counted = 0.0
        self._thread: threading.Thread

    def start(self) -> "Future[None]":
        """Done when the engine is there; its exception says why there is none."""
        made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(made,), name="pando-engine", daemon=True)
        self._thread.start()
        return made

    def stop(self, timeout: float | None = None) -> None:
        """Ends after the step that runs. What was posted and not begun is cancelled."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, request: Request) -> "Future[None]":
        """Done when the request is queued; its exception says why it was refused."""
        return self.call(lambda engine: engine.add(request))

    def cancel(self, request_id: str) -> None:
        self.call(lambda engine: engine.cancel(request_id))

    def call(self, work: Callable[[Engine], T]) -> "Future[T]":
        """Runs something on the engine between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._engine))
                except BaseException as error:  # it belongs to whoever asked
                    future.set_exception(error)

        self._posted.append((future, run))
        self._wake.set()
        if self._ended:  # looked at after posting: either this thread or the engine's sees what was posted last
            self._drop_posted()
        return future

    def _run(self, made: "Future[None]") -> None:
        try:
            self._engine = self._make()
            self.stats = self._engine.stats()
        except BaseException as error:  # it belongs to whoever started
            self._ended = True
            self._drop_posted()
            made.set_exception(error)
            return
        made.set_result(None)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._ended = True
            self._drop_posted()
            if not self._stopping:  # an error that is ours ended it: whoever waits must not wait for ever
                self._give_up_all()
            self._engine.close()

    def _turn(self) -> None:
        self._wake.clear()
        while self._posted:
            self._posted.popleft()[1]()
        if self._engine.has_work:
            self._step()
        elif not self._posted and not self._stopping:
            self._failures = 0
            self.stats = self._engine.stats()
            self._wake.wait(self._engine.tend() or IDLE)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            self._engine.expire_pins()
            events = self._engine.step()
        except Exception:
            self._failures += 1
            log.exception("a step failed; its requests begin again from their tokens")
            if self._failures >= FAILURES:
                self._give_up_all()
            return
        self._failures = 0 if events else self._failures  # the call before the one that fails may always go well
        if events and not self._stopping:  # whoever stopped it may have gone already
            self._deliver(events)
        now = time.perf_counter()
        if self._engine.facts.rows:  # else it only asked for a step
            self._observe(now - start, self._engine.facts)
        if now - self._counted > FRESH:
            self.stats, self._counted = self._engine.stats(), now

    def _give_up_all(self) -> None:
        self._failures = 0
        lost = list(dict.fromkeys([*(row.request_id for row in self._engine.answers), *self._engine.cutting.waiting]))
        for request_id in lost:
            self._engine.cancel(request_id)
        self._engine.scheduler.stop_making()
        self._give_up(lost)

    def _drop_posted(self) -> None:
        """Whoever waits for an answer must learn that there will be none."""
        with suppress(IndexError):  # others may drop them at the same time
            while True:
                self._posted.popleft()[0].cancel()
