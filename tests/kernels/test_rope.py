"""Rotations: what a position does to a dot product, and how long contexts stretch it."""

import math

import pytest
import torch

from pando.kernels.rope import frequencies, interleave, rotate, turns

DIM = 16
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}


def test_the_pairs_of_a_checkpoint_come_together_and_the_rest_stays_last() -> None:
    assert interleave(6, 8).tolist() == [0, 3, 1, 4, 2, 5, 6, 7]


def test_a_dot_product_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    freqs, _ = frequencies(DIM, 1e4)
    q, k = torch.randn(2, 1, 1, DIM)

    def product(query_at: int, key_at: int) -> float:
        turned = [rotate(x, turns(torch.tensor([at]), freqs)) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_adjacent_pairs_turn_as_the_halves_of_a_checkpoint_do() -> None:
    """The textbook rotation of x[i] with x[i + dim / 2], and ours of the same elements in the other order."""
    torch.manual_seed(0)
    freqs, _ = frequencies(DIM, 1e4)
    x, at = torch.randn(5, 2, DIM), torch.arange(5) * 7
    angle = (at[:, None] * freqs)[:, None]
    a, b = x.chunk(2, dim=-1)
    halves = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
    order = interleave(DIM, DIM)
    assert torch.allclose(rotate(x[..., order], turns(at, freqs)), halves[..., order], atol=1e-5)


def test_position_zero_changes_nothing_and_what_is_not_rotated_stays() -> None:
    freqs, _ = frequencies(8, 1e4)
    x = torch.randn(3, 2, DIM)
    assert torch.equal(rotate(x, turns(torch.zeros(3, dtype=torch.int64), freqs)), x)
    turned = rotate(x, turns(torch.tensor([1, 2, 3]), freqs))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.allclose(turned[..., :8], x[..., :8])


def test_a_rotation_keeps_lengths_but_for_its_factor() -> None:
    freqs, _ = frequencies(DIM, 1e4)
    x = torch.randn(3, 2, DIM)
    turned = rotate(x, turns(torch.tensor([1, 50, 3000]), freqs, factor=1.5))
    assert torch.allclose(turned.norm(dim=-1), 1.5 * x.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rotated_in_thirty_two(dtype: torch.dtype) -> None:
    freqs, _ = frequencies(DIM, 1e4)
    x = torch.randn(3, 2, DIM).to(dtype)
    turn = turns(torch.tensor([1, 50, 3001]), freqs)
    assert rotate(x, turn).dtype == dtype
    assert torch.equal(rotate(x, turn), rotate(x.float(), turn).to(dtype))


def test_frequencies_fall_from_one_turn_per_radian_to_nearly_theta() -> None:
    freqs, factor = frequencies(4, 1e4)
    assert freqs.tolist() == pytest.approx([1.0, 0.01])
    assert factor == 1.0


def test_linear_scaling_stretches_every_wavelength() -> None:
    plain, _ = frequencies(DIM, 1e4)
    scaled, factor = frequencies(DIM, 1e4, {"type": "linear", "factor": 4.0})
    assert torch.allclose(scaled, plain / 4)
    assert factor == 1.0


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
    plain, _ = frequencies(128, 5e5)
    scaled, factor = frequencies(128, 5e5, scaling)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(scaled[short], plain[short])
    assert torch.allclose(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
    assert (scaled.diff() < 0).all()
    assert factor == 1.0


def test_yarn_keeps_what_turns_often_stretches_what_turns_seldom_and_warms_the_logits() -> None:
    plain, _ = frequencies(64, 1e4)
    scaled, factor = frequencies(64, 1e4, {**YARN, "original_max_position_embeddings": 2048.0})
    assert torch.equal(scaled[0], plain[0])
    assert torch.allclose(scaled[-1], plain[-1] / 4)
    assert ((scaled <= plain) & (scaled >= plain / 4 * (1 - 1e-6))).all()
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_the_factor_of_yarn_may_be_given() -> None:
    assert frequencies(DIM, 1e4, {**YARN, "attention_factor": 1.25})[1] == 1.25
    assert frequencies(DIM, 1e4, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})[1] == 1.0
    assert frequencies(DIM, 1e4, {**YARN, "factor": 1.0})[1] == 1.0


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="'spiral' is not one of linear, llama3, yarn"):
        frequencies(DIM, 1e4, {"type": "spiral"})
