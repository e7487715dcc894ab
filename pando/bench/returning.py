"""A conversation that comes back: how soon its next turn is answered, by where its context is found."""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..engine.engine import Engine
from ..model.load import Model
from .measure import Result, at_most, compared, counted, interleave
from .trial import Size, Trial, ask, drawn, opened, settle

POOL, HOST, DISK, RESTART, AGAIN = "the pool", "host memory", "disk", "disk, after a restart", "computed again"
SOONER = 8.0  # times, from disk
RESTARTED = 1.2  # times from disk


@dataclass(frozen=True)
class Talk:
    """Turns of a conversation in tokens. Its answers are given, not generated, so that it is the same in every run."""

    turns: int = 10
    turn: int = 416  # question and answer
    question: int = 128
    answer: int = 8  # tokens that the last turn is compared by
    repeats: int = 3


QUICK = Talk(turns=3, turn=64, question=16, answer=4, repeats=1)


@dataclass
class Returning:
    model: Model
    talk: Talk
    folder: Path  # for the directories of tiers
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    openings: list[float] = field(default_factory=list)  # seconds

    def __post_init__(self) -> None:
        talk = self.talk
        self._history = drawn(self.model, "history", (talk.turns - 1) * talk.turn)
        self._other = drawn(self.model, "other", talk.turn)
        tokens = len(self._history) + len(self._other) + talk.repeats * (talk.question + talk.answer)
        self._size = Size(pool=2 * tokens + 1024, kept=2 * tokens + 1024)

    def results(self) -> list[Result]:
        kept = self.folder / "kept"
        self._have(kept)
        with self._copy(kept) as one, self._copy(kept) as two:
            pooled, hosted, bare = opened(self.model, self._size, one), opened(self.model, self._size, two, host=True), self._bare()
            for engine in (pooled, hosted):
                ask(engine, [self._history])
            runs: dict[str, Callable[[], float]] = {
                POOL: lambda: self._timed(POOL, pooled),
                HOST: lambda: self._timed(HOST, hosted, clear=True),
                DISK: lambda: self._reopened(DISK, kept, used=True),
                RESTART: lambda: self._reopened(RESTART, kept, used=False),
                AGAIN: lambda: self._timed(AGAIN, bare, clear=True),
            }
            samples = interleave(runs, self.talk.repeats)
            for engine in (pooled, hosted):
                engine.close()
        return self._told(samples)

    def _have(self, kept: Path) -> None:
        """The conversation, turn by turn, and a short one beside it, on disk."""
        engine = opened(self.model, self._size, kept)
        for turn in range(1, self.talk.turns):
            ask(engine, [self._history[: turn * self.talk.turn]])
        ask(engine, [self._other])
        engine.close()

    def _bare(self) -> Engine:
        engine = opened(self.model, self._size, None)
        ask(engine, [self._other])
        return engine

    def _timed(self, name: str, engine: Engine, *, clear: bool = False) -> float:
        settle(engine)
        if clear:
            engine.clear_cache()
        number = len(self.trials.setdefault(name, []))
        question = drawn(self.model, f"question {number}", self.talk.question)
        self.trials[name].append(trial := ask(engine, [[*self._history, *question]], self.talk.answer))
        return trial.ms

    def _reopened(self, name: str, kept: Path, *, used: bool) -> float:
        """By an engine that was just opened, or by one that has loaded another conversation meanwhile."""
        with self._copy(kept) as folder:
            start = time.perf_counter()
            engine = opened(self.model, self._size, folder)
            self.openings.append(time.perf_counter() - start)
            if used:
                ask(engine, [self._other])
            found = self._timed(name, engine)
            engine.close()
        return found

    @contextmanager
    def _copy(self, kept: Path) -> Iterator[Path]:
        """Every engine has a directory of its own: it keeps what it is asked."""
        with TemporaryDirectory(dir=self.folder) as place:
            yield Path(shutil.copytree(kept, Path(place) / "store"))

    def _told(self, samples: dict[str, list[float]]) -> list[Result]:
        results = []
        for name in (POOL, HOST, DISK, RESTART):
            case = f"turn {self.talk.turns} behind {len(self._history)} tokens, from {name}"
            found = {each: samples[each] for each in (name, AGAIN)}
            least = SOONER if name == DISK else None
            results.append(compared(case, found, "ms", ours=name, higher=False, at_least=least, note=self._origin(name)))
        medians = {name: statistics.median(each) for name, each in samples.items()}
        ratio, note = medians[RESTART] / medians[DISK], f"opening engine and store took {1000 * statistics.median(self.openings):.0f} ms"
        results.append(at_most("the same after a restart, against from disk", ratio, "times", RESTARTED, note))
        results.append(self._equal("greedy answers from below equal to those from the pool", (HOST, DISK, RESTART), POOL))
        if self.model.dtype == torch.float32:  # in 16 bits, what was computed in other batches is rounded otherwise
            results.append(self._equal("greedy answers equal to those computed again", (POOL, HOST, DISK, RESTART), AGAIN))
        return results

    def _equal(self, case: str, names: Sequence[str], standard: str) -> Result:
        pairs = [pair for name in names for pair in zip(self.trials[name], self.trials[standard], strict=True)]
        return counted(case, sum(mine.answers == theirs.answers for mine, theirs in pairs), len(pairs))

    def _origin(self, name: str) -> str:
        trial = self.trials[name][-1]
        below = ", ".join(f"{count} from {tier}" for tier, count in trial.tiers.items())
        return f"{trial.device} tokens reused" + (f", {below}" if below else "")
