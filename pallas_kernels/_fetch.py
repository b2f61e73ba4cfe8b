"""The warpgroup that fetches: blocks of K and V from GMEM into rings of tiles in SMEM.

Each of its four warps makes every fourth copy of a tile. A copy is a block, or a quarter of the tile if that is less.
Everything here is traced inside the decode kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._walk import Order

WARPS = 4


@dataclasses.dataclass(frozen=True)
class Ring:
    source: Any  # GMEM [blocks, block_size, kv_heads * parts, head_dim / parts]
    target: Any  # SMEM [stages * parts, tile, width / parts]
    full: Any  # barriers [stages]
    free: Any  # barriers [stages]

    def wait_if(self, is_there: jax.Array, stage: jax.Array) -> None:
        pl.when(is_there)(lambda: plgpu.barrier_wait(self.full.at[stage]))

    def free_if(self, is_there: jax.Array, stage: jax.Array) -> None:
        pl.when(is_there)(lambda: plgpu.barrier_arrive(self.free.at[stage]))


def rows_of_copy(block_size: int, tile: int) -> int:
    """Tokens of a cache block in one copy."""
    return min(block_size, tile // WARPS)


def fetch(
    order: Order,
    rings: tuple[Ring, ...],
    tables: Any,  # GMEM, int32 [seqs, max_blocks]
    *,
    kv_head: jax.Array,
    parts_of: Callable[[Any], list[Any]],  # of a KV head or a stage, in the cache or in SMEM
    columns: Any,  # as wide as a part in SMEM; past the end of a narrower part the copy engine writes zeros
) -> None:
    walk, stages = order.walk, order.stages
    num_blocks, max_blocks = rings[0].source.shape[0], tables.shape[1]
    block_size, tile_tokens, num_tiles = walk.block_size, walk.tile, walk.num_tiles
    copy_rows = rows_of_copy(block_size, tile_tokens)
    first_entry, end_entry = walk.entries_to_follow()

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        rows = [(warp + WARPS * i) * copy_rows for i in range(tile_tokens // copy_rows // WARPS)]

        def tokens_of(tile: jax.Array) -> list[jax.Array]:
            """The first token, in the sequence, of each of our copies of a tile."""
            return [tile * tile_tokens + row for row in rows]

        def ids_of(tile: jax.Array) -> tuple[jax.Array, ...]:
            ids = []
            for token in tokens_of(tile):
                entry = lax.div(token, jnp.int32(block_size))
                # Read before the length is known to cover it: at the start the two loads overlap.
                block_id = tables[walk.seq, jnp.minimum(entry, max_blocks - 1)]
                follow = jnp.logical_and(entry >= first_entry, entry < end_entry)
                ids.append(jnp.where(follow, jnp.clip(block_id, 0, num_blocks - 1), 0))
            return tuple(ids)

        def fetch_tile(turn: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            stage = lax.rem(turn, jnp.int32(stages))
            next_ids = ids_of(walk.tile_of(jnp.minimum(turn + 1, num_tiles - 1)))
            tile = walk.tile_of(turn)
            offsets = [
                lax.rem(token, jnp.int32(block_size)) if block_size > copy_rows else 0 for token in tokens_of(tile)
            ]
            for ring in rings:

                @pl.when(turn >= stages)
                def _wait(ring: Ring = ring) -> None:
                    plgpu.barrier_wait(ring.free.at[stage])

                for block_id, offset, row in zip(ids, offsets, rows, strict=True):
                    for head, place in zip(parts_of(kv_head), parts_of(stage), strict=True):
                        plgpu.copy_gmem_to_smem(
                            ring.source.at[block_id, pl.ds(offset, copy_rows), head, columns],
                            ring.target.at[place, pl.ds(row, copy_rows)],
                            ring.full.at[stage],
                        )
            return next_ids

        ids = ids_of(walk.tile_of(jnp.int32(0)))

        @pl.when(num_tiles > 0)
        def _walk() -> None:
            lax.fori_loop(0, num_tiles, fetch_tile, ids)
            # No warp may exit while a barrier that it waited on still completes a phase.
            for stage in range(stages):

                @pl.when(num_tiles > stage)
                def _drain(stage: int = stage) -> None:
                    for ring in rings:
                        plgpu.barrier_wait(ring.free.at[stage])
