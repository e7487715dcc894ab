"""`pando schema quality`: what modular reuse costs the answers to your own prompts, and what repair buys back.

The file of prompts holds one PML prompt after the other; each begins on a line that starts with `<prompt`.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from ..config import EngineConfig
from ..engine.schemas import Schemas
from ..errors import InvalidPrompt
from ..flags import Parser, written_file
from ..markup.binding import Bound
from ..markup.outline import Encode
from ..markup.pml import Element, parse
from ..model.load import load
from .judge import Distance, Judge, Reference
from .measure import columns, write_json
from .options import decimal, several, text_of, whole
from .subject import add_device

TOKENS = 32
REPAIRS = (0.0, 0.1, 0.2, 1.0)
ENCODES: tuple[Encode, ...] = get_args(Encode)
SHOWN = 10  # modules that contribute most


@dataclass(frozen=True)
class Way:
    """How a prompt's states are made. No encode: as the schema says."""

    encode: Encode | None = None
    repair: float = 0.0


@dataclass(frozen=True)
class Line:
    way: Way
    distance: Distance | None  # None: this cannot be done, for the reason in `note`
    note: str = ""


@dataclass(frozen=True)
class Share:
    """A module, and by how much the divergence falls when it alone has seen what stands before it; nats per answer token."""

    path: str
    prompts: int
    fall: float


@dataclass(frozen=True)
class Report:
    prompts: int
    prompt_tokens: int
    plain: Distance
    lines: tuple[Line, ...]
    shares: tuple[Share, ...]


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    schema = parse(text_of(arguments.file), str(arguments.file))
    prompts = [parse(text, str(arguments.prompts)) for text in split(text_of(arguments.prompts))]
    if not prompts:
        raise InvalidPrompt(f"{arguments.prompts} holds no prompt; each begins on a line that starts with <prompt")
    config = EngineConfig(model=arguments.model, device=arguments.device, dtype=arguments.dtype, disk_gib=0)
    model = load(config.model, device=config.device, dtype=config.dtype, compiled=config.native)
    judge = Judge(model, config, arguments.tokens)
    ways = [Way(encode, repair) for encode in arguments.encode for repair in arguments.repair]
    found = report(judge, schema, prompts, ways, arguments.file.parent, progress=sys.stderr.isatty())
    print(shown(found))
    write_json(arguments.json, asdict(found))
    return 0


def report(
    judge: Judge, schema: Element, prompts: Sequence[Element], ways: Sequence[Way], folder: Path | None = None, *, progress: bool = False
) -> Report:
    """Every prompt in every way. Distances are sums over all prompts; one that cannot be repaired spoils the line."""
    bound = {encode: _bind(judge, schema, prompts, encode, folder) for encode in dict.fromkeys(way.encode for way in ways)}
    own = bound.get(None) or next(iter(bound.values()))
    plain, totals, notes, falls = Distance(), dict.fromkeys(ways, Distance()), dict[Way, str](), dict[str, list[float]]()
    for number, first in enumerate(own):
        if progress:
            print(f"prompt {number + 1} of {len(own)}", end="\r", file=sys.stderr, flush=True)
        reference = judge.reference(first.runs)
        plain += reference.distance
        for way in ways:
            try:
                totals[way] += judge.distance(bound[way.encode][number].runs, reference, way.repair)
            except InvalidPrompt as error:
                notes[way] = str(error)
        for path, fall in blames(judge, first, reference):
            falls.setdefault(path, []).append(fall)
    lines = tuple(Line(way, None if way in notes else totals[way], notes.get(way, "")) for way in ways)
    shares = [Share(path, len(each), sum(each) / plain.tokens) for path, each in falls.items()]
    tokens = sum(len(run) for each in own for run in each.runs)
    return Report(len(own), tokens, plain, lines, tuple(sorted(shares, key=lambda share: -share.fall)))


def blames(judge: Judge, bound: Bound, reference: Reference) -> Iterator[tuple[str, float]]:
    """Each module of a prompt with the nats that are won when its states, and no others, are the exact ones."""
    if len(reference.prompt) != bound.end and not judge.movable:
        return  # the exact states stand elsewhere, and cannot move
    whole = judge.distance(bound.runs, reference).divergence
    paths = dict.fromkeys(name for name, run in zip(bound.names, bound.runs, strict=True) if run.origin is not None)
    for path in paths:
        which = [index for index, name in enumerate(bound.names) if name == path]
        yield path, whole - judge.blame(bound.runs, reference, which).divergence


def _bind(judge: Judge, schema: Element, prompts: Sequence[Element], encode: Encode | None, folder: Path | None) -> list[Bound]:
    schemas = Schemas(judge.engine)
    schemas.library.add(schema if encode is None else encoded(schema, encode), directory=folder)
    return [schemas.library.bind(prompt)[1] for prompt in prompts]


def encoded(element: Element, encode: Encode) -> Element:
    """The same schema with all of its modules encoded in one way."""
    attributes = {name: value for name, value in element.attributes.items() if name != "encode" or element.name not in ("schema", "module")}
    if element.name == "schema":
        attributes["encode"] = encode
    children = tuple(encoded(child, encode) if isinstance(child, Element) else child for child in element.children)
    return element._replace(attributes=attributes, children=children)


def split(text: str) -> list[str]:
    """The prompts of a file, each behind as many line breaks as there are lines before it: errors know the right line."""
    lines = re.findall(r".*\n|.+", text)  # only what XML takes for a line: not U+2028, and others that Python knows
    starts = [number for number, line in enumerate(lines) if line.startswith("<prompt")]
    ends = [*starts[1:], len(lines)] if starts else []
    if stray := "".join(lines[: starts[0]] if starts else lines).strip():
        raise InvalidPrompt(f"the file of prompts begins with {stray[:40]!r}; each prompt begins on a line that starts with <prompt")
    return ["\n" * start + "".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


def shown(report: Report) -> str:
    plain = ("plain prompt", "", "0", "100 %", f"{report.plain.perplexity:.3f}", "")
    rows = [plain, *map(_row, report.lines)]
    heads = ("states", "repair", "KL, nats per token", "same top token", "perplexity of the answer", "tokens repaired")
    size, tokens = report.prompt_tokens / report.prompts, report.plain.tokens
    parts = [
        f"{report.prompts} prompts of {size:.0f} tokens on average; held against {tokens} tokens that the plain prompts are answered",
        columns(heads, rows),
    ]
    if report.shares:
        modules = [(share.path, str(share.prompts), f"{share.fall:+.4f}") for share in report.shares[:SHOWN]]
        parts.append(columns(("module", "prompts", "KL falls by, if it had seen what stands before it"), modules))
    return "\n\n".join(parts)


def _row(line: Line) -> tuple[str, ...]:
    way, distance = line.way, line.distance
    name, share = way.encode or "as the schema says", f"{way.repair:g}"
    if distance is None:
        return name, share, "-", "-", "-", line.note.split(",")[0]
    part = f"{distance.repaired} of {distance.foreign}"
    return name, share, f"{max(0.0, distance.kl):.4f}", f"{distance.agreement:.1%}", f"{distance.perplexity:.3f}", part


def _share(text: str) -> float:
    share = decimal(zero=True)(text)
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return share


def _encode(text: str) -> Encode:
    for encode in ENCODES:
        if encode == text:
            return encode
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ENCODES)}")


def _parser() -> argparse.ArgumentParser:
    about = "Compare answers to prompts made of a schema's modules with answers to plain prompts of the same text."
    parser = Parser(prog="pando schema quality", description=about)
    parser.add_argument("file", type=Path, metavar="FILE", help="the schema, in PML")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="P", help="a file of prompts; each begins on a line that starts with <prompt"
    )
    parser.add_argument("--model", default=EngineConfig.model, metavar="M", help=f"the model ({EngineConfig.model})")
    parser.add_argument("--repair", type=several(_share), default=REPAIRS, metavar="R,R", help="shares to repair (0,0.1,0.2,1)")
    ways = f"ways to encode, instead of the schema's: {', '.join(ENCODES)}"
    parser.add_argument("--encode", type=several(_encode), default=(None,), metavar="E,E", help=ways)
    parser.add_argument("--tokens", type=whole(1), default=TOKENS, metavar="N", help=f"tokens of each answer ({TOKENS})")
    add_device(parser)
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write the numbers, too")
    return parser
