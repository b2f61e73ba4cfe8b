"""Syntax trees of regular languages over characters: regexes, JSON schemas and lists of strings become one of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxpaged._grammar.characters import Ranges


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The parts one after another; no parts: the empty text."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the options; no options: nothing matches."""

    options: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The part at least `least` and at most `most` times; `most` None: without bound."""

    part: Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Separated:
    """The items in their order with a separator between two of them. An item is a node and whether it is required."""

    items: tuple[tuple[Node, bool], ...]
    separator: Node


Node = Characters | Sequence | Choice | Repeat | Separated
EMPTY = Sequence(())
NOTHING = Choice(())


def literal(text: str) -> Node:
    return Sequence(tuple(Characters(((ord(character),) * 2,)) for character in text))


def any_of(characters: str) -> Node:
    """One of the characters."""
    return Choice(tuple(map(literal, characters)))


def sequence(*parts: Node | str) -> Node:
    """The parts one after another; a string is a literal."""
    return Sequence(tuple(literal(part) if isinstance(part, str) else part for part in parts))


def choice(options: Iterable[Node | str]) -> Node:
    return Choice(tuple(literal(option) if isinstance(option, str) else option for option in options))


def optional(node: Node) -> Node:
    return Repeat(node, 0, 1)


def lengths(node: Node) -> tuple[int, int | None] | None:
    """The least and the largest number of characters in a match; None instead of a number: unbounded.

    None for a language without a match. `Separated` is not supported: no regex contains it.
    """
    if isinstance(node, Characters):
        return (1, 1) if node.ranges else None
    if isinstance(node, Repeat):
        part = lengths(node.part)
        if part is None or node.most == 0:
            return (0, 0) if node.least == 0 else None
        most = 0 if part[1] == 0 else None if node.most is None or part[1] is None else part[1] * node.most
        return part[0] * node.least, most
    assert not isinstance(node, Separated)
    if isinstance(node, Choice):
        options = [length for length in map(lengths, node.options) if length is not None]
        if not options:
            return None
        mosts = [most for _, most in options]
        return min(least for least, _ in options), None if None in mosts else max(
            most for most in mosts if most is not None
        )
    parts = [lengths(part) for part in node.parts]
    total: tuple[int, int | None] = (0, 0)
    for part in parts:
        if part is None:
            return None
        total = total[0] + part[0], None if total[1] is None or part[1] is None else total[1] + part[1]
    return total
