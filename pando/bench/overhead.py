"""`pando bench overhead`: what HTTP costs. The same prompts through `LLM` and through a server, in turn, in one run."""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from ..config import EngineConfig, load
from ..engine.llm import LLM
from ..flags import Parser, written_file
from .host import chosen, hosted
from .lean import Line, Streamed
from .measure import Result, Samples, at_most, compared, finish, interleave, machine, show, told
from .options import whole
from .subject import add_name
from .traffic import VOCABULARY
from .trial import first_token, greedy

LEAST_SHARE = 0.9  # of the tokens per second
MOST_ADDED = 5.0  # milliseconds
PAUSE = 0.05  # seconds: threads that have nothing to do still spin for a while
HTTP, OFFLINE = "HTTP", "LLM"


@dataclass(frozen=True)
class Sizes:
    clients: int = 32
    tokens: int = 64  # of an answer
    prefix: int = 256  # tokens that all prompts share
    own: int = 16  # tokens after it
    repeats: int = 3
    firsts: int = 20  # prompts whose first token is timed

    @property
    def pool(self) -> int:
        """Tokens of a pool in which nothing is ever evicted, whatever is rounded up to whole pages."""
        rounds = self.clients * (self.repeats + 1) + 4 * self.firsts
        return self.prefix + rounds * (self.own + self.tokens + 2 * EngineConfig.page_size)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    sizes = Sizes(arguments.clients, arguments.tokens, arguments.prefix_tokens, repeats=arguments.repeats, firsts=arguments.firsts)
    with contextlib.ExitStack() as stack:
        model, options = stack.enter_context(chosen(arguments.model, arguments.random_weights))
        engine = load({"model": model, "max_num_seqs": sizes.clients, "kv_cache_tokens": sizes.pool}, os.environ, None)
        alike = ["--max-num-seqs", str(engine.max_num_seqs), "--kv-cache-tokens", str(engine.kv_cache_tokens)]
        quiet = ["--log-level", "error", "--disable-log-requests"]
        print("starting the server, and the same engine without one ...", flush=True)
        site = stack.enter_context(hosted(model, [*alike, *quiet, *options], {}))
        facts = machine(" ".join(["pando bench overhead", *argv]))
        facts |= {"model": "random weights" if arguments.random_weights else model, "load before": f"{os.getloadavg()[0]:.1f}"}
        show(facts)
        results = measure(LLM.from_config(engine), site.url, sizes, arguments.seed)
    finish(facts, results, arguments.json)
    return 0


def measure(llm: LLM, url: str, sizes: Sizes, seed: int = 0) -> list[Result]:
    with asyncio.Runner() as runner:
        bench = Bench(llm, url, sizes, runner, Random(f"{seed} overhead"))
        results: list[Result] = []
        for case in (bench.throughput, bench.first_token):
            print(f"\nmeasuring {case.__name__} ...", flush=True)
            results += told(case())
    return results


@dataclass
class Bench:
    llm: LLM
    url: str
    sizes: Sizes
    runner: asyncio.Runner
    random: Random
    cached: dict[str, list[int]] = field(default_factory=lambda: {HTTP: [], OFFLINE: []})

    def __post_init__(self) -> None:
        self._ids = sorted(set(self.llm.tokenizer.encode(VOCABULARY, special=False)))

    def throughput(self) -> list[Result]:
        """All clients at once. Every round has fresh tails after the one prefix, so that both caches are in the same state."""
        sizes, prefix = self.sizes, self._tokens(self.sizes.prefix)
        rounds = [[prefix + self._tokens(sizes.own) for _ in range(sizes.clients)] for _ in range(sizes.repeats + 1)]
        self._offline(rounds[0])
        self.runner.run(self._streamed(rounds[0]))
        for found in self.cached.values():
            found.clear()
        left = {HTTP: iter(rounds[1:]), OFFLINE: iter(rounds[1:])}
        runs = {OFFLINE: lambda: self._offline(next(left[OFFLINE])), HTTP: lambda: self.runner.run(self._streamed(next(left[HTTP])))}
        samples = interleave(runs, sizes.repeats)
        case = f"{sizes.clients} clients, {sizes.tokens} tokens each"
        warm = {side: statistics.median(found) for side, found in self.cached.items()}
        state = Result(
            "of each prompt, tokens cached", warm[HTTP], "tokens", warm[OFFLINE], None,
            f">= {sizes.prefix} on both sides", min(warm.values()) >= sizes.prefix,
        )  # fmt: skip
        return [compared(case, samples, "tok/s", ours=HTTP, higher=True, at_least=LEAST_SHARE), state]

    def first_token(self) -> list[Result]:
        """One client, nothing else to do; every prompt is new to both sides."""
        prompts = [self._tokens(self.sizes.own) for _ in range(self.sizes.firsts + 1)]
        samples = {side: found[1:] for side, found in self.runner.run(self._firsts(prompts)).items()}  # the first is a warm-up
        medians = {side: statistics.median(found) for side, found in samples.items()}
        case = f"first token of {self.sizes.own} new ones"
        whole = Result(case, medians[HTTP], "ms", medians[OFFLINE], note=f"against {OFFLINE}", samples=samples)
        return [whole, at_most("added by HTTP", medians[HTTP] - medians[OFFLINE], "ms", MOST_ADDED, "difference of the medians")]

    def _offline(self, prompts: Sequence[list[int]]) -> float:
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, greedy(self.sizes.tokens))
        seconds = time.perf_counter() - start
        self.cached[OFFLINE] += [output.num_cached_tokens for output in outputs]
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    async def _streamed(self, prompts: Sequence[list[int]]) -> float:
        """From the first request's sending to the last token's arrival, over connections that are open already."""
        lines = [await Line.open(self.url) for _ in prompts]
        asked = (one.complete(prompt, self.sizes.tokens) for one, prompt in zip(lines, prompts, strict=True))
        found: list[Streamed] = await asyncio.gather(*asked)
        for one in lines:
            await one.close()
        self.cached[HTTP] += [answer.cached for answer in found]
        seconds = max(answer.tokens[-1] for answer in found) - min(answer.sent for answer in found)
        return sum(len(answer.tokens) for answer in found) / seconds

    async def _firsts(self, prompts: Sequence[list[int]]) -> Samples:
        """Milliseconds of each prompt on both sides, each in turn the first, and after a pause in which the other side comes to rest."""
        one = await Line.open(self.url)
        times: Samples = {OFFLINE: [], HTTP: []}
        for turn, prompt in enumerate(prompts):
            for side in (OFFLINE, HTTP)[:: -1 if turn % 2 else 1]:
                await asyncio.sleep(PAUSE)
                times[side].append(first_token(self.llm, prompt)[0] if side == OFFLINE else await _first(one, prompt))
        await one.close()
        return times

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(self._ids, k=count)


async def _first(one: Line, prompt: list[int]) -> float:
    answer = await one.complete(prompt, 2)
    return 1000 * (answer.tokens[0] - answer.sent)


def _parser() -> Parser:
    about = "Measure what HTTP streaming costs: the same prompts through LLM and through a server in another process, in turn."
    parser, sizes = Parser(prog="pando bench overhead", description=about), Sizes()
    add_name(parser)
    parser.add_argument("--clients", type=whole(1), default=sizes.clients, metavar="N", help=f"requests at the same time ({sizes.clients})")
    parser.add_argument("--tokens", type=whole(2), default=sizes.tokens, metavar="N", help=f"tokens of each answer ({sizes.tokens})")
    parser.add_argument(
        "--prefix-tokens", type=whole(1), default=sizes.prefix, metavar="N", help=f"tokens all prompts share ({sizes.prefix})"
    )
    parser.add_argument(
        "--repeats", type=whole(1), default=sizes.repeats, metavar="N", help=f"runs of each side; medians count ({sizes.repeats})"
    )
    parser.add_argument(
        "--firsts", type=whole(1), default=sizes.firsts, metavar="N", help=f"prompts whose first token is timed ({sizes.firsts})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts (0)")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample, too")
    return parser
