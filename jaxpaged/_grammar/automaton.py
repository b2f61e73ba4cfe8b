"""The deterministic byte automaton of a syntax tree."""

import itertools
from collections.abc import Iterable, Iterator, Set

import numpy as np

from jaxpaged._grammar.characters import ByteRange, Ranges, utf8_sequences
from jaxpaged._grammar.nodes import Automaton, Bytes, Characters, Choice, Free, Node, Repeat, Separated, Sequence
from jaxpaged._grammar.records import Grammar

NFA_STATES_PER_STATE = 64
MAX_STEPS = 4_000_000  # some seconds


class TooManyStatesError(ValueError):
    """A grammar needs more states than allowed."""

    def __init__(self, max_states: int, part: str = ""):
        super().__init__(
            f"The grammar needs more than max_states={max_states} states{part}. Lower its bounds (such as {{m,n}}, "
            "maxLength, maxItems or max_depth), or raise max_states."
        )


class TooComplexError(ValueError):
    """A grammar needs too long to compile."""

    def __init__(self) -> None:
        super().__init__(
            "The grammar can read the same text in too many ways, as (a?){2000} can. Write it without optional parts "
            "that begin alike, or lower its bounds."
        )


class ByteNFA:
    """A nondeterministic byte automaton that starts in state 0.

    Attributes:
        edges: for each state, byte ranges and the state after one of their bytes.
        jumps: for each state, the states that it may change to without a byte.
        end: the state in which the text may end.
    """

    def __init__(self, node: Node, max_states: int):
        self.edges: list[list[tuple[int, int, int]]] = []
        self.jumps: list[list[int]] = []
        self._max_states = max_states
        self.end = self._add(node, self._new())

    # `_add` methods build a node from a state and return the state after it. They add no edge into the first one, so
    # several nodes may begin in the same state.

    def _add(self, node: Node, start: int) -> int:
        match node:
            case Characters(ranges):
                return self._add_characters(ranges, start)
            case Sequence(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case Choice(options):
                return self._join(self._add(option, start) for option in options)
            case Repeat():
                return self._add_repeat(node, start)
            case Separated():
                return self._add_separated(node, start)
            case Bytes(ranges):
                for low, high in ranges:
                    after = self._new()
                    self.edges[start].append((low, high, after))
                    start = after
                return start
            case Automaton(grammar):
                return self._add_automaton(grammar, start)
            case Free():
                return self._add_free(node, start)

    def _new(self) -> int:
        if len(self.edges) == NFA_STATES_PER_STATE * self._max_states:
            raise TooManyStatesError(self._max_states)
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1

    def _join(self, states: Iterable[int]) -> int:
        """A state after each of the states."""
        states = list(states)
        joined = self._new()
        for state in states:
            self.jumps[state].append(joined)
        return joined

    def _add_characters(self, ranges: Ranges, start: int) -> int:
        end = self._new()
        before: dict[tuple[ByteRange, ...], int] = {(): end}  # the state before some last bytes
        for sequence in utf8_sequences(ranges):
            for i in reversed(range(1, len(sequence))):
                if sequence[i:] not in before:
                    before[sequence[i:]] = self._new()
                    self.edges[before[sequence[i:]]].append((*sequence[i], before[sequence[i + 1 :]]))
            self.edges[start].append((*sequence[0], before[sequence[1:]]))
        return end

    def _add_repeat(self, node: Repeat, start: int) -> int:
        ends = [start] if node.least == 0 else []
        copies = max(node.least, 1) if node.most is None else node.most
        for i in range(copies):
            before = self._add(node.separator, start) if i else start
            hub = self._join([before])
            start = self._add(node.part, hub)
            if i + 1 >= node.least:
                ends.append(start)
        if node.most is None:  # the last copy again
            self.jumps[self._add(node.separator, start)].append(hub)
        return self._join(ends)

    def _add_separated(self, node: Separated, start: int) -> int:
        before_first: int | None = start  # None: an item came for sure
        after_one: int | None = None  # None: no item can have come
        for item, is_required in node.items:
            before = [] if before_first is None else [before_first]
            skip = []
            if after_one is not None:
                skip = [] if is_required else [after_one]
                before.append(self._add(node.separator, after_one))
            after_one = self._join([self._add(item, self._join(before)), *skip])
            if is_required:
                before_first = None
        return self._join(state for state in (before_first, after_one) if state is not None)

    def _add_automaton(self, grammar: Grammar, start: int) -> int:
        states = [self._new() for _ in range(grammar.dead_state)]
        self.jumps[start].append(states[0])
        for state, row in zip(states, grammar.next_states[:-1, grammar.byte_classes], strict=True):
            self.edges[state] += _edges(np.where(row == grammar.dead_state, -1, row), states)
        return self._join(state for state, is_end in zip(states, grammar.is_end[:-1], strict=True) if is_end)

    def _add_free(self, node: Free, start: int) -> int:
        """Builds the automaton that looks for all marks at once, and leaves it where one is complete."""
        scanner = ByteNFA(Repeat(node.symbol, 0, None), self._max_states)
        mark_ends = [scanner._add(each.mark, scanner.end) for each in node.marked]
        table, sets = _subsets(scanner, {scanner.end, *mark_ends}, self._max_states)
        if not sets[0].isdisjoint(mark_ends):
            raise ValueError("A mark of free text must not be empty.")
        states = [self._new() for _ in sets]
        after_marks = [self._new() for _ in node.marked]
        self.jumps[start].append(states[0])
        ends = []
        for state, row, reached in zip(states, table, sets, strict=True):
            complete = [after for after, end in zip(after_marks, mark_ends, strict=True) if end in reached]
            if complete:
                self.jumps[state] += complete
                continue
            self.edges[state] += _edges(row, states)
            if node.may_end and scanner.end in reached:  # not inside a symbol
                ends.append(state)
        for each, after in zip(node.marked, after_marks, strict=True):
            after = self._add(each.then, after)
            if each.is_last:
                ends.append(after)
            else:
                self.jumps[after].append(states[0])
        return self._join(ends)


def _edges(row: np.ndarray, states: list[int]) -> Iterator[tuple[int, int, int]]:
    """The edges of a row of next states `[256]`, with -1 for none."""
    cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), 256]
    return ((low, end - 1, states[row[low]]) for low, end in itertools.pairwise(cuts) if row[low] >= 0)


def determinise(nfa: ByteNFA, max_states: int) -> tuple[np.ndarray, np.ndarray]:
    """The deterministic automaton: an end can be reached from each of its states.

    Args:
        nfa: the nondeterministic automaton.
        max_states: the most states before minimisation.

    Returns:
        The next states, int32 `[states, 256]` with -1 for none, and whether the text may end, bool `[states]`. No
        states: the language is empty.
    """
    table, sets = _subsets(nfa, {nfa.end}, max_states)
    return table, np.array([nfa.end in states for states in sets], bool)


def _subsets(nfa: ByteNFA, ends: Set[int], max_states: int) -> tuple[np.ndarray, list[frozenset[int]]]:
    """The next states of the deterministic automaton, and the set of states that each combines."""
    closures = _closures(nfa, ends)
    if not closures[0]:
        return np.empty((0, 256), np.int32), []
    numbers = {closures[0]: 0}
    sets = [closures[0]]
    rows: list[list[tuple[int, int, int]]] = []
    num_steps = 0
    for states in sets:  # grows
        row = []
        edges = [edge for state in states for edge in nfa.edges[state] if closures[edge[2]]]
        num_steps += len(edges)
        if num_steps > MAX_STEPS:
            raise TooComplexError
        for low, high, targets in _moves(edges):
            after = (
                closures[targets[0]] if len(targets) == 1 else frozenset().union(*map(closures.__getitem__, targets))
            )
            if (number := numbers.get(after)) is None:
                number = numbers[after] = len(sets)
                sets.append(after)
                if number == max_states:
                    raise TooManyStatesError(max_states)
            row.append((low, high, number))
        rows.append(row)
    table = np.full((len(sets), 256), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        for low, high, number in row:
            line[low : high + 1] = number
    return table, sets


def _moves(edges: list[tuple[int, int, int]]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Splits edges into disjoint byte ranges with all the states after each."""
    cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
    index = {cut: i for i, cut in enumerate(cuts)}
    targets: list[list[int]] = [[] for _ in cuts]
    for low, high, target in edges:
        for i in range(index[low], index[high + 1]):
            targets[i].append(target)
    return [
        (low, end - 1, tuple(after))
        for (low, end), after in zip(itertools.pairwise(cuts), targets, strict=False)
        if after
    ]


def _closures(nfa: ByteNFA, ends: Set[int]) -> list[frozenset[int]]:
    """For each state, the states that it may change to without a byte.

    Only those that have edges or are an end, and from which an end can be reached.
    """
    before: list[list[int]] = [[] for _ in nfa.edges]
    for state, (edges, jumps) in enumerate(zip(nfa.edges, nfa.jumps, strict=True)):
        for target in {*jumps, *(target for _, _, target in edges)}:
            before[target].append(state)
    live = _reach(before, ends)
    keep = {state for state in live if nfa.edges[state] or state in ends}
    closures, num_steps = [], 0
    for state in range(len(nfa.jumps)):
        reached = _reach(nfa.jumps, {state}) if state in live else set()
        num_steps += len(reached)
        if num_steps > MAX_STEPS:
            raise TooComplexError
        closures.append(frozenset(reached & keep))
    return closures


def _reach(targets: list[list[int]], starts: Set[int]) -> set[int]:
    reached, todo = set(starts), list(starts)
    while todo:
        for target in targets[todo.pop()]:
            if target not in reached:
                reached.add(target)
                todo.append(target)
    return reached
