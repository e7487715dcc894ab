"""Logprobs of tokens, in the two forms that clients know: one for chat, one for plain completions."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from ..engine.request import Logprob

Spell = Callable[[int], bytes]  # of a token

IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI writes this for a token that cannot be


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(frozen=True)
class Scored:
    """A token and what the model thought of it; a prompt's first token has no logprob, and no alternatives."""

    token: int
    logprob: float | None
    alternatives: Mapping[int, Logprob]  # the token itself among them
    is_shown: bool = True  # special tokens may be left out of the text

    @classmethod
    def chosen(cls, token: int, logprobs: Mapping[int, Logprob], *, is_shown: bool = True) -> "Scored":
        return cls(token, logprobs[token].logprob, logprobs, is_shown)

    def text(self, spell: Spell) -> bytes:
        """What the text has of it."""
        return spell(self.token) if self.is_shown else b""


def chat_logprobs(scored: Sequence[Scored], top: int, spell: Spell) -> ChatLogprobs:
    content: list[TokenLogprob] = []
    for one in scored:
        likeliest = [_alternative(token, found.logprob, spell) for token, found in _likeliest(one.alternatives, top)]
        own = _alternative(one.token, one.logprob, spell)
        content.append({"token": own["token"], "logprob": own["logprob"], "bytes": own["bytes"], "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def text_logprobs(scored: Sequence[Scored], spell: Spell, start: int) -> TextLogprobs:
    """`start`: characters of the text before the first of these tokens; below 0, so many that they spell stand before it. In this form
    the chosen token is always among the likeliest."""
    written, read = start, codecs.getincrementaldecoder("utf-8")("replace")
    said: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in scored:
        spelt = spell(one.token)
        said["tokens"].append(_readable(spelt))
        said["token_logprobs"].append(None if one.logprob is None else _finite(one.logprob))
        likeliest = _likeliest(one.alternatives, len(one.alternatives))
        said["top_logprobs"].append({_readable(spell(token)): _finite(found.logprob) for token, found in likeliest} or None)
        said["text_offset"].append(max(0, written))
        written += len(read.decode(one.text(spell)))
    return said


def _likeliest(alternatives: Mapping[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    return sorted(alternatives.items(), key=lambda pair: pair[1].rank)[:top]


def _alternative(token: int, logprob: float | None, spell: Spell) -> TopLogprob:
    spelt = spell(token)
    return {"token": _readable(spelt), "logprob": _finite(logprob), "bytes": list(spelt)}


def _readable(spelt: bytes) -> str:
    """Text, or for a part of a character its bytes: tokens that differ must not look alike."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > IMPOSSIBLE else IMPOSSIBLE
