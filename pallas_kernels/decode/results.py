"""The results of a program: finished rows, or partial sums if several programs share a sequence.

    m = max_p m_p,    w_p = exp2(m_p - m),    l = sum_p w_p l_p,    acc = sum_p w_p acc_p

Each program stores its sums and then increments a counter. The last program to do so merges all sums: a few at a time,
so that their latencies overlap, and in the order of the partitions, so that the bits do not depend on which program is
last. No program waits for another. All functions except `partial_types` are traced inside the kernel.

Source: Dao et al., Flash-Decoding, 2023 (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, below, constant, integer, pointer, product, quotient, remainder, scalar_of
from pallas_kernels.common.partition_plan import PartitionPlan
from pallas_kernels.common.rows import LOWEST, ROWS, ROWS_LAST, SCALAR, full, store
from pallas_kernels.common.sizes import COLUMNS, ceil_div
from pallas_kernels.decode.walk import Partition

MOST_AT_ONCE = 8  # partials that are read together
# Registers of a thread for partials that are read together. With 64, four programs no longer fit on an SM.
LOADED_REGISTERS = 48

# After a barrier, thread 0 increments the counter. This releases the stores of its program and acquires the stores of
# all programs counted before. A second barrier broadcasts whether the count is complete. Barrier 1 is the one that
# Mosaic uses for warpgroup 0.
COUNT = """{
    .reg .pred is_first, is_last;
    .reg .u32 arrived;
    setp.eq.u32 is_first, $2, 0;
    mov.u32 arrived, 0xffffffff;
    barrier.cta.sync 1, 128;
    @is_first atom.acq_rel.gpu.global.add.u32 arrived, [$1], 1;
    setp.eq.u32 is_last, arrived, $3;
    barrier.cta.red.or.pred is_last, 1, 128, is_last;
    selp.u32 $0, 1, 0, is_last;
}"""


class Sums(NamedTuple):
    """The sums of a program for its rows, or the merged sums of several programs."""

    acc: tuple[jax.Array, ...]  # O^T, not yet divided by l: f32 matrices of the same shape
    m: jax.Array  # f32 [rows], the highest logit, in units of log2
    l: jax.Array  # f32 [rows], the sum of the weights


def partial_types(
    plan: PartitionPlan | None, *, seqs: int, num_partials: int, kv_heads: int, width: int, rows: int
) -> dict[str, Any]:
    """The arrays for partials in GMEM, by their names in `Refs`; empty if every sequence has one partial."""
    if plan is None and num_partials == 1:
        return {}
    count = seqs * num_partials if plan is None else plan.total_partitions
    return {
        "partial_acc": jax.ShapeDtypeStruct((count, kv_heads, width, rows), jnp.float32),
        "partial_ml": jax.ShapeDtypeStruct((count, kv_heads, 1, 2, rows), jnp.float32),
        "arrivals": jax.ShapeDtypeStruct((seqs, kv_heads, 1), jnp.int32),  # zeros at first
    }


@dataclasses.dataclass(frozen=True)
class Partials:
    """The partials of one sequence and KV head."""

    refs: Any  # with the arrays of `partial_types`
    partition: Partition

    def merge(self, sums: Sums, finish: Callable[[Sums], None]) -> None:
        """Stores the sums of this program. If it is the last one, calls `finish` with the merged sums."""
        index = self.partition.first_partial + self.partition.index
        for c, part in enumerate(sums.acc):
            store(self._acc(index, c, part.shape[0]), part)
        for i, vector in enumerate((sums.m, sums.l)):
            store(self._ml(index, i), vector)
        shapes = [part.shape for part in sums.acc]
        pl.when(self._is_last())(lambda: finish(self._merged(shapes, sums.m.shape[0])))

    def _acc(self, index: jax.Array, c: int, size: int) -> Any:
        return self.refs.partial_acc.at[index, self.partition.kv_head, pl.ds(c * size, size)]

    def _ml(self, index: jax.Array, i: int) -> Any:
        return self.refs.partial_ml.at[index, self.partition.kv_head, 0, i]

    def _is_last_in_turn(self) -> jax.Array:  # in interpret mode programs run one after the other
        counter = self.partition.seq, self.partition.kv_head, pl.ds(0, 1)
        arrived = self.refs.arrivals[counter]
        self.refs.arrivals[counter] = arrived + 1
        return arrived[0] == self.partition.count - 1

    @interpreted_by(_is_last_in_turn)
    def _is_last(self) -> jax.Array:
        """Counts this program. Returns bool []: whether all partials of the sequence are stored."""
        seq, kv_head, last = self.partition.seq, self.partition.kv_head, self.partition.count - 1

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR),
            return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
        )
        def count(_: Any, ours: Any, last: Any) -> Any:
            operands = utils.memref_ptr(ours), utils.thread_idx(), scalar_of(last)
            is_last = llvm.inline_asm(integer(), operands, COUNT, "=r,l,r,r,~{memory}", has_side_effects=True)
            return fragmented_array.FragmentedArray.splat(is_last, (), is_signed=True)

        return count(self.refs.arrivals.at[seq, kv_head, 0], jnp.int32(last)) == 1

    def _merged(self, shapes: list[tuple[int, ...]], rows: int) -> Sums:
        """The merged sums of all partials."""
        registers = sum(size * columns for size, columns in shapes) // 128
        at_once = max(1, min(MOST_AT_ONCE, LOADED_REGISTERS // registers))
        end = self.partition.first_partial + self.partition.count

        def load(ref: Any, layout: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def over(weight: jax.Array, part: jax.Array) -> jax.Array:
            return plgpu.layout_cast(ROWS_LAST.over(weight, part.shape), ROWS)

        def plus(so_far: jax.Array, part: jax.Array, weight: jax.Array) -> jax.Array:
            factor = over(weight, part)
            return so_far + jnp.where(factor != 0.0, part * factor, jnp.zeros_like(part))  # 0 x Inf is NaN

        def add(i: jax.Array, so_far: Sums) -> Sums:
            indices = [self.partition.first_partial + i * at_once + j for j in range(at_once)]
            # Past the end the last partial is read again, with weight 0.
            changes = [jnp.where(index < end, 0.0, LOWEST) for index in indices]
            indices = [jnp.minimum(index, end - 1) for index in indices]
            m_parts, l_parts = ([load(self._ml(index, j), ROWS_LAST.vector) for index in indices] for j in range(2))
            acc_parts = [
                [load(self._acc(index, c, shape[0]), ROWS) for c, shape in enumerate(shapes)] for index in indices
            ]
            m_parts = [part + change for part, change in zip(m_parts, changes, strict=True)]
            m = functools.reduce(jnp.maximum, m_parts, so_far.m)
            alpha, weights = jnp.exp2(so_far.m - m), [jnp.exp2(part - m) for part in m_parts]
            l, acc = so_far.l * alpha, [part * over(alpha, part) for part in so_far.acc]
            for weight, l_part, its in zip(weights, l_parts, acc_parts, strict=True):
                l += weight * l_part
                acc = [plus(a, part, weight) for a, part in zip(acc, its, strict=True)]
            return Sums(tuple(acc), m, l)

        nothing = Sums(
            acc=tuple(full(shape, 0.0, ROWS) for shape in shapes),
            m=ROWS_LAST.full(rows, LOWEST),
            l=ROWS_LAST.full(rows, 0.0),
        )
        return lax.fori_loop(0, ceil_div(jnp.int32(self.partition.count), at_once), add, nothing)


def _store_at_once(
    parts: Sequence[jax.Array], lse: jax.Array, out: Any, lse_out: Any, seq: jax.Array, kv_head: jax.Array, group: int
) -> None:
    _, q_len, _, head_dim = out.shape
    heads = pl.ds(kv_head * group, group)
    for token in range(q_len):
        rows = slice(token * group, (token + 1) * group)
        lse_out[seq, token, heads] = lse[rows]
        for c, part in enumerate(parts):
            size = min(COLUMNS, head_dim - c * COLUMNS)
            out[seq, token, heads, pl.ds(c * COLUMNS, size)] = part.T[rows, :size]


@interpreted_by(_store_at_once)
def store_rows(
    parts: Sequence[jax.Array],  # [64, rows] each, together O^T, in the dtype of `out_gmem`
    lse: jax.Array,  # f32 [rows]
    out_gmem: Any,  # [seqs, q_len, heads, head_dim]
    lse_gmem: Any,  # f32 [seqs, q_len, heads]
    seq: jax.Array,
    kv_head: jax.Array,
    group: int,
) -> None:
    q_len = out_gmem.shape[1]

    def put(ref: Any, arrays: Sequence[Any], scalars: Sequence[Any]) -> None:
        start = pointer(ref, 64)
        ref_type = ir.MemRefType(ref.type)
        _, _, heads, *rest = ref_type.shape
        width = rest[0] if rest else 1
        bits = utils.bitwidth(ref_type.element_type)
        seq, kv_head = (arith.index_cast(ir.IndexType.get(), scalar_of(x)) for x in scalars)
        head = product(kv_head, group)
        for c, array in enumerate(arrays):

            def put_one(value: Any, at: tuple[Any, ...], c: int = c) -> None:
                *column, row = at
                token = arith.addi(product(seq, q_len), quotient(row, group))
                number = arith.addi(product(token, heads), arith.addi(head, remainder(row, group)))
                is_there = below(row, q_len * group)
                if column:
                    its_column = arith.addi(column[0], constant("index", c * COLUMNS))
                    number = arith.addi(product(number, width), its_column)
                    is_there = arith.andi(is_there, below(its_column, width))
                byte = arith.index_cast(integer(64), product(number, bits // 8))
                utils.inline_ptx(
                    f"st.global.b{bits} [$0], $1;",
                    arith.addi(start, byte),
                    utils.bitcast(value, integer(bits)),
                    predicate=is_there,
                    has_side_effects=True,
                )

            array.foreach(put_one)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), ROWS_LAST.vector, *[ROWS] * len(parts), SCALAR, SCALAR)
    )
    def put_all(_: Any, out: Any, lse_out: Any, lse: Any, *operands: Any) -> None:
        put(lse_out, [lse], operands[-2:])
        put(out, operands[:-2], operands[-2:])

    put_all(out_gmem, lse_gmem, lse, *parts, seq, kv_head)
