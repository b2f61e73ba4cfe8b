"""Whether the schemas of a `oneOf` exclude each other, so that a value of one is a value of no other."""

import itertools
import json
from collections.abc import Callable
from typing import Any

from jaxpaged._grammar.json_text import type_names

NUMBERS = {"integer", "number"}


def exclusion_problem(options: list[Any], resolve: Callable[[Any], Any]) -> str | None:
    """Why two options may share a value, or None if no two can.

    Two options exclude each other if they have different types, different constants, or a required property with
    different types or constants: the discriminator of a union.

    Args:
        options: the schemas.
        resolve: the schema that a reference names.
    """
    schemas = [_follow(option, resolve) for option in options]
    for (i, one), (j, other) in itertools.combinations(enumerate(schemas), 2):
        if not (_exclude(one, other) or _properties_exclude(one, other, resolve)):
            return f"options {i} and {j} may share a value"
    return None


def _follow(schema: Any, resolve: Callable[[Any], Any]) -> Any:
    for _ in range(64):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(schema["$ref"])
    return schema


def _exclude(one: Any, other: Any) -> bool:
    """Whether types or constants differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return _texts(values[0]).isdisjoint(_texts(values[1]))
    types = _types(one), _types(other)
    return bool(types[0] and types[1]) and types[0].isdisjoint(types[1])


def _properties_exclude(one: Any, other: Any, resolve: Callable[[Any], Any]) -> bool:
    """Whether a property that both objects require has different types or constants."""
    if not all(isinstance(schema, dict) and _types(schema) == {"object"} for schema in (one, other)):
        return False
    properties = [_field(schema, "properties", {}) for schema in (one, other)]
    shared = _names(one, "required") & _names(other, "required")
    pairs = [[_follow(each.get(name), resolve) for each in properties] for name in sorted(shared)]
    return any(_exclude(*pair) for pair in pairs)


# Options are compared before they are read: here a malformed keyword is no keyword.


def _field(schema: dict[str, Any], keyword: str, default: Any) -> Any:
    value = schema.get(keyword, default)
    return value if isinstance(value, type(default)) else default


def _names(schema: dict[str, Any], keyword: str) -> set[str]:
    return {name for name in _field(schema, keyword, []) if isinstance(name, str)}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    return [schema["const"]] if "const" in schema else _field(schema, "enum", []) or None


def _texts(values: list[Any]) -> set[str]:
    """Values as texts; equal numbers have equal texts."""
    return {json.dumps(_normal(value), sort_keys=True) for value in values}


def _normal(value: Any) -> Any:
    match value:
        case float():
            return int(value) if value == int(value) else value
        case list():
            return [_normal(each) for each in value]
        case dict():
            return {key: _normal(each) for key, each in value.items()}
        case _:
            return value


def _types(schema: dict[str, Any]) -> set[str]:
    """The types of a schema, with "number" for integers; empty: unknown."""
    if (values := _values(schema)) is not None:
        types = set().union(*map(type_names, values))
    else:
        types = {schema["type"]} if isinstance(schema.get("type"), str) else _names(schema, "type")
    return {"number" if each in NUMBERS else each for each in types}
