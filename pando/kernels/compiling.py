"""What is in C becomes a file of machine code, once per machine."""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
PATIENCE = 120  # seconds a compilation may take
DIGEST = 32  # bytes


def compiled(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """The file in `folder`, compiled if it is not there yet, or not whole."""
    path = folder / f"{_name(compiler, flags)}.so"
    if not _is_whole(path):
        _compile(compiler, flags, path)
    return path


def _name(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Names whatever the machine code depends on: a home folder may be shared by machines of different kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    cpu = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE).stdout
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    parts = (*sources, version, *(part.encode() for part in (*flags, *cpu, platform.machine())))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _compile(compiler: Sequence[str], flags: Sequence[str], path: Path) -> None:
    """Linked without an OpenMP library of its own: a second pool of threads would fight torch's over the same cores."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        object_file, result = Path(scratch) / "native.o", Path(scratch) / "native.so"
        for command in (
            [*compiler, *flags, "-c", str(SOURCE), "-o", str(object_file)],
            [*compiler, "-shared", "-o", str(result), str(object_file), "-lm"],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE)
        with result.open("ab") as file:
            file.write(_digest(result.read_bytes()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(result, path)


def _is_whole(path: Path) -> bool:
    """Loading a file that was cut short ends the process. Behind what the linker wrote stands a digest of it, which no loader looks at."""
    content = path.read_bytes() if path.exists() else b""
    return content.endswith(_digest(content[:-DIGEST]))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
