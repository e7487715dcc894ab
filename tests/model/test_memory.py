"""How much memory may be taken, and how many cores."""

import gc
import math
import weakref
from pathlib import Path

import pytest
import torch

from pando.model.memory import allowed_cores, free_memory

CPU = torch.device("cpu")
MIB = 2**20


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(place: str, limit: str, use: int, files: int, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else LEGACY
    read_once, again = (names[2], files // 2), (names[2].replace("inactive", "active"), files - files // 2)
    stat = "".join(f"{name} {size}\n" for name, size in (("anon", 5), (f"{names[2]}_not", 7), read_once, again))
    written = {names[0]: limit, names[1]: str(use), "memory.stat": stat}
    return {f"sys/fs/cgroup/{place}{name}": text for name, text in written.items()}


LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_a_machine_has_what_it_says_is_available(tmp_path: Path) -> None:
    assert free_memory(CPU, written(tmp_path, {})) == 4096 * MIB


def test_a_container_has_what_is_left_of_its_limit_and_the_files_it_could_read_again(tmp_path: Path) -> None:
    root = written(tmp_path, {"proc/self/cgroup": "0::/\n", **group("", str(1024 * MIB), 900 * MIB, 300 * MIB)})
    assert free_memory(CPU, root) == 424 * MIB


def test_no_limit_is_none(tmp_path: Path) -> None:
    root = written(tmp_path, {"proc/self/cgroup": "0::/\n", **group("", "max\n", 900 * MIB, 300 * MIB)})
    assert free_memory(CPU, root) == 4096 * MIB


def test_the_limit_of_a_group_around_it_holds_too(tmp_path: Path) -> None:
    inner, outer = group("pods/mine/", "max", 0, 0), group("pods/", str(512 * MIB), 0, 0)
    assert free_memory(CPU, written(tmp_path, {"proc/self/cgroup": "0::/pods/mine\n", **inner, **outer})) == 512 * MIB


def test_control_groups_of_the_first_version_are_known(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n"
    root = written(tmp_path, {"proc/self/cgroup": lines, **group("memory/", str(256 * MIB), 56 * MIB, 0, version=1)})
    assert free_memory(CPU, root) == 200 * MIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    root = written(tmp_path, {"proc/self/cgroup": "0::/\n", **group("", str(100 * MIB), 101 * MIB, 0)})
    assert free_memory(CPU, root) == 0


def test_this_machine_has_some() -> None:
    assert free_memory(CPU) > 0
    assert allowed_cores() > 0


def test_a_container_may_keep_as_many_cores_busy_as_its_limit_and_those_around_it_say(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pods/mine\n", "sys/fs/cgroup/pods/mine/cpu.max": "400000 100000\n"}
    assert allowed_cores(written(tmp_path, files)) == 4
    assert allowed_cores(written(tmp_path, {"sys/fs/cgroup/pods/cpu.max": "150000 100000\n"})) == 1.5
    assert allowed_cores(written(tmp_path, {"sys/fs/cgroup/pods/cpu.max": "max 100000\n"})) == 4


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", math.inf), ("what", math.inf)])
def test_so_do_control_groups_of_the_first_version(tmp_path: Path, quota: str, cores: float) -> None:
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/\n0::/\n"}
    files |= {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    assert allowed_cores(written(tmp_path, files)) == cores


def test_who_is_not_limited_has_no_limit(tmp_path: Path) -> None:
    assert allowed_cores(written(tmp_path, {})) == math.inf


def test_a_gpu_has_what_an_engine_held_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self) -> None:
            self.circle, self.pool = self, object()

    asked = list[str]()

    def told(_: torch.device) -> tuple[int, int]:
        asked.append("here" if dropped() is not None else "gone")
        return 5, 8

    monkeypatch.setattr(torch.cuda, "mem_get_info", told)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    gc.disable()
    try:
        dropped = weakref.ref(Engine())
        assert dropped() is not None, "nobody has looked for circles yet"
        assert free_memory(torch.device("cuda", 0)) == 5
    finally:
        gc.enable()
    assert asked == ["emptied", "gone"]
