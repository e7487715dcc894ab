"""What clients get: every body of a response, and how it is written.

Typed dictionaries, since a stream sends hundreds a second: nothing is validated on the way out. A field that OpenAI always sends is there,
null where it has no value; `NotRequired` marks those that are left out instead.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response
from typing_extensions import TypedDict

from ..engine.request import How, MissReason, RecomputeReason
from .history import DriftKind
from .logprobs import ChatLogprobs, TextLogprobs

ChatFinish = Literal["stop", "length", "tool_calls"]
TextFinish = Literal["stop", "length"]
ReuseKind = Literal[How, "none"]

DONE = b"data: [DONE]\n\n"
MARK = "the text"  # nothing that an event has behind its text contains it


# ---- usage and reuse


class PromptDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="Prompt tokens that were not computed, whatever they came from.")]
    module_tokens: Annotated[int, Field(description="Prompt tokens whose states are those of modules, computed now or before.")]
    reuse: Annotated[
        How,
        Field(
            description="rounded: some were kept by a codec that rounds; modular: some were encoded behind another context; "
            "truncated: behind tokens that were dropped; all three are approximate."
        ),
    ]


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: Annotated[int, Field(description="Over all answers.")]
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Sources(TypedDict):
    """Where the prompt's tokens came from."""

    computed: int
    device: int
    host: int
    disk: int
    remote: int
    module: int


class TruncatedReport(TypedDict):
    dropped_tokens: Annotated[int, Field(description="Of the prompt's oldest tokens, those that were left out.")]
    moved_tokens: Annotated[int, Field(description="Tokens behind them whose states were reused at other positions.")]
    recomputed: Annotated[
        RecomputeReason | None, Field(description="Why these were computed again; null: they were not, or in an earlier turn.")
    ]


class MissReport(TypedDict):
    reason: Annotated[MissReason, Field(description="Why reuse ended.")]
    token: Annotated[int, Field(description="The first that had to be computed.")]
    message: Annotated[int | None, Field(description="The message that this token belongs to.")]
    drift: Annotated[DriftKind | None, Field(description="What came back differently from how the last turn left it.")]
    detail: Annotated[str, Field(description="The same as a sentence, with what to do about it.")]


class PinReply(TypedDict):
    id: str
    tokens: Annotated[int, Field(description="Tokens that are held.")]
    expires_at: Annotated[int | None, Field(description="Unix time; null: when it is unpinned.")]


class PandoReport(TypedDict):
    """What was reused, from where, and why not more."""

    reuse: ReuseKind
    tokens: Sources
    repaired: Annotated[int, Field(description="Tokens of modules that were computed again, as asked for.")]
    truncated: Annotated[TruncatedReport | None, Field(description="Null: the prompt is whole.")]
    miss: MissReport | None
    time_to_first_token_ms: float | None
    queue_ms: float | None
    session_id: str | None
    pin: PinReply | None


def usage(prompt: int, completion: int, cached: int, modules: int = 0, reuse: How = "exact") -> Usage:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "module_tokens": modules, "reuse": reuse},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


# ---- chat


class CallFunction(TypedDict):
    name: NotRequired[str]  # once in a stream
    arguments: str


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CallFunction


class CallDelta(TypedDict):
    index: int
    id: NotRequired[str]  # once
    type: NotRequired[Literal["function"]]
    function: CallFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    pando: PandoReport
    prompt_token_ids: NotRequired[Sequence[int]]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[CallDelta]]


class ChatDeltaChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: NotRequired[Usage | None]
    pando: NotRequired[PandoReport]
    prompt_token_ids: NotRequired[Sequence[int]]


# ---- plain completions


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinish | None  # null within a stream
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[Sequence[int]]


class TextCompletion(TypedDict):
    """The same in a stream and without one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    pando: NotRequired[PandoReport]


# ---- building them


@dataclass(frozen=True)
class Envelope:
    """What every event of one answer repeats."""

    id: str
    created: int  # Unix time
    model: str
    tells_usage: bool = False  # a stream's client asked for it: null in all events but the last

    def chat(
        self, choices: list[ChatChoice], usage: Usage, pando: PandoReport, prompt_token_ids: Sequence[int] | None = None
    ) -> ChatCompletion:
        reply: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
            "pando": pando,
        }
        if prompt_token_ids is not None:
            reply["prompt_token_ids"] = prompt_token_ids
        return reply

    def chat_chunk(
        self,
        choices: list[ChatDeltaChoice],
        usage: Usage | None = None,
        pando: PandoReport | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> ChatChunk:
        reply: ChatChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.tells_usage:
            reply["usage"] = usage
        if pando is not None:
            reply["pando"] = pando
        if prompt_token_ids is not None:
            reply["prompt_token_ids"] = prompt_token_ids
        return reply

    def text(self, choices: list[TextChoice], usage: Usage | None = None, pando: PandoReport | None = None) -> TextCompletion:
        reply: TextCompletion = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None or self.tells_usage:
            reply["usage"] = usage
        if pando is not None:
            reply["pando"] = pando
        return reply


def chat_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def text_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"


def call(call_id: str, name: str, arguments: str) -> Call:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_choice(
    index: int,
    text: str,
    finish_reason: ChatFinish,
    calls: Sequence[Call] = (),
    logprobs: ChatLogprobs | None = None,
    token_ids: list[int] | None = None,
) -> ChatChoice:
    message: AnswerMessage = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if calls:
        message["tool_calls"] = list(calls)
    choice: ChatChoice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def chat_delta(
    index: int,
    delta: Delta,
    finish_reason: ChatFinish | None = None,
    logprobs: ChatLogprobs | None = None,
    token_ids: list[int] | None = None,
) -> ChatDeltaChoice:
    choice: ChatDeltaChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def text_choice(
    index: int,
    text: str,
    finish_reason: TextFinish | None = None,
    logprobs: TextLogprobs | None = None,
    token_ids: list[int] | None = None,
    prompt_token_ids: Sequence[int] | None = None,
) -> TextChoice:
    choice: TextChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    if prompt_token_ids is not None:
        choice["prompt_token_ids"] = prompt_token_ids
    return choice


def encode(reply: object) -> bytes:
    return to_json(reply)


def json_response(reply: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(reply), status, headers, "application/json")


def in_line(reply: object) -> bytes:
    """As JSON that nobody takes for several lines: only line feeds and carriage returns end those of a stream, but many clients split it as
    Python splits text, at three more characters."""
    written = to_json(reply)
    if not written.isascii():
        for end, escaped in _ENDS_OF_LINES:
            written = written.replace(end, escaped)
    return written


_ENDS_OF_LINES = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


def event(reply: object) -> bytes:
    """As one server-sent event, if it is not written as one already."""
    return reply if isinstance(reply, bytes) else b"data: " + in_line(reply) + b"\n\n"


class Around:
    """What stands around the text in most events of an answer, written once."""

    def __init__(self, make: Callable[[str], object]) -> None:
        """`make`: such an event with this text."""
        self._before, _, self._after = event(make(MARK)).rpartition(in_line(MARK))

    def event(self, text: str) -> bytes:
        return self._before + in_line(text) + self._after
