"""Paged attention in plain XLA, for CPUs and for GPUs without kernels.

    out = sum_t exp(logit_t - lse) v_t,    lse = log sum_t exp(logit_t)

A loop goes over tiles of 128 tokens with an online softmax, up to the longest sequence of the batch. It holds one tile
of keys and one of values per sequence and partition:
`seqs * num_partitions * 128 * kv_heads * (head_dim + value_dim)` numbers in the cache's dtype (float32 if the cache has
scales or its dtype differs from q's), and the tile's logits, `seqs * num_partitions * heads * q_len * 128` in float32.
No array is as large as the gathered cache. (On a CPU, XLA itself widens a bfloat16 tile to float32.)

The backward pass goes over the tiles again and computes the weights exp(logit_t - lse) from the lse of the forward
pass, which may come from any implementation. So differentiation does not change the bits of the results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import _device
from jaxpaged._attention.runs import cut_packed, cut_rows, join_packed, place_runs
from jaxpaged._attention.xla_tiles import Walk, by_row, in_rows, tile_size
from pallas_kernels.common.interface import Call

# Bytes of tiles and logits in a step of the loop on a GPU. Every step is about a dozen kernels, whatever its size: 1 x
# 8192 tokens with 32/8 heads of 128 on an H100 need 2000 us in 64 steps, and 175 us in one step of 35 MB.
STEP_BYTES = 40 * 1024 * 1024

RUN = 16  # most packed tokens in a run, which read a tile of keys together; the loop holds one tile per run


def attend(call: Call, *, num_partitions: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns out, in the shape `call.out_shape` and q's dtype, and lse f32, in that shape without its last axis."""
    return _attend_in_jit(num_partitions, _device.is_gpu(), call)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_in_jit(num_partitions: int | None, on_gpu: bool, call: Call) -> tuple[jax.Array, jax.Array]:
    if call.query_starts is not None:
        run = run_tokens(call.q.shape[0], call.lengths.shape[0])
        runs = place_runs(call, run)
        out, lse = _attend_in_jit(num_partitions, on_gpu, cut_packed(call, runs))
        return join_packed(out, lse, call, runs)
    num_partitions = num_partitions or default_partitions(call, on_gpu=on_gpu)
    return _attend(num_partitions, call)


def run_tokens(tokens: int, seqs: int) -> int:
    """Packed tokens in a run: the power of two at or above the mean number per sequence, up to RUN.

    Padding of a run costs the same as tokens. On a CPU core, with 8 sequences of 200 tokens and 9/3 heads, runs of 2
    need half the time of runs of 16 for 16 new tokens, and twice the time for 128.
    """
    return min(RUN, 1 << (-(-tokens // max(seqs, 1)) - 1).bit_length())


def default_partitions(a: Call, *, on_gpu: bool) -> int:
    """Partitions of each sequence, by static shapes: 1 on a CPU, the most that fit into STEP_BYTES on a GPU."""
    if not on_gpu:
        return 1
    seqs, q_len, heads, _ = a.q.shape
    kv_heads, tile = a.k_cache.shape[2], tile_size(a.block_size)
    slot_bytes = kv_heads * (a.head_dim + a.value_dim) * (4 if _is_widened(a) else a.k_cache.dtype.itemsize)
    tile_bytes = tile * (slot_bytes + q_len * heads * 4)
    tiles = -(-a.capacity // tile)
    steps = -(-tiles // max(1, STEP_BYTES // (seqs * tile_bytes)))
    return -(-tiles // steps)


def _is_widened(a: Call) -> bool:
    """Whether products with keys or values are in float32 instead of the cache's dtype."""
    return a.k_cache.dtype != a.q.dtype or a.options.k_scale is not None or a.options.v_scale is not None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(num_partitions: int, a: Call) -> tuple[jax.Array, jax.Array]:
    walk = Walk.of(a, num_partitions)

    def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, m, l = state
        logits, v = walk.tile(i)
        m_new = jnp.maximum(m, logits.max(axis=-1))
        m_finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp(logits - m_finite[..., None])
        alpha = jnp.exp(m - m_finite)
        return acc * alpha[..., None] + _weighted(p, v), m_new, l * alpha + p.sum(axis=-1)

    acc, l = walk.zeros()
    acc, m, l = lax.fori_loop(0, walk.run.max(initial=0), step, (acc, l - jnp.inf, l))
    return _reduce(walk, acc, m, l)


@_attend.defjvp
def _attend_jvp(num_partitions: int, primals: tuple, tangents: tuple) -> tuple:
    (call,), (moved,) = primals, tangents
    results = _attend(num_partitions, call)
    return results, tangents_of(call, moved, results, num_partitions=num_partitions)


def tangents_of(
    call: Call, moved: Call, results: tuple[jax.Array, jax.Array], *, num_partitions: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse, the `results` of the call, along `moved`. Linear in `moved`, so it has a transpose.

    d lse = sum_t p_t d logit_t,    d out = sum_t p_t d v_t + sum_t d p_t v_t,    d p_t = p_t (d logit_t - d lse)
    """
    out, lse = results
    sums = functools.partial(_weighted_sums, lse, num_partitions)
    values, total = jax.jvp(sums, (call,), (moved,))[1]
    return (values - total[..., None] * out.astype(jnp.float32)).astype(out.dtype), total


def _weighted_sums(lse: jax.Array, num_partitions: int | None, call: Call) -> tuple[jax.Array, jax.Array]:
    """sum_t p_t v_t, f32 in the shape `call.out_shape`, and sum_t p_t, with p_t = exp(logit_t - lse) for a given lse.

    Only its derivatives are of use: the sums themselves are out and 1.
    """
    if call.query_starts is not None:
        runs = place_runs(call, run_tokens(call.q.shape[0], call.lengths.shape[0]))
        sums = _weighted_sums(cut_rows(lse, runs), num_partitions, cut_packed(call, runs))
        return join_packed(*sums, call, runs)
    num_partitions = num_partitions or default_partitions(call, on_gpu=_device.is_gpu())
    walk = Walk.of(call, num_partitions)
    lse = in_rows(call, jnp.where(lse == -jnp.inf, 0.0, lse))

    # The terms of one tile. The loop goes over the whole table, because a loop with a dynamic trip count has no
    # transpose.
    @jax.checkpoint
    def of_tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, v = walk.tile(i)
        p = jnp.exp(logits - lse[:, None, ..., None])
        return _weighted(p, v).sum(axis=1), p.sum(axis=(1, 4))

    def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(jnp.add, sums, of_tile(i))

    num_steps = -(-call.capacity // (tile_size(call.block_size) * num_partitions))
    values, total = lax.fori_loop(0, num_steps, step, tuple(x.sum(axis=1) for x in walk.zeros()))
    if call.options.sinks is not None:
        total += jnp.where(walk.sees_any, jnp.exp(by_row(call, call.options.sinks)[None] - lse), 0.0)
    return walk.by_token(values), walk.by_token(total)


def _weighted(p: jax.Array, v: jax.Array) -> jax.Array:
    """The weighted sum of a tile's values, f32 [seqs, partitions, kv_heads, rows, value_dim]."""
    return jnp.einsum(
        "spkrt,sptkd->spkrd",
        p.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )


def _reduce(walk: Walk, acc: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges the partitions, applies the sinks, and normalises."""
    a = walk.call
    m_all = m.max(axis=1)  # [seqs, kv_heads, rows]
    if a.options.sinks is not None:
        sinks = by_row(a, a.options.sinks)[None]
        m_all = jnp.maximum(m_all, sinks)
    m_all = jnp.where(m_all == -jnp.inf, 0.0, m_all)
    weights = jnp.exp(m - m_all[:, None])
    denominator = (l * weights).sum(axis=1)
    if a.options.sinks is not None:
        denominator += jnp.exp(sinks - m_all)
    denominator = jnp.where(walk.sees_any, denominator, 1.0)
    out = (acc * weights[..., None]).sum(axis=1) / denominator[..., None]
    lse = jnp.where(walk.sees_any, m_all + jnp.log(denominator), -jnp.inf)
    return walk.by_token(jnp.where(walk.sees_any[..., None], out, 0.0)).astype(a.q.dtype), walk.by_token(lse)
