"""The tier on disk: the pages of one shape in a directory that others may use too."""

import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..kv.segment import Key
from .fileformat import file_size, header_for, tag
from .folder import Finding, Folder
from .index import Entry
from .pagefile import PageFile
from .tier import Card, Ends, Lost, NoRoom, Shape
from .touches import every

SPARE = 2**14  # bytes that a page takes beside its file, at most: folders, and rows of the index


class _Known(NamedTuple):
    parent: Key
    size: int  # of its file


class DiskReader:
    def __init__(self, tier: "DiskTier", file: PageFile) -> None:
        self.card = file.header.card
        self._tier = tier
        self._file = file

    def layer(self, index: int, into: memoryview) -> None:
        try:
            self._file.layer(index, into)
        except Lost as lost:
            self._tier.failed(self.card.key, lost)
            raise

    def close(self) -> None:
        self._file.close()


class DiskTier:
    """Looking takes no reading: keys and short ends are in memory, and what other processes add is asked of the index when it changes."""

    def __init__(
        self, directory: Path, shape: Shape, clock: Callable[[], float] = time.time, *, shared: bool = False, name: str = "disk"
    ) -> None:
        """`shared`: by several machines, for whom SQLite has a journal of its own."""
        self.name = name
        self.is_full = False  # nothing more is kept, and what is there is read
        self.gives_way = False  # whoever keeps pages here lets others go for them where the file system is full
        self._shape = shape
        self._tag = tag(shape)
        self._clock = clock
        self._folder = Folder(directory, shared=shared, clock=clock)
        self._pages: dict[Key, _Known] = {}  # every page that is known to be there
        self.used = 0  # bytes of these
        self._ends = Ends()
        self._lock = threading.Lock()
        self._last, self._changes = 0, -1  # the newest row that was read, and the state of the index at that time
        self._shared_at = -1  # its state when the bound was last looked at
        self._refresh()

    def look(self, keys: Sequence[Key]) -> int:
        known = self._known(keys)
        if known < len(keys) and self._refresh():
            return self._known(keys)
        return known

    def ends(self, parent: Key) -> Sequence[Card]:
        self._refresh()
        with self._lock:
            return self._ends.behind(parent)

    def open(self, key: Key) -> DiskReader:
        known = self._pages.get(key)
        told = self._ends.get(known.parent, key) if known is not None else None
        try:
            file = self._folder.open((self._tag, key))
        except Lost:
            self._forget([key])
            raise
        reader = DiskReader(self, file)
        if told is not None and told != reader.card:
            reader.close()
            self.failed(key, lost := Lost("corrupt", f"the index has other tokens for the short end {key.hex()[:12]}"))
            raise lost
        file.ahead()
        return reader

    def save(self, card: Card, layers: Sequence[memoryview]) -> None:
        there = self._folder.has((self._tag, card.key), file_size(len(card.tokens), self._shape, layers[0].nbytes))
        if there and card.key in self._pages:
            self.touch([card.key])
            return
        if self.is_full and not there:
            raise Lost("full", "there is no room for more pages")
        header = header_for(card, self._shape, layers)
        if there:
            self._folder.record(header)
        else:
            try:
                self._folder.write(header, layers, gives_way=self.gives_way)
            except NoRoom as lost:
                lost.there = self.size
                raise
        with self._lock:
            self._learn(card.key, card.parent, header.size)
            if len(card.tokens) < self._shape.page_size:
                self._ends.add(card)

    def drop(self, keys: Sequence[Key]) -> None:
        self._forget(keys)
        self._folder.remove([(self._tag, key) for key in keys])

    def close(self) -> None:
        self._folder.close()

    # ---- what is there, for those who decide what stays

    def file_bytes(self, page_bytes: int) -> int:
        """What the file of a whole page takes."""
        return file_size(self._shape.page_size, self._shape, page_bytes // self._shape.layers)

    @property
    def size(self) -> int:
        """Bytes of everything in the directory, whoever wrote it."""
        with self._folder.hint():
            return self._folder.index.size()
        return 0

    def entries(self) -> list[Entry]:
        """The pages of this shape, least recently used first."""
        return self._folder.entries("shape = ?", [self._tag])

    def touch(self, keys: Sequence[Key]) -> None:
        with self._folder.hint():
            self._folder.index.touch([(self._tag, key) for key in keys], self._clock())

    def unused(self, keys: Sequence[Key], ttl: float, now: float) -> Sequence[Key]:
        """Those of these that no other process used within the TTL, and nobody pinned. The caller's own uses may be told a little later
        than they were, and what was used in the future was told by a clock that has been set back."""
        late = every(ttl)
        with self._folder.hint():
            used = self._folder.index.used(self._tag, keys, now - ttl + late, now + late)
            return [key for key in keys if key not in used]
        return keys

    def make_room(self, bound: int, keep: Container[Key]) -> int:
        """Removes what is not in `keep` and not pinned, such as pages of other models and other processes, least recently used first, until
        the directory is within its bound; how many."""
        return self._remove(self._surplus(bound, keep))

    def make_way(self, size: int, keep: Container[Key]) -> list[Key]:
        """The same, until the file system has room for so many bytes; which pages of this shape went."""
        found = self._surplus(self.size + self._folder.free - size - SPARE, keep)
        self._remove(found)
        return [entry.key for entry in found if entry.shape == self._tag]

    def _surplus(self, bound: float, keep: Container[Key]) -> list[Entry]:
        surplus, found = self.size - bound, list[Entry]()
        for entry in self._folder.entries("NOT pinned") if surplus > 0 else ():
            if surplus > 0 and (entry.shape != self._tag or entry.key not in keep):
                found.append(entry)
                surplus -= entry.size
        return found

    def _remove(self, found: Sequence[Entry]) -> int:
        self._forget([entry.key for entry in found if entry.shape == self._tag])
        return self._folder.remove([(entry.shape, entry.key) for entry in found])

    def share(self, bound: int, keep: Container[Key], held: Sequence[Key], ttl: float | None = None) -> list[Key]:
        """The bound is one for all processes that write here: makes room as above, and answers which of the pages that the caller holds are
        not there any more, whoever removed them. What it does not hold, and nobody used within the TTL, goes too: who wrote it may have
        ended."""
        if self._folder.renew():
            with self._lock:
                self._last, self._changes, self._shared_at = 0, -1, -1
            self._refresh()
        removed = self._tidy(ttl, keep, frozenset(held)) + self.make_room(bound, keep)
        with self._folder.hint():
            changes, before = self._folder.index.changes(), self._shared_at
            self._shared_at = changes
            if not removed and changes == before:
                return []
            there = self._folder.index.keys(self._tag)
            gone = [key for key in held if key not in there and not self._folder.size((self._tag, key))]
            self._forget(gone)
            return gone
        return []

    def _tidy(self, ttl: float | None, keep: Container[Key], held: Container[Key]) -> int:
        where = "shape = ? AND NOT pinned AND used < ?"
        old = self._folder.entries(where, [self._tag, self._clock() - ttl]) if ttl is not None else ()
        return self._remove([entry for entry in old if entry.key not in keep and entry.key not in held])

    def verify(self) -> Iterator[Finding]:
        """Reads all of every page in the directory."""
        return self._folder.verify()

    # ---- what is noted beside the pages

    def notes(self, keys: Sequence[Key], oldest: float) -> Mapping[Key, bytes]:
        with self._folder.hint():
            return self._folder.index.notes(self._tag, keys, oldest)
        return {}

    def note(self, key: Key, tenant: bytes, note: bytes, oldest: float) -> None:
        with self._folder.hint():
            self._folder.index.note((self._tag, key), tenant, note, self._clock(), oldest)

    # ---- what is known of it

    def failed(self, key: Key, lost: Lost) -> None:
        self._forget([key])
        self._folder.failed((self._tag, key), lost)

    def _known(self, keys: Sequence[Key]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self._pages), len(keys))

    def _refresh(self) -> bool:
        """Whether others have changed the index. What they added has larger ids; what they removed is missed when it is opened."""
        with self._lock, self._folder.hint():
            news = self._folder.index.news(self._tag, self._last, self._changes)
            if news is None:
                return False
            changes, rows = news
            for row in rows:
                self._last = row.id
                self._learn(row.key, row.parent, row.size)
                if row.tokens < self._shape.page_size:
                    self._ends.add(row.card)
            self._changes = changes
            return True
        return False

    def _learn(self, key: Key, parent: Key, size: int) -> None:
        before = self._pages.get(key)
        self.used += size - (before.size if before is not None else 0)
        self._pages[key] = _Known(parent, size)

    def _forget(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in {key for key in keys if key in self._pages}:
                parent, size = self._pages.pop(key)
                self.used -= size
                self._ends.drop(parent, key)
