"""Safetensors to our names, one copy, fused and reordered once at load so that the decoder never has to.

What the checkpoint must hold follows from the config alone. The files' headers are compared with that before a single weight is read:
a tensor that is missing, of another shape or type, or that nobody asked for, is an error and not a wrong answer.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import BadModelFile, ModelNotFound, UnsupportedModel
from ..kernels.blocks import kind_of, plain, shortened
from ..kernels.fp8 import Weight, scaled
from ..kernels.rope import interleave
from .config import ModelConfig
from .names import Shape, expected_tensors, names_of
from .shelf import Progress

log = logging.getLogger(__name__)


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Norm
    mlp_norm: Norm | None  # None: the MLP reads what attention reads
    qkv: Weight  # [(H + 2K) * D, C]: all query heads, all key heads, all value heads; rotated pairs adjacent
    qkv_bias: Tensor | None
    o: Weight  # [C, H * D]
    o_bias: Tensor | None
    up: Weight  # [2I, C], gate rows first, or [I, C]
    up_bias: Tensor | None
    down: Weight  # [C, I]
    down_bias: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [V, C]
    positions: Tensor | None  # [P, C]
    embed_norm: Norm | None
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Tensor  # [V, C]; the very tensor `embed` where the checkpoint ties them
    head_bias: Tensor | None
    blocks: Mapping[int, Tensor] = field(default_factory=dict)  # of some linear maps the same as codes, by the address of the weight


_PREFIX = re.compile(r"^(model|transformer)\.")
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # computed anew, or a causal mask
_DTYPES = ("F32", "F16", "BF16")
SEEN = 64  # of so many rows of codes one is compared with its weights


def load_weights(
    files: Sequence[Path],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    fp8: bool = False,
    coded: bool = False,
    blocks: Path | None = None,
) -> Weights:
    """`fp8`: the linear maps of the layers in 8 bits, each as soon as it is read, so that no more than one of them is there in `dtype`.
    `coded`: also as codes, where there are fewer bytes of them. `blocks`: a file that has some; what is wrong with it is said once."""
    with ExitStack() as stack:
        checkpoint = _Checkpoint(files, stack)
        checkpoint.check(dict(expected_tensors(config)), config.tied_head)
        codes = None if blocks is None or fp8 or not coded else _codes(blocks, stack)
        return _Loader(checkpoint, config, dtype, device, progress, fp8=fp8, codes=codes, halves=coded and not fp8).load()


def _codes(path: Path, stack: ExitStack) -> "_Checkpoint | None":
    try:
        return _Checkpoint([path], stack)
    except (BadModelFile, ModelNotFound) as error:
        log.warning("few rows are computed with plain weights, which is slower: %s", error)
        return None


def digest(files: Sequence[Path], config: ModelConfig, sha256_of: Callable[[Path], str]) -> bytes:
    """SHA-256 over the facts of the config and every byte of the files: equal digests, equal answers. `sha256_of` may remember what it has
    read before, in hexadecimal."""
    total = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for path in sorted(files, key=lambda path: path.name):
        try:
            total.update(bytes.fromhex(sha256_of(path)))
        except OSError as error:
            raise BadModelFile(f"{path} cannot be read: {error}") from error
    return total.digest()


class _Checkpoint:
    """The tensors of some safetensors files, by name without the prefix; open as long as the stack is."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        self.found: dict[str, tuple[Path, Any, str]] = {}  # file, its handle, the name in the file
        for path in files:
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
                names = list(handle.keys())
            except FileNotFoundError as error:
                raise ModelNotFound(f"{path} does not exist") from error
            except (SafetensorError, OSError) as error:
                raise BadModelFile(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from error
            for name in names:
                short = _PREFIX.sub("", name)
                if short in self.found:
                    raise BadModelFile(f"the tensor {name} is in {self.found[short][0].name} and again in {path.name}")
                self.found[short] = path, handle, name

    def check(self, expected: Mapping[str, Shape], tied: bool) -> None:
        missing = [name for name in expected if name not in self.found]
        if missing:
            first = f"{missing[0]} {list(expected[missing[0]])}"
            raise BadModelFile(f"{len(missing)} of {len(expected)} tensors are missing, first of all {first}; fetch the model again")
        for name, shape in expected.items():
            path, handle, full = self.found[name]
            part = handle.get_slice(full)
            if part.get_dtype() not in _DTYPES:
                raise UnsupportedModel(f"{full} in {path.name} is of type {part.get_dtype()}; Pando reads {', '.join(_DTYPES)}")
            if tuple(part.get_shape()) != shape:
                raise BadModelFile(f"{full} in {path.name} has shape {part.get_shape()}; its config.json asks for {list(shape)}")
        for name in sorted(self.found.keys() - expected.keys()):
            if not _BUFFERS.search(name) and not (tied and name == "lm_head.weight"):
                path, _, full = self.found[name]
                raise UnsupportedModel(f"{path.name} holds {full}, a tensor that Pando cannot use; without it the answers would be wrong")

    def dtype(self, name: str) -> str:
        _, handle, full = self.found[name]
        return str(handle.get_slice(full).get_dtype())

    def read(self, name: str) -> Tensor:
        path, handle, full = self.found[name]
        try:
            tensor: Tensor = handle.get_tensor(full)
        except (SafetensorError, OSError) as error:
            raise BadModelFile(f"{full} in {path} cannot be read ({error}); fetch the file again") from error
        return tensor


class _Loader:
    def __init__(
        self,
        checkpoint: _Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        *,
        fp8: bool,
        codes: _Checkpoint | None,
        halves: bool,
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.device, self.fp8, self.codes = checkpoint, config, dtype, device, fp8, codes
        self.halves, self.blocks = halves and dtype == torch.float32, dict[int, Tensor]()
        self.names = names_of(config)
        self.progress = progress or (lambda done, total: None)
        self.done, self.total = 0, sum(prod(shape) for _, shape in expected_tensors(config)) * dtype.itemsize
        self.head_order = interleave(config.rope.dim, config.head_dim) if config.rope else torch.arange(config.head_dim)
        self.qkv_order = self._qkv_order()

    def load(self) -> Weights:
        config, names = self.config, self.names
        embed = self._join([names.embed + ".weight"])
        head, head_name = (self._tied(embed), names.embed) if config.tied_head else (self._join(["lm_head.weight"]), "lm_head")
        self._keep_blocks(head, [head_name + ".weight"], None)
        return Weights(
            embed=embed,
            positions=self._join([names.positions + ".weight"]) if config.positions == "learned" else None,
            embed_norm=self._norm(names.embed_norm) if config.embed_norm else None,
            layers=tuple(self._layer(names.layer.format(index)) for index in range(config.layers)),
            norm=self._norm(names.norm),
            head=head,
            head_bias=self._join(["lm_head.bias"]) if config.head_bias else None,
            blocks=self.blocks,
        )

    def _tied(self, embed: Tensor) -> Tensor:
        """A tied head may be in the file as well: the same again, or the config is wrong and nobody can say which of them is meant."""
        if "lm_head.weight" in self.checkpoint.found:
            head = self.checkpoint.read("lm_head.weight").to(embed)
            if not torch.equal(head, embed):
                raise BadModelFile(
                    "config.json has tie_word_embeddings, but the file's lm_head.weight is not its embeddings; "
                    "remove one of them: set tie_word_embeddings to false for the head of the file"
                )
        return embed

    def _layer(self, at: str) -> LayerWeights:
        config, names = self.config, self.names
        qkv, qkv_bias = self._linear([at + name for name in names.qkv], config.qkv_bias, self.qkv_order)
        o, o_bias = self._linear([at + names.o], config.o_bias)
        up, up_bias = self._linear([at + name for name in names.up], config.mlp_bias)
        down, down_bias = self._linear([at + names.down], config.mlp_bias)
        return LayerWeights(
            attn_norm=self._norm(at + names.attn_norm),
            mlp_norm=self._norm(at + names.mlp_norm) if config.block != "parallel" else None,
            qkv=qkv,
            qkv_bias=qkv_bias,
            o=o,
            o_bias=o_bias,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            q_norm=self._head_norm(at + "self_attn.q_norm") if config.qk_norm else None,
            k_norm=self._head_norm(at + "self_attn.k_norm") if config.qk_norm else None,
        )

    def _linear(self, names: list[str], bias: bool, order: Tensor | None = None) -> tuple[Weight, Tensor | None]:
        named = [name + ".weight" for name in names]
        weight = self._join(named, order, self.names.transposed)
        self._keep_blocks(weight, named, order)
        return scaled(weight) if self.fp8 else weight, self._join([name + ".bias" for name in names], order) if bias else None

    def _norm(self, name: str) -> Norm:
        return Norm(self._join([name + ".weight"]), self._join([name + ".bias"]) if self.config.norm_bias else None)

    def _head_norm(self, name: str) -> Norm:
        return Norm(self._join([name + ".weight"], self.head_order), None)

    def _join(self, names: list[str], order: Tensor | None = None, transposed: bool = False) -> Tensor:
        """Stacks tensors by rows into one of ours."""
        parts = [self.checkpoint.read(name) for name in names]
        parts = [part.T for part in parts] if transposed else parts
        rows = sum(part.shape[0] for part in parts)
        joined = _stack(parts, order, torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device))
        self.done += joined.numel() * self.dtype.itemsize
        self.progress(self.done, self.total)
        return joined

    def _keep_blocks(self, weight: Tensor, names: list[str], order: Tensor | None) -> None:
        """Of a weight that is made of these, if there are blocks of all of them. Those of several kinds become of one. Whether they are of
        this model is seen by some rows. Those of a checkpoint in bfloat16 are what it holds."""
        rows, inputs = weight.shape
        if self.names.transposed or inputs % 32:
            return
        if self.halves and all(self.checkpoint.dtype(name) == "BF16" for name in names):
            halves = [self.checkpoint.read(name).view(torch.uint8) for name in names]
            self.blocks[weight.data_ptr()] = _stack(halves, order, torch.empty(rows, 2 * inputs, dtype=torch.uint8))
            return
        if self.codes is None or any(name not in self.codes.found for name in names):
            return
        try:
            parts = [self.codes.read(name) for name in names]
            if any(part.dtype != torch.uint8 for part in parts):
                raise ValueError(f"{names[0]} is no block")
            if len({kind_of(part.shape[1], inputs) for part in parts}) > 1:
                parts = [torch.from_numpy(shortened(part.numpy(), inputs)) for part in parts]
            blocks = _stack(parts, order, torch.empty(rows, parts[0].shape[1], dtype=torch.uint8))
            some = torch.from_numpy(plain(blocks[::SEEN].numpy(), inputs)).to(weight)
            if sum(map(len, parts)) != rows or not torch.equal(some, weight[::SEEN]):
                raise ValueError(f"{names[0]} is another one")
        except (ValueError, IndexError, RuntimeError, BadModelFile) as error:
            log.warning("few rows are computed with plain weights, which is slower: the codes beside them do not fit (%s)", error)
            self.codes, self.blocks = None, {}
        else:
            self.blocks[weight.data_ptr()] = blocks

    def _qkv_order(self) -> Tensor:
        """Where each of our rows is in the file's: heads brought into the order q, k, v, and the pairs of q and k brought together."""
        config, group = self.config, self.config.heads // self.config.kv_heads
        heads = torch.arange(config.heads + 2 * config.kv_heads)
        if self.names.grouped:
            groups = heads.view(config.kv_heads, group + 2)
            heads = torch.cat((groups[:, :group].flatten(), groups[:, group], groups[:, group + 1]))
        within = torch.arange(config.head_dim).repeat(len(heads), 1)
        within[: config.heads + config.kv_heads] = self.head_order
        return (heads[:, None] * config.head_dim + within).flatten()


def _stack(parts: Sequence[Tensor], order: Tensor | None, into: Tensor) -> Tensor:
    """Row i of the result is row order[i] of the stack, and stays within its tensor."""
    first = 0
    for part in parts:
        end = first + part.shape[0]
        into[first:end] = part if order is None else part[order[first:end] - first]
        first = end
    return into
