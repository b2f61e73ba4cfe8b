import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ROWS = 16  # of a block
FEATURES = 128  # that a step of the loop multiplies
MOST_COLUMNS, FEWEST_COLUMNS = 1024, 64  # of out in a program, for a rank of 16


@dataclasses.dataclass(frozen=True)
class Config:
    parts: tuple[int, ...]  # outputs of each
    splits: int
    columns: int

    @classmethod
    def choose(cls, dtypes: Sequence[Any], *, rank: int, features: int, parts: tuple[int, ...]) -> "Config | None":
        """None: the kernels do not take such arrays."""
        is_16_bit = all(dtype == dtypes[0] and dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
        if not is_16_bit or rank not in (16, 32, 64, 128) or features % FEATURES:
            return None
        columns = math.gcd(MOST_COLUMNS * 16 // rank, *parts)
        if columns < FEWEST_COLUMNS:
            return None
        splits = 4 if len(parts) == 1 else 2  # [adapters_h100]
        return cls(parts, 1 if features % (splits * FEATURES) else splits, columns)


def place_blocks(ids: jax.Array, num_adapters: int) -> tuple[jax.Array, jax.Array]:
    """Rows of x, int32 [blocks, ROWS], len(ids) where there is none, and the adapter of each block, int32 [blocks].

    Rows without an adapter have blocks too, of adapter `num_adapters`: their outputs are zeros.
    """
    tokens = len(ids)
    ids = jnp.where((ids >= 0) & (ids < num_adapters), ids, num_adapters)
    order = jnp.argsort(ids).astype(jnp.int32)
    counts = (ids[:, None] == jnp.arange(num_adapters + 1, dtype=jnp.int32)[None]).sum(axis=0, dtype=jnp.int32)
    num_blocks = -(-counts // ROWS)
    ends, block_ends = jnp.cumsum(counts, dtype=jnp.int32), jnp.cumsum(num_blocks, dtype=jnp.int32)
    blocks = jnp.arange(min(tokens, (tokens + (num_adapters + 1) * (ROWS - 1)) // ROWS), dtype=jnp.int32)
    adapters = jnp.searchsorted(block_ends, blocks, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(adapters, num_adapters)
    first = (ends - counts)[own] + (blocks - (block_ends - num_blocks)[own]) * ROWS
    places = first[:, None] + jnp.arange(ROWS, dtype=jnp.int32)[None]
    is_row = (places < ends[own][:, None]) & (adapters <= num_adapters)[:, None]
    return jnp.where(is_row, order.at[places].get(mode="clip"), tokens), own


def _down(
    rows_ref: Any,  # int32 [blocks, ROWS]
    adapters_ref: Any,  # int32 [blocks]
    x_ref: Any,  # [tokens, features]
    a_ref: Any,  # [adapters, parts * rank, features]
    h_ref: Any,  # f32 [splits, blocks, ROWS, parts * rank]
    *,
    config: Config,
) -> None:
    block, part, split = (pl.program_id(i) for i in range(3))
    num_adapters, ranks, features = a_ref.shape
    rank, share = ranks // len(config.parts), features // config.splits
    adapter = adapters_ref[block]

    @pl.when(adapter < num_adapters)
    def _() -> None:
        rows = rows_ref[block, :]
        is_row = jnp.broadcast_to((rows < x_ref.shape[0])[:, None], (ROWS, FEATURES))

        def step(i: jax.Array, h: jax.Array) -> jax.Array:
            start = split * share + i * FEATURES
            columns = start + jnp.arange(FEATURES, dtype=jnp.int32)
            x = triton.load(x_ref.at[rows[:, None], columns[None, :]], mask=is_row, other=0.0)
            a = a_ref[adapter, pl.ds(part * rank, rank), pl.ds(start, FEATURES)]
            return h + jnp.dot(x, a.T, preferred_element_type=jnp.float32)

        h = lax.fori_loop(0, share // FEATURES, step, jnp.zeros((ROWS, rank), jnp.float32))
        h_ref[split, block, :, pl.ds(part * rank, rank)] = h


def _up(
    rows_ref: Any,
    adapters_ref: Any,
    h_ref: Any,
    b_ref: Any,  # [adapters, rank, outputs]
    out_ref: Any,  # [tokens, outputs]
    *,
    config: Config,
) -> None:
    block, start = pl.program_id(0), pl.program_id(1) * config.columns
    num_adapters, rank, _ = b_ref.shape
    rows, adapter = rows_ref[block, :], adapters_ref[block]
    bounds = np.cumsum(config.parts)[:-1].tolist()
    part = sum(((start >= bound).astype(jnp.int32) for bound in bounds), jnp.int32(0))
    h = jnp.zeros((ROWS, rank), jnp.float32)
    for split in range(config.splits):
        h = h + h_ref[split, block, :, pl.ds(part * rank, rank)]
    h = jnp.where(adapter < num_adapters, h, jnp.zeros_like(h)).astype(b_ref.dtype)
    b = b_ref[jnp.minimum(adapter, num_adapters - 1), :, pl.ds(start, config.columns)]
    b = jnp.where(adapter < num_adapters, b, jnp.zeros_like(b))  # zero times NaN is NaN
    out = jnp.dot(h, b, preferred_element_type=jnp.float32).astype(out_ref.dtype)
    columns = start + jnp.arange(config.columns, dtype=jnp.int32)
    is_row = jnp.broadcast_to((rows < out_ref.shape[0])[:, None], out.shape)
    triton.store(out_ref.at[rows[:, None], columns[None, :]], out, mask=is_row)


def launch(
    config: Config,
    x: jax.Array,  # [tokens, features]
    a: jax.Array,  # [adapters, parts * rank, features]
    b: jax.Array,  # [adapters, rank, outputs]
    ids: jax.Array,  # int32 [tokens]; outside of the adapters: none
    *,
    interpret: bool = False,
) -> jax.Array:
    """[tokens, outputs]."""
    rows, adapters = place_blocks(ids, len(a))
    blocks = len(adapters)

    def call(kernel: Any, name: str, grid: tuple[int, ...], stages: int, out: Any, *arrays: jax.Array) -> jax.Array:
        return pl.pallas_call(
            functools.partial(kernel, config=config),
            out_shape=out,
            grid=grid,
            interpret=interpret,
            compiler_params=None if interpret else triton.CompilerParams(num_warps=4, num_stages=stages),
            name=name,
        )(rows, adapters, *arrays)

    of_h = jax.ShapeDtypeStruct((config.splits, blocks, ROWS, a.shape[1]), jnp.float32)
    stages = 4 if b.shape[1] <= 32 else 2  # for the shared memory of an L4
    h = call(_down, "lora_down", (blocks, len(config.parts), config.splits), stages, of_h, x, a)
    out = jax.ShapeDtypeStruct((len(x), b.shape[2]), x.dtype)
    return call(_up, "lora_up", (blocks, b.shape[2] // config.columns), 2, out, h, b)
