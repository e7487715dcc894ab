"""The folder where converted models are kept: who may write there, what counts as whole, and what is remembered between starts."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PandoError

Progress = Callable[[int, int], None]  # bytes done so far, in all

_WORKSHOP = ".making-"
_BOOK = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PIECE = 1 << 20


@dataclass(frozen=True)
class Shelf:
    home: Path
    shown: bool  # say on stderr what takes time

    @classmethod
    def of_user(cls, *, shown: bool = False) -> "Shelf":
        """PANDO_HOME, or `pando` in the user's cache folder as the XDG rules place it."""
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            if os.environ.get("PANDO_HOME"):
                return cls(Path(os.environ["PANDO_HOME"]).expanduser(), shown)
            return cls((xdg if xdg.is_absolute() else Path.home() / ".cache") / "pando", shown)
        except RuntimeError as error:
            raise PandoError("there is no home folder to keep models in; set PANDO_HOME to the whole path of a folder") from error

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def store(self) -> Path:
        """For cached context that outlives the process."""
        return self.home / "store"

    def holds(self, target: Path) -> bool:
        return all((target / name).is_file() for name in _BOOK)

    @contextmanager
    def making(self, target: Path) -> Iterator[Path | None]:
        """A workshop whose folder `model` becomes `target` if the block succeeds; None if another process made it while this one waited."""
        with self._alone(self.models, "another process is fetching or converting a model; waiting for it"):
            self._sweep()
            if self.holds(target):
                yield None
                return
            workshop = Path(tempfile.mkdtemp(prefix=_WORKSHOP, dir=self.models))
            try:
                (workshop / "model").mkdir()
                yield workshop
                if target.exists():  # somebody removed a part of it
                    target.rename(workshop / "broken")
                (workshop / "model").rename(target)
                sync(self.models)
            finally:
                self._sweep()

    def _sweep(self) -> None:
        """Removes every workshop, also those of processes that died: one that lives would hold the lock."""
        for left in self.models.glob(_WORKSHOP + "*"):
            shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _alone(self, folder: Path, if_not: str = "") -> Iterator[None]:
        """One process at a time changes a folder. The lock belongs to the open file, so it ends with the process, however that ends."""
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(if_not)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def sha256_of(self, path: Path) -> str:
        """Of a file's content; read again only when its size, its times or the file itself differ from the last time. The time of the last
        change of anything is looked at, too, since nobody can set it: who copies a file may keep the other."""
        path = path.resolve()
        stat = path.stat()
        seen = _seen(stat)
        kept = self._remembered("files").get(str(path))
        if isinstance(kept, dict) and seen.items() <= kept.items() and isinstance(kept.get("sha256"), str):
            return str(kept["sha256"])
        total = hashlib.sha256()
        with path.open("rb") as file, self.bar("checking") as report:
            while piece := file.read(_PIECE):
                total.update(piece)
                report(file.tell(), stat.st_size)
        if _seen(path.stat()) == seen:  # else somebody wrote to it meanwhile
            with suppress(OSError):  # a folder that nobody may write to costs time, and nothing else
                self._remember("files", str(path), {**seen, "sha256": total.hexdigest()})
        return total.hexdigest()

    def snapshot(self, key: str) -> Path | None:
        kept = self._remembered("snapshots").get(key)
        return Path(kept) if isinstance(kept, str) else None

    def keep_snapshot(self, key: str, directory: Path) -> None:
        with suppress(OSError):  # it is asked for again then
            self._remember("snapshots", key, str(directory))

    def _remembered(self, kind: str) -> Mapping[str, Any]:
        try:
            found = json.loads((self.home / f"{kind}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # forgetting costs time, never correctness
        return found if isinstance(found, dict) else {}

    def _remember(self, kind: str, key: str, value: Any) -> None:
        with self._alone(self.home):
            known = {name: each for name, each in self._remembered(kind).items() if kind != "files" or Path(name).exists()}
            fresh = self.home / f".{kind}.json"
            fresh.touch(0o600)
            fresh.write_text(json.dumps({**known, key: value}, indent=2) + "\n", encoding="utf-8")
            fresh.replace(self.home / f"{kind}.json")

    def say(self, text: str) -> None:
        if self.shown and text:
            print(f"pando: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, title: str) -> Iterator[Progress]:
        """A progress bar on a terminal, silence elsewhere, and where there is nothing to draw it with."""
        tqdm = _tqdm() if self.shown and sys.stderr.isatty() else None
        if tqdm is None:
            yield lambda done, total: None
            return
        with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield report


def _tqdm() -> Any:
    """None on a host that has only what computing needs."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def seen(*files: Iterable[Path]) -> list[dict[str, int]]:
    """What tells whether one of them was replaced or written to."""
    return [_seen(path.stat()) for some in files for path in some]


def _seen(stat: os.stat_result) -> dict[str, int]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


def sync(path: Path) -> None:
    """A file or a directory, as it is now, outlives a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
