"""Rotations. A pair of adjacent elements is one complex number, so a rotation is one complex product.

Checkpoints pair element i with element i + dim/2; `interleave` gives the order that brings the pairs together. Applied to the rows of
the query and key weights at load, it changes no dot product, and the loop over layers never shuffles a head again.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def interleave(dim: int, head_dim: int) -> Tensor:
    """The order of a head's elements that makes rotated pairs adjacent; what is not rotated stays last."""
    half = dim // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half) + half), dim=1).flatten()
    return torch.cat((pairs, torch.arange(dim, head_dim)))


def frequencies(dim: int, theta: float, scaling: Mapping[str, float | str] | None = None) -> tuple[Tensor, float]:
    """Angular frequency of each pair, fp32 [dim / 2], and the factor that multiplies every rotated element (YaRN; otherwise 1)."""
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return freqs, 1.0
    number = {name: float(value) for name, value in scaling.items() if not isinstance(value, str)}
    kind = scaling["type"]
    if kind == "linear":
        return freqs / number["factor"], 1.0
    if kind == "llama3":
        return _llama3(freqs, number), 1.0
    if kind == "yarn":
        return _yarn(freqs, dim, theta, number)
    raise ValueError(f"rope scaling {kind!r} is not one of linear, llama3, yarn")


def _llama3(freqs: Tensor, number: Mapping[str, float]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high, factor = number["low_freq_factor"], number["high_freq_factor"], number["factor"]
    turns = number["original_max_position_embeddings"] * freqs / (2 * math.pi)  # over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (blend + (1 - blend) / factor)


def _yarn(freqs: Tensor, dim: int, theta: float, number: Mapping[str, float]) -> tuple[Tensor, float]:
    """Pairs that turn often keep their frequency, pairs that turn seldom are stretched, by a ramp between; logits gain a temperature."""
    factor, context = number["factor"], number["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(number.get("beta_fast", 32.0))
    high = pair_that_turns(number.get("beta_slow", 1.0))
    if number.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    scaled = freqs * (1 - ramp) + freqs / factor * ramp
    return scaled, _yarn_factor(factor, number)


def _yarn_factor(factor: float, number: Mapping[str, float]) -> float:
    if "attention_factor" in number:
        return number["attention_factor"]

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if number.get("mscale") and number.get("mscale_all_dim"):
        return temperature(number["mscale"]) / temperature(number["mscale_all_dim"])
    return temperature(1.0)


def turns(positions: Tensor, freqs: Tensor, factor: float = 1.0) -> Tensor:
    """The rotation of each position: complex64 [T, 1, dim / 2]."""
    angles = positions[:, None] * freqs
    return torch.polar(torch.full_like(angles, factor), angles)[:, None]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates the first elements of each head of x [T, H, D] by turn [T, 1, dim / 2]; computes in fp32, answers in x's dtype."""
    dim = 2 * turn.shape[-1]
    head = x if x.shape[-1] == dim else x[..., :dim]
    pairs = torch.view_as_complex(head.to(torch.float32).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    return turned if x.shape[-1] == dim else torch.cat((turned, x[..., dim:]), dim=-1)
