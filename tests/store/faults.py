"""A tier on which anything that may go wrong does, at calls that a seed chooses."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from pando.kv.segment import Key
from pando.store.tier import Card, Lost, Reader, Reason, Tier

REASONS: tuple[Reason, ...] = get_args(Reason)
CALLS = ("look", "ends", "open", "layer", "save", "drop")
KINDS = ("late", "raise", "dirty", "short", "after")
LATE = 0.0005  # seconds by which a call takes longer


class Chance:
    """Draws in the order of the calls; threads take turns."""

    def __init__(self, seed: int, rate: float) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._lock = threading.Lock()
        self.seen = Counter[tuple[str, str]]()  # calls, and what went wrong with them
        self.waited = 0.0  # seconds, of calls that were late

    def fault(self, call: str) -> str | None:
        """What goes wrong with it now, if anything."""
        with self._lock:
            if self._random.random() >= self._rate:
                return None
            kind = self._random.choice(KINDS)
            self.seen[call, kind] += 1
        if kind == "late":
            began = time.monotonic()
            time.sleep(LATE)
            with self._lock:
                self.waited += time.monotonic() - began
        return kind

    def lost(self) -> Lost:
        with self._lock:
            return Lost(self._random.choice(REASONS), "injected")

    def below(self, bound: int) -> int:
        with self._lock:
            return self._random.randrange(bound)

    def noise(self, size: int) -> bytes:
        with self._lock:
            return self._random.randbytes(size)


class FaultyReader:
    def __init__(self, inner: Reader, chance: Chance) -> None:
        self.card = inner.card
        self._inner, self._chance = inner, chance

    def layer(self, index: int, into: memoryview) -> None:
        """A fault may leave anything in the buffer."""
        match self._chance.fault("layer"):
            case None | "late":
                self._inner.layer(index, into)
            case "dirty":
                into[:] = self._chance.noise(into.nbytes)
                raise Lost("corrupt", "injected")
            case "short":
                self._inner.layer(index, into)
                into[into.nbytes // 2 :] = self._chance.noise(into.nbytes - into.nbytes // 2)
                raise Lost("short", "injected")
            case _:
                raise self._chance.lost()

    def close(self) -> None:
        self._inner.close()


class FaultyTier:
    """It does what the contract of a tier allows, and nothing that helps."""

    def __init__(self, inner: Tier, seed: int, rate: float) -> None:
        self.name = inner.name
        self.chance = Chance(seed, rate)
        self._inner = inner

    def look(self, keys: Sequence[Key]) -> int:
        """May know of less than there is, and of what is gone."""
        if self.chance.fault("look") in (None, "late"):
            return self._inner.look(keys)
        return self.chance.below(len(keys) + 1)

    def ends(self, parent: Key) -> Sequence[Card]:
        found = self._inner.ends(parent)
        match self.chance.fault("ends"):
            case None | "late":
                return found
            case "dirty":
                return [*found, Card(self.chance.noise(32), parent, bytes(32), (1, 2, 3))]  # nobody has it
        return []

    def open(self, key: Key) -> Reader:
        if self.chance.fault("open") in (None, "late"):
            return FaultyReader(self._inner.open(key), self.chance)
        raise self.chance.lost()

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        """What is said to be lost may have been kept."""
        kind = self.chance.fault("save")
        if kind in (None, "late", "after"):
            self._inner.save(card, layers)
        if kind not in (None, "late"):
            raise self.chance.lost()

    def drop(self, keys: Sequence[Key]) -> None:
        if self.chance.fault("drop") in (None, "late"):
            self._inner.drop(keys)


def went_wrong(tiers: Sequence[FaultyTier]) -> set[tuple[str, str]]:
    """Every call that something went wrong with, and what. Who was late kept others waiting."""
    chances = [tier.chance for tier in tiers]
    late = sum(chance.seen[call, "late"] for chance in chances for call in CALLS)
    assert sum(chance.waited for chance in chances) >= late * LATE > 0
    return {each for chance in chances for each in chance.seen}
