"""What clients of OpenAI's Responses API send. Each body is a chat, written otherwise: it becomes one, and is answered as one."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from ..engine.grammar import is_deeper
from ..engine.request import MAX_LOGPROBS
from .failures import from_validation
from .formats import CONSTRAINTS, JsonSchema, ResponseFormat
from .limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    Count,
    Name,
    Notes,
    Plain,
    Text,
    one_of,
)
from .messages import CalledFunction, Function, Message, Tool, ToolCall
from .wire import OTHERS, TEMPLATES, ChatBody, ChosenFunction, MessageFormat, Sampling, TemplateChoices

MAX_INCLUDED = 64
MAX_LEVELS = 200  # of a schema, which is sent back: JSON of more than 255 is not written
LOGPROBS = "message.output_text.logprobs"

_STORED = "nothing is stored: send the whole conversation as input; its cached part is found"
_FORMAT = "use text.format, with a JSON schema"


def _by_type(kinds: Mapping[str | None, str], forms: str) -> Discriminator:
    """Which of a union's forms an object claims to be by its type."""

    def found(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else ""
        return kinds.get(kind) if kind is None or isinstance(kind, str) else None

    return Discriminator(found, custom_error_type="wrong_form", custom_error_message=f"Input should be {forms}")


class TextPart(Body):
    type: Literal["input_text", "output_text"] = Field(description="Only text is understood.")
    text: Text = Field(description="The parts of a message are joined without anything between them.")


class RefusalPart(Body):
    type: Literal["refusal"] = Field(description="What an assistant would not say.")
    refusal: Text = Field(description="Its words; text as any other.")


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    _by_type(
        {"input_text": "<text>", "output_text": "<text>", "refusal": "<refusal>"},
        "a part of type input_text, output_text or refusal: only text is understood",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    one_of("a string or a list of text parts"),
]


def _text(content: str | list[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


class MessageItem(Body):
    type: Literal["message"] = Field("message", description="May be left out.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who speaks.")
    content: Content = Field(description="What is said.", examples=["Hello"])


class CallItem(Body):
    type: Literal["function_call"] = Field(description="A call that the assistant made.")
    call_id: Name = Field(description="What its output answers to.")
    name: Name = Field(description="The function that was called.")
    arguments: Text = Field(description="Its arguments, as JSON text.", examples=['{"city": "Paris"}'])


class CallOutputItem(Body):
    type: Literal["function_call_output"] = Field(description="What a call brought.")
    call_id: Name = Field(description="The call.")
    output: Content = Field(description="What the function returned.")


class ReasoningItem(Body):
    type: Literal["reasoning"] = Field(description="Left out: a chat template writes what was said.")


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[CallOutputItem, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    _by_type(
        {
            None: "<message>",
            "message": "<message>",
            "function_call": "<call>",
            "function_call_output": "<output>",
            "reasoning": "<reasoning>",
        },
        "an item of type message, function_call, function_call_output or reasoning; "
        "no other tools are run here, and nothing is stored that an item could refer to",
    ),
]
Input = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    one_of("a string or a list of items"),
]


class FlatTool(Function):
    type: Literal["function"] = Field(description="Only functions are known.")

    @model_validator(mode="before")
    @classmethod
    def _runs_elsewhere(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("type") not in ("function", None):
            raise ValueError("Only functions are known, which the client runs; this server runs no tools itself: leave this one out")
        return data


class FlatChoice(ChosenFunction):
    type: Literal["function"] = Field(description="Only functions are known.")


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[FlatChoice, Tag("<object>")],
    one_of('"none", "auto", "required", or {"type": "function", "name": ...}'),
]


class PlainFormat(Body):
    refused: ClassVar[Mapping[str, str]] = {"schema": "it goes with the type json_schema"}

    type: Literal["text", "json_object"] = Field(description="What the answer must be.")


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"] = Field(description="The answer follows the schema.")


Format = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    _by_type(
        {"text": "<plain>", "json_object": "<plain>", "json_schema": "<schema>"},
        "of type text, json_object or json_schema",
    ),
]


class TextOptions(Body):
    format: Format | None = Field(None, description="Constrains the answer to JSON, or to a JSON schema.")


class ResponsesBody(Sampling):
    """The next message of a conversation, or the next calls."""

    ignored: ClassVar[frozenset[str]] = Sampling.ignored | {"reasoning"}
    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("previous_response_id", "conversation"), _STORED),
        "prompt": "no prompt templates are stored; send their text as instructions and input",
        "background": "there are no background answers: the client waits for them; leave it out",
        "context_management": 'use truncation "auto"; a conversation is truncated, not rewritten',
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_output_tokens"),
        "n": "a response always has one answer; leave it out",
        **dict.fromkeys(("response_format", "structured_outputs", *CONSTRAINTS), _FORMAT),
        **TEMPLATES,
        **OTHERS,
    }

    input: Input = Field(description="The conversation so far, or what its user says first.", examples=["Hello"])
    instructions: Text | None = Field(None, description="A system message before all others.")
    max_output_tokens: Count | None = Field(
        None, description="The most tokens the answer may have; by default as many as the context holds."
    )
    text: TextOptions | None = Field(None, description="How the answer's text is written.")
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Choice | None = Field(None, description="Whether it may, must, or must not; by default it may.", examples=["auto"])
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls.")
    include: Annotated[list[Annotated[str, Field(max_length=MAX_NAME_CHARS)]], Field(max_length=MAX_INCLUDED, fail_fast=True)] = Field(
        [], description=f"{LOGPROBS}: give the logprob of each token of the text.", examples=[[LOGPROBS]]
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="Give them, and this many of the likeliest tokens beside each.")
    chat_template_kwargs: TemplateChoices = None
    prompt_format: MessageFormat = "auto"
    metadata: Notes | None = Field(None, description="The client's own notes; sent back.")

    @model_validator(mode="after")
    def _agrees(self) -> "ResponsesBody":
        if not self.instructions and not isinstance(self.input, str) and all(isinstance(item, ReasoningItem) for item in self.input):
            raise ValueError("input: has nothing to answer, only reasoning")
        wanted = self.text.format if self.text is not None else None
        schemas = {"tools": [tool.parameters for tool in self.tools or ()], "text": [getattr(wanted, "schema_", None)]}
        for name, found in schemas.items():
            if is_deeper(found, MAX_LEVELS):
                raise ValueError(f"{name}: has a schema that is nested deeper than {MAX_LEVELS} levels; move parts of it to $defs")
        try:
            self.chat  # noqa: B018  # what it refuses is refused now, while that can be said with 422
        except ValidationError as error:
            raise ValueError(from_validation(error.errors())[0]) from None
        return self

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    @cached_property
    def chat(self) -> ChatBody:
        """The same, as a chat."""
        shared: Plain = {name: getattr(self, name) for name in Sampling.model_fields}
        return ChatBody(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            response_format=self._format(),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            prompt_format=self.prompt_format,
        )

    def _format(self) -> ResponseFormat | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        return ResponseFormat(type=wanted.type, json_schema=wanted if isinstance(wanted, SchemaFormat) else None)

    def _messages(self) -> list[Message]:
        said: list[Plain] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            said.append({"role": "user", "content": self.input})
        else:
            _add(said, self.input)
        if len(said) > MAX_MESSAGES:
            raise ValueError(f"input: is, with the instructions, more than {MAX_MESSAGES} messages; send fewer")
        return [Message(**message) for message in said]


def _add(said: list[Plain], items: Iterable[MessageItem | CallItem | CallOutputItem | ReasoningItem]) -> None:
    """Calls in a row, and the assistant's words before them, are one message, as chat templates expect."""
    before: object = None
    for item in items:
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, MessageItem):
            said.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, CallOutputItem):
            said.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
        else:
            if not (isinstance(before, CallItem) or (isinstance(before, MessageItem) and before.role == "assistant")):
                said.append({"role": "assistant"})
            call = ToolCall(id=item.call_id, type="function", function=CalledFunction(name=item.name, arguments=item.arguments))
            said[-1].setdefault("tool_calls", []).append(call)
            if len(said[-1]["tool_calls"]) > MAX_CALLS:
                raise ValueError(f"input: has more than {MAX_CALLS} calls in a row; send fewer")
        before = item


def _tool(tool: FlatTool) -> Tool:
    return Tool(type="function", function=Function(**{name: getattr(tool, name) for name in Function.model_fields}))


def _choice(choice: str | FlatChoice | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FlatChoice) else choice
