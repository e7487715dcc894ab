"""Kernels compiled for GPUs that are not here: `python -m tests.kernels.elsewhere` reads what is wanted, and prints what was found.

Torch and Triton are imported once: whatever is compiled is compiled in a fork of this process.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Case = tuple[str, list[object]]  # a function of this module, and its arguments


def found(cases: Sequence[Case]) -> list[Any]:
    """What each of them answers."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def attention(capability: int, heads: int, kv_heads: int, size: int, kind: str) -> list[tuple[str, int]]:
    """Each kernel of attention, and how much memory its program shares."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    from pando.kernels import gpu, gpu_warm
    from pando.kernels.reference import Geometry

    class Elsewhere(DriverBase):  # type: ignore[misc]
        is_active = classmethod(lambda cls: True)
        get_current_target = lambda self: GPUTarget("cuda", capability, 32)  # noqa: E731
        get_current_device = get_current_stream = set_current_device = lambda self, *_: 0
        map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

    def compiled(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> Callable[..., None]:
        made = run(self, *arguments, grid=grid, warmup=True, **options)
        needed.add((self.__name__, made.metadata.shared))
        return lambda *_: None

    def named(self: object, module: object, metadata: dict[str, str], *_: object) -> str:
        metadata["name"] = "none"
        return ""

    os.environ["DISABLE_LLVM_OPT"] = "1"  # it takes longer than all else, and changes nothing of this
    triton.runtime.driver.set_active(Elsewhere())
    CUDABackend.make_ptx, CUDABackend.make_cubin = named, lambda *_: b""  # what programs share is settled before
    run, JITFunction.run, needed = JITFunction.run, compiled, set[tuple[str, int]]()
    gpu.Launches.__call__ = lambda self, kernel, kind, grid, *arguments, **options: kernel[grid](*arguments, **options)
    gpu.Device.capability = divmod(capability, 10)
    gpu_warm.PLANS, gpu_warm.BESIDE = ((300, 65536, 64, 1),), ()
    dtype = getattr(torch, kind)
    device = gpu.Device(torch.device("cpu"), 40, overlaps=capability >= 90)
    gpu_warm.warm_up(device, dtype, Geometry(heads, kv_heads, size, 1.0), 64, dtype)
    return sorted(needed)


def hopper() -> tuple[int, int, bool, bool]:
    """Of the kernel for large tiles on a Hopper GPU: warps, shared memory, and does it multiply and fetch as only such a GPU does?"""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from pando.kernels.gluon import REGISTERS, look

    pool = "tensordesc<bf16[64,64],NVMMASharedLayout(128, 16)>"
    kinds = {"q": "*bf16", "k": pool, "v": pool, "parts": "*fp32", "lses": "*fp32", "out": "*bf16", "scale": "fp32"}
    constants = {"H": 9, "K": 3, "G": 3, "D": 64, "PAGE": 64, "EARLY": True}
    names = look.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*i32") for name in names}
    source = GluonASTSource(look, signature, {(names.index(name),): value for name, value in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": REGISTERS})
    code = made.asm["ptx"]
    return made.metadata.num_warps, made.metadata.shared, "wgmma.mma_async" in code, "cp.async.bulk.tensor" in code


def main() -> None:
    from triton.runtime import cache

    from pando.kernels import gpu_warm  # noqa: F401

    with contextlib.suppress(ImportError):  # an older Triton, for which `hopper` is not asked for
        from pando.kernels import gluon  # noqa: F401

    cache.triton_key = lambda: ""  # a cache that is empty is asked for nothing that another Triton made: all of Triton need not be read
    for name, arguments in json.load(sys.stdin):
        sys.stdout.flush()
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            print(json.dumps(globals()[name](*arguments)), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
