"""A small model with seeded random weights and a tokenizer of bytes: enough to run the whole engine in milliseconds."""

import fcntl
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from pando.config import EngineConfig
from pando.engine.engine import Engine
from pando.engine.llm import LLM
from pando.engine.request import Request, SamplingParams, TokenEvent
from pando.kernels import native as compiled
from pando.kernels.native import Library, NativeOps, Unavailable, native_linear
from pando.model.config import ModelConfig, Rope
from pando.model.decoder import Decoder, plain_linear
from pando.model.load import Model, assembled
from pando.model.tokenizer import Tokenizer
from pando.model.weights import LayerWeights, Norm, Weights

END = 256
VOCAB = 257
CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("TESTS_DEVICE", "cpu"))  # of models whose tests do not say where they are
CPU_ALONE = pytest.mark.skipif(DEVICE != CPU, reason="tells what only a CPU does")
DEFAULTS: dict[str, object] = {
    "page_size": 4, "kv_cache_tokens": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 16, "host_gib": 0, "disk_gib": 0,
}  # fmt: skip
if DEVICE != CPU:  # a test that wants these there says so: with them, more is computed at other times
    DEFAULTS |= {"overlap": False, "cuda_graphs": False}


def compile_folder() -> Path:
    """Of this run alone: what an earlier one compiled must not answer for today's source."""
    return Path(os.environ["TESTS_COMPILED"])


@functools.cache
def native_library(dtype: torch.dtype = torch.float32, *options: str) -> Library:
    """A C compiler is part of a developer's machine: without one, tests of the kernels fail. What stands for other machines is compiled in
    half of the time: they would make other code of it anyway."""
    name = "".join([str(dtype), *options])
    with (compile_folder() / f"{name}.lock").open("w") as lock:  # what one worker compiles, the others wait for, and for nothing else
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = compiled.load(dtype, compile_folder(), (*options, "-O1") if options else ())
    assert not isinstance(found, Unavailable), f"the C kernels cannot be used here: {found.reason}"
    return found


def tiny_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Vocabulary(models.BPE({char: i for i, char in enumerate(alphabet)} | {"<end>": END}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    return Tokenizer(library.to_str(), {"eos_token": "<end>"}, [], template)


def tiny_model(
    seed: int = 0,
    *,
    positions: str = "rope",
    dtype: torch.dtype = torch.float32,
    max_positions: int = 512,
    native: bool = True,
    layers: int = 2,
    scaling: dict[str, float | str] | None = None,
    size: int = 8,
    device: torch.device = DEVICE,
) -> Model:
    """The same numbers on every device. `size`: of a head."""
    config = ModelConfig(
        family="llama", vocab_size=VOCAB, hidden_size=32, layers=layers, heads=4, kv_heads=2, head_dim=size, intermediate_size=48,
        max_positions=max_positions, positions=positions, norm="rms", norm_eps=1e-5, activation="silu", gated=True, block="sequential",
        softmax_scale=size**-0.5, rope=Rope(10000.0, size, scaling) if positions == "rope" else None,
    )  # fmt: skip
    make = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return (torch.randn(shape, generator=make) * scale).to(device, dtype)

    def norm() -> Norm:
        return Norm((1 + 0.1 * torch.randn(32, generator=make)).to(device, dtype), None)

    def layer() -> LayerWeights:
        qkv, o = (8 * size, 32), (32, 4 * size)
        return LayerWeights(norm(), norm(), weight(*qkv), None, weight(*o), None, weight(96, 32), None, weight(32, 48), None, None, None)

    each = tuple(layer() for _ in range(config.layers))
    table = weight(max_positions, 32) if positions == "learned" else None
    weights = Weights(weight(VOCAB, 32, scale=1.0), table, None, each, norm(), weight(VOCAB, 32, scale=1.0), None)
    if device.type != "cpu":
        return assembled(config, weights, tiny_tokenizer(), b"tiny" + bytes([seed]), dtype, device, compiled=False)
    library = native_library(dtype) if native and dtype in compiled.TYPES else None
    linear, ops = (functools.partial(native_linear, library), NativeOps(library)) if library else (plain_linear, None)
    decoder = Decoder(config, weights, linear, ops)
    return Model(config, decoder, tiny_tokenizer(), b"tiny" + bytes([seed]), dtype, CPU, library)


def write_checkpoint(folder: Path, size: int = 8, positions: int = 128, layers: int = 1) -> None:
    """A model as Hugging Face has them."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size, "intermediate_size": 48, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    make, shapes = torch.Generator().manual_seed(1), {"embed_tokens": (VOCAB, 32), "norm": (32,)}
    for at in (f"layers.{index}." for index in range(layers)):
        shapes |= {at + "input_layernorm": (32,), at + "post_attention_layernorm": (32,)}
        shapes |= {f"{at}self_attn.{name}_proj": (heads * size, 32) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        shapes |= {at + "self_attn.o_proj": (32, 4 * size), at + "mlp.gate_proj": (48, 32), at + "mlp.up_proj": (48, 32)}
        shapes |= {at + "mlp.down_proj": (32, 48)}
    weights = {f"model.{name}.weight": torch.randn(shape, generator=make) * 0.5 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer()._text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def tiny_config(**options: object) -> EngineConfig:
    return EngineConfig(**{**DEFAULTS, **options})  # type: ignore[arg-type]


def tiny_engine(model: Model | None = None, **options: object) -> Engine:
    return Engine(model or tiny_model(), tiny_config(**options))


def tiny_llm(model: Model | None = None, **options: object) -> LLM:
    return LLM.from_config(tiny_config(**options), model or tiny_model())


def greedy(tokens: int = 16, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def run(engine: Engine, requests: list[Request], steps: int = 10_000) -> dict[tuple[str, int], list[TokenEvent]]:
    """Adds requests and steps until all is answered."""
    for request in requests:
        engine.add(request)
    return drain(engine, steps)


def drain(engine: Engine, steps: int = 10_000) -> dict[tuple[str, int], list[TokenEvent]]:
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    for _ in range(steps):
        if not engine.has_work:
            return events
        for event in engine.step():
            events.setdefault((event.request_id, event.index), []).append(event)
    raise AssertionError(f"still at work after {steps} steps: {engine.stats()}")


def prompt(seed: int, length: int = 11) -> list[int]:
    return [(seed * 37 + place * 11) % 256 for place in range(length)]


def tokens(events: Iterable[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def at_rest(llm: LLM) -> bool:
    llm.engine.clear_cache()
    return not llm.engine.has_work and llm.engine.pages_in_use == 0


class Interrupt:
    """Ctrl-C at the moment in some modules that has this number, counted from when it is entered: before a line, or when something
    written in C has just answered. `times`: so often at once. Where it comes at all, no later moment is counted: that takes longer than
    what is interrupted."""

    def __init__(self, modules: Iterable[ModuleType], place: int, times: int = 1) -> None:
        self._files, self._place, self._times, self.moments = {module.__file__ for module in modules}, place, times, 0

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._trace)
        sys.setprofile(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        self._rest()

    def _rest(self) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event in ("line", "c_return"):
            self.moments += 1
            if self.moments == self._place:
                self._rest()
                for _ in range(self._times):
                    signal.raise_signal(signal.SIGINT)
        return self._trace
