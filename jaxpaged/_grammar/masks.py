"""The allowed tokens of each state of an automaton."""

import numpy as np

from jaxpaged._grammar.vocabulary import Vocabulary

STATES_AT_ONCE = 64


def token_masks(
    table: np.ndarray, is_end: np.ndarray, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The allowed tokens of each state, from which tokens lead to an end.

    Args:
        table: the next states `[states, 256]`; the last state is dead.
        is_end: whether the answer may end, `[states]`.
        vocabulary: the tokens.

    Returns:
        The distinct masks, uint32 `[masks, ceil(vocab / 32)]`, the index of each state's mask, int16 `[states]`, and
        whether tokens lead from a state to an end, bool `[states]`.
    """
    is_live = _live_states(table, is_end, vocabulary)
    group = _groups(table, is_live, vocabulary.token_bytes.shape[1])
    # States of one group allow the same tokens, but for the end tokens.
    _, states, row = np.unique(2 * group + is_end, return_index=True, return_inverse=True)
    rows = _mask_rows(table, states, is_end, is_live, vocabulary)
    numbers: dict[bytes, int] = {}
    number = np.array([numbers.setdefault(mask.tobytes(), len(numbers)) for mask in rows])
    masks = rows[np.unique(number, return_index=True)[1]]
    return masks, number[row].astype(np.int16), is_live


def _mask_rows(
    table: np.ndarray, states: np.ndarray, is_end: np.ndarray, is_live: np.ndarray, vocabulary: Vocabulary
) -> np.ndarray:
    """The masks of some states, uint32 `[len(states), ceil(vocab / 32)]`."""
    trie, words = vocabulary.trie, -(-len(vocabulary) // 32)
    masks = np.empty((len(states), words), np.uint32)
    text_of_bit = np.full(words * 32, -1, np.int32)
    text_of_bit[: len(vocabulary)] = trie.text_of_token
    for start in range(0, len(states), STATES_AT_ONCE):
        some = states[start : start + STATES_AT_ONCE]
        allows_text = np.zeros((len(some), trie.num_texts + 1), bool)  # the last: no text
        for origin, text, after in trie.walk(table, some):
            allows_text[origin, text] = is_live[after]
        allows = np.take(allows_text, text_of_bit, axis=1)
        allows[:, list(vocabulary.end_token_ids)] = is_end[some, None]
        masks[start : start + len(some)] = np.packbits(allows, axis=1, bitorder="little").view("<u4")
    return masks


def _groups(table: np.ndarray, is_live: np.ndarray, width: int) -> np.ndarray:
    """The group of each state: from states of one group the same texts of up to `width` bytes lead to live states."""
    columns = np.unique(table, axis=1)
    group = is_live.astype(np.int64)
    group[-1] = 2  # no text leads from the dead state to a live one
    num_groups = 0
    for _ in range(width):
        split = np.concatenate([group[:, None], group[columns]], axis=1)
        group = np.unique(split, axis=0, return_inverse=True)[1].reshape(-1)
        if (num_now := int(group.max()) + 1) == num_groups:
            break
        num_groups = num_now
    return group


def _live_states(table: np.ndarray, is_end: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Whether tokens of the vocabulary lead from a state to an end, bool `[states]`."""
    first = vocabulary.trie.levels[0]
    is_live = _before(table[:, first.bytes[first.text >= 0]], is_end)
    # Many vocabularies lack some bytes. Only where these matter do longer tokens decide.
    others = np.flatnonzero(~is_live[:-1])
    leads = [
        (others[start + origin], after)
        for start in range(0, len(others), STATES_AT_ONCE)
        for origin, _, after in vocabulary.trie.walk(table, others[start : start + STATES_AT_ONCE])
    ]
    if leads:
        sources, targets = (np.concatenate(each) for each in zip(*leads, strict=True))
        while not is_live[found := sources[is_live[targets]]].all():
            is_live[found] = True
    return is_live


def _before(next_states: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """Whether a path through `next_states` `[states, n]` leads from a state to an end, bool `[states]`."""
    is_before = is_end
    while (more := is_before | is_before[next_states].any(axis=1)).sum() > is_before.sum():
        is_before = more
    return is_before.copy()
