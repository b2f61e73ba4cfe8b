"""The `aux` of prompt tokens, put together on the host from the rows of each step.

Prompt tokens that were found in the prefix cache were computed for another request. Their `aux` comes from a pool on
the host that is addressed by slot and written in the order of the steps, like the keys and values on the device.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxpaged._engine.host_tier.copies import Run
from jaxpaged._engine.host_tier.tier import Moves
from jaxpaged._engine.requests import CompletionState
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.prompt_aux import RowsAux
from jaxpaged._slice.pytrees import at
from jaxpaged._slice.state import Report


class PromptAux:
    """Enters the `aux` of prompt tokens into `CompletionState.prompt_aux`, slice by slice.

    Args:
        aux: shapes and dtypes of a token's `aux`.
        options: the options of the engine.
    """

    def __init__(self, aux: Any, options: ResolvedOptions):
        self._aux, self._block_size = aux, options.block_size
        self._pool = None  # each leaf [blocks, block_size, ...]
        if options.prefix_cache:
            self._pool = zeros(aux, options.num_blocks, options.block_size)

    def take(self, report: Report, moves: Moves, on_device: Mapping[int, CompletionState]) -> None:
        """Enters a slice. `moves`: blocks that moved before it. `on_device`: the rows on the device in it, by place."""
        rows, found = report.rows_aux, report.found_blocks
        assert rows is not None
        self._move(moves)
        ends = np.zeros(len(report.outbox.finished), np.int32)  # one per place: prompt tokens with `aux`
        for place, row in on_device.items():
            if row.given is None:
                ends[place] = len(row.prompt) - 1
                if row.prompt_aux is None:
                    row.prompt_aux = zeros(self._aux, ends[place])
        begin, end = 0, int(report.outbox.num_steps)
        if found is not None:
            # A request's blocks are read when it begins: they may belong to others before the slice ends.
            has_found = (found.num_blocks > 0) & (ends > 0)
            for num_steps in np.unique(found.num_steps[has_found]).tolist():
                self._write(rows, begin, begin := num_steps, ends, on_device)
                for place in np.flatnonzero(has_found & (found.num_steps == num_steps)).tolist():
                    ids = np.asarray(found.ids[place, : found.num_blocks[place]])
                    self._find(on_device[place], ids, ends[place])
        self._write(rows, begin, end, ends, on_device)

    def _write(
        self, rows: RowsAux, begin: int, end: int, ends: np.ndarray, on_device: Mapping[int, CompletionState]
    ) -> None:
        """Enters the rows of some steps. If a token was computed twice, the last row counts."""
        rows = jax.tree.map(lambda x: x[begin:end].reshape(-1, *x.shape[2:]), rows)
        rows = at(np.flatnonzero(rows.request_ids < len(ends)), rows)
        if self._pool is not None:
            assert rows.slots is not None
            blocks, offsets = np.divmod(rows.slots, self._block_size)
            put(self._pool, (blocks, offsets), rows.aux)
        rows = at(np.flatnonzero(rows.positions < ends[rows.request_ids]), rows)
        for place, of_place in by_place(rows):
            put(on_device[place].prompt_aux, of_place.positions, of_place.aux)

    def _find(self, row: CompletionState, ids: np.ndarray, end: int) -> None:
        """Enters the `aux` of cached blocks."""
        num_found = min(len(ids) * self._block_size, end)
        found = jax.tree.map(lambda x: x[ids].reshape(-1, *x.shape[2:])[:num_found], self._pool)
        put(row.prompt_aux, slice(num_found), found)

    def _move(self, moves: Moves) -> None:
        """Copies the `aux` of blocks that move to the host tier or back."""
        for run in moves.out:
            run.aux = at(moved_ids(run), self._pool)
        for run in moves.back:
            ids = moved_ids(run)
            is_there = ids > 0
            put(self._pool, ids[is_there], at(is_there, run.aux))


def zeros(like: Any, *sizes: int) -> Any:
    """NumPy arrays `[*sizes, ...]`. `like`: shapes and dtypes of one element."""
    return jax.tree.map(lambda x: np.zeros((*sizes, *x.shape), x.dtype), like)


def put(old: Any, where: Any, new: Any) -> None:
    """Writes to the arrays of `old`. Of equal indices the last one counts."""
    for to, values in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        to[where] = values


def by_place(rows: RowsAux) -> Iterator[tuple[int, RowsAux]]:
    """The rows of each request, in the order of the steps."""
    rows = at(np.argsort(rows.request_ids, kind="stable"), rows)
    starts = np.flatnonzero(np.diff(rows.request_ids, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*starts, len(rows.request_ids)]):
        yield int(rows.request_ids[begin]), at(slice(begin, end), rows)


def moved_ids(run: Run) -> np.ndarray:
    """Where the device has the moved blocks, int32 `[blocks]`; 0: nowhere."""
    if run.where is None:  # the move failed
        return np.zeros(len(run.moved), np.int32)
    return np.asarray(run.where)[0, run.index, run.begin : len(run.keys)]
