"""The index of a directory of pages, in SQLite: what is there, how large, and when it was used. A hint: files are believed over it.

Beside that it has notes, small records under keys like those of pages: whoever reads one sees for himself whether it is what it should be.
"""

import sqlite3
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..kv.segment import Key
from .fileformat import Header, Name, tag
from .tier import Card

_VERSION = 1
NOTED = 2**15  # notes
ASKED = 500  # keys in one question
WAIT_S, SHARED_WAIT_S = 2.0, 0.2  # for others that write: the faster journal makes only writers wait
_TABLE = """
CREATE TABLE IF NOT EXISTS shapes (tag TEXT PRIMARY KEY, model BLOB, dtype TEXT, codec TEXT, page_size INTEGER);
CREATE TABLE IF NOT EXISTS pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice, so that what is new has a larger one
    shape TEXT, key BLOB, parent BLOB, tenant BLOB, tokens BLOB, count INTEGER, size INTEGER, born REAL, used REAL,
    pinned INTEGER DEFAULT 0,
    UNIQUE (shape, key)
);
CREATE TABLE IF NOT EXISTS notes (
    id INTEGER PRIMARY KEY, shape TEXT, key BLOB, tenant BLOB, note BLOB NOT NULL, used REAL,
    pinned INTEGER DEFAULT 0,  -- none is: what is asked of pages can be asked of them
    UNIQUE (shape, key)
);
CREATE INDEX IF NOT EXISTS notes_used ON notes (used);
"""


def _are(kinds: Mapping[str, str]) -> str:
    """Says in SQL that columns are of these kinds: rows may come from anywhere."""
    return " AND ".join(f"typeof({column}) IN ({kind})" for kind, columns in kinds.items() for column in columns.split())


# A shape is part of the path of a file, which may be removed by it: it must be a digest, and never a way out of the directory.
_SOUND = "length(tokens) % 4 = 0 AND shape NOT GLOB '*[^0-9a-f]*' AND " + _are(
    {"'text'": "shape", "'blob'": "key parent tenant tokens", "'integer'": "count size pinned", "'real', 'integer'": "born used"}
)
_KNOWN = _are({"'text'": "tag dtype codec", "'blob'": "model", "'integer'": "page_size"})
_COLUMNS = "shape, key, parent, tenant, count, size, born, used, pinned"


class Entry(NamedTuple):
    """What the index says of a page."""

    shape: str  # the tag of it
    key: Key
    parent: Key
    tenant: bytes
    tokens: int
    size: int
    born: float
    used: float
    pinned: int  # 0 or 1


@dataclass(frozen=True)
class Kind:
    """What the index says of a shape."""

    model: bytes
    dtype: str
    codec: str
    page_size: int


class Listed(NamedTuple):
    """A page of one shape, as an earlier process or another one left it."""

    id: int
    key: Key
    parent: Key
    tenant: bytes
    packed: bytes  # the tokens, int32, little-endian
    size: int

    @property
    def tokens(self) -> int:
        return len(self.packed) // 4

    @property
    def card(self) -> Card:
        return Card(self.key, self.parent, self.tenant, struct.unpack(f"<{self.tokens}i", self.packed))


class Index:
    """Every method may be called from any thread, and raises sqlite3.Error. Nothing in memory is lost by that."""

    def __init__(self, path: Path | None, *, shared: bool = False) -> None:
        """Without a path it is in memory. `shared`: by several machines."""
        self._lock = threading.Lock()
        wait = SHARED_WAIT_S if shared else WAIT_S
        self._connection = sqlite3.connect(path or ":memory:", timeout=wait, check_same_thread=False)
        try:
            self._prepare(shared)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, shared: bool) -> None:
        [(version,)] = self._connection.execute("PRAGMA user_version")
        if shared or not version:  # the faster journal needs memory that its users share; an index that is there has the one it needs
            self._connection.execute(f"PRAGMA journal_mode = {'DELETE' if shared else 'WAL'}")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("PRAGMA secure_delete = ON")  # what a tenant said is in here, too
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"the index has version {version}, and this is {_VERSION}")
        if (said := list(self._connection.execute("PRAGMA quick_check(1)"))) != [("ok",)]:
            raise sqlite3.DatabaseError(f"the index is damaged: {said}")
        self._connection.executescript(_TABLE + f"PRAGMA user_version = {_VERSION};" * (not version))
        unsound = f"NOT ({_SOUND}) OR shape NOT IN (SELECT tag FROM shapes WHERE {_KNOWN})"
        if list(self._connection.execute(f"SELECT 1 FROM pages WHERE {unsound} LIMIT 1")):  # whose files are found without them
            with self._connection:
                self._connection.execute(f"DELETE FROM pages WHERE {unsound}")
                self._connection.execute(f"DELETE FROM shapes WHERE NOT ({_KNOWN})")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # ---- what is there

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> list[Entry]:
        """Those that a condition in SQL chooses, least recently used first; of those used at one time, the end of a chain first."""
        rows = self._read(f"SELECT {_COLUMNS} FROM pages WHERE ({where}) AND {_SOUND} ORDER BY used, id DESC", values)
        return [Entry(*row) for row in rows]

    def kinds(self) -> dict[str, Kind]:
        return {name: Kind(*facts) for name, *facts in self._read("SELECT tag, model, dtype, codec, page_size FROM shapes")}

    def names(self) -> set[Name]:
        return set(self._read("SELECT shape, key FROM pages"))

    def keys(self, shape: str) -> set[Key]:
        return {key for (key,) in self._read("SELECT key FROM pages WHERE shape = ?", (shape,))}

    def size(self) -> int:
        """Bytes of all of them."""
        [(size,)] = self._read("SELECT COALESCE(SUM(size), 0) FROM pages")
        return int(size)

    def used(self, shape: str, keys: Sequence[Key], since: float, until: float) -> set[Key]:
        """Those of these that were used in this time, or are pinned."""
        where = "shape = ? AND (used BETWEEN ? AND ? OR pinned)"
        return {key for (key,) in self._read_of(keys, f"SELECT key FROM pages WHERE {where}", (shape, since, until))}

    def changes(self) -> int:
        """A number that is another one after other processes have written."""
        [(version,)] = self._read("PRAGMA data_version")
        return int(version)

    def news(self, shape: str, last: int, before: int) -> tuple[int, list[Listed]] | None:
        """That number, and the pages behind the row `last`. None where it is `before`, and where somebody writes: who looks for pages does
        not wait for that."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            [(version,)] = self._connection.execute("PRAGMA data_version").fetchall()
            if version == before:
                return None
            sql = f"SELECT id, key, parent, tenant, tokens, size FROM pages WHERE shape = ? AND id > ? AND {_SOUND} ORDER BY id"
            return version, [Listed(*row) for row in self._connection.execute(sql, (shape, last)).fetchall()]
        finally:
            self._lock.release()

    # ---- what changes

    def add(self, headers: Iterable[tuple[Header, float]]) -> None:
        """Pages and their times."""
        kinds, pages = {}, []
        for header, now in headers:
            card, shape = header.card, header.shape
            kinds[tag(shape)] = (tag(shape), shape.model, shape.dtype, shape.codec, shape.page_size)
            tokens = struct.pack(f"<{len(card.tokens)}i", *card.tokens)
            pages.append((tag(shape), card.key, card.parent, card.tenant, tokens, len(card.tokens), header.size, now, now))
        again = "ON CONFLICT (shape, key) DO UPDATE SET size = excluded.size, born = excluded.born, used = excluded.used"
        with self._lock, self._connection:
            self._connection.executemany("INSERT OR IGNORE INTO shapes VALUES (?, ?, ?, ?, ?)", kinds.values())
            columns = "shape, key, parent, tenant, tokens, count, size, born, used"
            self._connection.executemany(f"INSERT INTO pages ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) {again}", pages)

    def remove(self, names: Iterable[Name]) -> None:
        self._write("DELETE FROM pages WHERE shape = ? AND key = ?", names)

    def settle(self, patience: float | None = None) -> None:
        """Empties the journal, which still has what was removed. Where others read it, it cannot be emptied: `patience` is how many seconds
        that is tried before it is an error."""
        end = time.monotonic() + (patience or 0)
        while self._read("PRAGMA wal_checkpoint(TRUNCATE)")[0][0] and patience is not None:
            if time.monotonic() > end:
                raise sqlite3.OperationalError("other processes read it")
            time.sleep(0.02)

    def touch(self, names: Iterable[Name], now: float) -> None:
        self._write("UPDATE pages SET used = ? WHERE shape = ? AND key = ?", ((now, *name) for name in names))

    def pin(self, names: Iterable[Name], pinned: bool) -> None:
        self._write("UPDATE pages SET pinned = ? WHERE shape = ? AND key = ?", ((pinned, *name) for name in names))

    # ---- what is noted beside the pages

    def notes(self, shape: str, keys: Sequence[Key], oldest: float) -> dict[Key, bytes]:
        """Under these keys, if they were written since then."""
        return dict(self._read_of(keys, "SELECT key, CAST(note AS BLOB) FROM notes WHERE shape = ? AND used >= ?", (shape, oldest)))

    def note(self, name: Name, tenant: bytes, note: bytes, now: float, oldest: float) -> None:
        """In place of what is there. Those that were written before `oldest` go, and all but the latest."""
        columns = "shape, key, tenant, note, used"  # and another id: it is the latest now
        self._write(f"INSERT OR REPLACE INTO notes ({columns}) VALUES (?, ?, ?, ?, ?)", [(*name, tenant, note, now)])
        self._write("DELETE FROM notes WHERE used < ? OR id <= (SELECT MAX(id) FROM notes) - ?", [(oldest, NOTED)])

    def forget(self, where: str, values: Sequence[object]) -> None:
        """The notes that a condition in SQL chooses."""
        self._write(f"DELETE FROM notes WHERE {where}", [tuple(values)])

    def _read(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock, closing(self._connection.execute(sql, values)) as cursor:
            return cursor.fetchall()

    def _read_of(self, keys: Sequence[Key], sql: str, values: Sequence[object]) -> Iterator[Any]:
        """What is so of some of these keys; a question has no room for all."""
        for start in range(0, len(keys), ASKED):
            some = keys[start : start + ASKED]
            yield from self._read(f"{sql} AND key IN ({', '.join('?' for _ in some)})", (*values, *some))

    def _write(self, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self._lock, self._connection:
            self._connection.executemany(sql, rows)
