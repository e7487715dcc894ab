"""Tool calls, as the chat templates teach models to write them: told apart from plain text, whole or as it arrives, and forced."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import uuid4

from ..errors import InvalidPrompt
from ..model.chat import no_number
from ..model.tokenizer import Tokenizer
from .grammar import schema_text
from .request import Call

MAX_FORCED_CALLS = 16  # in one answer: a small model that may go on calling often does

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# As templates write a call's arguments into history, so that a forced call is found again in the next turn, token by token.
_AS_IN_HISTORY: Mapping[str, str | bool] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Function:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object


class Piece(NamedTuple):
    """What became clear of an answer: text to pass on, and whole calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()


def functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    """The functions of OpenAI's `tools`."""
    found = tuple(_function(place, tool) for place, tool in enumerate(tools))
    names = [function.name for function in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidPrompt(f"tools has two functions named {twice[0]!r}; give each its own name")
    return found


def _function(place: int, tool: Mapping[str, Any]) -> Function:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InvalidPrompt(f'{where} must be {{"type": "function", "function": {{...}}}}; no other kind of tool is known')
    name, parameters = tool["function"].get("name"), tool["function"].get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidPrompt(f"{where} has a function named {str(name)[:80]!r}; use 1 to 64 letters, digits, underscores or dashes")
    if parameters is None:
        return Function(name, {"type": "object", "properties": {}, "additionalProperties": False})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidPrompt(f'{where} ({name}) has parameters that describe no object; give a JSON schema with "type": "object", or none')
    return Function(name, {**parameters, "type": "object"})


@dataclass(frozen=True)
class Form:
    """How a family of models writes its calls: each is a JSON object with a name and arguments, and these words stand around it."""

    marker: str  # before a call, or a list of them
    closer: str  # after it, but models forget it
    arguments: str  # the key of the arguments
    around_all: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    around_each: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    between: str = ""
    unmarked: bool = False  # a call may also begin an answer without the marker
    several: bool = True  # the template takes back an answer with more than one call
    short_ids: bool = False  # the template takes back only ids of nine letters and digits

    def new_id(self) -> str:
        return uuid4().hex[:9] if self.short_ids else f"call_{uuid4().hex[:24]}"

    def parse(self, text: str, *, cut: bool = False) -> tuple[str, list[Call]]:
        """The text around the calls, without the blanks next to them, and the calls. What is no sound call stays text. `cut`: the answer
        did not end here by itself."""
        stream = Stream(self)
        pieces = [stream.feed(text), stream.finish(cut=cut)]
        return "".join(piece.text for piece in pieces), [call for piece in pieces for call in piece.calls]

    def special_words(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The form's words that are special tokens of this model. If there are any, answers must be decoded without skipping those."""
        found = {}
        for word in filter(None, (self.marker, self.closer)):
            for token in tokenizer.encode(word):
                named = tokenizer.token_bytes(token, skip_special=False) == word.encode()
                if named and not tokenizer.token_bytes(token, skip_special=True):
                    found[word] = token
        return found

    def grammar(
        self, tools: Sequence[Function], only: str | None = None, *, parallel: bool = True, special: Mapping[str, int] | None = None
    ) -> str:
        """A Lark grammar of answers that call: the one function named, once, or else any of them, and several times where that may be."""
        chosen = [tool for tool in tools if only is None or tool.name == only]
        if not chosen:
            raise InvalidPrompt("no tool to call" if only is None else f"no tool is named {only!r}; name one of those in tools")
        more = MAX_FORCED_CALLS - 1 if parallel and self.several and only is None else 0

        def words(texts: Sequence[str]) -> str:
            return " ".join(f"<[{special[text]}]>" if special and text in special else json.dumps(text) for text in texts)

        repeated = f"({words([self.between])} call){{0,{more}}}" if more else ""
        lines = [
            f"start: {words(self.around_all[0])} call {repeated} {words(self.around_all[1])}",
            f"call: {words(self.around_each[0])} ({' | '.join(f'call{i}' for i in range(len(chosen)))}) {words(self.around_each[1])}",
        ]
        for i, tool in enumerate(chosen):
            head = json.dumps(f'{{"name": "{tool.name}", "{self.arguments}": ')
            lines += [f'call{i}: {head} arguments{i} "}}"', f"arguments{i}: %json {schema_text(tool.parameters, _AS_IN_HISTORY)}"]
        return "\n".join(lines)


HERMES = Form("<tool_call>", "</tool_call>", "arguments", around_each=(("<tool_call>", "\n"), ("\n", "</tool_call>")), between="\n")
LLAMA = Form("<|python_tag|>", ";", "parameters", unmarked=True, several=False)
MISTRAL = Form("[TOOL_CALLS]", "", "arguments", around_all=(("[TOOL_CALLS]", " ["), ("]",)), between=", ", short_ids=True)


def takes_tools(template: str) -> bool:
    return re.search(r"\{[{%](?:(?![}%]\}).)*?\btools\b", template, re.DOTALL) is not None


def form_of(template: str) -> Form | None:
    """The form of calls that a chat template teaches; None if it takes no tools, or teaches a form that is not known here."""
    if not takes_tools(template):
        return None
    text = template.replace("\\", "")  # templates quote within quotes
    if HERMES.marker in text and '"arguments"' in text:
        return HERMES
    if MISTRAL.marker in text and "[ARGS]" not in text:
        return replace(MISTRAL, around_all=(("[TOOL_CALLS]", "["), ("]",))) if "[TOOL_CALLS][" in text else MISTRAL
    return LLAMA if re.search(r'\{"name": [^"{}]{0,80}"parameters": ', text) else None


class Stream:
    """One answer as it arrives. Text is passed on at once, except what may turn out to belong to a call."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._held = ""
        self._count = 0
        self._fresh = True  # so far there was nothing but calls and blanks
        self._closing = False  # the last call's closer may still come
        self._cut = False
        self._value: _Value | None = None  # what may be a call, which began

    def feed(self, text: str) -> Piece:
        self._held += text
        return self._drain(False)

    def finish(self, *, cut: bool = False) -> Piece:
        """What was held back. `cut`: the answer did not end here by itself, and a call that has only begun is nothing to pass on."""
        self._cut = cut
        return self._drain(True)

    def _drain(self, final: bool) -> Piece:
        texts: list[str] = []
        calls: list[Call] = []
        while self._held and (self._plain(final, texts) if self._value is None else self._within(self._value, final, texts, calls)):
            pass
        return Piece("".join(texts), tuple(calls))

    def _plain(self, final: bool, texts: list[str]) -> bool:
        """Passes on text up to what may be a call. True: there is more to look at."""
        if self._fresh and self._count:
            self._held = self._held.lstrip()
            if self._closing and not self._close(final):
                return False
        held, marker = self._held, self._form.marker
        blanks = len(held) - len(held.lstrip())
        if self._fresh and self._form.unmarked and held[blanks : blanks + 1] == "{":
            self._value = _Value(blanks, blanks + 1, marked=False)
            return True
        if (place := held.find(marker)) >= 0:
            before = held[:place].rstrip()
            self._say(len(before), texts)
            self._value = _Value(place - len(before) + len(marker), place - len(before) + len(marker))
            return True
        begun = next((n for n in range(min(len(marker) - 1, len(held)), 0, -1) if held.endswith(marker[:n])), 0)
        if self._cut and begun < 2 and not self._fresh:  # behind text, a single "<" is as likely text
            begun = 0
        whole = final and not (self._cut and begun)
        self._say(len(held) if whole else len(held[: len(held) - begun].rstrip()), texts)
        return False

    def _close(self, final: bool) -> bool:
        """Drops the last call's closer; False if it may only have begun."""
        closer = self._form.closer
        if not final and len(self._held) < len(closer) and closer.startswith(self._held):
            return False
        self._closing = False
        if final and closer.startswith(self._held):
            self._held = ""
        self._held = self._held.removeprefix(closer).lstrip()
        return True

    def _within(self, value: "_Value", final: bool, texts: list[str], calls: list[Call]) -> bool:
        """Follows what may be a call to its end. True: it is clear what it is."""
        end = value.end(self._held)
        if end is None and not value.broken and not final:
            return False
        begun = end is None and not value.broken and self._cut and (value.marked or _begins_call(self._held[value.start :]))
        found = _calls(self._held[value.start : end], begun) if begun or end is not None else None
        self._value = None
        if found is None:
            self._say(value.resume, texts)
            return True
        for name, arguments in found:
            calls.append(Call(self._count, self._form.new_id(), name, arguments))
            self._count += 1
        self._held, self._fresh, self._closing = "" if end is None else self._held[end:], True, bool(self._form.closer)
        return True

    def _say(self, length: int, texts: list[str]) -> None:
        said, self._held = self._held[:length], self._held[length:]
        self._fresh = self._fresh and not said.strip()
        texts.append(said)


_BLANKS = " \t\n\r"
_OPENED = re.compile(r"[^ \t\n\r\[{]")
_MAY_BEGIN = re.compile(r'[ \t\n\r]*+\[?+[ \t\n\r]*+\{[ \t\n\r]*+"')  # nothing is tried twice, however long the blanks
_QUOTE = re.compile(r'["\\]')
_STRUCTURE = re.compile(r"[^ \t\n\r0-9A-Za-z+\-.,:]")


class _Value:
    """What may be a call, or a list of calls, in a growing text: looks at each character once to find where it ends."""

    def __init__(self, start: int, resume: int, *, marked: bool = True) -> None:
        self.start = start
        self.marked = marked
        self.resume = resume  # if it is no call after all, the search for one goes on here
        self.broken = False  # it cannot be JSON
        self._opening: int | None = start  # so far there are only blanks and brackets, up to here; None: and something behind them
        self._at = start
        self._depth = 0
        self._quoted = False

    def end(self, text: str) -> int | None:
        if self._opening is not None:
            if _OPENED.search(text, self._opening) is None:
                self._opening = len(text)
                return None
            self._opening, self.broken = None, not _MAY_BEGIN.match(text, self.start)
        while not self.broken and (found := (_QUOTE if self._quoted else _STRUCTURE).search(text, self._at)):
            char, self._at = found[0], found.end()
            if char == '"':
                self._quoted = not self._quoted
            elif self._quoted:
                self._at += 1  # what follows a backslash
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._at
            else:
                self.broken = True
        self._at = max(self._at, len(text))
        return None


_JSON = json.JSONDecoder(parse_constant=no_number)


def _calls(text: str, cut: bool = False) -> list[tuple[str, str]] | None:
    """Names and arguments of a call, or of a list of calls; None if it is anything else. `cut`: those that are whole."""
    found: list[tuple[str, str]] = []
    try:
        at = _skip(text, 0)
        if text[at : at + 1] == "{":
            return [_call(text, at)[0]]
        while text[at : at + 1] in ("[", ","):
            call, at = _call(text, _skip(text, at + 1))
            found.append(call)
            at = _skip(text, at)
    except (ValueError, RecursionError):
        return found if cut else None
    return found if cut or text[at : at + 1] == "]" else None


def _begins_call(text: str) -> bool:
    """Whether nothing says that the beginning of an object will not be a call."""
    if (head := re.match(r'\{\s*"name"\s*:\s*"([^"]*)', text)) is None:
        return '{"name":"'.startswith("".join(text.split()))
    rest = "".join(text[head.end() :].split())
    return bool(NAME.fullmatch(head[1] or "_")) and any(key.startswith(rest[: len(key)]) for key in ('","parameters":', '","arguments":'))


def _call(text: str, at: int) -> tuple[tuple[str, str], int]:
    if text[at : at + 1] != "{":
        raise ValueError("not an object")
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    while text[at : at + 1] in ("{", ","):
        key, at = _JSON.raw_decode(text, _skip(text, at + 1))
        at = _skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("not a member")
        start = _skip(text, at + 1)
        values[key], at = _JSON.raw_decode(text, start)
        texts[key] = text[start:at]
        at = _skip(text, at)
    name = str(values.get("name"))
    key = "arguments" if "arguments" in values else "parameters"  # models mix them up
    if text[at : at + 1] != "}" or name != values.get("name") or not NAME.fullmatch(name) or not isinstance(values.get(key), dict):
        raise ValueError("not a call")
    return (name, texts[key]), at + 1


def _skip(text: str, at: int) -> int:
    """Past blanks."""
    while text[at : at + 1] and text[at] in _BLANKS:
        at += 1
    return at
