"""What clients get instead: errors as OpenAI writes them, each in one readable sentence."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from ..errors import MarkupError, PandoError

TYPES = {  # of a status that has another than most
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CODES = {401: "invalid_api_key", 408: "timeout", 413: "request_too_large", 429: "rate_limit_exceeded", 503: "overloaded"}

MAX_TOLD = 3  # errors in one message
MAX_MESSAGE_CHARS = 1000
MAX_REASON_CHARS = 240
MAX_PLACE_CHARS = 48  # a place may hold a key that the client chose

REPHRASED = {
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a list",
    "missing": "This field is required",
}

PLAINER = {  # what the libraries below say, as a client can use it
    "There was an error parsing the body": "the body cannot be read as JSON: it must be UTF-8, with no very long numbers, and not very "
    "deeply nested",
}


class Stopped(PandoError):
    """The server ends, and so does what still runs."""


class Failure(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None
    line: NotRequired[int]  # in PML, from 1
    column: NotRequired[int]
    caret: NotRequired[str]  # that line, and a caret under the place


class FailureBody(TypedDict):
    error: Failure


def failure(status: int, message: str, param: str | None = None, code: str | None = None) -> FailureBody:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = _sound(PLAINER.get(message, message), MAX_MESSAGE_CHARS)
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}


def in_markup(status: int, error: MarkupError, code: str | None) -> FailureBody:
    """What is wrong with PML, and where."""
    body = failure(status, str(error), code=code)
    caret = _sound(error.shown().split("\n", 1)[1], MAX_MESSAGE_CHARS)
    body["error"] |= {"line": error.line, "column": error.column, "caret": caret}
    return body


def from_validation(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """One message for what pydantic found, and the field that its first error is about. What the client sent is not repeated."""
    told = [_told(error) for error in errors[:MAX_TOLD]]
    sentences = [f"{place}: {reason}" if place else reason for place, reason in told]
    if len(errors) > MAX_TOLD:
        sentences.append(f"and {len(errors) - MAX_TOLD} more")
    return "; ".join(sentences) or "the request is not valid", told[0][0] if told else None


def _told(error: Mapping[str, Any]) -> tuple[str | None, str]:
    kind = str(error.get("type", ""))
    reason = REPHRASED.get(kind, str(error.get("msg", "not valid")).removeprefix("Value error, "))
    if kind == "json_invalid":
        return None, _sound(f"the body is not valid JSON: {(error.get('ctx') or {}).get('error', reason)}", MAX_REASON_CHARS)
    place = _place(error.get("loc", ()))
    if kind == "missing" and place is None:
        return None, "the request has no body; send a JSON object"
    rule = None if place else re.match(r"(\w+): ", reason)  # a rule over several fields begins with the one it is about
    if rule:
        place, reason = rule[1], reason[rule.end() :]
    return place, _sound(reason, MAX_REASON_CHARS)


def _place(loc: Sequence[object]) -> str | None:
    """`messages.0.content`: without the frame's own first part, and without the tags that tell a union's forms apart."""
    parts = [str(part) for part in loc if not re.fullmatch(r"<[a-z ]+>|\[key\]", str(part))]
    if parts and parts[0] == "body":
        parts = parts[1:]
    return ".".join(_sound(part, MAX_PLACE_CHARS) for part in parts) or None


def _sound(text: str, limit: int) -> str:
    """Short, and writable as UTF-8 whatever a client put into it."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."
