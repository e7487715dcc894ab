"""The command line of `pando bench serve`, and what it means."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import httpx

from ..errors import InvalidOption
from ..flags import Parser, written_file
from .client import Endpoint, Target
from .options import SUFFIXES, decimal, picture, several, whole
from .traffic import MAX_REQUESTS, Kind, Source, Workload, read_lengths, source

REQUESTS = 32
PREFIX_TOKENS, TURNS = 512, 4  # of the workloads that are about them


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    target: Target  # an empty model: the server's first
    workload: Workload
    source: Source
    tokens_per_word: float | None
    rates: tuple[float, ...]
    concurrency: int | None
    warmup: int
    seed: int
    json: Path | None
    plot: Path | None


def check(given: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    rates = tuple(given.rates or [given.rate])
    requests = REQUESTS if given.requests is None and given.duration is None else given.requests
    for rate in rates:
        expected = requests if requests is not None else rate * given.duration
        if expected > MAX_REQUESTS:
            raise InvalidOption(f"{expected:g} requests at a rate of {rate:g}, and {MAX_REQUESTS} are the most; give --requests")
    return Options(
        target=_target(given, environ),
        workload=_workload(given, requests),
        source=source(given.text),
        tokens_per_word=given.tokens_per_word,
        rates=rates,
        concurrency=given.concurrency,
        warmup=given.warmup,
        seed=given.seed,
        json=given.json,
        plot=given.plot,
    )


def _target(given: argparse.Namespace, environ: Mapping[str, str]) -> Target:
    key = _key(given.api_key, environ)
    if not key.isascii() or not key.isprintable():
        raise InvalidOption("the API key holds characters that no HTTP header can carry; look at --api-key and at the environment")
    return Target(_address(given.url), given.model or "", given.endpoint, given.timeout, key, given.ignore_eos)


def _key(given: str | None, environ: Mapping[str, str]) -> str:
    """A server of Pando may have several in its variable: any of them opens it."""
    if given is not None:
        return given
    return environ.get("PANDO_API_KEY", "").split(",")[0].strip() or environ.get("OPENAI_API_KEY", "")


def _workload(given: argparse.Namespace, requests: int | None) -> Workload:
    if (given.workload == "lengths") != (given.lengths is not None):
        raise InvalidOption("--workload lengths and --lengths FILE belong together; give both or neither")
    if given.workload != "multi-turn" and given.turns not in (None, 1):
        raise InvalidOption(f"--turns {given.turns} is for --workload multi-turn, and the workload is {given.workload}")
    prefix = given.prefix_tokens if given.prefix_tokens is not None else PREFIX_TOKENS if given.workload == "shared-prefix" else 0
    return Workload(
        kind=given.workload,
        prefix=prefix,
        prompt=given.prompt_tokens,
        answer=given.output_tokens,
        groups=given.groups,
        turns=(given.turns or TURNS) if given.workload == "multi-turn" else 1,
        think=given.think,
        requests=requests,
        duration=given.duration,
        lengths=read_lengths(given.lengths) if given.lengths else (),
    )


def _address(url: str) -> str:
    """The root of the server, from it or from the address that clients of OpenAI are given."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and httpx.URL(url).host and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        sound = False
    if not sound or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise InvalidOption(f"--url {url!r} is not the address of a server; give one such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise InvalidOption("--url has a user name or password, which would be printed; give a key with --api-key instead")
    return url.rstrip("/").removesuffix("/v1")


def _rate(text: str) -> float:
    return math.inf if text.strip() == "inf" else decimal()(text)


def parser() -> Parser:
    about = "Send requests to any OpenAI-compatible server, at the times they are meant to arrive, and measure what comes back."
    made = Parser(prog="pando bench serve", description=about, allow_abbrev=False)
    _add_server(made.add_argument_group("the server"))
    _add_arrivals(made.add_argument_group("arrivals"))
    _add_workload(made.add_argument_group("the workload", "Lengths are in tokens, and are met on average: see --tokens-per-word."))
    _add_output(made.add_argument_group("output"))
    return made


def _add_server(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="its address, with or without /v1 (%(default)s)")
    to.add_argument("--model", metavar="NAME", help="the model to use (the first that the server lists)")
    to.add_argument("--api-key", metavar="KEY", help="its API key (PANDO_API_KEY or OPENAI_API_KEY from the environment)")
    to.add_argument("--endpoint", choices=get_args(Endpoint), default="chat", help="the route that requests use (%(default)s)")
    ignore = "make answers exactly as long as requested, if the server knows ignore_eos (yes)"
    to.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=ignore)
    to.add_argument("--timeout", type=decimal(), default=600.0, metavar="S", help="seconds after which a request counts as failed (600)")


def _add_arrivals(to: argparse._ArgumentGroup) -> None:
    rates = to.add_mutually_exclusive_group()
    rates.add_argument("--rate", type=_rate, default=1.0, metavar="R", help="requests per second, Poisson; inf: all at once (1)")
    rates.add_argument("--rates", type=several(_rate), metavar="R,R,...", help="several rates, one after the other, such as 1,2,4,inf")
    to.add_argument("--requests", type=whole(1), metavar="N", help=f"requests at each rate ({REQUESTS} without --duration)")
    to.add_argument(
        "--duration", type=decimal(), metavar="S", help="seconds during which requests arrive; conversations that have begun are finished"
    )
    to.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="the most requests in flight; delays it causes are counted (no limit)"
    )
    to.add_argument(
        "--warmup", type=whole(0), default=0, metavar="N", help="requests sent before, with texts of their own; they are not counted (0)"
    )
    to.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of arrivals and texts; another seed gives others (0)")


def _add_workload(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--workload", choices=get_args(Kind), default="shared-prefix", help="what prompts look like (%(default)s)")
    prefix = f"length of the shared system prompt ({PREFIX_TOKENS} with shared-prefix, 0 with others)"
    to.add_argument("--prefix-tokens", type=whole(0), metavar="N", help=prefix)
    to.add_argument("--groups", type=whole(1), default=1, metavar="N", help="number of different shared prefixes (1)")
    to.add_argument("--prompt-tokens", type=whole(1), default=64, metavar="N", help="length of each request's, or turn's, own text (64)")
    to.add_argument("--output-tokens", type=whole(1), default=64, metavar="N", help="length of each answer (64)")
    to.add_argument("--turns", type=whole(1), metavar="N", help=f"turns of a conversation, with multi-turn ({TURNS})")
    to.add_argument(
        "--think", type=decimal(zero=True), default=1.0, metavar="S", help="mean seconds between an answer and the next turn (1)"
    )
    to.add_argument("--lengths", type=Path, metavar="FILE", help="with lengths: a CSV file of prompt and answer tokens to draw from")
    to.add_argument("--text", type=Path, metavar="FILE", help="a text from which prompts are cut (random words)")
    ratio = "tokens per word, to meet the lengths (measured by two requests)"
    to.add_argument("--tokens-per-word", type=decimal(), metavar="X", help=ratio)


def _add_output(to: argparse._ArgumentGroup) -> None:
    to.add_argument("--json", type=written_file, metavar="FILE", help="write the facts, the statistics and every request")
    to.add_argument("--plot", type=picture, metavar="FILE", help=f"draw a picture; the name ends in {', '.join(SUFFIXES)}")
