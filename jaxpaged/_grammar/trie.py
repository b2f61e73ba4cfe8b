"""The trie of a vocabulary's bytes, level by level, and the walk of an automaton along it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Level:
    """The nodes of one depth. The children of a node are neighbours in the next level.

    Attributes:
        bytes: the last byte of each node, uint8 `[nodes]`.
        first_child: the first child of each node in the next level, and the number of all, int64 `[nodes + 1]`.
        text: the index of the text that ends in each node, or -1, int32 `[nodes]`.
    """

    bytes: np.ndarray
    first_child: np.ndarray
    text: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trie:
    """The distinct texts of a vocabulary's tokens.

    Attributes:
        levels: nodes of depth 1, 2, ...
        text_of_token: the index of each token's text, int32 `[vocab]`; -1 for tokens without bytes.
        num_texts: the number of distinct texts.
    """

    levels: tuple[Level, ...]
    text_of_token: np.ndarray
    num_texts: int

    @classmethod
    def create(cls, token_bytes: np.ndarray, token_lengths: np.ndarray) -> Trie:
        """The trie of tokens: their bytes `[vocab, width]` and lengths `[vocab]`; those of length 0 are left out."""
        tokens = np.flatnonzero(token_lengths)
        keyed = np.concatenate([token_bytes[tokens], token_lengths[tokens, None]], axis=1)  # b"a" is not b"a\0"
        texts, text = np.unique(keyed, axis=0, return_inverse=True)
        text_of_token = np.full(len(token_lengths), -1, np.int32)
        text_of_token[tokens] = text.reshape(-1)
        rows, lengths = texts[:, :-1], texts[:, -1]
        levels: list[Level] = []
        node = np.zeros(len(texts), np.int64)  # the node of each row in the level before
        children_of = []
        for depth in range(rows.shape[1]):
            in_level = np.flatnonzero(lengths > depth)
            parent, byte = node[in_level], rows[in_level, depth]
            is_new = np.ones(len(in_level), bool)
            is_new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            index = np.cumsum(is_new) - 1
            node[in_level] = index
            ends = np.full(int(is_new.sum()), -1, np.int32)
            is_last = lengths[in_level] == depth + 1
            ends[index[is_last]] = in_level[is_last]
            children_of.append(parent[is_new])
            levels.append(Level(byte[is_new], np.empty(0), ends))
        after = [*children_of[1:], np.empty(0, np.int64)]
        levels = [
            dataclasses.replace(level, first_child=np.searchsorted(parents, np.arange(len(level.bytes) + 1)))
            for level, parents in zip(levels, after, strict=True)
        ]
        return cls(tuple(levels), text_of_token, len(texts))

    def walk(self, table: np.ndarray, starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Walks all texts from several states at once, as far as they are not dead.

        Args:
            table: the next states `[states, 256]`; the last state is dead.
            starts: states to begin in.

        Yields:
            For each length of texts: the index of the start, the text, and the state after it.
        """
        dead, next_states = len(table) - 1, table.ravel()
        origin, row = np.arange(len(starts)), starts * 256
        child = np.zeros(len(starts), np.int64)
        size = np.full(len(starts), len(self.levels[0].bytes))
        for level in self.levels:
            # Every pair of a start and a node has one pair for each child of the node.
            pair = np.repeat(np.arange(len(size)), size)
            node = np.arange(len(pair)) + (child - np.cumsum(size) + size)[pair]
            after = next_states[row[pair] + level.bytes[node]]
            lives = np.flatnonzero(after != dead)
            node, after, origin = node[lives], after[lives], origin[pair[lives]]
            text = level.text[node]
            is_text = np.flatnonzero(text >= 0)
            yield origin[is_text], text[is_text], after[is_text]
            child = level.first_child[node]
            size = level.first_child[node + 1] - child
            row = after.astype(np.int64) * 256
