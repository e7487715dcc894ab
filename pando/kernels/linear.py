"""Linear maps on the CPU. Which form is quickest differs from machine to machine and with the number of rows: it is measured.

There are four: torch's own product, the C kernel, which reads the same weight, another in C, which reads the codes of a quantised one
(`blocks`), and oneDNN's, which keeps the weight in a layout of its own. That copy is made only where it wins clearly, and the plain weight
is dropped where nobody reads it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from platform import machine

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fp8
from .fp8 import Scaled, Weight
from .native import Library, coded_linear, native_linear
from .ops import Apply
from .timing import in_turns

ROWS = {1: 1.0, 4: 0.5, 8: 0.25, 32: 0.1, 256: 0.02}  # rows of input that are timed, and on what part of the weights
PROBE_BYTES = 1 << 28  # of weights at most: a single row must find them in memory, as the model will, not in a cache
CLEARLY = 0.9  # of the time
Maker = Callable[[Tensor, Tensor | None], Apply]


class CpuLinear:
    """Makes linear maps in the forms that were quickest on `samples`, weights of the model. `spare` is how many bytes second copies of
    weights may take in all; `blocks` has the codes of those that are quantised, by their addresses."""

    def __init__(self, samples: Sequence[Tensor], spare: int, library: Library | None, blocks: Mapping[int, Tensor] | None = None) -> None:
        self.spare, self.blocks = spare, blocks or {}
        forms: dict[str, Maker] = {"torch": _torch, "packed": _packed}
        if library is not None:
            forms["native"] = partial(native_linear, library)
            if coded := [sample for sample in samples if sample.data_ptr() in self.blocks]:
                samples = coded
                forms["coded"] = lambda weight, bias: coded_linear(library, weight, bias, self.blocks[weight.data_ptr()])
        self.forms = forms
        self._found = _measure(samples, forms)
        self.chosen = _choose(self._found)  # by the number of rows

    def __call__(self, weight: Weight, bias: Tensor | None) -> Apply:
        if isinstance(weight, Scaled):
            return fp8.linear(weight, bias)
        lacks = set() if weight.data_ptr() in self.blocks else {"coded"}
        chosen = self._without(lacks)
        if "packed" in chosen.values() and set(chosen.values()) != {"packed"}:
            if weight.nbytes > self.spare:
                chosen = self._without({"packed", *lacks})
            else:
                self.spare -= weight.nbytes
        made = {form: self.forms[form](weight, bias) for form in set(chosen.values())}
        by_rows = {rows: made[form] for rows, form in chosen.items()}
        return by_rows[1] if len(made) == 1 else lambda x: by_rows[_timed(len(x))](x)

    def _without(self, lacking: set[str]) -> dict[int, str]:
        return _choose({rows: {form: spent for form, spent in times.items() if form not in lacking} for rows, times in self._found.items()})

    def serves(self, form: str) -> Callable[[int], bool] | None:
        """Do weights that are there in every form take this one, for so many rows of input? None: they never do."""
        rows_served = {rows for rows, each in self.chosen.items() if each == form}
        return (lambda rows: _timed(rows) in rows_served) if rows_served else None


def _timed(rows: int) -> int:
    """The number of rows that stands for so many."""
    return 1 if rows == 1 else 4 if rows <= 4 else 8 if rows <= 16 else 32 if rows <= 64 else 256


def _torch(weight: Tensor, bias: Tensor | None) -> Apply:
    return partial(F.linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Apply:
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, 32)

    def apply(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")
        return out

    return apply


def _measure(samples: Sequence[Tensor], forms: Mapping[str, Maker]) -> dict[int, dict[str, float]]:
    """Seconds of each form that works, by the number of rows."""
    weights = samples[: max(1, PROBE_BYTES // samples[0].nbytes)]
    made: dict[str, list[Apply]] = {}
    for form, make in forms.items():
        try:
            applies = [make(weight, None) for weight in weights]
            applies[0](weights[0][:1])
        except (RuntimeError, AttributeError):  # built without oneDNN, or oneDNN without this dtype
            continue
        made[form] = applies
    found: dict[int, dict[str, float]] = {}
    for rows, part in ROWS.items():
        x = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
        found[rows] = in_turns({form: partial(_apply_some, _parts_of(applies, part), x) for form, applies in made.items()})
    return found


def _parts_of(applies: list[Apply], part: float) -> Iterator[list[Apply]]:
    """Others each time, that no cache has."""
    size = max(1, round(part * len(applies)))
    return cycle([applies[i : i + size] for i in range(0, len(applies) - size + 1, size)])


def _apply_some(parts: Iterator[list[Apply]], x: Tensor) -> None:
    for apply in next(parts):
        apply(x)


def _choose(found: dict[int, dict[str, float]]) -> dict[int, str]:
    """The quickest for each number of rows; the packed layout everywhere if never much slower, nowhere if never much quicker."""
    chosen = {rows: min(times, key=lambda form: times[form]) for rows, times in found.items()}
    if all("packed" in times and CLEARLY * times["packed"] <= min(times.values()) for times in found.values()):
        return dict.fromkeys(chosen, "packed")
    for rows, times in found.items():
        others = {form: spent for form, spent in times.items() if form != "packed"}
        best = min(others, key=lambda form: others[form])
        if chosen[rows] == "packed" and times["packed"] > CLEARLY * others[best]:
            chosen[rows] = best
    return chosen


def fastest_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively and that is quicker than float32, for few rows and for many; else float32."""
    if not _multiplies_bfloat16():
        return torch.float32
    samples = torch.randn(4, 1536, 576)
    spent = {dtype: _measure(samples.to(dtype).unbind(), {"torch": _torch}) for dtype in (torch.float32, torch.bfloat16)}
    return min(spent, key=lambda dtype: sum(times["torch"] for times in spent[dtype].values()))


def _multiplies_bfloat16() -> bool:
    """Natively: on x86 oneDNN also imitates it, and on a busy machine that may seem the quicker one."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
