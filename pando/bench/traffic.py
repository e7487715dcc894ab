"""What a load test asks and when: everything is drawn from a seed before the first request leaves."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from ..errors import InvalidOption
from .options import text_of

Kind = Literal["shared-prefix", "multi-turn", "lengths"]
Lengths = tuple[int, int]  # prompt tokens, answer tokens

MAX_REQUESTS = 1_000_000  # of one rate: their texts are all made beforehand
VOCABULARY = """
 able about above across after again air all almost also always among and answer any area around ask back become been before began being
 below best between big black blue board body book both box boy bring build but call came can care carry case change child city clear close
 cold come common could country course cover cross dark day deep did different do door down draw dry during each early earth east eat end
 enough even ever every eye face fact fall family far farm fast father feel feet few field fill final find fine fire first fish five follow
 food form found four free friend from full game gave get girl give go gold good grass great green ground group grow half hand hard have
 head hear heart heat held help here high hold home horse hot hour house how hundred idea inch island job just keep kind king know land
"""
PROMPT_COLUMNS = ("prompt", "context", "input")
ANSWER_COLUMNS = ("output", "generated", "answer", "completion")


@dataclass(frozen=True)
class Workload:
    """The shape of what is asked; lengths are in tokens."""

    kind: Kind
    prefix: int  # that the requests of a group share, as their system prompt
    prompt: int
    answer: int
    groups: int
    turns: int  # requests of one conversation
    think: float  # seconds between an answer and the next turn, on average
    requests: int | None  # in all
    duration: float | None  # seconds in which conversations begin
    lengths: tuple[Lengths, ...] = ()  # drawn from, instead of prompt and answer


@dataclass(frozen=True)
class Turn:
    text: str
    answer: int  # tokens asked for
    think: float  # seconds after the answer before it


@dataclass(frozen=True)
class Conversation:
    """One or more requests, each with the whole history. Only the first one's time is known beforehand."""

    arrival: float  # seconds from the start
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Source:
    """Where texts come from: a running text, or a vocabulary to draw from."""

    words: Sequence[str]
    running: bool
    tokens_per_word: float = 1.0

    def cut(self, tokens: int, random: Random) -> str:
        """About that many tokens, which no other cut begins with."""
        if tokens == 0:
            return ""
        count = max(1, round(tokens / self.tokens_per_word))
        if not self.running:
            return " ".join(random.choices(self.words, k=count))
        start = random.randrange(len(self.words))
        found = (self.words[(start + i) % len(self.words)] for i in range(count - 1))
        return " ".join([f"{random.randrange(10**9)}.", *found])  # two cuts of a short text may start at the same word


def source(text: Path | None) -> Source:
    if text is None:
        return Source(VOCABULARY.split(), running=False)
    words = text_of(text).split()
    if not words:
        raise InvalidOption(f"{text}: holds no words; give a text to cut prompts from")
    return Source(words, running=True)


def conversations(workload: Workload, source: Source, rate: float, seed: str) -> list[Conversation]:
    """All of a run. Arrivals and texts are drawn apart: other texts arrive at the same times."""
    texts = Random(f"{seed} texts")
    systems = [source.cut(workload.prefix, texts) for _ in range(workload.groups)]
    starts = arrivals(rate / workload.turns, Random(f"{seed} arrivals"))
    made: list[Conversation] = []
    left = MAX_REQUESTS if workload.requests is None else workload.requests
    for arrival in starts:
        if left == 0 or (workload.duration is not None and arrival >= workload.duration):
            break
        turns = tuple(_turn(workload, source, texts, number) for number in range(min(workload.turns, left)))
        made.append(Conversation(arrival, systems[texts.randrange(workload.groups)], turns))
        left -= len(turns)
    return made


def arrivals(rate: float, random: Random) -> Iterator[float]:
    """A Poisson process, without end."""
    now = 0.0
    while True:
        now += random.expovariate(rate) if math.isfinite(rate) else 0.0
        yield now


def _turn(workload: Workload, source: Source, random: Random, number: int) -> Turn:
    prompt, answer = random.choice(workload.lengths) if workload.lengths else (workload.prompt, workload.answer)
    think = random.expovariate(1 / workload.think) if number and workload.think else 0.0
    return Turn(source.cut(prompt, random), answer, think)


def read_lengths(file: Path) -> tuple[Lengths, ...]:
    """Two columns of numbers; where there are more, a head must tell which are meant."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [(number, row) for number, row in enumerate(csv.reader(lines), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidOption(f"{file}: cannot be read as CSV ({error})") from error
    headed = bool(rows) and not any(cell.strip().isdigit() for cell in rows[0][1])
    columns = _columns(file, rows[0][1]) if headed else (0, 1)
    body = rows[1:] if headed else rows
    if not body:
        raise InvalidOption(f"{file}: holds no lengths; give lines of prompt tokens and answer tokens")
    if not headed and (count := len(body[0][1])) != 2:
        raise InvalidOption(f"{file}: {count} columns and no head; give two columns, or a head that names prompt and output")
    return tuple(_lengths(file, number, row, columns) for number, row in body)


def _columns(file: Path, head: Sequence[str]) -> tuple[int, int]:
    names = [name.strip().lower() for name in head]
    found = [[i for i, name in enumerate(names) if any(word in name for word in words)] for words in (PROMPT_COLUMNS, ANSWER_COLUMNS)]
    if any(len(places) != 1 for places in found):
        raise InvalidOption(f"{file}: columns {', '.join(head)[:200]}; name one of them prompt and one output")
    return found[0][0], found[1][0]


def _lengths(file: Path, number: int, row: Sequence[str], columns: tuple[int, int]) -> Lengths:
    try:
        prompt, answer = (int(row[column]) for column in columns)
    except (ValueError, IndexError) as error:
        raise InvalidOption(f"{file}: line {number} is {','.join(row)[:100]!r}, and not two whole numbers of tokens") from error
    if prompt < 1 or answer < 1:
        raise InvalidOption(f"{file}: line {number} has lengths {prompt} and {answer}; both must be 1 or more")
    return prompt, answer
