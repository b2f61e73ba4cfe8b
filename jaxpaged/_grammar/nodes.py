"""Syntax trees of regular languages: regexes, JSON schemas, lists of strings and texts become one of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxpaged._grammar.characters import ByteRange, Ranges
from jaxpaged._grammar.records import Grammar


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
    """The part at least `least` and at most `most` times, with a separator between two; `most` None: without bound."""

    part: Node
    least: int
    most: int | None
    separator: Node = Sequence(())


@dataclasses.dataclass(frozen=True)
class Separated:
    """The items in their order with a separator between two of them. An item is a node and whether it is required."""

    items: tuple[tuple[Node, bool], ...]
    separator: Node


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One byte of each range, in order."""

    ranges: tuple[ByteRange, ...]


@dataclasses.dataclass(frozen=True)
class Automaton:
    """The language of a compiled grammar."""

    grammar: Grammar


@dataclasses.dataclass(frozen=True)
class Marked:
    """A mark, the node that follows it, and whether the text ends after that instead of being free again."""

    mark: Node
    then: Node
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Free:
    """Symbols of any kind up to the first mark that is complete, or without a mark if `may_end`."""

    symbol: Node
    marked: tuple[Marked, ...]
    may_end: bool


Node = Characters | Sequence | Choice | Repeat | Separated | Bytes | Automaton | Free
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


def is_empty(node: Node) -> bool:
    """Whether nothing matches."""
    match node:
        case Characters(ranges):
            return not ranges
        case Sequence(parts):
            return any(map(is_empty, parts))
        case Choice(options):
            return all(map(is_empty, options))
        case Repeat(part, least):
            return least > 0 and is_empty(part)
        case Separated(items):
            return any(is_required and is_empty(item) for item, is_required in items)
        case _:
            raise AssertionError(f"no schema contains {type(node).__name__}")


def size(node: Node) -> int:
    """About the number of characters that the node spells out, with repetitions."""
    match node:
        case Characters():
            return 1
        case Sequence(nodes) | Choice(nodes):
            return sum(map(size, nodes))
        case Repeat(part, least, most, separator):
            return max(least, most or 1) * (size(part) + size(separator))
        case Separated(items, separator):
            return sum(size(item) + size(separator) for item, _ in items)
        case _:
            raise AssertionError(f"no schema contains {type(node).__name__}")


def lengths(node: Node) -> tuple[int, int | None] | None:
    """The least and the largest number of characters in a match of a regex, None for no bound; None without a match."""
    match node:
        case Characters():
            return None if is_empty(node) else (1, 1)
        case Sequence(parts):
            return _sum([lengths(part) for part in parts])
        case Choice(options):
            found = [length for length in map(lengths, options) if length is not None]
            mosts = [most for _, most in found if most is not None]
            return (
                (min(least for least, _ in found), max(mosts) if len(mosts) == len(found) else None) if found else None
            )
        case Repeat(part, least, most):
            if (length := lengths(part)) is None or length[1] == 0:
                return None if least and length is None else (0, 0)
            return length[0] * least, None if most is None or length[1] is None else length[1] * most
        case _:
            raise AssertionError(f"no regex contains {type(node).__name__}")


def _sum(all_lengths: list[tuple[int, int | None] | None]) -> tuple[int, int | None] | None:
    least, most = 0, 0
    is_bounded = True
    for length in all_lengths:
        if length is None:
            return None
        least, most = least + length[0], most + (length[1] or 0)
        is_bounded &= length[1] is not None
    return least, most if is_bounded else None
