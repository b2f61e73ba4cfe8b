"""Texts that are free in part: control tokens, alternatives, and grammars that begin where a mark was written."""

from __future__ import annotations

import dataclasses

from jaxpaged._grammar import nodes
from jaxpaged._grammar.nodes import Automaton, Bytes, Choice, Free, Marked, Node, Sequence, literal
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.vocabulary import CONTROL_BYTE, Vocabulary, control_bytes
from jaxpaged._integers import checked_size

# A byte of a token, or a control token.
SYMBOL = Choice((Bytes(((0, CONTROL_BYTE - 1),)), Bytes(((CONTROL_BYTE, CONTROL_BYTE), *((0, 255),) * 3))))


@dataclasses.dataclass(frozen=True)
class Control:
    """A control token of the vocabulary. The same text in other tokens is not it."""

    token_id: int


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of several texts; without options the text cannot go on."""

    options: tuple[Text, ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A text any number of times, at least `least`, with a separator between two."""

    text: Text
    separator: Text = ()
    least: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a free text that follows a grammar.

    Attributes:
        mark: the part begins where this text is complete.
        then: what follows the mark.
        is_last: whether the free text ends with the part.
    """

    mark: Text
    then: Text = ()
    is_last: bool = False


@dataclasses.dataclass(frozen=True)
class FreeText:
    """Any text, control tokens included, in which each mark is followed by its part.

    The mark that is complete first counts. Equal marks allow any of their parts. After a part, the text is free again.

    Attributes:
        parts: the marks and what follows them.
        may_end: whether the free text may end without a part that is the last.
    """

    parts: tuple[Part, ...] = ()
    may_end: bool = True


type Text = str | Grammar | Control | OneOf | Repeat | FreeText | tuple[Text, ...]
"""A literal, a grammar, a control token, alternatives, repeated or free text, or several of these in order."""


def text_node(text: Text, vocabulary: Vocabulary) -> Node:
    """The syntax tree of a text. Raises `ValueError` for an empty mark and unknown control tokens."""
    match text:
        case str():
            return literal(text)
        case Grammar():
            return Automaton(text)
        case Control(token):
            if token not in vocabulary.control_token_ids:
                raise ValueError(f"The token {token} of a Control is not in the vocabulary's control_token_ids.")
            return Bytes(tuple((byte, byte) for byte in control_bytes(token)))
        case OneOf(options):
            return Choice(tuple(text_node(option, vocabulary) for option in options))
        case Repeat(repeated, separator, least):
            checked_size("least", least, 0, 2**15)
            return nodes.Repeat(text_node(repeated, vocabulary), least, None, text_node(separator, vocabulary))
        case FreeText(parts, may_end):
            marked = (
                Marked(text_node(part.mark, vocabulary), text_node(part.then, vocabulary), part.is_last)
                for part in parts
            )
            return Free(SYMBOL, tuple(marked), may_end)
        case tuple():
            return Sequence(tuple(text_node(each, vocabulary) for each in text))
        case _:
            kinds = "str, Grammar, Control, OneOf, Repeat, FreeText or a tuple of these"
            raise ValueError(f"A text is a {kinds}; got {text!r}.")
