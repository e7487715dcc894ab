"""What it may cost to follow patterns: several of a JSON schema at once, or one of very many parts.

llguidance looks for such a text before an answer begins, and counts its steps only once each is done: the first one tries every way to go
on in one pattern with every way in the others. Twenty patterns of a few characters each take all memory there is.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any
from urllib.parse import unquote

from ..errors import InvalidSampling

MAX_WAYS = 2**22  # a few seconds
MAX_OPTIONAL = 1000  # half a second; it is the square of them that counts
_FORMAT = 32  # characters that a format counts for
_LEAST = 3  # beside its characters: a pattern may begin and end anywhere
_MEMBERS = "allOf", "anyOf", "oneOf", "prefixItems", "items"  # the last was a list in earlier drafts
_SCHEMAS = "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"


def check_patterns(schema: Mapping[str, Any]) -> None:
    """Raises InvalidSampling where too many or too long patterns would have to be followed by the same text."""
    try:
        ways = _Ways(schema).of(schema)
    except RecursionError as error:
        raise InvalidSampling("the references of the JSON schema lead too deep; refer to fewer others from within each") from error
    if ways > MAX_WAYS:
        raise InvalidSampling(
            "the JSON schema has texts that must follow too many or too long patterns at once; put what they ask for into one pattern"
        )


class _Ways:
    """An upper bound, by the lengths of patterns: those that hold together are multiplied, and of those that do not the largest counts."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # by the identity of a schema: references lead to the same again and again

    def of(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = 1  # within itself: what is further down stands elsewhere
            self._known[id(schema)] = self._counted(schema)
        return self._known[id(schema)]

    def _counted(self, schema: Mapping[str, Any]) -> int:
        pattern, named = schema.get("pattern"), schema.get("format")
        names = schema.get("patternProperties")
        for regex in (pattern, *(names if isinstance(names, Mapping) else ())):
            if isinstance(regex, str):
                check_regex(regex, "pattern in the JSON schema")
        own = len(pattern) + _LEAST if isinstance(pattern, str) else 1
        own *= _FORMAT if isinstance(named, str) else 1
        members = {key: [self.of(each) for each in _list(schema.get(key))] for key in _MEMBERS}
        apart = *members["prefixItems"], *members["items"]
        inner = [*apart, *(self.of(schema.get(key)) for key in _SCHEMAS), *self._each(schema.get("properties"))]
        together = prod([own, *members["allOf"], *self._each(schema.get("patternProperties")), self._referred(schema.get("$ref"))])
        return min(together * max([1, *members["anyOf"]]) * max([1, *members["oneOf"]]) * max(inner), MAX_WAYS + 1)

    def _each(self, schemas: Any) -> Iterable[int]:
        return [self.of(each) for each in schemas.values()] if isinstance(schemas, Mapping) else []

    def _referred(self, reference: Any) -> int:
        if not isinstance(reference, str):
            return 1
        found = self._found(reference)
        return self.of(found) if found is not None else self._whole

    @cached_property
    def _whole(self) -> int:
        return _all(self._root)

    def _found(self, reference: str) -> Any:
        """What `#/a/b` leads to; None for what is named in another way, or is not there."""
        place: Any = self._root
        start, *parts = unquote(reference).split("/")
        for part in parts:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
                place = place[int(part)]
            else:
                place = place.get(part) if isinstance(place, Mapping) else None
        return place if start == "#" else None


def _all(value: Any) -> int:
    """As if every pattern held at once."""
    inner = list(value.values()) if isinstance(value, Mapping) else _list(value)
    own = value.get("pattern") if isinstance(value, Mapping) else None
    return min(prod([len(own) + _LEAST if isinstance(own, str) else 1, *map(_all, inner)]), MAX_WAYS + 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_regex(text: str, what: str = "regex") -> None:
    """Raises InvalidSampling where too many parts may be missing: each may be the next one, and llguidance writes down what would follow
    each of them before it counts that as one step. An alternative that is empty needs a group."""
    if len(re.sub(r"\\.|[^?*{(]", "", text, flags=re.DOTALL)) > MAX_OPTIONAL:
        raise InvalidSampling(f"the {what} has more than {MAX_OPTIONAL} groups and parts that may be repeated or missing; use fewer")
