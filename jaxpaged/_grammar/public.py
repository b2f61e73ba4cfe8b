"""Grammars of regexes, JSON schemas, JSON objects, lists of strings, and texts that are free in part."""

from collections.abc import Sequence
from typing import Any

from jaxpaged._grammar.automaton import TooManyStatesError
from jaxpaged._grammar.compile import compile_node
from jaxpaged._grammar.json_schema import SchemaReader, parse_schema
from jaxpaged._grammar.json_text import JsonText
from jaxpaged._grammar.nodes import choice
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.regex import parse_full
from jaxpaged._grammar.text import Text, text_node
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._integers import checked_size

MAX_STATES = 4096
MAX_DEPTH = 3
SPACE = " ?"


def compile_regex(pattern: str, vocabulary: Vocabulary, *, max_states: int = MAX_STATES) -> Grammar:
    """The grammar of a regex, which the whole answer matches.

    Python's syntax, as far as it is regular and dialects agree on it: `.` is any character but a newline, and `\\d`,
    `\\w` and `\\s` are ASCII. Anchors, lookarounds, backreferences, flags and Unicode properties are refused, except
    for `^` and `$` at the ends of the top alternatives, where they change nothing.

    Args:
        pattern: the regex.
        vocabulary: the tokens.
        max_states: the most states, with the dead one; at most 32767.

    Raises:
        ValueError: the regex is malformed or not supported, needs more than `max_states` states, or matches no text
            that the vocabulary can spell.

    Example:
        >>> from jaxpaged.grammar import Vocabulary, compile_regex
        >>> vocabulary = Vocabulary([b"0", b"1", b"01", b".", None], end_token_ids=[4])
        >>> grammar = compile_regex(r"0\\.\\d+", vocabulary)
        >>> [grammar.allowed_tokens(grammar.walk(text)).tolist() for text in (b"", b"0", b"0.", b"0.1")]
        [[0], [3], [0, 1, 2], [0, 1, 2, 4]]
    """
    return compile_node(
        lambda: parse_full(pattern), ("regex", pattern), f"The regex {pattern!r}", vocabulary, max_states
    )


def compile_choice(options: Sequence[str], vocabulary: Vocabulary, *, max_states: int = MAX_STATES) -> Grammar:
    """The grammar whose answers are the given strings.

    Raises:
        ValueError: there are no options, they need more than `max_states` states, or the vocabulary can spell none.

    Example:
        >>> from jaxpaged.grammar import Vocabulary, compile_choice
        >>> vocabulary = Vocabulary([b"yes", b"y", b"no", None], end_token_ids=[3])
        >>> compile_choice(["yes", "no"], vocabulary).allowed_tokens(0).tolist()
        [0, 2]
    """
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"options must be a sequence of strings; got {options=}.")
    options = tuple(options)
    return compile_node(lambda: choice(options), ("choice", options), f"The choice {options}", vocabulary, max_states)


def compile_json_schema(
    schema: dict[str, Any] | str | bool,
    vocabulary: Vocabulary,
    *,
    whitespace_pattern: str = SPACE,
    max_depth: int = MAX_DEPTH,
    max_states: int = MAX_STATES,
) -> Grammar:
    """The grammar of a JSON schema: each answer is JSON, and valid.

    Not every valid JSON text is an answer: objects have the declared properties only, in their order, and each string
    has one spelling. Keywords that a grammar cannot enforce are refused.

    Args:
        schema: the schema, or its text.
        vocabulary: the tokens.
        whitespace_pattern: a regex for the whitespace after `{`, `[`, `,` and `:` and before `}` and `]`.
        max_depth: how often a `$ref` may contain itself, and how many arrays and objects may contain each other where
            any value is allowed; at most 16.
        max_states: the most states, with the dead one; at most 32767.

    Raises:
        ValueError: the schema has a keyword that is malformed or not supported, needs more than `max_states` states,
            or allows no text that the vocabulary can spell. The message names the place in the schema.

    Example:
        >>> from jaxpaged.grammar import Vocabulary, compile_json_schema
        >>> vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [None], end_token_ids=[256])
        >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        >>> grammar = compile_json_schema(schema, vocabulary)
        >>> bool(grammar.is_end[grammar.walk(b'{"age": 42}')]), bool(grammar.is_end[grammar.walk(b'{"age": null}')])
        (True, False)
    """
    schema, text = parse_schema(schema)
    checked_size("max_depth", max_depth, 1, 16)
    reader = SchemaReader(schema, JsonText(whitespace_pattern), max_depth)
    key = ("json_schema", text, whitespace_pattern, max_depth)
    try:
        return compile_node(reader.read, key, "The JSON schema", vocabulary, max_states)
    except TooManyStatesError:
        raise TooManyStatesError(max_states, f"; its largest part is {reader.largest_part()!r}") from None


def compile_json_object(
    vocabulary: Vocabulary,
    *,
    whitespace_pattern: str = SPACE,
    max_depth: int = MAX_DEPTH,
    max_states: int = MAX_STATES,
) -> Grammar:
    """The grammar of any JSON object in which at most `max_depth` objects and arrays contain each other.

    The arguments and errors are those of `compile_json_schema`.
    """
    return compile_json_schema(
        {"type": "object"},
        vocabulary,
        whitespace_pattern=whitespace_pattern,
        max_depth=max_depth,
        max_states=max_states,
    )


def compile_text(text: Text, vocabulary: Vocabulary, *, max_states: int = MAX_STATES) -> Grammar:
    """The grammar of a text that may be free in part, for example up to a mark after which a grammar begins.

    Args:
        text: a literal, a grammar, `Control`, `OneOf`, `Repeat`, `FreeText`, or a tuple of these in order.
        vocabulary: the tokens. A `Control` is one of its control tokens.
        max_states: the most states, with the dead one; at most 32767.

    Raises:
        ValueError: a part is of another type, a mark is empty, a `Control` is not in the vocabulary, the text needs
            more than `max_states` states, or the vocabulary can spell none.

    Example:
        >>> from jaxpaged.grammar import Control, FreeText, Part, Vocabulary, compile_choice, compile_text
        >>> vocabulary = Vocabulary([b"yes", b"no", b".", None, None], end_token_ids=[4], control_token_ids=[3])
        >>> call = Part(mark=Control(3), then=(compile_choice(["yes", "no"], vocabulary), "."))
        >>> grammar = compile_text(FreeText((call,)), vocabulary)
        >>> grammar.allowed_tokens(grammar.walk(b"..")).tolist()
        [0, 1, 2, 3, 4]
        >>> control = bytes(vocabulary.token_bytes[3, : vocabulary.token_lengths[3]])
        >>> grammar.allowed_tokens(grammar.walk(b".." + control)).tolist()
        [0, 1]
    """
    node = text_node(text, vocabulary)
    return compile_node(lambda: node, ("text", node), "The text", vocabulary, max_states)
