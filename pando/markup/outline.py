"""What a schema says, before anything has a position: modules by name, nested as they are written, with the tokens of each.

Roles and modules without a name leave no trace but their tokens: what stands in them stands in the module around them. Words that nothing
stands between are one `Words`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice
from typing import Any, Literal

from .pml import DEFAULT_LIMITS, Element, Place, clipped
from .tokens import ROLES

Layout = Literal["fixed", "compact"]
Encode = Literal["opening", "isolated", "causal"]
Order = Literal["schema", "free"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
WORDS_OF_PML = frozenset({"schema", "module", "union", "param", "parameter", "scaffold", "prompt", *ROLES})


@dataclass(frozen=True, eq=False)
class Words:
    tokens: tuple[int, ...]
    at: Place
    roles: tuple[str, ...] = ()  # that begin in it
    closes: str | None = None  # the role whose end is its end
    inside: str | None = None  # the role that goes on behind it
    behind: tuple[str, ...] = ()  # roles that stand before its first in the schema


@dataclass(frozen=True, eq=False)
class Param:
    name: str
    length: int
    default: tuple[int, ...] | None
    placeholder: tuple[int, ...]  # what a module is encoded with: the default, then unknown tokens
    at: Place


@dataclass(frozen=True, eq=False)
class Module:
    name: str  # "": always imported
    path: str  # from the schema down, as in travel-plan/overseas
    items: tuple["Item", ...]
    encode: Encode
    cached: bool
    at: Place
    named: Mapping[str, "Module"] = field(default_factory=dict)  # the modules in it, also those in a union
    params: Mapping[str, Param] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Union:
    members: tuple[Module, ...]
    default: Module | None
    at: Place


Item = Words | Param | Module | Union


@dataclass(frozen=True, eq=False)
class Outline:
    """A schema that has been read: everything but positions."""

    name: str
    layout: Layout
    encode: Encode
    order: Order
    root: Module
    scaffolds: tuple[tuple[tuple[Module, ...], Place], ...]
    digest: bytes  # names the content: two texts that differ only in comments have the same
    at: Place


def every(module: Module) -> Iterator[Module]:
    """The modules in a module, all the way down, in the order in which they are written."""
    for item in module.items:
        for found in (item,) if isinstance(item, Module) else item.members if isinstance(item, Union) else ():
            yield found
            yield from every(found)


def checked(element: Element, *known: str) -> None:
    for attribute in element.attributes:
        if attribute not in known:
            allowed = f"it takes {told(known)}" if known else "it takes none"
            raise element.wrong(f"unknown attribute {clipped(attribute)!r} of <{element.name}>; {allowed}")


def named(element: Element) -> str:
    name = element.attributes.get("name", "").strip()
    if not name:
        raise element.wrong(f'<{element.name}> without a name; give it one, as in <{element.name} name="…">')
    if len(name) > DEFAULT_LIMITS.name:
        raise element.wrong(f"a name of {len(name):,} characters; at most {DEFAULT_LIMITS.name} are allowed")
    if not NAME.fullmatch(name):
        raise element.wrong(f"{clipped(name)!r} is not a valid name; a letter or _ comes first, then letters, digits, _ . and -")
    if element.name == "module" and name in WORDS_OF_PML:
        raise element.wrong(f"a module named {name!r}, which is a word of the language; rename it")
    return name


def alias(element: Element, name: str, other: str) -> str | None:
    if name in element.attributes and other in element.attributes:
        raise element.wrong(f"both {name} and {other}, which mean the same; remove one")
    return element.attributes.get(name, element.attributes.get(other))


def told(names: Sequence[str] | Mapping[str, object]) -> str:
    found = list(names)
    return ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")


def near(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    """A guess at what was meant."""
    name = name[:100]
    letters = Counter(name)
    likely = nlargest(20, islice(names, 2000), key=lambda other: (letters & Counter(other[:100])).total() / (len(name) + len(other)))
    found = get_close_matches(name, likely, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def choice(element: Element, attribute: str, choices: Sequence[str], default: str) -> Any:
    value = element.attributes.get(attribute, default)
    if value not in choices:
        raise element.wrong(f"{attribute} is {clipped(value)!r}; it is one of {', '.join(choices)}")
    return value
