"""Work on what an engine has cached, one piece at a time, each whole or known not to be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Whole:
    def __init__(self, begin_again: Callable[[], None], behind: Callable[[], None]) -> None:
        """`begin_again` forgets whatever may be half of what it should be; it can be done again. `behind` is done after each piece of work:
        what came up meanwhile, since a garbage collector may close a stream at any time."""
        self._begin_again, self._behind = begin_again, behind
        self._at_work = self._torn = False  # the second: something was cut short
        self.may_break = False  # what is cut short now is known to be

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """An exception refuses something, and changes nothing. Whoever is interrupted leaves it to the next to begin again."""
        if self._at_work:
            yield
            return
        try:
            self._at_work = True
            if self._torn:
                self.begin_again()
            try:
                yield
            except Exception:
                raise
            except BaseException:
                self._torn = True
                raise
            finally:
                if not self._torn:
                    self.surely(self._behind)
        finally:
            self._at_work = False

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """What takes long, and changes nothing but states: whoever waits for it may break it off."""
        try:
            self.may_break = True
            yield
        finally:
            self.may_break = False

    def begin_again(self) -> None:
        self.surely(self._begin_again)

    def surely(self, work: Callable[[], None]) -> None:
        """What does not end leaves nothing that could be trusted."""
        self._torn = True
        work()
        self._torn = False
