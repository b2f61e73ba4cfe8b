"""Groups of neighbouring sequences that begin with the same blocks, which attention reads once per group."""

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
    """Groups of sequences that begin with the same full blocks. These blocks hold no new tokens.

    `BlockAllocator.prefix_groups` creates it for one step. The sequences of a group are neighbours. Query tokens
    `starts[g] : starts[g + 1]` belong to group g; tokens outside all groups share nothing.

    Attributes:
        starts: int32 `[groups + 1]`, first query token of each group, non-decreasing.
        first: int32 `[groups]`, one sequence of each group, whose table row has the shared blocks.
        num_blocks: int32 `[seqs]`, number of blocks that a sequence shares with its whole group; 0: none. A group
            whose first sequence has 0 shares nothing.
    """

    starts: jax.Array
    first: jax.Array
    num_blocks: jax.Array


@one_program()
def find(
    tables: jax.Array,  # int32 [seqs, max_blocks]
    num_full: jax.Array,  # int32 [seqs], number of full blocks without new tokens
    is_empty: jax.Array,  # bool [seqs], sequences without tokens; they do not separate their neighbours
    token_starts: jax.Array,  # int32 [seqs + 1], first query token of each sequence
) -> PrefixGroups:
    """Finds the groups of a step. A sequence joins the group that saves it the most reads."""
    num_seqs, max_blocks = tables.shape
    seqs = jnp.arange(num_seqs, dtype=jnp.int32)

    # 1. The number of blocks that each sequence shares with the one before it. Empty sequences are skipped.
    before = jnp.pad(lax.cummax(jnp.where(is_empty, -1, seqs))[:-1], (1, 0), constant_values=-1)
    is_first, before = before < 0, jnp.maximum(before, 0)
    most = jnp.where(is_empty | is_first, 0, jnp.minimum(num_full, num_full[before]))
    differs = (tables != tables[before]) | (jnp.arange(max_blocks, dtype=jnp.int32)[None] >= most[:, None])
    shared = jnp.where(differs.any(axis=1), jnp.argmax(differs, axis=1).astype(jnp.int32), max_blocks)

    # 2. For each number n in `shared`: the run of neighbours around each sequence that share at least n blocks.
    # If m sequences share n blocks, each skips n - n / m block reads on average.
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

    # 3. Two or more neighbours that chose the same run are a group. All sequences between two groups form one group
    # that shares nothing.
    def joins(run: jax.Array, num_blocks: jax.Array) -> jax.Array:
        """Whether a sequence is in the group of the one before it; bool `[seqs]`."""
        return is_empty | (~is_first & (run == run[before]) & (num_blocks == num_blocks[before]))

    is_joined = joins(run, num_blocks) & ~is_empty
    after = lax.cummin(jnp.where(is_empty, num_seqs, seqs), reverse=True)
    after = jnp.pad(after[1:], (0, 1), constant_values=num_seqs)
    is_member = is_joined | is_joined.at[after].get(mode="fill", fill_value=False)
    num_blocks = jnp.where(is_member, num_blocks, 0)
    run = jnp.where(num_blocks > 0, run, -1)

    # 4. The first sequence of each group. The maximum number of groups is reached if single sequences and groups of
    # two alternate.
    (firsts,) = jnp.nonzero(~joins(run, num_blocks), size=(2 * num_seqs + 1) // 3, fill_value=num_seqs)
    firsts = firsts.astype(jnp.int32)
    starts = token_starts[jnp.append(firsts, num_seqs)].at[0].set(token_starts[0])
    return PrefixGroups(starts, jnp.minimum(firsts, num_seqs - 1), num_blocks)
