"""Loading a checkpoint: whole, in shards, under other names; and every way a file can be wrong."""

import gc
import hashlib
import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pando.errors import BadModelFile, InputError, ModelNotFound, UnsupportedModel
from pando.kernels.blocks import plain
from pando.kernels.fp8 import Scaled, scaled
from pando.model import weights
from pando.model.config import ModelConfig
from pando.model.hub import weight_files
from pando.model.weights import Weights, digest, load_weights

from .families import build, save

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def config_of(directory: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


def load(directory: Path) -> Weights:
    return load_weights(weight_files(directory), config_of(directory), torch.float32, CPU)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("llama", "qwen2", "gpt2")}
    for name, directory in directories.items():
        save(name, directory)
    return directories


@pytest.fixture
def change(originals: dict[str, Path], tmp_path: Path) -> Callable[[str, Callable[[Tensors], Tensors]], Path]:
    """A copy of a model whose tensors went through a function."""

    def changed(name: str, edit: Callable[[Tensors], Tensors]) -> Path:
        directory = tmp_path / "changed"
        shutil.copytree(originals[name], directory)
        save_file(edit(load_file(directory / "model.safetensors")), directory / "model.safetensors")
        return directory

    return changed


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_checkpoint_in_bfloat16_is_kept_so_beside_float32(coded: bool, name: str, change: Callable[..., Path]) -> None:
    """Where each weight lies as the layers read it: not in a GPT-2, whose matrices are the other way round."""
    directory = change(name, lambda tensors: {key: value.to(torch.bfloat16) for key, value in tensors.items()})
    config, files = config_of(directory), weight_files(directory)
    found = load_weights(files, config, torch.float32, CPU, coded=coded)
    maps = [found.head, *(each for layer in found.layers for each in (layer.qkv, layer.o, layer.up, layer.down))]
    wide = [each for each in maps if each.shape[1] % 32 == 0]
    assert len(found.blocks) == (len(wide) if coded and name != "gpt2" else 0)
    assert not coded or name == "gpt2" or wide
    for weight in wide if found.blocks else ():
        assert isinstance(weight, Tensor)
        assert np.array_equal(plain(found.blocks[weight.data_ptr()].numpy(), weight.shape[1]), weight.numpy())
    assert not load_weights(files, config, torch.bfloat16, CPU, coded=coded).blocks, "as plain weights they are no more bytes"


def test_a_checkpoint_of_which_a_part_is_bfloat16_is_plain_in_what_is_not(change: Callable[..., Path]) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {key: value if "q_proj" in key else value.to(torch.bfloat16) for key, value in tensors.items()}

    directory = change("llama", edit)
    found = load_weights(weight_files(directory), config_of(directory), torch.float32, CPU, coded=True)
    assert all(layer.qkv.data_ptr() not in found.blocks for layer in found.layers if isinstance(layer.qkv, Tensor))
    assert found.blocks


def assert_equal(one: Weights, other: Weights) -> None:
    assert torch.equal(one.embed, other.embed) and torch.equal(one.head, other.head)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(mine.qkv, theirs.qkv) and torch.equal(mine.o, theirs.o)
        assert torch.equal(mine.up, theirs.up) and torch.equal(mine.down, theirs.down)
        assert torch.equal(mine.attn_norm.weight, theirs.attn_norm.weight)


def named(files: Sequence[Path], config: ModelConfig) -> bytes:
    return digest(files, config, lambda path: hashlib.sha256(path.read_bytes()).hexdigest())


def test_shards_give_what_the_single_file_gives(originals: dict[str, Path], tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(weight_files(tmp_path)) > 1
    assert_equal(load(tmp_path), load(originals["llama"]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_names_without_their_prefix_are_the_same_names(name: str, originals: dict[str, Path], change) -> None:
    bare = change(name, lambda tensors: {key.removeprefix("model.").removeprefix("transformer."): value for key, value in tensors.items()})
    assert_equal(load(bare), load(originals[name]))


def test_a_tied_head_is_the_embedding_itself(originals: dict[str, Path]) -> None:
    weights = load(originals["qwen2"])
    assert weights.head is weights.embed


def test_buffers_that_carry_no_weight_are_passed_over(originals: dict[str, Path], change) -> None:
    masked = change("gpt2", lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 96, 96, dtype=torch.bool)})
    assert_equal(load(masked), load(originals["gpt2"]))


def test_the_copy_of_a_tied_head_is_passed_over(originals: dict[str, Path], change) -> None:
    doubled = change("qwen2", lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_equal(load(doubled), load(originals["qwen2"]))


def test_a_tied_head_that_is_another_is_refused(change) -> None:
    """transformers 4 would take the embeddings, 5 the head of the file: answers of one of them are wrong."""
    other = change("qwen2", lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(BadModelFile, match="tie_word_embeddings"):
        load(other)


def test_weights_do_not_depend_on_the_file_once_loaded(originals: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(originals["llama"], tmp_path / "copy"))
    weights = load(directory)
    (directory / "model.safetensors").write_bytes(b"")
    assert_equal(weights, load(originals["llama"]))


def test_progress_counts_every_byte_once(originals: dict[str, Path]) -> None:
    directory, seen = originals["llama"], []
    load_weights(weight_files(directory), config_of(directory), torch.float32, CPU, lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert seen == sorted(seen) and seen[-1] == (size, size)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_one(name: str, value: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), BadModelFile, r"1 of 30 .*layers\.1\.mlp\.up_proj\.weight \[40, 48\]"),
        (without("lm_head.weight"), BadModelFile, r"lm_head\.weight \[61, 48\]"),
        (with_one("model.norm.weight", torch.ones(47)), BadModelFile, r"model\.norm\.weight .*\[47\].*\[48\]"),
        (with_one("model.layers.0.self_attn.k_proj.weight", torch.ones(64, 48)), BadModelFile, r"k_proj.*\[64, 48\].*\[32, 48\]"),
        (with_one("model.norm.weight", torch.ones(48, dtype=torch.float64)), UnsupportedModel, r"model\.norm\.weight.*F64.*F32, F16, BF16"),
        (with_one("model.norm.weight", torch.ones(48, dtype=torch.int8)), UnsupportedModel, "I8"),
        (with_one("model.layers.0.self_attn.q_proj.bias", torch.ones(64)), UnsupportedModel, r"self_attn\.q_proj\.bias"),
        (with_one("score.weight", torch.ones(2, 48)), UnsupportedModel, r"score\.weight"),
        (with_one("model.layers.3.mlp.up_proj.weight", torch.ones(40, 48)), UnsupportedModel, r"layers\.3"),
        (with_one("norm.weight", torch.ones(48)), BadModelFile, "again"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(edit, error: type[InputError], says: str, change) -> None:
    with pytest.raises(error, match=says):
        load(change("llama", edit))


@pytest.mark.parametrize("kept", [0, 5, 100, 2000, -1])
def test_a_truncated_file_is_refused(kept: int, originals: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(originals["llama"], tmp_path / "copy"))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BadModelFile, match="truncated"):
        load(directory)


def test_a_foreign_file_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(originals["llama"], tmp_path / "copy"))
    (directory / "model.safetensors").write_bytes(b"GGUF" + bytes(4096))
    with pytest.raises(BadModelFile, match="not a safetensors file"):
        load(directory)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}', "2 of the 2 files"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "outside"),
        ('{"weight_map": {}}', "0 files"),
        ("[" * 100_000, "not an index"),
        ('{"weight_map": {"a": 5}}', "not an index"),
        ('{"weight_map": [1]}', "not an index"),
        ("[]", "not an index"),
        ("{", "not an index"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadModelFile, match=says):
        weight_files(tmp_path)


def test_a_digest_names_the_weights_and_the_config_but_not_the_place(originals: dict[str, Path], change) -> None:
    directory = originals["llama"]
    files, config = weight_files(directory), config_of(directory)
    same = change("llama", lambda tensors: tensors)
    assert named(weight_files(same), config) == named(weight_files(same), config_of(same))
    assert len(named(files, config)) == 32
    copy = Path(shutil.copytree(directory, same.parent / "copy"))
    assert named(weight_files(copy), config) == named(files, config)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert named(weight_files(copy), config) != named(files, config)
    other = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()) | {"rms_norm_eps": 1e-5})
    assert named(files, other) != named(files, config)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_maps_are_rounded_to_8_bits_one_by_one_and_nothing_else_is(
    originals: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[weakref.ref[Tensor]] = []

    def watched(weight: Tensor) -> Scaled:
        gc.collect()
        assert not any(ref() is not None for ref in given), "an earlier map is still there as it was read"
        given.append(weakref.ref(weight))
        return scaled(weight)

    monkeypatch.setattr(weights, "scaled", watched)
    files, config, plain = weight_files(originals[name]), config_of(originals[name]), load(originals[name])
    found = load_weights(files, config, torch.float32, CPU, fp8=True)
    assert len(given) == 4 * config.layers
    assert torch.equal(found.embed, plain.embed) and torch.equal(found.head, plain.head)
    for mine, whole in zip(found.layers, plain.layers, strict=True):
        for part in ("qkv", "o", "up", "down"):
            rounded, exact = getattr(mine, part), getattr(whole, part)
            assert isinstance(rounded, Scaled) and torch.equal(rounded.codes.view(torch.uint8), scaled(exact).codes.view(torch.uint8))
        assert torch.equal(mine.attn_norm.weight, whole.attn_norm.weight)
        assert whole.qkv_bias is None or torch.equal(mine.qkv_bias, whole.qkv_bias)
