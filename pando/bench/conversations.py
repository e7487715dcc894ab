"""Conversations to replay: drawn with the published statistics of ShareGPT, or read from a trace.

CachedAttention (section 2.3, figure 2) says of ShareGPT's conversations, but for those of more than 40 turns or 32K tokens: 73 % have
several turns, 5.75 on average; 47 % are longer than 2K tokens and 30 % longer than 4K. The number of turns is drawn from a geometric
distribution behind the first; the length of a conversation's usual turn is log-normal, and so is each turn around it. Questions and answers
share a turn as in the pairs that RelayAttention has published: 48 % and 52 %. The constants were fitted so that all of this comes out.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ..errors import InvalidOption
from ..kv.segment import Key
from .traffic import arrivals

SINGLE = 0.27  # of all conversations
LAST = 0.147  # that a turn, from the second on, is the last: 5.75 turns on average
MOST_TURNS, MOST_TOKENS = 40, 32768
TURN_MEDIAN, TURN_SPREAD = 485.0, 0.92  # tokens of a conversation's usual turn, and its logarithm's deviation
WITHIN_SPREAD = 0.6  # the same of its turns among themselves
ANSWER_SHARE = 0.52
PAGE = 512  # tokens of a page of Mooncake's traces


class Piece(NamedTuple):
    """Tokens whose states are kept together."""

    key: Key
    tokens: int


@dataclass(frozen=True)
class Turn:
    context: tuple[Piece, ...]  # that may be found: the chain that its prompt begins with
    new: int  # tokens of the prompt behind it
    answer: int  # tokens
    adds: tuple[Piece, ...]  # what follows the context when it is answered
    think: float  # seconds after the answer before

    @property
    def prompt(self) -> int:
        return sum(piece.tokens for piece in self.context) + self.new


@dataclass(frozen=True)
class Conversation:
    arrival: float  # seconds
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """What is drawn."""

    conversations: int = 9000
    rate: float = 1.0  # conversations that begin in a second
    think: float = 60.0  # seconds on average
    window: int = MOST_TOKENS  # tokens of a context; a conversation that outgrows it goes on without its oldest half


def sharegpt(shape: Shape, seed: int) -> list[Conversation]:
    """Arrivals, lengths and pauses are drawn apart: with another pause the same is said."""
    starts, lengths, pauses = arrivals(shape.rate, Random(f"{seed} arrivals")), Random(f"{seed} lengths"), Random(f"{seed} pauses")
    made = []
    for number, arrival in zip(range(shape.conversations), starts, strict=False):
        sizes = _lengths(lengths)
        thinks = [pauses.expovariate(1 / shape.think) if turn and shape.think else 0.0 for turn in range(len(sizes))]
        made.append(Conversation(arrival, tuple(_turns(number, sizes, thinks, shape.window))))
    return made


def _lengths(random: Random) -> list[tuple[int, int]]:
    """Tokens of the questions and answers of one conversation."""
    while True:
        turns = 1
        if random.random() >= SINGLE:
            turns = 2 + int(math.log(1 - random.random()) / math.log(1 - LAST))
        usual = random.lognormvariate(math.log(TURN_MEDIAN), TURN_SPREAD)
        tokens = [min(2048, max(2, round(usual * random.lognormvariate(0, WITHIN_SPREAD)))) for _ in range(turns)]
        if turns <= MOST_TURNS and sum(tokens) <= MOST_TOKENS:
            answers = [
                min(count - 1, max(1, round(count * random.betavariate(2 * ANSWER_SHARE, 2 - 2 * ANSWER_SHARE)))) for count in tokens
            ]
            return [(count - answer, answer) for count, answer in zip(tokens, answers, strict=True)]


def _turns(number: int, sizes: Sequence[tuple[int, int]], thinks: Sequence[float], window: int) -> Iterator[Turn]:
    context: list[Piece] = []
    for turn, ((question, answer), think) in enumerate(zip(sizes, thinks, strict=True)):
        if sum(piece.tokens for piece in context) + question + answer > window:
            while sum(piece.tokens for piece in context) > window // 2:
                del context[0]
        added = Piece(number.to_bytes(4, "big") + turn.to_bytes(2, "big"), question + answer)
        yield Turn(tuple(context), question, answer, (added,), think)
        context.append(added)


def read(file: Path) -> list[Conversation]:
    """Mooncake's format: one request a line, with the time of its arrival in milliseconds, its lengths, and ids of its prompt's pages."""
    made = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                made.append(_request(file, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file}: cannot be read as text ({error}); give a trace of JSON lines") from error
    if not made:
        raise InvalidOption(f"{file}: holds no requests; give a trace of JSON lines")
    return sorted(made, key=lambda request: request.arrival)


def _request(file: Path, number: int, line: str) -> Conversation:
    try:
        facts: dict[str, Any] = json.loads(line)
        arrival, prompt, answer, ids = (facts[name] for name in ("timestamp", "input_length", "output_length", "hash_ids"))
        numbers = (arrival, prompt, answer, *ids)
        sound = all(type(value) is int and 0 <= value < 2**64 for value in numbers) and len(ids) == -(-prompt // PAGE)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound or not prompt:
        wanted = "timestamp, input_length, output_length and hash_ids, one for each 512 tokens of input"
        raise InvalidOption(f"{file}: line {number} is {line[:80]!r}, and no request; give whole numbers {wanted}")
    tokens = [min(PAGE, prompt - PAGE * i) for i in range(len(ids))]
    pages = tuple(Piece(name.to_bytes(8, "big"), count) for name, count in zip(ids, tokens, strict=True))
    return Conversation(arrival / 1000, (Turn(pages, 0, answer, (), 0.0),))
