"""The allowed tokens of each state of an automaton."""

import numpy as np

from jaxpaged._grammar.vocabulary import Vocabulary

STATES_AT_ONCE = 64


def token_masks(table: np.ndarray, is_end: np.ndarray, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The allowed tokens of each state, from which tokens lead to an end.

    Args:
        table: the next states `[states, 256]`; the last state is dead.
        is_end: whether the answer may end, `[states]`.
        vocabulary: the tokens.

    Returns:
        The mask, uint32 `[states, ceil(vocab / 32)]`, and whether tokens lead from a state to an end, bool `[states]`.
    """
    is_live = np.ones(len(table), bool)
    is_live[-1] = False
    if not _has_all_bytes(table, vocabulary):
        is_live = _reaches_end(table, is_end, vocabulary)
    words = -(-len(vocabulary) // 32)
    mask = np.empty((len(table), words), np.uint32)
    tokens = np.flatnonzero(vocabulary.token_lengths)
    texts = vocabulary.trie.text_of_token[tokens]
    for start in range(0, len(table), STATES_AT_ONCE):
        states = np.arange(start, min(start + STATES_AT_ONCE, len(table)))
        allows_text = np.zeros((len(states), vocabulary.trie.num_texts), bool)
        for origin, text, after in vocabulary.trie.walk(table, states):
            allows_text[origin, text] = is_live[after]
        allows = np.zeros((len(states), words * 32), bool)
        allows[:, tokens] = allows_text[:, texts]
        allows[:, list(vocabulary.end_token_ids)] = is_end[states, None]
        mask[states] = np.packbits(allows, axis=1, bitorder="little").view("<u4")
    return mask, is_live


def _has_all_bytes(table: np.ndarray, vocabulary: Vocabulary) -> bool:
    """Whether each byte that the automaton needs is a token: then every state can go on."""
    first = vocabulary.trie.levels[0]
    needed = np.flatnonzero((table != len(table) - 1).any(axis=0))
    return bool(np.isin(needed, first.bytes[first.text >= 0]).all())


def _reaches_end(table: np.ndarray, is_end: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Whether tokens of the vocabulary lead from a state to an end, bool `[states]`."""
    leads = np.zeros((len(table), len(table)), bool)  # by one token
    for start in range(0, len(table), STATES_AT_ONCE):
        states = np.arange(start, min(start + STATES_AT_ONCE, len(table)))
        for origin, _, after in vocabulary.trie.walk(table, states):
            leads[states[origin], after] = True
    reaches = is_end.copy()
    while (more := reaches | leads[:, reaches].any(axis=1)).sum() > reaches.sum():
        reaches = more
    return reaches
