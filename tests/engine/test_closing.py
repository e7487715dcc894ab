"""Objects that list their properties have no others, where nothing in a schema can want them; nothing becomes right that was wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pando.engine.closing import plain
from pando.engine.grammar import MAX_SCHEMA_BYTES, Grammars
from pando.engine.tools import HERMES, functions

from ..tiny import END, VOCAB, tiny_tokenizer
from .test_grammar import allows

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="A JUDGE OF JSON SCHEMAS IS NOT INSTALLED: pip install jsonschema_rs")

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCAB, [END])


class City(BaseModel):
    name: str


class Trip(BaseModel):
    """As clients send it: pydantic says nothing of other properties."""

    home: City
    goal: City | None = None
    stops: list[City] = []
    by_day: dict[str, City] = {}


def test_a_model_adds_no_properties_to_what_pydantic_lists(grammars: Grammars) -> None:
    make = grammars.json_schema(Trip.model_json_schema())
    home = '{"home": {"name": "Rome"}'
    assert allows(make, home + ', "goal": {"name": "Oslo"}, "stops": [{"name": "Bern"}], "by_day": {"any": {"name": "Bonn"}}}')
    assert allows(make, home + ', "goal": null}') and allows(make, home + "}")
    for more in (
        ', "more": 1}',
        ', "goal": {"name": "Oslo", "x": 1}}',
        ', "stops": [{"name": "", "x": 1}]}',
        ', "by_day": {"a": {"x": 1}}}',
    ):
        assert not allows(make, home + more)
    assert not allows(make, '{"home": {"name": "Rome", "x": 1}}')


def test_a_forced_call_has_no_arguments_but_those_that_are_listed(grammars: Grammars) -> None:
    tools = functions([{"type": "function", "function": {"name": "f", "parameters": A}}])
    make = grammars.lark(HERMES.grammar(tools))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1%s}}\n</tool_call>'
    assert allows(make, call % "") and not allows(make, call % ', "b": 2')


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "required": ["a"], "minProperties": 2},
        {**A, "required": ["b"]},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"allOf": [A, {"type": "object", "properties": {"b": NUMBER}}]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": NUMBER}},
        {**A, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]},
        {"required": ["b"], "anyOf": [A, {"type": "null"}]},
        {"enum": [{"a": 1, "b": 2}], **A},
    ],
    ids=json.dumps,
)
def test_an_object_stays_open_where_it_says_so_or_something_else_may_want_more_of_it(grammars: Grammars, schema: dict[str, Any]) -> None:
    assert allows(grammars.json_schema(schema), '{"a": 1, "b": 2}')


MEMBER = {"properties": {"inner": A}}  # elsewhere in the same schema


@pytest.mark.parametrize(
    "other",
    [
        {"allOf": [A, A]},
        {"oneOf": [A, {"type": "null"}]},
        {"not": A},
        {"if": A, "then": A, "else": A},
        {"dependentSchemas": {"a": A}},
        {"dependencies": {"a": A}},
        {"unevaluatedProperties": False},
        {"patternProperties": {"^i": A}},
        {"contains": A},
        {"$dynamicRef": "#"},
        {"$ref": "#", "required": ["b"]},
        {"anyOf": [A], "required": ["b"]},
        {"anyOf": [A], "properties": {"b": {}}},
        {"anyOf": [A], "minProperties": 2},
        {"anyOf": [A], "$ref": "#"},
        {"allOf": [A], "properties": {"b": {}}},
        {"allOf": 3},
    ],
    ids=json.dumps,
)
def test_nothing_is_closed_beside_what_asks_two_things_of_one_object(other: dict[str, Any]) -> None:
    for schema in (
        {"properties": {"inner": A, "other": other}},
        {**MEMBER, "items": other},
        {**MEMBER, "$defs": {"x": {"items": [other]}}},
        {**MEMBER, "elsewhere": {"any": other}},
    ):
        assert plain(schema) == schema
    assert plain({**MEMBER, "enum": [other]})["properties"]["inner"]["additionalProperties"] is False, "what is no schema asks for nothing"


@pytest.mark.parametrize("own", ["patternProperties", "propertyNames", "dependentRequired", "const", "unevaluatedProperties"])
def test_who_speaks_of_other_properties_is_not_closed(own: str) -> None:
    schema = {**A, own: {}}
    assert plain(schema) == schema


@pytest.mark.parametrize("key", ["$ref", "anyOf", "allOf"])
def test_a_reference_with_notes_beside_it_is_closed(key: str) -> None:
    """Pydantic writes an allOf of one around a reference with a description, and defaults beside an anyOf."""
    noted = {"description": "d", "title": "t", "default": None, "type": "object"}
    wanted = "#/$defs/A" if key == "$ref" else [{"$ref": "#/$defs/A"}]
    for schema in ({"$defs": {"A": A}, key: wanted, **noted}, {"definitions": {"A": A}, "items": {key: wanted}}):
        assert plain(schema)[next(iter(schema))]["A"]["additionalProperties"] is False


@pytest.mark.parametrize("name", ["properties", "format", "enum", "const", "allOf", "$ref", "additionalProperties", "oneOf", "items"])
def test_a_property_may_be_called_like_a_keyword(grammars: Grammars, name: str) -> None:
    inner = {"type": "object", "properties": {"key": {"type": "string", "format": "password"}}, "required": ["key"]}
    make = grammars.json_schema({"type": "object", "properties": {name: inner}, "required": [name]})
    assert allows(make, json.dumps({name: {"key": "k"}}))
    assert not allows(make, json.dumps({name: {"key": "k", "more": 1}})) and not allows(make, json.dumps({name: {"key": "k"}, "more": 1}))


def test_what_closing_adds_does_not_make_a_schema_too_long(grammars: Grammars) -> None:
    listed = {f"p{i}": {"type": "object", "properties": {"a": {}}} for i in range(900)}
    schema = {"type": "object", "properties": listed, "required": list(listed)}
    assert len(json.dumps(schema)) < MAX_SCHEMA_BYTES < len(json.dumps(plain(schema)))
    grammars.json_schema(schema)


def test_schemas_in_a_tuple_are_looked_at_as_those_in_a_list(grammars: Grammars) -> None:
    make = grammars.json_schema({"$defs": {"A": A}, "type": "array", "items": {"anyOf": ({"$ref": "#/$defs/A", "required": ["b"]},)}})
    assert allows(make, '[{"b": 1}]')


# ---- whatever the schema is

OBJECTS: list[Any] = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "c": 1}, {"a": "t"}, {"a": None, "b": "t"}]
INSTANCES = [None, 1, "t", *OBJECTS]
INSTANCES += [made for one in INSTANCES for made in ([one], {"a": one}, {"b": one}, {"a": one, "c": 1})]

names = st.sampled_from(["a", "b"])
listed = st.dictionaries(names, st.sampled_from([{}, NUMBER, TEXT, {"$ref": "#/$defs/x"}]), min_size=1)
leaves = st.sampled_from([NUMBER, {"type": "null"}, {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x", "description": "d"}, {"const": {"a": 1}}])


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_name, some = st.dictionaries(names, inner, min_size=1), st.lists(inner, min_size=1, max_size=2)
    keywords = {
        "properties": by_name, "required": st.lists(names, unique=True), "minProperties": st.just(2), "items": inner, "anyOf": some,
        "additionalProperties": st.booleans() | inner, "allOf": some, "oneOf": some, "not": inner, "if": inner, "then": inner,
        "patternProperties": by_name, "dependentSchemas": by_name, "contains": inner, "$ref": st.just("#/$defs/x"), "title": st.just("t"),
    }  # fmt: skip
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=2, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] for key in keys}))


def is_valid(schema: Any) -> list[bool]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [validator.is_valid(one) for one in INSTANCES]


@settings(max_examples=300, deadline=None)
@given(combined(st.recursive(listed.map(lambda some: {"properties": some}) | leaves, combined, max_leaves=3)), listed)
def test_what_follows_the_narrower_schema_follows_the_one_that_was_given(schema: Any, x: Any) -> None:
    schema["$defs"] = {"x": {"type": "object", "properties": {**x, "b": NUMBER}}}
    was, now = is_valid(schema), is_valid(plain(schema))
    assert all(before or not after for before, after in zip(was, now, strict=True))
    assert any(now) or not any(was), "what could be followed still can be"
