"""One case, measured: shared, flat and as the cost model chooses, over the same pages; torch's kernels; the floor; is it right?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...engine.batch import Lower, lowering_for
from ...engine.costs import cost_of, default_cost, device_name
from ...kernels import native
from ...kernels.cpu import Lowering
from ...kernels.native import Library
from ...kernels.reads import Reads
from ...kernels.reference import Geometry
from ...kv.plan import ALWAYS, NEVER, CostModel
from ...model.load import DTYPES
from ...model.memory import free_memory
from .cases import Case, Part
from .clock import Clock, Limits, relay_formula
from .levels import ByLevels, Unfit
from .report import Measured, Skipped
from .scene import Scene, pool_bytes

ROOM = 0.8  # of the free memory, that the keys and values of a case may take
FLAT, SHARED, AUTO, TORCH = "flat", "shared", "auto", "torch"
WAKE = Part(None, 16), Part(0, 16), Part(0, 16)  # segments of hardly any keys
CHOICE = {FLAT: "flat", SHARED: "shared", AUTO: "mixed"}

Attend = Callable[[], Tensor]


@dataclass(frozen=True)
class Bench:
    device: torch.device
    page_size: int
    clock: Clock
    limits: Limits
    home: Path  # where compiled kernels and calibrations are kept

    @property
    def costs(self) -> Path:
        return self.home / "costs"

    def cost(self, case: Case) -> CostModel:
        """What an engine would choose by."""
        found = cost_of(device_name(self.device), case.dtype, case.hq, case.hkv, case.d, self.costs)
        return found or default_cost(self.device, case.hq, case.hkv)

    def measure(self, case: Case, peer_us: float | None = None) -> Measured | Skipped:
        needed, free = pool_bytes(case, self.page_size), free_memory(self.device)
        if needed > ROOM * free:
            return Skipped(case.name, f"its keys and values are {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
        try:
            return self._measure(Scene(case, self.page_size, self.device), peer_us)
        except Unfit as error:
            return Skipped(case.name, str(error))
        except torch.OutOfMemoryError:
            return Skipped(case.name, f"memory ran out, of which {free / 2**30:.1f} GiB were free")
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def compare(self, case: Case) -> tuple[float, float]:
        """Microseconds, shared and flat."""
        scene = Scene(case, self.page_size, self.device)
        _, lower = self._kernel(case, scene.geometry)
        timings = self.clock.medians(
            {name: _attending(lower, scene.plan(cost)[1], scene) for name, cost in ((SHARED, ALWAYS), (FLAT, NEVER))}
        )
        return timings[SHARED].us, timings[FLAT].us

    def _measure(self, scene: Scene, peer_us: float | None) -> Measured:
        case = scene.case
        kernel, lower = self._kernel(case, scene.geometry)
        plans = {name: scene.plan(cost) for name, cost in ((FLAT, NEVER), (SHARED, ALWAYS), (AUTO, self.cost(case)))}
        as_in = _alike({name: reads for name, (_, reads) in plans.items()})
        runs = {name: _attending(lower, plans[name][1], scene) for name in dict.fromkeys(as_in.values())}
        runs |= _by_levels(scene)
        rows = scene.checked_rows()
        right = scene.truth(rows)
        errors = {name: _error(run(), rows, right) for name, run in runs.items()}
        timings = self.clock.medians(runs, self._wakes(case, lower))
        us = {name: timings[as_in[name]].us for name in plans}
        return Measured(
            name=case.name, shared_us=us[SHARED], auto_us=us[AUTO], flat_us=us[FLAT], torch_us=timings[TORCH].us if TORCH in runs else None,
            floor_us=self.limits.floor_us(case), rel_err=errors[as_in[SHARED]], flat_rel_err=errors[FLAT], torch_rel_err=errors.get(TORCH),
            rows_checked=len(rows), shared_reads=plans[SHARED][0].shared, plan_us=scene.plan_us(self.clock.repeats),
            auto_shared_reads=plans[AUTO][0].shared, auto=CHOICE[as_in[AUTO]],
            shared_share=case.shared_share, relay_formula=relay_formula(case), kernel=kernel,
            timed={name: timing.how for name, timing in timings.items()}, peer_us=peer_us, wrong=_wrong(errors, scene.q.dtype),
        )  # fmt: skip

    def _wakes(self, case: Case, lower: Lower) -> dict[str, Attend]:
        """What each does, of two rows and hardly any keys: on a GPU nobody waits for Python."""
        if self.device.type != "cpu":
            return {}
        few = Scene(replace(case, segments=WAKE, rows=(1, 2)), self.page_size, self.device)
        ours = _attending(lower, few.plan(ALWAYS)[1], few)
        return {FLAT: ours, SHARED: ours, AUTO: ours} | _by_levels(few)

    def _kernel(self, case: Case, geometry: Geometry) -> tuple[str, Lower]:
        """The path that an engine takes on this device, by name."""
        dtype = DTYPES[case.dtype]
        library = native.load(dtype, self.home / "native") if self.device.type == "cpu" else None
        lower = lowering_for(self.device, dtype, geometry, self.page_size, library if isinstance(library, Library) else None)
        if lower is None:
            raise Unfit(f"the GPU kernels take no {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}, or are not there")
        return ("triton" if library is None else "native" if lower is not Lowering else "torch"), lower


def _attending(lower: Lower, reads: Reads, scene: Scene) -> Attend:
    lowered = lower(reads, scene.positions, scene.geometry)
    return lambda: lowered.attend(scene.q, scene.q, scene.k, scene.v)


def _by_levels(scene: Scene) -> dict[str, Attend]:
    try:
        composed = ByLevels(scene)
    except Unfit:
        return {}
    return {TORCH: lambda: composed.attend(scene.q)}


def _alike(plans: dict[str, Reads]) -> dict[str, str]:
    """For each the first that is the same: it is measured once, so that equal plans have equal times."""
    found: dict[str, str] = {}
    for name, reads in plans.items():
        found[name] = next((other for other in found if _equal(plans[other], reads)), name)
    return found


def _equal(one: Reads, other: Reads) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one[1:-1], other[1:-1], strict=True))


def _error(out: Tensor, rows: list[int], right: Tensor) -> float | None:
    """Relative, of some rows; None where anything in any row is not a number."""
    return float((out[rows].double() - right).norm() / right.norm()) if torch.isfinite(out).all() else None


def _wrong(errors: dict[str, float | None], dtype: torch.dtype) -> str:
    """A result is rounded a few times; sums over hundreds of keys are fp32."""
    most = max(4 * torch.finfo(dtype).eps, 256 * torch.finfo(torch.float32).eps)
    wrong = [f"{name} is not finite" for name, error in errors.items() if error is None]
    wrong += [f"{name} is off by {error:.1e}, more than {most:.1e}" for name, error in errors.items() if error is not None and error > most]
    return "; ".join(wrong)
