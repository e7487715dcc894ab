"""From a model's name to a decoder that runs."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadModelFile, InvalidOption
from ..kernels import fp8, native
from ..kernels.fp8 import FP8, Scaled
from ..kernels.linear import CpuLinear, fastest_dtype
from ..kernels.native import Coded, Library, NativeOps, Unavailable
from ..kernels.ops import Linear, TorchOps
from .config import ModelConfig
from .decoder import Decoder, plain_linear
from .hub import resolve
from .memory import free_memory, give_back
from .shelf import Shelf, seen
from .tokenizer import Tokenizer
from .weights import Weights, digest, load_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SPARE = 8  # the part of free memory that second copies of weights may take


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    digest: bytes  # names the weights and their dtype: a part of every key
    dtype: torch.dtype
    device: torch.device
    library: Library | None = None  # compiled kernels
    rounded_states: bool = False  # K and V are held in 8 bits

    @property
    def states(self) -> torch.dtype:
        """What K and V are held in."""
        return FP8 if self.rounded_states else self.dtype

    def with_states(self, kv_dtype: str) -> "Model":
        """The same with K and V held so, under another name: what one has written no other may read."""
        if kv_dtype != "fp8" or self.rounded_states:
            return self
        return replace(self, digest=self.digest + b" states in fp8, scale 1", rounded_states=True)


def load(
    name: str,
    *,
    device: str,
    dtype: str,
    compiled: bool = True,
    quantization: str = "none",
    check: Callable[[ModelConfig], object] = lambda _: None,
) -> Model:
    """`quantization`: fp8 holds the linear maps of the layers in 8 bits. `check` may refuse it before its weights are read."""
    files = resolve(name)
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    config = ModelConfig.from_file(files.config)
    check(config)
    if place.type == "cuda":
        give_back()
    shelf = Shelf.of_user(shown=True)
    log.info("loading %s: %.1f GiB of weights", files.directory, _bytes(files.weights) / 2**30)
    native_here = compiled and place.type == "cpu" and kind in native.TYPES
    blocks = (files.blocks,) if files.blocks is not None and place.type == "cpu" else ()
    coded = native_here and _bytes(blocks or files.weights) <= free_memory(place) // SPARE
    if native_here and not coded:
        log.info("weights are not kept as codes, too, by which few rows are computed faster: there is too little memory")
    before = seen(files.weights, blocks)
    with shelf.bar("loading") as report:
        weights = load_weights(files.weights, config, kind, place, report, fp8=quantization == "fp8", coded=coded, blocks=files.blocks)
    named = digest((*files.weights, *blocks), config, shelf.sha256_of) + str(kind).encode()
    if seen(files.weights, blocks) != before:  # or states of these weights would be kept under the name of others
        raise BadModelFile(f"{files.directory} changed while it was loaded; try again")
    tokenizer = Tokenizer.from_directory(files.directory)
    return assembled(config, weights, tokenizer, named, kind, place, compiled=compiled)


def assembled(
    config: ModelConfig, weights: Weights, tokenizer: Tokenizer, digest: bytes, kind: torch.dtype, place: torch.device, *, compiled: bool
) -> Model:
    """A model from its parts, with the fastest kernels that its device has."""
    library = _library(kind) if compiled and place.type == "cpu" else None
    linear, ops = _on_cpu(weights, place, library) if place.type == "cpu" else _on_gpu(weights, kind, place)
    if isinstance(weights.layers[0].qkv, Scaled):
        digest += b" weights in fp8"
        if not fp8.multiplied(place) or linear is plain_linear:
            log.warning(
                "weights in fp8 save memory here, but no time: nothing here multiplies them as they are; better take --quantization none"
            )
    return Model(
        config=config,
        decoder=Decoder(config, weights, linear, ops),
        tokenizer=tokenizer,
        digest=digest,
        dtype=kind,
        device=place,
        library=library,
    )


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _on_cpu(weights: Weights, place: torch.device, library: Library | None) -> tuple[Linear, TorchOps]:
    samples = [layer.up for layer in weights.layers if isinstance(layer.up, Tensor)]
    linear = CpuLinear(samples or [weights.head], free_memory(place) // SPARE, library, weights.blocks)
    if library is None:
        return linear, TorchOps()
    few = linear.serves("coded")
    return linear, NativeOps(library, linear.serves("native"), Coded(weights.blocks, few) if few else None)


def _on_gpu(weights: Weights, kind: torch.dtype, place: torch.device) -> tuple[Linear, TorchOps]:
    try:
        from ..kernels import gpu_linear, gpu_ops
        from ..kernels.gpu import Device

        device = Device.of(place)
        gpu_ops.probe(device, kind)
        maps = [*(each for layer in weights.layers for each in (layer.qkv, layer.o, layer.up, layer.down)), weights.head]
        streamed = [each for each in maps if isinstance(each, Tensor) or fp8.multiplied(place)]
        most = gpu_linear.measured(device, streamed, gpu_linear.replayed)
        ops = gpu_ops.TritonOps(device)
    except ImportError:  # attention says so
        return plain_linear, TorchOps()
    except Exception as error:  # a compiler and a driver raise whatever they like
        said = " ".join(str(error).split())[:200]
        log.warning(
            "Pando's own GPU kernels are not used around attention, torch's are, which is slower: %s: %s", type(error).__name__, said
        )
        return plain_linear, TorchOps()
    gates = {id(layer.up): ops.gate("silu") for layer in weights.layers if layer.up.shape[0] == 2 * layer.down.shape[1]}
    tiled = gpu_linear.measured_tiles(device, [(each, gates.get(id(each))) for each in streamed], gpu_linear.replayed)
    found = ", ".join(f"{outputs} x {inputs} up to {rows}" for (outputs, inputs), rows in most.items())
    more = ", ".join(f"{outputs} x {inputs} for {', '.join(map(str, rows))}" for (outputs, inputs), rows in tiled.items() if rows)
    log.info("linear maps of few rows, as measured here, are streamed: %s; of some more by tiles: %s", found, more or "none")
    return gpu_linear.GpuLinear(device, most, tiled), ops


def _library(dtype: torch.dtype) -> Library | None:
    found = native.load(dtype, Shelf.of_user().home / "native")
    if isinstance(found, Unavailable):
        log.warning("Pando's own CPU kernels are not used, torch's are, which is slower: %s", found.reason)
        return None
    return found


def choose_device(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidOption("device is cuda, but PyTorch sees no GPU here; use --device cpu, or install a PyTorch build with CUDA")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.bfloat16 if device.type == "cuda" else fastest_dtype()
