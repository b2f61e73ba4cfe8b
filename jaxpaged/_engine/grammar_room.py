"""Room for grammars on the device: which grammar is where in the pool, and what is still to be copied there."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpaged._engine.requests import CompletionState
from jaxpaged._grammar.records import Grammar
from jaxpaged._slice.grammars import FREE, GrammarPool

STATES_AT_ONCE, MASKS_AT_ONCE = 256, 64  # rows of a part, 1.3 MB with a vocabulary of 128k


class Place(NamedTuple):
    """Where a grammar is in the pool: its first state and its first mask."""

    state: int
    mask: int


class Part(NamedTuple):
    """The arguments of `GrammarPool.with_part`, as NumPy arrays."""

    rows: GrammarPool
    states: np.ndarray
    masks: np.ndarray


class GrammarRoom:
    """Reserves room in the pool for the grammars of requests, in the order of the queue.

    A grammar stays in the pool after its last request until another one needs its room. If there is no room for the
    grammar of a request, later requests with grammars wait behind it. Its turn comes: the grammars in use belong to
    requests that were sent before it, and these end.

    Args:
        num_states: states of the pool, with FREE.
        num_masks: masks of the pool, with that of FREE.

    Attributes:
        is_full: whether a request waited for room when the last slice was sent.
    """

    def __init__(self, num_states: int, num_masks: int):
        self.num_states, self.num_masks = num_states, num_masks
        self._places: OrderedDict[Grammar, Place] = OrderedDict()  # the least recently used first
        self._arrived: set[Grammar] = set()  # a report has shown that they are on the device
        self._used: set[Grammar] = set()  # since `before_send`: by requests that were sent
        self.is_full = False

    @property
    def num_used_states(self) -> int:
        """States of the grammars in use when the last slice was sent."""
        return sum(map(num_rows, self._used))

    def before_send(self, sent: Iterable[CompletionState]) -> None:
        """Prepares for `holds`. `sent`: rows on the device or in flight to it."""
        self._used = grammars_of(sent)
        self.is_full = False

    def holds(self, row: CompletionState) -> bool:
        """Whether a row waits for room. If not, its grammar has a place. Called for rows in their order."""
        grammar = row.params.grammar
        if grammar is None:
            return False
        if self.is_full or (place := self._find(grammar)) is None:
            self.is_full = True
            return True
        self._places.move_to_end(grammar)
        self._used.add(grammar)
        row.grammar_state = place.state
        return False

    def parts_for(self, rows: Sequence[CompletionState]) -> list[Part]:
        """What must be copied to the device before these rows start."""
        return [
            part
            for grammar in grammars_of(rows) - self._arrived
            for part in parts_of(grammar, self._places[grammar], self.num_states, self.num_masks)
        ]

    def note_arrival(self, rows: Sequence[CompletionState]) -> None:
        """Records that the slice with these rows, and the copies before it, succeeded."""
        self._arrived |= grammars_of(rows) & self._places.keys()

    def _find(self, grammar: Grammar) -> Place | None:
        """The place of a grammar, if necessary instead of unused ones. None: there is no room."""
        if grammar in self._places:
            return self._places[grammar]
        unused = [other for other in self._places if other not in self._used]
        while (place := self._free_place(grammar)) is None and unused:
            evicted = unused.pop(0)
            del self._places[evicted]
            self._arrived.discard(evicted)
        if place is not None:
            self._places[grammar] = place
        return place

    def _free_place(self, grammar: Grammar) -> Place | None:
        states = {place.state: num_rows(other) for other, place in self._places.items()}
        masks = {place.mask: len(other.masks) for other, place in self._places.items()}
        state = first_gap(states, num_rows(grammar), self.num_states)
        mask = first_gap(masks, len(grammar.masks), self.num_masks)
        return None if state is None or mask is None else Place(state, mask)


def grammars_of(rows: Iterable[CompletionState]) -> set[Grammar]:
    return {row.params.grammar for row in rows if row.params.grammar is not None}


def num_rows(grammar: Grammar) -> int:
    """States in the pool: all but the dead one."""
    return grammar.num_states - 1


def first_gap(taken: dict[int, int], size: int, end: int) -> int | None:
    """The first `size` free rows below `end`. `taken`: sizes of the taken ranges by their starts. Row 0 is taken."""
    start = 1
    for begin in sorted(taken):
        if begin - start >= size:
            break
        start = begin + taken[begin]
    return start if end - start >= size else None


def parts_of(grammar: Grammar, place: Place, num_states: int, num_masks: int) -> Iterator[Part]:
    """The rows of a grammar, padded with rows that are dropped."""
    size = num_rows(grammar)
    next_states = grammar.next_states[:size, grammar.byte_classes].astype(np.int32)
    next_states = np.where(next_states == grammar.dead_state, FREE, next_states + place.state)
    mask_of_state = grammar.mask_of_state[:size].astype(np.int32) + place.mask
    for i in range(max(-(-size // STATES_AT_ONCE), -(-len(grammar.masks) // MASKS_AT_ONCE))):
        states = slice(i * STATES_AT_ONCE, (i + 1) * STATES_AT_ONCE)
        masks = slice(i * MASKS_AT_ONCE, (i + 1) * MASKS_AT_ONCE)
        yield Part(
            GrammarPool(
                next_states=padded(next_states[states], STATES_AT_ONCE),
                mask_of_state=padded(mask_of_state[states], STATES_AT_ONCE),
                is_end=padded(grammar.is_end[:size][states], STATES_AT_ONCE),
                masks=padded(grammar.masks[masks], MASKS_AT_ONCE),
            ),
            states=targets(place.state + states.start, len(next_states[states]), STATES_AT_ONCE, num_states),
            masks=targets(place.mask + masks.start, len(grammar.masks[masks]), MASKS_AT_ONCE, num_masks),
        )


def padded(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, [(0, size - len(array)), *[(0, 0)] * (array.ndim - 1)])


def targets(start: int, count: int, size: int, end: int) -> np.ndarray:
    """`start`, `start + 1`, ..., then distinct rows past the end, int32 `[size]`."""
    index = np.arange(size, dtype=np.int32)
    return np.where(index < count, start + index, end + index)


def compile_put(pool: GrammarPool, mesh: Mesh | None) -> Any:
    """`GrammarPool.with_part` for parts of this size, compiled; the pool is donated."""
    num_states, words = len(pool.next_states), pool.masks.shape[1]
    rows = GrammarPool(
        next_states=np.zeros((STATES_AT_ONCE, 256), np.int32),
        mask_of_state=np.zeros(STATES_AT_ONCE, np.int32),
        is_end=np.zeros(STATES_AT_ONCE, np.bool_),
        masks=np.zeros((MASKS_AT_ONCE, words), np.uint32),
    )
    nothing = Part(rows, targets(0, 0, STATES_AT_ONCE, num_states), targets(0, 0, MASKS_AT_ONCE, len(pool.masks)))
    put: Any = GrammarPool.with_part
    if mesh is not None:
        put = jax.shard_map(put, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(put, donate_argnums=0).lower(pool, *nothing).compile()
