"""A prompt, bound to its schema: the runs it is made of, each at its position.

First the prompt is read: what it imports, with which arguments, and the new text between. Then it is walked together with the schema: text
of the schema that is always imported falls into place between the imports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ..kv.run import Run, alike
from .layout import MAX_CONTEXTS
from .outline import Item, Module, Param, Union, Words
from .pml import Element, Place, clipped, parse
from .prompt import Begins, Ends, Import, New, Reading, Step, prompt_schema
from .schema import ANONYMOUS, OPENING, Schema
from .tokens import MAX_ROLES, Role, told_roles

NEW = "(prompt)"


@dataclass(frozen=True)
class Bound:
    """What a prompt is made of. `names` says for each run where it came from: the path of a module, path:param for an argument, and in
    parentheses the opening and other texts of the schema, and text of the prompt. New runs that touch are one, and have all their names."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    imported: tuple[str, ...]  # paths of modules
    exact: bool  # the states are those of the plain prompt
    roles: tuple[str, ...]  # of the schema and the prompt, in their order here

    @property
    def module_tokens(self) -> int:
        """Tokens whose states come from the schema."""
        return sum(len(run) for run in self.runs if run.origin is not None)

    @property
    def new_tokens(self) -> int:
        return sum(len(run) for run in self.runs if run.origin is None)

    @property
    def end(self) -> int:
        """The position of the first token of the answer."""
        return self.runs[-1].end

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[Run, ...], int | None]:
        """As a request takes it: the new words at its end, what stands before them, and their position."""
        *before, last = self.runs
        return (last.tokens, tuple(before), last.position) if last.origin is None else ((), self.runs, None)


def bind(schema: Schema, prompt: str | bytes | Element, *, file: str = "prompt") -> Bound:
    element = prompt if isinstance(prompt, Element) else parse(prompt, file)
    name = prompt_schema(element)
    if name != schema.name:
        raise element.wrong(f"the prompt is made from schema {clipped(name)!r}, and this schema is {schema.name!r}; name this one")
    reading = Reading(schema)
    steps = reading.steps(element, schema.outline.root)
    bound = _Walk(schema, reading, element.at).bound(steps, joint=True)
    if not bound.exact and schema.laid.joints:  # what was encoded behind all that stands before it here needs no scaffold
        alone = _Walk(schema, reading, element.at).bound(steps, joint=False)
        bound = alone if alone.exact else bound
    return bound


class _Placed(NamedTuple):
    run: Run
    name: str
    blank: bool = False
    own: bool = False  # a text of the schema, as its layout has it


@dataclass
class _Walk:
    """The prompt and its schema, side by side."""

    schema: Schema
    reading: Reading
    at: Place
    placed: list[_Placed] = field(default_factory=list)
    position: int = 0
    history: list[str] = field(default_factory=list)  # of roles
    closed: str | None = None  # the role that ends where we are
    open_role: tuple[str, Role] | None = None  # of the prompt
    inside: str | None = None  # the role of the schema that goes on where we are
    new_at: Place | None = None  # the new text behind the last run of the schema

    def bound(self, steps: Sequence[Step], *, joint: bool) -> Bound:
        self._joint = self._states() if joint else {}
        self._prompt(steps)
        imported = tuple([module.path for module in self.reading.imported])
        return _bound(self.schema, self.placed, imported, tuple(self.history), self.at)

    def _prompt(self, steps: Sequence[Step]) -> None:
        opening, items = self.schema.laid.opening, self.schema.outline.root.items
        if opening is not None and not (items and isinstance(items[0], Words)):
            self._place(opening, OPENING)
        self._scope(self.schema.outline.root, steps)
        if self.closed == "user":  # the answer is the assistant's
            self._go_to_end()
            self._place(Run(self.schema.roles.answer(tuple(self.history), self.at), self.position), NEW)

    def _states(self) -> Mapping[Words, Run]:
        """The joint states of every scaffold whose modules are all imported; of two that share a module, the first."""
        found: dict[Words, Run] = {}
        taken: set[Module] = set()
        for joint in self.schema.laid.joints:
            if all(module in self.reading.imported and module not in taken for module in joint.modules):
                taken.update(joint.modules)
                found.update(joint.runs)
        return found

    def _scope(self, module: Module, steps: Sequence[Step]) -> None:
        items, cursor = module.items, 0
        if not steps:
            self._always(items, module)
            return
        last = max((i for i, step in enumerate(steps) if isinstance(step, Import)), default=-1)
        lead = next((i for i, item in enumerate(items) if isinstance(item, Union) or (isinstance(item, Module) and item.name)), len(items))
        free = self.schema.order == "free" and module is self.schema.outline.root
        for i, step in enumerate(steps):
            if isinstance(step, Import) and not free:
                target = self.schema.places[step.module]
                if target < cursor:
                    advice = ", as modules inside a module keep it" if self.schema.order == "free" else ', or use order="free"'
                    raise step.at.wrong(f"<{step.module.name}> comes before its predecessor in the schema; use the schema's order{advice}")
            else:
                target = len(items) if i > last else max(cursor, lead)
            if cursor < target:
                self._always(items[cursor:target], module)
                cursor = target
            if isinstance(step, Begins) and self.inside is not None and not (free and cursor == len(items)):
                target = self._end_of_role(items, cursor, steps[i:], step, free=free)
                self._always(items[cursor:target], module)
                cursor = target
            if isinstance(step, Import):
                cursor += 0 if free else 1
                self._scope(step.module, step.steps)
            else:
                if i > last and module is self.schema.outline.root:
                    self._go_to_end()
                self._new(step)
        self._always(items[cursor:], module)

    def _end_of_role(self, items: Sequence[Item], cursor: int, steps: Sequence[Step], begins: Begins, *, free: bool) -> int:
        """Behind the text that ends the schema's role: it comes first, unless something is imported before that."""
        ends = next((i + 1 for i in range(cursor, len(items)) if isinstance(item := items[i], Words) and item.inside is None), None)
        imports = [] if free else [self.schema.places[step.module] for step in steps if isinstance(step, Import)]
        if ends is None or any(place < ends for place in imports):
            raise begins.at.wrong(f"<{begins.role}> would stand inside <{self.inside}> of the schema; move it out, since roles do not nest")
        return ends

    def _always(self, items: Sequence[Item], module: Module) -> None:
        for item in items:
            if isinstance(item, Words):
                self._words(item, module)
            elif isinstance(item, Param):
                tokens = self.reading.arguments[item]
                start = self._start(self.schema.laid.starts[item])
                self._place(Run(tokens, start), f"{module.path}:{item.name}", own=tokens == item.placeholder)
            elif isinstance(item, Module) and not item.name:
                self._always(item.items, item)

    def _words(self, words: Words, module: Module) -> None:
        if words.roles and self.open_role is not None:
            at, what = self.reading.imported.get(module, self.at), f"<{module.name}>" if module.name else "the schema"
            raise at.wrong(f"{what} has <{words.roles[0]}>, and stands in <{self.open_role[0]}> here; move it out, since roles do not nest")
        if words.roles and words.behind != tuple(self.history):
            self._check_roles(words, module)
        self.history += words.roles
        laid = self.schema.laid
        home = laid.home.get(words)
        if home is not None:
            start = self._start(home.position)
            run = self._joint.get(words, home)
            name = module.path or (OPENING if home is laid.opening else ANONYMOUS)
            self._place(run if run.position == start else run.moved(start), name, own=True)
            self.new_at = None
        self.closed, self.inside = words.closes, words.inside

    def _check_roles(self, words: Words, module: Module) -> None:
        """They stand behind others than in the schema: a template may write them otherwise there."""
        here, there, at = tuple(self.history), words.behind, self.reading.imported.get(module, self.at)
        for name in words.roles if len(here) + len(words.roles) <= MAX_ROLES else ():
            if self.schema.roles.role(here, name, False, at) != self.schema.roles.role(there, name, False, at):
                what = f"<{module.name}>" if module.name else "the schema"
                raise at.wrong(
                    f"{what} has <{name}>, which the model's chat template writes differently after {told_roles(here)} than after "
                    f"{told_roles(there)}, where it stands in the schema; write that turn in the prompt"
                )
            here, there = (*here, name), (*there, name)

    def _start(self, fixed: int) -> int:
        """Where the next text of the schema stands. In a fixed layout it must not have been reached yet."""
        if self.schema.outline.layout == "compact":
            return self.position
        while self.position > fixed and self.placed and self.placed[-1].blank:  # a space between two imports is no text
            self.position = self.placed.pop().run.position
        if self.position > fixed and self.new_at is not None:
            before = next((one.run.end for one in reversed(self.placed) if one.name != NEW), 0)
            length, room = self.position - before, max(0, fixed - before)
            advice = 'shorten it, move it to the end, or use layout="compact"'
            raise self.new_at.wrong(
                f"{length} token{'s' * (length != 1)} of text between two imports, and the hole there has room for {room}; {advice}"
            )
        return fixed

    def _new(self, step: New | Begins | Ends) -> None:
        self.new_at = self.new_at or step.at
        if isinstance(step, New):
            tokens = tuple(self.schema.tokenizer.text(step.text))
            self._place(Run(tokens, self.position), NEW, blank=not step.text.strip())
        elif isinstance(step, Begins):
            bare = not self.placed or (len(self.placed) == 1 and self.placed[0].run.tokens == self.schema.tokenizer.begin)
            role = self.schema.roles.role(tuple(self.history), step.role, bare, step.at)
            self.history.append(step.role)
            self.open_role = step.role, role
            self._place(Run(role.before, self.position), NEW)
        elif self.open_role is not None:
            name, role = self.open_role
            self._place(Run(role.after, self.position), NEW)
            self.closed, self.open_role = name, None

    def _place(self, run: Run, name: str, blank: bool = False, own: bool = False) -> None:
        self.closed = None
        if run.tokens:
            self.placed.append(_Placed(run, name, blank, own))
            self.position = run.end

    def _go_to_end(self) -> None:
        if self.schema.layout == "fixed":
            self.position = max(self.position, self.schema.laid.end)


def _bound(schema: Schema, placed: Sequence[_Placed], imported: tuple[str, ...], roles: tuple[str, ...], at: Place) -> Bound:
    if not placed:
        raise at.wrong("an empty prompt; import a module, or write some text")
    if placed[-1].run.end > schema.facts.max_len:
        raise at.wrong(
            f"the prompt takes {placed[-1].run.end:,} positions, and the model's context has {schema.facts.max_len:,}; import less"
        )
    groups: list[list[_Placed]] = []
    exact = _exact([one.run for one in placed])
    known = max((place for place, one in enumerate(placed) if one.run.origin is not None), default=0)
    seen = known if exact else 0  # what was encoded behind texts of the schema had them one by one
    for place, one in enumerate(placed):
        last = groups[-1][-1] if one.run.origin is None and groups else None
        apart = place < seen and one.own and last is not None and last.own
        if last is not None and last.run.origin is None and last.run.end == one.run.position and not apart:
            groups[-1].append(one)
        else:
            groups.append([one])
    found = [group[0] if len(group) == 1 else _joined(group) for group in groups]
    if sum(place for place, one in enumerate(found) if one.run.origin is None) > MAX_CONTEXTS:
        raise at.wrong(f"the new texts of this prompt see more than {MAX_CONTEXTS:,} other texts in total; join some of them")
    return Bound(tuple([one.run for one in found]), tuple([one.name for one in found]), imported, exact, roles)


def _joined(group: Sequence[_Placed]) -> _Placed:
    run = Run(tuple(chain.from_iterable(one.run.tokens for one in group)), group[0].run.position)
    return _Placed(run, " + ".join(dict.fromkeys(one.name for one in group)))


def _exact(runs: Sequence[Run]) -> bool:
    """Each run was encoded where it stands, behind exactly what stands before it."""
    end, before = 0, list[Run]()
    for run in runs:
        if run.position != end:
            return False
        if run.origin is not None:
            if run.origin.first != run.position or not alike(run.origin.context, tuple(before)):
                return False
            before = [*run.origin.context]  # the next has these very runs in its own
        end = run.end
        before.append(run)
    return True
