"""`pando bench store`: what it is worth that context outlives the pool, and what that costs.

A conversation that comes back, from each tier and after a restart; loading layer by layer; saving beside the computation; and rounding: of
what is kept below the device, and of weights and states on it.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ..flags import Parser, written_file
from ..model.load import Model
from . import codecs, preload, returning, rounding, saving
from .measure import Result, finish, show, told
from .options import decimal, folder, picture, whole
from .picture import figure_in
from .subject import add_model, facts_of, model_of, named
from .workloads import gather


@dataclass(frozen=True)
class Setting:
    model: Model
    folder: Path
    arguments: argparse.Namespace


def conversation(setting: Setting) -> list[Result]:
    talk, repeats = returning.QUICK if setting.arguments.quick else returning.Talk(), setting.arguments.repeats
    return returning.Returning(setting.model, replace(talk, repeats=repeats or talk.repeats), setting.folder).results()


def layers(setting: Setting) -> list[Result]:
    given, on_gpu = setting.arguments, setting.model.device.type == "cuda"
    sweep = preload.QUICK if given.quick else preload.ON_GPU if on_gpu else preload.Sweep()
    changes = {"repeats": given.repeats, "rows": given.rows, "new": given.new, "bandwidth": given.bandwidth, "modules": given.modules}
    sweep = replace(sweep, **{name: value for name, value in changes.items() if value is not None})
    return preload.Preload(setting.model, sweep, setting.folder).results()


def saved(setting: Setting) -> list[Result]:
    work = saving.QUICK if setting.arguments.quick else saving.Work()
    return saving.Saving(setting.model, work, setting.folder).results()


def rounded(setting: Setting) -> list[Result]:
    reading = codecs.QUICK if setting.arguments.quick else codecs.Reading()
    return codecs.compare_codecs(setting.model, gather(setting.arguments.text, None, {}).prose, reading, setting.folder)


def in_8_bits(setting: Setting) -> list[Result]:
    passage, text = rounding.QUICK if setting.arguments.quick else rounding.Passage(), gather(setting.arguments.text, None, {}).prose
    return rounding.compare_fp8(setting.model, partial(model_of, setting.arguments), text, passage)


CASES: dict[str, Callable[[Setting], list[Result]]] = {
    "conversation": conversation,
    "preload": layers,
    "saving": saved,
    "codec": rounded,
    "fp8": in_8_bits,
}


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    model = model_of(arguments)
    facts = facts_of(named(arguments), model, " ".join(["pando bench store", *argv]))
    show(facts)
    results: dict[str, list[Result]] = {}
    for name in arguments.only or CASES:
        print(f"\nmeasuring {name} ...", flush=True)
        with TemporaryDirectory(prefix="pando-bench-", dir=arguments.dir) as place:
            results[name] = told(CASES[name](Setting(model, Path(place), arguments)), judged=not arguments.quick)
    finish(facts, [result for found in results.values() for result in found], arguments.json)
    if arguments.plot:
        draw(results, f"{named(arguments)} on {model.device}", arguments.plot)
    return 0


def draw(results: dict[str, list[Result]], title: str, file: Path) -> None:
    """How soon a conversation is answered, by where it is; and what loading layer by layer spares, by the length of what is loaded."""
    with figure_in(file, title, 11, 4) as figure:
        left, right = figure.subplots(1, 2)
        for result in results.get("conversation", ()):
            for name, times in result.samples.items():
                left.barh(name, statistics.median(times), color="tab:blue")
        left.set(xlabel="time to first token, ms", xscale="log")
        found: dict[str, list[float]] = {}
        for result in results.get("preload", ()):
            found.setdefault(result.case.rpartition(", ")[2], []).append(result.ours)
        for way, values in found.items():
            right.plot(values, marker="o", label=way)
        if found:
            right.set_xticks(range(len(values)), [result.case.partition(" loaded")[0] for result in results["preload"]][:: len(found)])
            right.set(xlabel="tokens loaded", ylabel="% less than load, then compute")
            right.legend()


def _parser() -> argparse.ArgumentParser:
    about = "Measure the tiers below the pool: conversations that come back, loading, saving and rounding."
    parser = Parser(prog="pando bench store", description=about)
    add_model(parser)
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help=f"one of {', '.join(CASES)}; may be repeated")
    parser.add_argument("--repeats", type=whole(1), metavar="N", help="of each conversation and load; medians count (3; on a GPU 7 loads)")
    parser.add_argument("--rows", type=whole(1), metavar="N", help="requests whose context is loaded together (1; on a GPU 16)")
    parser.add_argument("--new", type=whole(1), metavar="N", help="tokens that are computed after what is loaded (64; on a GPU 100)")
    parser.add_argument(
        "--modules", type=whole(1), metavar="N", help="the context that is loaded is made of so many modules (it is a plain one)"
    )
    bandwidth = "of the tier that stands in for the disk when loads are measured (100; on a GPU they come from host memory instead)"
    parser.add_argument("--bandwidth", type=decimal(), metavar="MB/S", help=bandwidth)
    parser.add_argument("--dir", type=folder, metavar="DIR", help="where the disk tier is made, and removed at the end (the system's own)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text for measuring rounding (the documentation of Python)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs; the numbers mean little")
    spares = "draw the time to the first token, and what loading by layers spares"
    parser.add_argument("--plot", type=picture, metavar="FILE", help=spares)
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample, too")
    return parser
