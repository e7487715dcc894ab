"""The C kernels against torch's; and what happens where they cannot be compiled."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pando.config import EngineConfig
from pando.engine.llm import LLM
from pando.engine.request import Request
from pando.kernels import compiling, native
from pando.kernels.native import Dense, Library, NativeLowering, NativeOps, Unavailable, native_linear
from pando.kernels.ops import Attend, Maps, TorchOps
from pando.kernels.reads import joined
from pando.kernels.reference import Geometry
from pando.kernels.rope import frequencies, turns

from ..tiny import greedy, native_library, run, tiny_engine, tiny_model, tiny_tokenizer
from .steps import by_steps

DTYPES = [torch.float32, torch.bfloat16]
QUICKLY = ("-O0",)
MEASURE = Dense.measure  # in tests, an engine does without it


def close(out: torch.Tensor, exact: torch.Tensor, roundings: int = 4) -> bool:
    """Within a few roundings of the dtype, next to the largest of the numbers."""
    assert out.shape == exact.shape
    return bool((out.double() - exact.double()).abs().max() <= roundings * torch.finfo(out.dtype).eps * max(1.0, float(exact.abs().max())))


# ---- linear maps by tiles


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64, 65, 130])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (32, 33), (31, 32), (160, 576)])
def test_a_product_by_tiles_is_the_product(rows: int, shape: tuple[int, int]) -> None:
    """Tile instructions as this machine has them, and as they are defined; shapes that do not fill a tile go another way."""
    x, w, bias = (torch.randn(*size).to(torch.bfloat16) for size in ((rows, shape[1]), shape, shape[:1]))
    for options in ((), ("-DTILES_IN_C",)):
        library = native_library(torch.bfloat16, *options)
        assert close(native_linear(library, w, bias)(x), F.linear(x.double(), w.double(), bias.double()))
        assert close(native_linear(library, w, None)(x), F.linear(x.double(), w.double()))


# ---- steps of a layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 33])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
def test_the_norm_is_the_root_mean_square(dtype: torch.dtype, rows: int, size: int) -> None:
    wide = (torch.randn(rows, size + 3) * 5).to(dtype)
    weight = (1 + torch.randn(size) / 4).to(dtype)
    apply = NativeOps(native_library(dtype)).rms_norm(weight, 1e-5)
    for x in (wide[:, :size], wide[:, :size].contiguous()):  # rows apart, and one behind the other
        exact = TorchOps().rms_norm(weight.double(), 1e-5)(x.double())
        assert apply(x).dtype == dtype
        assert not rows or close(apply(x), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 48, 67])
def test_the_gate_is_silu(dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(11, 2 * size) * 4).to(dtype)
    out = NativeOps(native_library(dtype)).gate("silu")(x)
    assert out.dtype == dtype
    assert close(out, TorchOps().gate("silu")(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_opens_and_closes_without_overflow(dtype: torch.dtype) -> None:
    steep = torch.tensor([0.0, 20.0, 87.0, 88.0, 89.0, 126.0, 1e3, 1e4, 1e10])
    gate = torch.cat((steep, -steep))
    for extra in range(16):  # in whole vectors and in what is left over
        x = torch.cat((gate[extra:], torch.full((len(gate) - extra,), 2.0)))[None].to(dtype)
        out = NativeOps(native_library(dtype)).gate("silu")(x)
        exact = TorchOps().gate("silu")(x.double())
        assert out.isfinite().all()
        assert torch.allclose(out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none_in_every_step(dtype: torch.dtype) -> None:
    ops = NativeOps(native_library(dtype))
    for place in (3, 20):  # in whole vectors and in what is left over
        x = torch.randn(2, 42).to(dtype)
        x[1, place] = torch.nan
        w = torch.randn(5, 42).to(dtype)
        for out, lost in ((ops.rms_norm(w[0], 1e-5)(x), 42), (ops.gate("silu")(x), 1), (native_linear(ops.library, w, None)(x), 5)):
            assert out[0].isfinite().all()
            assert out[1].isnan().sum() == lost


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_gates_are_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20).to(dtype)
    for activation in ("gelu", "gelu_tanh", "relu"):
        assert torch.equal(NativeOps(native_library(dtype)).gate(activation)(x), TorchOps().gate(activation)(x))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [None, 16, 8])  # of 16: no positions, all of a head, its first half
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_keys_are_rotated_into_their_slots(dtype: torch.dtype, rotated: int | None, rows: int) -> None:
    heads, kv_heads, size = 6, 2, 16
    qkv = torch.randn(rows, heads + 2 * kv_heads, size).to(dtype)
    turn = None if rotated is None else turns(torch.arange(rows) * 7 + 3, frequencies(rotated, 1e4)[0], 1.25)
    slots = torch.randperm(50)[:rows]
    pools = [torch.full((50, kv_heads, size), 9.0, dtype=dtype) for _ in range(4)]
    q, turned = NativeOps(native_library(dtype)).rotate_and_store(qkv, turn, slots, *pools[:2])
    other_q, other_turned = TorchOps().rotate_and_store(qkv, turn, slots, *pools[2:])
    assert torch.equal(q, other_q)
    assert close(turned, other_turned)
    assert close(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    assert (pools[0] == 9.0).all(-1).all(-1).sum() == 50 - rows, "something else than the slots was written"


# ---- a layer in one call


def layer_maps(dtype: torch.dtype, biased: bool, normed: bool = False) -> Maps:
    """Of 6 and 2 heads of 32, whose queries and keys have norms or none."""
    size, inner = 96, 80

    def made(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
        return weight.to(dtype), bias.to(dtype) if biased else None

    norms = [(1 + torch.randn(shape) / 4).to(dtype) for shape in ((size,), (size,), (8, 32))]
    qk_norm = norms[2] if normed else None
    return Maps(
        norms[0], made(10 * 32, size), qk_norm, made(size, 6 * 32), norms[1], made(2 * inner, size), made(size, inner), 6, 2, 32, 1e-5
    )


@pytest.mark.parametrize("library", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, "-DTILES_IN_C")])
@pytest.mark.parametrize("rows", [1, 3, 20, 70])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shift", [0, 8])
def test_a_layer_in_one_call_is_its_steps_one_by_one(
    library: tuple[Any, ...], rows: int, biased: bool, adds: bool, normed: bool, shift: int
) -> None:
    """To the last bit: tokens of one row behind 40 others, in a placement that may be moved, and another that is moved as far."""
    dtype, c = library[0], native_library(*library)
    ops, maps, geometry = NativeOps(c), layer_maps(dtype, biased, normed), Geometry(6, 2, 32, 32**-0.5, frequencies(32, 1e4)[0])
    at = 40 + torch.arange(rows)
    turn, slots = turns(at, frequencies(32, 1e4)[0]), 16 + at
    moved = [([place], 16, first, range(rows), [shift] * rows) for place, first in ((0, 0), (7, 16))]
    reads = joined(16, [*moved, (list(range(1, 7)), 8 + rows, 32, range(rows), [0] * rows)])
    pools = torch.randn(2, 144, 2, 32).to(dtype)
    x, more = torch.randn(2, rows, 96).to(dtype)
    lowering = NativeLowering(c, Dense(), reads, at, geometry)
    linear = [native_linear(c, *each) for each in (maps.qkv, maps.o, maps.up, maps.down)]

    stream, (k, v) = x.clone(), pools.clone()
    found = by_steps(ops, maps, linear, stream, more if adds else None, turn, slots, lowering.attend, k, v)

    whole, others, (other_k, other_v) = ops.whole(maps), x.clone(), pools.clone()
    assert whole is not None
    done = whole(others, more.clone() if adds else None, turn, slots, lowering.attend, other_k, other_v)
    assert done is not None
    for mine, one_by_one in ((done, found), (others, stream), (other_k, k), (other_v, v)):
        assert mine.isfinite().all()
        assert torch.equal(mine, one_by_one)


def test_functions_of_others_with_the_same_names_are_not_called(tmp_path: Path) -> None:
    (tmp_path / "others.c").write_text("".join(f"void {name}(void) {{}}\n" for name in ("linear", "rms_norm", "silu_gate", "attend")))
    compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "others.so", tmp_path / "others.c"], check=True)
    script = (
        f"import ctypes, torch; ctypes.CDLL({str(tmp_path / 'others.so')!r}, mode=ctypes.RTLD_GLOBAL)\n"
        f"from {__name__} import test_a_layer_in_one_call_is_its_steps_one_by_one as check\n"
        "check((torch.float32,), 3, False, True, False, 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=120)


def test_what_c_cannot_do_alone_is_left_as_it_is() -> None:
    """A layer is done step by step where others attend, torch answers a read, or torch's maps are the faster ones."""
    c, maps, freqs = native_library(), layer_maps(torch.float32, False), frequencies(32, 1e4)[0]
    geometry, at, slots = Geometry(6, 2, 32, 32**-0.5, freqs), 40 + torch.arange(20), 16 + torch.arange(20)
    x, pools = torch.randn(20, 96), torch.randn(2, 160, 2, 32)

    def lowering(shift: int, dense: Dense) -> NativeLowering:
        return NativeLowering(c, dense, joined(16, [(list(range(9)), 40, 0, range(20), [shift] * 20)]), at, geometry)

    def tried(attend: Attend, ops: NativeOps, k: torch.Tensor) -> bool:
        stream, more, keys, values = x.clone(), torch.ones_like(x), k.clone(), pools[1].clone()
        whole = ops.whole(maps)
        assert whole is not None
        done = whole(stream, more, turns(at, freqs), slots, attend, keys, values)
        unchanged = torch.equal(stream, x) and torch.equal(keys, k) and torch.equal(values, pools[1]) and bool((more == 1).all())
        assert (done is None) == unchanged
        return done is not None

    plain, few = lowering(0, Dense()), NativeOps(c, lambda rows: rows < 20)
    assert tried(plain.attend, NativeOps(c), pools[0])
    assert not tried(lambda q, turned, k, v: q, NativeOps(c), pools[0])
    assert tried(lowering(8, Dense()).attend, NativeOps(c), pools[0])
    assert not tried(lowering(0, Dense(True, True)).attend, NativeOps(c), pools[0])
    assert not tried(plain.attend, NativeOps(c), pools[0].to(torch.float8_e4m3fn))
    assert not tried(plain.attend, few, pools[0])
    assert NativeOps(c, None).whole(maps) is None


def test_one_row_is_multiplied_as_it_is_among_others() -> None:
    """By tiles, where there are any: an answer alone is that of a batch, also where nothing is left of a sum but its roundings."""
    half, weights = torch.randn(20, 160), torch.randn(64, 160)
    x, w = (torch.cat(both, 1).to(torch.bfloat16) for both in ((half, -half.roll(7, 1)), (weights, weights.roll(7, 1))))
    apply = native_linear(native_library(torch.bfloat16, "-DTILES_IN_C"), w, None)
    for row in (0, 7, 19):
        assert torch.equal(apply(x[row : row + 1])[0], apply(x)[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 16), (31, 33), (66, 100), (65, 131)])
def test_a_linear_map_of_any_shape_equals_torchs(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    for given in (None, bias):
        apply = native_linear(native_library(dtype), weight, given)
        for rows in (*range(10), 33):
            x = torch.randn(rows, shape[1]).to(dtype)
            exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
            assert apply(x).dtype == dtype
            assert apply(x).shape == exact.shape
            assert not rows or close(apply(x), exact)


def test_a_linear_map_takes_weights_and_rows_that_lie_apart() -> None:
    weight, x = torch.randn(20, 24).t(), torch.randn(5, 40)[:, 3:23]
    assert close(native_linear(native_library(), weight, None)(x), F.linear(x.double(), weight.double()))


def test_a_linear_map_keeps_its_weight_alive() -> None:
    apply = native_linear(native_library(), torch.ones(512, 512), torch.ones(512))
    others = [torch.full((512, 512), 7.0) for _ in range(8)]  # would take its place
    assert (apply(torch.ones(1, 512)) == 513).all(), len(others)


def test_which_kernel_is_faster_is_measured_for_both_kinds_of_read() -> None:
    found = MEASURE(native_library(), Geometry(2, 1, 16, 0.25))
    assert all(isinstance(faster, bool) for faster in found)


# ---- compiling


class Calls:
    """Counts what the compiler was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled = 0
        self.run: Callable[..., Any] = subprocess.run
        monkeypatch.setattr(compiling.subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.compiled += "-c" in command
        return self.run(command, **options)


def test_the_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, folder = Calls(monkeypatch), tmp_path / "a" / "b"
    for _ in range(2):
        assert isinstance(native.load(torch.float32, folder, QUICKLY), Library)
        assert calls.compiled == 1
    assert len(list(folder.iterdir())) == 1, "something was left behind"


def test_another_source_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, source = Calls(monkeypatch), tmp_path / "native.c"
    names = ("linear", "linear_blocks", "rms_norm", "silu_gate", "rotate_and_store", "rotate", "attend", "layer", "width", "has_tiles")
    functions = "".join(f"void {name}(void) {{}}\n" for name in names)
    monkeypatch.setattr(compiling, "SOURCE", source)
    for text in (functions, functions + "/* changed */"):
        source.write_text(text)
        assert isinstance(native.load(torch.float32, tmp_path), Library)
    assert calls.compiled == 2
    source.write_text("void linear(void) {}")
    found = native.load(torch.float32, tmp_path)
    assert isinstance(found, Unavailable) and "rms_norm" in found.reason


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = native.load(torch.float32, tmp_path)
    assert isinstance(found, Unavailable) and "no C compiler" in found.reason


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc", "/"])
def test_a_compiler_that_fails_is_named(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    found = native.load(torch.float32, tmp_path / "new")
    assert isinstance(found, Unavailable) and compiler in found.reason


def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "native.c"
    source.write_text("#error this cannot work\n")
    monkeypatch.setattr(compiling, "SOURCE", source)
    found = native.load(torch.float32, tmp_path / "new")
    assert isinstance(found, Unavailable) and "this cannot work" in found.reason
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = native.load(torch.float32, tmp_path / "file" / "native")
    assert isinstance(found, Unavailable) and "file" in found.reason


def test_a_dtype_they_are_not_made_for_is_named(tmp_path: Path) -> None:
    found = native.load(torch.float16, tmp_path)
    assert isinstance(found, Unavailable) and "float16" in found.reason


@pytest.fixture(scope="module")
def quickly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of kernels that are compiled in little time, whatever they take to run."""
    folder = tmp_path_factory.mktemp("quickly")
    assert isinstance(native.load(torch.float32, folder, QUICKLY), Library)
    [made] = folder.iterdir()
    return made


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_compiled_anew(share: float, quickly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk or a crash leaves it; loaded, it would end the process."""
    (tmp_path / quickly.name).write_bytes(quickly.read_bytes()[: int(share * quickly.stat().st_size)])
    calls = Calls(monkeypatch)
    for _ in range(2):
        assert isinstance(native.load(torch.float32, tmp_path, QUICKLY), Library)
        assert calls.compiled == 1
    assert [path.name for path in tmp_path.iterdir()] == [quickly.name]


@pytest.mark.parametrize("spoil", [lambda content: b"garbage" * 1000, lambda content: content[:4096] + bytes(len(content) - 4096)])
def test_a_spoilt_file_is_compiled_anew(
    spoil: Callable[[bytes], bytes], quickly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / quickly.name).write_bytes(spoil(quickly.read_bytes()))
    calls = Calls(monkeypatch)
    assert isinstance(native.load(torch.float32, tmp_path, QUICKLY), Library)
    assert calls.compiled == 1


def attended() -> torch.Tensor:
    """Of 60 tokens over 460 keys."""
    geometry, make = Geometry(4, 2, 64, 0.125), torch.Generator().manual_seed(1)
    reads = joined(512, [([0], 460, 0, range(60), [0] * 60)])
    q, k, v = (torch.randn(count, heads, 64, dtype=torch.float32, generator=make) for count, heads in ((60, 4), (512, 2), (512, 2)))
    return NativeLowering(native_library(), Dense(), reads, 400 + torch.arange(60), geometry).attend(q, q, k, v).clone()


def test_what_a_process_has_for_a_default_dtype_is_no_matter() -> None:
    """C writes floats, whatever torch would make of a tensor that says nothing."""
    expected, torch_has = attended(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attended()
    finally:
        torch.set_default_dtype(torch_has)
    assert torch.equal(found, expected)


def test_a_thread_with_a_small_stack_may_attend() -> None:
    script = (
        f"import threading; from {__name__} import attended; import torch; torch.set_num_threads(1); attended()\n"
        "threading.stack_size(256 * 1024); found = []; thread = threading.Thread(target=lambda: found.append(attended()))\n"
        "thread.start(); thread.join(); assert found and torch.equal(found[0], attended())"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=120)


# ---- the whole


def test_the_engine_says_the_same_with_and_without_them() -> None:
    prompts = [list(range(start, start + length)) for start, length in ((0, 1), (3, 30), (3, 45), (100, 64))]
    said = []
    for compiled in (True, False):
        engine = tiny_engine(tiny_model(native=compiled))
        said.append(run(engine, [Request(f"r{i}", prompt, greedy(24)) for i, prompt in enumerate(prompts)]))
    for name in said[1]:
        assert [event.token for event in said[0][name]] == [event.token for event in said[1][name]]
    assert len({tuple(event.token for event in events) for events in said[0].values()}) > 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of one layer, as files."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    make = torch.Generator().manual_seed(1)
    shapes = {"embed_tokens": (257, 32), "norm": (32,)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (rows, 32) for name, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32))}
    shapes |= {"layers.0.mlp.gate_proj": (48, 32), "layers.0.mlp.up_proj": (48, 32), "layers.0.mlp.down_proj": (32, 48)}
    shapes |= {f"layers.0.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    weights = {f"model.{name}.weight": torch.randn(shape, generator=make) * 0.5 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer()._text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def answer(checkpoint: Path, *, native: bool) -> tuple[list[int], bool]:
    config = EngineConfig(model=str(checkpoint), device="cpu", dtype="float32", kv_cache_tokens=256, native=native, disk_gib=0)
    llm = LLM.from_config(config)
    said = run(llm.engine, [Request("r", list(range(20)), greedy(24))])["r", 0]
    return [event.token for event in said], llm.engine.model.library is not None


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def test_a_model_answers_the_same_without_a_compiler(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PANDO_HOME", str(tmp_path / "home"))
    tokens, compiled = answer(checkpoint, native=True)
    assert compiled and not warnings(caplog)
    assert len(list((tmp_path / "home" / "native").glob("*.so"))) == 1
    assert answer(checkpoint, native=False) == (tokens, False)
    assert not warnings(caplog), "what was asked for is no reason to warn"
    shutil.rmtree(tmp_path / "home")
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING):
        assert answer(checkpoint, native=True) == (tokens, False)
    assert "false failed" in caplog.text
