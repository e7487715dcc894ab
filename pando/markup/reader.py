"""From the syntax tree to the outline of a schema: names are resolved, texts are tokens, roles are the template's own."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from .outline import (
    WORDS_OF_PML,
    Encode,
    Item,
    Layout,
    Module,
    Order,
    Outline,
    Param,
    Union,
    Words,
    alias,
    checked,
    choice,
    named,
    near,
    told,
)
from .pml import Element, Limits, Place, Text, clipped
from .sources import Sources
from .tokens import KEPT, ROLES, Roles, Tokenizer

MAX_SCAFFOLDS = 100
MAX_PATH = 1024  # characters: every module has one
MAX_PLACEHOLDERS = 2**21  # tokens, of all params together


@dataclass(frozen=True)
class _Scope:
    """What an element inherits from those around it."""

    path: str
    encode: Encode
    cached: bool
    role: str | None = None
    takes: bool = False  # stands in a module that a prompt can give arguments


@dataclass
class _Draft:
    """Words that may go on."""

    tokens: list[int]
    at: Place
    roles: list[str]
    closes: str | None
    inside: str | None = None
    behind: tuple[str, ...] = ()

    def words(self) -> Words:
        return Words(tuple(self.tokens), self.at, tuple(self.roles), self.closes, self.inside, self.behind)


class Reader:
    """Reads one schema."""

    def __init__(self, tokenizer: Tokenizer, movable: bool, max_len: int, directory: Path | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._movable = movable
        self._max_len = max_len
        self._sources = Sources(directory, limits.bytes)
        self._roles = Roles(tokenizer)
        self._placeholders: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self._held = 0  # tokens in them
        self._facts: list[str] = []  # all that the schema says

    def outline(self, element: Element) -> Outline:
        if element.name != "schema":
            raise element.wrong(f'<{clipped(element.name)}> at the root; a schema is <schema name="…">…</schema>')
        checked(element, "name", "layout", "encode", "order")
        name = named(element)
        layout = self._layout(element)
        encode = choice(element, "encode", get_args(Encode), "opening")
        order = choice(element, "order", get_args(Order), "schema")
        if order == "free" and layout == "fixed":
            why = "" if self._movable else ", and this model's positions cannot move"
            raise element.wrong(f'order="free" with layout="fixed": a fixed position is an order{why}; use order="schema"')
        self._note("schema", layout, encode, order)
        scaffolds = [child for child in element.children if isinstance(child, Element) and child.name == "scaffold"]
        if len(scaffolds) > MAX_SCAFFOLDS:
            raise scaffolds[MAX_SCAFFOLDS].wrong(f"{len(scaffolds)} scaffolds; a schema has at most {MAX_SCAFFOLDS}")
        rest = tuple(child for child in element.children if isinstance(child, Text) or child.name != "scaffold")
        root = self._module(element._replace(children=rest), "", _Scope("", encode, True), [], opens=True)
        if order == "free":
            _only_opens(root)
        known = _known(root) if scaffolds else {}
        found = tuple((self._scaffold(child, known), child.at) for child in scaffolds)
        return Outline(name, layout, encode, order, root, found, self._digest(), element.at)

    def _layout(self, element: Element) -> Layout:
        layout: Layout = choice(element, "layout", get_args(Layout), "compact" if self._movable else "fixed")
        if layout == "compact" and not self._movable:
            raise element.wrong('layout="compact" on a model whose positions cannot move; use layout="fixed", or leave it out')
        return layout

    def _module(self, element: Element, name: str, scope: _Scope, history: list[str], opens: bool = False) -> Module:
        drafts: list[Item | _Draft] = []
        self._fill(drafts, element, scope, history, opens)
        items = [item.words() if isinstance(item, _Draft) else item for item in drafts]
        named_modules: dict[str, Module] = {}
        params: dict[str, Param] = {}
        for item in items:
            for module in (item,) if isinstance(item, Module) else item.members if isinstance(item, Union) else ():
                if module.name in named_modules:
                    raise module.at.wrong(
                        f"a second module {module.name!r} in one scope (the first: line {named_modules[module.name].at.line}); rename one"
                    )
                if module.name:
                    named_modules[module.name] = module
            if isinstance(item, Param):
                if item.name in params:
                    raise item.at.wrong(
                        f"a second param {item.name!r} in one module (the first: line {params[item.name].at.line}); rename one"
                    )
                params[item.name] = item
        return Module(name, scope.path, tuple(items), scope.encode, scope.cached, element.at, named_modules, params)

    def _fill(self, items: list[Item | _Draft], element: Element, scope: _Scope, history: list[str], opens: bool) -> None:
        for child in element.children:
            if isinstance(child, Text):
                self._note("text", child.text)
                if tokens := self._tokenizer.text(child.text):
                    _add(items, tokens, child.at, inside=scope.role)
                continue
            self._note("<", child.name, *(part for pair in sorted(child.attributes.items()) for part in pair))
            if child.name in ROLES:
                self._role(items, child, scope, history, opens and not items)
            elif child.name == "module":
                self._nested(items, child, scope, history, opens)
            elif child.name == "union":
                items.append(self._union(child, scope, history))
            elif child.name in ("param", "parameter"):
                items.append(self._param(child, scope))
            else:
                raise child.wrong(_misplaced(child.name, element.name))
            self._note(">")

    def _role(self, items: list[Item | _Draft], element: Element, scope: _Scope, history: list[str], opens: bool) -> None:
        checked(element)
        if scope.role is not None:
            raise element.wrong(f"<{element.name}> inside another role; close that one first")
        role = self._roles.role(tuple(history), element.name, opens, element.at)
        if self._roles.cuts > KEPT:
            raise element.wrong(f"roles stand in more than {KEPT} different orders; use fewer")
        draft = _add(items, role.before, element.at, opens=element.name, inside=element.name)
        if len(draft.roles) == 1:
            draft.behind = tuple(history)
        self._fill(items, element, replace(scope, role=element.name), [*history, element.name], False)
        _add(items, role.after, element.at, closes=element.name)
        history.append(element.name)

    def _nested(self, items: list[Item | _Draft], element: Element, scope: _Scope, history: list[str], opens: bool) -> None:
        checked(element, "name", "src", "cache", "encode")
        name = named(element) if "name" in element.attributes else ""
        path = f"{scope.path}/{name}" if scope.path and name else name or scope.path
        if len(path) > MAX_PATH:
            raise element.wrong(f"a module whose path has {len(path):,} characters; at most {MAX_PATH:,} are allowed: use shorter names")
        inner = _Scope(
            path=path,
            encode=choice(element, "encode", get_args(Encode), scope.encode),
            cached=choice(element, "cache", ("true", "false"), "true" if scope.cached else "false") == "true",
            role=scope.role,
            takes=scope.takes or bool(name),
        )
        if "src" in element.attributes:
            text = self._sources.read(element)
            self._note("src", text)
            element = element._replace(children=(Text(text, element.at),) if text else ())
        if not name and (inner.encode, inner.cached) == (scope.encode, scope.cached):
            self._fill(items, element, inner, history, opens)
            return
        if name:
            module = self._module(element, name, inner, [*history])
        else:  # it is always there, and may be what opens everything
            module = self._module(element, name, inner, history, opens and not items)
        if not name and any(not isinstance(item, Words) for item in module.items):
            raise element.wrong("a module without a name that sets encode or cache may hold only text; give it a name")
        items.append(module)

    def _union(self, element: Element, scope: _Scope, history: list[str]) -> Union:
        checked(element, "default", "scaffold")
        default = alias(element, "default", "scaffold")
        members: list[Item | _Draft] = []
        for child in element.elements():
            if child.name != "module":
                raise child.wrong(f'<{clipped(child.name)}> in a union, which holds modules; wrap it in <module name="…">')
            if "name" not in child.attributes:
                raise child.wrong("a member of a union without a name, which no prompt could import; give it a name")
            self._note("<", "module", *(part for pair in sorted(child.attributes.items()) for part in pair))
            self._nested(members, child, scope, history, False)
            self._note(">")
        found = {member.name: member for member in members if isinstance(member, Module)}
        if not found:
            raise element.wrong("an empty union; give it at least one <module>")
        if default is not None and default not in found:
            raise element.wrong(f"the union's default is {clipped(default)!r}, which is no member; its members are {told(found)}")
        return Union(tuple(member for member in members if isinstance(member, Module)), found.get(default or ""), element.at)

    def _param(self, element: Element, scope: _Scope) -> Param:
        checked(element, "name", "len", "length", "default", "scaffold")
        if not scope.takes:
            raise element.wrong("a param outside any named module, where no prompt could give it an argument; move it into one")
        if element.children:
            raise element.wrong(f"<{element.name}> has content, and must be empty: its argument comes with the prompt")
        name = named(element)
        length = self._length(element, name)
        default = alias(element, "default", "scaffold")
        tokens = tuple(self._tokenizer.text(default)) if default else ()
        if len(tokens) > length:
            raise element.wrong(f"the default of {name!r} has {len(tokens)} tokens, and its len is {length}; shorten it, or raise len")
        if (tokens, length) not in self._placeholders:
            self._held += length
            if self._held > MAX_PLACEHOLDERS:
                raise element.wrong(f"the params of this schema have more than {MAX_PLACEHOLDERS:,} tokens in total; make them shorter")
            self._placeholders[tokens, length] = tokens + (self._tokenizer.unknown,) * (length - len(tokens))
        return Param(name, length, None if default is None else tokens, self._placeholders[tokens, length], element.at)

    def _length(self, element: Element, name: str) -> int:
        text = alias(element, "len", "length")
        if text is None:
            raise element.wrong(f'param {name!r} has no len; give it the most tokens that an argument may have, as in len="10"')
        if not re.fullmatch(r"[0-9]{1,9}", text) or not 0 < int(text) <= self._max_len:
            raise element.wrong(f"the len of {name!r} is {clipped(text)!r}; it is a number of tokens from 1 to {self._max_len}")
        return int(text)

    def _scaffold(self, element: Element, known: "_Known") -> tuple[Module, ...]:
        checked(element, "modules")
        if element.children:
            raise element.wrong("<scaffold> has content, and must be empty: it only names modules")
        names = element.attributes.get("modules", "").split()
        self._note("scaffold", *names)
        if len(names) < 2:
            raise element.wrong(f'a scaffold of {len(names)} modules; it takes two or more, as in <scaffold modules="a b"/>')
        for name in names:
            if name not in known:
                raise element.wrong(f"a scaffold of {clipped(name)!r}, which is no module{near(name, known)}")
            if not known[name][0].cached:
                raise element.wrong(f'a scaffold of {name!r}, which has cache="false": it has no states to join')
        wanted = set(names)
        if len(wanted) < len(names):
            raise element.wrong("a scaffold names a module twice; once is enough")
        found = sorted((known[name] for name in wanted), key=lambda one: one[2])
        _joinable(known, [module.path for module, *_ in found], element)
        return tuple(module for module, *_ in found)

    def _note(self, *facts: str) -> None:
        self._facts += facts

    def _digest(self) -> bytes:
        return hashlib.sha256("".join(f"{len(fact)}:{fact}" for fact in self._facts).encode()).digest()


def _add(
    items: list[Item | _Draft],
    tokens: Sequence[int],
    at: Place,
    opens: str | None = None,
    closes: str | None = None,
    inside: str | None = None,
) -> _Draft:
    """Words that nothing stands between are one."""
    if not items or not isinstance(last := items[-1], _Draft):
        items.append(last := _Draft([], at, [], None))
    last.tokens += tokens
    last.roles += [opens] if opens else []
    last.closes, last.inside = closes, inside
    return last


def _misplaced(name: str, parent: str) -> str:
    if name == "scaffold":
        return "<scaffold> stands directly in <schema>; move it there"
    if name in WORDS_OF_PML:
        return f"<{name}> is not allowed in <{parent}>; move or remove it"
    advice = (
        near(name, [*sorted(WORDS_OF_PML - {"schema", "prompt", "parameter"})])
        or "; a schema holds module, union, param, scaffold and roles"
    )
    return f"unknown element <{clipped(name)}>{advice}"


class _Within(NamedTuple):
    """The innermost of the unions that a module stands in, as what it does so, and those around."""

    union: Union
    member: Module
    around: "_Within | None"


_Known = dict[str, tuple[Module, _Within | None, int]]  # by path: a module, where it is, and its number


def _known(root: Module) -> _Known:
    """All modules that have a name, in the order in which they are written."""
    found: _Known = {}
    stack: list[tuple[Module, _Within | None]] = [(root, None)]
    while stack:
        module, within = stack.pop()
        if module.name:
            found[module.path] = module, within, len(found)
        for item in reversed(module.items):
            if isinstance(item, Union):
                stack += [(member, _Within(item, member, within)) for member in reversed(item.members)]
            elif isinstance(item, Module):
                stack.append((item, within))
    return found


def _joinable(known: _Known, paths: Sequence[str], element: Element) -> None:
    met: dict[Union, tuple[Module, str]] = {}
    for path in paths:
        within = known[path][1]
        while within is not None:
            other, before = met.setdefault(within.union, (within.member, path))
            if other is not within.member:
                raise element.wrong(f"a scaffold of {before!r} and {path!r}, which no prompt can import together; name one of them")
            within = within.around


def _only_opens(root: Module) -> None:
    for item in root.items[1:]:
        if (isinstance(item, Words) and item.tokens) or (isinstance(item, Module) and not item.name):
            raise item.at.wrong(
                'text after a module in a schema with order="free", where text may only come first; move it up, or into the prompt'
            )
