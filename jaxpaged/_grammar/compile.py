"""Compiles syntax trees: automaton, minimal automaton, masks."""

from collections.abc import Callable, Hashable

import numpy as np

from jaxpaged._grammar.automaton import ByteNFA, TooManyStatesError, determinise
from jaxpaged._grammar.masks import token_masks
from jaxpaged._grammar.minimise import byte_classes, minimise
from jaxpaged._grammar.nodes import Node
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._integers import checked_size

SPARE = 4  # how many times more states the automaton may have before it is minimised


def compile_node(
    make_node: Callable[[], Node], key: Hashable, name: str, vocabulary: Vocabulary, max_states: int
) -> Grammar:
    """The grammar of a syntax tree, compiled unless it is among the vocabulary's recent ones.

    Args:
        make_node: makes the syntax tree.
        key: identifies the tree.
        name: names the grammar in errors.
        vocabulary: the tokens.
        max_states: the most states, with the dead one.
    """
    checked_size("max_states", max_states, 2, 2**15 - 1)
    return vocabulary.recent.get((key, max_states), lambda: _compile(make_node(), name, vocabulary, max_states))


def _compile(node: Node, name: str, vocabulary: Vocabulary, max_states: int) -> Grammar:
    try:
        table, is_end = determinise(ByteNFA(node, max_states), SPARE * max_states)
    except TooManyStatesError:
        raise TooManyStatesError(max_states) from None
    if not len(table):
        raise ValueError(f"{name} allows no answer at all.")
    table, is_end = minimise(table, is_end)
    if len(table) >= max_states:
        raise TooManyStatesError(max_states)
    dead = len(table)
    table = np.concatenate([np.where(table < 0, dead, table), np.full((1, 256), dead, table.dtype)]).astype(np.int16)
    is_end = np.append(is_end, False)
    masks, mask_of_state, is_live = token_masks(table, is_end, vocabulary)
    if not is_live[0]:
        raise ValueError(f"{name} allows no answer that {vocabulary} can spell.")
    classes, next_states = byte_classes(table)
    arrays = classes, next_states, masks, mask_of_state, is_end
    for array in arrays:
        array.setflags(write=False)
    return Grammar(*arrays, vocabulary.fingerprint)
