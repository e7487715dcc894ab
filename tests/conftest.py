"""Models for tests: the default one, and files small enough to be made on the spot."""

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Before torch loads OpenMP. Its threads spin for a while after each operation, which takes the cores from the other workers of this run
# and costs several times the work itself. Processes that tests start do the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from pando.config import EngineConfig
from pando.kernels import native
from pando.model import hub
from pando.store import scout, speeds

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its own functions are made then, one way or the other
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="pando-native-", ignore_cleanup_errors=True)
    os.environ["TESTS_COMPILED"] = COMPILED.name  # the kernels in C, of all workers of this run
os.environ["PANDO_DISK_GIB"] = "0"  # what servers of tests keep must not outlive them; tests of that say where
THREADS = torch.get_num_threads()  # of a user's process; the workers of a run share the cores, and would wait for each other's threads
torch.set_num_threads(max(1, THREADS // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored
with contextlib.suppress(ImportError):  # a host without it runs every other test
    from hypothesis import HealthCheck, settings

    settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")  # in every run, on every machine


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: a million objects, among which nobody looks for garbage, neither meanwhile nor
    later."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the whole come first, then those of its folders: some of their files take long, and the last one is waited for alone."""
    items.sort(key=lambda item: len(item.path.parts))


@pytest.fixture(autouse=True)
def unhurried() -> Iterator[None]:
    """How long a load or an answer takes here, beside whatever else runs, decides nothing. Tests of that say what takes how long."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it changed
        patch.setattr(speeds, "LEAST", 60.0)
        patch.setattr(speeds.Speeds, "moved", lambda *_: None)
        for name in ("FRESH", "AWAITED"):
            patch.setattr(scout, name, 60.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def unmeasured() -> Iterator[None]:
    """Nor does which way to attend is the fastest. Engines of a module, which begin before its tests, do not find that out, either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.Dense, "measure", lambda *_: native.Dense())
        yield


@pytest.fixture(autouse=True, scope="session")
def elsewhere() -> Iterator[None]:
    """With TESTS_DEVICE=cuda, models are on that device, and most tests expect what they do of a CPU: their pages are smaller than its
    kernels take, so the definition attends, which is no news; and as little is shared as there."""
    from pando.engine import batch, costs
    from pando.kernels.gpu_tiles import LEAST_KEYS
    from pando.kv.plan import DEFAULT

    from . import tiny

    def quiet(place: torch.device, *how: Any) -> Any:
        return None if place.type == tiny.DEVICE.type and how[2] < LEAST_KEYS else kernels(place, *how)

    kernels = batch._on_gpu
    with pytest.MonkeyPatch.context() as patch:
        if tiny.DEVICE != tiny.CPU:
            patch.setattr(batch, "_on_gpu", quiet)
            patch.setattr(costs, "default_cost", lambda *_: DEFAULT)
        yield


@pytest.fixture(params=[False, True], ids=["one by one", "overlapping"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Steps settled one by one, and each while the next one runs: whoever asks for this must see no difference."""
    from . import tiny

    monkeypatch.setitem(tiny.DEFAULTS, "overlap", request.param)
    return bool(request.param)


@pytest.fixture
def all_threads() -> Iterator[None]:
    """For kernels in C, beside other workers, too: threads that get into each other's way are found so."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_model() -> hub.ModelFiles:
    return hub.resolve(EngineConfig.model)


def byte_level_vocabulary(merges: tuple[str, ...] = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3")) -> dict[str, Any]:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def sentencepiece_vocabulary(
    pieces: tuple[str, ...] = ("he", "ll", "hell", "hello", "▁w", "▁wor", "or", "ld", "▁world", "▁▁"),
) -> dict[str, Any]:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "▁", *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + 1 + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama_settings(layers: int = 1) -> dict[str, Any]:
    return {
        "llama.block_count": layers,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }


def llama_tensors(vocabulary: int, layers: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shapes = {"token_embd.weight": (vocabulary, 32), "output_norm.weight": (32,)}
    for i in range(layers):
        rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64, "ffn_up": 64}
        shapes |= {f"blk.{i}.{name}.weight": (count, 32) for name, count in rows.items()}
        shapes |= {f"blk.{i}.ffn_down.weight": (32, 64), f"blk.{i}.attn_norm.weight": (32,), f"blk.{i}.ffn_norm.weight": (32,)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], encoding: str = "F32"
) -> Path:
    import gguf  # here, so that a host without it runs every other test

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        _add(writer, name, value)
    kind = gguf.GGMLQuantizationType[encoding]
    for name, values in tensors.items():
        if values.ndim == 1 or encoding == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


class TinyGGUF:
    """Writes a Llama of one layer: `changes` replaces metadata (None removes it), `tensors` replaces or adds weights."""

    def __call__(
        self,
        path: Path,
        changes: Mapping[str, Any] | None = None,
        *,
        tensors: Mapping[str, np.ndarray] | None = None,
        encoding: str = "F32",
        architecture: str = "llama",
        vocabulary: Mapping[str, Any] | None = None,
    ) -> Path:
        metadata = {**llama_settings(), **(byte_level_vocabulary() if vocabulary is None else vocabulary), **(changes or {})}
        metadata = {name: value for name, value in metadata.items() if value is not None}
        size = len(metadata.get("tokenizer.ggml.tokens", range(300)))
        return write_gguf(path, architecture, metadata, {**llama_tensors(size), **(tensors or {})}, encoding)

    byte_level = staticmethod(byte_level_vocabulary)
    sentencepiece = staticmethod(sentencepiece_vocabulary)
    write = staticmethod(write_gguf)


@pytest.fixture(scope="session")
def tiny_gguf() -> TinyGGUF:
    return TinyGGUF()
