"""Whether the schemas of a `oneOf` exclude each other, so that a value of one is a value of no other."""

import itertools
import json
from collections.abc import Callable
from typing import Any

from jaxpaged._grammar.json_text import type_names

NUMBERS = {"integer", "number"}


def exclusion_problem(options: list[Any], resolve: Callable[[Any], Any]) -> str | None:
    """Why two options may share a value, or None if no two can.

    Two options exclude each other if they have different types, different constants, or a required property that
    excludes: the discriminator of a union.

    Args:
        options: the schemas.
        resolve: the schema that a reference names.
    """
    schemas = [_follow(option, resolve) for option in options]
    for (i, one), (j, other) in itertools.combinations(enumerate(schemas), 2):
        if not _exclude(one, other, resolve):
            return f"options {i} and {j} may share a value"
    return None


def _follow(schema: Any, resolve: Callable[[Any], Any]) -> Any:
    for _ in range(64):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(schema["$ref"])
    return schema


def _exclude(one: Any, other: Any, resolve: Callable[[Any], Any]) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return _texts(values[0]).isdisjoint(_texts(values[1]))
    kinds = _types(one), _types(other)
    if kinds[0] and kinds[1] and kinds[0].isdisjoint(kinds[1]):
        return True
    if kinds != ({"object"}, {"object"}):
        return False
    shared = set(one.get("required", [])) & set(other.get("required", []))
    for name in sorted(shared):
        pair = [_follow(schema.get("properties", {}).get(name), resolve) for schema in (one, other)]
        if _exclude(pair[0], pair[1], resolve):
            return True
    return False


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


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
        types = {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type", []))
    return {"number" if each in NUMBERS else each for each in types}
