"""How far an answer made from modules is from the answer to the plain prompt of the same tokens.

The plain prompt is answered greedily. Then each way of making the prompt is led through that same answer, token by token, and its
distribution of every next token is held against the plain one's.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count

import torch
from torch import Tensor

from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.request import Request, SamplingParams, TokenEvent
from ..engine.row import Row, Schedule
from ..engine.sampler import Choices
from ..kv.run import Origin, Run
from ..model.load import Model


@dataclass(frozen=True)
class Reference:
    """What the plain prompt is answered, and how surely."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    scores: Tensor  # log of the probabilities, fp32 [N, V]

    @property
    def distance(self) -> "Distance":
        """From itself."""
        return Distance(len(self.answer), 0.0, len(self.answer), surprise_of(self.scores, self.answer))


@dataclass(frozen=True)
class Distance:
    """Of one prompt or several: sums over the tokens of the reference answers."""

    tokens: int = 0
    divergence: float = 0.0  # KL of the plain distribution from this one, nats
    agreed: int = 0  # tokens that are the likeliest here, too
    surprise: float = 0.0  # nats of the reference answers
    repaired: int = 0  # module tokens
    foreign: int = 0  # module tokens that had been encoded in another context, those included

    def __add__(self, other: "Distance") -> "Distance":
        return Distance(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def kl(self) -> float:
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)


class Listener(Engine):
    """Keeps the logits of a step, which others only choose a token by."""

    heard: list[Tensor]

    def _sample(self, schedule: Schedule, logits: Tensor) -> Choices:
        if len(logits):
            self.heard.append(logits.to(torch.float32, copy=True))
        return super()._sample(schedule, logits)

    def drain(self) -> tuple[list[TokenEvent], Tensor]:
        """Does whatever there is to do; its tokens, and all logits that came with it [N, V]."""
        self.heard, events = [], list[TokenEvent]()
        while self.has_work:
            events += self.step()
        return events, torch.cat(self.heard)


class Judge:
    """One prompt at a time, through an engine like any other; what one computes of a module, the next one reuses."""

    def __init__(self, model: Model, config: EngineConfig, tokens: int) -> None:
        self.engine = Listener(model, replace(config, overlap=False))  # no logits but those of tokens that were said
        self._tokens = tokens
        self._ids = map(str, count())

    @property
    def movable(self) -> bool:
        """States can be read at other positions than they were encoded at."""
        geometry = self.engine.model.decoder.geometry
        return geometry.freqs is not None or geometry.slopes is not None

    def reference(self, runs: Sequence[Run]) -> Reference:
        prompt = tuple(token for run in runs for token in run.tokens)
        self.engine.add(Request(next(self._ids), prompt, SamplingParams(temperature=0, max_tokens=self._tokens)))
        events, logits = self.engine.drain()
        return Reference(prompt, tuple(event.token for event in events), logits.log_softmax(-1))

    def distance(self, runs: Sequence[Run], reference: Reference, repair: float = 0.0) -> Distance:
        """Of the prompt that these runs make, some of them repaired."""
        answer = reference.answer
        before, own, position = _split(runs)
        forced = Request(
            next(self._ids),
            (*own, *answer[:-1]),
            SamplingParams(temperature=0, max_tokens=1),
            runs=before,
            position=position,
            repair=repair,
        )
        self.engine.add(forced)
        [row] = self.engine.answers
        row.scored = []  # every token's logits are wanted
        repaired, foreign = row.repaired, _foreign(row, before)
        _, logits = self.engine.drain()
        ours, plain = logits[-len(answer) :].log_softmax(-1), reference.scores
        return Distance(
            tokens=len(answer),
            divergence=float((plain.exp() * (plain - ours)).sum()),
            agreed=int((ours.argmax(-1) == plain.argmax(-1)).sum()),
            surprise=surprise_of(ours, answer),
            repaired=repaired,
            foreign=foreign,
        )

    def blame(self, runs: Sequence[Run], reference: Reference, which: Sequence[int]) -> Distance:
        """The distance when some of the runs, and no others, have seen everything that stands before them in the plain prompt."""
        mended, place = list(runs), 0
        for index, run in enumerate(runs):
            if index in which and run.origin is not None:
                before = (Run(reference.prompt[:place], 0, Origin((), 0)),) if place else ()
                mended[index] = Run(run.tokens, run.position, Origin(before, place))
            place += len(run)
        return self.distance(mended, reference)


def _foreign(row: Row, runs: Sequence[Run]) -> int:
    """Tokens of modules; what is computed in place between them is none."""
    given = [run for run in runs if len(run) and (run.origin is not None or not row.repair)]
    pairs = zip(row.wants, given, strict=False)
    return sum(len(want.run) for want, run in pairs if run.origin is not None and not want.exact)


def surprise_of(scores: Tensor, answer: Sequence[int]) -> float:
    return -float(scores.gather(1, torch.tensor(answer, device=scores.device)[:, None]).sum())


def _split(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[int, ...], int]:
    """What stands before the tokens that are led, and the first of these. The last token of a module is computed, as for any answer."""
    *before, last = runs
    if last.origin is None:
        return tuple(before), last.tokens, last.position
    head = [Run(last.tokens[:-1], last.position, last.origin)] if len(last) > 1 else []
    return (*before, *head), last.tokens[-1:], last.end - 1
