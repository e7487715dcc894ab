"""How much memory and how many cores there are: the machine's, or what a container may have of them."""

import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")

# A control group's limit, its use, and what of its use are files that can be read again, by the version of the groups.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}


def free_memory(device: torch.device, root: Path = ROOT) -> int:
    """Bytes that could be taken now without anything being thrown out."""
    if device.type == "cuda":
        give_back()
        return torch.cuda.mem_get_info(device)[0]
    return min([_free(root), *_allowed(root)])


def give_back() -> None:
    """What nobody uses any more goes back to the GPUs, such as an engine that was dropped: there are circles in it, which Python looks for
    when it likes, and torch keeps what was let go of."""
    gc.collect()
    torch.cuda.empty_cache()


def _free(root: Path) -> int:
    try:
        return _named(root / "proc/meminfo", "MemAvailable:") * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def allowed_cores(root: Path = ROOT) -> float:
    """Cores that this process may keep busy; inf if nobody limits that. A container with such a limit still sees all cores of the
    machine."""
    return min([math.inf, *(cores for version, place in _groups(root, "cpu") for cores in _quota(version, place))])


def _allowed(root: Path) -> Iterator[int]:
    """What is left of each limit that holds for this process."""
    for version, place in _groups(root, "memory"):
        yield from _left(place, *FILES[version])


def _groups(root: Path, kind: str) -> Iterator[tuple[int, Path]]:
    """This process's control group, and the groups around it, each with its version. Within a container its own group is the outermost one
    that is seen, whatever it is called outside."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, name = line.split(":", 2)
        if number == "0" or kind in kinds.split(","):
            version, folder = (2, root / "sys/fs/cgroup") if number == "0" else (1, root / "sys/fs/cgroup" / kind)
            group = Path(name.lstrip("/"))
            for place in (group, *group.parents):
                yield version, folder / place


def _quota(version: int, group: Path) -> Iterator[float]:
    """Microseconds of all cores together, in so many that pass."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = map(int, " ".join((group / name).read_text() for name in names).split())  # "max" is no number, and no limit
    except (OSError, ValueError):
        return
    if quota > 0 < period:
        yield quota / period


def _left(group: Path, limit: str, use: str, *reclaimed: str) -> Iterator[int]:
    try:
        most = int((group / limit).read_text())  # "max" is no number, and no limit
        yield max(0, most - int((group / use).read_text()) + sum(_named(group / "memory.stat", name) for name in reclaimed))
    except (OSError, ValueError):
        return


def _named(file: Path, name: str) -> int:
    """Of lines of a name and a number each."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")
