"""`pando bench attention`: attention alone, over trees of segments. Read once, against read by every row, against torch's kernels, against
what the device can do at best."""

import argparse
import platform
import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ... import __version__
from ...config import EngineConfig
from ...engine.costs import Subject, default_cost, device_name, keep_cost
from ...errors import InvalidOption
from ...flags import Parser, written_file
from ...model.load import choose_device, choose_dtype
from ...model.shelf import Shelf
from ..measure import today, write_json
from ..options import cores, decimal, picture, whole
from . import calibrate as calibration
from .bench import Bench
from .cases import DTYPES, SHORT, Case, read_cases
from .clock import Clock, Limits
from .levels import Unfit
from .report import Measured, Skipped, Table, as_json, draw, read_peers, summary
from .suites import DEFAULT_MODEL, GQA, SUITES, Heads

EXIT_WRONG, EXIT_INTERRUPT = 1, 130
REPEATS = 30
LIST = "list"
SHOWN = 200  # characters of what a broken kernel says


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.suite == LIST:
        print("\n".join(f"{name:<10} {len(suite.cases()):>4} cases  {suite.about}" for name, suite in SUITES.items()))
        return 0
    _check(arguments)
    torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    limits = Limits(device, arguments.bandwidth, arguments.rate)
    bench = Bench(device, arguments.page_size, Clock(device, arguments.repeats), limits, Shelf.of_user().home)
    with torch.inference_mode():
        if arguments.calibrate:
            return _calibrate(bench, _heads(arguments, device))
        return _measure(bench, _cases(arguments, device), arguments, " ".join(["pando bench attention", *argv]))


def _measure(bench: Bench, cases: Sequence[Case], arguments: argparse.Namespace, command: str) -> int:
    peers = read_peers(arguments.peers) if arguments.peers else {}
    facts = _facts(bench, {case.dtype for case in cases}, command)
    for name, value in facts.items():
        print(f"{name:<16} {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    table = Table([case.name for case in cases], bool(peers))
    print("\n" + table.head(), flush=True)
    found: list[Measured | Skipped] = []
    interrupted = False
    try:
        for case in cases:
            found.append(_outcome(bench, case, peers.get(case.name)))
            print(table.line(found[-1]), flush=True)
            write_json(arguments.json, as_json(facts, found))  # each time: a long run may be ended from outside
    except KeyboardInterrupt:
        interrupted = True
        print("\nstopped: what was measured until now is kept", flush=True)
    measured = [one for one in found if isinstance(one, Measured)]
    print("\n" + "\n".join(summary(measured)))
    if arguments.plot and measured:
        draw(measured, str(facts["device"]), arguments.plot)
    bad = any(one.failed if isinstance(one, Skipped) else one.wrong for one in found)
    return EXIT_INTERRUPT if interrupted else EXIT_WRONG if bad else 0


def _outcome(bench: Bench, case: Case, peer_us: float | None) -> Measured | Skipped:
    """A kernel that breaks on one case must not cost the results of the others."""
    try:
        return bench.measure(case, peer_us)
    except Exception as error:
        traceback.print_exc()
        return Skipped(case.name, f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}", failed=True)


def _calibrate(bench: Bench, heads: Heads) -> int:
    subject = Subject(device_name(bench.device), heads.dtype, heads.hq, heads.hkv, heads.d)
    print(f"when sharing pays on {subject.device}: {heads} heads of {heads.d}, {heads.dtype} ...", flush=True)
    group = heads.hq // heads.hkv
    try:
        found = calibration.samples(heads, bench.page_size, bench.compare)
    except Unfit as error:
        raise InvalidOption(f"there is nothing to choose here: {error}") from error
    default = default_cost(bench.device, heads.hq, heads.hkv)
    cost = calibration.fit(found, group, default)
    print(calibration.table(found, group, cost))
    for name, model in (("default", default), ("calibrated", cost)):
        loss = calibration.lost(found, group, model)
        print(
            f"{name:<10}  launch {model.launch:8.1f} tokens, merge {model.merge:6.2f} tokens per row and head of a group; loses {loss:.2%}"
        )
    print(f"kept in {keep_cost(cost, subject, bench.costs, [sample._asdict() for sample in found])}")
    return 0


def _facts(bench: Bench, dtypes: set[str], command: str) -> dict[str, object]:
    """What a reader must know to judge the numbers."""
    versions = {"pando": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if bench.device.type == "cuda":
        versions |= {"triton": _triton(), "cuda": str(torch.version.cuda)}
    return {
        "device": device_name(bench.device),
        "versions": versions,
        "bandwidth_tb_s": round(bench.limits.bandwidth, 4),
        "rate_tflop_s": {dtype: round(bench.limits.rate(dtype), 4) for dtype in sorted(dtypes)},
        "repeats": bench.clock.repeats,
        "page_size": bench.page_size,
        "date": today(),
        "command": command,
    }


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return str(triton.__version__)


def _cases(arguments: argparse.Namespace, device: torch.device) -> list[Case]:
    if arguments.cases:
        cases = read_cases(arguments.cases)
    else:
        cases = SUITES[arguments.suite or ("peers" if device.type == "cuda" else "cpu")].cases()
    if arguments.dtype:
        cases = [replace(case, dtype=arguments.dtype) for case in cases]
    chosen = [case for case in cases if arguments.match in case.name]
    if not chosen:
        raise InvalidOption(f"--match {arguments.match!r}: none of the {len(cases)} cases has it in its name, as {cases[0].name!r} is one")
    return chosen


def _heads(arguments: argparse.Namespace, device: torch.device) -> Heads:
    heads = GQA if device.type == "cuda" else DEFAULT_MODEL
    if arguments.heads:
        written = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", arguments.heads)
        if written is None or int(written[1]) % int(written[2]):
            raise InvalidOption(f"--heads {arguments.heads}: give query and key heads as 32/8, the first a multiple of the second")
        heads = heads._replace(hq=int(written[1]), hkv=int(written[2]))
    if arguments.head_size:
        heads = heads._replace(d=arguments.head_size)
    return heads._replace(dtype=arguments.dtype or str(choose_dtype("auto", device)).removeprefix("torch."))  # as an engine chooses


def _check(arguments: argparse.Namespace) -> None:
    """Whatever is known to fail after minutes of measuring is refused before."""
    EngineConfig(threads=arguments.threads, page_size=arguments.page_size)  # no more of them than an engine takes
    if arguments.calibrate and (arguments.json or arguments.plot or arguments.peers or arguments.match):
        raise InvalidOption("--calibrate measures its own cases and keeps its own file; leave out --json, --plot, --peers and --match")
    if not arguments.calibrate and (arguments.heads or arguments.head_size):
        raise InvalidOption("--heads and --head-size are for --calibrate; the heads of a case stand in it, and --match chooses among them")


def _dtype(word: str) -> str:
    name = SHORT.get(word, word)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(DTYPES)}")
    return name


def _parser() -> Parser:
    parser = Parser(prog="pando bench attention", description=__doc__)
    size = EngineConfig.page_size
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where it runs; auto: a GPU if there is one (auto)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite", choices=(*SUITES, LIST), metavar="NAME", help="built-in cases; list tells which (peers on a GPU, else cpu)"
    )
    what.add_argument("--cases", type=Path, metavar="FILE", help="cases of your own, as JSON")
    what.add_argument("--calibrate", action="store_true", help="measure when sharing pays here, and keep it for engines on this device")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument(
        "--dtype", type=_dtype, metavar="NAME", help=f"{', '.join(DTYPES)} (as each case says; with --calibrate, an engine's)"
    )
    parser.add_argument("--page-size", type=whole(1), default=size, metavar="N", help=f"token slots in a page ({size})")
    parser.add_argument(
        "--repeats", type=whole(1), default=REPEATS, metavar="N", help=f"runs of each, of which the median counts ({REPEATS})"
    )
    parser.add_argument("--threads", type=whole(1), default=cores(), metavar="N", help="CPU threads (the cores at hand)")
    parser.add_argument("--bandwidth", type=decimal(), metavar="TB/S", help="of the device, for the floor (measured)")
    parser.add_argument("--rate", type=decimal(), metavar="TFLOP/S", help="of the device, for the floor (measured)")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="JSON: microseconds of the best other kernel, by case, to compare with")
    parser.add_argument("--heads", metavar="Q/K", help="with --calibrate: query and key heads (32/8; on a CPU 9/3)")
    parser.add_argument("--head-size", type=whole(1), metavar="N", help="with --calibrate: elements of a head (128; on a CPU 64)")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw them: .svg, .png or .pdf")
    return parser
