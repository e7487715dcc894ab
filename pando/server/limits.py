"""How large a request may be, and the kinds of value it is made of: each limit once, and each refusal in words."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ..config import UNITS
from ..engine.request import MAX_BIASES, MAX_STOP_CHARS, MAX_STOPS
from ..model.chat import OURS

MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_CALLS = 128  # of one message
MAX_CHARS = 4 * 2**20  # of one text
MAX_PROMPTS = 64
MAX_ANSWERS = 256  # n times prompts
MAX_PROMPT_TOKENS = 2**18
MAX_STOP_TOKENS = 1024
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 2**10
MAX_CHOICES = 1024
MAX_SCHEMAS = 256  # in PML, of one owner
MAX_PML_BYTES = 64 * 2**20  # of all of them together
MAX_HELD_BYTES = 256 * 2**20  # that these take beside their text
MAX_MODULES = 1000  # that one view of a schema lists
MAX_NAME_CHARS = 256
MAX_METADATA = 16
MAX_TTL_SECONDS = 7 * 86400
MAX_INT32 = 2**31 - 1

Plain = dict[str, Any]  # as JSON has it
T = TypeVar("T")


def _shape(value: object) -> str | None:
    """Which of a union's forms a value claims to be, so that its errors are those of one form and not of all."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<token lists>" if isinstance(first, list) else "<tokens>" if isinstance(first, int) else "<list>"
    return "<object>" if isinstance(value, dict) else None


def one_of(forms: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="wrong_form", custom_error_message=f"Input should be {forms}")


def printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("Input should have printable characters only")
    return value


def _seconds(value: object) -> object:
    """Of "45s", "30m", "12h" or "7d"; a number of seconds stays as it is."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", value)
    if found is None:
        raise ValueError('Input should be whole seconds, or text such as "45s", "30m", "12h" or "7d"')
    return int(found[1]) * UNITS[found[2]]


def _small(value: Plain) -> Plain:
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (RecursionError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise ValueError("Input should be plain JSON: Unicode text, finite numbers, and no very deep nesting") from error
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"Input should have at most {MAX_SCHEMA_BYTES} bytes as JSON, not {size}")
    return value


def _theirs(value: Plain) -> Plain:
    if ours := sorted(value.keys() & OURS):
        raise ValueError(f"Input should not have {', '.join(ours)}; other fields of the request set this")
    return value


Text = Annotated[str, Field(max_length=MAX_CHARS)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(printable)]
ModelName = Annotated[str, Field(max_length=1024)]
Token = Annotated[int, Field(ge=0, le=MAX_INT32)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]
Schema = Annotated[Plain, AfterValidator(_small)]
TemplateOptions = Annotated[Plain, AfterValidator(_small), AfterValidator(_theirs)]
Seconds = Annotated[
    int,
    Field(ge=1, le=MAX_TTL_SECONDS),
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "^[0-9]{1,9}[smhd]$"}, {"type": "integer", "minimum": 1}]}),
]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    one_of("a string or a list of strings"),
]
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[Real, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(lambda value: _at_most(MAX_BIASES, value)),
]
Notes = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(lambda value: _at_most(MAX_METADATA, value)),
]
TextOrTokens = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Tokens, Tag("<tokens>")], one_of("a string or a list of token ids")]
Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<list>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<token lists>")],
    one_of("a string, a list of strings, a list of token ids, or a list of such lists"),
]


def _at_most(limit: int, value: T) -> T:
    """Before each entry is looked at: pydantic counts the entries of a mapping only afterwards."""
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"Input should have at most {limit} entries, not {len(value)}")
    return value


_ASKS_NOTHING: tuple[object, ...] = "", [], {"type": "text"}  # nor does a flag that is off; the last is a response_format


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    refused: ClassVar[Mapping[str, str]] = {}  # fields that would change the answer, and what to do instead
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields of the protocol that change nothing here, and are documented so

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, advice in cls.refused.items():
            if (value := data.get(name)) is not None and value is not False and value not in _ASKS_NOTHING:
                raise ValueError(f"{name}: not supported; {advice}")
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Says in the schema what `_without_nulls` does."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and "anyOf" not in field:
                told = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **told}
        return schema
