"""JSON texts as syntax trees. Each string has one spelling, which keeps automata small."""

import dataclasses
import json
from collections.abc import Sequence as SequenceOf
from typing import Any

from jaxpaged._grammar.characters import ANY, Ranges, complement, intersection, single, union
from jaxpaged._grammar.nodes import (
    Characters,
    Choice,
    Node,
    Repeat,
    Separated,
    Sequence,
    any_of,
    choice,
    literal,
    optional,
    sequence,
)
from jaxpaged._grammar.numbers import DIGIT, integers
from jaxpaged._grammar.regex import parse_full

ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
PLAIN = complement(union([(0, 0x1F), *single('"\\')]))


def escaped(node: Node) -> Node:
    """A regex over the characters of a string, as one over its JSON spelling.

    A character is spelled as itself, or, if JSON forbids that, by its short escape. Control characters without a
    short escape cannot be spelled.
    """
    match node:
        case Characters(ranges):
            return _escaped_character(ranges)
        case Sequence(parts):
            return Sequence(tuple(map(escaped, parts)))
        case Choice(options):
            return Choice(tuple(map(escaped, options)))
        case Repeat():
            return dataclasses.replace(node, part=escaped(node.part))
        case _:
            raise AssertionError(f"no regex contains {type(node).__name__}")


def _escaped_character(ranges: Ranges) -> Node:
    letters = "".join(
        letter for character, letter in ESCAPES.items() if any(low <= ord(character) <= high for low, high in ranges)
    )
    return choice([Characters(intersection(ranges, PLAIN)), *([sequence("\\", any_of(letters))] if letters else [])])


CHARACTER = _escaped_character(ANY)
EXPONENT = sequence(any_of("eE"), optional(any_of("+-")), Repeat(DIGIT, 1, 2))
INTEGER = sequence(optional(literal("-")), integers(0, None))
NUMBER = sequence(INTEGER, optional(sequence(".", Repeat(DIGIT, 1, None))), optional(EXPONENT))
BOOLEAN = choice(["true", "false"])
NULL = literal("null")


def string(content: Node) -> Node:
    """A string with a content that is already escaped."""
    return sequence('"', content, '"')


STRING = string(Repeat(CHARACTER, 0, None))


class JsonText:
    """Arrays, objects and values with whitespace.

    Whitespace may follow `{`, `[`, `,` and `:` and precede `}` and `]`.
    """

    def __init__(self, whitespace_pattern: str):
        self.space = parse_full(whitespace_pattern)
        if not _characters(self.space) <= set(" \t\n\r"):
            raise ValueError(
                "whitespace_pattern must match spaces, tabs, newlines and carriage returns only; got "
                f"{whitespace_pattern=}."
            )
        self.comma = sequence(",", self.space)

    def array(self, items: Node) -> Node:
        """An array; `items` has the items with `comma` between them."""
        return sequence("[", self.space, items, self.space, "]")

    def object(self, members: Node) -> Node:
        """An object; `members` has the members with `comma` between them."""
        return sequence("{", self.space, members, self.space, "}")

    def member(self, key: Node, value: Node) -> Node:
        return sequence(key, ":", self.space, value)

    def array_of(self, item: Node, least: int = 0, most: int | None = None) -> Node:
        return self.array(Repeat(item, least, most, self.comma))

    def map_of(self, value: Node, least: int = 0, most: int | None = None) -> Node:
        """An object with any keys."""
        return self.object(Repeat(self.member(STRING, value), least, most, self.comma))

    def any_value(self, depth: int) -> Node:
        """Any value in which at most `depth` arrays and objects contain each other."""
        scalars = [STRING, NUMBER, BOOLEAN, NULL]
        value = choice(scalars)
        for _ in range(depth):
            value = choice([*scalars, self.map_of(value), self.array_of(value)])
        return value

    def constant(self, value: Any) -> Node:
        """A value of `json.loads`."""
        if isinstance(value, dict):
            members = [self.member(spelled(key), self.constant(each)) for key, each in value.items()]
            return self.object(self.all_of(members))
        if isinstance(value, list):
            return self.array(self.all_of([self.constant(each) for each in value]))
        return spelled(value)

    def all_of(self, nodes: SequenceOf[Node]) -> Node:
        return Separated(tuple((node, True) for node in nodes), self.comma)


def spelled(value: Any) -> Node:
    """A scalar or a key as `json.dumps` spells it, with characters beyond ASCII unescaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        text = json.dumps(value)
    return literal(text)


def type_names(value: Any) -> set[str]:
    """The types of a value of `json.loads`."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if value == int(value) else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _characters(node: Node) -> set[str]:
    """The characters of a regex; of large sets the ends."""
    match node:
        case Characters(ranges):
            return {chr(code) for low, high in ranges for code in {*range(low, min(low + 40, high + 1)), high}}
        case Sequence(nodes) | Choice(nodes):
            return set().union(*map(_characters, nodes))
        case Repeat(part):
            return _characters(part)
        case _:
            raise AssertionError(f"no regex contains {type(node).__name__}")
