"""The tier on another machine: a server that speaks Redis' protocol, or a directory that machines share.

A page is one value, the bytes that its file would have, named `pando:1:SHAPE:KEY`. The latest short ends behind a page are the members of a
sorted set, `pando:1:SHAPE:ends:PARENT`. How much is kept there, and what goes first, is for the server to say (its maxmemory and
maxmemory-policy).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import InvalidOption
from ..kv.segment import Key
from .disk import DiskTier
from .fileformat import VERSION, Header, expect, header_for, pack, tag
from .folder import directory_at, try_directory
from .redis_server import RedisServer
from .tier import ENDS, Card, Lost, Shape

TIDIED = 256  # pages that are saved between two looks at what nobody used


def directory_of(url: str) -> Path | None:
    """The directory that a remote is, or None for a server; raises InvalidOption for what is neither."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss", "unix"):
        return None
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return Path(unquote(parts.path))
    if not parts.scheme and url:
        return directory_at(url)
    raise InvalidOption(f"the remote is of the kind {parts.scheme!r}; write redis://HOST:6379, file:///PATH, or the path of a directory")


def remote_tier(url: str, shape: Shape, ttl: int | None = None) -> "RedisTier | SharedTier":
    """A tier for redis://, rediss:// and unix:// addresses, for file:// ones, and for paths. `ttl`: seconds that unused pages stay."""
    directory = directory_of(url)
    return RedisTier(url, shape, ttl) if directory is None else SharedTier(directory, shape, ttl)


class SharedTier(DiskTier):
    """A directory that machines share. Each of them removes what nobody used for too long, when it opens it and now and then."""

    def __init__(self, directory: Path, shape: Shape, ttl: int | None = None, clock: Callable[[], float] = time.time) -> None:
        super().__init__(directory, shape, clock, shared=True, name="remote")
        self._directory, self.place = directory, str(directory)
        self._ttl, self._saved = ttl, 0
        self.expire()

    def reach(self) -> None:
        """Raises Lost where nothing can be kept in it."""
        try:
            try_directory(self._directory)
        except OSError as error:
            raise Lost("unreadable", f"{self.place} is no directory that can be written to ({error.strerror or error})") from error

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        super().save(card, layers)
        self._saved += 1
        if not self._saved % TIDIED:
            self.expire()

    def expire(self) -> None:
        if self._ttl is not None:
            old = self._folder.entries("NOT pinned AND used < ?", [self._clock() - self._ttl])
            self._forget([entry.key for entry in old if entry.shape == self._tag])
            self._folder.remove([(entry.shape, entry.key) for entry in old])


class RedisReader:
    def __init__(self, tier: "RedisTier", header: Header) -> None:
        self.card = header.card
        self._tier = tier
        self._header = header

    def layer(self, index: int, into: memoryview) -> None:
        self._tier.fill(self._header, index, into)

    def close(self) -> None:
        """There is nothing to close: each layer is a question of its own."""


class RedisTier(RedisServer):
    name = "remote"

    def __init__(self, url: str, shape: Shape, ttl: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(url, clock)
        self._shape = shape
        self._tag = tag(shape)
        self._ttl = ttl

    def look(self, keys: Sequence[Key]) -> int:
        there = self._ask(self._quick, [("EXISTS", self._value(key)) for key in keys])
        return next((place for place, found in enumerate(there) if not found), len(keys))

    def ends(self, parent: Key) -> Sequence[Card]:
        """Read from the headers themselves; members that went away are taken out. Who asks for them uses the set."""
        behind = self._behind(parent)
        members, *_ = self._ask(self._quick, [("ZREVRANGE", behind, 0, ENDS - 1), *self._renewal(behind)])
        answers = self._beginnings(self._quick, [self._value(key) for key in members])
        if gone := [key for key, (_, size) in zip(members, answers, strict=True) if not size]:
            self._ask(self._quick, [("ZREM", behind, *gone)])
        found = []
        for key, (start, size) in zip(members, answers, strict=True):
            try:
                found += [self._header(key, start, size).card] if size else []
            except Lost as lost:
                self._failed(key, lost)
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        names = [self._value(key) for key in keys]
        read = [("GETRANGE", name, 0, 0) for name in names] if self._ttl is None else []  # which it takes for a use
        try:
            self._ask(self._patient, [*read, *(command for name in names for command in self._renewal(name))])
        except Lost:
            return  # it has been told

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
        value, commands = self._value(card.key), list[tuple[object, ...]]()
        if self._ask(self._patient, self._renewal(value) or [("EXISTS", value)]) != [1]:
            data = b"".join((pack(header_for(card, self._shape, layers)), *layers))
            commands.append(("SET", value, data, *(() if self._ttl is None else ("EX", self._ttl))))
        if len(card.tokens) < self._shape.page_size:  # also of one that is there: the set may be gone before it, or have forgotten it
            commands.append(("ZADD", self._behind(card.parent), time.time(), card.key))
            commands.append(("ZREMRANGEBYRANK", self._behind(card.parent), 0, -ENDS - 1))
            commands += self._renewal(self._behind(card.parent))
        if commands:
            self._ask(self._patient, commands)

    def drop(self, keys: Sequence[Key]) -> None:
        try:
            self._ask(self._patient, [("UNLINK", *map(self._value, keys))] if keys else [])
        except Lost:
            return  # it has been told

    def _renewal(self, name: str) -> list[tuple[object, ...]]:
        """It was used, and expires later; answers 1 where it is there."""
        return [] if self._ttl is None else [("EXPIRE", name, self._ttl)]

    def _value(self, key: Key) -> str:
        return f"pando:{VERSION}:{self._tag}:{key.hex()}"

    def _behind(self, parent: Key) -> str:
        return f"pando:{VERSION}:{self._tag}:ends:{parent.hex()}"

    def _header(self, key: Key, start: bytes, size: int) -> Header:
        """Raises Lost."""
        header = self._any_header(self._value(key), start, size)
        expect(header, (self._tag, key))
        return header

    def _failed(self, key: Key, lost: Lost) -> None:
        """Makes room for a better copy of what is not what its name says, and leaves alone what could not be read."""
        self._tell(lost.reason, str(lost))
        if lost.reason not in ("unreadable", "late"):
            self.drop([key])
