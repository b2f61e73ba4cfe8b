"""Neighbouring sequences that begin with the same blocks, which attention then reads once for all of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """Sequences that begin with the same full blocks, all without new tokens.

    `BlockAllocator.prefix_groups` makes it for one step. The sequences of a group are neighbours. The query tokens
    `starts[g] : starts[g + 1]` belong to group g; tokens outside of all groups share nothing.

    Attributes:
        starts: int32 `[groups + 1]`, in query tokens, not descending.
        first: int32 `[groups]`, a sequence of each group.
        num_blocks: int32 `[seqs]`, the blocks that a sequence shares with all of its group; 0: none. A group whose
            first sequence has 0 shares nothing.
    """

    starts: jax.Array
    first: jax.Array
    num_blocks: jax.Array


@one_program()
def find(
    tables: jax.Array,  # int32 [seqs, max_blocks]
    num_full: jax.Array,  # int32 [seqs], the blocks of a sequence that are full and hold no new token
    is_empty: jax.Array,  # bool [seqs], a sequence without a token; it does not separate its neighbours
    token_starts: jax.Array,  # int32 [seqs + 1], the first query token of each sequence
) -> PrefixGroups:
    """The groups of a step. A sequence joins the group that saves it the most reads."""
    num_seqs, max_blocks = tables.shape
    seqs = jnp.arange(num_seqs, dtype=jnp.int32)

    # 1. The blocks that each sequence shares with the one before it. Sequences without tokens are skipped.
    before = jnp.pad(lax.cummax(jnp.where(is_empty, -1, seqs))[:-1], (1, 0), constant_values=-1)
    is_first, before = before < 0, jnp.maximum(before, 0)
    most = jnp.where(is_empty | is_first, 0, jnp.minimum(num_full, num_full[before]))
    differs = (tables != tables[before]) | (jnp.arange(max_blocks, dtype=jnp.int32)[None] >= most[:, None])
    shared = jnp.where(differs.any(axis=1), jnp.argmax(differs, axis=1).astype(jnp.int32), max_blocks)

    # 2. For every number of blocks in `shared`: the run of neighbours around each sequence that share them. Of n
    # blocks that m sequences share, each skips reading n - n / m.
    begins = ~is_empty[:, None] & (shared[:, None] < shared[None])  # [seqs, levels]
    first = lax.cummax(jnp.where(begins, seqs[:, None], 0), axis=0)
    end = lax.cummin(jnp.where(begins, seqs[:, None], num_seqs), axis=0, reverse=True)
    end = jnp.pad(end[1:], ((0, 1), (0, 0)), constant_values=num_seqs)
    counted = jnp.pad(jnp.cumsum(~is_empty, dtype=jnp.int32), (1, 0))
    num_members = jnp.maximum(counted[end] - counted[first], 1).astype(jnp.float32)
    saved = shared[None].astype(jnp.float32) * (1 - 1 / num_members)
    level = jnp.argmax(saved, axis=1)
    num_blocks = jnp.where(is_empty | (saved.max(axis=1) == 0), 0, shared[level])
    run = jnp.where(num_blocks > 0, first[seqs, level], -1)

    # 3. Neighbours that chose the same run are a group, if there are two of them. All others between two groups are
    # one group that shares nothing.
    def joins(run: jax.Array, num_blocks: jax.Array) -> jax.Array:
        """Whether a sequence is in the group of the one before it; bool `[seqs]`."""
        return is_empty | (~is_first & (run == run[before]) & (num_blocks == num_blocks[before]))

    is_joined = joins(run, num_blocks) & ~is_empty
    after = lax.cummin(jnp.where(is_empty, num_seqs, seqs), reverse=True)
    after = jnp.pad(after[1:], (0, 1), constant_values=num_seqs)
    is_member = is_joined | is_joined.at[after].get(mode="fill", fill_value=False)
    num_blocks = jnp.where(is_member, num_blocks, 0)
    run = jnp.where(num_blocks > 0, run, -1)

    # 4. The first sequence of each group. There are the most groups if sequences alone and groups of two alternate.
    (firsts,) = jnp.nonzero(~joins(run, num_blocks), size=(2 * num_seqs + 1) // 3, fill_value=num_seqs)
    firsts = firsts.astype(jnp.int32)
    starts = token_starts[jnp.append(firsts, num_seqs)].at[0].set(token_starts[0])
    return PrefixGroups(starts, jnp.minimum(firsts, num_seqs - 1), num_blocks)
