"""Grammars of regexes and lists of strings."""

from collections.abc import Sequence

from jaxpaged._grammar.compile import compile_node
from jaxpaged._grammar.nodes import choice
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.regex import parse_full
from jaxpaged._grammar.vocabulary import Vocabulary

MAX_STATES = 4096


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
