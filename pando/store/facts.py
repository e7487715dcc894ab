"""What the tiers below the pool tell of themselves."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Room(NamedTuple):
    """Of a tier, in bytes."""

    used: int
    size: int


@dataclass(frozen=True)
class StoreFacts:
    """Since the start."""

    room: Mapping[str, Room] = field(default_factory=dict)  # by tier
    loaded: Mapping[str, int] = field(default_factory=dict)  # tokens that came from each tier
    saved: Mapping[str, int] = field(default_factory=dict)  # pages that each tier took
    lost: Mapping[str, int] = field(default_factory=dict)  # pages that should have been there, by reason
    unsaved: Mapping[str, int] = field(default_factory=dict)  # pages that were not kept, by reason
    unanswered: Mapping[str, int] = field(default_factory=dict)  # times that a tier was asked what it has and did not say, by reason
    recomputed: int = 0  # tokens that were there, but sooner computed than loaded
    prefetched: int = 0  # pages that were brought up before they were asked for


@dataclass
class Counts:
    """What happened, for the metrics."""

    loaded: Counter[str] = field(default_factory=Counter)  # tokens, by tier
    saved: Counter[str] = field(default_factory=Counter)  # pages, by tier
    lost: Counter[str] = field(default_factory=Counter)  # pages that should have been there, by reason
    unsaved: Counter[str] = field(default_factory=Counter)  # pages that were not kept, by reason
    unanswered: Counter[str] = field(default_factory=Counter)  # times that a tier was asked what it has and did not say, by reason
    recomputed: int = 0  # tokens that were there, but sooner computed than loaded
    prefetched: int = 0  # pages

    def facts(self, room: Mapping[str, Room]) -> StoreFacts:
        loaded, saved, lost, unsaved = (dict(+tally) for tally in (self.loaded, self.saved, self.lost, self.unsaved))
        return StoreFacts(room, loaded, saved, lost, unsaved, dict(self.unanswered), self.recomputed, self.prefetched)
