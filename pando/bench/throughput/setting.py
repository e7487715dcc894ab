"""What the tables are measured with: a model of random weights, what its device can do, and engines that come one after the other."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ...config import Attention, EngineConfig
from ...engine.engine import Engine
from ...errors import PandoError
from ...kernels.fp8 import Weight
from ...kernels.ops import Apply
from ...kv.pool import PagePool
from ...model.decoder import Decoder, Pool, Step, plain_linear
from ...model.load import Model
from ...model.weights import Weights
from ..attention.clock import Clock, Limits, Run, floor_us, work_of
from ..attention.suites import Heads, single
from .report import Report

T = TypeVar("T")

SHARED, FLAT, NONE = "shared", "flat", "no attention"
PREFILL = 8192  # tokens of a step
READ = 1 << 28  # numbers that are added up in one go


@dataclass(frozen=True)
class Setting:
    model: Model
    weights: Weights
    limits: Limits
    clock: Clock
    report: Report
    seed: int

    @property
    def heads(self) -> Heads:
        facts = self.model.config
        return Heads(facts.heads, facts.kv_heads, facts.head_dim, str(self.model.dtype).removeprefix("torch."))

    @property
    def token_bytes(self) -> int:
        """Of K and V, in all layers."""
        facts = self.model.config
        return PagePool.page_bytes(1, facts.layers, facts.kv_heads, facts.head_dim, self.model.states)

    def attempt(self, what: str, config: EngineConfig, work: Callable[[Engine], T], *, model: Model | None = None) -> T | None:
        """Works with an engine that has the device to itself. What does not fit is skipped, and said."""
        self.settle_memory()
        try:
            return work(_ready(model or self.model, config))
        except (PandoError, torch.OutOfMemoryError) as error:
            self.report.skip(what, error)
            return None
        finally:
            self.settle_memory()

    def settle_memory(self) -> None:
        """What engines before have left is given back to the device."""
        gc.unfreeze()
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- floors

    def products_ms(self, rows: int) -> float:
        """All products of a step with the model's own weights, by torch, one behind the other and with nothing between them: by a device
        that was idle before."""
        return self.clock.medians({"products": self._products(rows)})["products"].us / 1e3

    def lasting_products_ms(self, rows: int, count: int, seconds: float) -> float:
        """The same, of as many steps in a row, or for as long."""
        return self.clock.mean_us(self._products(rows), count, seconds) / 1e3

    def _products(self, rows: int) -> Run:
        facts, kind, place = self.model.config, self.model.dtype, self.model.device
        wide = (facts.hidden_size, facts.heads * facts.head_dim, facts.intermediate_size)
        x, attended, inner = (torch.randn(rows, size, device=place).to(kind) for size in wide)

        given = [((x, layer.qkv), (attended, layer.o), (x, layer.up), (inner, layer.down)) for layer in self.weights.layers]
        products = [(self._product(weight), y) for each in (*given, ((x, self.weights.head),)) for y, weight in each]

        def run() -> None:
            for apply, y in products:
                apply(y)

        return run

    def _product(self, weight: Weight) -> Apply:
        if isinstance(weight, Tensor) or self.model.device.type == "cpu":
            return plain_linear(weight, None)
        from ...kernels.gpu import Device
        from ...kernels.gpu_linear import product

        return product(Device.of(self.model.device), weight, None)

    def attention_ms(self, rows: int, prefix: int, own: int) -> float:
        """The least that attention could need in all layers, as `pando bench attention` reckons it."""
        case = single(self.heads, rows, prefix, own)
        work = work_of(case)
        spared = 2 * case.hkv * case.d * (self.model.dtype.itemsize - self.model.states.itemsize)
        held = work._replace(bytes=work.bytes - (prefix + rows * own) * spared)
        return self.model.config.layers * floor_us(held, self.limits.bandwidth, self.limits.rate(case.dtype)) / 1e3

    @property
    def weight_bytes(self) -> int:
        """That a step reads: whatever is multiplied."""
        products = (tensor for layer in self.weights.layers for tensor in (layer.qkv, layer.o, layer.up, layer.down))
        return sum(tensor.nbytes for tensor in (*products, self.weights.head))

    def read_ms(self) -> float:
        """As many bytes as the weights have, moved once by the simplest means: added up, or half of them copied onto the other half,
        whichever is faster."""
        numbers = torch.zeros(self.weight_bytes // 8 * 2, dtype=torch.float32, device=self.model.device)
        one, other = numbers.chunk(2)
        parts = numbers.split(READ)
        found = self.clock.medians({"read": lambda: [part.sum() for part in parts], "copied": lambda: other.copy_(one)})
        return min(timing.us for timing in found.values()) / 1e3


def _ready(model: Model, config: EngineConfig) -> Engine:
    engine = Engine(model, config)
    engine.warm_up(capture=False)  # whatever lasts has graphs of its own
    gc.freeze()  # as a server does
    return engine


class Unattended(Decoder):
    """A decoder that does all but attend: every head answers its query. The ceiling of what attention could be."""

    def __init__(self, like: Decoder) -> None:
        vars(self).update(vars(like))  # the same weights, not others
        self._like = like

    def forward(self, step: Step, pool: Pool) -> Tensor:
        return self._like.forward(replace(step, attend=lambda q, turned, k, v: turned), pool)


def unattended(model: Model) -> Model:
    return replace(model, decoder=Unattended(model.decoder))


def engine_config(attention: Attention, rows: int, *, tokens: int | None = None, reuse: bool = True) -> EngineConfig:
    """`tokens`: of the pool; as many as fit, if nothing is said."""
    return EngineConfig(
        attention=attention,
        max_num_seqs=rows,
        max_num_batched_tokens=max(PREFILL, rows),
        kv_cache_tokens=tokens,
        prefix_caching=reuse,
        host_gib=0,
        disk_gib=0,
    )
