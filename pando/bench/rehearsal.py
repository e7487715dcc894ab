"""A small part of a trace through a whole engine; and the same with simulated compute and tiers.

Tokens are fewer than in the trace, and stand for so many of its tokens; which they are is drawn, so that turns share what they share there,
and answers are the engine's own. The clock is the trace's: a step takes as long as on the simulated machine. What is moved behind the
answers takes no time, as there, and what is kept is always loaded: a small model would compute much of it sooner.
"""

import heapq
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from tempfile import TemporaryDirectory

import numpy as np
from torch import device, float32

from ..config import EngineConfig, PolicyName
from ..engine.engine import Engine
from ..engine.facts import Stats
from ..engine.request import Request, TokenEvent
from ..engine.tiers import shape_of
from ..errors import InvalidOption
from ..kv.pool import PagePool
from ..kv.segment import Key, Lineage, extend_keys
from ..model.load import Model
from ..store.fileformat import file_size
from ..store.policy import POLICIES
from .conversations import Conversation, Piece, Turn
from .measure import columns
from .random_model import SHAPES, random_model
from .replay import Machine, Served, replay
from .trial import Willing, drawn, greedy, settle

PAGE = 16  # tokens
LEAST = 32  # pages of host memory: the store takes as many to write from
GIB = 2**30
RECOMPUTED = "recompute"


@dataclass(frozen=True)
class Small:
    """How small it is. Shares are of everything that is ever kept, in the order of the tiers."""

    sessions: int = 60
    longest: int = 4096  # tokens of the trace; a conversation ends before it has more
    scale: int = 32  # tokens of the trace that one stands for
    shares: tuple[float, ...] = (0.15, 0.15, 0.6)
    rows: int = 8
    shape: str = "tiny"


@dataclass
class Asked:
    """A turn, and how it was answered."""

    prompt: list[int]
    arrived: float
    answer: list[int] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)  # tokens of the prompt that came from each, the device included
    first: float = 0.0  # seconds from admission to the first token


@dataclass(frozen=True)
class Played:
    """One replay. Shares are of all prompts' tokens."""

    policy: str
    simulated: bool
    turns: int
    tokens: int
    device: float
    host: float
    disk: float
    computed: float
    first_mean: float | None = None  # seconds of the engine's steps from admission to the first token
    first_p95: float | None = None
    prefetched: int | None = None  # pages
    unsaved: Mapping[str, int] | None = None  # pages, by reason
    lost: Mapping[str, int] | None = None
    equal: int | None = None  # answers that are those of a cold engine


class Rehearsal:
    def __init__(self, engine: Engine, machine: Machine, conversations: Sequence[Conversation]) -> None:
        """The machine is that of the engine's tokens, not of the trace's."""
        self.asked: dict[str, Asked] = {}
        self._engine, self._machine, self._conversations = engine, machine, conversations
        self._arrivals = [(one.arrival, number, 0) for number, one in enumerate(conversations)]
        heapq.heapify(self._arrivals)
        self._said: dict[Key, list[int]] = {}  # what was answered is part of later prompts
        self._now = 0.0  # on the trace's clock
        self._spent = 0.0  # seconds, in steps
        self._began: float | None = None
        engine.scheduler.clock = self._clock
        if engine.store is not None:
            engine.store.speeds = Willing()

    def run(self) -> dict[str, Asked]:
        while self._arrivals or self._engine.has_work:
            if not self._engine.has_work:
                self._now = max(self._now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self._now:
                _, number, turn = heapq.heappop(self._arrivals)
                self._ask(number, turn)
            for event in self._step():
                self._take(event)
            settle(self._engine, quiet=0)
        return self.asked

    def _ask(self, number: int, place: int) -> None:
        name, turn = f"{number}.{place}", self._conversations[number].turns[place]
        prompt = [token for piece in turn.context for token in self._words(piece)]
        prompt += drawn(self._engine.model, f"question {name}", turn.new)
        self.asked[name] = Asked(prompt, self._clock())
        self._engine.add(Request(name, prompt, greedy(turn.answer)))

    def _words(self, piece: Piece) -> list[int]:
        return self._said.get(piece.key) or drawn(self._engine.model, piece.key.hex(), piece.tokens)

    def _step(self) -> list[TokenEvent]:
        self._began = time.perf_counter()
        events = self._engine.step()
        self._spent, self._began = self._clock(), None
        tokens = self._engine.facts.tokens
        self._now += tokens / self._machine.prefill_rate + self._machine.step if tokens else 0.0
        return events

    def _clock(self) -> float:
        return self._spent + (time.perf_counter() - self._began if self._began is not None else 0.0)

    def _take(self, event: TokenEvent) -> None:
        asked = self.asked[event.request_id]
        if not asked.answer:
            below = event.reuse.tiers
            asked.tiers.update({**below, "device": event.num_cached_tokens - sum(below.values())})
            asked.first = self._clock() - asked.arrived - event.waited
        asked.answer.append(event.token)
        if event.finish_reason is not None:
            self._end(asked, *map(int, event.request_id.split(".")))

    def _end(self, asked: Asked, number: int, place: int) -> None:
        turns = self._conversations[number].turns
        for piece in turns[place].adds:
            before = sum(len(self._words(one)) for one in turns[place].context)
            self._said[piece.key] = [*asked.prompt[before:], *asked.answer]
        if place + 1 < len(turns):
            heapq.heappush(self._arrivals, (self._now + turns[place + 1].think, number, place + 1))


def rehearse(conversations: Sequence[Conversation], machine: Machine, small: Small, policies: Sequence[PolicyName]) -> Iterator[Played]:
    """Cold, then with each policy: the engine, and the simulation with a pool and tiers of the same size."""
    if small.shape not in SHAPES:
        raise InvalidOption(f"--shape {small.shape}: no such shape; give one of {', '.join(SHAPES)}")
    said = shrunk(islice(part(conversations, small.longest), small.sessions), small.scale)
    if not said:
        raise InvalidOption(f"no request of the trace has at most {small.longest} tokens; give another trace")
    largest = max(turn.prompt + turn.answer for one in said for turn in one.turns) + PAGE
    model = random_model(small.shape, device("cpu"), float32, positions=largest)
    facts = model.config
    page_bytes = PagePool.page_bytes(PAGE, facts.layers, facts.kv_heads, facts.head_dim, model.dtype)
    config = EngineConfig(page_size=PAGE, max_num_seqs=small.rows, kv_cache_tokens=small.rows * largest, prefix_caching=False)
    machine = _smaller(machine, small, page_bytes, config)
    cold, stats = _played(model, config, machine, said)
    yield told(RECOMPUTED, cold, stats)
    pages = len(_kept(cold.values()))
    pool, host, disk = (int(share * pages) for share in small.shares)
    file_bytes = file_size(PAGE, shape_of(model, config), page_bytes // facts.layers)
    pool, host, disk = max(pool, largest // PAGE + small.rows), max(host, LEAST), max(disk, LEAST)
    for policy in policies:
        with TemporaryDirectory(prefix="pando-bench-") as folder:
            config = replace(config, kv_cache_tokens=pool * PAGE, prefix_caching=True, policy=policy, host_gib=host * page_bytes / GIB)
            config = replace(config, disk_gib=disk * file_bytes / GIB, disk_dir=folder)
            found, stats = _played(model, config, machine, said)
        yield replace(told(policy, found, stats), equal=sum(found[name].answer == asked.answer for name, asked in cold.items()))
        simulated = replay(replace(machine, pool=pool * PAGE), said, POLICIES[policy], host * page_bytes, disk * page_bytes)
        yield _simulated(policy, simulated.served)


def part(conversations: Iterable[Conversation], longest: int) -> Iterator[Conversation]:
    """Conversations as long as they fit: what one would drop, an engine that is asked for the rest would compute again."""
    for one in conversations:
        turns = tuple(takewhile(lambda turn: turn.prompt + turn.answer <= longest, one.turns))
        if turns:
            yield replace(one, turns=turns)


def shrunk(conversations: Iterable[Conversation], scale: int) -> list[Conversation]:
    """The same with fewer tokens, and at least one of everything."""
    sizes: dict[Key, int] = {}

    def fewer(tokens: int) -> int:
        return max(1, round(tokens / scale)) if tokens else 0

    def turns(one: Conversation) -> Iterator[Turn]:
        for turn in one.turns:
            new, answer = fewer(turn.new), max(1, fewer(turn.answer))
            sizes.update({piece.key: new + answer for piece in turn.adds})
            context = tuple(Piece(piece.key, sizes.get(piece.key) or fewer(piece.tokens)) for piece in turn.context)
            adds = tuple(Piece(piece.key, new + answer) for piece in turn.adds)
            yield Turn(context, new, answer, adds, turn.think)

    return [Conversation(one.arrival, tuple(turns(one))) for one in conversations]


def _kept(asked: Iterable[Asked]) -> set[Key]:
    """All pages that are ever filled."""
    found = set[Key]()
    for one in asked:
        keys: list[Key] = []
        extend_keys(keys, Lineage.of(b""), [*one.prompt, *one.answer[:-1]], PAGE)
        found.update(keys)
    return found


def _smaller(machine: Machine, small: Small, page_bytes: int, config: EngineConfig) -> Machine:
    """A machine of which a token, that stands for several, takes as long as they take on the other."""
    times = page_bytes / PAGE / machine.kv_bytes / small.scale
    return replace(
        machine,
        kv_bytes=page_bytes // PAGE,
        prefill_rate=machine.prefill_rate / small.scale,
        step=machine.step * small.scale,
        batch=small.rows,
        window=None,
        page=PAGE,
        budget=config.max_num_batched_tokens,
        host_rate=machine.host_rate * times,
        disk_rate=machine.disk_rate * times,
    )


def _played(model: Model, config: EngineConfig, machine: Machine, said: Sequence[Conversation]) -> tuple[dict[str, Asked], Stats]:
    engine = Engine(model, config)
    try:
        return Rehearsal(engine, machine, said).run(), engine.stats()
    finally:
        engine.close()


def told(policy: str, asked: Mapping[str, Asked], stats: Stats) -> Played:
    tiers: Counter[str] = sum((one.tiers for one in asked.values()), Counter())
    line = _shares(policy, tiers, len(asked), sum(len(one.prompt) for one in asked.values()), simulated=False)
    first = [one.first for one in asked.values()]
    line = replace(line, first_mean=statistics.fmean(first), first_p95=float(np.quantile(first, 0.95)))
    if stats.store is None:
        return line
    return replace(line, prefetched=stats.store.prefetched, unsaved=stats.store.unsaved, lost=stats.store.lost)


def _simulated(policy: str, served: Sequence[Served]) -> Played:
    tiers = {tier: sum(getattr(turn, tier) for turn in served) for tier in ("device", "host", "disk")}
    return _shares(policy, tiers, len(served), sum(turn.prompt for turn in served), simulated=True)


def _shares(policy: str, tiers: Mapping[str, int], turns: int, tokens: int, *, simulated: bool) -> Played:
    device, host, disk = (tiers.get(tier, 0) / tokens for tier in ("device", "host", "disk"))
    return Played(policy, simulated, turns, tokens, device, host, disk, 1 - device - host - disk)


def shown(lines: Sequence[Played]) -> str:
    heads = ("policy", "", "device", "host", "disk", "computed", "first ms", "p95", "prefetched", "unsaved", "lost", "equal")
    rows = []
    for line in lines:
        shares = (f"{share:.1%}" for share in (line.device, line.host, line.disk, line.computed))
        times = ("" if value is None else f"{1000 * value:.3g}" for value in (line.first_mean, line.first_p95))
        pages = ("" if tally is None else str(sum(tally.values())) for tally in (line.unsaved, line.lost))
        equal = "" if line.equal is None else f"{line.equal} of {line.turns}"
        ahead = "" if line.prefetched is None else str(line.prefetched)
        rows.append((line.policy, "simulated" if line.simulated else "engine", *shares, *times, ahead, *pages, equal))
    return columns(heads, rows)
