"""Which pages are used, told to the tiers that let go of what nobody uses.

What is loaded is told at once. What stays in the pool is never loaded, although whatever is saved behind it uses it, too: of that they are
told now and then, or a system prompt that everyone begins with would be the first to go, and all that stands behind it of no use.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ..kv.latest import Latest
from ..kv.segment import Key

if TYPE_CHECKING:
    from .worker import Worker

EVERY, SHARE = 600.0, 16  # seconds between two times that a chain is told, or one in so many of those that it may stay unused
REMEMBERED = 2**14  # chains

Touch = Callable[[Sequence[Key]], None]


def every(ttl: float | None) -> float:
    """Seconds by which what is told of a use may be behind it."""
    return EVERY if ttl is None else min(EVERY, ttl / SHARE)


class Touches:
    def __init__(self, touches: Sequence[Touch], writer: "Worker", ttl: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._touches, self._writer, self._clock = tuple(touches), writer, clock
        self._every = every(ttl)
        self._told = Latest[Key, float](REMEMBERED)  # the last page of a chain: since when all of it may not have been told

    def use(self, *chains: Sequence[Key]) -> None:
        """Of pages in several, each is told once."""
        keys = list(dict.fromkeys(chain.from_iterable(chains))) if self._touches else []
        for touch in self._touches:
            self._writer.post(partial(touch, keys))

    def follow(self, chain: Sequence[Key], new: Collection[Key]) -> None:
        """These of a chain were saved just now, and those before them were used by that."""
        last = next((key for key in reversed(chain) if key not in new), None) if self._touches and new else None
        if last is None:
            return
        now = self._clock()
        since = self._told.get(last, -math.inf)
        if now - since >= self._every:
            self.use([key for key in chain if key not in new])
            since = now
        self._told[chain[-1]] = self._told[last] = since
        self._told.move_to_end(last)
