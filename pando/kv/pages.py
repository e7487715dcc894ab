"""Which pages are free. A page has one owner, a row or the tree, so there is nothing to count: it is taken, handed over and given back.

On a CPU a run of neighbouring pages is read in place, without a gather. So a row is placed where it has room to grow, and the pages it
is expected to grow into are claimed: others use them only when nothing else is free.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Pages:
    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Nobody owns any page."""
        framed = np.zeros(self.count + 2, dtype=bool)
        framed[1:-1] = True
        self._framed_free, self._framed_open = framed, framed.copy()  # open: nobody claims it, either; runs end at the frame
        self._free, self._open = self._framed_free[1:-1], self._framed_open[1:-1]
        self.free = self.count

    def withhold(self, pages: Iterable[int]) -> None:
        """Nobody gets these until they are given."""
        for page in pages:
            self._free[page] = self._open[page] = False
            self.free -= 1

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int, after: int | None = None, expect: int = 0) -> list[int]:
        """`count` pages, next to page `after` if they are free, otherwise where `expect` more would follow. There must be enough."""
        assert count <= self.free, (count, self.free)
        taken: list[int] = []
        if after is not None:
            while len(taken) < count and after + 1 < self.count and self._free[after + 1]:
                after += 1
                taken.append(after)
            self.withhold(taken)
        while len(taken) < count:
            for start, stop in self._holes(count - len(taken), expect):
                run = range(start, min(stop, start + count - len(taken)))
                taken.extend(run)
                self.withhold(run)
                self._open[run.stop : min(stop, run.stop + expect)] = False
        return taken

    def give(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._free[page], f"page {page} given back twice"
            self._free[page] = self._open[page] = True
            self.free += 1

    def unclaim(self, last: int) -> None:
        """The row whose last page this is will not grow any more."""
        page = last + 1
        while page < self.count and self._free[page] and not self._open[page]:
            self._open[page] = True
            page += 1

    def _holes(self, count: int, expect: int) -> list[tuple[int, int]]:
        """The tightest free run with room to grow; else the largest one nobody claims; else the largest. Where that is not enough, also
        those that come next and are not enough, either: after a while there may be thousands, and each look is at all of them."""
        starts, stops = _runs(self._framed_open)
        if not len(starts):
            starts, stops = _runs(self._framed_free)
        lengths = stops - starts
        roomy = (lengths >= count + expect).nonzero()[0]
        best = roomy[lengths[roomy].argmin()] if len(roomy) else lengths.argmax()
        if lengths[best] >= count:
            return [(int(starts[best]), int(stops[best]))]
        order = np.argsort(-lengths, kind="stable")
        lacking = count - lengths[order].cumsum() + lengths[order]  # before each of them is taken
        order = order[(lengths[order] < lacking).cumprod().astype(bool)]
        return list(zip(starts[order].tolist(), stops[order].tolist(), strict=True))


def _runs(framed: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    edges = (framed[1:] != framed[:-1]).nonzero()[0]
    return edges[0::2], edges[1::2]
