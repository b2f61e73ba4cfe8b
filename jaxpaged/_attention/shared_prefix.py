"""Splits a call so that blocks that several sequences begin with are read once for all of them.

In the first call, the queries of a group of sequences all see the whole sequence of shared blocks. The second call
computes the rest of each sequence. The two results are merged with their lses as weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._integers import as_int32
from jaxpaged._one_program import one_program
from pallas_kernels.common.interface import Call


def split(call: Call, groups: PrefixGroups) -> tuple[Call, Call, jax.Array] | None:
    """Splits a call; returns None if the call cannot be split.

    Raises `ValueError` if the groups do not match the call's sequences.

    Returns:
        The call on the shared blocks, with one sequence per group; the call on the other blocks; and whether a query
        token is part of the first call, bool in q's shape without heads and head_dim.
    """
    groups = _checked(groups, seqs=call.lengths.shape[0])
    # Windows and ALiBi depend on each query's own position.
    if call.options.sliding_window is not None or call.options.alibi_slopes is not None:
        return None
    return _split(call, groups)


@one_program()
def _split(call: Call, groups: PrefixGroups) -> tuple[Call, Call, jax.Array]:
    num_blocks = jnp.clip(groups.num_blocks, 0, call.lengths // call.block_size)
    if call.query_starts is None:
        in_shared = jnp.broadcast_to((num_blocks > 0)[:, None], call.q.shape[:2])
        q = jnp.where(in_shared[..., None, None], call.q, jnp.zeros_like(call.q))  # q of an empty sequence may be NaN
        q = q.reshape(-1, *q.shape[2:])
    else:
        q = call.q
        token = jnp.arange(q.shape[0], dtype=jnp.int32)
        in_shared = (token >= groups.starts[0]) & (token < groups.starts[-1])
    shared_blocks = jnp.where(groups.starts[:-1] < groups.starts[1:], num_blocks[groups.first], 0)
    shared = _whole(
        call,
        q=q,
        query_starts=groups.starts,
        block_tables=call.block_tables[groups.first],
        lengths=shared_blocks * call.block_size,
    )
    return shared, _without(call, num_blocks), in_shared


def _whole(call: Call, **arrays: Any) -> Call:
    """The call on the shared blocks. Every query sees all of their tokens."""
    options = dataclasses.replace(call.options, sinks=None)  # sinks count once, in the other call
    return dataclasses.replace(call, **arrays, options=options, tree_mask=None, causal=False, plan=None)


def _without(call: Call, num_blocks: jax.Array) -> Call:
    """The call without the first blocks of each sequence, int32 [seqs]."""
    max_blocks = call.block_tables.shape[1]
    kept = jnp.arange(max_blocks, dtype=jnp.int32)[None] + num_blocks[:, None]
    tables = jnp.take_along_axis(call.block_tables, jnp.minimum(kept, max_blocks - 1), axis=1)
    return dataclasses.replace(call, block_tables=tables, lengths=call.lengths - num_blocks * call.block_size)


def _checked(groups: PrefixGroups, *, seqs: int) -> PrefixGroups:
    if not isinstance(groups, PrefixGroups):
        raise ValueError(
            "prefix_groups must be what allocator.prefix_groups() returns, after the append; "
            f"got {type(groups).__name__}."
        )
    groups = jax.tree.map(as_int32, groups)
    shapes = groups.starts.shape, groups.first.shape, groups.num_blocks.shape
    num_groups = groups.first.size
    if shapes != ((num_groups + 1,), (num_groups,), (seqs,)) or num_groups == 0:
        raise ValueError(
            f"prefix_groups must be starts [groups + 1], first [groups] and num_blocks [seqs] with {seqs=}; "
            f"got {[list(shape) for shape in shapes]}."
        )
    return groups
