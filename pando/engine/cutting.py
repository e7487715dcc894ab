"""From requests to rows, where a prompt may have to be cut first. What a remote has of it is asked meanwhile: no other waits for that."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..errors import PoolTooSmall
from ..kv.segment import Key
from .admission import Admission
from .request import Request
from .row import Row
from .truncation import Truncations, Unanswered

log = logging.getLogger(__name__)

PAUSE = 0.1  # seconds after which it is looked again whether somebody has waited long enough, though there was no answer


class _Asked(NamedTuple):
    """A request whose cut waits for an answer."""

    request: Request
    since: float
    keys: list[Key]  # of its pages, as far as they are known


class Cutting:
    def __init__(self, admission: Admission, truncations: Truncations, clock: Callable[[], float]) -> None:
        self._admission, self._truncations, self._clock = admission, truncations, clock
        self._undecided: list[_Asked] = []
        self._looked = 0, 0.0  # at so many answers, and when

    def __len__(self) -> int:
        return len(self._undecided)

    @property
    def waiting(self) -> list[str]:
        """The ids of requests that are not decided yet."""
        return [each.request.request_id for each in self._undecided]

    def rows(self, request: Request) -> list[Row]:
        """Or raises what is wrong with the request. None of them yet, where something is still asked."""
        if request.truncation is None and not request.drop:
            return self._admission.rows(request)
        self._admission.check_tokens(request.prompt)
        keys, since = list[Key](), self._clock()
        try:
            return self._cut(request, keys, self._truncations)
        except Unanswered:
            rows = self._cut(request, keys, self._truncations.alone(), is_trial=True)  # what is wrong with it is said at once
            request = replace(request, params=replace(request.params, seed=rows[0].seed))
            self._undecided.append(_Asked(request, since, keys))
            return []

    def decided(self) -> list[Row]:
        """The rows of requests whose answers have come."""
        found, left, answers, now = list[Row](), list[_Asked](), self._truncations.answers, time.monotonic()
        if self._looked[0] == answers and now < self._looked[1] + PAUSE:
            return found
        self._looked = answers, now
        for asked in self._undecided:
            try:
                rows = self._cut(asked.request, asked.keys, self._truncations)
            except Unanswered:
                left.append(asked)
                continue
            except Exception:  # it must not end every step to come: it is cut as it could be when it was taken
                log.exception("a prompt could not be cut by what a remote has")
                rows = self._cut(asked.request, asked.keys, self._truncations.alone(), is_trial=True)
            for row in rows:
                row.arrived = asked.since
            found += rows
        self._undecided = left
        return found

    def cancel(self, request_id: str) -> None:
        self._undecided = [each for each in self._undecided if each.request.request_id != request_id]

    def _cut(self, request: Request, keys: list[Key], by: Truncations, *, is_trial: bool = False) -> list[Row]:
        home = self._admission.lineage(request.tenant, request.public)
        cut = by.cut(request, home, keys)
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
