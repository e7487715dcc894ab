"""What keeping costs those who compute meanwhile: the same work with tiers below the pool and without."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from ..engine.engine import Engine
from ..model.load import Model
from .measure import Result, interleave, paired
from .trial import Size, ask, drawn, opened, settle

ON, OFF = "with a store", "without"
AT_LEAST = 0.97  # times the speed without


@dataclass(frozen=True)
class Work:
    prompts: int = 2  # one after another
    prompt: int = 512  # tokens
    rows: int = 4  # that decode together
    answer: int = 128  # tokens of each
    pairs: int = 8


QUICK = Work(prompts=2, prompt=64, rows=2, answer=8, pairs=2)


@dataclass
class Saving:
    model: Model
    work: Work
    folder: Path
    behind: list[float] = field(default_factory=list)  # seconds that saving went on after the answers

    def __post_init__(self) -> None:
        work = self.work
        tokens = 2 * work.pairs * (work.prompts * (work.prompt + 64) + work.rows * (work.answer + 128))
        self._size = Size(pool=4 * (work.prompts * work.prompt + work.rows * (work.answer + 128)), kept=2 * tokens, rows=work.rows)
        self._numbers = count()

    def results(self) -> list[Result]:
        host = self.model.device.type == "cuda"
        engines = {ON: opened(self.model, self._size, self.folder, host=host), OFF: opened(self.model, self._size, None)}
        results = []
        for case, measured in ((f"prompts of {self.work.prompt} tokens", self._prefill), (f"{self.work.rows} answers", self._decode)):
            before = self._stored(engines[ON])
            for engine in engines.values():
                measured(engine)
            runs: dict[str, Callable[[], float]] = {name: partial(measured, engine) for name, engine in engines.items()}
            self.behind.clear()
            samples = interleave(runs, self.work.pairs)
            results.append(self._compared(case, samples, before, self._stored(engines[ON])))
        engines[ON].close()
        return results

    def _prefill(self, engine: Engine) -> float:
        prompts = [self._drawn(self.work.prompt) for _ in range(self.work.prompts)]
        start = time.perf_counter()
        for prompt in prompts:
            ask(engine, [prompt])
        return self._rate(engine, start, self.work.prompts * self.work.prompt)

    def _decode(self, engine: Engine) -> float:
        prompts = [self._drawn(16) for _ in range(self.work.rows)]
        start = time.perf_counter()
        ask(engine, prompts, self.work.answer)
        return self._rate(engine, start, self.work.rows * self.work.answer)

    def _rate(self, engine: Engine, start: float, tokens: int) -> float:
        """What is saved later must not slow the next measurement down."""
        seconds = time.perf_counter() - start
        self.behind += [settle(engine)] if engine.store is not None else []
        return tokens / seconds

    def _drawn(self, tokens: int) -> list[int]:
        return drawn(self.model, f"saving {next(self._numbers)}", tokens)

    def _stored(self, engine: Engine) -> tuple[int, int]:
        """Pages that were saved, and those that were not."""
        facts = engine.stats().store
        assert facts is not None
        return facts.saved.get("disk", 0), sum(facts.unsaved.values())

    def _compared(self, case: str, samples: dict[str, list[float]], before: tuple[int, int], after: tuple[int, int]) -> Result:
        """In pairs, since the machine's moods are larger than what is looked for."""
        saved, unsaved = (now - then for then, now in zip(before, after, strict=True))
        note = f"saving went on for {1000 * statistics.median(self.behind):.0f} ms; {saved} pages saved, {unsaved} not"
        return paired(f"{case}, with a store", samples, "tokens/s", ours=ON, theirs=OFF, at_least=AT_LEAST, note=note)
