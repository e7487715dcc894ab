"""Is loading sooner than computing? Both are measured as they happen."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

WEIGHT = 0.2  # of the latest measurement of computing
LATEST = 3  # loads from a tier, of which the middle one counts: one that was slow by chance does not, and two in a row do
HOPE = 0.98  # what is left of a tier's time each time that it was too long
CHOICE = 128  # tokens from which on it is worth a measurement to choose
IN_TIME = 0.8  # of the time that a step is thought to take: what comes within it should hold up nobody
MEASURED = 32  # tokens of prompts in a step, from which on it tells how fast they are computed
STEPS = 8  # of the latest steps without any the shortest tells how long one takes at least
LEAST, LONGER = 1.0, 2.0  # seconds that a load may take in any case; and how much longer than computing


class Moved(NamedTuple):
    size: int  # bytes
    seconds: float


class Speeds:
    """Until both were seen, loading is taken to pay: it is what the tiers are for, and it is how they come to be measured."""

    def __init__(self) -> None:
        self.measure: Callable[[], None] | None = None  # how fast tokens are computed: to be done before the first choice
        self._per_byte: dict[str, deque[float]] = {}  # seconds, by tier
        self._per_token: float | None = None  # seconds to compute one
        self._steps: deque[float] = deque(maxlen=STEPS)  # seconds

    def moved(self, tier: str, moved: Moved) -> None:
        self._latest(tier).append(moved.seconds / moved.size)

    def gave_up(self, tier: str, moved: Moved) -> None:
        """It would have taken at least that long. There is no doubt about it."""
        self._latest(tier).extend([moved.seconds / moved.size] * LATEST)

    def stepped(self, tokens: int, prompts: int, seconds: float) -> None:
        """A step of so many tokens, some of them of prompts: how long one takes that has none, and how soon those are computed."""
        if not prompts:
            self._steps.append(seconds)
        elif prompts >= MEASURED:
            self.computed(tokens, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        new, old = seconds / tokens, self._per_token
        self._per_token = new if old is None else (1 - WEIGHT) * old + WEIGHT * new

    def pays(self, sizes: Mapping[str, int], tokens: int) -> bool:
        """Loading so many bytes from each tier, against computing so many tokens."""
        if self._per_token is None and self.measure is not None and tokens >= CHOICE:
            measure, self.measure = self.measure, None
            measure()
        if self._per_token is None:
            return True
        if sum(size * self._middle(tier) for tier, size in sizes.items()) < tokens * self._per_token:
            return True
        for tier in sizes.keys() & self._per_byte.keys():  # it is not measured while it is not used, and may be faster by now
            self._per_byte[tier] = deque((HOPE * each for each in self._per_byte[tier]), LATEST)
        return False

    def in_time(self, left: float, tokens: int) -> bool:
        """Will what comes within so many seconds be there while others and these tokens are computed? What is more must be there before: it
        is CachedAttention's read buffer, whose size is the bandwidth times (T_load L_hist - T_pref L_new)."""
        if self._per_token is None:
            return not left
        return left <= IN_TIME * max(min(self._steps, default=0.0), tokens * self._per_token)

    def grace(self, left: float) -> float:
        """Seconds that others wait for it at most, should it not be there then."""
        return max(LEAST, LONGER * left)

    def patience(self, tokens: int) -> float | None:
        """Seconds after which so many tokens would long have been computed; None: nobody knows."""
        return None if self._per_token is None else max(LEAST, LONGER * tokens * self._per_token)

    def _latest(self, tier: str) -> deque[float]:
        return self._per_byte.setdefault(tier, deque([0.0], LATEST))  # the first load opens and compiles things, and is not believed alone

    def _middle(self, tier: str) -> float:
        latest = self._latest(tier)
        return sorted(latest)[(len(latest) - 1) // 2]


class Meter:
    """What a load has brought from each tier, and the time that it took."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._sizes: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def add(self, tier: str, size: int, began: float) -> None:
        """So many bytes were read in the time since then; none, if that failed."""
        self._sizes[tier] += size
        self._seconds[tier] = self._seconds.get(tier, 0.0) + time.perf_counter() - began

    def read(self) -> dict[str, Moved]:
        """For each tier. The time in which nothing was read is that of all bytes alike: they were copied to the pool."""
        copying, total = time.perf_counter() - self._began - sum(self._seconds.values()), self._sizes.total()
        return {tier: Moved(size, self._seconds[tier] + copying * size / total) for tier, size in self._sizes.items() if size}
