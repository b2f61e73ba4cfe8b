"""The body of the kernel that copies blocks, and its launch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import interpret
from pallas_kernels.common.sizes import div, rem
from pallas_kernels.copy_blocks.config import Config, Copies, padded_rows


def _kernel(refs: dict[str, Any], *, config: Config, num_layers: int, num_blocks: int) -> None:
    pools_gmem = refs["pools"]  # each [layers * blocks * rows, width]
    # Direct pairs from the front, the others from the back.
    pairs_gmem = refs["pairs"]  # int32 [pairs, 2], source and destination
    counts_gmem = refs["counts"]  # int32 [2], number of direct pairs and of other pairs
    aside_gmem = refs["aside"]  # [slice programs * pairs * slice_rows, width]
    ring_smem = refs["ring_smem"]  # [stages, tile_rows, width], padded
    full = refs["full"]  # [stages * stage_slices]

    program = lax.axis_index("program")
    num_pairs = pairs_gmem.shape[0]

    move = functools.partial(_move, ring_smem, full, config.num_stages)

    def in_pool(which: jax.Array, row: jax.Array, rows: int, copy: Callable[..., None]) -> None:
        for i, pool in enumerate(pools_gmem):

            @pl.when(which == i)
            def _copy(pool: Any = pool) -> None:
                copy(pool.at[pl.ds(row, rows)])

    def first_row(layer: jax.Array, block_id: jax.Array) -> jax.Array:
        return (layer * num_blocks + block_id) * config.rows

    # 1. Direct pairs: this program copies every num_programs-th tile. The tiles of a pair are consecutive.
    tiles_of_block = config.rows // config.tile_rows
    tiles_of_pair = len(pools_gmem) * num_layers * tiles_of_block

    def tile_end(end: int) -> Callable[..., None]:
        def locate(i: jax.Array, copy: Callable[..., None]) -> None:
            tile = program + i * config.num_programs
            pair, tile = div(tile, tiles_of_pair), rem(tile, tiles_of_pair)
            layer, tile = div(tile, tiles_of_block), rem(tile, tiles_of_block)
            which, layer = div(layer, num_layers), rem(layer, num_layers)
            row = first_row(layer, pairs_gmem[pair, end]) + tile * config.tile_rows
            in_pool(which, row, config.tile_rows, copy)

        return locate

    num_tiles = counts_gmem[0] * tiles_of_pair
    mine = div(jnp.maximum(num_tiles - program + config.num_programs - 1, 0), config.num_programs)
    move(mine, config.tile_rows, 1, tile_end(0), tile_end(1))

    # 2. The other pairs, one slice of all of them at a time.
    slices_of_block = config.rows // config.slice_rows
    num_slices = len(pools_gmem) * num_layers * slices_of_block
    count = counts_gmem[1]

    def move_slice(i: jax.Array, _: None) -> None:
        part = program + i * config.num_slice_programs
        layer, part = div(part, slices_of_block), rem(part, slices_of_block)
        which, layer = div(layer, num_layers), rem(layer, num_layers)

        def slice_end(end: int) -> Callable[..., None]:
            def locate(j: jax.Array, copy: Callable[..., None]) -> None:
                pair = jnp.maximum(num_pairs - 1 - j, 0)  # `move` traces more stages than there may be pairs
                row = first_row(layer, pairs_gmem[pair, end]) + part * config.slice_rows
                in_pool(which, row, config.slice_rows, copy)

            return locate

        def aside_end(j: jax.Array, copy: Callable[..., None]) -> None:
            row = (program * num_pairs + j) * config.slice_rows
            copy(aside_gmem.at[pl.ds(row, config.slice_rows)])

        move(count, config.slice_rows, config.stage_slices, slice_end(0), aside_end)
        move(count, config.slice_rows, config.stage_slices, aside_end, slice_end(1))

    @pl.when(jnp.logical_and(count > 0, program < config.num_slice_programs))
    def _others() -> None:
        my_slices = div(num_slices - program + config.num_slice_programs - 1, config.num_slice_programs)
        lax.fori_loop(0, my_slices, move_slice, None)


def _move(
    ring_smem: Any,  # [stages, tile_rows, width], padded
    full: Any,  # barriers [stages * stage_parts or more]
    num_stages: int,
    count: jax.Array,
    rows: int,
    stage_parts: int,
    source_end: Callable[..., None],
    target_end: Callable[..., None],
) -> None:
    """Copies `count` runs of rows through the ring. `source_end(i, copy)` calls `copy` with the i-th source, and
    `target_end` with the i-th target."""
    stages = num_stages * stage_parts
    lag = stages // 2

    def find_buffer(i: jax.Array) -> tuple[jax.Array, Any]:
        stage = rem(i, stages)
        row = rem(stage, stage_parts) * rows if stage_parts > 1 else 0
        return stage, ring_smem.at[div(stage, stage_parts), pl.ds(row, rows)]

    def load(i: jax.Array) -> None:
        stage, buffer = find_buffer(i)
        source_end(i, lambda source: plgpu.copy_gmem_to_smem(source, buffer, full.at[stage]))

    for i in range(stages):

        @pl.when(i < count)
        def _start(i: int = i) -> None:
            load(jnp.int32(i))

    def step(i: jax.Array, _: None) -> None:
        stage, buffer = find_buffer(i)
        plgpu.barrier_wait(full.at[stage])
        plgpu.commit_smem()  # orders reads before writes: a block may be source and destination
        target_end(i, lambda target: plgpu.copy_smem_to_gmem(buffer, target))

        # Refills an older stage, whose copy to GMEM has had time to end, not the one just emptied.
        @pl.when(jnp.logical_and(i >= lag, i - lag + stages < count))
        def _refill() -> None:
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            load(i - lag + stages)

    lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0)  # all copies have arrived


def launch(copies: Copies, config: Config) -> tuple[jax.Array, ...]:
    """Returns the new pools, in place if XLA may overwrite the old ones. Ids must be legal, destinations distinct."""
    pools, pairs, counts = copies
    num_layers, num_blocks = pools[0].shape[:2]
    num_pairs, dtype = pairs.shape[0], pools[0].dtype

    def copy_blocks(*operands: Any, **scratch_refs: Any) -> None:
        *pool_refs, pairs, counts, aside = operands
        named = dict(pools=pool_refs, pairs=pairs, counts=counts, aside=aside)
        _kernel(named | scratch_refs, config=config, num_layers=num_layers, num_blocks=num_blocks)

    copy = interpret.kernel(
        copy_blocks,
        # The buffer is declared an output, because scratch in GMEM would be filled with zeros.
        out_type=jax.ShapeDtypeStruct((config.num_slice_programs * num_pairs * config.slice_rows, config.width), dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        scratch_types=dict(
            ring_smem=plgpu.SMEM(
                (config.num_stages, padded_rows(config.tile_rows, config.width * dtype.itemsize), config.width), dtype
            ),
            full=plgpu.Barrier(num_barriers=config.num_stages * config.stage_slices),
        ),
    )

    def overwrite(refs: tuple[Any, ...]) -> None:
        copy(*refs, pairs, counts)

    # A kernel can write into its operands only through refs.
    new = pl.run_state(overwrite)(tuple(pool.reshape(-1, config.width) for pool in pools))
    return tuple(flat.reshape(pool.shape) for flat, pool in zip(new, pools, strict=True))
