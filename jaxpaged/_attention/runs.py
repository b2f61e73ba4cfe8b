"""Splits query tokens into runs of a few tokens. Each run becomes a sequence of its own, which ends with the run.

With any window, a run of tokens sees the same tokens as a sequence that ends with the run. So a run only needs a
shorter length, and one launch computes all runs. Runs of a sequence are adjacent, so they are computed at the same
time, and the keys and values that they share come from the L2 cache.

In a uniform call, run r of sequence s is row `s * num_runs + r` of a larger batch. If queries are not causal, all
tokens of a run see the same tokens, like the heads of a KV head. Then a run becomes a single token with more heads;
this requires that options do not differ between heads. In a packed call, runs do not cross sequences. Packed runs of
one token need no copy of q.

Each run has its own row of the block tables, 4 bytes per block of a row's capacity. For 2048 new tokens with a table
for 128k tokens, blocks of 16 and 4 heads per KV head, that is 4 MB; for 128k new tokens it is 268 MB.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.interface import Call


def cut_uniform(call: Call, run: int) -> Call:
    """The call on runs of `run` tokens. If q_len is not a multiple of `run`, the first run begins with padding."""
    seqs, q_len, heads, head_dim = call.q.shape
    num_runs = -(-q_len // run)
    if num_runs == 1 and call.causal:
        return call
    q = jnp.pad(call.q, ((0, 0), (num_runs * run - q_len, 0), (0, 0), (0, 0)))
    q = q.reshape(seqs * num_runs, run, heads, head_dim)
    tokens_after = jnp.arange(num_runs - 1, -1, -1, dtype=jnp.int32) * run
    lengths = jnp.maximum(call.lengths[:, None] - tokens_after[None], 0).reshape(-1)
    if not call.causal:
        q = q.reshape(seqs * num_runs, run, call.kv_heads, call.group, head_dim).swapaxes(1, 2)
        q = q.reshape(seqs * num_runs, 1, run * heads, head_dim)
        lengths = jnp.repeat(call.lengths, num_runs)
    num_read, padding = None, num_runs * run - q_len
    if call.causal and padding and call.options.sliding_window is not None:
        num_read = jnp.tile(jnp.full(num_runs, run, jnp.int32).at[0].add(-padding), seqs)
    tables = jnp.repeat(call.block_tables, num_runs, axis=0)
    return dataclasses.replace(call, q=q, block_tables=tables, lengths=lengths, num_read=num_read, causal=True)


def join_uniform(x: jax.Array, call: Call) -> jax.Array:
    """Joins results for `cut_uniform(call, run)` to `[seqs, q_len, heads, ...]`."""
    (seqs, q_len, heads, _), rest = call.q.shape, x.shape[3:]
    if not call.causal:  # [seqs * runs, 1, run * heads, ...]
        x = x.reshape(x.shape[0], call.kv_heads, -1, call.group, *rest).swapaxes(1, 2)
    return x.reshape(seqs, -1, heads, *rest)[:, -q_len:]


@dataclasses.dataclass(frozen=True)
class Runs:
    """The tokens of packed q in each run, right-aligned in `[runs, run]`."""

    run: int  # tokens per run
    starts: jax.Array  # int32 [seqs + 1], first row of each sequence in q, at most tokens
    first_runs: jax.Array  # int32 [seqs], index of each sequence's first run
    seqs: jax.Array  # int32 [runs], sequence of each run
    offsets: jax.Array  # int32 [runs], index of each run's first token among its sequence's new tokens
    counts: jax.Array  # int32 [runs], tokens of each run; 0 for an unused run


def place_runs(call: Call, run: int) -> Runs:
    starts, seqs = call.seq_starts(), call.lengths.shape[0]
    num_new = jnp.diff(starts)
    num_runs = -(-num_new // run)
    ends = jnp.cumsum(num_runs, dtype=jnp.int32)
    run_ids = jnp.arange(call.num_runs(run), dtype=jnp.int32)
    seq_ids = jnp.searchsorted(ends, run_ids, side="right", method="scan_unrolled").astype(jnp.int32)
    seq_ids = jnp.minimum(seq_ids, seqs - 1)
    offsets = (run_ids - (ends - num_runs)[seq_ids]) * run
    counts = jnp.clip(num_new[seq_ids] - offsets, 0, run)
    return Runs(run, starts, ends - num_runs, seq_ids, offsets, counts)


def cut_rows(x: jax.Array, runs: Runs) -> jax.Array:
    """Rows `[tokens, ...]` of packed q, or of an array like it, as `[runs, run, ...]`; a short run begins with
    zeros."""
    column = jnp.arange(runs.run, dtype=jnp.int32)[None] - runs.run + runs.counts[:, None]  # negative: no token
    rows = (runs.starts[runs.seqs] + runs.offsets)[:, None] + column
    x = x.at[rows].get(mode="clip")
    return jnp.where(jnp.expand_dims(column >= 0, range(2, x.ndim)), x, jnp.zeros_like(x))


def cut_packed(call: Call, runs: Runs) -> Call:
    """The call on runs, as a uniform call. Results of the rows before a short run's tokens are not used."""
    lengths = call.lengths[runs.seqs]
    if call.causal:
        first = call.lengths - jnp.diff(runs.starts)  # the position of each sequence's first new token
        lengths = first[runs.seqs] + runs.offsets + runs.counts
    return dataclasses.replace(
        call,
        q=cut_rows(call.q, runs),
        block_tables=call.block_tables[runs.seqs],
        lengths=jnp.where(runs.counts > 0, jnp.maximum(lengths, 0), 0),
        query_starts=None,
        num_read=runs.counts if call.causal and call.options.sliding_window is not None else None,
    )


def join_packed(out: jax.Array, lse: jax.Array, call: Call, runs: Runs) -> tuple[jax.Array, jax.Array]:
    """Joins out `[runs, run, heads, head_dim]` and its lse to `[tokens, heads, head_dim]` and `[tokens, heads]`."""
    tokens = jnp.arange(call.q.shape[0], dtype=jnp.int32)
    seqs = owners(runs.starts, tokens=call.q.shape[0])
    is_padding = (seqs == call.lengths.shape[0]) | (tokens < runs.starts[0])
    seqs = jnp.minimum(seqs, call.lengths.shape[0] - 1)
    offsets = jnp.maximum(tokens - runs.starts[seqs], 0)
    ids = jnp.minimum(runs.first_runs[seqs] + offsets // runs.run, runs.counts.shape[0] - 1)
    columns = runs.run - runs.counts[ids] + offsets % runs.run
    out = out.at[ids, columns].get(mode="clip")
    out = jnp.where(is_padding[:, None, None], jnp.zeros_like(out), out)
    return out, jnp.where(is_padding[:, None], -jnp.inf, lse.at[ids, columns].get(mode="clip"))


def by_token(call: Call) -> Call:
    """A packed call on runs of one token, as a uniform call. Only the rows of the tables are copied. Padding has length
    0."""
    starts, tokens, last = call.seq_starts(), call.q.shape[0], call.lengths.shape[0] - 1
    seqs = owners(starts, tokens=tokens)
    is_padding = (seqs > last) | (jnp.arange(tokens, dtype=jnp.int32) < starts[0])
    seqs = jnp.minimum(seqs, last)
    lengths = packed_positions(starts, call.lengths, tokens=tokens) + 1 if call.causal else call.lengths[seqs]
    lengths = jnp.where(is_padding, 0, jnp.maximum(lengths, 0))
    tables = call.block_tables[seqs]
    return dataclasses.replace(call, q=call.q[:, None], block_tables=tables, lengths=lengths, query_starts=None)


def owners(starts: jax.Array, *, tokens: int) -> jax.Array:
    """The sequence of each row of packed q, int32 `[tokens]`; 0 for padding at the start, seqs for padding at the
    end."""
    rows = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.searchsorted(starts[1:], rows, side="right", method="scan_unrolled").astype(jnp.int32)


def packed_positions(query_starts: jax.Array, lengths: jax.Array, *, tokens: int) -> jax.Array:
    """The position of each row of packed q in its sequence, int32 `[tokens]`; undefined for padding."""
    seqs = owners(query_starts, tokens=tokens)
    return jnp.arange(tokens, dtype=jnp.int32) + (lengths - query_starts[1:]).at[seqs].get(mode="clip")
