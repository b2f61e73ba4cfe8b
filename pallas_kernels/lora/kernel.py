"""The body of the kernel for adapters, and its launch."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import cp_async
from pallas_kernels.common.launch import launch as launch_kernel
from pallas_kernels.common.rows import ROWS_FIRST, zeros
from pallas_kernels.common.sizes import ceil_div, rem, zero_unless
from pallas_kernels.lora import threads
from pallas_kernels.lora.config import COLUMNS, FEATURES, ROWS, WARPS, Config, stage_rows
from pallas_kernels.lora.tiles import make_tiles


@dataclasses.dataclass(frozen=True)
class Refs:
    # Inputs, GMEM
    x: Any  # [tokens, features]
    a: Any  # [adapters * parts * rank, features]
    b: Any  # [adapters * rank, outputs]
    rows: Any  # int32 [tiles, 64], the 16 rows of a tile for each warp; the number of tokens: none
    adapters: Any  # int32 [tiles]; the number of adapters: the tile is not used
    # Output, GMEM
    out: Any  # [tokens, outputs]
    # SMEM
    ring_smem: (
        Any  # [stages, warpgroups, 2 * rank, 128], a step's operands: in the order of the threads that copied them
    )
    sums_smem: Any  # f32 [warpgroups, 64, rank], in the same order
    sums_full: Any  # barrier

    @property
    def rank(self) -> int:
        return self.sums_smem.shape[2]


def _kernel(refs: Refs, *, config: Config) -> None:
    adapter = refs.adapters[lax.axis_index("tile")]
    num_adapters = refs.b.shape[0] // refs.rank
    pl.when(adapter < num_adapters)(lambda: _compute(refs, adapter, config))


def _compute(refs: Refs, adapter: jax.Array, config: Config) -> None:
    part, num_parts, rank = lax.axis_index("part"), len(config.parts), refs.rank
    stages, rows = config.num_stages, ROWS_FIRST.load(refs.rows.at[lax.axis_index("tile")])
    warpgroup, num_warpgroups = lax.axis_index("warpgroup"), config.num_warpgroups
    bounds = [0, *itertools.accumulate(config.parts)]
    first_column, end_column = _of_part(bounds[:-1], part), _of_part(bounds[1:], part)
    # Steps of all warpgroups multiply 128 features each, then 256 columns each. Together they are one queue.
    features_end = refs.x.shape[1] // (num_warpgroups * FEATURES)
    end = features_end + ceil_div(end_column - first_column, num_warpgroups * COLUMNS)

    def stage(step: jax.Array) -> Any:
        return refs.ring_smem.at[rem(step, stages), warpgroup]

    def column(step: jax.Array) -> jax.Array:
        return first_column + ((step - features_end) * num_warpgroups + warpgroup) * COLUMNS

    def start(step: jax.Array) -> None:
        @pl.when(step < features_end)
        def _features() -> None:
            first_rank = (adapter * num_parts + part) * rank
            threads.copy_features(refs.x, refs.a, stage(step), rows, first_rank, step * num_warpgroups + warpgroup)

        @pl.when(jnp.logical_and(step >= features_end, step < end))
        def _columns() -> None:
            threads.copy_columns(refs.b, stage(step), adapter * rank, column(step), end_column)

        cp_async.commit()  # past the end an empty group, so that as many are under way at each wait

    # 1. The first steps are under way.
    for i in range(stages - 1):
        start(jnp.int32(i))

    # 2. H = X A^T, of each warp's features.
    def add_features(step: jax.Array, sums: jax.Array) -> jax.Array:
        cp_async.wait_own(stages - 2)
        start(step + stages - 1)  # in the place of the step before
        return threads.multiply_features(sums, stage(step))

    sums = lax.fori_loop(0, features_end, add_features, zeros((WARPS * ROWS, rank)))

    # 3. H of all features.
    threads.store_sums(sums, refs.sums_smem.at[warpgroup])
    plgpu.barrier_arrive(refs.sums_full)
    plgpu.barrier_wait(refs.sums_full)
    h = threads.add_warps(refs.sums_smem, refs.out.dtype)

    # 4. out = H B.
    def store_columns(step: jax.Array, _: None) -> None:
        cp_async.wait_own(stages - 2)
        start(step + stages - 1)
        threads.store_columns(h, stage(step), refs.out, rows, column(step), end_column)

    lax.fori_loop(features_end, end, store_columns, None)


def _of_part(values: Sequence[int], part: jax.Array) -> jax.Array:
    """The value of a part, of ascending ones."""
    value = jnp.int32(values[0])
    for i, (before, its) in enumerate(itertools.pairwise(values), 1):
        value += jnp.where(part >= i, jnp.int32(its - before), 0)
    return value


def launch(
    x: jax.Array,  # [tokens, features]
    a: jax.Array,  # [adapters, parts * rank, features]
    b: jax.Array,  # [adapters, rank, outputs]
    ids: jax.Array,  # int32 [tokens]; outside of the adapters: none
    *,
    config: Config,
) -> jax.Array:
    """[tokens, outputs], zeros in rows without an adapter."""
    (tokens, features), (num_adapters, rank, outputs) = x.shape, b.shape
    tiles = make_tiles(ids, num_adapters)
    (out,) = launch_kernel(
        "lora",
        functools.partial(_kernel, config=config),
        Refs,
        {
            "x": x,
            "a": a.reshape(-1, features),
            "b": b.reshape(-1, outputs),
            "rows": jnp.tile(tiles.rows, (1, WARPS)),
            "adapters": tiles.adapters,
        },
        {"out": jax.ShapeDtypeStruct((tokens, outputs), x.dtype)},
        reduction_bytes=0,
        grid=(len(config.parts), len(tiles.adapters)),
        grid_names=("part", "tile"),
        num_threads=config.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            ring_smem=plgpu.SMEM((config.num_stages, config.num_warpgroups, stage_rows(rank), FEATURES), x.dtype),
            sums_smem=plgpu.SMEM((config.num_warpgroups, WARPS * ROWS, rank), jnp.float32),
            sums_full=plgpu.Barrier(num_arrivals=config.num_warpgroups),
        ),
    )
    has_adapter = (ids >= 0) & (ids < num_adapters)
    return zero_unless(has_adapter[:, None], out)
