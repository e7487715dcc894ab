"""`pando bench throughput`: whole engines with random weights, in the settings that the papers measured."""

import argparse
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from ...config import EngineConfig, KVDType, Quantization
from ...engine.costs import device_name
from ...errors import InvalidOption
from ...flags import Parser, written_file
from ...model.load import choose_device, choose_dtype
from ..attention.clock import FLUSH, Clock, Limits
from ..measure import machine, show, table
from ..options import decimal, picture, whole
from ..random_model import SHAPES, dressed, random_weights
from ..subject import add_device
from . import chats, chunk, cold, grid, prompt_cache, relay, steps
from .report import Draw, Report, draw
from .setting import Setting

EXIT_FAILED, EXIT_INTERRUPT = 1, 130
POSITIONS = 32768
USUAL = {"cuda": "llama-2-7b", "cpu": "smollm2-135m"}  # shapes, by device


class Table(NamedTuple):
    about: str
    measure: Callable[[Setting, argparse.Namespace], None]


TABLES = {
    "hydragen": Table("many rows behind one prefix: batch, prefix and new tokens", grid.measure),
    "steps": Table("steps without sharing: against the weights, and idle time", steps.measure),
    "cold": Table("first tokens of prompts of which nothing is known, beside transformers", cold.measure),
    "relay": Table("a batch job and a service behind a system prompt", relay.measure),
    "chats": Table("conversations with the engine's defaults: first tokens, and those that follow", chats.measure),
    "chunk": Table("latency, KV bytes and rows at a given rate", chunk.measure),
    "prompt-cache": Table("first tokens behind modules in the pool and in host memory", prompt_cache.measure),
}
DRAWN: dict[str, Draw] = {
    grid.TABLE: grid.draw,
    steps.TABLE: steps.draw,
    cold.TABLE: cold.draw,
    relay.JOB: relay.draw_job,
    relay.SERVICE: relay.draw_service,
    chats.TABLE: chats.draw,
    chunk.TABLE: chunk.draw,
    prompt_cache.TABLE: prompt_cache.draw,
}
QUICK = {
    "batches": [2], "prefixes": [64, 128], "new": [9], "steps": 3, "prompts": [16, 64], "requests": 12, "rows": 4,
    "cold_prompts": [16, 64], "longest": 12, "arrivals": [50.0, 200.0],
    "chunk_prompts": [64, 128], "chunk_arrivals": [100.0, 100.0], "chunk_requests": 3, "chunk_answer": 8,
    "module_tokens": 600, "repeats": 1, "chats": 4, "chat_seconds": 2.0, "think": 0.1,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(argv)
    chunk.check(arguments)  # whatever is known to fail after minutes of measuring is refused before
    relay.check(arguments)
    setting = _setting(arguments, " ".join(["pando bench throughput", *argv]))
    show(setting.report.facts)
    interrupted = False
    try:
        for name in arguments.only or TABLES:
            _measure(name, setting, arguments)
    except KeyboardInterrupt:
        interrupted = True
        print("\nstopped: what was measured until now is kept", flush=True)
    if setting.report.results:
        print("\n" + table(setting.report.results))
    if arguments.plot:
        draw(setting.report, DRAWN, f"{setting.report.facts['model']} on {setting.report.facts['device']}", arguments.plot)
    failed = any(one.failed for one in setting.report.skipped)
    return EXIT_INTERRUPT if interrupted else EXIT_FAILED if failed else 0


def _measure(name: str, setting: Setting, arguments: argparse.Namespace) -> None:
    """A table that breaks must not cost the others."""
    try:
        TABLES[name].measure(setting, arguments)
    except InvalidOption:
        raise
    except Exception as error:
        traceback.print_exc()
        setting.report.skip(name, f"{type(error).__name__}: {error}", failed=True)


def _setting(arguments: argparse.Namespace, command: str) -> Setting:
    place = choose_device(arguments.device)
    kind = choose_dtype(arguments.dtype, place)
    shape = arguments.shape or USUAL[place.type]
    positions = max(POSITIONS, max(arguments.prefixes) + 2 * max(arguments.new), max(arguments.cold_prompts) + 8)
    config, weights = random_weights(shape, place, kind, positions, quantization=arguments.quantization)
    model = dressed(shape, config, weights).with_states(arguments.kv_dtype)
    limits = Limits(place, arguments.bandwidth, arguments.rate)
    facts = machine(command)
    if not arguments.only or {"hydragen", "steps", "cold"} & set(arguments.only):
        name = str(kind).removeprefix("torch.")
        facts |= {"bandwidth TB/s": f"{limits.bandwidth:.3g}", "rate TFLOP/s": f"{limits.rate(name):.3g}"}
    facts |= {"model": f"random weights in the shape of {shape}", "device": device_name(place), "dtype": str(kind)}
    facts |= {"quantization": arguments.quantization, "KV cache": str(model.states)}
    clock = Clock(place, arguments.repeats, 1 << 20 if arguments.quick else FLUSH)
    report = Report(facts, arguments.json, judged=place.type == "cuda" and not arguments.quick)
    return Setting(model, weights, limits, clock, report, arguments.seed)


def _parser() -> Parser:
    listed = "\n".join(f"  {name:<14}{table.about}" for name, table in TABLES.items())
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="pando bench throughput", description=f"{__doc__}\n\n{listed}", formatter_class=style, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=TABLES, metavar="TABLE", help="one of the above; may be repeated (all)")
    parser.add_argument("--shape", choices=SHAPES, help=f"of the random weights ({', '.join(SHAPES)}; {USUAL['cuda']} on a GPU)")
    add_device(parser)
    parser.add_argument("--quantization", default=EngineConfig.quantization, choices=get_args(Quantization), help="of the weights (none)")
    parser.add_argument("--kv-dtype", default=EngineConfig.kv_dtype, choices=get_args(KVDType), help="of the KV cache (auto: as --dtype)")
    parser.add_argument("--bandwidth", type=decimal(), metavar="TB/S", help="of the device, for the floors (measured)")
    parser.add_argument("--rate", type=decimal(), metavar="TFLOP/S", help="of the device, for the floors (measured)")
    parser.add_argument("--repeats", type=whole(1), default=7, metavar="N", help="of products, reads and first tokens; medians count (7)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of tokens, lengths and arrivals (0)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs; the numbers mean little")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write what is measured, anew with every line")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw a panel for each table: .svg, .png or .pdf")
    grid.add_options(parser.add_argument_group("hydragen and steps; the modes are also those of relay"))
    cold.add_options(parser.add_argument_group("cold"))
    relay.add_options(parser.add_argument_group("relay"))
    chats.add_options(parser.add_argument_group("chats"))
    chunk.add_options(parser.add_argument_group("chunk"))
    prompt_cache.add_options(parser.add_argument_group("prompt-cache"))
    return parser
