"""From tokens to a response of OpenAI's Responses API: whole, or as the events that tell how it comes about."""

import time
import uuid
from collections.abc import Container, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from ..config import TruncationChoice
from ..engine.request import Call, TokenEvent
from .account import Account
from .answers import TurnAnswers
from .failures import FailureBody
from .limits import Plain
from .logprobs import Scored, Spell, TokenLogprob, chat_logprobs
from .prompts import Asked
from .replies import CompletionDetails, Envelope, PandoReport, PromptDetails, Usage, in_line
from .responses_wire import FlatChoice, FlatTool, ResponsesBody, SchemaFormat
from .ticket import Arrival

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[str]  # there are none
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputDetails(PromptDetails):
    cache_write_tokens: int


class ResponsesUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class EchoedTool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: Plain | None
    strict: bool | None


class EchoedChoice(TypedDict):
    type: Literal["function"]
    name: str


class EchoedFormat(TypedDict):
    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: NotRequired[Plain | None]
    strict: NotRequired[bool | None]


class EchoedText(TypedDict):
    format: EchoedFormat


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: Literal["server_error"]
    message: str


class ResponseReply(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: Sequence[OutputMessage | OutputCall]
    usage: ResponsesUsage | None
    pando: NotRequired[PandoReport]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: EchoedText
    tool_choice: Literal["none", "auto", "required"] | EchoedChoice
    tools: list[EchoedTool]
    top_logprobs: int
    top_p: float
    truncation: TruncationChoice
    prompt_cache_key: str | None
    user: str | None
    background: Literal[False]
    previous_response_id: None
    reasoning: None
    store: Literal[False]


def response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


class _Text:
    """The message that is being written, and where it stands."""

    def __init__(self, index: int) -> None:
        self.id, self.index = f"msg_{uuid.uuid4().hex}", index
        self.place = {"item_id": self.id, "output_index": index, "content_index": 0}
        self.texts: list[str] = []
        self.scored: list[Scored] = []  # tokens whose logprobs are not told yet
        self.logprobs: list[TokenLogprob] = []
        kind = "response.output_text.delta"
        self._before = f"event: {kind}\ndata: ".encode() + in_line({"type": kind, **self.place, "logprobs": []})[:-1] + b',"delta":'

    def delta(self, text: str, number: int) -> bytes:
        """The event of most tokens, of which all but the text and the number is written once."""
        return b'%b%b,"sequence_number":%d}\n\n' % (self._before, in_line(text), number)

    def message(self, status: ItemStatus, content: list[OutputText]) -> OutputMessage:
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class ResponseAnswers(TurnAnswers):
    def __init__(self, asked: Asked, body: ResponsesBody, envelope: Envelope, account: Account, spell: Spell, ends: Container[int]) -> None:
        super().__init__(asked, envelope, account, spell, ends, top=body.top_logprobs)
        self._body = body
        self._output: list[OutputMessage | OutputCall] = []  # what is written to its end
        self._text: _Text | None = None  # what comes next there
        self._waiting: list[Scored] = []  # tokens whose text is held back
        self._late: list[tuple[OutputText, list[Scored]]] = []  # texts, and tokens whose logprobs they do not tell yet
        self._sent: list[bytes] = []  # events that nobody has fetched
        self._number = 0  # of the next event

    # ---- what comes

    def take(self, arrived: Sequence[Arrival]) -> None:
        for place, event, now in arrived:
            self._follow(place, event, now)

    def events(self, arrived: Sequence[Arrival]) -> list[bytes]:
        """The same, and the events that a stream sends of it."""
        self.take(arrived)
        return self._fetch()

    def _follow(self, place: int, event: TokenEvent, now: float) -> None:
        piece, scored = self._take(place, event, now)
        self._waiting += scored
        if piece.text:
            self._say(piece.text)
        for call in piece.calls:
            self._call(call)
        if event.finish_reason is not None:
            self._finish()

    def _say(self, text: str) -> None:
        written = self._text or self._begin()
        written.texts.append(text)
        logprobs = self._score(written)
        if logprobs:
            self._tell("output_text.delta", **written.place, delta=text, logprobs=logprobs)
        elif self._body.stream:
            self._sent.append(written.delta(text, self._number))
            self._number += 1

    def _score(self, written: _Text) -> list[TokenLogprob]:
        """Of the tokens that waited for this text, in a stream. Else the whole tells them, written beside the event loop."""
        written.scored += self._waiting
        self._waiting = []
        if not self._body.stream or not written.scored:
            return []
        told, written.scored = self._logprobs(written.scored), []
        written.logprobs += told
        return told

    def _begin(self) -> _Text:
        self._text = written = _Text(len(self._output))
        self._tell("output_item.added", output_index=written.index, item=written.message("in_progress", []))
        self._tell("content_part.added", **written.place, part=_part("", []))
        return written

    def _end(self, status: ItemStatus) -> None:
        """Of the message that is being written."""
        written, self._text = self._text, None
        if written is None:
            return
        text = "".join(written.texts)
        part = _part(text, written.logprobs)
        self._late.append((part, written.scored))
        self._tell("output_text.done", **written.place, text=text, logprobs=part["logprobs"])
        self._tell("content_part.done", **written.place, part=part)
        self._add(written.message(status, [part]))

    def _call(self, call: Call) -> None:
        self._end("completed")
        self._waiting = []  # they spell the call
        item: OutputCall = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = {"item_id": item["id"], "output_index": len(self._output)}
        self._tell("output_item.added", output_index=len(self._output), item={**item, "arguments": "", "status": "in_progress"})
        self._tell("function_call_arguments.delta", **place, delta=call.arguments)
        self._tell("function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        self._add(item)

    def _add(self, item: OutputMessage | OutputCall) -> None:
        self._tell("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _finish(self) -> None:
        if self._text is None and not self._output:
            self._begin()
        if self._text is not None:
            self._score(self._text)
        self._end("incomplete" if self.outcome == "length" else "completed")

    # ---- events

    def _tell(self, kind: str, **told: Any) -> None:
        if self._body.stream:
            body = in_line({"type": f"response.{kind}", "sequence_number": self._number, **told})
            self._sent.append(f"event: response.{kind}\ndata: ".encode() + body + b"\n\n")
            self._number += 1

    def _fetch(self) -> list[bytes]:
        sent, self._sent = self._sent, []
        return sent

    def opening(self) -> bytes:
        """What a stream begins with, before any token."""
        for kind in ("created", "in_progress"):
            self._tell(kind, response=self._response("in_progress"))
        return b"".join(self._fetch())

    def conclude(self, sent: list[bytes]) -> None:
        """What was reused stands in the last event."""

    def end(self) -> bytes:
        reply = self.whole()
        self._tell(reply["status"], response=reply)
        return b"".join(self._fetch())

    def failed(self, failure: FailureBody) -> bytes:
        """In place of the last event."""
        reply = self._response("failed")
        reply["error"] = {"code": "server_error", "message": failure["error"]["message"]}
        self._tell("failed", response=reply)
        return b"".join(self._fetch())

    # ---- the response

    def whole(self) -> ResponseReply:
        cut = self.outcome == "length"
        for part, scored in self._late:
            part["logprobs"] += self._logprobs(scored)
        self._late = []
        reply = self._response("incomplete" if cut else "completed")
        reply["completed_at"] = None if cut else int(time.time())
        reply["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        reply["usage"], reply["pando"] = _usage(self.account.usage()), self.account.report()
        return reply

    def _response(self, status: Status) -> ResponseReply:
        body = self._body
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._envelope.model,
            "output": self._output,
            "usage": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(body.tool_choice),
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled" if self._asked.prompts[0].truncation is None else "auto",
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
            "background": False,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
        }

    def _logprobs(self, scored: Sequence[Scored]) -> list[TokenLogprob]:
        return chat_logprobs(scored, self._top, self._spell)["content"]


def _part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> ResponsesUsage:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _tool(tool: FlatTool) -> EchoedTool:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _choice(choice: Literal["none", "auto", "required"] | FlatChoice | None) -> Literal["none", "auto", "required"] | EchoedChoice:
    return {"type": "function", "name": choice.name} if isinstance(choice, FlatChoice) else choice or "auto"


def _format(body: ResponsesBody) -> EchoedFormat:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, SchemaFormat):
        told = wanted.name, wanted.description, wanted.schema_, wanted.strict
        return {"type": "json_schema", "name": told[0], "description": told[1], "schema": told[2], "strict": told[3]}
    return {"type": "text" if wanted is None else wanted.type}
