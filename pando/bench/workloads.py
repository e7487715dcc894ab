"""What is measured on: text, chat prompts and questions. None of it ships with Pando.

The data is looked for in a folder; without one, the reference text that comes with Python stands in, and the output says so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidOption

DATA_VARIABLE = "PANDO_BENCH_DATA"
BOOK, ENCYCLOPEDIA, DIALOGUES = "war_and_peace.txt", "wikitext2_raw_validation.txt", "mtbench101.jsonl"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Texts:
    """`sources` says where each came from, for the output."""

    prose: str  # the shared prefix is cut from it
    scored: str  # for perplexity
    prompts: tuple[str, ...]  # first turns of conversations
    sources: dict[str, str]


def gather(text: Path | None, data: Path | None, environ: Mapping[str, str]) -> Texts:
    """The texts of this run: a file the user names, a data folder, or what every Python has."""
    folder = _folder(data, environ)
    spare = None if folder else _reference()
    prose = _read(text) if text else _read(folder / BOOK) if folder else spare or ""
    scored = _read(folder / ENCYCLOPEDIA) if folder else spare or ""
    prompts = _first_turns(_read(folder / DIALOGUES)) if folder else _topics()
    stand_in = "Python's reference documentation, as no data folder was found"
    sources = {
        "prefix": str(text.name) if text else BOOK if folder else stand_in,
        "perplexity": ENCYCLOPEDIA if folder else stand_in,
        "prompts": DIALOGUES if folder else stand_in,
    }
    return Texts(prose, scored, prompts, sources)


def _folder(data: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = data or (Path(environ[DATA_VARIABLE]) if environ.get(DATA_VARIABLE) else None)
    if named is None:
        return None
    missing = [name for name in (BOOK, ENCYCLOPEDIA, DIALOGUES) if not (named / name).exists()]
    if missing:
        raise InvalidOption(f"{named} lacks {', '.join(missing)}; name a folder that has them, or none to use Python's own documentation")
    return named


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file}: cannot be read as text ({error}); give a UTF-8 file") from error


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _topics() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    return tuple(f"Explain in a few words what {name} means in Python." for name in sorted(topics))


def _first_turns(lines: str) -> tuple[str, ...]:
    """The opening of each dialogue, of a length people type, spread over the file since neighbours are alike."""
    turns = [json.loads(line)["history"][0]["user"] for line in lines.splitlines() if line.strip()]
    fit = list(dict.fromkeys(turn for turn in turns if 20 <= len(turn) <= 300))
    stride = max(1, len(fit) // 64)
    return tuple(fit[::stride])


def prefix(encode: Encode, prose: str, length: int) -> list[int]:
    """The first `length` tokens of the prose."""
    tokens = encode(prose[: 16 * length])
    if len(tokens) < length:
        raise InvalidOption(f"the text has {len(tokens)} tokens, and the shared prefix needs {length}; give a longer one with --text")
    return tokens[:length]


def questions(encode: Encode, prompts: Sequence[str], count: int, length: int) -> list[list[int]]:
    """`count` questions of exactly `length` tokens, no two of which begin alike for long: each starts with its number."""
    found = []
    for i in range(count):
        tokens = encode(f"{i + 1}. ")
        while len(tokens) < length:
            tokens += encode(prompts[i % len(prompts)] + " ")
        found.append(tokens[:length])
    return found


def windows(tokens: Sequence[int], length: int, total: int) -> list[list[int]]:
    """Consecutive windows of `length` tokens, `total` tokens at most, the last one short; a window of one token scores nothing."""
    cut = [list(tokens[start : min(start + length, total)]) for start in range(0, min(total, len(tokens)), length)]
    return [window for window in cut if len(window) > 1]
