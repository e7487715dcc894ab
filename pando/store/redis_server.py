"""A server that speaks Redis' protocol, and what Pando keeps there: asked in bounded time, and left alone while it does not answer."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidOption
from .fileformat import PROBE, VERSION, Header, read_header
from .tier import Lost

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

LOOK_S, MOVE_S = 0.2, 2.0  # how long an answer may take: while requests wait for what is there, and while bytes move
FAILURES, PAUSE_S = 3, 30.0
SCANNED = 500  # names that are asked for at a time


class Breaker:
    """After some failures in a row nobody is asked for a while: a server that is gone costs its timeout a few times, and no more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = clock()

    @property
    def paused(self) -> bool:
        return self._clock() < self._until

    def worked(self) -> None:
        self._failures = 0

    def failed(self) -> bool:
        """Whether that was one too many. After the pause, one more is."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = self._clock() + PAUSE_S
        return self._failures == FAILURES


class RedisServer:
    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._breaker = Breaker(clock)
        self._told: set[str] = set()
        self._quick, self._patient = _client(url, LOOK_S), _client(url, MOVE_S)
        where = self._patient.connection_pool.connection_kwargs
        self.place = str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")  # the URL may have a password

    def close(self) -> None:
        self._quick.close()
        self._patient.close()

    def reach(self) -> None:
        """Raises Lost where it does not answer."""
        self._ask(self._quick, [("PING",)])

    # ---- everything that is kept there, of whatever shape and tenant

    def pages(self) -> Iterator[list[tuple[bytes, int, Header | None]]]:
        """Names, sizes and headers, some at a time: None where a header is damaged. Looks at every page there is, so it takes its time;
        raises Lost."""
        cursor = 0
        while True:
            asked = ("SCAN", cursor, "MATCH", f"pando:{VERSION}:*", "COUNT", SCANNED, "TYPE", "string")
            [(cursor, names)] = self._ask(self._patient, [asked])
            starts = self._beginnings(self._patient, names)
            yield [(name, start[1], self._told_by(name, *start)) for name, start in zip(names, starts, strict=True)]
            if not cursor:
                return

    def remove(self, chosen: Callable[[Header | None], bool]) -> tuple[int, int]:
        """How many pages there were, and their bytes; raises Lost."""
        count = size = 0
        for some in self.pages():
            theirs = {name: length for name, length, header in some if chosen(header)}
            ends = [_behind(name, header) for name, _, header in some if name in theirs and header is not None and header.is_end]
            self._ask(self._patient, [("UNLINK", *theirs), *ends] if theirs else [])
            count, size = count + len(theirs), size + sum(theirs.values())
        return count, size

    # ---- asking

    def _beginnings(self, client: "Redis", names: Sequence[object]) -> list[tuple[bytes, int]]:
        """Of some values, with their sizes: 0 where there is none."""
        answers = self._ask(client, [command for name in names for command in (("GETRANGE", name, 0, PROBE - 1), ("STRLEN", name))])
        return list(zip(answers[::2], answers[1::2], strict=True))

    def _any_header(self, name: object, start: bytes, size: int) -> Header:
        def read(offset: int, length: int) -> bytes:
            if offset + length <= len(start):
                return start[offset : offset + length]
            [more] = self._ask(self._patient, [("GETRANGE", name, offset, offset + length - 1)])
            return bytes(more)

        return read_header(read, size)

    def _told_by(self, name: object, start: bytes, size: int) -> Header | None:
        """Raises Lost where the fault may pass."""
        try:
            return self._any_header(name, start, size)
        except Lost as lost:
            if lost.reason in ("unreadable", "late"):
                raise
            return None

    def _ask(self, client: "Redis", commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """The answers to some commands, in one exchange; raises Lost."""
        from redis import exceptions

        if self._breaker.paused:
            raise Lost("unreadable", f"{self.place} failed {FAILURES} times in a row, and is left alone for a while")
        if not commands:
            return []
        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            answers: list[Any] = pipeline.execute()
        except exceptions.OutOfMemoryError as error:
            raise self._refused(Lost("full", f"{self.place} has no room for a page ({error})")) from error
        except exceptions.ResponseError as error:
            raise self._refused(Lost("unreadable", f"{self.place} refuses ({error})")) from error
        except exceptions.TimeoutError as error:
            raise self._unanswered(Lost("late", f"{self.place} did not answer in time")) from error
        except (exceptions.RedisError, OSError) as error:
            raise self._unanswered(Lost("unreadable", f"{self.place} does not answer ({error})")) from error
        self._breaker.worked()
        return answers

    def _refused(self, lost: Lost) -> Lost:
        self._breaker.worked()
        self._tell(f"refused {lost.reason}", str(lost))
        return lost

    def _unanswered(self, lost: Lost) -> Lost:
        if self._breaker.failed():
            log.warning("the remote is left alone for %.0f s at a time until it answers again: %s", PAUSE_S, lost)
        return lost

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("the remote: %s; further ones like it are not logged", text)


def _behind(name: bytes, header: Header) -> tuple[object, ...]:
    """Takes a short end out of the set that it is found by: nobody may ask for that set again, and without members it is gone."""
    return "ZREM", b"%b:ends:%b" % (name.rpartition(b":")[0], header.card.parent.hex().encode()), header.card.key


def _client(url: str, timeout: float) -> "Redis":
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise InvalidOption("a remote redis:// needs the package redis; install it with `pip install 'pando-llm[store]'`") from error
    try:
        return Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, socket_read_size=1 << 18, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise InvalidOption(f"the remote cannot be understood ({error}); write redis://HOST:6379/0") from error
