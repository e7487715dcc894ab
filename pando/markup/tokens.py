"""What the language asks of a tokenizer, and roles cut from the model's own chat template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import MarkupError, PandoError
from .pml import Place

ROLES = ("system", "user", "assistant")
MAX_ROLES = 256  # in one conversation: a template reads all of it for each role
KEPT = 2000  # beginnings of conversations that are remembered


class Tokenizer(Protocol):
    @property
    def bos(self) -> int | None: ...

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens that every plain prompt starts with."""

    @property
    def unknown(self) -> int:
        """Stands for an argument that is not there yet."""

    def text(self, text: str) -> list[int]:
        """Only text, whatever it spells; nothing is added."""

    def template(self, text: str) -> list[int]:
        """The names of special tokens mean those tokens; nothing is added."""

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation as the model's own template writes it, with or without the beginning of an answer."""


@dataclass(frozen=True)
class Role:
    """What a template writes around the words of one message."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class Roles:
    """Renders conversations of markers, and cuts them at the markers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.cuts = 0  # how often the template was asked
        self._known: dict[tuple[str, ...], Role] = {}
        self._rendered: dict[tuple[tuple[str, ...], bool], str] = {}

    def role(self, history: tuple[str, ...], name: str, opens: bool, at: Place) -> Role:
        """`history`: the roles before it. `opens`: nothing at all stands before it, so that it gets what the template starts with. Without
        a history it is otherwise written as in the middle of a conversation."""
        if not history and not opens and name != "system":
            history = ("user", "assistant") if name == "user" else ("user",)
        path = (*history, name)
        found = self._known.get(path)
        if found is None:
            found = self._known[path] = self._cut(path, at)
        return found

    def answer(self, history: tuple[str, ...], at: Place) -> tuple[int, ...]:
        """What the template writes behind a conversation to make the assistant speak."""
        text, written = self._render(history, at, answer=True), self._written(history, at)
        if not text.startswith(written):
            raise _uncut(history, at, "what it has written before changes with the answer")
        return tuple(self._tokenizer.template(text[len(written) :])) if len(text) > len(written) else ()

    def _cut(self, path: tuple[str, ...], at: Place) -> Role:
        if len(path) > MAX_ROLES:
            raise at.wrong(f"more than {MAX_ROLES} roles in one conversation; join some")
        if len(self._known) >= KEPT:
            self._known.clear()
            self._rendered.clear()
        self.cuts += 1
        text, place = self._whole(path, at)
        before, after = text[:place], self._after(path, at)
        if len(path) > 1:
            written = self._written(path[:-1], at)
            if not before.startswith(written):
                raise _uncut(path, at, "what it has written before changes with this message")
            before = before[len(written) :]
        if _MARKER.search(before + after):
            raise _uncut(path, at, "it repeats an earlier message")
        start = self._tokenizer.template(before) if before else []
        begin = self._tokenizer.begin
        if len(path) == 1 and begin and tuple(start[: len(begin)]) == begin:  # every prompt starts with them, whatever opens it
            start = start[len(begin) :]
        return Role(tuple(start), tuple(self._tokenizer.template(after)) if after else ())

    def _whole(self, path: tuple[str, ...], at: Place) -> tuple[str, int]:
        """The conversation, and where its last marker stands. Some templates write a system prompt only into the message behind it."""
        marker = _marker(len(path) - 1)
        failure: MarkupError | None = None
        for messages in (path, (*path, "user")):
            try:
                text = self._render(messages, at)
            except MarkupError as error:
                failure = failure or error
            else:
                if text.count(marker) == 1:
                    return text, text.index(marker)
            if path[-1] != "system":
                break
        raise failure or _uncut(path, at, "it leaves out or repeats the message")

    def _written(self, path: tuple[str, ...], at: Place) -> str:
        text, place = self._whole(path, at)
        return text[:place] + _marker(len(path) - 1) + self._after(path, at)

    def _after(self, path: tuple[str, ...], at: Place) -> str:
        text, place = self._whole(path, at)
        after = text[place + len(_marker(len(path) - 1)) :]
        return after.partition(_marker(len(path)))[0]

    def _render(self, path: tuple[str, ...], at: Place, answer: bool = False) -> str:
        found = self._rendered.get((path, answer))
        if found is None:
            messages = [{"role": role, "content": _marker(i)} for i, role in enumerate(path)]
            try:
                found = self._rendered[path, answer] = self._tokenizer.chat(messages, add_generation_prompt=answer)
            except PandoError as error:
                raise at.wrong(f"<{path[-1]}> after {told_roles(path[:-1])}: {error}") from error
        return found


_MARKER = re.compile("PandoMarks[0-9]+Here")


def _marker(index: int) -> str:
    return f"PandoMarks{index}Here"


def told_roles(roles: Sequence[str]) -> str:
    return " ".join(f"<{role}>" for role in roles[-4:]) or "nothing"


def _uncut(path: tuple[str, ...], at: Place, why: str) -> MarkupError:
    advice = "write the template's own text instead of roles, or give the model another template"
    return at.wrong(f"the model's chat template cannot be cut around <{path[-1]}> after {told_roles(path[:-1])}: {why}; {advice}")
