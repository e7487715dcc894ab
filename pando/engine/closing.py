"""A JSON schema as answers follow it: objects that list their properties have no others, and formats that it does not define go."""

from collections.abc import Callable, Mapping
from typing import Any

# Those of JSON Schema. Others, such as "password", only tell people what a text is for, and llguidance refuses what it does not know.
FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip

_VALUES = "const", "enum"  # hold no schemas, whatever they look like
_BY_NAME = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"  # hold one for each name

# Where one of these stands, two schemas may be asked of one object, and what the first does not list the second may want.
_TOGETHER = frozenset((
    "oneOf", "not", "if", "then", "else", "contains", "patternProperties", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
))  # fmt: skip
_ELSEWHERE = frozenset(("$ref", "anyOf", "allOf"))  # with these that is so where an allOf has several, or more is said beside it than
_SILENT = frozenset((
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "type",
    "$comment", "$schema", "$id", "$defs", "definitions", "x-guidance",
))  # fmt: skip
# Whoever says one of these beside properties has thought of others.
_OF_OTHERS = frozenset(("additionalProperties", "propertyNames", "minProperties", "dependentRequired", *_VALUES))


def plain(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Narrower than it was, or the same: what follows it follows the other, too."""
    found: list[Mapping[str, Any]] = []

    def without_other_format(one: Mapping[str, Any]) -> dict[str, Any]:
        found.append(one)
        return {key: value for key, value in one.items() if key != "format" or not isinstance(value, str) or value in FORMATS}

    def closed(one: Mapping[str, Any]) -> dict[str, Any]:
        return {**one, "additionalProperties": False} if _lists_its_properties(one) else dict(one)

    made: Mapping[str, Any] = _changed(schema, without_other_format)
    return _changed(made, closed) if all(map(_stands_alone, found)) else made


def _stands_alone(schema: Mapping[str, Any]) -> bool:
    """No two schemas in it are asked of the same object."""
    members = schema.get("allOf", [])
    if _TOGETHER & schema.keys() or not isinstance(members, list) or len(members) > 1:
        return False
    return not _ELSEWHERE & schema.keys() or len(schema.keys() - _SILENT) == 1


def _lists_its_properties(schema: Mapping[str, Any]) -> bool:
    listed, required = schema.get("properties"), schema.get("required", [])
    if not listed or not isinstance(listed, Mapping) or not isinstance(required, list) or _OF_OTHERS & schema.keys():
        return False
    return all(isinstance(name, str) and name in listed for name in required)


def _changed(value: Any, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """With the change made in each schema, from the outermost on."""
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if not isinstance(value, Mapping):
        return value
    made = change(value)
    for key, inner in made.items():
        if key in _BY_NAME and isinstance(inner, Mapping):
            made[key] = {name: _changed(one, change) for name, one in inner.items()}
        elif key not in _VALUES:
            made[key] = _changed(inner, change)
    return made
