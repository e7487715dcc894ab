"""A model of a known shape with random weights, made in place: how fast a shape is does not depend on what it learnt."""

from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers
from torch import Generator, Tensor, device, dtype, empty, ones

from ..kernels.fp8 import Weight, scaled
from ..model.config import ModelConfig, Rope
from ..model.load import Model, assembled
from ..model.tokenizer import Tokenizer
from ..model.weights import LayerWeights, Norm, Weights

SPREAD = 0.02
SHAPES = {  # hidden size, layers, heads, KV heads, size of a head, intermediate size, vocabulary, base of the rotations
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, 1e5),
    "llama-2-7b": (4096, 32, 32, 32, 128, 11008, 32000, 1e4),
    "llama-2-13b": (5120, 40, 40, 40, 128, 13824, 32000, 1e4),
    "llama-3-8b": (4096, 32, 32, 8, 128, 14336, 128256, 5e5),
    "tiny": (32, 2, 4, 2, 8, 48, 320, 1e4),
}


def random_model(
    shape: str, place: device, kind: dtype, positions: int = 8192, *, compiled: bool = True, quantization: str = "none"
) -> Model:
    return dressed(shape, *random_weights(shape, place, kind, positions, quantization=quantization), compiled=compiled)


def dressed(shape: str, config: ModelConfig, weights: Weights, *, compiled: bool = True) -> Model:
    """A model with these weights, and a tokenizer that knows bytes."""
    kind, place = weights.embed.dtype, weights.embed.device
    tokenizer = Tokenizer(byte_vocabulary().to_str(), {}, [], None)
    return assembled(config, weights, tokenizer, b"random " + shape.encode(), kind, place, compiled=compiled)


def random_config(shape: str, positions: int) -> ModelConfig:
    hidden, layers, heads, kv_heads, size, wide, vocab, base = SHAPES[shape]
    return ModelConfig(
        family="llama", vocab_size=vocab, hidden_size=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=size,
        intermediate_size=wide, max_positions=positions, positions="rope", norm="rms", norm_eps=1e-5, activation="silu", gated=True,
        block="sequential", softmax_scale=size**-0.5, rope=Rope(base, size),
    )  # fmt: skip


def random_weights(shape: str, place: device, kind: dtype, positions: int, *, quantization: str = "none") -> tuple[ModelConfig, Weights]:
    hidden, layers, heads, kv_heads, size, wide, vocab, _ = SHAPES[shape]
    config = random_config(shape, positions)
    make = Generator(place).manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return empty(shape, device=place, dtype=kind).normal_(0, SPREAD, generator=make)

    def linear(*shape: int) -> Weight:
        return scaled(weight(*shape)) if quantization == "fp8" else weight(*shape)

    def norm() -> Norm:
        return Norm(ones(hidden, device=place, dtype=kind), None)

    each = tuple(
        LayerWeights(
            norm(), norm(), linear((heads + 2 * kv_heads) * size, hidden), None, linear(hidden, heads * size), None,
            linear(2 * wide, hidden), None, linear(hidden, wide), None, None, None,
        )
        for _ in range(layers)
    )  # fmt: skip
    return config, Weights(weight(vocab, hidden), None, None, each, norm(), weight(vocab, hidden), None)


def byte_vocabulary() -> Vocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Vocabulary(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library
