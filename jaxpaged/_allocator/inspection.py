"""Host-side inspection of an allocator: its violated invariants, and its text form."""

import jax
import numpy as np

from jaxpaged._allocator.state import AllocatorState

SHOWN_SEQS = 16  # rows of a printed allocator


def broken_invariants(allocator: AllocatorState) -> tuple[str, ...]:
    """Names of the violated invariants. If one of the first group fails, the others are not tested."""
    allocator = jax.tree.map(np.asarray, allocator)
    pool, num_blocks, block_size = allocator.pool, allocator.num_blocks, allocator.block_size
    tables, lengths = allocator.rows, np.tile(allocator.lengths, allocator.num_groups)
    passed = np.zeros_like(lengths) if allocator.num_passed is None else np.ravel(allocator.num_passed)
    is_passed = np.arange(tables.shape[1])[None] < passed[:, None]
    num_free, num_waiting, bottom = int(pool.num_free), int(pool.num_waiting), int(pool.bottom)
    first = {
        "lengths_fit_their_rows": ((lengths >= 0) & (lengths <= tables.shape[1] * block_size)).all(),
        "table_entries_are_blocks": ((tables >= 0) & (tables < num_blocks)).all(),
        "windows_have_not_passed_what_they_show": _are_in_view(allocator, lengths, passed),
        "free_count_is_within_the_pool": 0 <= num_free < num_blocks,
        "waiting_are_among_the_free": 0 <= num_waiting <= num_free,
        "bottom_is_within_the_ring": 0 <= bottom < num_blocks,
        "free_list_holds_blocks": ((pool.free_list >= 0) & (pool.free_list < num_blocks)).all(),
    }
    if not all(first.values()):
        return broken_names(first)

    num_held = -(-lengths // block_size)
    is_entry = (np.arange(tables.shape[1])[None] < num_held[:, None]) & ~is_passed
    indices = (bottom + np.arange(num_free)) % num_blocks
    free, extra, cached_at = pool.free_list[indices], pool.extra_holders, pool.cached_at
    named = np.bincount(tables[is_entry], minlength=num_blocks)
    is_free = np.bincount(free, minlength=num_blocks) > 0
    held = np.setdiff1d(np.arange(1, num_blocks), free)
    waiting_at = cached_at[free[:num_waiting]]  # -1: a block that `forget` unmarked
    has_partial = lengths % block_size > 0
    partial = tables[has_partial, num_held[has_partial] - 1]
    rows = [row[entries] for row, entries in zip(tables, is_entry, strict=True)]
    return broken_names(
        {
            "entries_beyond_a_sequence_are_null": (tables[~is_entry & ~is_passed] == 0).all(),
            "null_block_is_never_handed_out": named[0] == 0 and not is_free[0],
            "no_sequence_names_a_block_twice": all(len(set(row)) == len(row) for row in rows),
            "no_block_is_free_twice": len(set(free)) == len(free),
            "free_and_held_and_null_are_all": not (is_free & (named > 0)).any() and named[held].all(),
            "holders_are_the_entries": (1 + extra == named)[held].all(),
            "free_blocks_have_no_holders": not extra[is_free].any(),
            "a_partly_filled_block_has_one_sequence": len(set(partial)) == len(partial) and (named[partial] == 1).all(),
            "no_partly_filled_block_is_cached": (cached_at[partial] != num_blocks).all(),
            "free_blocks_are_not_cached_as_held": not (cached_at[is_free] == num_blocks).any(),
            "waiting_blocks_know_their_indices": ((waiting_at == indices[:num_waiting]) | (waiting_at == -1)).all(),
        }
    )


def _are_in_view(allocator: AllocatorState, lengths: np.ndarray, passed: np.ndarray) -> bool:
    """Whether every row still holds all tokens that its next query sees."""
    windows = np.repeat([w or 0 for w in allocator.windows], len(allocator.lengths))  # 0: all tokens
    first_seen = np.where(windows > 0, np.maximum(lengths - windows + 1, 0), 0)
    return bool(((passed >= 0) & (passed <= first_seen // allocator.block_size)).all())


def broken_names(invariants: dict[str, object]) -> tuple[str, ...]:
    return tuple(name for name, holds in invariants.items() if not holds)


def describe(allocator: AllocatorState) -> str:
    """One line for the pool, and one for each of the first SHOWN_SEQS sequences that hold tokens."""
    if np.ndim(allocator.lengths) != 1 or isinstance(allocator.lengths, jax.core.Tracer):
        return repr(allocator)  # batched by vmap, or traced: there are no values to show
    num_seqs, lengths = len(allocator.lengths), np.asarray(allocator.lengths)
    tables, is_entry = np.asarray(allocator.rows), np.asarray(allocator.is_entry(allocator.lengths))
    lines = [
        f"BlockAllocator: {int(allocator.num_held)} of {allocator.num_blocks - 1} blocks of {allocator.block_size} "
        f"tokens held ({int(allocator.num_shared)} shared), {int(allocator.num_free)} free "
        f"({int(allocator.num_waiting)} with a cached prefix)"
    ]
    for i in np.flatnonzero(lengths)[:SHOWN_SEQS]:
        texts = []
        for row in range(i, len(tables), num_seqs):
            ids = tables[row][is_entry[row]].tolist()
            texts.append(" ".join(map(str, ids if len(ids) <= 12 else [*ids[:6], "...", *ids[-5:]])))
        lines.append(f"  seq {i}: {lengths[i]} tokens in blocks {' | '.join(texts)}")
    num_held = int((lengths > 0).sum())
    if num_held > SHOWN_SEQS:
        lines.append(f"  and {num_held - SHOWN_SEQS} more sequences")
    return "\n".join(lines)
