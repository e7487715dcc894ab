"""How far answers are from exact when the context before them was kept rounded, and what that spares."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from ..config import CodecName
from ..model.load import Model
from .judge import Listener
from .measure import Result
from .rounding import distance
from .trial import Size, ask, opened
from .workloads import prefix

CODECS: tuple[CodecName, ...] = get_args(CodecName)


@dataclass(frozen=True)
class Reading:
    context: int = 2048  # tokens of text that are loaded
    following: int = 256  # tokens that are judged behind them


QUICK = Reading(context=64, following=4)


@dataclass(frozen=True)
class Heard:
    scores: Tensor  # log of the probabilities of each next token [N, V]
    loaded: int  # tokens
    kept: int  # bytes


def compare_codecs(model: Model, text: str, reading: Reading, folder: Path) -> list[Result]:
    tokens = prefix(model.tokenizer.encode, text, reading.context + reading.following)
    exact = _heard(model, tokens, reading, None, "none").scores
    return [_result(name, _heard(model, tokens, reading, folder / name, name), exact) for name in CODECS]


def _heard(model: Model, tokens: list[int], reading: Reading, folder: Path | None, codec: CodecName) -> Heard:
    """What the model expects after each of the following tokens, behind a context that another engine computed and kept, or, without a
    folder, behind one of its own."""
    size, kept = Size(pool=4 * len(tokens), kept=4 * len(tokens)), 0
    if folder is not None:
        engine = opened(model, size, folder, codec=codec)
        ask(engine, [tokens[: reading.context]])
        engine.close()
        kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and "sqlite" not in file.name)
    listener = opened(model, size, folder, codec=codec, kind=Listener)
    assert isinstance(listener, Listener)
    scores, loaded = [], 0
    for end in range(reading.context + 1, len(tokens) + 1):  # one by one, so that all of them are behind what was loaded
        listener.heard = []
        loaded += sum(ask(listener, [tokens[:end]]).tiers.values())
        scores.append(listener.heard[-1][-1].cpu().double().log_softmax(-1))
    listener.close()
    return Heard(torch.stack(scores), loaded, kept)


def _result(name: str, found: Heard, exact: Tensor) -> Result:
    return distance(
        f"codec {name}", found.scores, exact, f"{found.loaded} tokens loaded, {found.kept / max(found.loaded, 1):.0f} bytes each"
    )
