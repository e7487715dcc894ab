"""What an answer must follow, as clients ask for it."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from ..engine.request import StructuredOutputsParams
from ..errors import InvalidSampling
from .limits import MAX_CHOICES, MAX_SCHEMA_BYTES, Body, Schema, Text, one_of

_NO_GRAMMAR = "a short grammar can take all memory; use a JSON schema, a regex or a choice, or follow the grammar offline, with pando.LLM"


def _as(name: str) -> str:
    return f'use structured_outputs, as {{"{name}": ...}}'


# what other servers call a constraint: who asks for one and gets free text would take it for what was asked for
CONSTRAINTS = {f"guided_{name}": _as(name) for name in ("json", "regex", "choice")}
CONSTRAINTS |= {"json_schema": _as("json"), "regex": _as("regex"), **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), _NO_GRAMMAR)}


class JsonSchema(Body):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] = Field(description="What the client calls it.")
    description: Text | None = Field(None, description="What it is for.")
    schema_: Schema | None = Field(None, alias="schema", description="The JSON schema; without one, any JSON object.")
    strict: bool | None = Field(None, description="Accepted without effect: answers always follow the schema.")


class ResponseFormat(Body):
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("schema", "value"), 'give a schema as {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
    )

    type: Literal["text", "json_object", "json_schema"] = Field(description="What the answer must be.")
    json_schema: JsonSchema | None = Field(None, description="With the type json_schema.")

    @model_validator(mode="after")
    def _with_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("The type json_schema needs a json_schema with a name and a schema")
        return self


def _few(choices: list[str]) -> list[str]:
    if (chars := sum(map(len, choices))) > MAX_SCHEMA_BYTES:
        raise ValueError(f"Input should have at most {MAX_SCHEMA_BYTES} characters in all, not {chars}")
    return choices


Pattern = Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)]


class StructuredOutputs(Body):
    """One of these; names are vLLM's."""

    refused: ClassVar[Mapping[str, str]] = {
        "grammar": _NO_GRAMMAR,
        "structural_tag": "use a JSON schema, or a function that must be called",
        "whitespace_pattern": "whitespace is limited anyway; the x-guidance of a schema changes it",
        "disable_additional_properties": "objects that list their properties have no others; for other objects, write it into the schema",
    }

    json_: (
        Annotated[Annotated[Pattern, Tag("<text>")] | Annotated[Schema, Tag("<object>")], one_of("a JSON schema, or its text")] | None
    ) = Field(None, alias="json", description="A JSON schema.")
    regex: Pattern | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), AfterValidator(_few)] | None = Field(
        None, description="The answer is one of these texts.", examples=[["yes", "no"]]
    )
    json_object: bool | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        try:
            self.params()
        except InvalidSampling as error:
            raise ValueError(str(error)) from error
        return self

    def params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(json=self.json_, regex=self.regex, choice=self.choice, json_object=self.json_object)
