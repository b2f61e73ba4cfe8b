"""The partitions of sequences that a plan split, and their merge, a kernel of its own.

    lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p

One program merges the rows of one sequence and KV head, a few partitions at a time, so that their latencies overlap.
Where the plan left a sequence whole, its rows are finished: the program leaves at once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._rows import LOG2E, LOWEST, ROWS, ROWS_LAST
from pallas_kernels._sizes import ceil_div
from pallas_kernels._walk import Partition
from pallas_kernels.portable_config import COLUMNS
from pallas_kernels.portable_decode import _results
from pallas_kernels.portable_decode._refs import Refs

MOST_AT_ONCE = 8  # partitions
LOADED_REGISTERS = 64  # of a thread, that partitions take which are read at once


class State(NamedTuple):
    """What is merged so far."""

    acc: tuple[jax.Array, ...]  # f32 [64, rows] for each 64 columns of the head
    m: jax.Array  # f32 [rows], the highest lse so far, in units of log2
    l: jax.Array  # f32 [rows], the sum of the weights


def store_partial(parts: list[jax.Array], lse: jax.Array, refs: Refs, partition: Partition) -> None:
    """`parts`: f32 [64, rows] each, together O^T; lse: f32 [rows]."""
    place = refs.partition_starts[partition.seq] + partition.index, partition.kv_head
    for c, part in enumerate(parts):
        _rows.store(refs.partial_out.at[(*place, pl.ds(c * COLUMNS, COLUMNS))], part)
    _rows.store(refs.partial_lse.at[place], lse)


def _merge(
    # GMEM, as in `Refs`
    out: Any,
    lse: Any,
    partial_out: Any,
    partial_lse: Any,
    partition_starts: Any,
    sinks: Any = None,
    *,
    interpret: Any,
) -> None:
    seq, kv_head = lax.axis_index("seq"), lax.axis_index("kv_head")
    start, end = partition_starts[seq], partition_starts[seq + 1]
    kv_heads, width, rows = partial_out.shape[1:]
    chunks = range(width // COLUMNS)
    at_once = max(1, min(MOST_AT_ONCE, LOADED_REGISTERS // (width * rows // 128)))

    def load(place: jax.Array, c: int) -> jax.Array:
        part = partial_out.at[place, kv_head, pl.ds(c * COLUMNS, COLUMNS)]
        return plgpu.load(part, layout=ROWS, optimized=False)

    def add(i: jax.Array, state: State) -> State:
        places = [start + i * at_once + j for j in range(at_once)]
        # Past the end the last one is read again, and has no weight.
        changes = [jnp.where(place < end, 0.0, LOWEST) for place in places]
        places = [jnp.minimum(place, end - 1) for place in places]
        lses = [ROWS_LAST.load(partial_lse.at[place, kv_head]) * LOG2E for place in places]
        lses = [lse + change for lse, change in zip(lses, changes, strict=True)]
        parts = [[load(place, c) for c in chunks] for place in places]
        m = functools.reduce(jnp.maximum, lses, state.m)
        alpha, weights = jnp.exp2(state.m - m), [jnp.exp2(lse - m) for lse in lses]
        acc = [part * ROWS_LAST.over(alpha, part.shape) for part in state.acc]
        for weight, its in zip(weights, parts, strict=True):
            acc = [so_far + part * ROWS_LAST.over(weight, part.shape) for so_far, part in zip(acc, its, strict=True)]
        return State(tuple(acc), m, sum(weights, state.l * alpha))

    @pl.when(end - start > 1)
    def _split() -> None:
        nothing = State(
            acc=tuple(_rows.zeros((COLUMNS, rows)) for _ in chunks),
            m=ROWS_LAST.full(rows, LOWEST),
            l=ROWS_LAST.full(rows, 0.0),
        )
        acc, m, l = lax.fori_loop(0, ceil_div(end - start, at_once), add, nothing)
        factor, row_lse = _rows.normalise(m, l, None if sinks is None else ROWS_LAST.load(sinks.at[kv_head]))
        rows_of_out = [(part * ROWS_LAST.over(factor, part.shape)).astype(out.dtype) for part in acc]
        group = out.shape[3] // kv_heads
        _results.store(rows_of_out, row_lse, out, lse, (jnp.int32(0), seq, kv_head), group, interpret)


def launch(
    partial_out: jax.Array,  # f32 [total_partitions, kv_heads, width, rows]
    partial_lse: jax.Array,  # f32 [total_partitions, kv_heads, rows]
    partition_starts: jax.Array,  # int32 [seqs + 1]
    *,
    finished: tuple[jax.Array, jax.Array],  # the results, but for those of split sequences
    sinks: jax.Array | None,  # f32 [kv_heads, rows]
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns `finished`, out [1, seqs, q_len, heads, head_dim] and lse f32 [1, seqs, q_len, heads], with all rows."""
    inputs = partial_out, partial_lse, partition_starts, *(() if sinks is None else (sinks,))

    def portable_merge(*operands: Any) -> None:
        _merge(*operands, interpret=interpret)

    merge = plgpu.kernel(
        portable_merge,
        out_type=(),
        grid=(partition_starts.shape[0] - 1, partial_out.shape[1]),
        grid_names=("seq", "kv_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    # Refs are how a kernel writes into its operands.
    return pl.run_state(lambda results: merge(*results, *inputs))(finished)
