"""The tier on another machine: a server that speaks Redis' protocol, or a directory that machines share.

A page is one value, the bytes that its file would have, named `pando:1:SHAPE:KEY`. The latest short ends behind a page are the members of a
sorted set, `pando:1:SHAPE:ends:PARENT`. How much is kept there, and what goes first, is for the server to say (its maxmemory and
maxmemory-policy).
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..errors import InvalidOption
from ..kv.segment import Key
from .disk import DiskTier
from .fileformat import PROBE, VERSION, Header, expect, header_for, pack, read_header, tag
from .tier import ENDS, Card, Lost, Shape, Tier

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

LOOK_S, MOVE_S = 0.2, 2.0  # how long an answer may take: while requests wait for what is there, and while bytes move
FAILURES, PAUSE_S = 3, 30.0


def remote_tier(url: str, shape: Shape, ttl: int | None = None) -> Tier:
    """A tier for redis://, rediss:// and unix:// addresses, for file:// ones, and for paths. `ttl`: seconds that a server keeps a page."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss", "unix"):
        return RedisTier(url, shape, ttl)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return DiskTier(Path(unquote(parts.path)), shape, shared=True, name="remote")
    if not parts.scheme and url:
        return DiskTier(Path(url), shape, shared=True, name="remote")
    raise InvalidOption(f"the remote is of the kind {parts.scheme!r}; write redis://HOST:6379, file:///PATH, or the path of a directory")


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


class RedisReader:
    def __init__(self, tier: "RedisTier", header: Header) -> None:
        self.card = header.card
        self._tier = tier
        self._header = header

    def layer(self, index: int, into: memoryview) -> None:
        self._tier.fill(self._header, index, into)

    def close(self) -> None:
        """There is nothing to close: each layer is a question of its own."""


class RedisTier:
    name = "remote"

    def __init__(self, url: str, shape: Shape, ttl: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._shape = shape
        self._tag = tag(shape)
        self._ttl = ttl
        self._breaker = Breaker(clock)
        self._told: set[str] = set()
        self._quick, self._patient = _client(url, LOOK_S), _client(url, MOVE_S)
        where = self._patient.connection_pool.connection_kwargs
        self._place = str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")  # the URL may have a password

    def look(self, keys: Sequence[Key]) -> int:
        try:
            there = self._ask(self._quick, [("EXISTS", self._value(key)) for key in keys])
        except Lost:
            return 0
        return next((place for place, found in enumerate(there) if not found), len(keys))

    def ends(self, parent: Key) -> Sequence[Card]:
        """Read from the headers themselves; members that went away are taken out."""
        try:
            [members] = self._ask(self._quick, [("ZREVRANGE", self._behind(parent), 0, ENDS - 1)])
            answers = self._beginnings(self._quick, [self._value(key) for key in members])
            if gone := [key for key, (_, size) in zip(members, answers, strict=True) if not size]:
                self._ask(self._quick, [("ZREM", self._behind(parent), *gone)])
        except Lost:
            return []
        found = []
        for key, (start, size) in zip(members, answers, strict=True):
            try:
                found += [self._header(key, start, size).card] if size else []
            except Lost as lost:
                self._failed(key, lost)
        return found

    def open(self, key: Key) -> RedisReader:
        [(start, size)] = self._beginnings(self._patient, [self._value(key)])
        if not size:
            raise Lost("absent")
        try:
            return RedisReader(self, self._header(key, start, size))
        except Lost as lost:
            self._failed(key, lost)
            raise

    def fill(self, header: Header, layer: int, into: memoryview) -> None:
        """Raises Lost."""
        if into.nbytes != header.layer_bytes:
            raise Lost("foreign", f"a layer has {header.layer_bytes} bytes, and {into.nbytes} are wanted")
        first = header.offset(layer)
        [data] = self._ask(self._patient, [("GETRANGE", self._value(header.card.key), first, first + into.nbytes - 1)])
        if len(data) != into.nbytes:
            raise Lost("short" if data else "absent", "it went away while it was read")
        try:
            header.check(layer, memoryview(data))
        except Lost as lost:
            self._failed(header.card.key, lost)
            raise
        into.cast("B")[:] = data

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        value = self._value(card.key)
        if self._ask(self._patient, [("EXISTS", value)]) == [1]:
            return
        data = b"".join((pack(header_for(card, self._shape, layers)), *layers))
        expiry = () if self._ttl is None else ("EX", self._ttl)
        commands: list[tuple[object, ...]] = [("SET", value, data, *expiry)]
        if len(card.tokens) < self._shape.page_size:
            commands.append(("ZADD", self._behind(card.parent), time.time(), card.key))
            commands.append(("ZREMRANGEBYRANK", self._behind(card.parent), 0, -ENDS - 1))
            commands += [("EXPIRE", self._behind(card.parent), self._ttl)] if self._ttl is not None else []
        self._ask(self._patient, commands)

    def drop(self, keys: Sequence[Key]) -> None:
        try:
            self._ask(self._patient, [("UNLINK", *map(self._value, keys))] if keys else [])
        except Lost:
            return  # it has been told

    def purge(self, tenant: bytes) -> int:
        """Removes all pages of a tenant, of every shape; how many. Looks at every page there is, so it takes its time; raises Lost."""
        removed, cursor = 0, 0
        while True:
            [(cursor, names)] = self._ask(self._patient, [("SCAN", cursor, "MATCH", f"pando:{VERSION}:*", "COUNT", 500, "TYPE", "string")])
            starts = self._beginnings(self._patient, names)
            theirs = [name for name, start in zip(names, starts, strict=True) if self._is_of(tenant, name, *start)]
            self._ask(self._patient, [("UNLINK", *theirs)] if theirs else [])
            removed += len(theirs)
            if not cursor:
                return removed

    def close(self) -> None:
        self._quick.close()
        self._patient.close()

    # ---- asking

    def _value(self, key: Key) -> str:
        return f"pando:{VERSION}:{self._tag}:{key.hex()}"

    def _behind(self, parent: Key) -> str:
        return f"pando:{VERSION}:{self._tag}:ends:{parent.hex()}"

    def _beginnings(self, client: "Redis", names: Sequence[object]) -> list[tuple[bytes, int]]:
        """Of some values, with their sizes: 0 where there is none."""
        answers = self._ask(client, [command for name in names for command in (("GETRANGE", name, 0, PROBE - 1), ("STRLEN", name))])
        return list(zip(answers[::2], answers[1::2], strict=True))

    def _header(self, key: Key, start: bytes, size: int) -> Header:
        """Raises Lost."""
        header = self._any_header(self._value(key), start, size)
        expect(header, (self._tag, key))
        return header

    def _any_header(self, name: object, start: bytes, size: int) -> Header:
        def read(offset: int, length: int) -> bytes:
            if offset + length <= len(start):
                return start[offset : offset + length]
            [more] = self._ask(self._patient, [("GETRANGE", name, offset, offset + length - 1)])
            return bytes(more)

        return read_header(read, size)

    def _is_of(self, tenant: bytes, name: object, start: bytes, size: int) -> bool:
        """What cannot be told is of no use to anybody."""
        try:
            return self._any_header(name, start, size).card.tenant == tenant
        except Lost as lost:
            return lost.reason in ("corrupt", "short")

    def _failed(self, key: Key, lost: Lost) -> None:
        """Makes room for a better copy of what is not what its name says, and leaves alone what could not be read."""
        self._tell(lost.reason, str(lost))
        if lost.reason not in ("unreadable", "late"):
            self.drop([key])

    def _ask(self, client: "Redis", commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """The answers to some commands, in one exchange; raises Lost."""
        from redis import exceptions

        if self._breaker.paused:
            raise Lost("unreadable", f"{self._place} failed {FAILURES} times in a row, and is left alone for a while")
        if not commands:
            return []
        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            answers: list[Any] = pipeline.execute()
        except exceptions.OutOfMemoryError as error:
            raise self._refused(Lost("full", f"{self._place} has no room for a page ({error})")) from error
        except exceptions.ResponseError as error:
            raise self._refused(Lost("unreadable", f"{self._place} refuses ({error})")) from error
        except exceptions.TimeoutError as error:
            raise self._unanswered(Lost("late", f"{self._place} did not answer in time")) from error
        except (exceptions.RedisError, OSError) as error:
            raise self._unanswered(Lost("unreadable", f"{self._place} does not answer ({error})")) from error
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
