"""One decoder against transformers, family by family; then what transformers cannot do: placement elsewhere."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pando.kernels.reference import Read, attend
from pando.kernels.rope import rotate, turns
from pando.model.config import ModelConfig
from pando.model.decoder import Decoder, Step
from pando.model.hub import weight_files
from pando.model.weights import load_weights

from .families import FAMILIES, VOCAB, build, logits, save

CPU = torch.device("cpu")


class TensorPool:
    """K and V of a few slots, full of NaN so that reading what was never written shows."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype) -> None:
        shape = (config.layers, slots, config.kv_heads, config.head_dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.k[index], self.v[index]


class Rows:
    """Requests whose tokens lie interleaved in one pool: row r's token t is in slot t * rows + r."""

    def __init__(self, decoder: Decoder, rows: int, dtype: torch.dtype = torch.float32) -> None:
        self.decoder, self.rows = decoder, rows
        self.pool = TensorPool(decoder.config, 96 * rows, dtype)
        self.lengths = [0] * rows

    def step(self, tokens: Sequence[Tensor], wanted: Tensor | None = None) -> Tensor:
        """Feeds the next tokens of each row, in one forward pass."""
        reads, positions, slots, first = [], [], [], 0
        for row, new in enumerate(tokens):
            end = self.lengths[row] + len(new)
            queries = torch.arange(first, first + len(new))
            reads.append(Read(torch.arange(end) * self.rows + row, 0, queries, torch.zeros(len(new), dtype=torch.int64)))
            positions.append(torch.arange(self.lengths[row], end))
            slots.append(positions[-1] * self.rows + row)
            self.lengths[row], first = end, first + len(new)
        return forward(self.decoder, self.pool, torch.cat(list(tokens)), torch.cat(positions), torch.cat(slots), reads, wanted)


def forward(
    decoder: Decoder, pool: TensorPool, tokens: Tensor, positions: Tensor, slots: Tensor, reads: list[Read], wanted: Tensor | None = None
) -> Tensor:
    freqs = decoder.geometry.freqs

    def attention(q: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert turned is q if freqs is None else torch.equal(turned, rotate(q, turns(positions, freqs, decoder.geometry.factor)))
        return attend(q, k, v, reads, positions, decoder.geometry)

    return decoder.forward(Step(tokens, positions, slots, torch.arange(len(tokens)) if wanted is None else wanted, attention), pool)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    return Decoder(config, load_weights(weight_files(directory), config, dtype, CPU))


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    scale = theirs.abs().max()
    assert scale > 1, "the model says nothing: its logits are too small to compare"
    assert (ours - theirs).abs().max() <= tolerance * scale


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return save(request.param, directory), load(directory)


def test_a_ragged_batch_has_the_logits_of_transformers(family) -> None:
    model, decoder = family
    texts = prompts(41, 1, 17)
    assert_close(Rows(decoder, 3).step(texts), torch.cat([logits(model, text) for text in texts]))


def test_a_cached_prefix_changes_nothing(family) -> None:
    model, decoder = family
    texts, rows = prompts(40, 9, 23), Rows(decoder, 3)
    cuts = [(0, len(text) // 2, len(text) - 2, len(text) - 1, len(text)) for text in texts]
    answers: list[list[Tensor]] = [[], [], []]
    for at in range(4):
        parts = [text[cut[at] : cut[at + 1]] for text, cut in zip(texts, cuts, strict=True)]
        for answer, part in zip(answers, rows.step(parts).split([len(part) for part in parts]), strict=True):
            answer.append(part)
    for text, answer in zip(texts, answers, strict=True):
        assert_close(torch.cat(answer), logits(model, text))


def test_only_the_wanted_tokens_are_answered_in_the_order_they_were_asked_for(family) -> None:
    _, decoder = family
    texts = prompts(6, 11)
    full = Rows(decoder, 2).step(texts)
    rows = Rows(decoder, 2)
    assert_close(rows.step(texts, wanted=torch.tensor([16, 5])), full[[16, 5]], 1e-6)


def test_tokens_of_which_nothing_is_wanted_are_still_remembered(family) -> None:
    _, decoder = family
    texts = prompts(6, 11)
    full = Rows(decoder, 2).step(texts)
    rows = Rows(decoder, 2)
    nothing = rows.step([texts[0][:5], texts[1][:10]], wanted=torch.arange(0))
    assert nothing.shape == (0, VOCAB)
    assert_close(rows.step([texts[0][5:], texts[1][10:]]), full[[5, 16]], 1e-5)


def test_a_segment_placed_elsewhere_reads_as_if_it_had_been_encoded_there(family) -> None:
    """Rotary and ALiBi positions are relative, so a shift is exact; a table of positions is not, so a shift there would be wrong."""
    _, decoder = family
    segment, text = prompts(20, 12)
    slots, shift = torch.arange(32), 31
    positions = torch.arange(32) + shift
    straight = TensorPool(decoder.config, 32, torch.float32)
    own = Read(slots, shift, torch.arange(32), torch.zeros(32, dtype=torch.int64))
    expected = forward(decoder, straight, torch.cat((segment, text)), positions, slots, [own])[20:]

    moved = TensorPool(decoder.config, 32, torch.float32)
    alone = Read(slots[:20], 0, torch.arange(20), torch.zeros(20, dtype=torch.int64))
    forward(decoder, moved, segment, torch.arange(20), slots[:20], [alone])
    placed = Read(slots[:20], 0, torch.arange(12), torch.full((12,), shift))
    new = Read(slots[20:], shift + 20, torch.arange(12), torch.zeros(12, dtype=torch.int64))
    found = forward(decoder, moved, text, positions[20:], slots[20:], [placed, new])
    if decoder.config.positions == "learned":
        assert (found - expected).abs().max() > 0.01 * expected.abs().max()
    else:
        assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 computes it the slow way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "falcon-40b", "mpt", "bloom", "gpt2"])
def test_half_precision_differs_by_its_own_rounding_only(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    texts = prompts(12, 5)
    found = Rows(load(tmp_path, dtype), 2, dtype).step(texts)
    expected = torch.cat([logits(model, text) for text in texts])
    assert_close(found, expected, 4 * torch.finfo(dtype).eps)


def test_a_checkpoint_in_half_precision_answers_alike_when_run_in_full(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (text,) = prompts(9)
    assert_close(Rows(load(tmp_path), 1).step([text]), logits(model, text))


def test_every_matrix_goes_through_the_given_linear(tmp_path: Path) -> None:
    save("llama", tmp_path)
    plain, packed = load(tmp_path), []
    config = plain.config

    def pack(weight: Tensor, bias: Tensor | None):
        packed.append(weight.shape)
        return partial(torch.nn.functional.linear, weight=weight.clone(), bias=bias)

    decoder = Decoder(config, load_weights(weight_files(tmp_path), config, torch.float32, CPU), pack)
    assert len(packed) == 4 * config.layers + 1
    (text,) = prompts(9)
    assert torch.equal(Rows(decoder, 1).step([text]), Rows(plain, 1).step([text]))
