"""Many query tokens, whole prompts, in runs of a few: each run becomes a sequence of its own, which ends with the run.

The kernels take at most `MAX_ROWS` rows (query tokens times heads) a KV head. A run of tokens sees what a
sequence that ends with the run would see, with any window. So cutting only needs shorter lengths: run r of sequence s
is row `s * runs + r` of a larger batch, and one launch serves all runs. Runs of one sequence are neighbours: they are
computed at the same time, and the keys and values that they share come from the L2 cache.

Each run has its own row of the block tables: 4 bytes for each run and block of a row's capacity. For 2048 new tokens of
a table for 128k, in blocks of 16 and with 4 heads for each KV head, that is 4 MB; for 128k at once 268 MB.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._attention.arguments import AttentionArguments
from pallas_kernels.decode_config import MAX_ROWS


def runs_of(q_len: int, group: int, most_rows: int = MAX_ROWS) -> tuple[int, int]:
    """Number of runs, and tokens in each, for `q_len` tokens with `group` heads for each KV head."""
    # As many rows as the kernel takes: with more than 32 rows and a 16-bit cache it always computes 64.
    # [run_rows_h100, run_rows_wide_h100 of benchmarks/results/decisions/]
    num_runs = -(-q_len // max(1, most_rows // group))
    return num_runs, -(-q_len // num_runs)


def sizes_of(a: AttentionArguments) -> dict[str, int]:
    """Of the call that `cut` makes of this one, as the configurations of the decode kernels take them."""
    num_runs, run = runs_of(a.q.shape[1], a.group)
    return dict(
        seqs=a.q.shape[0] * num_runs,
        kv_heads=a.k_cache.shape[2],
        group=a.group,
        q_len=run,
        head_dim=a.q.shape[-1],
        capacity=a.capacity,
        itemsize=a.k_cache.dtype.itemsize,
    )


def cut(a: AttentionArguments) -> AttentionArguments:
    """The same call on `seqs * runs` sequences; if the runs together are longer than q_len, padding comes first."""
    seqs, q_len, heads, head_dim = a.q.shape
    num_runs, run = runs_of(q_len, a.group)
    if num_runs == 1:
        return a
    q = jnp.pad(a.q, ((0, 0), (num_runs * run - q_len, 0), (0, 0), (0, 0)))
    tokens_after = jnp.arange(num_runs - 1, -1, -1, dtype=jnp.int32) * run
    return dataclasses.replace(
        a,
        q=q.reshape(seqs * num_runs, run, heads, head_dim),
        block_tables=jnp.repeat(a.block_tables, num_runs, axis=0),
        lengths=jnp.maximum(a.lengths[:, None] - tokens_after[None], 0).reshape(-1),
    )


def fold(a: AttentionArguments, *, most_rows: int = MAX_ROWS) -> AttentionArguments:
    """A call that is not causal, as runs of one query token each: what tokens see alike, heads do too.

    The tokens of a run become heads of their KV head, which must not differ in options.
    """
    seqs, q_len, heads, head_dim = a.q.shape
    kv_heads, (num_runs, run) = a.k_cache.shape[2], runs_of(q_len, a.group, most_rows)
    q = jnp.pad(a.q, ((0, 0), (num_runs * run - q_len, 0), (0, 0), (0, 0)))
    q = q.reshape(seqs * num_runs, run, kv_heads, a.group, head_dim).swapaxes(1, 2)
    return dataclasses.replace(
        a,
        q=q.reshape(seqs * num_runs, 1, run * heads, head_dim),
        block_tables=jnp.repeat(a.block_tables, num_runs, axis=0),
        lengths=jnp.repeat(a.lengths, num_runs),
        causal=True,
    )


def unfold(x: jax.Array, a: AttentionArguments) -> jax.Array:
    """[seqs * runs, 1, run * heads, ...], of the call on `fold(a)`, as [seqs, q_len, heads, ...]."""
    seqs, q_len, heads, _ = a.q.shape
    by_head = x.reshape(x.shape[0], a.k_cache.shape[2], -1, a.group, *x.shape[3:])
    return by_head.swapaxes(1, 2).reshape(seqs, -1, heads, *x.shape[3:])[:, -q_len:]


def join(x: jax.Array, a: AttentionArguments) -> jax.Array:
    """[seqs * runs, run, ...], of the call on `cut(a)`, as [seqs, q_len, ...]."""
    seqs, q_len = a.q.shape[:2]
    return x.reshape(seqs, -1, *x.shape[2:])[:, -q_len:]
