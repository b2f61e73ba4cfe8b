"""Merge of the partitions of paged decode attention, a Mosaic GPU kernel for Hopper (sm_90a).

    m = max_p m_p,    w_p = exp2(m_p - m),    out = sum_p w_p O_p / sum_p w_p l_p

One program makes 64 columns of the head_dim of the finished rows of one sequence and KV head. It takes the partials
through a ring in SMEM, several at a time, so that their latencies overlap; only those of partitions that own a tile
are read. The weights are worked out for 64 partitions at once, and sums are taken in the order of the partitions.

| array | where it lives and how it moves |
|---|---|
| partial sums O_p^T | GMEM to a ring in SMEM, to registers |
| m_p, l_p | GMEM to SMEM, 64 partitions at a time; the weights go back to SMEM |
| O^T | registers, float32; through SMEM, transposed, to GMEM |

Source: Dao et al., Flash-Decoding, 2023 (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _interpret, _rows, _sizes
from pallas_kernels._rows import COLUMNS, LOWEST, ROWS, ROWS_LAST

WEIGHTS = 64  # partitions whose weights are worked out at once: the smallest M, as COLUMNS


@dataclasses.dataclass(frozen=True)
class Config:
    num_partials: int  # as in the decode kernel that wrote them
    cluster: int  # likewise, partitions that one partial is made of
    tile: int  # likewise, tokens
    copied: int  # partials in one copy, a divisor of 64
    num_stages: int  # copies in SMEM at a time


def check_supported(*, num_partials: int, rows: int) -> None:
    """Raises `NotImplementedError` for what this kernel cannot take, with the limit and the value."""
    if rows % 8 or rows > 64:
        raise NotImplementedError(f"the merge takes up to 64 rows, a multiple of 8; got {rows=}.")
    if num_partials < 2:
        raise NotImplementedError(f"the merge takes 2 partials or more; got {num_partials=}.")


def partials_of_copy(rows: int) -> int:
    return max(1, 16 * 1024 // (COLUMNS * rows * 4))  # 8 partials of 8 rows: 16 KiB


def default_config(*, num_partials: int, cluster: int, rows: int, tile: int) -> Config:
    copied = partials_of_copy(rows)
    wanted = -(-num_partials // copied)
    return Config(
        num_partials=num_partials,
        cluster=cluster,
        tile=tile,
        copied=copied,
        num_stages=min(wanted, 128 * 1024 // (copied * COLUMNS * rows * 4)),
    )


@dataclasses.dataclass(frozen=True)
class Refs:
    """`stacks` are seqs * kv_heads. None: not of this call."""

    # Inputs, GMEM. One axis for stacks and partials: with more, a copy has more axes than the copy engine can take.
    partial_out: Any  # f32 [stacks * room, width, rows]
    partial_ml: Any  # f32 [stacks * 2, ml_room, rows]
    lengths: Any  # int32 [seqs]
    # Outputs, GMEM
    out: Any  # [seqs, q_len, heads, width]
    lse: Any  # f32 [seqs, kv_heads, rows]
    # SMEM
    ring_smem: Any  # f32 [stages, copied, 64, rows]
    ml_smem: Any  # f32 [2, 64, rows]
    weights_smem: Any  # f32 [64, rows]
    result_smem: Any  # [rows, 64]
    lse_smem: Any  # f32 [rows]
    # Barriers
    ring_full: Any  # [stages]
    ml_full: Any  # []
    # Options, GMEM
    sliding_window: Any = None  # int32 [1]
    sinks: Any = None  # f32 [kv_heads, rows]


def _kernel(refs: Refs, *, config: Config, q_len: int, group: int) -> None:
    seq, columns, kv_head = lax.axis_index("seq"), lax.axis_index("columns"), lax.axis_index("kv_head")
    stack = seq * refs.lse.shape[1] + kv_head
    room = _rows.room_of_stack(refs.partial_out, refs.partial_ml)
    rows = refs.lse_smem.shape[0]
    copied, stages = config.copied, config.num_stages

    # 1. How many partitions wrote something.
    length = refs.lengths[seq]
    window = None if refs.sliding_window is None else refs.sliding_window[0]
    first_tile, end_tile = _sizes.tile_range(length, window, q_len, config.tile)
    count = jnp.clip(_sizes.ceil_div(end_tile - first_tile, config.cluster), 0, config.num_partials)
    num_copies = _sizes.ceil_div(count, copied)

    def copy_partials(i: jax.Array) -> None:
        stage = lax.rem(i, jnp.int32(stages))
        plgpu.copy_gmem_to_smem(
            refs.partial_out.at[pl.ds(stack * room + i * copied, copied), pl.ds(columns * COLUMNS, COLUMNS)],
            refs.ring_smem.at[stage],
            refs.ring_full.at[stage],
        )

    for i in range(stages):

        @pl.when(i < num_copies)
        def _start(i: int = i) -> None:
            copy_partials(jnp.int32(i))

    # 2. 64 partitions at a time: their weights, then their weighted sum.
    def merge_group(g: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        acc, m, l = carry  # f32 [64, rows], [rows], [rows]
        shape = (WEIGHTS, rows)
        for i in range(2):
            some = pl.ds(g * WEIGHTS, WEIGHTS)
            plgpu.copy_gmem_to_smem(refs.partial_ml.at[2 * stack + i, some], refs.ml_smem.at[i], refs.ml_full)
        plgpu.barrier_wait(refs.ml_full)
        written = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS) + g * WEIGHTS < count
        m_p = plgpu.load(refs.ml_smem.at[0], layout=ROWS, optimized=False)
        l_p = plgpu.load(refs.ml_smem.at[1], layout=ROWS, optimized=False)
        m_p = jnp.where(written, m_p, jnp.full(shape, LOWEST, jnp.float32))
        m_new = jnp.maximum(m, m_p.max(axis=0))
        weights = jnp.exp2(m_p - ROWS_LAST.over(m_new, shape))
        alpha = jnp.exp2(m - m_new)
        l = l * alpha + jnp.where(written, weights * l_p, jnp.zeros_like(l_p)).sum(axis=0)
        acc = acc * ROWS_LAST.over(alpha, acc.shape)
        _rows.store(refs.weights_smem, weights)
        plgpu.commit_smem()

        def merge_copy(i: jax.Array, acc: jax.Array) -> jax.Array:
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(refs.ring_full.at[stage])

            def add(j: jax.Array, acc: jax.Array) -> jax.Array:
                weight = ROWS_LAST.load(refs.weights_smem.at[i * copied - g * WEIGHTS + j])
                part = plgpu.load(refs.ring_smem.at[stage, j], layout=ROWS, optimized=False)
                return acc + ROWS_LAST.over(weight, part.shape) * part

            acc = lax.fori_loop(0, jnp.minimum(copied, count - i * copied), add, acc)

            @pl.when(i + stages < num_copies)
            def _refill() -> None:
                plgpu.commit_smem()  # our reads come before the copy engine's writes
                copy_partials(i + stages)

            return acc

        first_copy = g * (WEIGHTS // copied)
        end_copy = jnp.minimum(first_copy + WEIGHTS // copied, num_copies)
        return lax.fori_loop(first_copy, end_copy, merge_copy, acc), m_new, l

    nothing = _rows.zeros((COLUMNS, rows)), ROWS_LAST.full(rows, LOWEST), ROWS_LAST.full(rows, 0.0)
    acc, m, l = lax.fori_loop(0, _sizes.ceil_div(count, WEIGHTS), merge_group, nothing)

    # 3. Write the finished rows.
    sinks = None if refs.sinks is None else ROWS_LAST.load(refs.sinks.at[kv_head])
    factor, lse = _rows.normalise(m, l, sinks)
    _rows.store(refs.result_smem.T, (acc * ROWS_LAST.over(factor, acc.shape)).astype(refs.result_smem.dtype))
    refs.lse_smem[...] = lse
    plgpu.commit_smem()
    for token in range(q_len):
        plgpu.copy_smem_to_gmem(
            refs.result_smem.at[pl.ds(token * group, group)],
            # [seqs, q_len, heads, width]
            refs.out.at[seq, token, pl.ds(kv_head * group, group), pl.ds(columns * COLUMNS, COLUMNS)],
        )

    @pl.when(columns == 0)
    def _write_lse() -> None:
        plgpu.copy_smem_to_gmem(refs.lse_smem, refs.lse.at[seq, kv_head])  # [seqs, kv_heads, rows]

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(
    partial_out: jax.Array,  # f32 [seqs * kv_heads * room, width, rows], room a multiple of what one copy brings
    partial_ml: jax.Array,  # f32 [seqs * kv_heads * 2, ml_room, rows], ml_room a multiple of WEIGHTS
    lengths: jax.Array,  # int32 [seqs]
    *,
    sliding_window: jax.Array | None,  # int32 [1]
    sinks: jax.Array | None,  # f32 [kv_heads, rows]
    q_len: int,
    heads: int,
    dtype: Any,  # of the output
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, width] in `dtype`, and lse f32 [seqs, kv_heads, rows]."""
    _, width, rows = partial_out.shape
    seqs = lengths.shape[0]
    kv_heads = partial_ml.shape[0] // 2 // seqs
    check_supported(num_partials=config.num_partials, rows=rows)
    inputs = {"partial_out": partial_out, "partial_ml": partial_ml, "lengths": lengths}
    if sliding_window is not None:
        inputs["sliding_window"] = sliding_window
    if sinks is not None:
        inputs["sinks"] = sinks
    names = (*inputs, "out", "lse")
    out_types = (
        jax.ShapeDtypeStruct((seqs, q_len, heads, width), dtype),
        jax.ShapeDtypeStruct((seqs, kv_heads, rows), jnp.float32),
    )

    def paged_merge(*operands: Any, **scratch_refs: Any) -> None:
        refs = Refs(**dict(zip(names, operands, strict=True)), **scratch_refs)
        _kernel(refs, config=config, q_len=q_len, group=heads // kv_heads)

    return _interpret.kernel(
        paged_merge,
        out_type=out_types,
        grid=(seqs, width // COLUMNS, kv_heads),
        grid_names=("seq", "columns", "kv_head"),
        scratch_types=dict(
            ring_smem=plgpu.SMEM((config.num_stages, config.copied, COLUMNS, rows), jnp.float32),
            ml_smem=plgpu.SMEM((2, WEIGHTS, rows), jnp.float32),
            weights_smem=plgpu.SMEM((WEIGHTS, rows), jnp.float32),
            result_smem=plgpu.SMEM((rows, COLUMNS), dtype),
            lse_smem=plgpu.SMEM((rows,), jnp.float32),
            ring_full=plgpu.Barrier(num_barriers=config.num_stages),
            ml_full=plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
