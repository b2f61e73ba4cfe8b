"""A compiled grammar: the arrays that restrict an answer token by token."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A regular language as arrays: a minimal automaton over bytes, and the allowed tokens of each state.

    The answer begins in state 0. After a token with bytes `b`, the state is
    `next_states[... next_states[next_states[state, byte_classes[b[0]]], byte_classes[b[1]]] ...]`. Every state but the
    last can reach an end. The last one is dead: forbidden bytes lead to it, none leads out, and it allows no token.

    Attributes:
        byte_classes: the class of each byte, uint8 `[256]`.
        next_states: the state after a byte of a class, int16 `[states, classes]`.
        masks: the distinct masks of allowed tokens, uint32 `[masks, ceil(vocab / 32)]`; bit `t % 32` of word `t // 32`
            is token t. End tokens are allowed where the answer may end.
        mask_of_state: the index of each state's mask, int16 `[states]`.
        is_end: whether the answer may end in a state, bool `[states]`.
        vocabulary: the fingerprint of the `Vocabulary` that `masks` refer to.
    """

    byte_classes: np.ndarray
    next_states: np.ndarray
    masks: np.ndarray
    mask_of_state: np.ndarray
    is_end: np.ndarray
    vocabulary: str

    @property
    def num_states(self) -> int:
        """States with the dead one."""
        return len(self.next_states)

    @property
    def dead_state(self) -> int:
        return self.num_states - 1

    @property
    def nbytes(self) -> int:
        arrays = self.byte_classes, self.next_states, self.masks, self.mask_of_state, self.is_end
        return sum(array.nbytes for array in arrays)

    def walk(self, data: bytes, state: int = 0) -> int:
        """The state after some bytes.

        Example:
            >>> from jaxpaged.grammar import Vocabulary, compile_regex
            >>> vocabulary = Vocabulary([b"a", b"b", b"ab", None], end_token_ids=[3])
            >>> grammar = compile_regex("(ab)+", vocabulary)
            >>> grammar.walk(b"abab") == grammar.dead_state, grammar.walk(b"abb") == grammar.dead_state
            (False, True)
        """
        for byte in data:
            state = int(self.next_states[state, self.byte_classes[byte]])
        return state

    def allowed_tokens(self, state: int) -> np.ndarray:
        """The ids of the tokens that a state allows.

        Example:
            >>> from jaxpaged.grammar import Vocabulary, compile_regex
            >>> vocabulary = Vocabulary([b"a", b"b", b"ab", None], end_token_ids=[3])
            >>> grammar = compile_regex("(ab)+", vocabulary)
            >>> grammar.allowed_tokens(0).tolist(), grammar.allowed_tokens(grammar.walk(b"ab")).tolist()
            ([0, 2], [0, 2, 3])
        """
        return np.flatnonzero(np.unpackbits(self.masks[self.mask_of_state[state]].view(np.uint8), bitorder="little"))

    def __repr__(self) -> str:
        classes = self.next_states.shape[1]
        return f"Grammar(states={self.num_states}, classes={classes}, masks={len(self.masks)}, bytes={self.nbytes})"
