"""The kernels fit the memory of processors that are not here: Triton compiles them for any device, and says what they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pando.kernels.reference import Geometry

COMPILES = """
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from pando.kernels import gpu, gpu_warm
from pando.kernels.reference import Geometry

capability, heads, kv_heads, size = map(int, sys.argv[1:5])


class Elsewhere(DriverBase):
    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    get_current_device = get_current_stream = set_current_device = lambda self, *_: 0
    map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None


def compiled(self, *arguments, grid, warmup, **options):
    made = run(self, *arguments, grid=grid, warmup=True, **options)
    needed.add((self.__name__, made.metadata.shared))
    return lambda *_: None


def named(self, module, metadata, *_):
    metadata["name"] = "none"
    return ""


triton.runtime.driver.set_active(Elsewhere())
CUDABackend.make_ptx, CUDABackend.make_cubin = named, lambda *_: b""  # what programs share is settled before
run, JITFunction.run, needed = JITFunction.run, compiled, set()
gpu.Launches.__call__ = lambda self, kernel, kind, grid, *arguments, **options: kernel[grid](*arguments, **options)
gpu.Device.capability = divmod(capability, 10)
gpu_warm.PLANS, gpu_warm.BESIDE = ((300, 65536, 64, 1),), ()
dtype = getattr(torch, sys.argv[5])
device = gpu.Device(torch.device("cpu"), 40, overlaps=capability >= 90)
gpu_warm.warm_up(device, dtype, Geometry(heads, kv_heads, size, 1.0), 64, dtype)
for kernel in sorted(needed):
    print(*kernel)
"""


@pytest.mark.parametrize(
    ("device", "heads", "dtype", "most"),
    [
        ("75", ("32", "8", "128"), "float16", 64),
        ("89", ("32", "8", "128"), "bfloat16", 99),
    ],
)
def test_attention_needs_no_more_shared_memory_than_a_processor_has(
    device: str, heads: tuple[str, str, str], dtype: str, most: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    env["DISABLE_LLVM_OPT"] = "1"  # it takes longer than all else, and changes nothing of this
    command = [sys.executable, "-c", COMPILES, device, *heads, dtype]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    needed = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in needed} >= {"begin", "look", "merge"}
    assert len({shared for name, shared in needed if name == "look"}) >= 2  # large tiles and small ones
    assert max(int(shared) for _, shared in needed) <= most * 1024


def test_before_ampere_wide_heads_have_fewer_rows_and_large_groups_fit_a_tile() -> None:
    pytest.importorskip("triton")
    from pando.kernels.gpu_tiles import LARGE, LARGEST, SHORT, suited

    def rows(heads: int, size: int) -> int:
        return suited(LARGE, Geometry(heads, 1, size, 1.0), (7, 5)).rows

    assert [rows(8, 64), rows(8, 128), rows(8, 256), rows(60, 256)] == [64, 64, 32, 64]
    assert suited(LARGEST, Geometry(8, 1, 128, 1.0), (8, 0)) == LARGEST
    assert suited(SHORT, Geometry(8, 1, 256, 1.0), (7, 5)) == SHORT
