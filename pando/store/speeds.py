"""Is loading sooner than computing? Both are measured as they happen."""

from collections.abc import Mapping

WEIGHT = 0.2  # of the latest measurement
HOPE = 0.98  # what is left of a tier's time each time that it was too long


class Speeds:
    """Until both were seen, loading is taken to pay: it is what the tiers are for, and it is how they come to be measured."""

    def __init__(self) -> None:
        self._met: set[str] = set()  # tiers; what is met for the first time is compiled, opened and pinned then
        self._per_byte: dict[str, float] = {}  # seconds, by tier
        self._per_token: float | None = None  # seconds to compute one

    def moved(self, tier: str, size: int, seconds: float) -> None:
        if tier in self._met:
            self._per_byte[tier] = _blend(self._per_byte.get(tier), seconds / size)
        self._met.add(tier)

    def computed(self, tokens: int, seconds: float) -> None:
        self._per_token = _blend(self._per_token, seconds / tokens)

    def pays(self, sizes: Mapping[str, int], tokens: int) -> bool:
        """Loading so many bytes from each tier, against computing so many tokens."""
        if self._per_token is None:
            return True
        if sum(size * self._per_byte.get(tier, 0.0) for tier, size in sizes.items()) < tokens * self._per_token:
            return True
        for tier in sizes.keys() & self._per_byte.keys():  # it is not measured while it is not used, and may be faster by now
            self._per_byte[tier] *= HOPE
        return False


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
