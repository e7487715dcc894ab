"""`pando bench serve`: open-loop load on any OpenAI-compatible server."""

import asyncio
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

from .. import __version__
from ..errors import InvalidOption
from . import plot, probe
from .arguments import Options, check, parser
from .client import Client, connect
from .load import Run, drive
from .measure import show, today, write_json
from .options import cores
from .report import as_json, describe, summarise, sweep
from .traffic import Source, Workload, conversations

EXIT_NOTHING, EXIT_INTERRUPT = 1, 130

Facts = dict[str, str]


def main(argv: Sequence[str]) -> int:
    options = check(parser().parse_args(argv), os.environ)
    facts: Facts = {}
    runs: list[Run] = []
    interrupted = False
    try:
        asyncio.run(_measure(options, facts, _command(argv), runs))
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
        print(f"\nstopped; so far:\n\n{describe(runs[-1])}")
    if len(runs) > 1:
        print("\n" + sweep(runs))
    _keep(options, facts, runs)
    if interrupted:
        return EXIT_INTERRUPT
    return 0 if any(summarise(run).answered for run in runs) else EXIT_NOTHING


async def _measure(options: Options, facts: Facts, command: str, runs: list[Run]) -> None:
    target = options.target
    async with connect(target.key) as http:
        target = replace(target, model=target.model or await probe.first_model(http, target.url))
        target, texts, origin = await probe.acquaint(http, target, options.source, str(options.seed))
        if options.tokens_per_word is not None:
            texts, origin = replace(texts, tokens_per_word=options.tokens_per_word), "given"
        facts |= {
            "date": today(),
            "command": command,
            "server": f"{target.url}, version {await probe.version(http, target.url)}",
            "model": target.model,
            "generator": f"pando {__version__}, Python {platform.python_version()}, {cores()} cores, {platform.machine()}",
            "workload": _described(options.workload),
            "tokens per word": f"{texts.tokens_per_word:.3g}, {origin}",
            "end of answers": "ignored: as long as asked for" if target.ignore_eos else "the model's own",
        }
        show(facts)
        client = Client(http, target)
        if options.warmup:
            await _warm(client, replace(options.workload, requests=options.warmup, duration=None), texts, options.seed)
        for run in _planned(options, texts):
            runs.append(run)
            await _show(client, run, options.concurrency)
            print(f"\n{run.rate:g} requests/s offered\n\n{describe(run)}", flush=True)


def _planned(options: Options, texts: Source) -> list[Run]:
    """Texts of their own for every rate: what one has asked may be in the server's cache."""
    made = [Run(rate, tuple(conversations(options.workload, texts, rate, f"{options.seed} {i}"))) for i, rate in enumerate(options.rates)]
    for run in made:
        if not run.planned:
            raise InvalidOption(
                f"with this seed nothing arrives in {options.workload.duration:g} s at a rate of {run.rate:g}; give a longer --duration"
            )
    return made


async def _warm(client: Client, workload: Workload, texts: Source, seed: int) -> None:
    run = Run(math.inf, tuple(conversations(workload, texts, math.inf, f"{seed} warmup")))
    await drive(client, run, 1, lambda: None)
    found = summarise(run)
    failed = "".join(f"; {count} x {reason}" for reason, count in found.failures.items())
    print(f"{'warmup':<16} {found.answered} of {found.planned} answered, not counted below{failed}", flush=True)


async def _show(client: Client, run: Run, concurrency: int | None) -> None:
    from tqdm import tqdm

    with tqdm(total=run.requests, unit="request", desc=f"{run.rate:g}/s", disable=not sys.stderr.isatty(), leave=False) as bar:
        await drive(client, run, concurrency, bar.update)


def _keep(options: Options, facts: Facts, runs: Sequence[Run]) -> None:
    try:
        write_json(options.json, as_json(facts, runs))
        if options.plot:
            plot.draw(runs, f"{facts['model']}, {facts['workload']}", options.plot)
    except OSError as error:
        file = error.filename or "a file"  # it was opened, and then there was no space
        raise InvalidOption(f"{file}: cannot be written ({error.strerror}); the table above is all there is") from error


def _described(work: Workload) -> str:
    sizes = f"lengths from {len(work.lengths)} pairs" if work.lengths else f"{work.prompt} prompt and {work.answer} answer tokens"
    prefix = f", behind {work.groups} x {work.prefix} shared tokens" if work.prefix else ""
    turns = f", {work.turns} turns" if work.turns > 1 else ""
    return f"{work.kind}: {sizes}{prefix}{turns}"


def _command(argv: Sequence[str]) -> str:
    """As it was given, without the key."""
    shown = list(argv)
    for i, word in enumerate(argv):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=..."
        elif word == "--api-key" and i + 1 < len(argv):
            shown[i + 1] = "..."
    return " ".join(["pando bench serve", *shown])
