"""What the foundation promises, measured: `pando bench`."""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig
from ..errors import InvalidOption
from ..flags import Parser, written_file
from . import PARTS, cases
from .baseline import quiet
from .host import chosen
from .measure import Result, finish, machine, show, told
from .options import cores, whole
from .subject import add_name
from .workloads import DATA_VARIABLE, gather

CASES: dict[str, Callable[[cases.Setting], Iterable[Result]]] = {
    "greedy": cases.greedy_text,
    "perplexity": cases.perplexity,
    "decode": cases.decode_alone,
    "shared": cases.decode_shared,
    "unshared": cases.decode_unshared,
    "first": cases.first_token,
    "pages": cases.pages_in_use,
    "modules": cases.prompt_modules,
}
NEEDS_REAL_WEIGHTS = ("greedy", "perplexity")
AT_ANY_SIZE = (*NEEDS_REAL_WEIGHTS, "pages")  # must be what was promised


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    EngineConfig(threads=arguments.threads)  # no more than an engine takes
    names = [name for name in arguments.only or CASES if not (arguments.random_weights and name in NEEDS_REAL_WEIGHTS)]
    if not names:
        raise InvalidOption(f"with --random-weights nothing of {', '.join(arguments.only)} can be measured; leave one of the two out")
    quiet()
    with ExitStack() as stack:
        model, _ = stack.enter_context(chosen(arguments.model, arguments.random_weights))
        setting = cases.prepare(model, gather(arguments.text, arguments.data, os.environ), _size(arguments), arguments.threads)
        facts = machine(" ".join(["pando bench", *argv]))
        facts |= {"model": "random weights" if arguments.random_weights else model} | setting.facts()
        show(facts)
        results: list[Result] = []
        for name in names:
            print(f"\nmeasuring {name} ...", flush=True)
            results += told(CASES[name](setting), judged=not arguments.quick or name in AT_ANY_SIZE)
    finish(facts, results, arguments.json)
    return 0


def _size(arguments: argparse.Namespace) -> cases.Size:
    size = cases.QUICK if arguments.quick else cases.FULL
    tokens = None if arguments.full else arguments.ppl_tokens or size.scored_tokens
    return replace(
        size,
        scored_tokens=tokens,
        repeats=arguments.repeats or size.repeats,
        chats=arguments.chats or size.chats,
        system_tokens=arguments.system_tokens or size.system_tokens,
    )


def _parser() -> Parser:
    parts = "\n".join(f"  pando bench {name:<12}{what}" for name, what in PARTS.items())
    parser = Parser(
        prog="pando bench",
        description="Measure Pando beside transformers, in one process and on the same weights.",
        epilog=f"other benchmarks, each with options of its own:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_name(parser, "a Llama model")
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help=f"one of {', '.join(CASES)}; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat: to see that it runs; the numbers mean little")
    parser.add_argument("--repeats", type=whole(1), metavar="N", help=f"runs of each measurement; the median counts ({cases.FULL.repeats})")
    parser.add_argument("--threads", type=whole(1), default=cores(), metavar="N", help="CPU threads for both sides (the cores at hand)")
    parser.add_argument("--chats", type=whole(1), metavar="N", help=f"chat prompts whose greedy text is compared ({cases.FULL.chats})")
    parser.add_argument("--system-tokens", type=whole(1), metavar="N", help=f"tokens of text those share ({cases.FULL.system_tokens})")
    scored = parser.add_mutually_exclusive_group()
    scored.add_argument("--ppl-tokens", type=whole(1), metavar="N", help=f"tokens scored for perplexity ({cases.FULL.scored_tokens})")
    scored.add_argument("--full", action="store_true", help="score the whole text for perplexity")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text that the shared prefix is cut from")
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"a folder of texts and dialogues; also {DATA_VARIABLE}")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample, too")
    return parser
