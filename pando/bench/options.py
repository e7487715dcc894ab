"""Numbers, lists and files on the command lines of the benchmarks. Nothing here needs torch, or anything else that a host may lack."""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import InvalidOption
from ..flags import written_file

T = TypeVar("T")

SUFFIXES = (".svg", ".png", ".pdf")
MOST = 999_999_999


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {MOST}")
        return int(text)

    return parse


def decimal(*, zero: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf or (zero and value == 0)):
            raise argparse.ArgumentTypeError(f"{text!r} is no number {'from' if zero else 'above'} 0")
        return value

    return parse


def several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Separated by commas, in the order given."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """Each once, in ascending order."""
    return sorted(set(several(whole(1))(text)))


def chosen(words: Mapping[str, str]) -> Callable[[str], list[str]]:
    """Some of these words, each as what it stands for, in the order of the mapping."""

    def parse(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",")]
        if not set(given) <= set(words):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(words)}")
        return [meaning for word, meaning in words.items() if word in given]

    return parse


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder; make it, or name another")
    return Path(text)


def picture(text: str) -> Path:
    """A file that a plot can be written to."""
    file = written_file(text)
    if file.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{file}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise argparse.ArgumentTypeError("it needs matplotlib, which is not installed; pip install 'pando-llm[bench]'") from error
    return file


def text_of(file: Path) -> str:
    """Without the mark that some editors begin a file with."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{file}: cannot be read as text ({error}); give a UTF-8 file") from error


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
