"""From requests to rows, where a prompt may have to be cut first. What a remote has of it is asked meanwhile: no other waits for that."""

import time
from collections.abc import Callable
from dataclasses import replace

from ..errors import PoolTooSmall
from ..kv.segment import Key
from .admission import Admission
from .request import Request
from .row import Row
from .truncation import Truncations, Unanswered

LONGEST = 5.0  # seconds after which a prompt is cut by what the pool has: answers that come between long steps are out of date by then


class Cutting:
    def __init__(self, admission: Admission, truncations: Truncations, clock: Callable[[], float] = time.monotonic) -> None:
        self._admission, self._truncations, self._clock = admission, truncations, clock
        self._undecided: list[tuple[Request, float]] = []  # requests whose cut waits for an answer, and since when

    def __len__(self) -> int:
        return len(self._undecided)

    def rows(self, request: Request) -> list[Row]:
        """Or raises what is wrong with the request. None of them yet, where something is still asked."""
        if request.truncation is None and not request.drop:
            return self._admission.rows(request)
        self._admission.check_tokens(request.prompt)
        try:
            return self._cut(request)
        except Unanswered:
            rows = self._cut(request, asks=False, is_trial=True)  # what is wrong with it is said at once
            self._undecided.append((replace(request, params=replace(request.params, seed=rows[0].seed)), self._clock()))
            return []

    def decided(self) -> list[Row]:
        """The rows of requests whose answers have come."""
        found, undecided, self._undecided = list[Row](), self._undecided, []
        for request, since in undecided:
            try:
                found += self._cut(request, asks=self._clock() < since + LONGEST)
            except Unanswered:
                self._undecided.append((request, since))
        return found

    def cancel(self, request_id: str) -> None:
        self._undecided = [each for each in self._undecided if each[0].request_id != request_id]

    def _cut(self, request: Request, *, asks: bool = True, is_trial: bool = False) -> list[Row]:
        home, keys = self._admission.lineage(request.tenant, request.public), list[Key]()
        cut = (self._truncations if asks else self._truncations.alone()).cut(request, home, keys)
        if cut is None:
            return self._admission.rows(request)
        try:
            rows = self._admission.rows(cut.request(request), cut)
        except PoolTooSmall:
            if not cut.layout.runs:
                raise
            cut = cut.computed("pool")
            rows = self._admission.rows(cut.request(request), cut)
        if request.truncation is not None and not is_trial:
            self._truncations.remember(request.prompt, cut.layout, home, keys)
        return rows
