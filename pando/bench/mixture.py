"""What a soak test sends, drawn from a seed: requests whose answers are known, and requests that must be refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from .client import PATHS, Message
from .traffic import VOCABULARY

CHAT, TEXT = PATHS["chat"], PATHS["completions"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
NESTED = 100_000  # brackets

Credential = Literal["own", "none", "wrong"]


@dataclass(frozen=True)
class Sizes:
    """In tokens, where nothing else is said: small enough for a context of 512."""

    short: tuple[int, int] = (8, 24)
    long: tuple[int, int] = (160, 280)
    prefix: int = 96
    tail: int = 16
    answer: tuple[int, int] = (8, 32)
    growing: int = 96  # an answer that needs many more pages than its prompt
    rows: int = 4  # answers to one prompt, each with pages of its own where they differ
    words: int = 8  # of a message
    turns: int = 3  # of a session
    each: int = 5  # requests of a kind
    groups: int = 2  # of requests that share a prefix


@dataclass(frozen=True)
class Ask:
    kind: str
    path: str
    body: Mapping[str, Any]

    def but(self, **changes: object) -> "Ask":
        return replace(self, body={**self.body, **changes})

    @property
    def rows(self) -> int:
        return int(self.body.get("n", 1))


@dataclass(frozen=True)
class Known:
    """A request, and what came back when it was alone."""

    ask: Ask
    texts: tuple[str, ...]
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Bad:
    """What must be refused, and how."""

    name: str
    path: str
    content: bytes
    status: int
    credential: Credential = "own"


class Mixture:
    """`ids` are tokens of the model, any of which may stand in a prompt."""

    def __init__(self, ids: Sequence[int], sizes: Sizes, seed: int) -> None:
        self._ids, self.sizes = ids, sizes
        self._random = Random(f"{seed} mixture")

    def tokens(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)

    def text(self) -> str:
        return " ".join(self._random.choices(VOCABULARY.split(), k=self.sizes.words))

    def singles(self) -> list[Ask]:
        """Each is greedy, so that it has one answer."""
        size, made = self.sizes, list[Ask]()
        for _ in range(size.each):
            made.append(self._completion("short", self.tokens(self._between(size.short))))
            made.append(self._completion("long", self.tokens(self._between(size.long))))
            made.append(self._completion("text", self.text()))
            made.append(self._completion("several", self.tokens(self._between(size.short))).but(n=2))
            made.append(self._completion("growing", self.tokens(self._between(size.short))).but(max_tokens=size.growing))
            made.append(self.chat("json", [{"role": "user", "content": self.text()}]).but(response_format=JSON, max_tokens=64))
        for _ in range(size.groups):
            prefix = self.tokens(size.prefix)
            made += [self._completion("shared", prefix + self.tokens(size.tail)) for _ in range(size.each)]
        return made

    def openings(self) -> list[list[Message]]:
        """How sessions begin; the rest of each depends on the answers."""
        system = {"role": "system", "content": self.text()}
        return [[system, {"role": "user", "content": self.text()}] for _ in range(self.sizes.each)]

    def chat(self, kind: str, messages: Sequence[Message]) -> Ask:
        answer = self._between(self.sizes.answer)
        return Ask(kind, CHAT, {"messages": list(messages), "max_tokens": answer, "temperature": 0})

    def secret(self) -> Ask:
        """A prompt that nobody has sent before."""
        return self._completion("secret", self.tokens(self.sizes.prefix))

    def _completion(self, kind: str, prompt: str | list[int]) -> Ask:
        answer = self._between(self.sizes.answer)
        return Ask(kind, TEXT, {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True})

    def _between(self, bounds: tuple[int, int]) -> int:
        return self._random.randint(*bounds)


def bad(context: int, max_body: int) -> list[Bad]:
    """`max_body` in bytes."""

    def chat(**body: object) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": "Hello"}], **body}).encode()

    def text(**body: object) -> bytes:
        return json.dumps({"prompt": "Hello", **body}).encode()

    broken_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    return [
        Bad("broken JSON", CHAT, b'{"messages": [', 400),
        Bad("empty body", CHAT, b"", 422),
        Bad("not UTF-8", TEXT, b'{"prompt": "\xff\xfe"}', 400),
        Bad("nested without end", TEXT, b"[" * NESTED, 400),
        Bad("not a number", TEXT, b'{"prompt": "a", "temperature": NaN}', 422),
        Bad("negative length", TEXT, text(max_tokens=-1), 422),
        Bad("too many answers", TEXT, text(n=10**6), 422),
        Bad("too many stops", TEXT, text(stop=["a"] * 10_000), 422),
        Bad("messages as text", CHAT, chat(messages="Hello"), 422),
        Bad("no messages", CHAT, chat(messages=[]), 422),
        Bad("unknown role", CHAT, chat(messages=[{"role": "wizard", "content": "Hello"}]), 422),
        Bad("broken schema", CHAT, chat(response_format=broken_schema), 400),
        Bad("prompt too long", TEXT, text(prompt=[1] * (context + 1)), 400),
        Bad("no such token", TEXT, text(prompt=[2**31 - 1]), 400),
        Bad("unknown model", CHAT, chat(model="no-such-model"), 404),
        Bad("no such route", "/v1/nothing", b"{}", 404),
        Bad("body too large", TEXT, text(prompt="a" * max_body), 413),
        Bad("no such pin", "/v1/cache/unpin", b"{}", 422),
        Bad("no key", CHAT, chat(), 401, "none"),
        Bad("wrong key", CHAT, chat(), 401, "wrong"),
    ]
