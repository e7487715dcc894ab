"""A step between its launch and its end."""

from typing import NamedTuple

from torch import Tensor

from .batch import Unread
from .facts import StepFacts
from .row import Schedule
from .sampler import Choices, Chosen


class Flight(NamedTuple):
    """A step that was asked of the device, and is not settled."""

    schedule: Schedule
    facts: StepFacts
    began: float
    logits: Tensor | None  # where nothing is chosen by them yet: a grammar has to hear of the tokens before first
    chosen: Choices | None

    @property
    def unread(self) -> Unread | None:
        """What it chose, and nobody here knows yet."""
        return Unread(self.schedule.ready, self.chosen.tokens) if self.chosen is not None and self.schedule.ready else None

    def read(self) -> tuple[list[Chosen], bool]:
        assert self.chosen is not None
        return self.chosen.read()
