"""The schemas of one model, by name."""

from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from ..errors import MarkupError, SchemaExists
from .binding import Bound, bind
from .outline import near
from .pml import Element, parse
from .prompt import prompt_schema
from .schema import Schema, read_schema
from .tokens import Tokenizer


class Library:
    """Safe to use from many threads. A schema is here as a whole or not at all."""

    def __init__(self, tokenizer: Tokenizer, *, movable: bool, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._movable = movable
        self._max_len = max_len
        self._schemas: dict[str, Schema] = {}
        self._lock = Lock()

    def add(self, pml: str | bytes | Element, *, file: str = "schema", directory: Path | None = None) -> Schema:
        """The schema. If it is here already, with the same content, it is the one that is here."""
        element = pml if isinstance(pml, Element) else parse(pml, file)
        made = read_schema(element, self._tokenizer, movable=self._movable, max_len=self._max_len, directory=directory)
        with self._lock:
            here = self._schemas.setdefault(made.name, made)
        if here.digest != made.digest:
            raise _exists(element, made.name)
        return here

    def remove(self, name: str) -> Schema | None:
        """Prompts that are bound already keep what they have."""
        with self._lock:
            return self._schemas.pop(name, None)

    def get(self, name: str) -> Schema | None:
        return self._schemas.get(name)

    def __iter__(self) -> Iterator[Schema]:
        with self._lock:
            return iter(list(self._schemas.values()))

    def __len__(self) -> int:
        return len(self._schemas)

    def bind(self, prompt: str | bytes | Element, *, file: str = "prompt") -> tuple[Schema, Bound]:
        element = prompt if isinstance(prompt, Element) else parse(prompt, file)
        schema = self._schemas.get(prompt_schema(element))
        if schema is None:
            raise self._unknown(element)
        return schema, bind(schema, element)

    def _unknown(self, element: Element) -> MarkupError:
        name = prompt_schema(element)
        with self._lock:
            known = list(self._schemas)
        return element.wrong(f"unknown schema {name[:60]!r}{near(name, known) or '; add it first'}")


def _exists(element: Element, name: str) -> SchemaExists:
    wrong = element.wrong(f"the name {name!r} is in use by a schema with different content; remove that one, or choose another name")
    return SchemaExists(wrong.message, wrong.file, wrong.line, wrong.column, wrong.text)
