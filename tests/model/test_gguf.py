"""GGUF files become Hugging Face models with the same weights and the same tokens, and broken ones are refused by name."""

import json
import math
import struct
import unicodedata
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Library
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pando.errors import BadModelFile, PandoError, UnsupportedModel
from pando.model.config import ModelConfig
from pando.model.gguf import convert, read
from pando.model.weights import load_weights

from .families import build, logits

TEXTS = [
    "hello world",
    "  two  spaces,\ttabs\n\n\nand lines \n ",
    "In 1984, 3.14159 and 12345678 and x1y22; ٣٤٥ and ⅷ",
    "don't we'll I'M YOU'RE it's",
    "def f(x):\n    return x**2  # comment\n",
    "Grüße, café, naïve; Ελληνικά, русский, עברית, العربية, हिन्दी",
    "日本語のテキスト。中文，标点！한국어",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 a\u0300 \u200b zero\u00a0width",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|>",
    "!!! ... --- ((nested)) $5 + 7% = ~|^` <tag/>",
    "",
    " ",
    "\n",
]


def silent(done: int, total: int) -> None:
    pass


def converted(path: Path, into: Path) -> Path:
    into.mkdir()
    convert(path, into, silent)
    return into


# Every architecture, from transformers to GGUF as llama.cpp lays it out, and back.


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def ungrouped(values: np.ndarray, heads: int, groups: int) -> np.ndarray:
    parts = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
    split = (parts[:, :-2], parts[:, -2], parts[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in split])


def as_llama_cpp_stores(name: str, values: np.ndarray, config) -> np.ndarray:
    if config.model_type == "llama" and ".attn_q." in name:
        return permuted(values, config.num_attention_heads)
    if config.model_type == "llama" and ".attn_k." in name:
        return permuted(values, config.num_key_value_heads)
    if config.model_type == "bloom" and "attn_qkv" in name:
        return ungrouped(values, config.n_head, config.n_head)
    if config.model_type == "falcon" and "attn_qkv" in name:
        return ungrouped(values, config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1)
    if config.model_type == "gpt2" and values.ndim == 2 and name.startswith("blk."):
        return values.T
    return values


def settings_of(config, architecture: str) -> dict[str, object]:
    heads = config.num_attention_heads
    kv_heads = {"falcon": getattr(config, "num_kv_heads", 1) if getattr(config, "new_decoder_architecture", False) else 1}.get(
        architecture, getattr(config, "num_key_value_heads", heads)
    )
    first = lambda *names: next(value for name in names if (value := getattr(config, name, None)) is not None)  # noqa: E731
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": first("max_position_embeddings", "max_seq_len", "seq_length") if architecture != "bloom" else 2048,
        "embedding_length": config.hidden_size,
        "feed_forward_length": (getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None)
                                or getattr(config, "n_inner", None) or 4 * config.hidden_size),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    if architecture in ("llama", "qwen3"):
        found |= {"attention.key_length": config.head_dim, "rope.dimension_count": config.head_dim}
    if architecture == "phi2":
        found["rope.dimension_count"] = 6
    if architecture == "mpt":
        found |= {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": float(config.attn_config.clip_qkv or 0)}
    return {f"{architecture}.{name}": value for name, value in found.items()}


def vocabulary_of(size: int) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*(chr(ord("!") + i) for i in range(size - 1)), '!"'],
        "tokenizer.ggml.merges": ['! "'],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


ARCHITECTURES = {"phi": "phi2"}
FAMILIES = ["llama", "llama-biases", "qwen2", "qwen3", "phi", "falcon-7b", "falcon-40b", "falcon-11b", "mpt", "bloom", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_from_gguf_as_it_was(family, tmp_path, tiny_gguf):
    model = build(family)
    config, architecture = model.config, ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    names = gguf.get_tensor_name_map(next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 3)
    tensors = {}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = (names.get_name(spelt, try_suffixes=(".weight", ".bias")) for spelt in (name, name.removeprefix("transformer.")))
        stored = next(found for found in known if found)
        tensors[stored] = as_llama_cpp_stores(stored, values.numpy(), config)
    path = tiny_gguf.write(tmp_path / "model.gguf", architecture, {**settings_of(config, architecture), **vocabulary_of(61)}, tensors)

    directory = converted(path, tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(values, again.state_dict()[name]) for name, values in model.state_dict().items())
    tokens = torch.arange(3, 40)
    torch.testing.assert_close(logits(again, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    ours = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    load_weights([directory / "model.safetensors"], ours, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_are_those_that_transformers_reads_from_the_same_file(encoding, tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", encoding=encoding)
    directory = converted(path, tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert set(ours) - set(theirs) == {"lm_head.weight"}
    assert all(torch.equal(values.float(), ours[name]) for name, values in theirs.items())


def test_sixteen_bit_weights_take_sixteen_bits(tmp_path, tiny_gguf):
    directory = converted(tiny_gguf(tmp_path / "tiny.gguf", encoding="F16"), tmp_path / "converted")
    assert load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == np.float16


# RoPE scaling.


def scaling_of(path: Path, into: Path):
    return json.loads((converted(path, into) / "config.json").read_text()).get("rope_scaling")


def test_linear_and_yarn_scaling_are_kept(tmp_path, tiny_gguf):
    linear = tiny_gguf(tmp_path / "linear.gguf", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert scaling_of(linear, tmp_path / "a") == {"rope_type": "linear", "factor": 4.0}
    fields = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 1.0, "yarn_beta_fast": 16.0}
    yarn = tiny_gguf(tmp_path / "yarn.gguf", {f"llama.rope.scaling.{name}": value for name, value in fields.items()})
    found = scaling_of(yarn, tmp_path / "b")
    assert found.pop("attention_factor") == pytest.approx(0.1 * math.log(4) + 1)
    assert found == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}


def llama3_divisors(dim: int, theta: float, factor: float) -> np.ndarray:
    """As the original converter writes them: wavelength by wavelength."""
    low, high = 8192 / 1.0, 8192 / 4.0
    found = []
    for frequency in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        found.append(1.0 if wavelength < high else factor if wavelength > low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_divisors(factor, tmp_path, tiny_gguf):
    divisors = llama3_divisors(8, 500000.0, factor)
    path = tiny_gguf(tmp_path / "tiny.gguf", {"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": divisors})
    assert scaling_of(path, tmp_path / "a") == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_unknown_scaling_is_refused_by_name(tmp_path, tiny_gguf):
    divisors = np.array([1.0, 2.0, 9.0, 3.0], np.float32)
    with pytest.raises(UnsupportedModel, match="RoPE factors"):
        converted(tiny_gguf(tmp_path / "a.gguf", tensors={"rope_freqs.weight": divisors}), tmp_path / "a")
    with pytest.raises(UnsupportedModel, match="longrope"):
        converted(tiny_gguf(tmp_path / "b.gguf", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}), tmp_path / "b")


# Tokenizers.

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LATER_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def words_of(rule: str, text: str) -> list[str]:
    """llama.cpp's rules, as published: `smollm` cuts out every digit first and applies GPT-2's words to what is between."""
    if rule == "smollm":
        return [word for part in regex.split(r"(\p{N})", text) for word in regex.findall(GPT2_WORDS, part)]
    return regex.findall({"gpt-2": GPT2_WORDS, "llama-bpe": LATER_WORDS % "{1,3}", "qwen2": LATER_WORDS % ""}[rule], text)


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_words_are_cut_by_the_rule_that_the_file_names(rule, tmp_path, tiny_gguf):
    directory = converted(tiny_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.pre": rule}), tmp_path / "converted")
    cutter = Library.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        plain = unicodedata.normalize("NFC", text) if rule == "qwen2" else text
        spans = [span for _, span in cutter.pre_tokenizer.pre_tokenize_str(plain)]
        assert [plain[start:end] for start, end in spans] == words_of(rule, plain)


def best_scores(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece, as defined: join the neighbours whose union scores best, leftmost first; unknown characters become bytes."""
    ids = {token: i for i, token in enumerate(tokens) if i >= 259}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not joins:
            break
        at = min(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [token for piece in pieces for token in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])]


def test_sentencepiece_joins_by_score(tmp_path, tiny_gguf):
    vocabulary = tiny_gguf.sentencepiece()
    count = len(vocabulary["tokenizer.ggml.tokens"])
    vocabulary["tokenizer.ggml.scores"] = [float(i * 7 % 10) + i / count for i in range(count)]  # in another order than the tokens
    directory = converted(tiny_gguf(tmp_path / "tiny.gguf", vocabulary=vocabulary), tmp_path / "converted")
    library = Library.from_file(str(directory / "tokenizer.json"))
    tokens, scores = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.scores"]
    random = np.random.default_rng(0)
    texts = ["hello world", "hellohell  world é", *("".join(random.choice(list("helowrd  é"), 12)) for _ in range(200))]
    for text in texts:
        assert library.encode(text).ids == [1, *best_scores(text, tokens, scores)], text
        assert library.decode(library.encode(text).ids) == text


def test_control_and_user_defined_tokens_are_never_cut(tmp_path, tiny_gguf):
    vocabulary = tiny_gguf.byte_level()
    vocabulary["tokenizer.ggml.tokens"] = [*vocabulary["tokenizer.ggml.tokens"], "<tool>"]
    vocabulary["tokenizer.ggml.token_type"] = [*vocabulary["tokenizer.ggml.token_type"], 4]
    library = Library.from_file(str(converted(tiny_gguf(tmp_path / "t.gguf", vocabulary=vocabulary), tmp_path / "c") / "tokenizer.json"))
    last = len(vocabulary["tokenizer.ggml.tokens"]) - 1
    assert library.encode("<|im_start|><tool><|im_end|>").ids == [1, last, 2]
    assert library.decode([1, last, 2]) == "<tool>"


@pytest.mark.parametrize(("begin", "expected"), [(True, [1]), (False, [])])
def test_the_file_says_whether_a_text_begins_with_bos(begin, expected, tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.add_bos_token": begin})
    assert Library.from_file(str(converted(path, tmp_path / "converted") / "tokenizer.json")).encode("").ids == expected


def test_the_end_of_a_turn_is_an_end_too(tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2})
    assert json.loads((converted(path, tmp_path / "converted") / "config.json").read_text())["eos_token_id"] == [0, 2]


# What is refused.


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"llama.expert_count": 8}, UnsupportedModel, "8 experts"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedModel, "'klingon'"),
        ({"llama.rope.dimension_count": 4}, UnsupportedModel, "4 of 8"),
        ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedModel, "differs from layer to layer"),
        ({"llama.block_count": 2}, BadModelFile, "2 layers announced, tensors of 1 found"),
        ({"llama.embedding_length": None}, BadModelFile, "embedding_length"),
        ({"llama.attention.head_count": 0}, BadModelFile, "head_count"),
        ({"llama.attention.head_count": 5, "llama.attention.key_length": 8}, BadModelFile, "does not fit the number of heads"),
        ({"tokenizer.ggml.tokens": None}, BadModelFile, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, BadModelFile, "1 of them different"),
        ({"tokenizer.ggml.token_type": [1]}, BadModelFile, "1 token types"),
        ({"tokenizer.ggml.eos_token_id": 9999}, BadModelFile, "9999"),
        ({"tokenizer.ggml.merges": ["nowhere known"]}, BadModelFile, "do not fit together"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(changes, error, says, tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", changes)
    with pytest.raises(error, match=says):
        converted(path, tmp_path / "converted")


def test_an_unknown_architecture_is_named(tmp_path, tiny_gguf):
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        converted(tiny_gguf(tmp_path / "tiny.gguf", architecture="mamba"), tmp_path / "converted")


def test_an_unknown_tensor_is_named(tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf", tensors={"blk.0.ssm_in.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ssm_in\.weight"):
        converted(path, tmp_path / "converted")


def test_an_encoding_that_cannot_be_decoded_is_named(tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    for number, says in ((24, "I8"), (999, "999")):  # one that the format knows, one that it does not
        struct.pack_into("<I", data, at, number)
        path.write_bytes(data)
        with pytest.raises(UnsupportedModel, match=f"blk.0.attn_q.weight.*{says}"):
            converted(path, tmp_path / f"converted-{number}")


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, tiny_gguf):
    whole = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    short = tmp_path / "short.gguf"
    for length in [0, 3, 4, 8, 23, *range(24, len(whole) - 32, 509)]:
        short.write_bytes(whole[:length])
        with pytest.raises(BadModelFile, match=r"truncated|not a GGUF"):
            read(short)


@pytest.mark.parametrize("offset", [8, 16])
def test_an_impossible_count_ends_at_once(offset, tmp_path, tiny_gguf):
    """A reader that believes the number of tensors or of fields would loop for years."""
    path = tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, offset, 2**62)
    path.write_bytes(data)
    with pytest.raises(PandoError):
        read(path)


def test_an_impossible_array_ends_at_once(tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    for name in (b"tokenizer.ggml.token_type", b"tokenizer.ggml.tokens"):
        struct.pack_into("<Q", data, data.index(name) + len(name) + 8, 2**62)
        path.write_bytes(data)
        with pytest.raises(BadModelFile, match="truncated"):
            read(path)


def test_tensors_that_share_their_bytes_are_refused(tmp_path, tiny_gguf):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    file = read(path)
    start = min(tensor.offset for tensor in file.tensors.values())
    for name, tensor in file.tensors.items():
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4 + 8 * len(tensor.shape) + 4
        struct.pack_into("<Q", data, at, 0)
    path.write_bytes(data[: start + max(tensor.size for tensor in file.tensors.values())])
    with pytest.raises(BadModelFile, match="claim"):
        read(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory, tiny_gguf):
    return tiny_gguf(tmp_path_factory.mktemp("fuzz") / "tiny.gguf").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0, 9000), new=st.binary(min_size=1, max_size=8))
def test_damage_to_the_header_is_an_error_of_pando_or_harmless(at, new, small_file, tmp_path_factory):
    place = tmp_path_factory.mktemp("damaged")
    (place / "tiny.gguf").write_bytes(small_file[:at] + new + small_file[at + len(new) :])
    with suppress(PandoError):
        converted(place / "tiny.gguf", place / "converted")


# The default model.


@pytest.mark.model
def test_the_default_model_has_known_tokens(default_model):
    library = Library.from_file(str(default_model.tokenizer))
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: library.encode(text).ids for text in known} == known
