"""Paged attention in plain XLA: the path for CPUs and for GPUs that have no kernel.

    out = sum_t exp(logit_t - lse) v_t,    lse = log sum_t exp(logit_t)

A loop goes over the tokens in tiles of 128 with an online softmax, up to the longest sequence of the batch. It holds
one tile of keys and one of values of every sequence and partition:
`seqs * num_partitions * 128 * kv_heads * (head_dim + value_dim)` numbers in the cache's dtype (in float32 if the cache
has scales or another dtype than q), and the logits of that tile, `seqs * num_partitions * heads * q_len * 128` float32.
Nothing is ever as large as the gathered cache. (XLA itself widens a bfloat16 tile to float32 on a CPU.)

The tile is a constant, whatever the block size, so that the block size does not change the arithmetic.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import _device
from jaxpaged._attention.call import Call
from jaxpaged._attention.runs import cut_packed, join_packed, place_runs
from jaxpaged._attention.tree import Tree, from_rows
from jaxpaged._cache.pool_rows import take_rows

TILE = 128  # tokens; against 256, 3 times as fast at 80 tokens and equal at 1000 on 2 CPU cores (9/3 heads, batch 1)

# Bytes of tiles and their logits in a step of the loop on a GPU. A step of any size is about a dozen kernels. H100,
# 32/8 heads of 128, us: 1 x 8192 in 64 steps 2000, in one, of 35 MB, 175.
STEP_BYTES = 40 * 1024 * 1024

RUN = 16  # packed tokens that read a tile of keys together; `tokens / RUN + seqs` tiles are held


def attend(call: Call, *, num_partitions: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns out, of `call.out_shape` and q's dtype, and lse f32, of that shape without its last axis."""
    return _attend_in_jit(num_partitions, _device.is_gpu(), call)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_in_jit(num_partitions: int | None, on_gpu: bool, call: Call) -> tuple[jax.Array, jax.Array]:
    if call.query_starts is not None:
        runs = place_runs(call, RUN)
        out, lse = _attend_in_jit(num_partitions, on_gpu, cut_packed(call, runs))
        return join_packed(out, lse, call, runs)
    return _attend(num_partitions or default_partitions(call, on_gpu=on_gpu), call)


def default_partitions(a: Call, *, on_gpu: bool) -> int:
    """Partitions of each sequence, by static shapes: on a CPU 1, on a GPU the most for which STEP_BYTES suffice."""
    if not on_gpu:
        return 1
    seqs, q_len, heads, _ = a.q.shape
    kv_heads, tile = a.k_cache.shape[2], _tile_size(a.block_size)
    slot_bytes = kv_heads * (a.head_dim + a.value_dim) * (4 if _is_widened(a) else a.k_cache.dtype.itemsize)
    tile_bytes = tile * (slot_bytes + q_len * heads * 4)
    tiles = -(-a.capacity // tile)
    steps = -(-tiles // max(1, STEP_BYTES // (seqs * tile_bytes)))
    return -(-tiles // steps)


def _is_widened(a: Call) -> bool:
    """Whether products with keys or values are float32, not of the cache's dtype."""
    return a.k_cache.dtype != a.q.dtype or a.options.k_scale is not None or a.options.v_scale is not None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(num_partitions: int, a: Call) -> tuple[jax.Array, jax.Array]:
    return _online_softmax(num_partitions, None, a)


@_attend.defjvp
def _attend_jvp(num_partitions: int, primals: tuple, tangents: tuple) -> tuple:
    # A loop whose trip count is known only at run time has no transpose: differentiate the one over the whole table.
    (a,) = primals
    num_steps = -(-a.capacity // (_tile_size(a.block_size) * num_partitions))
    return jax.jvp(functools.partial(_online_softmax, num_partitions, num_steps), primals, tangents)


def _tile_size(block_size: int) -> int:
    """Tokens in a tile: TILE if one of it and the block size divides the other, otherwise whole blocks."""
    return TILE if block_size % TILE == 0 else max(1, TILE // block_size) * block_size


def _online_softmax(num_partitions: int, num_steps: int | None, a: Call) -> tuple[jax.Array, jax.Array]:
    """Computes `num_steps` tiles of each partition; None: all tiles of the longest partition."""
    seqs, q_len, heads, head_dim = a.q.shape
    kv_heads, rows = a.k_cache.shape[2], q_len * a.group
    tile = _tile_size(a.block_size)

    # The run of tiles that each partition owns. It follows from true lengths: neither the table's width nor the
    # other sequences of the batch change a sequence's partitions.
    tree = from_rows(a.tree_mask, a.lengths)
    query_positions = a.positions(tree)  # [seqs, q_len]
    first_visible = jnp.zeros_like(a.lengths)  # by any query of the sequence
    if a.options.sliding_window is not None:
        first_visible = jnp.maximum(query_positions.min(axis=1) - a.options.sliding_window + 1, 0)
    first = first_visible // tile  # [seqs]
    end = -(-a.lengths // tile)
    run = -(-(end - first) // num_partitions)
    starts = first[:, None] + run[:, None] * jnp.arange(num_partitions, dtype=jnp.int32)[None]  # [seqs, partitions]
    ends = jnp.minimum(starts + run[:, None], end[:, None])

    # A row before its sequence's start may hold NaN, which would reach the gradient of k.
    q = jnp.where((query_positions >= 0)[..., None, None], a.q, jnp.zeros_like(a.q))
    q = q.reshape(seqs, q_len, kv_heads, a.group, head_dim)
    q = q.swapaxes(1, 2).reshape(seqs, kv_heads, rows, head_dim)
    positions = jnp.repeat(query_positions, a.group, axis=1)  # [seqs, rows]

    def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, m, l = state
        k, v, distance = _load_tile(a, tree, first_visible, starts + i, starts + i < ends, positions)
        logits = _logits(a, q, k, distance)  # f32 [seqs, partitions, kv_heads, rows, tile]
        m_new = lax.stop_gradient(jnp.maximum(m, logits.max(axis=-1)))
        m_finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp(logits - m_finite[..., None])
        alpha = jnp.exp(m - m_finite)
        pv = jnp.einsum(
            "spkrt,sptkd->spkrd",
            p.astype(v.dtype),
            v,
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        return acc * alpha[..., None] + pv, m_new, l * alpha + p.sum(axis=-1)

    # Made from q so that inside shard_map the state varies over the same mesh axes as the results.
    zeros = jnp.broadcast_to(jnp.zeros_like(q[:, None, ..., 0], jnp.float32), (seqs, num_partitions, kv_heads, rows))
    state = jnp.broadcast_to(zeros[..., None], (*zeros.shape, a.value_dim)), zeros - jnp.inf, zeros
    if num_steps is None:
        acc, m, l = lax.fori_loop(0, run.max(initial=0), step, state)
    else:
        acc, m, l = lax.fori_loop(0, num_steps, jax.checkpoint(step), state)
    return _reduce(a, acc, m, l, positions)


def _load_tile(
    a: Call, tree: Tree | None, first_visible: jax.Array, tiles: jax.Array, active: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of one tile of each partition, [seqs, partitions, tile, kv_heads, head_dim], zero if no query
    sees them, and how far each row's query stands past each token, int32 [seqs, partitions, 1, rows, tile]."""
    tile = _tile_size(a.block_size)
    tokens = tiles[..., None] * tile + jnp.arange(tile, dtype=jnp.int32)[None, None]  # [seqs, partitions, tile]
    seen = active[..., None] & (tokens < a.lengths[:, None, None]) & (tokens >= first_visible[:, None, None])

    # A piece is a block, or the tile itself, one of `parts` of a block. The entry of a block that no query sees may be
    # any garbage: it is not followed.
    piece = min(a.block_size, tile)
    pieces, parts = tile // piece, a.block_size // piece
    numbers = tiles[..., None] * pieces + jnp.arange(pieces, dtype=jnp.int32)[None, None]
    ids = a.block_tables.at[jnp.arange(numbers.shape[0])[:, None, None], numbers // parts].get(mode="clip")
    ids = jnp.clip(ids, 0, a.k_cache.shape[0] - 1) * parts + numbers % parts
    ids = jnp.where(seen.reshape(*numbers.shape, piece).any(axis=-1), ids, 0)

    def only_seen(x: jax.Array) -> jax.Array:
        # Zero times NaN is NaN: a weight of zero is not enough, what no query sees must itself be zero. It must be so
        # before scales multiply it, because the gradient of a scale is the value times zero.
        return jnp.where(seen[..., None, None], x, jnp.zeros_like(x))

    def load(cache: jax.Array, cache_scale: jax.Array | None) -> jax.Array:
        values = take_rows(cache.reshape(-1, piece, *cache.shape[2:]), ids)
        values = only_seen(values.reshape(*tokens.shape, *cache.shape[2:]))
        if cache.dtype != a.q.dtype or cache_scale is not None:
            values = values.astype(jnp.float32)
        if cache_scale is None:
            return values
        if cache_scale.ndim < 3:
            return values * jnp.broadcast_to(cache_scale, values.shape[:-1])[..., None]
        scales = take_rows(cache_scale.reshape(-1, piece, cache_scale.shape[2]), ids).reshape(*tokens.shape, -1, 1)
        return values * only_seen(scales)

    if tree is None:
        distance = positions[:, None, None, :, None] - tokens[:, :, None, None, :]
    else:
        distance = tree.distances(positions[:, :: a.group], tokens.reshape(tokens.shape[0], -1))
        distance = jnp.repeat(distance, a.group, axis=1)  # [seqs, rows, partitions * tile]
        distance = distance.reshape(*distance.shape[:2], *tokens.shape[1:]).swapaxes(1, 2)[:, :, None]
    distance = jnp.where(active[..., None, None, None], distance, -1)
    k = load(a.k_cache, a.options.k_scale)
    return k, k[..., : a.value_dim] if a.v_cache is None else load(a.v_cache, a.options.v_scale), distance


def _logits(a: Call, q: jax.Array, k: jax.Array, distance: jax.Array) -> jax.Array:
    logits = a.options.scale * jnp.einsum(
        "skrd,sptkd->spkrt",
        q.astype(k.dtype),
        k,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    if a.options.logits_soft_cap is not None:
        logits = a.options.logits_soft_cap * jnp.tanh(logits / a.options.logits_soft_cap)
    if a.options.alibi_slopes is not None:
        logits -= _by_row(a, a.options.alibi_slopes)[None, None, :, :, None] * distance.astype(jnp.float32)
    visible = distance >= 0
    if a.options.sliding_window is not None:
        visible &= distance < a.options.sliding_window
    return jnp.where(visible, logits, -jnp.inf)


def _reduce(
    a: Call,
    acc: jax.Array,
    m: jax.Array,
    l: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Merges the partitions, adds the sinks, and normalises."""
    seqs, q_len, heads, _ = a.q.shape
    m_all = m.max(axis=1)  # [seqs, kv_heads, rows]
    if a.options.sinks is not None:
        sinks = _by_row(a, a.options.sinks)[None]
        m_all = jnp.maximum(m_all, lax.stop_gradient(sinks))
    m_all = jnp.where(m_all == -jnp.inf, 0.0, m_all)
    weights = jnp.exp(m - m_all[:, None])
    denominator = (l * weights).sum(axis=1)
    if a.options.sinks is not None:
        denominator += jnp.exp(sinks - m_all)
    sees_any = (positions >= 0)[:, None, :]  # [seqs, 1, rows]
    denominator = jnp.where(sees_any, denominator, 1.0)
    out = (acc * weights[..., None]).sum(axis=1) / denominator[..., None]
    lse = jnp.where(sees_any, m_all + jnp.log(denominator), -jnp.inf)

    def unfold(rows: jax.Array) -> jax.Array:  # [seqs, kv_heads, q_len * group, ...] -> [seqs, q_len, heads, ...]
        by_head = rows.reshape(seqs, -1, q_len, a.group, *rows.shape[3:])
        return by_head.swapaxes(1, 2).reshape(seqs, q_len, heads, *rows.shape[3:])

    return unfold(jnp.where(sees_any[..., None], out, 0.0)).astype(a.q.dtype), unfold(lse)


def _by_row(a: Call, by_head: jax.Array) -> jax.Array:
    """[heads] -> [kv_heads, rows]."""
    by_head = by_head.reshape(-1, 1, a.group)
    return jnp.broadcast_to(by_head, (by_head.shape[0], a.q.shape[1], a.group)).reshape(by_head.shape[0], -1)
