"""Numbers, lists and files on the command lines of the benchmarks. Nothing here needs torch, or anything else that a host may lack."""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import InvalidOption
from ..flags import written_file

SUFFIXES = (".svg", ".png", ".pdf")
MOST = 999_999_999


def above_zero(given: argparse.Namespace, *names: str) -> None:
    """Refuses what would fail, or mean nothing, after minutes of measuring. An option that was not given has no value."""
    for name in names:
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidOption(f"--{name.replace('_', '-')} is {value}; it must be {'at least 1' if type(value) is int else 'above 0'}")


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not _is_whole(text, least):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {MOST}")
        return int(text)

    return parse


def whole_numbers(text: str) -> list[int]:
    """Each once, in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_whole(part, 1) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1 to {MOST}, such as 32,128")
    return sorted(set(map(int, parts)))


def _is_whole(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) and int(text) >= least


def number(*, zero: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _value(text)
        if not _is_number(value, zero):
            raise argparse.ArgumentTypeError(f"{text!r} is no number {_from(zero)} 0")
        return value

    return parse


def numbers(*, zero: bool = False) -> Callable[[str], list[float]]:
    """In the order given."""

    def parse(text: str) -> list[float]:
        values = [_value(part) for part in text.split(",")]
        if not all(_is_number(value, zero) for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers {_from(zero)} 0, such as 1,2.5")
        return values

    return parse


def _value(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_number(value: float, zero: bool) -> bool:
    return 0 < value < math.inf or (zero and value == 0)


def _from(zero: bool) -> str:
    return "from" if zero else "above"


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
