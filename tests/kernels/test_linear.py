"""Which form of a linear map is chosen, that every choice gives the same numbers, and what it may take."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pando.kernels import linear
from pando.kernels.linear import ROWS, CpuLinear, _choose
from pando.kernels.timing import in_turns

from ..tiny import native_library

FORMS = ("torch", "packed", "native")


def times(**rows: tuple[float, ...]) -> dict[int, dict[str, float]]:
    """Of each form, a time for every number of rows."""
    return {count: {form: spent[i] for form, spent in rows.items()} for i, count in enumerate(ROWS)}


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (times(torch=(1, 1, 1, 1, 1)), ("torch", "torch", "torch", "torch", "torch")),
        (times(torch=(2, 2, 2, 1, 1), native=(1, 1, 1, 2, 2)), ("native", "native", "native", "torch", "torch")),
        # the packed layout everywhere: it wins, or loses by little
        (times(torch=(2, 2, 2, 2, 2), packed=(1, 1, 1, 1, 1)), ("packed",) * 5),
        (times(torch=(2, 2, 2, 2, 2), packed=(1, 1, 1, 1, 1), native=(0.95, 3, 3, 3, 3)), ("packed",) * 5),
        # in places: a second copy, where it wins clearly
        (times(torch=(3, 3, 3, 2, 2), packed=(2, 2, 2, 1, 1), native=(1, 1, 1, 3, 3)), ("native", "native", "native", "packed", "packed")),
        (times(torch=(1, 1, 1, 1, 1), packed=(2, 0.95, 0.95, 0.5, 0.95)), ("torch", "torch", "torch", "packed", "torch")),
        # nowhere: it never wins clearly
        (times(torch=(1, 1, 1, 1, 1), packed=(2, 0.95, 0.95, 0.95, 0.95)), ("torch",) * 5),
        (
            times(torch=(1, 1, 1, 1, 1), packed=(2, 0.95, 0.95, 2, 2), native=(2, 0.97, 0.97, 2, 2)),
            ("torch", "native", "native", "torch", "torch"),
        ),
    ],
)
def test_the_quickest_form_is_chosen(found: dict[int, dict[str, float]], chosen: tuple[str, ...]) -> None:
    assert tuple(_choose(found).values()) == chosen
    assert tuple(_choose(found)) == tuple(ROWS)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> object:
    """A CpuLinear whose measurement comes out as told, one form for each of the numbers of rows; and the weights that were packed."""

    def make(forms: tuple[str, ...], spare: int) -> tuple[CpuLinear, list[torch.Tensor]]:
        found = {rows: {form: 1.0 if form == best else 3.0 for form in FORMS} for rows, best in zip(ROWS, forms, strict=True)}
        monkeypatch.setattr(linear, "_measure", lambda samples, forms: found)
        made = CpuLinear([torch.randn(8, 8)], spare, native_library())
        pack, packed = made.forms["packed"], []

        def counted(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Apply:
            packed.append(weight)
            return pack(weight, bias)

        made.forms["packed"] = counted
        return made, packed

    return make


@pytest.mark.parametrize(
    "forms",
    [
        *((form,) * 5 for form in FORMS),
        ("native", "packed", "packed", "torch", "packed"),
        ("packed", "native", "native", "packed", "torch"),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_every_choice_gives_the_same_numbers(choosing, forms: tuple[str, ...], biased: bool) -> None:  # type: ignore[no-untyped-def]
    make, packed = choosing(forms, 1 << 30)
    weight, bias = torch.randn(70, 50), torch.randn(70) if biased else None
    apply = make(weight, bias)
    assert tuple(make.chosen.values()) == forms
    assert len(packed) == ("packed" in forms)
    for rows in (1, 4, 5, 16, 17, 40, 64, 65, 100):
        x = torch.randn(rows, 50)
        assert torch.allclose(apply(x), F.linear(x, weight, bias), atol=1e-4), rows
    serves = make.serves("native") or (lambda rows: False)
    told = [serves(rows) for rows in (1, 2, 4, 5, 16, 17, 64, 65)]  # at the edges of what each number of rows stands for
    assert told == [forms[place] == "native" for place in (0, 1, 1, 2, 2, 3, 3, 4)]


def test_second_copies_take_no_more_than_is_spare(choosing) -> None:  # type: ignore[no-untyped-def]
    weights = [torch.randn(16, 16) for _ in range(4)]
    size = weights[0].nbytes
    for spare, copies in ((0, 0), (size - 1, 0), (2 * size, 2), (3 * size + 5, 3)):
        make, packed = choosing(("native", "native", "native", "packed", "packed"), spare)
        for weight in weights:
            apply = make(weight, None)
            for rows in (1, 100):
                x = torch.randn(rows, 16)
                assert torch.allclose(apply(x), F.linear(x, weight), atol=1e-4)
        assert len(packed) == copies
        assert make.spare == spare - copies * size


def test_a_layout_that_always_wins_takes_the_place_of_the_weight(choosing) -> None:  # type: ignore[no-untyped-def]
    make, packed = choosing(("packed",) * 5, 0)
    make(torch.randn(16, 16), None)
    assert (len(packed), make.spare) == (1, 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_measured_here_gives_torchs_numbers(compiled: bool) -> None:
    weights = [torch.randn(48, 32) for _ in range(3)]
    make = CpuLinear(weights, 1 << 20, native_library() if compiled else None)
    assert set(make.chosen.values()) <= {"torch", "packed", *(["native"] if compiled else [])}
    for weight in weights:
        apply = make(weight, None)
        for rows in (1, 5, 40, 100):
            x = torch.randn(rows, 32)
            assert torch.allclose(apply(x), F.linear(x, weight), atol=1e-4)


def test_a_form_that_does_not_work_here_is_not_chosen() -> None:
    def broken(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Apply:
        raise RuntimeError("no such layout")

    found = linear._measure([torch.randn(8, 8)], {"torch": linear._torch, "packed": broken})
    assert all(set(spent) == {"torch"} for spent in found.values())
    assert set(_choose(found).values()) == {"torch"}


@pytest.mark.parametrize(("named", "has", "chosen"), [
    ("x86_64", False, torch.float32), ("x86_64", True, torch.bfloat16), ("aarch64", False, torch.bfloat16),
])  # fmt: skip
def test_bfloat16_is_not_taken_where_it_is_only_imitated(
    named: str, has: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quick it seems to be, on a machine that is busy with other things."""
    monkeypatch.setattr(linear, "machine", lambda: named)
    monkeypatch.setattr(linear, "_measure", lambda samples, _: {1: {"torch": float(samples[0].dtype.itemsize)}})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert linear.fastest_dtype() == chosen


def test_the_fastest_dtype_is_one_that_the_cpu_multiplies() -> None:
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert linear.fastest_dtype() in ({torch.float32, torch.bfloat16} if bfloat16 else {torch.float32})


def test_forms_are_timed_in_turns_and_the_shortest_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order, spent = [0.0], list[str](), {"a": iter((9, 3, 5)), "b": iter((1, 4, 2))}

    def run(name: str) -> None:
        order.append(name)
        now[0] += next(spent[name])

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert in_turns({name: partial(run, name) for name in spent}, repeats=2) == {"a": 3, "b": 2}
    assert order == ["a", "b"] * 3  # the first is no timing


def test_other_weights_are_read_in_each_run() -> None:
    read = list[int]()

    def apply(n: int, x: torch.Tensor) -> torch.Tensor:
        read.append(n)
        return x

    parts = linear._parts_of([partial(apply, n) for n in range(7)], 0.25)
    for _ in range(5):
        linear._apply_some(parts, torch.zeros(1))
    assert read == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
