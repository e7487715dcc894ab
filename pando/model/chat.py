"""Chat templates: Jinja programs that come with a model, run in a sandbox, with the names transformers gives them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import InvalidPrompt, PandoError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # what every template is told


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    names: Mapping[str, str],
) -> str:
    _check(messages)
    if template is None:
        raise InvalidPrompt("this model has no chat template; give one, or send a plain prompt instead of a conversation")
    try:
        import jinja2
    except ImportError as error:
        raise PandoError("chat templates need the package jinja2; install it with: pip install jinja2") from error
    variables = {
        "messages": [_readable(message) for message in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render({**names, **variables})
    except jinja2.TemplateSyntaxError as error:
        fault = f"line {error.lineno} is no Jinja ({error.message})"
        raise InvalidPrompt(f"the chat template refuses this conversation: {fault}; correct the template") from error
    except Exception as error:  # a template is somebody else's program: it raises whatever it likes
        advice = "check the roles and their order, or give another template"
        raise InvalidPrompt(f"the chat template refuses this conversation: {error}; {advice}") from error


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidPrompt('a conversation is a list of one or more messages, such as [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f'message {index} is a {type(message).__name__}; it must be a mapping with "role" and "content"')
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidPrompt(f'message {index} has no "role"; give it "system", "user" or "assistant"')
        calls_tools = message.get("tool_calls") and message.get("content") is None
        if _joined(message.get("content")) is None and not calls_tools:
            kind, wrong = type(message.get("content")).__name__, _wrong_part(message.get("content"))
            said = f"message {index} ({message['role']}) has content of type {kind}; it must be a string, or text parts"
            raise InvalidPrompt(said + (f": part {wrong[0]} is {wrong[1]}" if wrong else ""))


def _joined(content: Any) -> str | None:
    """A text, or its parts with nothing between them; None for what is neither."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def _wrong_part(content: Any) -> tuple[int, str] | None:
    """The first part that is no text, and what it is."""
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if _joined([part]) is None:
            return place, repr(part)[:80]
    return None


def role_of(role: str) -> str:
    """As templates know it: OpenAI has a newer word for the system."""
    return "system" if role == "developer" else role


def _readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With one text as its content, empty where it only calls tools, since many templates add it to others; and with the arguments of its
    calls as objects, which templates write as JSON themselves; clients send them as JSON text."""
    message = {**message, "role": role_of(message["role"]), "content": _joined(message.get("content")) or ""}
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return {**message, "tool_calls": [_readable_call(call) for call in calls]}


def _readable_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": parsed(function["arguments"])}}


def parsed(arguments: str) -> object:
    """The object a template wants, or the text where it is none: an answer that broke off is still history. Some clients write nothing for
    a call without arguments: as a text, it would teach the model to call so, and many templates refuse it."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, parse_constant=no_number)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be tokenised
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def no_number(name: str) -> float:
    """Python reads NaN and Infinity as numbers."""
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=16)
def _compiled(template: str) -> "Template":
    return _environment().from_string(template)


def _environment() -> "Environment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own way of saying it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
