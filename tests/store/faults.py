"""A tier on which anything that may go wrong does, at calls that a seed chooses."""

import random
import threading
import time
from collections.abc import Sequence
from typing import get_args

from pando.kv.segment import Key
from pando.store.tier import Card, Lost, Reader, Reason, Tier

REASONS: tuple[Reason, ...] = get_args(Reason)


class Chance:
    """Draws in the order of the calls; threads take turns."""

    def __init__(self, seed: int, rate: float, delay: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._rate, self._delay = rate, delay
        self._lock = threading.Lock()
        self.faults = 0

    def fault(self) -> str | None:
        """What goes wrong now, if anything."""
        with self._lock:
            if self._random.random() >= self._rate:
                return None
            self.faults += 1
            kind = self._random.choice(("late", "raise", "dirty", "short", "after"))
        if kind == "late" and self._delay:
            time.sleep(self._delay)
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
        match self._chance.fault():
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

    def __init__(self, inner: Tier, seed: int, rate: float, delay: float = 0.0) -> None:
        self.name = inner.name
        self.chance = Chance(seed, rate, delay)
        self._inner = inner

    def look(self, keys: Sequence[Key]) -> int:
        """May know of less than there is, and of what is gone."""
        if self.chance.fault() in (None, "late"):
            return self._inner.look(keys)
        return self.chance.below(len(keys) + 1)

    def ends(self, parent: Key) -> Sequence[Card]:
        found = self._inner.ends(parent)
        match self.chance.fault():
            case None | "late":
                return found
            case "dirty":
                return [*found, Card(self.chance.noise(32), parent, bytes(32), (1, 2, 3))]  # nobody has it
        return []

    def open(self, key: Key) -> Reader:
        if self.chance.fault() in (None, "late"):
            return FaultyReader(self._inner.open(key), self.chance)
        raise self.chance.lost()

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        """What is said to be lost may have been kept."""
        kind = self.chance.fault()
        if kind in (None, "late", "after"):
            self._inner.save(card, layers)
        if kind not in (None, "late"):
            raise self.chance.lost()

    def drop(self, keys: Sequence[Key]) -> None:
        if self.chance.fault() in (None, "late"):
            self._inner.drop(keys)
