"""Lists on a command line."""

import argparse
import math
from collections.abc import Callable, Mapping


def whole_numbers(text: str) -> list[int]:
    """Each once, in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1 to 999999999, such as 32,128")
    return sorted(set(map(int, parts)))


def rates(text: str) -> list[float]:
    """In the order given."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers above 0, such as 1,2.5")
    return found


def chosen(words: Mapping[str, str]) -> Callable[[str], list[str]]:
    """Some of these words, each as what it stands for, in the order of the mapping."""

    def parse(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",")]
        if not set(given) <= set(words):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(words)}")
        return [meaning for word, meaning in words.items() if word in given]

    return parse
