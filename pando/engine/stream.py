"""The tokens of one request, as whoever asked takes them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat

from .request import Request, TokenEvent

Inbox = deque[TokenEvent]


class Stream(Iterator[TokenEvent]):
    """Ctrl-C while it waits for a token costs none: it may be asked again, until it is closed or forgotten, which cancels the request."""

    def __init__(
        self,
        request: Request,
        begin: Callable[[Sequence[Request]], Inbox],
        fill: Callable[[Inbox], None],
        end: Callable[[Sequence[Request]], None],
    ) -> None:
        """`begin` refuses a request or queues it, `fill` sees to it that there is a token, `end` may be called at any time, and again."""
        self._request, self._fill, self._end, self._is_closed = request, fill, end, False
        self._ended = set[int]()  # answers whose last token was seen
        self._inbox = begin([request])

    def __next__(self) -> TokenEvent:
        if not self._inbox and len(self._ended) == self._request.params.n:
            self.close()
        if self._is_closed:
            raise StopIteration
        try:
            self._fill(self._inbox)
        except Exception:
            self.close()
            raise
        if (first := self._inbox[0]).finish_reason is not None:
            self._ended.add(first.index)
        taken = islice(map(deque.popleft, repeat(self._inbox)), 1)
        return [*taken][0]  # noqa: RUF015  # by no call: behind one Python looks for Ctrl-C, and the token would be nobody's

    def close(self) -> None:
        self._end([self._request])
        self._is_closed = True

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()
