"""The arrays and the body of the portable prefill kernel, and its launch."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.cp_async import barrier
from pallas_kernels.common.fetch import Ids
from pallas_kernels.common.interface import Call, Shapes
from pallas_kernels.common.rows import LOWEST, ROWS_FIRST, matrix, zeros
from pallas_kernels.common.scales import of_head, ring_types, scaled
from pallas_kernels.common.sizes import COLUMNS, round_up
from pallas_kernels.common.softmax import rescale
from pallas_kernels.prefill.item import Items
from pallas_kernels.prefill.launch import launch_items
from pallas_kernels.prefill.logits import Logits, softmax
from pallas_kernels.prefill.portable import products
from pallas_kernels.prefill.portable.config import Config
from pallas_kernels.prefill.portable.tiles import Tiles
from pallas_kernels.prefill.refs import Arrays, query_smem
from pallas_kernels.prefill.rows_of_item import RowsOfItem
from pallas_kernels.prefill.work_list import max_entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs(Arrays):
    wide_smem: Any = None  # 8-bit caches: float16 [tile, width], keys or values of a tile


def scratch(config: Config, shapes: Shapes, scales: tuple[Any, Any]) -> dict[str, Any]:
    """SMEM, by the names of `Refs`. `scales` are k_scale and v_scale."""
    width, stages, tile = round_up(shapes.head_dim, COLUMNS), config.num_stages, config.tile_tokens

    def smem(shape: tuple[int, ...], dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=matrix(COLUMNS, jnp.dtype(dtype).itemsize))

    arrays: dict[str, Any] = {
        "q_smem": query_smem((config.rows, width), shapes, products.MATRIX),
        "k_smem": smem((stages, tile, width), shapes.cache_dtype),
        "v_smem": smem((stages, tile, width), shapes.cache_dtype),
    }
    if shapes.is_8bit:
        arrays["wide_smem"] = smem((tile, width), jnp.float16)
        arrays |= ring_types(dict(zip("kv", scales, strict=True)), stages=stages, tile=tile)
    return arrays


class State(NamedTuple):
    """The carry of the loop over tiles."""

    acc: jax.Array  # O, f32 [rows, width]
    m: jax.Array  # f32 [rows], close to the highest logit so far, in units of log2
    l: jax.Array  # f32 [rows], sum of the weights
    values_ids: Ids  # blocks of the next tile whose values are copied
    keys_ids: Ids  # blocks of the next tile whose keys are copied


def _kernel(refs: Refs, *, config: Config) -> None:
    items = Items.of(refs, config)
    # The grid has a program for every entry of the work list, including unused ones.
    pl.when(items.count() > 0)(lambda: _attend(refs, items, config))


def _attend(refs: Refs, items: Items, config: Config) -> None:
    item = items.item(items.read(jnp.int32(0)))
    options, (q_smem, multiplied) = refs.options, refs.query_views
    (num_rows, width), stages, first_row = q_smem.shape, config.num_stages, 0
    rows = RowsOfItem(config, first_row, num_rows, products.MATRIX, commit=barrier)
    tiles = Tiles(refs, item, config)

    # 1. Start copying Q and the first tiles.
    rows.start_load(refs.q, item, q_smem)
    ids = [tiles.read_ids(item.begin + i) for i in range(stages + 1)]
    for i in range(stages):
        tiles.start_keys(item.begin + i, ids[i])
        if i < stages - 1:
            tiles.start_values(item.begin + i, ids[i])

    # 2. Wait for Q, and prepare the factors of the logits.
    k_scale, v_scale = (of_head(scale, item.kv_head) for scale in (options.k_scale, options.v_scale))
    scale = scaled(options.scale[0], k_scale)
    tiles.wait_query()
    scale = rows.prepare_query(q_smem, multiplied, scale)
    slopes = rows.load_vector(options.alibi_slopes, item)
    logits_of = Logits(item, config.item_tokens, first_row, scale, options.cap, slopes)

    # 3. The loop over tiles. Tiles with a mask have loops of their own, because a branch inside one loop is slower.
    # [portable_tiles_h100 of benchmarks/results/decisions/]
    def step(tile: jax.Array, state: State, *, masked: bool) -> State:
        acc, m, l, values_ids, keys_ids = state

        # a. S = Q K^T
        k = tiles.keys(tile)
        tiles.start_values(tile + stages - 1, values_ids)
        scores = products.scores(multiplied, k)

        # b. Online softmax.
        m, l, alpha, p = softmax(scores, logits_of, tile, tiles.scales(tile), m, l, masked=masked)
        acc = rescale(acc, alpha)

        # c. O += P V
        v = tiles.values(tile)
        tiles.start_keys(tile + stages, keys_ids)
        next_ids = tiles.read_ids(tile + stages + 1)
        acc = products.add(acc, p.astype(v.dtype), v)
        return State(acc, m, l, keys_ids, next_ids)

    state = State(
        acc=zeros((num_rows, width)),
        m=ROWS_FIRST.full(num_rows, LOWEST),
        l=ROWS_FIRST.full(num_rows, 0.0),
        values_ids=ids[stages - 1],
        keys_ids=ids[stages],
    )
    masked = functools.partial(step, masked=True)
    if item.window is not None:
        state = lax.fori_loop(item.begin, item.whole_begin, masked, state)
    state = lax.fori_loop(item.whole_begin, item.whole_end, functools.partial(step, masked=False), state)
    acc, m, l, *_ = lax.fori_loop(item.whole_end, item.end, masked, state)

    # 4. Write the rows through Q's SMEM.
    sinks = rows.load_vector(options.sinks, item)
    rows.store_results(refs, item, acc, m, l, sinks, v_scale, q_smem)


def launch(call: Call, config: Config) -> tuple[jax.Array, jax.Array]:
    """Launches a packed call, see `launch_items`."""
    tokens, heads, _ = call.q.shape
    # One program per item: persistent programs are slower. [portable_prefill_h100 of benchmarks/results/decisions/]
    num_entries = max_entries(tokens, call.lengths.shape[0], config.item_tokens)
    config = dataclasses.replace(config, num_programs=num_entries * (heads // config.heads) * config.num_parts)
    return launch_items(
        "portable_prefill",
        functools.partial(_kernel, config=config),
        Refs,
        call,
        config,
        rows=config.rows,
        scratch_types=scratch(config, call.shapes(), (call.options.k_scale, call.options.v_scale)),
        reduction_bytes=0,
    )
