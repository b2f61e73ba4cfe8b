"""The tiles of keys and values of a call's partitions in XLA, and the tokens that each row of queries sees in them.

The tile is a constant, so that the block size does not change the arithmetic.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._attention.tree import Tree, from_rows, query_positions
from jaxpaged._cache.pool_rows import take_rows
from pallas_kernels.common.interface import Call

TILE = 128  # tokens; vs. 256 on 2 CPU cores (9/3 heads, batch 1): 3 times as fast at 80 tokens, equal at 1000


def tile_size(block_size: int) -> int:
    """The number of tokens per tile: TILE if it divides the block size or the block size divides it, otherwise the
    largest multiple of the block size below it, or one block."""
    return TILE if block_size % TILE == 0 else max(1, TILE // block_size) * block_size


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of each partition of a uniform call, and the rows of queries that see them."""

    call: Call
    tree: Tree | None
    q: jax.Array  # [seqs, kv_heads, rows, head_dim]
    positions: jax.Array  # int32 [seqs, rows], position in the sequence; negative if a row sees no token
    first_visible: jax.Array  # int32 [seqs], first token that any query of the sequence sees
    run: jax.Array  # int32 [seqs], tiles of a partition
    starts: jax.Array  # int32 [seqs, partitions], first tile of each partition
    ends: jax.Array

    @classmethod
    def of(cls, a: Call, num_partitions: int) -> "Walk":
        tile = tile_size(a.block_size)
        # Each partition has a run of consecutive tiles, which depends on true lengths: neither the table's width nor
        # other sequences of the batch change a sequence's partitions.
        tree = from_rows(a.tree_mask, a.lengths)
        q_positions = query_positions(a, tree)  # [seqs, q_len]
        first_visible = jnp.zeros_like(a.lengths)
        if a.options.sliding_window is not None:
            # Queries before a sequence's start, and queries that are not read, do not count.
            first_query = jnp.where(q_positions >= 0, q_positions, a.lengths[:, None]).min(axis=1)
            first_visible = jnp.maximum(first_query - a.options.sliding_window + 1, 0)
        first = first_visible // tile  # [seqs]
        end = -(-a.lengths // tile)
        run = -(-(end - first) // num_partitions)
        starts = first[:, None] + run[:, None] * jnp.arange(num_partitions, dtype=jnp.int32)[None]
        ends = jnp.minimum(starts + run[:, None], end[:, None])

        # A row that sees no token may hold NaN, which would reach the gradient of k.
        q = jnp.where((q_positions >= 0)[..., None, None], a.q, jnp.zeros_like(a.q))
        positions = jnp.repeat(q_positions, a.group, axis=1)
        return cls(a, tree, in_rows(a, q), positions, first_visible, run, starts, ends)

    def tile(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The i-th tile of each partition: logits f32 [seqs, partitions, kv_heads, rows, tile] and values [seqs,
        partitions, tile, kv_heads, value_dim]."""
        tiles = self.starts + i
        active = tiles < self.ends
        tile = tile_size(self.call.block_size)
        tokens = tiles[..., None] * tile + jnp.arange(tile, dtype=jnp.int32)[None, None]  # [seqs, partitions, tile]
        k, v = self._load(tiles, tokens, active)
        return self._logits(k, jnp.where(active[..., None, None, None], self._distance(tokens), -1)), v

    def _load(self, tiles: jax.Array, tokens: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one tile of each partition, [seqs, partitions, tile, kv_heads, head_dim]; zero for tokens
        that no query sees."""
        a, tile = self.call, tokens.shape[2]
        seen = active[..., None] & (tokens < a.lengths[:, None, None]) & (tokens >= self.first_visible[:, None, None])

        # A piece is a block, or a whole tile that is one of `parts` of a block. The table entry of a block that no
        # query sees may be garbage, so it is not followed.
        piece = min(a.block_size, tile)
        pieces, parts = tile // piece, a.block_size // piece
        numbers = tiles[..., None] * pieces + jnp.arange(pieces, dtype=jnp.int32)[None, None]
        ids = a.block_tables.at[jnp.arange(numbers.shape[0])[:, None, None], numbers // parts].get(mode="clip")
        ids = jnp.clip(ids, 0, a.k_cache.shape[0] - 1) * parts + numbers % parts
        ids = jnp.where(seen.reshape(*numbers.shape, piece).any(axis=-1), ids, 0)

        def zero_unseen(x: jax.Array) -> jax.Array:
            # Numbers that no query sees must be zero, because a weight of zero times NaN is NaN. They must be zero
            # before scales multiply them, because the gradient of a scale is the number times zero.
            return jnp.where(seen[..., None, None], x, jnp.zeros_like(x))

        def load(cache: jax.Array, cache_scale: jax.Array | None) -> jax.Array:
            values = take_rows(cache.reshape(-1, piece, *cache.shape[2:]), ids)
            values = zero_unseen(values.reshape(*tokens.shape, *cache.shape[2:]))
            if cache.dtype != a.q.dtype or cache_scale is not None:
                values = values.astype(jnp.float32)
            if cache_scale is None:
                return values
            if cache_scale.ndim < 3:
                return values * jnp.broadcast_to(cache_scale, values.shape[:-1])[..., None]
            scales = take_rows(cache_scale.reshape(-1, piece, cache_scale.shape[2]), ids).reshape(*tokens.shape, -1, 1)
            return values * zero_unseen(scales)

        k = load(a.k_cache, a.options.k_scale)
        return k, k[..., : a.value_dim] if a.v_cache is None else load(a.v_cache, a.options.v_scale)

    def _distance(self, tokens: jax.Array) -> jax.Array:
        """Distance from each token to each row's query, int32 [seqs, partitions, 1, rows, tile]."""
        if self.tree is None:
            return self.positions[:, None, None, :, None] - tokens[:, :, None, None, :]
        group = self.call.group
        distance = self.tree.distances(self.positions[:, ::group], tokens.reshape(tokens.shape[0], -1))
        distance = jnp.repeat(distance, group, axis=1)  # [seqs, rows, partitions * tile]
        return distance.reshape(*distance.shape[:2], *tokens.shape[1:]).swapaxes(1, 2)[:, :, None]

    def _logits(self, k: jax.Array, distance: jax.Array) -> jax.Array:
        """Logits f32 [seqs, partitions, kv_heads, rows, tile]; -inf where a row does not see a token."""
        a, options = self.call, self.call.options
        logits = options.scale * jnp.einsum(
            "skrd,sptkd->spkrt",
            self.q.astype(k.dtype),
            k,
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        if options.logits_soft_cap is not None:
            logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
        if options.alibi_slopes is not None:
            logits -= by_row(a, options.alibi_slopes)[None, None, :, :, None] * distance.astype(jnp.float32)
        visible = distance >= 0
        if options.sliding_window is not None:
            visible &= distance < options.sliding_window
        return jnp.where(visible, logits, -jnp.inf)

    def zeros(self) -> tuple[jax.Array, jax.Array]:
        """Zeros f32 [seqs, partitions, kv_heads, rows, value_dim], and zeros without the last axis.

        They are made from q, so that inside shard_map the state of a loop varies over the same mesh axes as its
        results.
        """
        row = jnp.zeros_like(self.q[:, None, ..., 0], jnp.float32)
        row = jnp.broadcast_to(row, (row.shape[0], self.starts.shape[1], *row.shape[2:]))
        return jnp.broadcast_to(row[..., None], (*row.shape, self.call.value_dim)), row

    @property
    def sees_any(self) -> jax.Array:
        """bool [seqs, 1, rows]: whether a row sees any token."""
        return (self.positions >= 0)[:, None, :]

    def by_token(self, rows: jax.Array) -> jax.Array:
        """[seqs, kv_heads, rows, ...] -> [seqs, q_len, heads, ...]."""
        seqs, q_len, heads, _ = self.call.q.shape
        by_head = rows.reshape(seqs, -1, q_len, self.call.group, *rows.shape[3:])
        return by_head.swapaxes(1, 2).reshape(seqs, q_len, heads, *rows.shape[3:])


def in_rows(a: Call, x: jax.Array) -> jax.Array:
    """[seqs, q_len, heads, ...] -> [seqs, kv_heads, rows, ...]."""
    seqs, q_len, heads, *rest = x.shape
    by_group = x.reshape(seqs, q_len, heads // a.group, a.group, *rest)
    return by_group.swapaxes(1, 2).reshape(seqs, heads // a.group, q_len * a.group, *rest)


def by_row(a: Call, by_head: jax.Array) -> jax.Array:
    """[heads] -> [kv_heads, rows]."""
    by_head = by_head.reshape(-1, 1, a.group)
    return jnp.broadcast_to(by_head, (by_head.shape[0], a.q.shape[1], a.group)).reshape(by_head.shape[0], -1)
