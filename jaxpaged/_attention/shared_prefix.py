"""Blocks that several sequences begin with: attended to once for all of them.

One call takes the queries of a group of sequences, on a sequence of the shared blocks, which every query sees as a
whole. A second call takes what each sequence has after them. The lses are the weights of the two results.

The tables, on the device, say whether a sequence begins with the blocks of its group. If it does not, all of its blocks
are in the second call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged._attention import packed
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.merge import merge_attention
from jaxpaged._integers import as_int32


def attend_with_prefix[A: (AttentionArguments, PackedArguments)](
    attend: Callable[[A], tuple[jax.Array, jax.Array]], a: A, shared_prefix: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """`attend(a)`, but blocks that sequences share are read once. Raises `ValueError` for a wrong `shared_prefix`."""
    if shared_prefix is None:
        return attend(a)
    num_tokens, most = _checked(shared_prefix, seqs=a.lengths.shape[0])
    # A window and ALiBi count from each query's own position.
    by_position = a.options.sliding_window is not None or a.options.alibi_slopes is not None
    if by_position or (most is not None and most < a.block_size):
        return attend(a)
    shared, rest, shares = split(a, num_tokens, most)
    out, lse = attend(shared)
    lse = jnp.where(shares[..., None], lse.reshape(a.q.shape[:-1]), -jnp.inf)
    return merge_attention(out.reshape(a.q.shape), lse, *attend(rest))


def split[A: (AttentionArguments, PackedArguments)](
    a: A, num_tokens: jax.Array, most: int | None = None
) -> tuple[A, A, jax.Array]:
    """The call on the shared blocks, with one sequence for each group; the call on the other blocks; and which query
    tokens take part in the first, bool of q's shape without heads and head_dim."""
    max_blocks, block_size = a.block_tables.shape[1], a.block_size
    groups = num_tokens.shape[0]
    size = a.lengths.shape[0] // groups
    num_blocks = jnp.clip(num_tokens // block_size, 0, max_blocks)[:, None]  # [groups, 1]

    # A sequence shares the first blocks of the longest of its group, unless it has other blocks or new tokens there.
    longest = jnp.argmax(a.lengths.reshape(groups, size), axis=1).astype(jnp.int32)
    tables = a.block_tables[longest + jnp.arange(groups, dtype=jnp.int32) * size]  # [groups, max_blocks]
    entries = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    same = a.block_tables.reshape(groups, size, max_blocks) == tables[:, None]
    same = (same | (entries >= num_blocks)[:, None]).all(axis=-1)
    history = (a.lengths - _num_new(a)).reshape(groups, size)
    shares = same & (num_blocks > 0) & (history >= num_blocks * block_size)  # [groups, size]

    skipped = jnp.where(shares, num_blocks, 0).reshape(-1)  # blocks of each sequence
    places = jnp.minimum(entries + skipped[:, None], max_blocks - 1)
    rest = dataclasses.replace(
        a,
        block_tables=jnp.take_along_axis(a.block_tables, places, axis=1),
        lengths=a.lengths - skipped * block_size,
    )
    of_shared: dict[str, Any] = dict(
        block_tables=tables if most is None else tables[:, : most // block_size],
        lengths=jnp.where(shares.any(axis=1), num_blocks[:, 0] * block_size, 0),
        options=dataclasses.replace(a.options, sinks=None),  # they count once, in the other call
        causal=False,
    )
    shares = shares.reshape(-1)
    if isinstance(a, PackedArguments):
        owners = packed.owners(packed.clipped_starts(a), tokens=a.q.shape[0])
        shares = jnp.append(shares, False)[owners]
        of_shared |= dict(q=_only(shares, a.q), query_starts=a.query_starts[::size], tree_mask=None)
        return dataclasses.replace(a, **of_shared), rest, shares
    if a.tree is not None:
        tree = dataclasses.replace(a.tree, starts=a.tree.starts - skipped * block_size)
        rest = dataclasses.replace(rest, tree=tree)
    shares = jnp.broadcast_to(shares[:, None], a.q.shape[:2])
    of_shared |= dict(q=_only(shares, a.q).reshape(groups, -1, *a.q.shape[2:]), tree=None)
    return dataclasses.replace(a, **of_shared), rest, shares


def _checked(value: ArrayLike, *, seqs: int) -> tuple[jax.Array, int | None]:
    """Tokens that the sequences of each group share, int32 [groups], and the largest number, if it is known."""
    num_tokens = as_int32(value)
    if num_tokens.dtype != jnp.int32 or num_tokens.ndim > 1 or num_tokens.size == 0 or seqs % num_tokens.size:
        raise ValueError(
            f"shared_prefix must be an int or int32 [] or [groups], of which seqs={seqs} is a multiple; "
            f"got {num_tokens.dtype} {list(num_tokens.shape)}."
        )
    return num_tokens.reshape(-1), None if isinstance(value, jax.Array) else int(np.max(value))


def _num_new(a: AttentionArguments | PackedArguments) -> jax.Array | int:
    """Query tokens of each sequence."""
    return jnp.diff(packed.clipped_starts(a)) if isinstance(a, PackedArguments) else a.q.shape[1]


def _only(shares: jax.Array, q: jax.Array) -> jax.Array:
    """Zeros in the rows that do not take part, which may be padding and hold NaN."""
    return jnp.where(shares[..., None, None], q, jnp.zeros_like(q))
