"""Every error a user can meet.

    PandoError
    ├── InputError             the request, option or file is at fault: exit code 2, and nothing else is harmed
    │   ├── ModelNotFound        no such directory, file, repository or catalogue name
    │   ├── BadModelFile         there, but truncated, corrupt or not what it claims to be
    │   ├── UnsupportedModel     sound, but of an architecture, tensor type or feature that Pando does not run
    │   ├── PromptTooLong        more tokens than the context holds
    │   ├── InvalidPrompt        not text, not tokens of this model, or not a conversation its template accepts
    │   ├── MarkupError          PML, or a function that becomes PML, that means nothing; knows the place
    │   │   └── SchemaExists       the name is in use by a schema of other content
    │   ├── InvalidSampling      sampling values that mean nothing
    │   ├── InvalidOption        an engine or command-line option that cannot work
    │   ├── Closed               an LLM that was closed
    │   ├── ForeignProcess       an LLM of the process that this one was forked from
    │   ├── PoolTooSmall         one request needs more pages than there are
    │   └── QuotaExceeded        more would be pinned than may be
    └── FetchFailed            a download did not complete; trying again may help

Each message says what is wrong, how much, and what to do about it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import TypeVar

Cls = TypeVar("Cls", bound=type)


def counted(count: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant by a misspelt word."""
    close = get_close_matches(word, known, n=1, cutoff=0.7)
    return close[0] if close else None


def known_only(check: Callable[[Iterable[str]], None]) -> Callable[[Cls], Cls]:
    """A class for which `check` refuses what it is given by a name that it does not have: Python would not say what was meant."""

    def decorate(kind: Cls) -> Cls:
        init: Callable[..., None] = kind.__init__  # type: ignore[misc]

        @wraps(init)
        def checked(*args: object, **given: object) -> None:
            check(given)
            init(*args, **given)

        kind.__init__ = checked  # type: ignore[misc]
        return kind

    return decorate


class PandoError(Exception):
    """The root: catch this to catch everything Pando raises on purpose."""


class InputError(PandoError):
    pass


class ModelNotFound(InputError):
    pass


class BadModelFile(InputError):
    pass


class UnsupportedModel(InputError):
    pass


class PromptTooLong(InputError):
    pass


class InvalidPrompt(InputError):
    pass


class MarkupError(InputError):
    """What was found, where, and what would be right. Lines and columns count from 1."""

    def __init__(self, message: str, file: str, line: int, column: int, text: str = "") -> None:
        super().__init__(f"{file}:{line}:{column}: {message}")
        self.message = message
        self.file = file
        self.line = line
        self.column = column
        self.text = text  # the line of the source

    def shown(self, width: int = 120) -> str:
        """The message, the line of the source, and a caret under the place. Of a long line, the part around the place."""
        start = max(0, min(self.column - 1 - width // 2, len(self.text) - width))
        before = "".join("\t" if char == "\t" else " " for char in self.text[start : self.column - 1])
        return f"{self}\n    {self.text[start : start + width]}\n    {before}^"


class SchemaExists(MarkupError):
    pass


class InvalidSampling(InputError):
    pass


class InvalidOption(InputError):
    pass


class Closed(InputError):
    pass


class ForeignProcess(InputError):
    pass


class PoolTooSmall(InputError):
    pass


class QuotaExceeded(InputError):
    pass


class FetchFailed(PandoError):
    pass


@contextmanager
def one_of_several(name: str, place: int, count: int) -> Iterator[None]:
    """Of several prompts, an error says which it is about: whoever sends a thousand could only guess."""
    try:
        yield
    except (PromptTooLong, InvalidPrompt, MarkupError, PoolTooSmall) as error:
        if count > 1:
            error.args = (f"{name}[{place}]: {error}",)
        raise
