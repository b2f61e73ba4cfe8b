"""The minimal automaton of a language, by Hopcroft's algorithm."""

from collections import defaultdict

import numpy as np


def minimise(table: np.ndarray, is_end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins states from which the same texts lead to an end.

    Args:
        table: the next states, int32 `[states, 256]` with -1 for none; the first is the start. An end can be reached
            from each state.
        is_end: whether the text may end, bool `[states]`.

    Returns:
        The same for the smallest automaton, whose states are numbered in breadth-first order from the start.
    """
    block_of = _blocks(table, is_end)
    representative = np.unique(block_of, return_index=True)[1]
    after = table[representative]
    joined = np.where(after < 0, -1, block_of[after])
    order = _breadth_first(joined, int(block_of[0]))
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order))
    joined = joined[order]
    return np.where(joined < 0, -1, number[joined]).astype(np.int32), is_end[representative][order]


def byte_classes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each byte, uint8 `[256]`, and the next states by class: bytes of one class are never told apart."""
    columns = np.ascontiguousarray(table.T)
    _, first, classes = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return classes.reshape(-1).astype(np.uint8), np.ascontiguousarray(columns[first].T)


def _blocks(table: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """The block of each state: states of one block accept the same texts."""
    by_class = byte_classes(table)[1]
    before: list[defaultdict[int, list[int]]] = []  # for each class, the states before a state
    for column in by_class.T:
        before.append(defaultdict(list))
        for state in np.flatnonzero(column >= 0).tolist():
            before[-1][int(column[state])].append(state)
    blocks = [set(np.flatnonzero(states).tolist()) for states in (is_end, ~is_end) if states.any()]
    block_of = {state: i for i, states in enumerate(blocks) for state in states}
    # The automaton has no dead state, so both halves split others at first: each byte may also lead nowhere.
    todo = set(range(len(blocks)))
    while todo:
        splitter = list(blocks[todo.pop()])
        for sources in before:
            touched: defaultdict[int, set[int]] = defaultdict(set)
            for target in splitter:
                for state in sources.get(target, ()):
                    touched[block_of[state]].add(state)
            for i, states in touched.items():
                if len(states) == len(blocks[i]):
                    continue
                rest = blocks[i] - states
                small, blocks[i] = sorted((states, rest), key=len)
                for state in small:
                    block_of[state] = len(blocks)
                todo.add(len(blocks))  # the smaller half suffices: if i is still to do, both are
                blocks.append(small)
    return np.array([block_of[state] for state in range(len(table))])


def _breadth_first(table: np.ndarray, start: int) -> np.ndarray:
    order, seen = [start], {start}
    for state in order:  # grows
        for target in table[state].tolist():
            if target >= 0 and target not in seen:
                seen.add(target)
                order.append(target)
    return np.array(order)
