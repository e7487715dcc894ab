"""Conversations that go on, with the engine's own defaults: how long first tokens take, and how long others wait for the next."""

import argparse
import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from ...config import EngineConfig
from ...engine.engine import Engine
from ...engine.request import Request
from ..options import decimal, whole
from ..picture import Axes
from ..report import spread
from ..trial import drawn, greedy
from .report import number, percent
from .setting import Setting

TABLE = "chats"
SYSTEM = 1000  # tokens of the prompt that all of them have in common
SAID, ANSWERED = (20, 50, 120, 300, 600), (40, 100, 200, 300)  # tokens of a turn, one as likely as the other
LONGEST = 7000  # tokens of a conversation; then another begins
IDLE = 0.0005  # seconds
SHARES = ("50", "90", "99", "100")  # percent
SPANS = 5  # of the time, each told apart: what comes first may be slower
HEADS = ("until s", "rows", "tok/s", "first ms", "90 %", "next ms", "90 %", "99 %", "longest", "captured %")


@dataclass
class Span:
    """A part of the time. Seconds, of each first token and of each that followed another."""

    end: float
    length: float
    rows: list[int] = field(default_factory=list)  # of each step
    first: list[float] = field(default_factory=list)
    following: list[float] = field(default_factory=list)
    captured: int = 0  # steps that were repeated from a graph

    @property
    def tokens_per_second(self) -> float:
        return (len(self.first) + len(self.following)) / self.length

    def cells(self) -> Sequence[str]:
        ms = (*_ms(self.first)[:2], *_ms(self.following))
        facts = (self.end, fmean(self.rows or [0]), self.tokens_per_second, *ms)
        return (*map(number, facts), percent(self.captured / max(1, len(self.rows))))

    def as_json(self) -> dict[str, Any]:
        return {
            "until": self.end, "steps": len(self.rows), "rows": fmean(self.rows or [0]), "captured": self.captured,
            "first_ms": dict(zip(SHARES, _ms(self.first), strict=True)), "next_ms": dict(zip(SHARES, _ms(self.following), strict=True)),
            "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip


def _ms(seconds: Sequence[float]) -> list[float | None]:
    """What so large shares of them stay below, where there are any."""
    found = spread(seconds)
    return [None] * len(SHARES) if found is None else [1e3 * value for value in (found.p50, found.p90, found.p99, found.largest)]


@dataclass
class Chat:
    tokens: list[int]
    asked: float = 0.0
    told: float | None = None  # when the last token of its answer came


def add_options(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--chats", type=whole(1), default=120, metavar="N", help="conversations that are under way at any time (120)")
    to.add_argument("--chat-seconds", type=decimal(), default=30.0, metavar="S", help="how long they are watched (30)")
    to.add_argument("--think", type=decimal(), default=4.0, metavar="S", help="between an answer and the next question, on average (4)")


def measure(setting: Setting, arguments: argparse.Namespace) -> None:
    about = f"{arguments.chats} conversations behind {SYSTEM} tokens in common, {arguments.think:g} s between two turns"
    setting.report.begin(TABLE, f"{about}; first tokens, and those that follow another: the median, 90 % and so on", HEADS)
    setting.attempt(f"{arguments.chats} chats", EngineConfig(disk_gib=0), partial(_watch, setting, arguments))


def _watch(setting: Setting, arguments: argparse.Namespace, engine: Engine) -> None:
    engine.warm_up()  # as a server does
    dice, words, graphs = Random(f"{setting.seed} turns"), range(engine.model.config.vocab_size), engine.graphs
    system, length = drawn(engine.model, f"{setting.seed} system", SYSTEM), arguments.chat_seconds / SPANS
    spans = [Span((place + 1) * length, length) for place in range(SPANS)]
    coming = sorted((dice.uniform(0, arguments.think), place, Chat([*system])) for place in range(arguments.chats))
    talking, begun = dict[str, Chat](), time.perf_counter()
    while (now := time.perf_counter() - begun) < arguments.chat_seconds:
        while coming and coming[0][0] <= now:
            asked, place, chat = heapq.heappop(coming)
            chat.tokens += dice.choices(words, k=dice.choice(SAID))
            chat.asked, chat.told, name = asked, None, f"{place} {asked}"
            talking[name] = chat
            engine.add(Request(name, [*chat.tokens], greedy(dice.choice(ANSWERED))))
        if not engine.has_work:
            time.sleep(IDLE)
            continue
        replays = graphs.replays if graphs is not None else 0
        events = engine.step()
        now = time.perf_counter() - begun
        span = spans[min(SPANS - 1, int(now / length))]
        span.rows.append(engine.facts.rows)
        span.captured += (graphs.replays if graphs is not None else 0) - replays
        for event in events:
            chat = talking[event.request_id]
            (span.first if chat.told is None else span.following).append(now - (chat.asked if chat.told is None else chat.told))
            chat.told = now
            chat.tokens.append(event.token)
            if event.finish_reason is not None:
                talking.pop(event.request_id)
                place = int(event.request_id.split()[0])
                next_one = chat if len(chat.tokens) < LONGEST else Chat([*system])
                heapq.heappush(coming, (now + dice.expovariate(1 / arguments.think), place, next_one))
    for name in talking:
        engine.cancel(name)
    for span in spans:
        setting.report.add(span)


def draw(axis: Axes, found: Sequence[Span]) -> None:
    for share, ms in list(zip(SHARES, zip(*(_ms(span.following) for span in found), strict=True), strict=True))[:3]:
        axis.plot([span.end for span in found], [math.nan if value is None else value for value in ms], marker="o", label=f"{share} %")
    axis.set(xlabel="seconds", ylabel="ms from one token to the next", ylim=(0, None))
