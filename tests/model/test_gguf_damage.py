"""GGUF files that contradict themselves: each is refused as a bad file, and none is answered from."""

import os
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pando.errors import BadModelFile, PandoError, UnsupportedModel
from pando.model.gguf import convert, read
from pando.model.gguf_layout import layout_of

from .test_gguf import converted, llama3_divisors, scaling_of


def test_two_tensors_that_share_bytes_are_refused(tmp_path, tiny_gguf):
    """A wrong offset leads into another tensor; the file as a whole is large enough."""
    path = tiny_gguf(tmp_path / "tiny.gguf")
    data, tensors = bytearray(path.read_bytes()), read(path).tensors
    name, other = "blk.0.attn_k.weight", "blk.0.attn_v.weight"
    start = min(tensor.offset for tensor in tensors.values())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4 + 16 + 4
    struct.pack_into("<Q", data, at, tensors[other].offset - start + 32)
    path.write_bytes(data)
    with pytest.raises(BadModelFile, match="share bytes"):
        read(path)


@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
def test_a_file_that_is_cut_short_while_it_is_converted_is_refused(encoding, tmp_path, tiny_gguf):
    path, into = tiny_gguf(tmp_path / "tiny.gguf", encoding=encoding), tmp_path / "into"
    into.mkdir()

    def cut(done, total):
        os.truncate(path, 3 * path.stat().st_size // 4)

    with pytest.raises(BadModelFile, match="ends within tensor"):
        convert(path, into, cut)


@pytest.mark.parametrize(
    "name",
    ["bos_token_id", "eos_token_id", "eot_token_id", "model", "pre", "merges", "token_type", "add_bos_token"],
)
@pytest.mark.parametrize("value", [5, 0.5, "x", [1, 2], ["a", "b"]], ids=str)
def test_a_vocabulary_of_other_types_is_refused_or_harmless(name, value, tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", {f"tokenizer.ggml.{name}": value})
    with suppress(PandoError):
        converted(path, tmp_path / "into")


@pytest.mark.parametrize(("architecture", "kind"), [("phi2", "linear"), ("falcon", "yarn")])
def test_every_architecture_that_rotates_keeps_its_scaling(architecture, kind):
    """Passed over, it would be a model that answers wrongly."""
    said = dict.fromkeys(("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "rope.dimension_count"), 2)
    said |= {"context_length": 64, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{name}": value for name, value in said.items()}}
    shapes = dict.fromkeys(("token_embd.weight", "blk.0.attn_qkv.weight", "blk.1.attn_qkv.weight"), (2, 2))
    if architecture == "phi2":
        shapes = {name.replace("attn_qkv", "attn_q"): shape for name, shape in shapes.items()}
    scaling = layout_of(Path("some.gguf"), metadata, shapes, None).config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == (kind, 4.0)


@pytest.mark.parametrize("name", ["expert_count", "rope.scaling.type", "rope.scale_linear"])
def test_a_list_for_one_number_is_refused(name, tmp_path, tiny_gguf):
    with pytest.raises(BadModelFile, match="does not fit together"):
        converted(tiny_gguf(tmp_path / "tiny.gguf", {f"llama.{name}": [1, 2]}), tmp_path / "into")


def test_factors_of_one_leave_the_scaling_as_it_is_and_others_are_refused(tmp_path, tiny_gguf):
    linear = {"llama.rope.freq_base": 500000.0, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    ones = tiny_gguf(tmp_path / "ones.gguf", linear, tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert scaling_of(ones, tmp_path / "a") == {"rope_type": "linear", "factor": 4.0}
    both = tiny_gguf(tmp_path / "both.gguf", linear, tensors={"rope_freqs.weight": llama3_divisors(8, 500000.0, 8.0)})
    with pytest.raises(UnsupportedModel, match="RoPE factors beside the scaling linear"):
        converted(both, tmp_path / "b")
