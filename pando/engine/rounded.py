"""Which pages of the pool hold states that went through a codec that rounds, or were computed behind such: answers from them are
approximations, wherever the states are by now."""

from collections.abc import Iterable

from .row import Row


class Rounded:
    def __init__(self, page_size: int, *, rounds: bool) -> None:
        """`rounds`: what is kept below the pool does not come up as it was."""
        self._page_size, self.rounds = page_size, rounds
        self._pages: set[int] = set()

    def begin(self, row: Row, pages: Iterable[int]) -> None:
        """A row gets these pages: what was in them counts no more."""
        if self.rounds:
            (self._pages.update if row.rounded else self._pages.difference_update)(pages)

    def come(self, pages: Iterable[int]) -> None:
        """They were filled from below."""
        if self.rounds:
            self._pages.update(pages)

    def look(self, row: Row, copied: int | None = None) -> None:
        """What a row computes is as exact as the pages that it reads, and the one that it begins with a copy of."""
        if not self.rounds:
            return
        read = {*row.pages, *(page for found in row.imports for segment in found.path() for page in segment.pages)}
        lent = any(found.load is not None for found in row.imports)
        row.rounded = row.rounded or lent or copied in self._pages or not self._pages.isdisjoint(read)
        if row.rounded:
            self._pages.update(row.pages[row.settled // self._page_size :])
