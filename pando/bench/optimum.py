"""Belady's optimum: what a cache would find that knows the future."""

import heapq
import math
from collections.abc import Sequence

from ..kv.segment import Key
from .conversations import Piece


def optimum(chains: Sequence[Sequence[Piece]], capacity: int) -> list[int]:
    """Belady's: how many tokens of each chain are found, served in this order, if what is needed last leaves first. Pages count the same,
    and `capacity` is a number of them: nobody with as many finds more pages."""
    uses: dict[Key, list[int]] = {}
    for number, piece in enumerate(piece for chain in chains for piece in chain):
        uses.setdefault(piece.key, []).append(number)
    for places in uses.values():
        places.reverse()
    held: dict[Key, float] = {}  # and when it is needed next
    heap: list[tuple[float, Key]] = []
    found = []
    for chain in chains:
        tokens, whole = 0, True
        for key, count in chain:
            whole = whole and key in held
            tokens += count if whole else 0
            uses[key].pop()
            held[key] = uses[key][-1] if uses[key] else math.inf
            heapq.heappush(heap, (-held[key], key))
            while len(held) > capacity:
                when, last = heapq.heappop(heap)
                if held.get(last) == -when:
                    del held[last]
        found.append(tokens)
    return found
