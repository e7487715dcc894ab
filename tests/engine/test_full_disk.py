"""A file system that is full before the bound of the disk is reached, and one that takes nothing at all."""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from pando.engine.engine import Engine
from pando.errors import InvalidOption
from pando.model.load import Model
from pando.store import folder as folders
from pando.store import sharing
from pando.store.disk import DiskTier
from pando.store.fileformat import Header
from pando.store.tier import NoRoom
from tests.tiny import tiny_model

from ..store.pages import pin
from .test_store import ask, cold, engine_of, settled, tokens_of, words

PROMPT = 9  # tokens: two pages


class Drive:
    """A file system with room for so many pages of the tiny model."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.folder, self.pages, self.threads = folder, pages, set[threading.Thread]()
        self.write = folders.write_page

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if len(path.name) == 64]

    def page(self, path: Path, making: Path, header: Header, layers: Sequence[memoryview]) -> None:
        if path.is_relative_to(self.folder):  # and not of an engine that a test before has left
            self.threads.add(threading.current_thread())
            if len(self.files()) >= self.pages:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(path, making, header, layers)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    made = Drive(tmp_path / "store", 6)
    monkeypatch.setattr(folders, "write_page", made.page)
    return made


def say(engine: Engine, *seeds: int) -> None:
    for seed in seeds:
        ask(engine, words(seed, PROMPT), count=1)
        settled(engine)


def counted(engine: Engine) -> tuple[int, dict[str, int]]:
    """Pages that the disk took, and those that it did not."""
    assert engine.store is not None
    facts = engine.store.facts()
    return facts.saved.get("disk", 0), dict(facts.unsaved)


def found(model: Model, drive: Drive, *seeds: int) -> list[int]:
    """How much of each prompt a later process finds on disk."""
    engine = engine_of(model, drive.folder)
    tiers = [ask(engine, words(seed, PROMPT), count=1)[0].reuse.tiers.get("disk", 0) for seed in seeds]
    engine.close()
    return tiers


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_where_the_file_system_is_full_the_oldest_pages_go_for_new_ones(
    model: Model, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(model, drive.folder)
    say(engine, *range(10))
    assert counted(engine) == (20, {}) and len(drive.files()) == 6
    assert threading.main_thread() not in drive.threads and len(drive.threads) == 1
    engine.close()
    [warning] = warnings(caplog)
    assert "worth less go for new ones" in warning and "No space left on device" in warning and "lost" not in warning
    drive.pages = 100
    assert found(model, drive, 9, 8, 7, 6, 0) == [8, 8, 8, 0, 0]


def test_what_is_pinned_stays_on_a_full_file_system(model: Model, drive: Drive) -> None:
    engine = engine_of(model, drive.folder)
    say(engine, 0, 1)
    assert engine.store is not None
    disk = engine.store.below[0]
    assert isinstance(disk, DiskTier)
    first = [entry.key for entry in disk.entries()][:2]  # least recently used
    pin(disk, first)
    engine.close()
    engine = engine_of(model, drive.folder)
    say(engine, *range(2, 8))
    assert counted(engine) == (12, {}) and len(drive.files()) == 6
    assert {key.hex() for key in first} <= {path.name for path in drive.files()}
    engine.close()


def test_where_nothing_may_go_pages_are_not_kept_and_each_is_tried_twice_at_most(model: Model, drive: Drive) -> None:
    drive.pages = 0
    engine = engine_of(model, drive.folder)
    assert tokens_of(engine, words(1, 30)) == cold(model, words(1, 30))
    settled(engine)
    assert counted(engine) == (0, {"full": engine.store.facts().saved["host"]})  # type: ignore[union-attr]
    engine.close()


def test_a_conversation_that_is_longer_than_the_file_system_has_room_for_keeps_its_beginning(model: Model, drive: Drive) -> None:
    engine = engine_of(model, drive.folder)
    ask(engine, words(1, 61), count=1)
    settled(engine)
    saved, unsaved = counted(engine)
    assert saved == 6 and unsaved == {"full": 9}
    engine.close()
    later = engine_of(model, drive.folder)
    assert ask(later, words(1, 61), count=1)[0].reuse.tiers == {"disk": 24}
    later.close()


def test_where_others_take_the_room_that_pages_leave_no_more_of_them_go(model: Model, drive: Drive) -> None:
    engine = engine_of(model, drive.folder)
    say(engine, 0, 1, 2)
    drive.pages = 0  # whatever goes now leaves no room
    say(engine, *range(3, 20))
    assert counted(engine) == (6, {"full": 34}) and len(drive.files()) == 6 - sharing.VAIN
    engine.close()


def test_when_there_is_room_again_the_bound_is_as_it_was(model: Model, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = engine_of(model, drive.folder), [0.0]
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert engine.store is not None
    sizes, bound = engine.store.ledger.capacities, engine.store.ledger.capacities["disk"]
    say(engine, *range(5))
    assert sizes["disk"] == 6 * engine.store._page_bytes
    drive.pages = 100
    say(engine, 5)
    assert len(drive.files()) == 6, "it is not tried yet"
    now[0] += 1.1 * sharing.AGAIN
    say(engine, *range(6, 20))
    assert len(drive.files()) == 6 + 28 and counted(engine) == (40, {}) and sizes["disk"] == bound
    engine.close()


@pytest.fixture
def measured(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """The system says how much is free."""

    def usage(place: object) -> SimpleNamespace:
        left = drive.pages - len(drive.files())
        return SimpleNamespace(free=left * 2**20 if left > 0 else 0)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return drive


def test_where_a_model_has_no_pages_those_of_another_go(measured: Drive) -> None:
    other = engine_of(tiny_model(seed=1), measured.folder)
    say(other, *range(3))
    other.close()
    mine = engine_of(tiny_model(), measured.folder)
    say(mine, *range(5))
    assert counted(mine) == (10, {})
    mine.close()
    measured.pages = 100
    assert found(tiny_model(), measured, 4)[0] == 8


def test_two_processes_share_a_full_file_system(model: Model, measured: Drive) -> None:
    engines = [engine_of(model, measured.folder) for _ in range(2)]
    for turn in range(8):
        for place, engine in enumerate(engines):
            prompt = words(100 * place + turn, PROMPT)
            assert tokens_of(engine, prompt) == cold(model, prompt)
            settled(engine)
            assert len(measured.files()) <= 6
    for place, engine in enumerate(engines):
        assert counted(engine)[1] == {}
        engine.clear_cache()
        for turn in range(8):
            prompt = words(100 * place + turn, PROMPT)
            assert tokens_of(engine, prompt) == cold(model, prompt)
        settled(engine)
        engine.close()


# ---- directories that take nothing


def unusable(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "file").write_text("not a directory")
    if how in ("read-only", "forbidden"):  # whoever runs the tests may be allowed everything
        code = errno.EROFS if how == "read-only" else errno.EACCES

        def refuse(**_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
    return {"file": folder / "file", "below": folder / "file" / "store", "nowhere": Path("/proc/nowhere/store")}.get(how, folder / "dir")


WAYS = {
    "file": "Not a directory",
    "below": "Not a directory",
    "nowhere": "No such file or directory",
    "read-only": "Read-only file system",
    "forbidden": "Permission denied",
}


@pytest.mark.parametrize("how", WAYS)
def test_a_directory_that_was_asked_for_and_takes_nothing_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    place = unusable(tmp_path, how, monkeypatch)
    with pytest.raises(InvalidOption) as refused:
        engine_of(model, place)
    said = str(refused.value)
    assert f"disk_dir is {place}, and no file can be made there ({WAYS[how]})" in said and "choose another" in said and "\n" not in said
    assert not caplog.records


@pytest.mark.parametrize("how", WAYS)
def test_a_directory_that_nobody_asked_for_and_that_takes_nothing_is_left_out(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    place = unusable(tmp_path, how, monkeypatch)
    engine = engine_of(model, place, disk_gib=None)
    assert engine.store is None
    [warning] = warnings(caplog)
    assert f"{place} cannot be used ({WAYS[how]})" in warning and "--disk-dir" in warning


def test_trying_a_directory_leaves_nothing_in_it(model: Model, tmp_path: Path) -> None:
    engine_of(model, tmp_path / "new").close()
    assert list((tmp_path / "new/v1/making").iterdir()) == []


def test_a_directory_that_is_only_full_is_taken_and_what_is_there_is_read(
    model: Model, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, drive.folder)
    say(engine, 1)
    engine.close()

    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert found(model, drive, 1) == [8]


def test_pages_that_are_tried_at_the_same_time_let_no_more_go_than_those_tried_one_after_the_other() -> None:
    disk: Any = SimpleNamespace(name="disk", file_bytes=lambda size: size, is_full=True)
    ledger: Any = SimpleNamespace(capacities={"disk": 100}, used={"disk": 60}, ttl=None)
    shares = sharing.Sharing(disk, 100, 10, ledger, Any, SimpleQueue())  # type: ignore[arg-type]
    lost = NoRoom("there is no room")
    lost.there = 60
    tried = [shares.written(lost, False, ()) for _ in range(9)]
    assert tried == [True] * sharing.VAIN + [False] * (9 - sharing.VAIN)
    assert not any(shares.written(lost, True, ()) for _ in range(sharing.VAIN))
    shares.written(None, True, ())
    assert shares.written(lost, False, ()), "one of them was written"
