"""Many query tokens, whole prompts, in runs of a few: each run becomes a sequence of its own, which ends with the run.

The decode kernel takes at most `MAX_ROWS` rows (query tokens times heads) a KV head. A run of tokens sees what a
sequence that ends with the run would see, with any window. So cutting only needs shorter lengths: run r of sequence s
is row `s * runs + r` of a larger batch, and one launch serves all runs. Runs of one sequence are neighbours: they are
computed at the same time, and the keys and values that they share come from the L2 cache.

If the queries are not causal, all tokens of a run see the same, as the heads of a KV head do. Then a run becomes a
single token, with more heads: options must not differ between heads.

Each run has its own row of the block tables: 4 bytes for each run and block of a row's capacity. For 2048 new tokens of
a table for 128k, in blocks of 16 and with 4 heads for each KV head, that is 4 MB; for 128k at once 268 MB.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._attention.arguments import AttentionArguments
from pallas_kernels.decode.config import MAX_ROWS


def runs_of(q_len: int, group: int, most_rows: int = MAX_ROWS) -> tuple[int, int]:
    """Number of runs, and tokens in each, for `q_len` tokens with `group` heads for each KV head."""
    num_runs = -(-q_len // max(1, most_rows // group))
    return num_runs, -(-q_len // num_runs)


def cut(a: AttentionArguments, run: int) -> AttentionArguments:
    """The same call on runs of `run` tokens; if the runs together are longer than q_len, padding comes first."""
    seqs, q_len, heads, head_dim = a.q.shape
    num_runs = -(-q_len // run)
    if num_runs == 1 and a.causal:
        return a
    q = jnp.pad(a.q, ((0, 0), (num_runs * run - q_len, 0), (0, 0), (0, 0)))
    q = q.reshape(seqs * num_runs, run, heads, head_dim)
    tokens_after = jnp.arange(num_runs - 1, -1, -1, dtype=jnp.int32) * run
    lengths = jnp.maximum(a.lengths[:, None] - tokens_after[None], 0).reshape(-1)
    if not a.causal:
        q = q.reshape(seqs * num_runs, run, a.k_cache.shape[2], a.group, head_dim).swapaxes(1, 2)
        q = q.reshape(seqs * num_runs, 1, run * heads, head_dim)
        lengths = jnp.repeat(a.lengths, num_runs)
    block_tables = jnp.repeat(a.block_tables, num_runs, axis=0)
    return dataclasses.replace(a, q=q, block_tables=block_tables, lengths=lengths, causal=True)


def join(x: jax.Array, a: AttentionArguments) -> jax.Array:
    """What the call on `cut(a, run)` returns, as `[seqs, q_len, heads, ...]`."""
    (seqs, q_len, heads, _), rest = a.q.shape, x.shape[3:]
    if not a.causal:  # [seqs * runs, 1, run * heads, ...]
        x = x.reshape(x.shape[0], a.k_cache.shape[2], -1, a.group, *rest).swapaxes(1, 2)
    return x.reshape(seqs, -1, heads, *rest)[:, -q_len:]
