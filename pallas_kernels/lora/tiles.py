"""Rows of one adapter are put together, in tiles. It depends on the ids only: XLA does it once for all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lora.config import ROWS


class Tiles(NamedTuple):
    rows: jax.Array  # int32 [tiles, 16], in order of the adapters; the number of rows: none
    adapters: jax.Array  # int32 [tiles]; the number of adapters: the tile is not used


def make_tiles(ids: jax.Array, num_adapters: int) -> Tiles:
    """Of ids int32 [rows]. Rows without an adapter are in no tile."""
    num_rows = len(ids)
    ids = jnp.where((ids >= 0) & (ids < num_adapters), ids, num_adapters)
    order = jnp.argsort(ids).astype(jnp.int32)
    counts = (ids[:, None] == jnp.arange(num_adapters, dtype=jnp.int32)[None]).sum(axis=0, dtype=jnp.int32)
    num_tiles = -(-counts // ROWS)
    ends, tile_ends = (jnp.cumsum(x, dtype=jnp.int32) for x in (counts, num_tiles))
    # As many as there can be: each adapter has at most one tile that is not full, and no tile is empty.
    tiles = jnp.arange(min(num_rows, (num_rows + num_adapters * (ROWS - 1)) // ROWS), dtype=jnp.int32)
    adapters = (tile_ends[None] <= tiles[:, None]).sum(axis=1, dtype=jnp.int32)
    own = jnp.minimum(adapters, num_adapters - 1)
    of_adapter = tiles - (tile_ends - num_tiles)[own]
    first = (ends - counts)[own] + of_adapter * ROWS
    places = first[:, None] + jnp.arange(ROWS, dtype=jnp.int32)[None]
    is_row = (places < ends[own][:, None]) & (adapters < num_adapters)[:, None]
    return Tiles(jnp.where(is_row, order.at[places].get(mode="clip"), num_rows), adapters)
