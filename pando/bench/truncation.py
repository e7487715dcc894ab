"""`pando bench truncation`: a full window of text loses half of its tokens; how well does the model go on, and how soon?

Four ways to go on: what is left is computed anew; its states are moved up, and the first tokens stay; the same without those; and naively:
states with the old positions in their keys, read as if they stood at the new ones.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ..config import EngineConfig
from ..engine.imports import Import, find
from ..engine.request import Request, Span, Tenant, TokenEvent, Truncation
from ..engine.row import Row
from ..errors import InvalidOption
from ..flags import Parser, written_file
from ..kv.run import Origin, Run
from ..kv.segment import Segment
from ..model.load import Model, load
from .judge import Listener, surprise_of
from .measure import Result, Samples, at_least, at_most, compared, finish, interleave, show, told
from .options import whole
from .subject import add_device, facts_of
from .trial import greedy
from .workloads import DATA_VARIABLE, gather

RECOMPUTED, MOVED, ROOTLESS, NAIVE = "recomputed", "moved", "moved without the first tokens", "naive"
MOST_APART = 0.5  # percent of the perplexity
LEAST_REUSED = 90.0  # percent of what is left
LEAST_SOONER = 8.0  # times
WINDOWS_HELD = 8  # in the pool


@dataclass(frozen=True)
class Sizes:
    window: int = 2048
    scored: int = 512  # tokens behind it
    windows: int = 32  # single ones are up to 3 % apart: the mean of fewer would say little about half a percent
    new: int = 32  # tokens of the turn that overflows
    repeats: int = 5


QUICK = Sizes(window=128, scored=16, windows=2, new=4, repeats=2)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    texts, sizes = gather(arguments.text, arguments.data, os.environ), QUICK if arguments.quick else Sizes()
    sizes = replace(sizes, windows=arguments.windows or sizes.windows, repeats=arguments.repeats or sizes.repeats)
    model = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    facts = facts_of(arguments.model, model, " ".join(["pando bench truncation", *argv])) | {"text": texts.sources["prefix"]}
    show(facts)
    bench = Bench(model, model.tokenizer.encode(texts.prose), sizes)
    results = told(bench.perplexity(), judged=not arguments.quick)
    results += told(bench.first_token(), judged=not arguments.quick)
    finish(facts, results, arguments.json)
    return 0


@dataclass(frozen=True, eq=False)
class Unmoved(Import):
    """Reads states as if they stood where they are placed, whatever positions are in their keys."""

    by: int = 0

    def path(self) -> tuple[Segment, ...]:
        found = (segment for segment in super().path() if segment.first + self.by >= self.want.run.position)
        return tuple(replace(segment, first=segment.first + self.by) for segment in found)

    @classmethod
    def of(cls, found: Import) -> "Unmoved":
        run = found.want.run
        here = Run(run.tokens, run.position, Origin((), run.position))
        return cls(replace(found.want, run=here), found.stem, found.end, found.rest, by=run.shift)


class Bench:
    def __init__(self, model: Model, tokens: Sequence[int], sizes: Sizes) -> None:
        needed = max(sizes.windows * (sizes.window + sizes.scored), (sizes.repeats + 2) * sizes.window)
        if len(tokens) < needed:
            raise InvalidOption(
                f"the text has {len(tokens)} tokens, and {sizes.windows} windows and {sizes.repeats} turns need {needed}; "
                "give a longer one with --text"
            )
        self._tokens, self._sizes = tokens, sizes
        page = min(EngineConfig.page_size, sizes.window // 16)
        config = EngineConfig(max_model_len=sizes.window, kv_cache_tokens=WINDOWS_HELD * sizes.window, page_size=page, disk_gib=0)
        self.engine = Listener(model, config)
        self._ids = map(str, count())
        self._first, self._half = page, sizes.window // 2

    # ---- how well

    def perplexity(self) -> list[Result]:
        """Of the tokens behind each window, given that window less half of it."""
        stride = len(self._tokens) // self._sizes.windows
        nats: Samples = {way: [] for way in (RECOMPUTED, MOVED, ROOTLESS, NAIVE)}
        for number in range(self._sizes.windows):
            for way, surprise in self._window(self._tokens[number * stride :]).items():
                nats[way].append(surprise / self._sizes.scored)
            so_far = {way: math.exp(statistics.fmean(each)) for way, each in nats.items()}
            print(f"  window {number + 1}: " + ", ".join(f"{way} {each:.3f}" for way, each in so_far.items()), flush=True)
        case = f"perplexity of the next {self._sizes.scored} tokens"
        results = [Result(f"{case}, {way}", so_far[way], "", so_far[RECOMPUTED]) for way in (MOVED, ROOTLESS, NAIVE)]
        apart = 100 * abs(so_far[MOVED] / so_far[RECOMPUTED] - 1)
        near = at_most("moved states against recomputed ones", apart, "%", MOST_APART, _spread(nats[MOVED], nats[RECOMPUTED]))
        return [*results, replace(near, samples={way: [math.exp(each) for each in found] for way, found in nats.items()})]

    def _window(self, tokens: Sequence[int]) -> dict[str, float]:
        """The nats of what follows, in each way. All but the last token of the window are held, as behind an answer."""
        size, scored = self._sizes.window, self._sizes.scored
        self._compute(tokens[: size - 1])
        prompt, first, half = list(tokens[: size + scored - 1]), self._first, self._half
        following = tokens[size : size + scored]
        drop = (first, first + half)
        return {
            RECOMPUTED: self._surprise(prompt[: drop[0]] + prompt[drop[1] :], following),
            MOVED: self._surprise(prompt, following, drop),
            ROOTLESS: self._surprise(prompt, following, (0, half)),
            NAIVE: self._surprise(prompt, following, drop, naive=True),
        }

    def _compute(self, tokens: Sequence[int]) -> None:
        self.engine.add(Request(next(self._ids), tokens, greedy(1)))
        self.engine.drain()

    def _surprise(self, prompt: Sequence[int], following: Sequence[int], drop: Span | None = None, *, naive: bool = False) -> float:
        """Of the tokens that follow each of the last tokens of a prompt."""
        self.engine.add(Request(next(self._ids), prompt, greedy(1), drop=(drop,) if drop else ()))
        [row] = self.engine.answers
        row.scored = []  # every token's logits are wanted
        if naive:
            self._leave_in_place(row)
        _, logits = self.engine.drain()
        return surprise_of(logits[-len(following) :].log_softmax(-1), following)

    def _leave_in_place(self, row: Row) -> None:
        found = [find(self.engine.tree, want, self.engine.scheduler.clock()) for want in row.wants]
        row.imports = tuple(Unmoved.of(each) for each in found if each is not None)

    # ---- how soon

    def first_token(self) -> list[Result]:
        """Of the turn that overflows a window that is held, and of the same tokens computed anew. What the window ends with, and what is
        new, is new every time, so that nothing behind the moved states is known."""
        sizes = self._sizes
        histories = [self._history(place) for place in range(sizes.repeats + 1)]
        for history in histories:
            self._compute(history)
        turns = iter([history + self._new(place) for place, history in enumerate(histories)])
        cut = self._timed(next(turns)).reuse.truncated  # a warm-up
        assert cut is not None
        events, left = list[TokenEvent](), iter([self._left(place, histories[place], cut.ranges) for place in range(1, sizes.repeats + 1)])
        runs = {MOVED: lambda: self._clocked(next(turns), events), RECOMPUTED: lambda: self._clocked(next(left), [])}
        samples = interleave(runs, sizes.repeats)
        kept = events[-1].num_prompt_tokens - sizes.new
        case = f"first token of {sizes.new} new ones behind {kept} that are left"
        reused = 100 * statistics.median(event.num_cached_tokens / kept for event in events)
        share = at_least("tokens that are left, not computed again", reused, "%", LEAST_REUSED)
        return [compared(case, samples, "ms", ours=MOVED, higher=False, at_least=LEAST_SOONER), share]

    def _history(self, place: int) -> list[int]:
        """A full window; from its last page on, which is not quite full, as no other."""
        whole, size = (self._sizes.window - 1) // self._first * self._first, self._sizes.window - 1
        end = self._tokens[(place + 1) * size + whole : (place + 2) * size]
        return [*self._tokens[:whole], *end]

    def _new(self, place: int) -> list[int]:
        start = self._sizes.window + place * self._sizes.new
        return list(self._tokens[start : start + self._sizes.new])

    def _left(self, place: int, history: Sequence[int], dropped: Sequence[Span]) -> Request:
        """What is left of such a turn as a plain prompt, of a tenant who has nothing in the cache."""
        kept = [token for at, token in enumerate(history) if not any(start <= at < stop for start, stop in dropped)]
        return Request(next(self._ids), kept + self._new(place), greedy(1), Tenant(str(place).encode()))

    def _clocked(self, asked: list[int] | Request, events: list[TokenEvent]) -> float:
        start = time.perf_counter()
        events.append(self._timed(asked))
        return 1000 * (time.perf_counter() - start)

    def _timed(self, asked: list[int] | Request) -> TokenEvent:
        if not isinstance(asked, Request):
            asked = Request(next(self._ids), asked, greedy(1), truncation=Truncation())
        self.engine.add(asked)
        [event], _ = self.engine.drain()
        return event


def _spread(moved: Sequence[float], recomputed: Sequence[float]) -> str:
    """How far single windows are from one another: without that nobody knows what a mean over a few of them is worth."""
    apart = [100 * (ours - theirs) for ours, theirs in zip(moved, recomputed, strict=True)]
    if len(apart) < 2:
        return "one window says little"
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    return f"{statistics.fmean(apart):+.2f} % +- {error:.2f} (standard error); single windows from {min(apart):+.1f} to {max(apart):+.1f} %"


def _parser() -> argparse.ArgumentParser:
    about = "Measure truncation: how well and how soon a model continues when half of a full window is dropped."
    parser = Parser(prog="pando bench truncation", description=about)
    parser.add_argument("--model", default=EngineConfig.model, help=f"a model by name, directory or file ({EngineConfig.model})")
    add_device(parser)
    parser.add_argument("--windows", type=whole(1), metavar="N", help=f"number of windows, evenly spread over the text ({Sizes.windows})")
    parser.add_argument("--repeats", type=whole(1), metavar="N", help=f"runs of each timing; medians count ({Sizes.repeats})")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs; the numbers mean little")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text from which the windows are cut")
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"a folder with such a text; also {DATA_VARIABLE}")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample, too")
    return parser
