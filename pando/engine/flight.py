"""A step between its launch and its end."""

from typing import NamedTuple

from .facts import StepFacts
from .row import Schedule
from .sampler import Choices


class Flight(NamedTuple):
    """A step that was asked of the device, and is not settled."""

    schedule: Schedule
    chosen: Choices
    facts: StepFacts
    began: float

    @property
    def may_be_followed(self) -> bool:
        """Can another step be asked for before this one is settled?"""
        return self.schedule.plain and self.chosen.free
