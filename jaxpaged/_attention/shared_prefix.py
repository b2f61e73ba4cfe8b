"""Blocks that several sequences begin with: attended to once for all of them.

One call takes the queries of a group of sequences, on a sequence of the shared blocks, which every query sees as a
whole. A second call takes what each sequence has after them. The lses are the weights of the two results.

The tables, on the device, say whether a sequence begins with the blocks of its group. If it does not, all of its blocks
are in the second call.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged._attention.call import Call
from jaxpaged._attention.runs import owners
from jaxpaged._integers import as_int32
from jaxpaged._one_program import one_program


def split(call: Call, shared_prefix: ArrayLike) -> tuple[Call, Call, jax.Array] | None:
    """The call on the shared blocks, with one sequence for each group; the call on the other blocks; and which query
    tokens take part in the first, bool of q's shape without heads and head_dim. None: nothing is shared.

    Raises `ValueError` for a wrong `shared_prefix`.
    """
    num_tokens, most = _checked(shared_prefix, seqs=call.lengths.shape[0])
    # A window and ALiBi count from each query's own position.
    by_position = call.options.sliding_window is not None or call.options.alibi_slopes is not None
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

    skipped = jnp.where(shares, num_blocks, 0).reshape(-1)  # blocks of each sequence
    kept = jnp.minimum(entries + skipped[:, None], max_blocks - 1)
    rest = dataclasses.replace(
        call,
        block_tables=jnp.take_along_axis(call.block_tables, kept, axis=1),
        lengths=call.lengths - skipped * block_size,
    )
    by_token = _by_token(call, shares.reshape(-1))
    q = jnp.where(by_token[..., None, None], call.q, jnp.zeros_like(call.q))  # padding may hold NaN
    starts = call.query_starts
    shared = dataclasses.replace(
        call,
        q=q.reshape(groups, -1, *q.shape[2:]) if starts is None else q,
        query_starts=None if starts is None else starts[::size],
        block_tables=tables if most is None else tables[:, : most // block_size],
        lengths=jnp.where(shares.any(axis=1), num_blocks[:, 0] * block_size, 0),
        options=dataclasses.replace(call.options, sinks=None),  # they count once, in the other call
        tree_mask=None,
        causal=False,
    )
    return shared, rest, by_token


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
