"""What is remembered between starts, and when it counts no more."""

import os
from pathlib import Path
from typing import Any

import pytest

from pando.errors import BadModelFile
from pando.model import load as loading
from pando.model import shelf as module
from pando.model.load import load
from pando.model.shelf import Shelf
from pando.model.weights import Weights

from ..tiny import write_checkpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"some weights")
    return path


def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*given: object) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(module.hashlib, "sha256", read)


def test_what_has_not_changed_is_read_once(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Shelf(tmp_path / "home", False).sha256_of(file)
    nobody_reads(monkeypatch)
    assert Shelf(tmp_path / "home", False).sha256_of(file) == known
    link = tmp_path / "link"
    link.symlink_to(file)
    assert Shelf(tmp_path / "home", False).sha256_of(link) == known


@pytest.mark.parametrize("content", [b"other weight", b"longer weights"])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_has_changed_is_read_again_even_where_its_time_was_kept(tmp_path: Path, file: Path, content: bytes, replaced: bool) -> None:
    shelf, before = Shelf(tmp_path / "home", False), file.stat()
    known = shelf.sha256_of(file)
    target = tmp_path / "fresh" if replaced else file
    target.write_bytes(content)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    target.replace(file)
    assert shelf.sha256_of(file) != known


def test_what_is_remembered_is_for_its_owner_and_of_files_that_are_there(tmp_path: Path, file: Path) -> None:
    shelf, other = Shelf(tmp_path / "home", False), tmp_path / "other"
    other.write_bytes(b"more")
    shelf.sha256_of(other)
    other.unlink()
    shelf.sha256_of(file)
    kept = tmp_path / "home" / "files.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert str(file) in kept.read_text() and str(other) not in kept.read_text()


def test_a_file_that_is_written_to_while_it_is_read_is_not_remembered(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, once = Shelf(tmp_path / "home", False), module.hashlib.sha256

    def meanwhile() -> object:
        file.write_bytes(b"half of them changed")
        return once()

    monkeypatch.setattr(module.hashlib, "sha256", meanwhile)
    shelf.sha256_of(file)
    assert not (tmp_path / "home" / "files.json").exists()


def test_where_nothing_can_be_remembered_it_is_read_each_time(tmp_path: Path, file: Path) -> None:
    shelf = Shelf(file / "no folder", False)
    assert shelf.sha256_of(file) == shelf.sha256_of(file)
    shelf.keep_snapshot("owner/name@main", tmp_path)
    assert shelf.snapshot("owner/name@main") is None


def test_remembering_does_not_wait_for_a_model_that_is_being_made(tmp_path: Path, file: Path) -> None:
    shelf = Shelf(tmp_path / "home", False)
    with shelf.making(shelf.models / "large") as workshop:
        assert workshop is not None
        shelf.sha256_of(file)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (workshop / "model" / name).touch()
    assert (tmp_path / "home" / "files.json").exists()


def test_a_second_start_has_the_same_name_for_a_model_without_reading_it_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    first = load(str(folder), device="cpu", dtype="float32", compiled=False)
    monkeypatch.setattr(Shelf, "_remember", None)  # who reads it again remembers it again
    assert load(str(folder), device="cpu", dtype="float32", compiled=False).digest == first.digest


def test_weights_that_are_replaced_while_they_are_read_get_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of these weights would be kept under the name of the others."""
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    read, file = loading.load_weights, folder / "model.safetensors"

    def replaced(*given: Any, **more: Any) -> Weights:
        weights = read(*given, **more)
        other = folder / "other"
        other.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        other.replace(file)
        return weights

    monkeypatch.setattr(loading, "load_weights", replaced)
    with pytest.raises(BadModelFile, match="changed while it was loaded"):
        load(str(folder), device="cpu", dtype="float32", compiled=False)


def test_it_shows_on_a_terminal_how_far_loading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))
    write_checkpoint(tmp_path)
    load(str(tmp_path), device="cpu", dtype="float32", compiled=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(str(tmp_path), device="cpu", dtype="float32", compiled=False)
    assert "loading" in capsys.readouterr().err
    monkeypatch.setattr(module, "_tqdm", lambda: None)
    load(str(tmp_path), device="cpu", dtype="float32", compiled=False)
    assert capsys.readouterr().err == ""
