"""Blocks that several sequences begin with: attended to once for all of them.

One call takes the queries of a group of sequences, on a sequence of the shared blocks, which every query sees as a
whole. A second call takes what each sequence has after them. The lses are the weights of the two results.

The tables, on the device, say whether a sequence begins with the blocks of its group. If it does not, all of its blocks
are in the second call. An engine, which knows who shares, passes `PrefixGroups`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged._attention.call import Call
from jaxpaged._attention.runs import owners
from jaxpaged._integers import as_int32
from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """Which sequences begin with the same full blocks, none of which holds a new token. They stand together in q.

    The query tokens `starts[g] : starts[g + 1]` are those of group g, if it has any. Those past the last share nothing.

    Attributes:
        starts: int32 `[groups + 1]`, not descending, from 0 on.
        first: int32 `[groups]`, a sequence of each group.
        num_blocks: int32 `[seqs]`, the blocks that a sequence shares with all of its group; 0 without a group.
    """

    starts: jax.Array
    first: jax.Array
    num_blocks: jax.Array


def split(call: Call, shared_prefix: ArrayLike | PrefixGroups) -> tuple[Call, Call, jax.Array] | None:
    """The call on the shared blocks, with one sequence for each group; the call on the other blocks; and which query
    tokens take part in the first, bool of q's shape without heads and head_dim. None: nothing is shared.

    Raises `ValueError` for a wrong `shared_prefix`.
    """
    # A window and ALiBi count from each query's own position.
    by_position = call.options.sliding_window is not None or call.options.alibi_slopes is not None
    if isinstance(shared_prefix, PrefixGroups):
        return None if by_position else _split_groups(call, shared_prefix)
    num_tokens, most = _checked(shared_prefix, seqs=call.lengths.shape[0])
    if by_position or (most is not None and most < call.block_size):
        return None
    return _split(call, num_tokens, most)


@one_program("most")
def _split(call: Call, num_tokens: jax.Array, most: int | None) -> tuple[Call, Call, jax.Array]:
    max_blocks, block_size = call.block_tables.shape[1], call.block_size
    groups = num_tokens.shape[0]
    size = call.lengths.shape[0] // groups
    num_blocks = jnp.clip(num_tokens // block_size, 0, max_blocks)[:, None]  # [groups, 1]

    # A sequence shares the first blocks of the longest of its group, unless it has other blocks or new tokens there.
    longest = jnp.argmax(call.lengths.reshape(groups, size), axis=1).astype(jnp.int32)
    tables = call.block_tables[longest + jnp.arange(groups, dtype=jnp.int32) * size]  # [groups, max_blocks]
    entries = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    same = call.block_tables.reshape(groups, size, max_blocks) == tables[:, None]
    same = (same | (entries >= num_blocks)[:, None]).all(axis=-1)
    history = (call.lengths - call.num_new()).reshape(groups, size)
    shares = same & (num_blocks > 0) & (history >= num_blocks * block_size)  # [groups, size]

    rest = _without(call, jnp.where(shares, num_blocks, 0).reshape(-1))
    by_token = _by_token(call, shares.reshape(-1))
    q = jnp.where(by_token[..., None, None], call.q, jnp.zeros_like(call.q))  # padding may hold NaN
    starts = call.query_starts
    shared = _whole(
        call,
        q=q.reshape(groups, -1, *q.shape[2:]) if starts is None else q,
        query_starts=None if starts is None else starts[::size],
        block_tables=tables if most is None else tables[:, : most // block_size],
        lengths=jnp.where(shares.any(axis=1), num_blocks[:, 0] * block_size, 0),
    )
    return shared, rest, by_token


def _split_groups(call: Call, groups: PrefixGroups) -> tuple[Call, Call, jax.Array]:
    q = call.q.reshape(-1, *call.q.shape[-2:])
    num_blocks = jnp.where(groups.starts[:-1] < groups.starts[1:], groups.num_blocks[groups.first], 0)
    shared = _whole(
        call,
        q=q,
        query_starts=groups.starts,
        block_tables=call.block_tables[groups.first],
        lengths=num_blocks * call.block_size,
    )
    takes_part = jnp.arange(q.shape[0], dtype=jnp.int32) < groups.starts[-1]
    return shared, _without(call, groups.num_blocks), takes_part.reshape(call.q.shape[:-2])


def _whole(call: Call, **arrays: Any) -> Call:
    """The call on shared blocks, which every query sees as a whole."""
    options = dataclasses.replace(call.options, sinks=None)  # they count once, in the other call
    return dataclasses.replace(call, **arrays, options=options, tree_mask=None, causal=False)


def _without(call: Call, num_blocks: jax.Array) -> Call:
    """The call without the first blocks of each sequence, int32 [seqs]."""
    max_blocks = call.block_tables.shape[1]
    kept = jnp.arange(max_blocks, dtype=jnp.int32)[None] + num_blocks[:, None]
    tables = jnp.take_along_axis(call.block_tables, jnp.minimum(kept, max_blocks - 1), axis=1)
    return dataclasses.replace(call, block_tables=tables, lengths=call.lengths - num_blocks * call.block_size)


def _by_token(call: Call, shares: jax.Array) -> jax.Array:
    """For each query token whether its sequence shares: bool [seqs] to q's shape without heads and head_dim."""
    if call.query_starts is None:
        return jnp.broadcast_to(shares[:, None], call.q.shape[:2])
    return jnp.append(shares, False)[owners(call.seq_starts(), tokens=call.q.shape[0])]


def _checked(value: ArrayLike, *, seqs: int) -> tuple[jax.Array, int | None]:
    """Tokens that the sequences of each group share, int32 [groups], and the largest number, if it is known."""
    num_tokens = as_int32(value)
    if num_tokens.dtype != jnp.int32 or num_tokens.ndim > 1 or num_tokens.size == 0 or seqs % num_tokens.size:
        raise ValueError(
            f"shared_prefix must be an int or int32 [] or [groups], of which seqs={seqs} is a multiple; "
            f"got {num_tokens.dtype} {list(num_tokens.shape)}."
        )
    return num_tokens.reshape(-1), None if isinstance(value, jax.Array) else int(np.max(value))
