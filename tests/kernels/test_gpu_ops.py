"""What surrounds attention on a GPU, against torch: through Triton's interpreter where there is no GPU."""

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pando.bench.random_model import random_model
from pando.engine.sampler import likeliest
from pando.kernels.ops import TorchOps
from pando.kernels.reference import Read, attend
from pando.kernels.rope import frequencies, turns
from pando.model import load
from pando.model.decoder import Step, plain_linear
from pando.model.load import Model

if TYPE_CHECKING:
    from pando.kernels.gpu import Device  # imports Triton

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 3, 17]


@pytest.fixture(scope="module")
def gpu_ops(interpreted: None) -> ModuleType:
    from pando.kernels import gpu_ops

    return gpu_ops


def device(gpu_ops: ModuleType) -> "Device":
    found: Device = gpu_ops.Device.of(DEVICE)
    return found


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random numbers between NaN: whoever reads or writes beside them will be found out."""
    room = torch.full((shape[0] + 2, *shape[1:]), torch.nan, dtype=dtype, device=DEVICE)
    room[1:-1] = torch.randn(shape, device=DEVICE) * scale
    return room[1:-1]


def close(found: Tensor, exact: Tensor, roundings: float = 2.0) -> bool:
    """As near as so many roundings of the largest number; the interpreter rounds 16 bits down, which costs twice as much."""
    assert found.shape == exact.shape
    unit = torch.finfo(found.dtype).eps * (1 if DEVICE.type == "cuda" else 2)
    return bool(((found.double() - exact).abs() <= roundings * unit * exact.abs().clamp_min(exact.abs().max() / 8)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [40, 576])
def test_a_sum_and_its_norm_in_one_launch(gpu_ops: ModuleType, dtype: torch.dtype, tokens: int, size: int) -> None:
    weight, x, more = (draw(*shape, dtype=dtype) for shape in ((size,), (tokens, size), (tokens, size)))
    apply = gpu_ops.TritonOps(device(gpu_ops)).add_rms_norm(weight, 1e-5)
    before, added = x.double(), more.clone()
    found = apply(x, more)
    assert close(x, before + more.double()) and torch.equal(more, added)
    assert close(found, F.rms_norm(x.double(), (size,), weight.double(), 1e-5))  # of the sum as it was rounded
    assert close(apply(x, None), found.double())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter rounds 16 bits in another way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stream_on_a_gpu_is_rounded_as_torch_rounds_it(gpu_ops: ModuleType, dtype: torch.dtype) -> None:
    x, more, weight = draw(9, 576, dtype=dtype), draw(9, 576, dtype=dtype), draw(576, dtype=dtype)
    expected = x + more
    gpu_ops.TritonOps(device(gpu_ops)).add_rms_norm(weight, 1e-5)(x, more)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gates_in_one_launch(gpu_ops: ModuleType, dtype: torch.dtype, tokens: int) -> None:
    ops = gpu_ops.TritonOps(device(gpu_ops))
    for size in (7, 1100):
        x = draw(tokens, 2 * size, dtype=dtype)
        assert close(ops.gate("silu")(x), TorchOps().gate("silu")(x.double()), 3)
    assert torch.equal(ops.gate("gelu")(x), TorchOps().gate("gelu")(x))  # torch's own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_weights_are_streamed_past_few_rows(gpu_ops: ModuleType, dtype: torch.dtype, tokens: int, biased: bool) -> None:
    from pando.kernels.gpu_linear import stream

    for outputs, inputs in ((33, 72), (6, 2100), (3, 5000)):
        x, weight = draw(tokens, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        bias = draw(outputs, dtype=dtype) if biased else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert close(stream(device(gpu_ops), x, weight, bias), exact, 32 if dtype == torch.float32 else 2)  # sums are in float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_gates_in_the_launch_that_streams_their_weights(gpu_ops: ModuleType, dtype: torch.dtype, tokens: int, biased: bool) -> None:
    from pando.kernels.gpu_linear import GpuLinear

    size, inputs = 19, 100
    x, weight = draw(tokens, inputs, dtype=dtype), draw(2 * size, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = draw(2 * size, dtype=dtype) if biased else None
    linear = GpuLinear(device(gpu_ops), {weight.shape: 4})
    apply = gpu_ops.TritonOps(device(gpu_ops)).gated(linear, weight, bias, "silu")
    exact = TorchOps().gate("silu")(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))
    assert close(apply(x), exact, 32 if dtype == torch.float32 else 4)  # as above


def test_only_as_many_rows_are_streamed_as_was_measured(gpu_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from pando.kernels import gpu_linear

    streamed: list[int] = []
    once = gpu_linear.stream

    def counted(device: object, x: Tensor, *others: object, gated: bool) -> Tensor:
        streamed.append(len(x))
        return once(device, x, *others, gated=gated)

    monkeypatch.setattr(gpu_linear, "stream", counted)
    ops, weight = gpu_ops.TritonOps(device(gpu_ops)), torch.randn(12, 8, device=DEVICE)
    linear = gpu_linear.GpuLinear(device(gpu_ops), {(12, 8): 2})
    plain, silu, gelu = linear(weight, None), ops.gated(linear, weight, None, "silu"), ops.gated(linear, weight, None, "gelu")
    other = linear(weight.T.contiguous(), None)
    for rows in (0, 1, 2, 3, 5):
        x = torch.randn(rows, 8, device=DEVICE)
        assert torch.allclose(plain(x), F.linear(x, weight), atol=1e-5)
        assert torch.allclose(silu(x), TorchOps().gate("silu")(F.linear(x, weight)), atol=1e-5)
        assert torch.allclose(gelu(x), TorchOps().gate("gelu")(F.linear(x, weight)), atol=1e-5)
        assert other(torch.randn(rows, 12, device=DEVICE)).shape == (rows, 8)
    assert streamed == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # a map without a measurement is torch's


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])])  # as the interpreter multiplies
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_multiplied_by_tiles(gpu_ops: ModuleType, dtype: torch.dtype, biased: bool, gated: bool) -> None:
    from pando.kernels.gpu_linear import by_tiles

    for outputs, inputs in ((70, 80), (8, 400)):
        both = 2 * outputs if gated else outputs
        weight = draw(both, inputs, dtype=dtype, scale=inputs**-0.5)
        bias = draw(both, dtype=dtype) if biased else None
        apply = by_tiles(device(gpu_ops), weight, bias, gated=gated)
        for tokens in (1, 16, 5, 64, 23, 33):  # what was made for one of them is used for others
            x = draw(tokens, inputs, dtype=dtype)
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            exact = TorchOps().gate("silu")(exact) if gated else exact
            assert close(apply(x), exact, 4 if gated else 2)


@pytest.mark.parametrize("gated", [False, True])
def test_only_such_numbers_of_rows_are_multiplied_by_tiles_as_were_measured(
    gpu_ops: ModuleType, monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    from pando.kernels import gpu_linear

    done: list[tuple[str, int]] = []

    def noted(name: str, outputs: int) -> object:
        return lambda x: done.append((name, len(x))) or x.new_empty(len(x), outputs)

    monkeypatch.setattr(gpu_linear, "stream", lambda device, x, *_, gated: noted("stream", 6)(x))  # type: ignore[operator]
    monkeypatch.setattr(gpu_linear, "by_tiles", lambda *_, gated: noted(f"tiles {gated}", 6))
    monkeypatch.setattr(gpu_linear, "product", lambda *_: noted("product", 6))
    weight = torch.randn(12, 16, device=DEVICE, dtype=torch.float16)
    linear = gpu_linear.GpuLinear(device(gpu_ops), {weight.shape: 2}, {weight.shape: [16, 64]})
    apply = linear.gated(weight, None, noted("product", 6)) if gated else linear(weight, None)
    rows = (0, 2, 3, 16, 17, 32, 33, 64, 65)
    for count in rows:
        apply(weight.new_empty(count, 16))
    tiles = f"tiles {gated}"
    ways = ("stream", "stream", tiles, tiles, "product", "product", tiles, tiles, "product")
    assert done == list(zip(ways, rows, strict=True))


def test_tiles_are_used_where_they_are_quicker(gpu_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from pando.kernels import gpu_linear

    overlapping = device(gpu_ops)._replace(overlaps=True)
    monkeypatch.setattr(gpu_linear, "by_tiles", lambda _, weight, bias, *, gated: lambda x: (x, gated))
    times, seen = iter([0.9, 1.0, 1.1, 1.0, 0.5, 1.0]), list[object]()

    def clock(work: object) -> float:
        seen.append(work())  # type: ignore[operator]
        return next(times)

    gate = gpu_ops.TritonOps(overlapping._replace(overlaps=device(gpu_ops).overlaps)).gate("silu")
    weights = [torch.randn(32, 16, device=DEVICE, dtype=torch.float16) for _ in range(2)]
    odd = [torch.randn(32, 16, device=DEVICE), torch.randn(32, 12, device=DEVICE, dtype=torch.float16), weights[0].T]
    odd.append(torch.randn(31 * 16 + 1, device=DEVICE).half()[1:].view(31, 16))
    found = gpu_linear.measured_tiles(overlapping, [*((each, gate) for each in weights), *((each, None) for each in odd)], clock)
    assert found == {(32, 16): [16, 64]}, "of 16 bits, and as a descriptor takes them"
    assert all(len(each) == 2 for each in seen), "all weights of a shape"  # type: ignore[arg-type]
    assert all(gated for each in seen[::2] for _, gated in each)  # type: ignore[attr-defined]
    assert [each[0].shape for each in seen[1::2]] == [(rows, 16) for rows in (16, 32, 64)], "gated, too"  # type: ignore[index]
    assert gpu_linear.measured_tiles(overlapping._replace(overlaps=False), [(weights[0], None)], clock) == {}
    times = iter([0.9, 1.0])  # then it raises, as a compiler might: what was found stays
    assert gpu_linear.measured_tiles(overlapping, [(weights[0], None)], clock) == {(32, 16): [16]}


@pytest.mark.parametrize(
    ("ratios", "most"),
    [((0.5, 0.7, 0.9, 1.1), 4), ((1.2, 0.5, 0.5, 0.5), 0), ((0.5, 2.0, 0.5, 0.5), 1), ((0.5, 0.5, 0.5, 0.5), 8)],
)
def test_weights_are_streamed_up_to_where_torch_is_quicker(gpu_ops: ModuleType, ratios: tuple[float, ...], most: int) -> None:
    from pando.kernels.gpu_linear import measured

    times = iter([each for ratio in ratios for each in (ratio, 1.0)])

    def clock(work: object) -> float:
        assert len(work()) == 2  # type: ignore[operator]
        return next(times)

    weights = [torch.randn(5, 8, device=DEVICE) for _ in range(2)]
    assert measured(device(gpu_ops), weights, clock) == {(5, 8): most}


def test_every_shape_is_measured_for_itself(gpu_ops: ModuleType) -> None:
    from pando.kernels.gpu_linear import measured

    weights = [torch.randn(shape, device=DEVICE) for shape in ((5, 8), (8, 4), (5, 8))]
    tried: list[int] = []

    def clock(work: object) -> float:
        tried.append(len(work()))  # type: ignore[operator]
        return 1.0

    assert measured(device(gpu_ops), weights, clock) == {(5, 8): 8, (8, 4): 8}
    assert tried == [2] * 8 + [1] * 8


@pytest.mark.skipif(DEVICE.type == "cpu", reason="launches overlap on a GPU only")
def test_launches_that_overlap_answer_as_those_that_do_not(gpu_ops: ModuleType) -> None:
    """Forty launches that need each other, again and again: whoever does not wait will be found out."""
    from pando.kernels.gpu_linear import stream

    ups = [draw(2 * 1408, 512, dtype=torch.bfloat16, scale=0.06) for _ in range(20)]
    downs = [draw(512, 1408, dtype=torch.bfloat16, scale=0.06) for _ in range(20)]
    weight, start = draw(512, dtype=torch.bfloat16), draw(1, 512, dtype=torch.bfloat16)

    def chain(where: "Device") -> Tensor:
        norm, x, more = gpu_ops.TritonOps(where).add_rms_norm(weight, 1e-5), start.clone(), None
        for up, down in zip(ups, downs, strict=True):
            more = stream(where, stream(where, norm(x, more), up, None, gated=True), down, None)
        return norm(x, more)

    expected = chain(device(gpu_ops)._replace(overlaps=False))
    chain(device(gpu_ops))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(device(gpu_ops))
    for _ in range(50):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="launches overlap on a GPU only")
@pytest.mark.parametrize(("keys", "shift"), [(40, 0), (2000, 0), (40, 7), (2000, 7)], ids=["one part", "merged", "shifted", "both"])
@pytest.mark.parametrize("rows", [1, 4])
def test_layers_whose_launches_overlap_answer_as_those_that_do_not(gpu_ops: ModuleType, keys: int, shift: int, rows: int) -> None:
    """Maps, the write of keys and values, attention and its merge, ten layers behind each other, again and again."""
    from pando.kernels.gpu import TritonLowering
    from pando.kernels.gpu_linear import by_tiles, stream
    from pando.kernels.reads import joined
    from pando.kernels.reference import Geometry

    heads, kv_heads, size, page = 8, 2, 64, 64
    (freqs, factor), wide = frequencies(size, 10_000.0), heads * size
    pages = -(-keys // page)
    reads = joined(page, [(list(range(pages)), keys, 0, list(range(rows)), [shift] * rows)])
    at, slots = torch.arange(keys + shift, keys + shift + rows, device=DEVICE), torch.arange(keys - rows, keys, device=DEVICE)
    maps = [[draw(n, wide, dtype=torch.bfloat16, scale=wide**-0.5) for n in (wide + 2 * kv_heads * size, wide)] for _ in range(10)]
    weight, start, turn = draw(wide, dtype=torch.bfloat16), draw(rows, wide, dtype=torch.bfloat16), turns(at, freqs.to(DEVICE))
    kept = torch.randn(2, 10, pages * page, kv_heads, size, device=DEVICE).bfloat16()

    def chained(where: "Device") -> Callable[[], Tensor]:
        geometry, (k, v) = Geometry(heads, kv_heads, size, size**-0.5, freqs.to(DEVICE), factor), kept.clone()
        ops, lowering = gpu_ops.TritonOps(where), TritonLowering(where, torch.bfloat16, reads, at, geometry)
        norm, linear = ops.add_rms_norm(weight, 1e-5), by_tiles if rows > 1 else lambda *given: lambda x: stream(given[0], x, *given[1:])
        made = [[linear(where, each, None) for each in layer] for layer in maps]

        def chain() -> Tensor:
            x, more = start.clone(), None
            for layer, (qkv, o) in enumerate(made):
                both = qkv(norm(x, more)).view(rows, heads + 2 * kv_heads, size)
                q, turned = ops.rotate_and_store(both, turn, slots, k[layer], v[layer])
                more = o(lowering.attend(q, turned, k[layer], v[layer]).flatten(1))
            return norm(x, more)

        return chain

    expected, chain = chained(device(gpu_ops)._replace(overlaps=False))(), chained(device(gpu_ops))
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rotated", [16, 32, 80])
def test_new_keys_and_values_are_written_as_the_definition_has_it(gpu_ops: ModuleType, rotated: int) -> None:
    torch.manual_seed(rotated)
    size, heads, kv_heads, slots = 80 if rotated == 80 else 32, 6, 2, torch.tensor([7, 3, 40])
    qkv = torch.randn(3, heads + 2 * kv_heads, size, device=DEVICE)
    turn = turns(torch.tensor([5, 900, 2]), frequencies(rotated, 1e4)[0]).to(DEVICE)
    pools = [torch.zeros(2, 64, kv_heads, size, device=DEVICE) for _ in range(2)]
    both = TorchOps(), gpu_ops.TritonOps(device(gpu_ops))
    answers = [ops.rotate_and_store(qkv, turn, slots.to(DEVICE), *pool) for ops, pool in zip(both, pools, strict=True)]
    for wanted, found in (*zip(*answers, strict=True), pools):
        assert torch.allclose(wanted, found, atol=1e-6)


def test_a_first_try_shows_that_the_kernels_work(gpu_ops: ModuleType) -> None:
    for dtype in DTYPES:
        gpu_ops.probe(device(gpu_ops), dtype)


def logits(model: Model) -> Tensor:
    """Of a prompt of three tokens, and of one token behind it."""
    pool = torch.full((2, model.config.layers, 4, model.config.kv_heads, model.config.head_dim), torch.nan, device=DEVICE)
    every, answers = torch.arange(4, device=DEVICE), []
    for here in (every[:3], every[3:]):
        read = Read(every[: int(here[-1]) + 1], 0, every[: len(here)], torch.zeros_like(here))

        def attention(q: Tensor, turned: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read] = (read,), at: Tensor = here) -> Tensor:
            return attend(q, k, v, reads, at, model.decoder.geometry)

        step = Step(7 + here, here, here, every[: len(here)], attention)
        answers.append(model.decoder.forward(step, SimpleNamespace(layer=lambda index: tuple(pool[:, index]))))
    return torch.cat(answers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 8192, 20_011])
def test_the_likeliest_token_is_the_first_of_the_largest_and_none_is_told_where_none_can_be_chosen(
    gpu_ops: ModuleType, dtype: torch.dtype, size: int
) -> None:
    logits = draw(9, size, dtype=dtype, scale=2.0)  # of 16 bits, where many are equal
    logits[1] = 1.0
    logits[2], logits[3] = -torch.inf, -torch.inf
    logits[3, -1] = -7.0
    logits[4, size // 2] = torch.nan
    logits[5, size // 3] = torch.inf
    logits[6], logits[7, -1] = torch.nan, logits[7].max()
    tokens, told = gpu_ops.likeliest(logits, -1)
    kept, cpu = tokens.tolist(), logits.double().cpu()
    for row in (0, 1, 3, 7, 8):
        first = (cpu[row] == cpu[row].max()).nonzero()[0].item()
        assert (kept[row], told.tolist()[row]) == (first, first)
    assert [told.tolist()[row] for row in (2, 4, 5, 6)] == [-1] * 4
    assert all(0 <= token < size for token in kept), "the next step takes something in any case"
    same, also = likeliest(logits)
    assert told.tolist() == also.tolist()
    assert [kept[row] for row in (0, 1, 3, 7, 8)] == [same.tolist()[row] for row in (0, 1, 3, 7, 8)]


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model as it is made where there is a GPU. Here its kernels are interpreted, which is slow: all but the head streams single rows."""
    from pando.kernels import gpu_linear

    monkeypatch.setattr(gpu_linear, "measured", lambda device, weights, clock: {each.shape: 1 for each in weights if len(each) < 300})
    monkeypatch.setattr(load, "_on_cpu", lambda weights, place, library: load._on_gpu(weights, torch.float32, place))
    return random_model("tiny", DEVICE, torch.float32, compiled=False)


def test_a_model_of_these_kernels_answers_as_one_of_torchs(gpu_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(monkeypatch)
    monkeypatch.setattr(load, "_on_gpu", lambda weights, kind, place: (plain_linear, TorchOps()))
    expected = logits(random_model("tiny", DEVICE, torch.float32, compiled=False))
    assert torch.allclose(logits(model), expected, atol=1e-5 * float(expected.abs().max()))


def test_kernels_that_do_not_work_here_are_not_used_and_that_is_said_once(
    gpu_ops: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("no ptxas\nhere")

    monkeypatch.setattr(gpu_ops, "probe", broken)
    assert logits(on_gpu(monkeypatch)).isfinite().all()
    (said,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "no ptxas here" in said
