"""JSON schemas as syntax trees. Each keyword is obeyed, or refused with its name and place."""

import json
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from jaxpaged._grammar.alternatives import exclusion_problem
from jaxpaged._grammar.formats import FORMATS
from jaxpaged._grammar.json_text import (
    BOOLEAN,
    CHARACTER,
    INTEGER,
    NULL,
    NUMBER,
    JsonText,
    escaped,
    spelled,
    string,
    type_names,
)
from jaxpaged._grammar.nodes import (
    EMPTY,
    NOTHING,
    Node,
    Repeat,
    Separated,
    choice,
    is_empty,
    lengths,
    optional,
    sequence,
    size,
)
from jaxpaged._grammar.numbers import Bound, decimals, integers
from jaxpaged._grammar.regex import parse_full, parse_search

ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$comment", "$schema", "$defs", "definitions"),
}
NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": NUMBER_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "boolean": set(),
    "null": set(),
}
# Keywords that say what a value is without `type`, and the keywords that may be next to them.
WITHOUT_TYPE: dict[str, set[str]] = {
    "$ref": set(),
    "enum": {"type"},
    "const": {"type"},
    "anyOf": set(),
    "oneOf": set(),
    "allOf": set(),
}
MAX_NESTING = 64
MAX_PARTS = 20_000


class SchemaReader:
    """Reads one schema.

    Attributes:
        parts: the syntax tree of each place, by JSON pointer; of a place read several times, the last.
    """

    def __init__(self, schema: Any, text: JsonText, max_depth: int):
        self.schema = schema
        self.text = text
        self.max_depth = max_depth
        self.parts: dict[str, Node] = {}
        self._open: Counter[str] = Counter()  # references around the current place
        self._num_read = 0
        self._is_cut = False  # a reference was not followed
        self._readers: dict[str, Callable[[dict[str, Any], str], Node]] = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "array": self._array,
            "object": self._object,
            "boolean": lambda schema, place: BOOLEAN,
            "null": lambda schema, place: NULL,
            "$ref": self._reference,
            **dict.fromkeys(("enum", "const"), self._constants),
            **dict.fromkeys(("anyOf", "oneOf", "allOf"), self._options),
        }

    def read(self) -> Node:
        """The syntax tree of the whole schema."""
        node = self._any(self.schema, "#")
        if is_empty(node):
            cut = f" in max_depth={self.max_depth} levels" if self._is_cut else ""
            raise ValueError(f"The JSON schema allows no answer{cut}: {self._emptiest()!r} allows no value.")
        return node

    def largest_part(self) -> str:
        """The innermost place with half of the schema's size or more."""
        sizes = {place: size(node) for place, node in self.parts.items()}
        return max((place for place in sizes if 2 * sizes[place] >= sizes["#"]), key=lambda place: place.count("/"))

    def _emptiest(self) -> str:
        return max((place for place, node in self.parts.items() if is_empty(node)), key=lambda place: place.count("/"))

    def _refuse(self, place: str, keyword: str, problem: str) -> NoReturn:
        raise ValueError(f"The JSON schema has {keyword!r} at {place!r}, {problem}.")

    def _any(self, schema: Any, place: str) -> Node:
        self._num_read += 1
        if self._num_read > MAX_PARTS or place.count("/") > MAX_NESTING * 2:
            raise ValueError(
                f"The JSON schema has more than {MAX_PARTS} parts or {MAX_NESTING} levels at {place!r}, with each $ref "
                f"written out up to max_depth={self.max_depth} times. Lower max_depth, or divide the schema."
            )
        node = self._one(schema, place)
        self.parts[place] = node
        return node

    def _one(self, schema: Any, place: str) -> Node:
        if schema is True:
            return self.text.any_value(self.max_depth)
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict):
            raise ValueError(f"A JSON schema is an object or a bool; got {schema!r} at {place!r}.")
        for keyword, neighbours in WITHOUT_TYPE.items():
            if keyword in schema:
                self._check_keywords(schema, place, {keyword, *neighbours}, keyword)
                return self._readers[keyword](schema, place)
        types = self._types(schema, place)
        if not types:
            self._check_keywords(schema, place, set(), "")
            return self.text.any_value(self.max_depth)
        self._check_keywords(schema, place, {"type"}.union(*(KEYWORDS[each] for each in types)), " or ".join(types))
        return choice([self._readers[each](schema, place) for each in types])

    def _check_keywords(self, schema: dict[str, Any], place: str, known: set[str], owner: str) -> None:
        for keyword in schema:
            is_known = keyword in known | ANNOTATIONS or (keyword == "$id" and place == "#")
            if not is_known and not keyword.startswith("x-"):
                self._refuse(place, keyword, "which is not supported" + (f" next to {owner}" if owner else ""))

    def _types(self, schema: dict[str, Any], place: str) -> list[str]:
        """The types of a schema; without `type`, the one that all its keywords belong to."""
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or any(not isinstance(each, str) or each not in KEYWORDS for each in types):
            self._refuse(place, "type", f"{schema['type']!r}; types are {', '.join(KEYWORDS)}")
        if "type" not in schema:
            asked = set(schema) & set().union(*KEYWORDS.values())
            types = [each for each in ("string", "number", "array", "object") if asked and asked <= KEYWORDS[each]]
        return [each for each in types if not (each == "integer" and "number" in types)]

    def _reference(self, schema: dict[str, Any], place: str) -> Node:
        reference = schema["$ref"]
        target = self.resolve(reference, place)
        if self._open[reference] >= self.max_depth:
            self._is_cut = True
            return NOTHING
        self._open[reference] += 1
        node = self._any(target, place)
        self._open[reference] -= 1
        return node

    def resolve(self, reference: Any, place: str) -> Any:
        """The schema that a reference names."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            self._refuse(place, "$ref", f"{reference!r}; a reference is # or begins with #/")
        target = self.schema
        for key in filter(None, unquote(reference[1:]).split("/")):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(place, "$ref", f"{reference!r}, which the schema does not define")
        return target

    def _constants(self, schema: dict[str, Any], place: str) -> Node:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            self._refuse(place, "enum", "which must be a list")
        types = self._types(schema, place)
        return choice([self.text.constant(value) for value in values if not types or _has_type(value, types)])

    def _options(self, schema: dict[str, Any], place: str) -> Node:
        (keyword,) = schema.keys() & {"anyOf", "oneOf", "allOf"}
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            self._refuse(place, keyword, "which must be a list of schemas")
        if keyword == "allOf" and len(options) > 1:
            self._refuse(place, keyword, "which is supported with one schema only; merge them")
        if keyword == "oneOf" and (problem := exclusion_problem(options, lambda ref: self.resolve(ref, place))):
            self._refuse(place, keyword, f"but {problem}; use anyOf")
        return choice([self._any(option, f"{place}/{keyword}/{i}") for i, option in enumerate(options)])

    def _string(self, schema: dict[str, Any], place: str) -> Node:
        least, most = self._bounds(schema, place, "minLength", "maxLength")
        if "format" in schema:
            if schema["format"] not in list(FORMATS):
                self._refuse(place, "format", f"{schema['format']!r}; supported are {', '.join(FORMATS)}")
            if others := {"pattern", "minLength", "maxLength"} & schema.keys():
                self._refuse(place, "format", f"which is not supported next to {', '.join(sorted(others))}")
            return string(escaped(parse_full(FORMATS[schema["format"]])))
        if "pattern" not in schema:
            return string(Repeat(CHARACTER, least, most))
        if not isinstance(schema["pattern"], str):
            self._refuse(place, "pattern", f"{schema['pattern']!r}; it must be a regex")
        try:
            pattern = parse_search(schema["pattern"])
        except ValueError as error:
            self._refuse(place, "pattern", f"which is not supported: {error}")
        shortest, longest = lengths(pattern) or (least, most)
        if shortest < least or (most is not None and (longest is None or longest > most)):
            self._refuse(
                place, "pattern", "which allows other lengths than minLength and maxLength; write them in the pattern"
            )
        return string(escaped(pattern))

    def _bounds(self, schema: dict[str, Any], place: str, low: str, high: str) -> tuple[int, int | None]:
        for keyword in (low, high):
            value = schema.get(keyword, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self._refuse(place, keyword, f"{value!r}; it must be an integer of at least 0")
        return schema.get(low, 0), schema.get(high)

    def _number_bounds(self, schema: dict[str, Any], place: str) -> tuple[Bound | None, Bound | None]:
        bounds: dict[str, Bound] = {}
        for keyword in sorted(NUMBER_KEYWORDS & schema.keys()):
            value = schema[keyword]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                self._refuse(place, keyword, f"{value!r}; it must be a finite number")
            bounds[keyword] = Bound(Decimal(repr(value)), not keyword.startswith("exclusive"))
        lows = [bounds[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in bounds]
        highs = [bounds[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in bounds]
        low = max(lows, key=lambda bound: (bound.value, not bound.is_inclusive), default=None)
        high = min(highs, key=lambda bound: (bound.value, bound.is_inclusive), default=None)
        return low, high

    def _integer(self, schema: dict[str, Any], place: str) -> Node:
        if schema.get("multipleOf", 1) != 1:
            self._refuse(place, "multipleOf", "which is supported as 1 only")
        low, high = self._number_bounds(schema, place)
        if low is None and high is None:
            return INTEGER
        least = None if low is None else math.ceil(low.value) + (not low.is_inclusive and low.value % 1 == 0)
        most = None if high is None else math.floor(high.value) - (not high.is_inclusive and high.value % 1 == 0)
        return integers(least, most) if least is None or most is None or least <= most else NOTHING

    def _number(self, schema: dict[str, Any], place: str) -> Node:
        if "multipleOf" in schema:
            self._refuse(place, "multipleOf", "which is supported as 1 and for integers only")
        low, high = self._number_bounds(schema, place)
        return NUMBER if low is None and high is None else decimals(low, high)

    def _array(self, schema: dict[str, Any], place: str) -> Node:
        least, most = self._bounds(schema, place, "minItems", "maxItems")
        if schema.get("uniqueItems", False) is not False and (most is None or most > 1):
            self._refuse(place, "uniqueItems", "which a regular language cannot express")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list) or isinstance(schema.get("items"), list):
            self._refuse(place, "items", "a list; write it as prefixItems, which must be a list")
        if not {"prefixItems", "items"} & schema.keys():
            return self.text.array_of(self.text.any_value(self.max_depth - 1), least, most)
        nodes = [self._any(item, f"{place}/prefixItems/{i}") for i, item in enumerate(prefix)]
        if "items" not in schema and least > len(prefix):
            self._refuse(place, "minItems", "more than the prefixItems; give items for the others")
        # Without "items" more of any kind would be valid; answers have none.
        item = self._any(schema["items"], f"{place}/items") if "items" in schema else NOTHING
        return self.text.array(self._items(nodes, item, least, most))

    def _items(self, prefix: list[Node], item: Node, least: int, most: int | None) -> Node:
        """The first items in their order, then any number of `item`."""
        comma = self.text.comma
        if most is not None and most < least:
            return NOTHING
        if not prefix:
            return Repeat(item, least, most, comma) if most != 0 else EMPTY
        prefix = prefix[:most]
        rest_most = None if most is None else most - len(prefix)
        node: Node = Repeat(sequence(comma, item), max(0, least - len(prefix)), rest_most)
        for i in reversed(range(len(prefix))):
            node = sequence(comma, prefix[i], node) if i else sequence(prefix[i], node)
            node = optional(node) if i >= least else node
        return node if prefix else EMPTY

    def _object(self, schema: dict[str, Any], place: str) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            self._refuse(place, "properties", "which must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(place, "required", "which must be a list of names")
        for name in required:
            if name not in properties:
                self._refuse(place, "required", f"but {name!r} is not among the properties")
        if not properties:
            return self._map(schema, others, place)
        if bounds := {"minProperties", "maxProperties"} & schema.keys():
            self._refuse(place, bounds.pop(), "which is not supported next to properties")
        if not isinstance(others, bool):
            self._refuse(place, "additionalProperties", "which is supported as a bool only, next to properties")
        items = []
        for name, value in properties.items():
            node = self.text.member(spelled(name), self._any(value, f"{place}/properties/{_escape(name)}"))
            items.append((node, name in required))
        return self.text.object(Separated(tuple(items), self.text.comma))

    def _map(self, schema: dict[str, Any], others: Any, place: str) -> Node:
        least, most = self._bounds(schema, place, "minProperties", "maxProperties")
        if least > 1:
            self._refuse(place, "minProperties", "which is supported up to 1: keys may repeat")
        if others is False or most == 0:
            return self.text.object(EMPTY) if least == 0 else NOTHING
        if others is True:
            value = self.text.any_value(self.max_depth - 1)
        else:
            value = self._any(others, f"{place}/additionalProperties")
        return self.text.map_of(value, least, most)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _has_type(value: Any, types: list[str]) -> bool:
    return not type_names(value).isdisjoint(types)


def parse_schema(schema: Any) -> tuple[Any, str]:
    """A schema as `json.loads` returns it, and its text."""
    if isinstance(schema, str):
        schema = json.loads(schema)
    text = json.dumps(schema, allow_nan=False)
    return json.loads(text), text
