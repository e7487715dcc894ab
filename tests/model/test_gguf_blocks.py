"""Quantised GGUF tensors as codes: the very same weights, found again wherever they are stacked, and never somebody else's."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pando.config import EngineConfig
from pando.engine.llm import LLM
from pando.engine.request import Request
from pando.kernels import linear
from pando.kernels.blocks import plain, shortened
from pando.model import gguf as gguf_files
from pando.model import load
from pando.model.config import ModelConfig
from pando.model.gguf import BLOCKS, convert
from pando.model.gguf_blocks import KINDS, NoBlocks, blocks_of
from pando.model.weights import Weights, load_weights

from ..tiny import greedy, run

SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_bytes(encoding: gguf.GGMLQuantizationType, rows: int, groups: int) -> np.ndarray:
    """Of a tensor with any codes and usual scales."""
    make = np.random.default_rng(int(encoding))
    raw = make.integers(0, 256, (rows, groups, gguf.GGML_QUANT_SIZES[encoding][1]), dtype=np.uint8)
    for at in SCALES_AT[encoding.name]:
        raw[..., at : at + 2] = (make.standard_normal((rows, groups, 1)) / 50).astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", SCALES_AT)
def test_codes_of_every_encoding_are_the_very_weights(name: str) -> None:
    encoding = gguf.GGMLQuantizationType[name]
    elements, group_bytes = gguf.GGML_QUANT_SIZES[encoding]
    raw = random_bytes(encoding, 40, 512 // elements)

    def decoded(part: np.ndarray) -> np.ndarray:
        return np.asarray(gguf.quants.dequantize(part, encoding), np.float32)

    made = blocks_of(raw, int(encoding), group_bytes, decoded)
    assert made.shape == (40, 512 // 4 * KINDS[int(encoding)])
    assert np.array_equal(plain(made, 512), decoded(raw))


def test_there_is_a_recipe_for_each_of_these_encodings() -> None:
    assert {gguf.GGMLQuantizationType(each).name for each in KINDS} == set(SCALES_AT)


def test_codes_that_would_be_other_weights_are_refused() -> None:
    raw = random_bytes(gguf.GGMLQuantizationType.Q8_0, 4, 2)
    with pytest.raises(NoBlocks):
        blocks_of(raw, 8, 34, lambda part: gguf.quants.dequantize(part, gguf.GGMLQuantizationType.Q8_0) ** 2)


@pytest.fixture
def converted(tmp_path: Path, tiny_gguf: Any) -> Callable[..., Path]:
    def make(encoding: str, **changes: Any) -> Path:
        directory = tmp_path / f"{encoding}{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        convert(tiny_gguf(directory / "tiny.gguf", encoding=encoding, **changes), directory, lambda done, total: None)
        return directory

    return make


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_converted_file_has_its_weights_as_codes_too(encoding: str, converted: Callable[..., Path]) -> None:
    directory = converted(encoding)
    weights, codes = load_file(directory / "model.safetensors"), load_file(directory / BLOCKS)
    assert codes.keys() == {name for name, values in weights.items() if values.ndim == 2}
    for name, blocks in codes.items():
        assert np.array_equal(plain(blocks, weights[name].shape[1]), weights[name])
        assert blocks.nbytes < weights[name].nbytes / 2


def test_embeddings_that_are_no_linear_map_have_no_codes(converted: Callable[..., Path]) -> None:
    head = np.random.default_rng(1).standard_normal((267, 32)).astype(np.float32)
    codes = load_file(converted("Q8_0", tensors={"output.weight": head}) / BLOCKS)
    assert "lm_head.weight" in codes and "model.embed_tokens.weight" not in codes


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_weights_that_are_not_quantised_have_no_codes(encoding: str, converted: Callable[..., Path]) -> None:
    assert not (converted(encoding) / BLOCKS).exists()


def test_a_weight_that_is_no_number_leaves_all_plain(converted: Callable[..., Path]) -> None:
    with np.errstate(all="ignore"):
        directory = converted("Q8_0", tensors={"blk.0.ffn_up.weight": np.tile(np.float32([0, 1e9]), (64, 16))})
    assert np.isnan(load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]).any()
    assert not (directory / BLOCKS).exists()


def loaded(directory: Path, dtype: torch.dtype = torch.float32, blocks: Path | None = None, *, fp8: bool = False) -> Weights:
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    files = [directory / "model.safetensors"]
    return load_weights(files, config, dtype, torch.device("cpu"), fp8=fp8, coded=True, blocks=blocks or directory / BLOCKS)


def assert_coded(weights: Weights) -> None:
    maps = [weights.head, *(each for layer in weights.layers for each in (layer.qkv, layer.o, layer.up, layer.down))]
    assert len(weights.blocks) == len(maps)
    for weight in maps:
        assert isinstance(weight, torch.Tensor)
        found = plain(weights.blocks[weight.data_ptr()].numpy(), weight.shape[1])
        assert torch.equal(torch.from_numpy(found).to(weight.dtype), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_stacked_and_ordered_as_their_weights_are(dtype: torch.dtype, converted: Callable[..., Path]) -> None:
    assert_coded(loaded(converted("Q4_1"), dtype))


def test_codes_of_several_kinds_make_one_matrix(converted: Callable[..., Path]) -> None:
    directory = converted("Q4_1")
    codes, name = load_file(directory / BLOCKS), "model.layers.0.self_attn.v_proj.weight"
    save_file({**codes, name: shortened(codes[name], 32)}, directory / BLOCKS)
    assert_coded(loaded(directory))


def test_weights_in_fp8_have_no_use_for_codes(converted: Callable[..., Path]) -> None:
    assert not loaded(converted("Q4_1"), fp8=True).blocks


def _of_another(directory: Path, other: Path) -> None:
    shutil.copy(other / BLOCKS, directory / BLOCKS)


def _cut_short(directory: Path, other: Path) -> None:
    (directory / BLOCKS).write_bytes((directory / BLOCKS).read_bytes()[:-100])


def _no_blocks(directory: Path, other: Path) -> None:
    save_file({name: codes[:, 1:].copy() for name, codes in load_file(directory / BLOCKS).items()}, directory / BLOCKS)


def _fewer_rows(directory: Path, other: Path) -> None:
    save_file({name: codes[:-1].copy() for name, codes in load_file(directory / BLOCKS).items()}, directory / BLOCKS)


def _more_rows(directory: Path, other: Path) -> None:
    save_file({name: np.concatenate((codes, codes)) for name, codes in load_file(directory / BLOCKS).items()}, directory / BLOCKS)


def _one_rolled(directory: Path, other: Path) -> None:
    codes, name = load_file(directory / BLOCKS), "model.layers.0.mlp.down_proj.weight"
    save_file({**codes, name: np.roll(codes[name], 1, 0)}, directory / BLOCKS)


def _of_floats(directory: Path, other: Path) -> None:
    save_file({name: codes.astype(np.float32) for name, codes in load_file(directory / BLOCKS).items()}, directory / BLOCKS)


def _flat(directory: Path, other: Path) -> None:
    save_file({name: codes.flatten() for name, codes in load_file(directory / BLOCKS).items()}, directory / BLOCKS)


@pytest.mark.parametrize("spoil", [_of_another, _cut_short, _no_blocks, _fewer_rows, _more_rows, _one_rolled, _of_floats, _flat])
def test_codes_that_do_not_fit_are_not_used(
    spoil: Callable[[Path, Path], None], converted: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory, other = converted("Q4_1"), converted("Q4_1", tensors={"token_embd.weight": np.ones((300, 32), np.float32)})
    spoil(directory, other)
    with caplog.at_level(logging.WARNING):
        assert not loaded(directory).blocks
    assert len(caplog.records) == 1 and "which is slower" in caplog.text


def test_a_full_disk_leaves_a_model_without_codes(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = gguf_files._write

    def full(target: Path, *rest: Any) -> None:
        write(target, *rest)
        if target.name == BLOCKS:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_files, "_write", full)
    directory = converted("Q4_1")
    assert "without its codes" in caplog.text and not (directory / BLOCKS).exists()
    assert not loaded(directory, blocks=None).blocks


@pytest.mark.parametrize(("free", "dtype", "compiled", "codes"), [
    (1 << 30, "float32", True, True), (1 << 30, "bfloat16", True, True), (1 << 30, "float16", True, False),
    (1 << 30, "float32", False, False), (1 << 10, "float32", True, False),
])  # fmt: skip
def test_codes_are_read_where_they_can_be_used_and_there_is_room(
    free: int, dtype: str, compiled: bool, codes: bool, converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, read = converted("Q4_1"), []
    monkeypatch.setattr(load, "free_memory", lambda place: free)
    monkeypatch.setattr(load, "load_weights", lambda *given, **options: read.append(options["coded"]) or load_weights(*given, **options))
    named = load.load(str(directory), device="cpu", dtype=dtype, compiled=compiled).digest
    assert read == [codes]
    with (directory / BLOCKS).open("ab") as file:  # whoever holds the pages of one must not read those of the other
        file.write(b" ")
    assert load.load(str(directory), device="cpu", dtype=dtype, compiled=compiled).digest != named


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_answers_the_same_by_its_codes(dtype: str, converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, and several; with whole layers in C."""
    directory = converted("Q4_1")

    def answers() -> list[list[int]]:
        llm = LLM.from_config(EngineConfig(model=str(directory), device="cpu", dtype=dtype, kv_cache_tokens=512, disk_gib=0, host_gib=0))
        said = [run(llm.engine, [Request("r", list(range(20)), greedy(16))])["r", 0]]
        many = run(llm.engine, [Request(f"r{i}", list(range(i, i + 9)), greedy(16)) for i in range(6)])
        return [[event.token for event in events] for events in (*said, *many.values())]

    read = []

    def best(samples: object, forms: dict[str, object]) -> dict[int, dict[str, float]]:
        read.append("coded" in forms)
        return {rows: {form: 1.0 if form == "coded" else 2.0 for form in forms} for rows in linear.ROWS}

    monkeypatch.setattr(linear, "_measure", best)
    by_codes = answers()
    (directory / BLOCKS).unlink()
    assert answers() == by_codes
    assert read == [True, False]
    assert len({tuple(each) for each in by_codes}) > 1
