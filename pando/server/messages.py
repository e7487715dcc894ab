"""Conversations and tools, as clients write them and as chat templates read them."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from ..model.chat import parsed, role_of
from .limits import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Name, Plain, Schema, Text, one_of


class Part(Body):
    type: Literal["text"] = Field(description="Only text is understood.")
    text: Text = Field(description="The parts of a message are joined without anything between them.")

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        """One sentence about the part, and not one about each field that it has no use for."""
        if isinstance(value, dict) and "type" in value and value["type"] != "text":
            raise ValueError('Input should be a text part, such as {"type": "text", "text": "Hello"}; this server reads text only')
        return value


Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    one_of("a string or a list of text parts"),
]


class CalledFunction(Body):
    name: Name = Field(description="The function that was called.")
    arguments: Text = Field(description="Its arguments, as JSON text.", examples=['{"city": "Paris"}'])


class ToolCall(Body):
    id: Name = Field(description="What the tool's message answers to.")
    type: Literal["function"] = Field("function", description="Only functions are called.")
    function: CalledFunction = Field(description="The call.")

    def plain(self) -> Plain:
        arguments = parsed(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    role: Literal["developer", "system", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: Content | None = Field(None, description="What is said; may be left out where an assistant calls tools.", examples=["Hello"])
    name: Name | None = Field(None, description="Tells speakers of one role apart, where the chat template does.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS, description="The calls an assistant made.")
    tool_call_id: Name | None = Field(None, description="The call that a tool's message answers.")

    @model_validator(mode="after")
    def _complete(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"A message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"Only an assistant makes tool_calls, not a message of role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("A message of role tool needs the tool_call_id that it answers")
        return self

    def plain(self) -> Plain:
        """As a chat template takes it: one string of content, which may be empty, and no key without a value."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        plain: Plain = {"role": role_of(self.role), "content": text}
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class Function(Body):
    name: Name = Field(description="What the model calls it.", examples=["get_weather"])
    description: Text | None = Field(None, description="Tells the model what it is for.")
    parameters: Schema | None = Field(None, description="A JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Accepted without effect: forced calls always follow the schema.")


class Tool(Body):
    type: Literal["function"] = Field(description="Only functions are known.")
    function: Function = Field(description="The function that the model may call.")

    def plain(self) -> Plain:
        function = {key: value for key, value in self.function if value is not None and key != "strict"}
        return {"type": self.type, "function": function}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def conversation(messages: Sequence[Message]) -> list[Plain]:
    return [message.plain() for message in messages]


def definitions(tools: Sequence[Tool] | None) -> list[Plain] | None:
    return [tool.plain() for tool in tools] if tools else None
