"""Packed queries: each sequence's newest tokens, any number, one after the other in q.

An implementation that takes the same number of query tokens of each sequence gets runs. A run is a few tokens of one
sequence; it becomes a sequence of its own, which ends with the run. Runs do not cross sequences, so there are at most
`tokens / run + seqs`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.tree import by_place, from_runs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Which tokens of q each run has, right-aligned in `[runs, run]`."""

    run: int = dataclasses.field(metadata=dict(static=True))  # tokens
    starts: jax.Array  # int32 [seqs + 1], first row of each sequence in q, at most tokens
    first_runs: jax.Array  # int32 [seqs], the first run of each sequence
    seqs: jax.Array  # int32 [runs], the sequence of each run
    offsets: jax.Array  # int32 [runs], the first token of each run among its sequence's new ones
    counts: jax.Array  # int32 [runs], tokens; 0 for an unused run

    @property
    def num_tokens(self) -> jax.Array:
        """New tokens of each sequence, int32 `[seqs]`."""
        return self.starts[1:] - self.starts[:-1]


def runs_of(p: PackedArguments, run: int) -> Runs:
    tokens, seqs = p.q.shape[0], p.lengths.shape[0]
    starts = clipped_starts(p)
    num_tokens = starts[1:] - starts[:-1]
    num_runs = -(-num_tokens // run)
    ends = jnp.cumsum(num_runs, dtype=jnp.int32)
    places = jnp.arange(-(-tokens // run) + seqs, dtype=jnp.int32)
    owners = jnp.searchsorted(ends, places, side="right", method="scan_unrolled").astype(jnp.int32)
    owners = jnp.minimum(owners, seqs - 1)
    offsets = (places - (ends - num_runs)[owners]) * run
    counts = jnp.clip(num_tokens[owners] - offsets, 0, run)
    return Runs(run, starts, ends - num_runs, owners, offsets, counts)


def clipped_starts(p: PackedArguments) -> jax.Array:
    """The first row of each sequence in q, int32 `[seqs + 1]`, at most the rows of q and not descending."""
    return jax.lax.cummax(jnp.clip(p.query_starts, 0, p.q.shape[0]))


def owners(starts: jax.Array, *, tokens: int) -> jax.Array:
    """The sequence of each row of q, int32 `[tokens]`; 0 for padding in front, seqs for padding at the end."""
    rows = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.searchsorted(starts[1:], rows, side="right", method="scan_unrolled").astype(jnp.int32)


def cut(p: PackedArguments, runs: Runs) -> AttentionArguments:
    """The same call on runs. The rows before a short run's tokens are zeros, and their results are not read."""
    place = jnp.arange(runs.run, dtype=jnp.int32)[None] - runs.run + runs.counts[:, None]  # in the run; below 0: none
    rows = (runs.starts[runs.seqs] + runs.offsets)[:, None] + place
    q = p.q.at[rows].get(mode="clip")
    lengths = p.lengths[runs.seqs]
    if p.causal:
        first = p.lengths - runs.num_tokens  # the position of each sequence's first new token
        lengths = first[runs.seqs] + runs.offsets + runs.counts
    tree = None
    if p.tree_mask is not None:
        index = runs.offsets[:, None] + place
        tree = from_runs(p.tree_mask, rows, index, runs.seqs, p.lengths, runs.starts)
    return AttentionArguments(
        q=jnp.where((place >= 0)[..., None, None], q, jnp.zeros_like(q)),
        k_cache=p.k_cache,
        v_cache=p.v_cache,
        block_tables=p.block_tables[runs.seqs],
        lengths=jnp.where(runs.counts > 0, jnp.maximum(lengths, 0), 0),
        options=p.options,
        tree=tree,
        causal=p.causal,
    )


def positions(query_starts: jax.Array, lengths: jax.Array, *, tokens: int) -> jax.Array:
    """The position of each token of q in its sequence, int32 `[tokens]`; any number for padding."""
    seqs = owners(query_starts, tokens=tokens)
    return jnp.arange(tokens, dtype=jnp.int32) + (lengths - query_starts[1:]).at[seqs].get(mode="clip")


def tree_by_place(p: PackedArguments) -> jax.Array | None:
    """The bits of the call's trees, as the prefill kernel takes them."""
    if p.tree_mask is None:
        return None
    starts = clipped_starts(p)
    seqs = jnp.minimum(owners(starts, tokens=p.q.shape[0]), p.lengths.shape[0] - 1)
    return by_place(p.tree_mask, seqs, p.lengths, starts)


def join(out: jax.Array, lse: jax.Array, p: PackedArguments, runs: Runs) -> tuple[jax.Array, jax.Array]:
    """Out `[runs, run, heads, head_dim]` and its lse, as `[tokens, heads, head_dim]` and `[tokens, heads]`."""
    tokens = jnp.arange(p.q.shape[0], dtype=jnp.int32)
    seqs = owners(runs.starts, tokens=p.q.shape[0])
    is_padding = (seqs == p.lengths.shape[0]) | (tokens < runs.starts[0])
    seqs = jnp.minimum(seqs, p.lengths.shape[0] - 1)
    offsets = jnp.maximum(tokens - runs.starts[seqs], 0)
    ids = jnp.minimum(runs.first_runs[seqs] + offsets // runs.run, runs.counts.shape[0] - 1)
    places = runs.run - runs.counts[ids] + offsets % runs.run
    out = out.at[ids, places].get(mode="clip")
    out = jnp.where(is_padding[:, None, None], jnp.zeros_like(out), out)
    return out, jnp.where(is_padding[:, None], -jnp.inf, lse.at[ids, places].get(mode="clip"))
