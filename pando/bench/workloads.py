"""What is measured on: text, chat prompts and questions. None of it ships with Pando.

The data is looked for in a folder; without one, the reference text that comes with Python stands in, and the output says so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InvalidOption
from .options import text_of

DATA_VARIABLE = "PANDO_BENCH_DATA"
STAND_IN = "Python's reference documentation, as no data folder was found"
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
    if folder is None:
        found = Texts(_reference(), _reference(), _topics(), dict.fromkeys(("prefix", "perplexity", "prompts"), STAND_IN))
    else:
        book, encyclopedia, dialogues = (text_of(folder / name) for name in (BOOK, ENCYCLOPEDIA, DIALOGUES))
        sources = {"prefix": BOOK, "perplexity": ENCYCLOPEDIA, "prompts": DIALOGUES}
        found = Texts(book, encyclopedia, _first_turns(folder / DIALOGUES, dialogues), sources)
    return replace(found, prose=text_of(text), sources=found.sources | {"prefix": text.name}) if text else found


def _folder(data: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = data or (Path(environ[DATA_VARIABLE]) if environ.get(DATA_VARIABLE) else None)
    if named is None:
        return None
    missing = [name for name in (BOOK, ENCYCLOPEDIA, DIALOGUES) if not (named / name).exists()]
    if missing:
        raise InvalidOption(f"{named} lacks {', '.join(missing)}; name a folder that has them, or none to use Python's own documentation")
    return named


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _topics() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    return tuple(f"Explain in a few words what {name} means in Python." for name in sorted(topics))


def _first_turns(file: Path, lines: str) -> tuple[str, ...]:
    """The opening of each dialogue, of a length people type, spread over the file since neighbours are alike."""
    try:
        turns = [str(json.loads(line)["history"][0]["user"]) for line in lines.split("\n") if line.strip()]
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidOption(
            f"{file}: not dialogues in JSON lines with a history of user turns ({type(error).__name__}: {error})"
        ) from error
    fit = list(dict.fromkeys(turn for turn in turns if 20 <= len(turn) <= 300))
    if not fit:
        raise InvalidOption(f"{file}: none of {len(turns)} dialogues begins with 20 to 300 characters; give another")
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
