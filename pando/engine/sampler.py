"""From the logits of a step to its tokens, all rows at once.

The order is that of vLLM: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p, draw. What a row needs is worked out when
the batch changes, not at every step; rows that need nothing special cost one maximum.
"""

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidSampling
from .across import Returning, sent
from .batch import Unread
from .draw import SHORTLIST, Score, draw_listed, draw_whole, listed, scored, scores, shortlist, uniforms
from .request import Constraint, SamplingParams

NO_TOKEN = -1
Likeliest = tuple[Tensor, Tensor]  # of each row the token with the largest logit, and what is told of it: the same, or NO_TOKEN


def likeliest(logits: Tensor) -> Likeliest:
    best, tokens = _best(logits)
    return tokens, _told(best, tokens)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the largest logit, or NaN if there is one, and its token, the first of several. numpy takes a fifth of torch's time."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.max(dim=-1)
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens


def _told(best: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(best.abs() < math.inf, tokens, NO_TOKEN)


class Choice(Protocol):
    """What the sampler must know of a row."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...  # resolved: the user's, or one drawn at submission
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def output(self) -> Sequence[int]: ...
    @property
    def blocked(self) -> Sequence[int]: ...  # ids that may not be chosen while the output is shorter than min_tokens
    @property
    def constraint(self) -> Constraint | None: ...


class _Nobody:
    params, seed, prompt, output, blocked, constraint = SamplingParams(temperature=0), 0, (), (), (), None


NOBODY = _Nobody()  # in the place of a row that has ended


class Chosen(NamedTuple):
    """`token` is NO_TOKEN when none could be chosen: a logit was NaN or +inf, or every one was -inf.

    Logprobs are those of the model's own logits, before penalties and temperature. `top` holds (id, logprob, rank): the chosen token,
    then the likeliest others.
    """

    token: int
    logprob: float | None = None
    top: list[tuple[int, float, int]] | None = None


class _Open(NamedTuple):
    """Draws from a short list of the likeliest tokens, and what is needed to draw from all where the list was too short."""

    x: Tensor  # [n, V]
    places: Tensor  # of them among the rows
    limits: tuple[Tensor, Tensor, Tensor]  # floor, top_k, top_p
    chance: Tensor
    settled: Returning  # [n]: was the list long enough?

    def again(self) -> dict[int, int]:
        """The right tokens where it was not, by their places."""
        if self.settled.read().all():
            return {}
        open_ones = sent((~self.settled.read()).nonzero()[:, 0].numpy(), self.x.device)
        floor, top_k, top_p = (limit[open_ones] for limit in self.limits)
        ids, sums, kept, _ = shortlist(self.x[open_ones], floor, top_k, top_p, self.x.shape[1])
        return dict(zip(self.places[open_ones].tolist(), draw_listed(ids, sums, kept, self.chance[open_ones]).tolist(), strict=True))


class _Scored(NamedTuple):
    """Logprobs on their way here."""

    raw: Tensor  # [n, V]
    places: Sequence[int]  # of them among the rows
    wanted: list[int]  # others beside each
    found: Returning

    def read(self, tokens: Sequence[int], others: Set[int]) -> list[Score]:
        """`others`: the places of tokens that are not those which were scored."""
        mine = [tokens[place] for place in self.places]
        if others.isdisjoint(self.places):
            return list(map(listed, self.found.read().tolist(), mine, self.wanted))
        return scores(self.raw, torch.tensor(mine, device=self.raw.device), self.wanted)


class Choices(NamedTuple):
    """The tokens of a step, which a GPU may still be computing."""

    tokens: Tensor  # [N], where they were computed: what the next step takes, something in place of NO_TOKEN
    told: Returning  # the same on their way here
    open: _Open | None = None
    scored: _Scored | None = None

    def read(self) -> tuple[list[Chosen], bool]:
        """And whether they are what the next step takes: hardly ever is one of them another."""
        tokens, others = self.told.read().tolist(), self.open.again() if self.open is not None else {}
        for place, token in others.items():
            tokens[place] = NO_TOKEN if tokens[place] == NO_TOKEN else token
        chosen = list(map(Chosen, tokens))
        if self.scored is not None:
            for place, (logprob, top) in zip(self.scored.places, self.scored.read(tokens, others.keys()), strict=True):
                if tokens[place] != NO_TOKEN:
                    chosen[place] = Chosen(tokens[place], logprob, top)
        return chosen, not others


@dataclass(slots=True)
class _Memory:
    """What is kept of a row from step to step. Holding the row keeps its id from naming another."""

    row: Choice
    slot: int  # in the counts
    counted: int  # output tokens already in them


@dataclass(frozen=True, slots=True)
class _Random:
    """The rows that draw. top_p is inf where it keeps all, since a sum of fp32 may never reach 1."""

    members: tuple[int, ...]
    rows: Tensor
    seeds: np.ndarray
    temperature: Tensor
    floor: Tensor  # min_p, as a distance below the largest logit
    top_k: Tensor
    top_p: Tensor
    whole: Tensor  # places among the rows that draw: those without top_k and top_p
    cut: Tensor
    has_floor: bool


@dataclass(frozen=True, slots=True)
class _Groups:
    """Who needs what in this batch; index tensors on the device."""

    members: tuple[Choice, ...]
    biased: bool
    biased_at: Tensor  # a row and a token for each bias
    bias_ids: Tensor
    biases: Tensor
    held: tuple[int, ...]  # min_tokens
    constrained: tuple[int, ...]
    constrained_at: Tensor
    penalised: tuple[int, ...]
    penalised_at: Tensor
    penalties: Tensor  # [3, n, 1]: repetition, presence, frequency
    scored: tuple[int, ...]  # logprobs
    scored_at: Tensor
    random: _Random | None

    @property
    def plain(self) -> bool:
        """All take what is likeliest."""
        return self.random is None and not (self.biased or self.held or self.constrained or self.penalised or self.scored)


def check(params: SamplingParams, vocab_size: int, blocked: Sequence[int] = ()) -> None:
    """Refuses, before a request is admitted, what only the vocabulary can rule out. `blocked`: what may not come before min_tokens."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids or ())):
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise InvalidSampling(f"{name} names token {largest} of a vocabulary of {vocab_size}; use ids from 0 to {vocab_size - 1}")
    if params.min_tokens and len(set(blocked)) == vocab_size:
        found = f"stop_token_ids and the model's own end tokens together are all {vocab_size} tokens of the vocabulary"
        raise InvalidSampling(f"{found}, so none is left before min_tokens; name fewer, or leave out min_tokens")


class Sampler:
    """Chooses tokens. Keeps token counts for rows with penalties: call `forget` when a row ends."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._memory: dict[int, _Memory] = {}
        self._groups: _Groups | None = None
        self._free: list[int] = []
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [slots, V]
        self._counts = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)  # [slots, V], of the output

    def choose(self, logits: Tensor, rows: Sequence[Choice], unread: Unread | None = None, known: Likeliest | None = None) -> Choices:
        """One token per row from logits, [N, V], which may be overwritten, without waiting for it. `unread`: rows whose last token nobody
        here knows yet; those before it were chosen freely. `known`: what is likeliest by the logits alone, if somebody has looked."""
        if not rows:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Choices(nothing, Returning(nothing))
        groups = self._group(rows)
        if groups.plain:
            tokens, told = known or likeliest(logits)
            return Choices(tokens, Returning(told))
        logits = logits.to(torch.float32)
        raw = _take(logits, groups.scored_at).log_softmax(-1) if groups.scored else None
        if groups.biased:
            logits.index_put_((groups.biased_at, groups.bias_ids), groups.biases, accumulate=True)
        ahead = {id(row): place for place, row in enumerate(unread.rows)} if unread is not None else {}
        _hold(logits, groups, ahead)
        self._penalise(logits, groups, ahead, unread.tokens if unread is not None else None)
        self._constrain(logits, groups)
        best, tokens = _best(logits)
        left = self._draw(logits, best, tokens, groups.random, groups.members, ahead) if groups.random is not None else None
        told, logprobs = _told(best, tokens), _score(raw, tokens[groups.scored_at], groups) if raw is not None else None
        return Choices(tokens, Returning(told), left, logprobs)

    def forget(self, row: Choice) -> None:
        """Drops what is kept of a row that has ended; a row never seen is no error."""
        self._groups = None
        memory = self._memory.pop(id(row), None)
        if memory is not None:
            self._free.append(memory.slot)

    def _group(self, rows: Sequence[Choice]) -> _Groups:
        last = self._groups
        if last is not None and len(last.members) == len(rows) and all(map(is_, rows, last.members)):
            return last
        params = [row.params for row in rows]
        penalised = [i for i, p in enumerate(params) if _penalised(p)]
        scored = [i for i, p in enumerate(params) if p.logprobs is not None]
        constrained = [i for i, row in enumerate(rows) if row.constraint is not None]
        numbers = [[params[i].repetition_penalty, params[i].presence_penalty, params[i].frequency_penalty] for i in penalised]
        biases = [(i, token, bias) for i, p in enumerate(params) for token, bias in p.logit_bias.items()]
        self._groups = _Groups(
            members=tuple(rows),
            biased=bool(biases),
            biased_at=self._places([i for i, _, _ in biases]),
            bias_ids=self._places([token for _, token, _ in biases]),
            biases=self._numbers([bias for _, _, bias in biases]),
            held=tuple(i for i, p in enumerate(params) if p.min_tokens and rows[i].constraint is None),  # what is complete must end
            constrained=tuple(constrained),
            constrained_at=self._places(constrained),
            penalised=tuple(penalised),
            penalised_at=self._places(penalised),
            penalties=self._numbers([number for each in numbers for number in each]).reshape(-1, 3).T[:, :, None],
            scored=tuple(scored),
            scored_at=self._places(scored),
            random=self._random(rows, [i for i, p in enumerate(params) if not p.greedy]),
        )
        return self._groups

    def _random(self, rows: Sequence[Choice], drawing: list[int]) -> _Random | None:
        if not drawing:
            return None
        params = [rows[i].params for i in drawing]
        ceilings = [min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size for p in params]
        whole = [ceiling == self.vocab_size and p.top_p >= 1 for p, ceiling in zip(params, ceilings, strict=True)]
        return _Random(
            members=tuple(drawing),
            rows=self._places(drawing),
            seeds=np.array([rows[i].seed & (2**64 - 1) for i in drawing], dtype=np.uint64),
            temperature=self._numbers([p.temperature for p in params]),
            floor=self._numbers([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
            top_k=self._places(ceilings),
            top_p=self._numbers([p.top_p if p.top_p < 1 else math.inf for p in params], np.float64),
            whole=self._places([j for j, keeps_all in enumerate(whole) if keeps_all]),
            cut=self._places([j for j, keeps_all in enumerate(whole) if not keeps_all]),
            has_floor=any(p.min_p > 0 for p in params),
        )

    def _places(self, places: list[int]) -> Tensor:
        return sent(np.array(places, dtype=np.int64), self.device)

    def _numbers(self, numbers: list[float], dtype: type[np.floating[Any]] = np.float32) -> Tensor:
        return sent(np.array(numbers, dtype=dtype), self.device)

    def _recall(self, row: Choice) -> _Memory:
        memory = self._memory.get(id(row))
        if memory is None:
            memory = self._memory[id(row)] = _Memory(row, self._new_slot(row.prompt), 0)
        return memory

    def _new_slot(self, prompt: Sequence[int]) -> int:
        if not self._free:
            held = len(self._counts)
            more = max(4, held)
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self.vocab_size)))
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self.vocab_size)))
            self._free = list(range(held, held + more))
        slot = self._free.pop()
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot, self._places(list(prompt))] = True
        return slot

    def _penalise(self, logits: Tensor, groups: _Groups, ahead: Mapping[int, int], unread: Tensor | None) -> None:
        """Tokens that nobody here knows yet count, too, but are not noted: another may be taken in their place."""
        if not groups.penalised:
            return
        slots: list[int] = []
        at: list[int] = []
        ids: list[int] = []
        for i in groups.penalised:
            memory = self._recall(groups.members[i])
            new = groups.members[i].output[memory.counted :]
            memory.counted += len(new)
            slots.append(memory.slot)
            at += [memory.slot] * len(new)
            ids += new
        self._counts.index_put_((self._places(at), self._places(ids)), torch.ones(len(at), device=self.device), accumulate=True)
        mine = self._places(slots)
        counts = self._counts[mine]  # [n, V]
        if unread is not None:
            fed = [(j, ahead[name]) for j, i in enumerate(groups.penalised) if (name := id(groups.members[i])) in ahead]
            places, sources = self._places([j for j, _ in fed]), self._places([source for _, source in fed])
            counts.index_put_((places, unread[sources]), torch.ones(len(fed), device=self.device), accumulate=True)
        said = counts > 0
        repetition, presence, frequency = groups.penalties
        x = _take(logits, groups.penalised_at)
        x = torch.where(said | self._in_prompt[mine], torch.where(x > 0, x / repetition, x * repetition), x)
        logits[groups.penalised_at] = x - frequency * counts - presence * said

    def _constrain(self, logits: Tensor, groups: _Groups) -> None:
        """A bit for each token goes to the device, of all rows at once: whoever sent them one by one would wait for it each time."""
        constraints = [row.constraint for row in groups.members if row.constraint is not None]
        if not constraints:
            return
        packed = np.zeros((len(constraints), -(-self.vocab_size // 8)), np.uint8)
        for bits, constraint in zip(packed, constraints, strict=True):
            found = constraint.allowed().view(np.uint8)[: len(bits)]
            bits[: len(found)] = found  # tokens that it does not know of may not come
        each = 1 << torch.arange(8, dtype=torch.uint8, device=self.device)  # lowest first
        ruled_out = (sent(packed, self.device)[:, :, None] & each == 0).flatten(1)[:, : self.vocab_size]
        logits[groups.constrained_at] = _take(logits, groups.constrained_at).masked_fill(ruled_out, -math.inf)

    def _draw(
        self, logits: Tensor, best: Tensor, tokens: Tensor, random: _Random, members: tuple[Choice, ...], ahead: Collection[int]
    ) -> _Open | None:
        """Puts what is drawn among the tokens."""
        positions = np.array([_said(members[i], ahead) for i in random.members])
        chance = sent(uniforms(random.seeds, positions), self.device)
        x = _take(logits, random.rows)
        x = x.sub_(best[random.rows, None]).div_(random.temperature[:, None])  # the largest is 0
        if len(random.whole):
            floor = random.floor[random.whole] if random.has_floor else None
            tokens[random.rows[random.whole]] = draw_whole(_take(x, random.whole), floor, chance[random.whole])
        cut, width = random.cut, min(SHORTLIST, self.vocab_size)
        if not len(cut):
            return None
        x, places, chance, limits = _take(x, cut), random.rows[cut], chance[cut], (random.floor[cut], random.top_k[cut], random.top_p[cut])
        ids, sums, kept, settled = shortlist(x, *limits, width)
        tokens[places] = draw_listed(ids, sums, kept, chance)
        if width == self.vocab_size:
            return None
        kept_x = x.clone() if x.is_cuda and len(x) == len(logits) else x  # the next step's logits may be written over these
        return _Open(kept_x, places, limits, chance, Returning(settled))


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows asked for; x itself, not a copy, when they are all. Rows are in order and never twice."""
    return x if len(rows) == len(x) else x[rows]


def _score(raw: Tensor, tokens: Tensor, groups: _Groups) -> _Scored:
    wanted = [groups.members[i].params.logprobs or 0 for i in groups.scored]
    return _Scored(raw, groups.scored, wanted, Returning(scored(raw, tokens, min(max(wanted), raw.shape[1]))))


def _said(row: Choice, ahead: Collection[int]) -> int:
    """How many tokens its answer has."""
    return len(row.output) + (id(row) in ahead)


def _hold(logits: Tensor, groups: _Groups, ahead: Collection[int]) -> None:
    """Rules out the ends of an answer that is still shorter than its min_tokens."""
    short = [i for i in groups.held if _said(groups.members[i], ahead) < groups.members[i].params.min_tokens]
    pairs = [(i, token) for i in short for token in groups.members[i].blocked]
    if pairs:
        at, ids = sent(np.array(pairs).T, logits.device)
        logits[at, ids] = -math.inf
