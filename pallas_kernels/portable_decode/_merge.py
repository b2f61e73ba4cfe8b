"""The partitions of sequences that a plan split, and their merge.

    lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p

Each partition of a split sequence is stored, and then counted. The program that counts the last one of a sequence and
KV head merges them, a few at a time, so that their latencies overlap. No program waits for another, and whichever is
the last, the sum is taken in the order of the partitions. Everything here is traced inside the kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import _rows
from pallas_kernels._interpret import interpreted
from pallas_kernels._rows import LOG2E, LOWEST, ROWS, ROWS_LAST, SCALAR
from pallas_kernels._sizes import ceil_div
from pallas_kernels._walk import Partition
from pallas_kernels.portable_config import COLUMNS
from pallas_kernels.portable_decode import _results
from pallas_kernels.portable_decode._refs import Refs

MOST_AT_ONCE = 8  # partitions
LOADED_REGISTERS = 64  # of a thread, that partitions take which are read at once

# Once all threads have stored, the first one counts: it releases what its program stored, and acquires what those
# counted before it did. The second barrier tells all threads whether the number was that of the last.
COUNT = """{
    .reg .pred is_first, is_last;
    .reg .u32 arrived;
    setp.eq.u32 is_first, $2, 0;
    mov.u32 arrived, 0xffffffff;
    barrier.cta.sync 0;
    @is_first atom.acq_rel.gpu.global.add.u32 arrived, [$1], 1;
    setp.eq.u32 is_last, arrived, $3;
    barrier.cta.red.or.pred is_last, 0, is_last;
    selp.u32 $0, 1, 0, is_last;
}"""


def store_and_merge(parts: list[jax.Array], lse: jax.Array, refs: Refs, partition: Partition) -> None:
    """`parts`: f32 [64, rows] each, together O^T of this partition; lse: f32 [rows]."""
    start = refs.partition_starts[partition.seq]
    place = start + partition.index, partition.kv_head
    for c, part in enumerate(parts):
        _rows.store(refs.partial_out.at[(*place, pl.ds(c * COLUMNS, COLUMNS))], part)
    _rows.store(refs.partial_lse.at[place], lse)
    merges = _is_last(refs.arrivals, partition)
    pl.when(merges)(lambda: _merge(refs, partition, start))


def _is_last(arrivals: Any, partition: Partition) -> jax.Array:
    """Counts this partition in `arrivals`, int32 [seqs, kv_heads]. bool []: whether it is the last of its sequence and
    KV head, so that the program may read the partials of all."""
    last = partition.count - 1
    if interpreted():  # one program after the other
        place = partition.seq, pl.ds(partition.kv_head, 1)
        arrived = arrivals[place]
        arrivals[place] = arrived + 1
        return arrived[0] == last

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
    )
    def count(_: Any, ours: Any, last: Any) -> Any:
        operands = utils.memref_ptr(ours), utils.thread_idx(), last.registers.item()
        i32 = ir.IntegerType.get_signless(32)
        is_last = llvm.inline_asm(i32, operands, COUNT, "=r,l,r,r,~{memory}", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(is_last, (), is_signed=True)

    return count(arrivals.at[partition.seq, partition.kv_head], last) == 1


class State(NamedTuple):
    """What is merged so far."""

    acc: tuple[jax.Array, ...]  # f32 [64, rows] for each 64 columns of the head
    m: jax.Array  # f32 [rows], the highest lse so far, in units of log2
    l: jax.Array  # f32 [rows], the sum of the weights


def _merge(refs: Refs, partition: Partition, start: jax.Array) -> None:
    seq, kv_head, end = partition.seq, partition.kv_head, start + partition.count
    width, rows = refs.partial_out.shape[2:]
    chunks = range(width // COLUMNS)
    at_once = max(1, min(MOST_AT_ONCE, LOADED_REGISTERS // (width * rows // 128)))

    def load(place: jax.Array, c: int) -> jax.Array:
        part = refs.partial_out.at[place, kv_head, pl.ds(c * COLUMNS, COLUMNS)]
        return plgpu.load(part, layout=ROWS, optimized=False)

    def add(i: jax.Array, state: State) -> State:
        places = [start + i * at_once + j for j in range(at_once)]
        # Past the end the last one is read again, and has no weight.
        changes = [jnp.where(place < end, 0.0, LOWEST) for place in places]
        places = [jnp.minimum(place, end - 1) for place in places]
        lses = [ROWS_LAST.load(refs.partial_lse.at[place, kv_head]) * LOG2E for place in places]
        lses = [lse + change for lse, change in zip(lses, changes, strict=True)]
        parts = [[load(place, c) for c in chunks] for place in places]
        m = functools.reduce(jnp.maximum, lses, state.m)
        alpha, weights = jnp.exp2(state.m - m), [jnp.exp2(lse - m) for lse in lses]
        acc = [part * ROWS_LAST.over(alpha, part.shape) for part in state.acc]
        for weight, its in zip(weights, parts, strict=True):
            acc = [so_far + part * ROWS_LAST.over(weight, part.shape) for so_far, part in zip(acc, its, strict=True)]
        return State(tuple(acc), m, sum(weights, state.l * alpha))

    nothing = State(
        acc=tuple(_rows.zeros((COLUMNS, rows)) for _ in chunks),
        m=ROWS_LAST.full(rows, LOWEST),
        l=ROWS_LAST.full(rows, 0.0),
    )
    acc, m, l = lax.fori_loop(0, ceil_div(end - start, at_once), add, nothing)
    factor, lse = _rows.normalise(m, l, None if refs.sinks is None else ROWS_LAST.load(refs.sinks.at[kv_head]))
    rows_of_out = [(part * ROWS_LAST.over(factor, part.shape)).astype(refs.out.dtype) for part in acc]
    _results.store(rows_of_out, lse, refs.out, refs.lse, (jnp.int32(0), seq, kv_head), refs.group)
