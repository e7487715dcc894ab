"""One file that holds one page: written whole or not at all, and read layer by layer."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .fileformat import Header, Name, expect, pack, read_header
from .tier import Lost


class PageFile:
    """Open for reading; its header is sound, and says what its name says. Raises Lost, and nothing else."""

    def __init__(self, path: Path, name: Name) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
        except FileNotFoundError:
            raise Lost("absent") from None
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Lost("unreadable", f"{path} is no plain file")
            self.modified = found.st_mtime
            self.header = read_header(lambda offset, length: os.pread(self._descriptor, length, offset), found.st_size)
            expect(self.header, name)
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except Lost:
            self.close()
            raise

    def layer(self, index: int, into: memoryview) -> None:
        if into.nbytes != self.header.layer_bytes:
            raise Lost("foreign", f"a layer of {self.path.name[:12]} has {self.header.layer_bytes} bytes, and {into.nbytes} are wanted")
        try:
            self._fill(self.header.offset(index), into.cast("B"))
        except OSError as error:
            raise self._unreadable(error) from error
        self.header.check(index, into)

    def _fill(self, offset: int, into: memoryview) -> None:
        while into:
            got = os.preadv(self._descriptor, [into], offset)
            if not got:
                raise Lost("short", f"{self.path.name[:12]} has been cut")
            into, offset = into[got:], offset + got

    def ahead(self) -> None:
        """Tells the system that all of it will be read."""
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1  # a second time would close a file of somebody else's

    def _unreadable(self, error: OSError) -> Lost:
        return Lost("unreadable", f"{self.path} cannot be read ({error.strerror or error})")


def write_page(path: Path, making: Path, header: Header, layers: Sequence[memoryview]) -> None:
    """Raises OSError. Under its name stands all of it, or what stood there before; what is not whole is in `making`, locked. Mode 0600."""
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    descriptor, begun = _locked(making)
    try:
        for buffer in (memoryview(pack(header)), *layers):
            _write_all(descriptor, buffer.cast("B"))
        os.fdatasync(descriptor)
        os.rename(begun, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(begun)
        raise
    finally:
        os.close(descriptor)


def probe(making: Path) -> None:
    """Raises OSError where no page could be begun: a file is made, and removed."""
    descriptor, begun = _locked(making)
    try:
        os.unlink(begun)
    finally:
        os.close(descriptor)


def _locked(making: Path) -> tuple[int, str]:
    """A new file and its name. Before it is locked, it may be swept away: then another one is made."""
    while True:
        descriptor, begun = tempfile.mkstemp(dir=making)
        with suppress(OSError):  # where there are no locks, nobody sweeps
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, begun
        os.close(descriptor)


def sweep(making: Path) -> None:
    """Removes what processes that died were writing: those that live hold a lock."""
    for left in making.iterdir():
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
            finally:
                os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
