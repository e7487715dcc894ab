"""What an engine tells of itself: its steps, and what sharing saved in them."""

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..config import Attention
from ..kv.plan import Plan
from ..store.facts import StoreFacts
from .row import Schedule

if TYPE_CHECKING:
    from .batch import Batcher


@dataclass(frozen=True)
class Stats:
    steps: int = 0
    plans: int = 0
    preemptions: int = 0
    pages: int = 0
    pages_in_use: int = 0  # by rows and by the tree
    pages_cached: int = 0  # by the tree
    pages_evictable: int = 0
    pages_pinned: int = 0
    running: int = 0
    waiting: int = 0
    attention: Attention | None = None
    shared_reads: int = 0  # this and what follows as in StepFacts, of all steps together
    shared_rows: int = 0
    read_bytes: int = 0
    flat_bytes: int = 0
    store: StoreFacts | None = None  # None: there is nothing below the device


class StepFacts(NamedTuple):
    """Of one step. Bytes are those of K and V, in all layers; however many tokens a row brings, it counts once."""

    rows: int = 0
    tokens: int = 0
    shared_reads: int = 0  # that served several rows
    shared_rows: int = 0  # rows of each of them, added up
    read_bytes: int = 0  # of all reads
    flat_bytes: int = 0  # the same, had every row read by itself whatever it sees

    def plus(self, other: "StepFacts") -> "StepFacts":
        return StepFacts(*map(operator.add, self, other))


class Shared(NamedTuple):
    """What a plan's shared reads come to."""

    reads: int = 0
    rows: int = 0
    spared: int = 0  # tokens that need not be read again for each further row

    @classmethod
    def by(cls, plan: Plan) -> "Shared":
        rows = np.diff(plan.row_starts[: plan.shared + 1]).astype(np.int64)
        return cls(plan.shared, int(rows.sum()), int(plan.tokens[: plan.shared] @ (rows - 1)))


class Counting:
    """Of steps. While a plan holds it saves the same in every step, and every row sees one token more."""

    def __init__(self, batcher: "Batcher", token_bytes: int) -> None:
        self._batcher, self._size = batcher, token_bytes
        self._shared, self._seen = Shared(), 0  # of the last plan; tokens that the rows of the last step saw

    def step(self, schedule: Schedule) -> StepFacts:
        rows, tokens = len(schedule.rows), sum(schedule.counts)
        if not rows:
            return StepFacts()
        if schedule.changed:
            self._shared = Shared.by(self._batcher.plan)
        before = int(schedule.starts.sum()) + sum(row.imported for row in schedule.rows) if not schedule.follows else self._seen
        self._seen = before + tokens
        reads, readers, spared = self._shared
        return StepFacts(rows, tokens, reads, readers, (self._seen - spared) * self._size, self._seen * self._size)
