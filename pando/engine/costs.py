"""What was measured of when sharing pays, kept between runs: one small file for each device, dtype and shape of heads.

`pando bench attention --calibrate` writes it, and an engine that starts on the same device reads it. A file that is missing, broken or
about something else is as good as none: the cost model's defaults are never wrong, only less apt.
"""

import json
import logging
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config import Attention
from ..kv.plan import ALWAYS, DEFAULT, NEVER, CostModel

if TYPE_CHECKING:
    import torch

    from ..model.load import Model

log = logging.getLogger(__name__)

ON_GPU = CostModel(300, 30)  # loses the least over 1,038 plans of eight shapes of heads on an H200
FILLS = 32  # heads of a key head: more of them leave too little room for other rows in a tile, and sharing was up to 46 % slower there
APART = CostModel(1e9, 0)  # shares nothing, in numbers that a calibration can keep
LONGEST = 1 << 20  # bytes of a file that is read


class Subject(NamedTuple):
    """What a calibration holds for."""

    device: str
    dtype: str  # "bfloat16"
    heads: int
    kv_heads: int
    head_dim: int

    def file(self, folder: Path) -> Path:
        words = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:80]
        return folder / f"{words}_{self.dtype}_{self.heads}x{self.kv_heads}x{self.head_dim}.json"


def device_name(device: "torch.device") -> str:
    """As a calibration is filed under: a GPU by its name, a CPU by its kind and the threads that are used."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_kind()}, {torch.get_num_threads()} threads"


def _cpu_kind() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    facts = dict(reversed([(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]))
    arm = f"{facts.get('CPU implementer', '')} {facts.get('CPU part', '')}".strip()
    return f"{platform.machine()} {facts.get('model name') or arm or platform.processor()}".strip()


def default_cost(device: "torch.device", heads: int, kv_heads: int) -> CostModel:
    """Until something is measured. A GPU reads the same segment for several rows from its cache, so that sharing must save more there."""
    if device.type != "cuda":
        return DEFAULT
    return APART if heads > FILLS * kv_heads else ON_GPU


def cost_of(device_name: str, dtype: str, heads: int, kv_heads: int, head_dim: int, folder: Path) -> CostModel | None:
    """The calibrated cost model, or None where there is none that can be used."""
    subject = Subject(device_name, dtype, heads, kv_heads, head_dim)
    file = subject.file(folder)
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LONGEST))
        cost = CostModel(_number(found, "launch"), _number(found, "merge"))
        if any(found.get(name) != value for name, value in subject._asdict().items()):
            raise ValueError("it is about another device or other heads")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the calibration in %s is ignored: %s; `pando bench attention --calibrate` makes it anew", file, error)
        return None
    return cost


def _number(found: object, name: str) -> float:
    value = found.get(name) if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"its {name!r} is no number from 0 up")
    return float(value)


def keep_cost(cost: CostModel, subject: Subject, folder: Path, samples: Sequence[Mapping[str, object]] = ()) -> Path:
    """Writes a calibration, and the timings it came from; a reader finds the old file or the new one, never a half."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = subject.file(folder)
    text = json.dumps({**subject._asdict(), "launch": cost.launch, "merge": cost.merge, "samples": list(samples)}, indent=1)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".", delete=False) as fresh:
        try:
            fresh.write(text + "\n")
            fresh.flush()
            os.fsync(fresh.fileno())
            os.replace(fresh.name, file)
        except BaseException:
            Path(fresh.name).unlink(missing_ok=True)
            raise
    return file


def chosen_cost(model: "Model", attention: Attention, folder: Path) -> CostModel:
    """When a read is shared. What `pando bench attention --calibrate` found on this device counts more than the defaults."""
    if attention in ("shared", "flat"):
        return ALWAYS if attention == "shared" else NEVER
    heads, kv_heads, size = model.decoder.geometry[:3]
    found = cost_of(device_name(model.device), str(model.dtype).removeprefix("torch."), heads, kv_heads, size, folder)
    cost = found or default_cost(model.device, heads, kv_heads)
    source = "the defaults" if found is None else "measured on this device"
    if cost == APART:
        log.info("no read is shared, since the %d heads of a key head leave no room for other rows: %s", heads // kv_heads, source)
    else:
        log.info("a read is shared where it saves more than %g tokens, and %g for each query: %s", cost.launch, cost.merge, source)
    return cost
