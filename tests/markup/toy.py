"""A tokenizer that can be read by eye: one token per character, and a few special tokens with names in angle brackets."""

import re
from collections.abc import Mapping, Sequence

from pando.errors import InvalidPrompt
from pando.markup.binding import Bound, bind
from pando.markup.schema import Schema, read_schema

SPECIAL = {"<s>": 1, "</s>": 2, "<unk>": 3, "<start>": 4, "<end>": 5}
NAMES = {token: name for name, token in SPECIAL.items()}


class Toy:
    unknown = SPECIAL["<unk>"]

    def __init__(self, bos: bool = False, style: str = "plain") -> None:
        self.bos = SPECIAL["<s>"] if bos else None
        self.begin = (SPECIAL["<s>"],) if bos else ()
        self.style = style

    def text(self, text: str) -> list[int]:
        return [ord(char) + 100 for char in text]

    def template(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else self.text(part))]

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        answer = "<start>assistant:" if add_generation_prompt and self.style == "plain" else ""
        return TEMPLATES[self.style](messages) + answer


def plain(messages: Sequence[Mapping[str, str]]) -> str:
    first = "" if messages[0]["role"] == "system" else "<start>system:Be good.<end>"
    return first + "".join(f"<start>{message['role']}:{message['content']}<end>" for message in messages)


def llama(messages: Sequence[Mapping[str, str]]) -> str:
    """The system prompt goes into the first message of the user; users and assistants take turns."""
    system = ""
    if messages[0]["role"] == "system":
        system, messages = f"(SYS {messages[0]['content']} SYS)", messages[1:]
    found = []
    for place, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[place % 2]:
            raise InvalidPrompt("roles must take turns")
        content = message["content"]
        found.append(f"<s>[{system if place == 0 else ''}{content}]" if place % 2 == 0 else f" {content}</s>")
    return "".join(found)


def greedy(messages: Sequence[Mapping[str, str]]) -> str:
    return "".join(f"{message['role']}:{message['content'][:3]}" for message in messages)


def turning(messages: Sequence[Mapping[str, str]]) -> str:
    """Writes another end behind the last message."""
    return "".join(f"<start>{message['content']}{'<end>' if message is messages[-1] else ''}" for message in messages)


def echo(messages: Sequence[Mapping[str, str]]) -> str:
    """Says the first message again behind the second."""
    return "".join(message["content"] for message in messages) + "".join(message["content"] for message in messages[:-1][:1])


def late(messages: Sequence[Mapping[str, str]]) -> str:
    """Writes the system prompt into the last message."""
    system, *rest = (message["content"] for message in messages)
    return "".join(f"[{system if i == len(rest) - 1 else ''} {content}]" for i, content in enumerate(rest))


TEMPLATES = {"plain": plain, "llama": llama, "greedy": greedy, "turning": turning, "echo": echo, "late": late}


def spelt(tokens: Sequence[int]) -> str:
    return "".join(NAMES.get(token) or chr(token - 100) for token in tokens)


def schema(pml: str, *, bos: bool = False, style: str = "plain", movable: bool = True, max_len: int = 2000, **more) -> Schema:
    return read_schema(pml, Toy(bos, style), movable=movable, max_len=max_len, **more)


def prompt(of: Schema, inner: str = "") -> Bound:
    return bind(of, f'<prompt schema="{of.name}">{inner}</prompt>')


def shown(bound: Bound) -> list[tuple[str, int]]:
    """Each run as its text and its position; what is new stands in braces."""
    return [(spelt(run.tokens) if run.origin else f"{{{spelt(run.tokens)}}}", run.position) for run in bound.runs]


def text_of(bound: Bound) -> str:
    return "".join(spelt(run.tokens) for run in bound.runs)


def behind(run) -> list[tuple[str, int]]:
    """What a run is encoded behind, and where it is."""
    return [*((spelt(one.tokens), one.position) for one in run.origin.context), ("", run.origin.first)]
