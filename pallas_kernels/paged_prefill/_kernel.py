"""The body of the prefill kernel, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows, _sizes
from pallas_kernels._fetch import Ring, rows_of_copy
from pallas_kernels._rows import COLUMNS
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.paged_prefill import _merge
from pallas_kernels.paged_prefill._fetch import Fetcher
from pallas_kernels.paged_prefill._item import Items
from pallas_kernels.paged_prefill._logits import Logits
from pallas_kernels.paged_prefill._rows_of_item import WG_ROWS, RowsOfItem
from pallas_kernels.paged_prefill._steps import Steps
from pallas_kernels.paged_prefill._work_list import WorkList
from pallas_kernels.prefill_config import ROWS, Config

Numbers = tuple[jax.Array, ...]  # of an item, see `Items.read`


def _kernel(
    refs: dict[str, Any],  # inputs, outputs and scratch, by name; an option that was not given is not among them
    *,
    config: Config,
    group: int,
    transforms: tuple[Any, ...],  # of a matrix in SMEM
    interpret: Any,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    window = refs["sliding_window"][0] if "sliding_window" in refs else None
    items = Items(
        refs["entries"],
        refs["num_entries"],
        lax.axis_index("program"),
        config,
        tokens=refs["q"].shape[0],
        kv_heads=refs["k_cache"].shape[2],
        group=group,
        window=window,
    )
    keys = Ring(refs["k_cache"], refs["k_smem"], refs["k_full"], refs["k_free"])
    values = Ring(refs["v_cache"], refs["v_smem"], refs["v_full"], refs["v_free"])

    @pl.when(warpgroup == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(config.registers[1], action="decrease")
        Fetcher(items, keys, values, refs["block_tables"], config).run()

    @pl.when(warpgroup < 2)
    def _compute() -> None:
        plgpu.set_max_registers(config.registers[0], action="increase")
        first_row = warpgroup * WG_ROWS
        rows = RowsOfItem(config, first_row, transforms, interpret)
        q_smem, lse_smem = refs["q_smem"].at[warpgroup], refs["lse_smem"].at[warpgroup]  # [64, width], f32 [64]
        o_smem = refs["o_smem"].at[warpgroup] if "o_smem" in refs else q_smem
        scale = refs["scale"][0]
        cap = refs["logits_soft_cap"][0] if "logits_soft_cap" in refs else None
        count = items.count()

        def start_load(numbers: Numbers) -> None:
            rows.start_load(refs["q"], items.item(numbers), q_smem, refs["q_full"].at[warpgroup])

        def work(i: jax.Array, carry: tuple[jax.Array, Numbers]) -> tuple[jax.Array, Numbers]:
            turn, numbers = carry
            item = items.item(numbers)
            next_numbers = items.read(jnp.minimum(i + 1, count - 1))

            # 1. Q is there.
            rows.finish_load()
            pl.when(scale < 0)(lambda: _negate(q_smem))

            # 2. All tiles.
            of_item = functools.partial(_of_item, lax.div(item.head, jnp.int32(config.heads)), first_row)
            slopes = of_item(refs["alibi_slopes"]) if "alibi_slopes" in refs else None
            sinks = of_item(refs["sinks"]) if "sinks" in refs else None
            acc, m, l = Steps(
                item,
                Logits(item, config.item_tokens, first_row, jnp.abs(scale), cap, slopes),
                keys,
                values,
                turn,
                q_smem,
                refs["zeroed"],
                warpgroup,
                config.num_stages,
                transforms,
                interpret,
            ).run()

            # 3. The next item's Q comes while O and lse of this one leave.
            if config.separate_output:
                start_load(next_numbers)
            factor, lse = _rows.normalise(m, l, sinks)
            o = acc * _rows.over_rows(factor, acc.shape, 0)
            if config.num_parts > 1:
                rows.store_float32(o, refs["out"], item, o_smem)
            else:
                rows.store(o.astype(q_smem.dtype), refs["out"], item, o_smem)
            rows.store_vector(lse, refs["lse"], item, lse_smem)
            if not config.separate_output:
                plgpu.commit_smem()  # all threads have read their part of O
                start_load(next_numbers)
            return turn + item.end - item.begin, next_numbers

        @pl.when(count > 0)
        def _work() -> None:
            numbers = items.read(jnp.int32(0))
            start_load(numbers)
            lax.fori_loop(0, count, work, (jnp.int32(0), numbers))
            rows.finish_load()


def _negate(q_smem: Any) -> None:
    """With a scale below zero: so that the highest product is that of the highest logit."""
    for c in range(q_smem.shape[1] // COLUMNS):
        part = q_smem.at[:, pl.ds(c * COLUMNS, COLUMNS)]
        q = plgpu.load(part, layout=_rows.ROWS)
        part[...] = q * jnp.full_like(q, -1)
    plgpu.commit_smem()


def _of_item(place: jax.Array, first_row: jax.Array, by_row: Any) -> jax.Array:
    """f32 [64], those of a warpgroup, of GMEM f32 [heads / heads of an item, 128]."""
    return _rows.load_rows(by_row.at[place, pl.ds(first_row, WG_ROWS)], rows_axis=0)


def launch(
    q: jax.Array,  # [tokens, heads, head_dim]
    k_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    block_tables: jax.Array,  # int32 [seqs, max_blocks]
    work: WorkList,
    options: AttentionOptions,  # without scales of the cache
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [tokens, heads, head_dim] in q's dtype, and lse f32 [tokens, heads]."""
    tokens, heads, head_dim = q.shape
    parts, in_parts = config.num_parts, config.num_parts > 1
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    width = _sizes.round_up(head_dim, 64)
    columns = next(n for n in (64, 32, 16) if head_dim % n == 0 or head_dim < n)
    matrix = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))  # type: ignore[abstract]

    def by_row(by_head: jax.Array) -> jax.Array:
        by_item = jnp.repeat(by_head.reshape(-1, config.heads), config.item_tokens, axis=1)
        return jnp.pad(by_item, ((0, 0), (0, ROWS - by_item.shape[1])))

    named = {
        "sliding_window": None if options.sliding_window is None else options.sliding_window.reshape(1),
        "logits_soft_cap": None if options.logits_soft_cap is None else options.logits_soft_cap.reshape(1),
        "alibi_slopes": None if options.alibi_slopes is None else by_row(options.alibi_slopes),
        "sinks": None if options.sinks is None or in_parts else by_row(options.sinks),
    }
    inputs = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": block_tables,
        "entries": work.entries,
        "num_entries": work.num_entries,
        "scale": options.scale.reshape(1),
        **{name: value for name, value in named.items() if value is not None},
    }
    out_types = {
        "out": jax.ShapeDtypeStruct((parts * tokens, heads, head_dim), jnp.float32 if in_parts else q.dtype),
        "lse": jax.ShapeDtypeStruct((parts * tokens, heads), jnp.float32),
    }
    copies = config.tile // rows_of_copy(block_size, config.tile)
    ring = functools.partial(plgpu.SMEM, (config.num_stages, config.tile, width), k_cache.dtype, transforms=matrix)
    stages = config.num_stages
    output: dict[str, Any] = {}
    if in_parts and interpret:
        output["o_smem"] = plgpu.SMEM((2, WG_ROWS, width), jnp.float32)
    elif config.separate_output and not in_parts:
        output["o_smem"] = plgpu.SMEM((2, WG_ROWS, width), q.dtype, transforms=matrix)
    scratch: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((2, WG_ROWS, width), q.dtype, transforms=matrix),
        **output,
        lse_smem=plgpu.SMEM((2, WG_ROWS), jnp.float32),
        k_smem=ring(),
        v_smem=ring(),
        q_full=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        zeroed=plgpu.Barrier(num_arrivals=2),
    )
    names = (*inputs, *out_types)

    def paged_prefill(*operands: Any, **scratch_refs: Any) -> None:
        refs = dict(zip(names, operands, strict=True)) | scratch_refs
        _kernel(refs, config=config, group=group, transforms=matrix, interpret=interpret)

    out, lse = plgpu.kernel(
        paged_prefill,
        out_type=tuple(out_types.values()),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs.values())
    if not in_parts:
        return out, lse
    out, lse = _merge.merge(out.reshape(parts, *q.shape), lse.reshape(parts, tokens, heads), options.sinks)
    return out.astype(q.dtype), lse
