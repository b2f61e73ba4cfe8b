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
from pallas_kernels.common.interpret import two_views
from pallas_kernels.common.options import AttentionOptions
from pallas_kernels.common.rescale import rescale
from pallas_kernels.common.rows import LOWEST, ROWS_FIRST, normalise, zeros
from pallas_kernels.common.scales import of_head, ring_types
from pallas_kernels.common.sizes import is_8bit, round_up
from pallas_kernels.prefill.item import Items
from pallas_kernels.prefill.launch import Form
from pallas_kernels.prefill.logits import Logits
from pallas_kernels.prefill.portable import products
from pallas_kernels.prefill.portable.config import COLUMNS, Config
from pallas_kernels.prefill.portable.tiles import Ids, Tiles, matrix
from pallas_kernels.prefill.rows_of_item import RowsOfItem
from pallas_kernels.prefill.softmax import softmax
from pallas_kernels.prefill.widener import q_as_float16
from pallas_kernels.prefill.work_list import WorkList


@dataclasses.dataclass(frozen=True)
class Refs:
    """`width` is head_dim, rounded up to a multiple of 64; `items` are heads / heads of an item. None: not of this
    call."""

    # Inputs, GMEM
    q: Any  # [tokens, heads, head_dim]
    k_cache: Any  # [blocks, block_size, kv_heads, head_dim]
    v_cache: Any  # as k_cache
    block_tables: Any  # int32 [seqs, max_blocks]
    entries: Any  # int32 [max_entries, fields], see `prefill.work_list`
    num_entries: Any  # int32 [1]
    scale: Any  # f32 [1]
    # Outputs, GMEM
    out: Any  # [parts * tokens, heads, head_dim]; float32 of several parts
    lse: Any  # f32 [parts * tokens, heads]
    # SMEM
    q_smem: Any  # [rows, width]
    k_smem: Any  # [stages, tile, width]
    v_smem: Any  # as k_smem
    # Options, GMEM
    k_scale: Any = None  # f32 [1], [kv_heads] or [blocks, block_size, kv_heads], of an 8-bit cache
    v_scale: Any = None  # as k_scale
    sliding_window: Any = None  # int32 [1]
    logits_soft_cap: Any = None  # f32 [1]
    alibi_slopes: Any = None  # f32 [items, rows], of the rows of an item
    sinks: Any = None  # as alibi_slopes; of several parts left to the merge
    # SMEM of an 8-bit cache
    wide_smem: Any = None  # float16 [tile, width], the keys or the values of a tile
    k_scales_smem: Any = None  # f32 [stages, tile], scales of tokens
    v_scales_smem: Any = None  # as k_scales_smem


def scratch(
    config: Config,
    *,
    width: int,
    dtype: Any,  # of q
    cache_dtype: Any,
    scales: tuple[Any, Any],  # k_scale and v_scale
) -> dict[str, Any]:
    """SMEM, by the names of `Refs`."""
    rows, stages, tile = config.rows, config.num_stages, config.tile_tokens

    def smem(shape: tuple[int, ...], dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=matrix(dtype))

    arrays: dict[str, Any] = {
        "q_smem": smem((rows, width), dtype),
        "k_smem": smem((stages, tile, width), cache_dtype),
        "v_smem": smem((stages, tile, width), cache_dtype),
    }
    if is_8bit(cache_dtype):
        arrays["wide_smem"] = smem((tile, width), jnp.float16)
        arrays |= ring_types(dict(zip("kv", scales, strict=True)), stages=stages, tile=tile)
        if dtype != jnp.float16:
            arrays["q_smem"] = two_views(arrays["q_smem"], smem((rows, width), jnp.float16))
    return arrays


class State(NamedTuple):
    """What a step hands on."""

    acc: jax.Array  # O, f32 [rows, width]
    m: jax.Array  # f32 [rows], close to the highest logit so far, in units of log2
    l: jax.Array  # f32 [rows], the sum of the weights
    values_ids: Ids  # of the next tile whose values are asked for
    keys_ids: Ids  # of the next tile whose keys are


def _kernel(refs: Refs, *, config: Config, group: int, transforms: tuple[Any, ...]) -> None:
    items = Items(
        refs.entries,
        refs.num_entries,
        lax.axis_index("program"),
        config,
        tokens=refs.q.shape[0],
        block_size=refs.k_cache.shape[1],
        kv_heads=refs.k_cache.shape[2],
        group=group,
        window=None if refs.sliding_window is None else refs.sliding_window[0],
    )
    # A program without an item is one that the work list has room for.
    pl.when(items.count() > 0)(lambda: _attend(refs, items, config, transforms))


def _attend(refs: Refs, items: Items, config: Config, transforms: tuple[Any, ...]) -> None:
    item = items.item(items.read(jnp.int32(0)))
    q_smem, multiplied = _q_views(refs)
    (num_rows, width), stages, first_row = q_smem.shape, config.num_stages, jnp.int32(0)
    rows = RowsOfItem(config, first_row, transforms, commit=barrier)
    tiles = Tiles(refs, item, config)

    # 1. Q and the first tiles are on their way.
    rows.start_load(refs.q, item, q_smem)
    ids = [tiles.read_ids(item.begin + i) for i in range(stages + 1)]
    for i in range(stages):
        tiles.start_keys(item.begin + i, ids[i])
        if i < stages - 1:
            tiles.start_values(item.begin + i, ids[i])

    # 2. Q is there, and what makes logits of products.
    k_scale, v_scale = (of_head(scale, item.kv_head) for scale in (refs.k_scale, refs.v_scale))
    scale = refs.scale[0] if k_scale is None else refs.scale[0] * k_scale
    tiles.wait_query()
    pl.when(scale < 0)(lambda: rows.negate(q_smem))
    scale = jnp.abs(scale)
    if multiplied.dtype != q_smem.dtype:
        scale = scale * q_as_float16(q_smem, multiplied, barrier)
    share = lax.div(item.head, jnp.int32(config.heads))

    def of_rows(by_row: Any | None) -> jax.Array | None:
        return None if by_row is None else ROWS_FIRST.load(by_row.at[share])

    logits_of = Logits(
        item,
        config.item_tokens,
        first_row,
        scale=scale,
        cap=None if refs.logits_soft_cap is None else refs.logits_soft_cap[0],
        slopes=of_rows(refs.alibi_slopes),
    )

    # 3. The tiles, one after the other. Those that need a mask are masked in loops of their own: a branch in one loop
    # takes longer. [portable_tiles_h100 of benchmarks/results/decisions/]
    def step(tile: jax.Array, state: State, *, masked: bool) -> State:
        acc, m, l, values_ids, keys_ids = state

        # a. S = Q K^T
        k = tiles.keys(tile)
        tiles.start_values(tile + stages - 1, values_ids)
        scores = products.scores(multiplied, k, transforms)

        # b. Online softmax.
        m, l, alpha, p = softmax(scores, logits_of, tile, tiles.scales(tile), m, l, masked=masked)
        acc = rescale(acc, alpha)

        # c. O += P V
        v = tiles.values(tile)
        tiles.start_keys(tile + stages, keys_ids)
        next_ids = tiles.read_ids(tile + stages + 1)
        acc = products.add(acc, p.astype(v.dtype), v, transforms)
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

    # 4. The rows, by way of Q's SMEM.
    factor, lse = normalise(m, l, of_rows(refs.sinks))
    if v_scale is not None:
        factor = factor * v_scale
    o = acc * ROWS_FIRST.over(factor, acc.shape)
    if config.num_parts > 1:
        rows.store_float32(o, refs.out, item)
    else:
        rows.store(o.astype(q_smem.dtype), refs.out, item, q_smem)
    rows.store_vector(lse, refs.lse, item)


def _q_views(refs: Refs) -> tuple[Any, Any]:
    """SMEM [rows, width]: as it is loaded, and as it is multiplied, which differ for bfloat16 and an 8-bit cache."""
    if refs.wide_smem is None or refs.q.dtype == jnp.float16:
        return refs.q_smem, refs.q_smem
    q, q_float16 = refs.q_smem
    return q, q_float16


def form(q: jax.Array, k_cache: jax.Array, work: WorkList, options: AttentionOptions, config: Config) -> Form:
    """As it computes a call, see `prefill.launch`."""
    _, heads, head_dim = q.shape
    # A program an item: programs that stay are slower. [portable_prefill_h100 of benchmarks/results/decisions/]
    num_programs = work.entries.shape[0] * (heads // config.heads) * config.num_parts
    config = dataclasses.replace(config, num_programs=num_programs)
    width, scales = round_up(head_dim, COLUMNS), (options.k_scale, options.v_scale)
    scratch_types = scratch(config, width=width, dtype=q.dtype, cache_dtype=k_cache.dtype, scales=scales)
    return Form(
        name="portable_prefill",
        body=functools.partial(_kernel, config=config, group=heads // k_cache.shape[2], transforms=matrix(q.dtype)),
        refs=Refs,
        rows=config.rows,
        num_programs=num_programs,
        how=dict(scratch_types=scratch_types, reduction_bytes=0),
    )
