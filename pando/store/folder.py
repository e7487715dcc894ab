"""A directory of pages, one file each, of any number of models, tenants and processes.

    DIR/v1/index.sqlite       what is there; made again from the files where it is missing or damaged
    DIR/v1/making/            files that are being written
    DIR/v1/SHAPE/ab/abcd...   pages, under the digest of their shape and the beginning of their key

A file has its name only when all of it is written, so processes may share a directory and end at any moment.
"""

import errno
import fcntl
import logging
import math
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidOption
from .fileformat import VERSION, Header, Name
from .index import Entry, Index
from .pagefile import PageFile, probe, sweep, write_page
from .tier import Lost, NoRoom

log = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds for which others who read the index are waited for
UNINDEXED = 2**12  # pages without a row that are remembered; others are found at the next start
JOURNAL = 2**23  # bytes that must be free for it to grow as it likes: SQLite empties it at 4 MiB
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_MAY_BE_SOUND = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
}


class Finding(NamedTuple):
    """What reading all of a file has shown."""

    name: Name
    size: int
    lost: Lost | None


class Folder:
    """Only `write` and `open` raise, and only Lost. What goes wrong is logged, the first of each kind."""

    def __init__(self, directory: Path, *, shared: bool = False, clock: Callable[[], float] = time.time) -> None:
        """`shared`: by several machines."""
        self._directory = directory
        self.root = directory / f"v{VERSION}"
        self._making = _making(directory)
        self._shared = shared
        self._clock = clock
        self._told: dict[str, str] = {}  # by kind
        self._inode: int | None = None  # of the index
        self._unindexed: list[tuple[Header, float]] = []  # written, while the index could not be
        self._pinned: set[Name] = set()  # pages that were, and are lost: they are again when they are written
        self._lock = threading.Lock()
        try:
            _make(directory)
            with self._alone():
                sweep(self._making)
                self.index = self._indexed()
        except (OSError, sqlite3.Error) as error:
            self._tell("index", f"no index can be written to {self.root} ({error}); give the right to, or choose another directory")
            self.index = Index(None)
            self.reconcile()

    def close(self) -> None:
        self.index.close()

    def path(self, name: Name) -> Path:
        shape, word = name[0], name[1].hex()
        return self.root / shape / word[:2] / word

    # ---- one page

    def has(self, name: Name, size: int) -> bool:
        """Whether a file of this name and size is there; what is in it is seen when it is read."""
        return self.size(name) == size

    def size(self, name: Name) -> int:
        """Bytes of its file; 0 where there is none."""
        try:
            return os.stat(self.path(name)).st_size
        except OSError:
            return 0

    def write(self, header: Header, layers: Sequence[memoryview], *, gives_way: bool = False) -> None:
        """Keeps a page, in place of what has its name; raises Lost. `gives_way`: where there is no room, the caller lets others go."""
        try:
            self._write(header, layers)
        except OSError as error:
            why, full = f"{self.root} takes no pages ({error.strerror or error})", error.errno in _NO_ROOM
            lost = NoRoom(why) if full else Lost("unreadable", why)
            said = "pages that are worth less go for new ones, and where none may, those are not kept" if full and gives_way else ""
            self._tell(f"save {lost.reason}", f"{said or 'a page could not be kept'}: {why}")
            raise lost from error
        self.record(header)
        if header.name in self._pinned:
            self._pinned.remove(header.name)
            self.pin([header.name], True)

    def _write(self, header: Header, layers: Sequence[memoryview]) -> None:
        try:
            write_page(self.path(header.name), self._making, header, layers)
        except FileNotFoundError:  # somebody has removed the directory; a shared one may not be mounted, and comes back
            if self._shared:
                raise
            _make(self._directory)
            write_page(self.path(header.name), self._making, header, layers)

    @property
    def free(self) -> float:
        """Bytes that the file system has left, as far as it says so."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return math.inf

    def record(self, header: Header) -> None:
        with self._lock:
            self._unindexed = [*self._unindexed[-UNINDEXED:], (header, self._clock())]
            with self.hint():
                self._tidy()
                self.index.add([each for each in self._unindexed if each[0] is header or self.size(each[0].name)])
                self._unindexed.clear()

    def open(self, name: Name) -> PageFile:
        """Raises Lost; a file that is not what its name says is removed."""
        try:
            return PageFile(self.path(name), name)
        except Lost as lost:
            self.failed(name, lost)
            raise

    def failed(self, name: Name, lost: Lost) -> None:
        """Says why a page is lost, and makes room for a better copy, except where the fault may be the device's and pass."""
        self.tell(lost)
        if lost.reason not in ("unreadable", "absent"):
            self._pinned.update([name] if self._is_pinned(name) else ())
            self.remove([name])
        with self.hint():
            if lost.reason == "absent" and not self.size(name):  # else another has written it meanwhile
                self.index.remove([name])

    def remove(self, names: Collection[Name]) -> int:
        """How many there were. What is open can still be read."""
        removed = 0
        for name in names:
            try:
                self.path(name).unlink()
                removed += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                self._tell("remove", f"{self.path(name)} cannot be removed ({error.strerror or error})")
        with self.hint():
            self._tidy()
            self.index.remove(names)
        return removed

    def purge(self, names: Collection[Name], where: str, values: Sequence[object]) -> int:
        """The same, with the notes that a condition in SQL chooses, and nothing of them stays in the files of the index. What could not be
        done is in `failures`."""
        removed = self.remove(names)
        with self.hint():
            self.index.forget(where, values)
            self.index.settle(PATIENCE)
        return removed

    @property
    def failures(self) -> list[str]:
        """What could not be removed or written since it was opened: the first of each kind."""
        return [self._told[kind] for kind in ("remove", "pin", "index", "hint") if kind in self._told]

    def pin(self, names: Collection[Name], pinned: bool) -> None:
        """They stay, whatever their age. The file says so, too, by being for reading alone: so a new index knows it."""
        for name in names:
            try:
                self.path(name).chmod(0o400 if pinned else 0o600)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._tell("pin", f"{self.path(name)} cannot be {'' if pinned else 'un'}pinned ({error.strerror or error})")
        with self.hint():
            self.index.pin(names, pinned)

    # ---- all of them

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> list[Entry]:
        """Those that a condition in SQL chooses, least recently used first."""
        with self.hint():
            return self.index.entries(where, values)
        return []

    def files(self) -> Iterator[Name]:
        for shape in _folders(self.root):
            for part in _folders(shape):
                for file in _listed(part):
                    with suppress(ValueError):  # not the name of a page
                        yield shape.name, bytes.fromhex(file.name)

    def verify(self) -> Iterator[Finding]:
        """Reads all of every page. Nothing is removed."""
        for name in sorted(self.files()):
            try:
                size = self.path(name).stat().st_size
            except OSError:
                continue  # removed meanwhile
            try:
                with closing(PageFile(self.path(name), name)) as file:
                    buffer = memoryview(bytearray(file.header.layer_bytes))
                    for layer in range(file.header.shape.layers):
                        file.layer(layer, buffer)
                yield Finding(name, size, None)
            except Lost as lost:
                yield Finding(name, size, lost)

    # ---- the index

    def _indexed(self) -> Index:
        """The index there is, if it is sound, brought up to date with the files; otherwise a new one."""
        path = self.root / "index.sqlite"
        try:
            return self._reconciled(self._open_index(path))
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _MAY_BE_SOUND:
                raise
            self._tell("rebuilt", f"{path} is made again from the files ({error})")
        for part in ("index.sqlite-wal", "index.sqlite-shm", "index.sqlite"):
            (self.root / part).unlink(missing_ok=True)
        return self._reconciled(self._open_index(path))

    def _open_index(self, path: Path) -> Index:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # SQLite would let others read it
        self._inode = os.fstat(file).st_ino
        os.close(file)
        return Index(path, shared=self._shared)

    def renew(self) -> bool:
        """Opens the index anew where somebody has removed or replaced its file: nobody else would see what is written to the old one."""
        before, path = self.index, self.root / "index.sqlite"
        try:
            if self._inode is None or (path.exists() and os.stat(path).st_ino == self._inode):
                return False
            before.close()  # first: of two that are open SQLite would cut the shared memory of one
            with self._alone():
                self.index = self._indexed()
        except (OSError, sqlite3.Error) as error:
            self._inode = -1  # no file's: it is tried again
            self._tell("renew", f"{path} is gone, and cannot be opened anew ({error})")
            return False
        self._tell("renewed", f"{path} was removed or replaced, and is opened anew")
        return True

    def reconcile(self) -> None:
        with self.hint():
            self._reconcile(self.index)

    def _reconciled(self, index: Index) -> Index:
        try:
            self._reconcile(index)
        except sqlite3.Error:
            index.close()
            raise
        return index

    def _reconcile(self, index: Index) -> None:
        """Adopts files that have no row, such as those of a process that was killed, and forgets rows that have no file. Rows are listed
        first, since their files were there before them. No payload is read, and headers only of what is adopted."""
        rows = index.names()
        files = set(self.files())
        index.remove(rows - files)
        index.add(self._adopted(files - rows))
        index.pin([name for name in files - rows if self._is_pinned(name)], True)

    def _adopted(self, names: Iterable[Name]) -> Iterator[tuple[Header, float]]:
        for name in names:
            with suppress(Lost), closing(PageFile(self.path(name), name)) as file:  # `verify` tells of those that are not sound
                yield file.header, file.modified

    def _is_pinned(self, name: Name) -> bool:
        try:
            return not self.path(name).stat().st_mode & stat.S_IWUSR
        except OSError:
            return False

    def _tidy(self) -> None:
        """The journal of the index grows for a while. Where it would take the room of pages, it is emptied first."""
        if self.free < JOURNAL:
            self.index.settle()

    @contextmanager
    def hint(self) -> Iterator[None]:
        """What the index does is worth having, and never worth failing for."""
        try:
            yield
        except sqlite3.Error as error:
            self._tell(
                "hint",
                f"the index of {self.root} is out of use ({error}); files count, and it is made to agree with them at the next start",
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time opens the index. The lock belongs to the open file, so it ends with the process, however that ends."""
        with open(os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ---- the log

    def tell(self, lost: Lost) -> None:
        if lost.reason != "absent":
            self._tell(lost.reason, f"a page is lost, and will be computed again: {lost}")

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told[kind] = text
            log.warning("%s; further ones like it are not logged", text)


def directory_at(path: str) -> Path:
    """A directory as it is written in an option: `~` is the user's home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidOption(f"{path} begins with a home folder that there is not; write the whole path of a directory") from error


def try_directory(directory: Path) -> None:
    """Makes it, where it is not there; raises OSError where no page can be written, unless that is for want of room, which may pass."""
    try:
        _make(directory)
        probe(_making(directory))
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise


def _making(directory: Path) -> Path:
    return directory / f"v{VERSION}" / "making"


def _make(directory: Path) -> None:
    making = _making(directory)
    for place in (directory, making.parent, making):
        place.mkdir(mode=0o700, parents=place is directory, exist_ok=True)


def _listed(path: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def _folders(path: Path) -> list[Path]:
    return [path / entry.name for entry in _listed(path) if entry.is_dir(follow_symlinks=False)]
