"""The rows of an item in GMEM: reading Q, writing O and lse.

Row r of an item is head r // item_tokens, token r % item_tokens. The tokens of an item may begin at any row of q, but
the copy engine only copies tiles of 8 rows that begin at a multiple of 8. So the threads copy rows, 16 bytes at a time.
Rows past the item's last token are neither read nor written.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

from pallas_kernels.common import cp_async
from pallas_kernels.common.interface import given
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import (
    arith,
    below,
    chunks,
    i32,
    integer,
    is_less,
    numbers_of,
    pointer,
    product,
    quotient,
    scalar_of,
    scf,
    total,
    wide,
)
from pallas_kernels.common.rows import ROWS, ROWS_FIRST
from pallas_kernels.common.scales import scaled
from pallas_kernels.common.sizes import COLUMNS, div, zero_unless
from pallas_kernels.common.softmax import normalise
from pallas_kernels.prefill.config import Cut
from pallas_kernels.prefill.item import Item
from pallas_kernels.prefill.refs import Arrays
from pallas_kernels.prefill.widener import q_as_float16

SPLAT = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class RowsOfItem:
    """The rows of an item that one warpgroup computes."""

    config: Cut
    first_row: jax.Array | int  # first row in the item
    count: int
    transforms: tuple[Any, ...]  # transforms of matrices in SMEM
    commit: Callable[[], None] = plgpu.commit_smem  # makes writes to SMEM visible to all threads

    # For interpret mode.
    def _load_at_once(self, q: Any, item: Item, q_smem: Any) -> None:
        head, token, is_there = self._locate(item, jnp.arange(q_smem.shape[0], dtype=jnp.int32))
        rows = q[...][jnp.where(is_there, item.q_row + token, 0), jnp.where(is_there, item.head + head, 0)]
        rows = zero_unless(is_there[:, None], rows)
        q_smem[...] = jnp.pad(rows, ((0, 0), (0, q_smem.shape[1] - rows.shape[1])))

    def _store_one_by_one(self, x: jax.Array, out: Any, item: Item, _: Any = None, start: int = 0) -> None:
        columns = [pl.ds(start, min(n, m - start)) for n, m in zip(x.shape[1:], out.shape[2:], strict=True)]

        def store_row(i: jax.Array, _: None) -> None:
            head, token, is_there = self._locate(item, i)

            @pl.when(is_there)
            def _store() -> None:
                row = lax.dynamic_index_in_dim(x, i, keepdims=False)
                of_array = row[tuple(slice(its.size) for its in columns)]
                out[(item.out_row + token, item.head + head, *columns)] = of_array

        lax.fori_loop(0, x.shape[0], store_row, None)

    def _locate(self, item: Item, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = jnp.int32(self.config.item_tokens)
        head, token = lax.div(self.first_row + row, tokens), lax.rem(self.first_row + row, tokens)
        return head, token, jnp.logical_and(head < self.config.heads, token < item.num_tokens)

    @interpreted_by(_load_at_once)
    def start_load(self, q: Any, item: Item, q_smem: Any) -> None:
        """Starts copying Q from GMEM [tokens, heads, head_dim] to `q_smem` [rows, width]. Columns past head_dim and
        rows past the item's last token become zero."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(self.transforms), *[SPLAT] * 4))
        def load(_: Any, q: Any, q_smem: Any, *scalars: Any) -> None:
            for chunk in _chunks(q, q_smem, _ItemRows.of(self.config, *scalars)):
                cp_async.copy(chunk.gmem, chunk.smem, chunk.is_there)

        load(q, q_smem, *self._scalars(item, item.q_row))
        cp_async.commit()

    def finish_load(self) -> None:
        cp_async.wait_own(0)
        self.commit()

    def load_vector(self, by_row: Any | None, item: Item) -> jax.Array | None:
        """Loads f32 [rows] from GMEM f32 [heads / heads of an item, rows]; None for None."""
        index = div(item.head, self.config.heads)
        return given(by_row, lambda ref: ROWS_FIRST.load(ref.at[index, pl.ds(self.first_row, self.count)]))

    def prepare_query(self, q_smem: Any, multiplied: Any, scale: jax.Array) -> jax.Array:
        """Converts Q in SMEM to `multiplied`. Returns the factor from its products to logits, f32 [] or [rows]."""
        pl.when(scale < 0)(lambda: self._negate(q_smem))
        scale = jnp.abs(scale)
        if multiplied.dtype == q_smem.dtype:
            return scale
        return scale * q_as_float16(q_smem, multiplied, self.commit)

    def store_results(
        self,
        refs: Arrays,
        item: Item,
        acc: jax.Array,  # f32 [rows, width], O, not yet divided by l
        m: jax.Array,  # f32 [rows], in units of log2
        l: jax.Array,  # f32 [rows]
        sinks: jax.Array | None,  # f32 [rows]
        v_scale: jax.Array | None,  # f32 []
        o_smem: Any,  # [rows, columns]
    ) -> None:
        factor, lse = normalise(m, l, sinks)
        o = acc * ROWS_FIRST.over(scaled(factor, v_scale), acc.shape)
        if self.config.num_parts > 1:
            self.store_float32(o, refs.out, item)
        else:
            self.store(o.astype(o_smem.dtype), refs.out, item, o_smem)
        self.store_vector(lse, refs.lse, item)

    def _negate(self, q_smem: Any) -> None:
        """Negates Q, for a negative scale, so that the highest product belongs to the highest logit."""
        for c in range(q_smem.shape[1] // COLUMNS):
            part = q_smem.at[:, pl.ds(c * COLUMNS, COLUMNS)]
            q = plgpu.load(part, layout=ROWS)
            part[...] = q * jnp.full_like(q, -1)
        self.commit()

    def store(self, x: jax.Array, out: Any, item: Item, o_smem: Any) -> None:
        """Stores x [rows, width] to out, GMEM [tokens, heads, head_dim], through o_smem [rows, columns]."""
        columns = o_smem.shape[1]
        for start in range(0, x.shape[1], columns):
            if start:
                self.commit()  # all threads have read the previous columns
            part = lax.slice(x, (0, start), (x.shape[0], start + columns))
            self._store_columns(part, out, item, o_smem, start)

    @interpreted_by(_store_one_by_one)
    def _store_columns(self, x: jax.Array, out: Any, item: Item, o_smem: Any, start: int) -> None:
        o_smem[...] = x
        self.commit()

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(self.transforms), *[SPLAT] * 4))
        def store(_: Any, out: Any, o_smem: Any, *scalars: Any) -> None:
            copy = "ld.shared.v4.b32 {a, b, c, d}, [$0]; @p st.global.v4.b32 [$1], {a, b, c, d};"
            where = _ItemRows.of(self.config, *scalars)
            for chunk in _chunks(out, o_smem, where, start):
                is_there = arith.extui(integer(), chunk.is_there)
                _asm(
                    "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $2, 0; " + copy + " }",
                    "r,l,r",
                    chunk.smem,
                    chunk.gmem,
                    is_there,
                )

        store(out, o_smem, *self._scalars(item, item.out_row))

    @interpreted_by(_store_one_by_one)
    def store_float32(self, x: jax.Array, out: Any, item: Item) -> None:
        """Stores x f32 [rows, width] to out, GMEM f32 [tokens, heads, head_dim], without SMEM."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS, *[SPLAT] * 4))
        def store(_: Any, out: Any, x: Any, *scalars: Any) -> None:
            where = _ItemRows.of(self.config, *scalars)
            head_dim, int32 = ir.MemRefType(out.type).shape[-1], integer()
            for at, pair in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
                row, column = (arith.index_cast(int32, i) for i in at)
                _asm(
                    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.f32 [$0], {$1, $2}; }",
                    "l,f,f,r",
                    where.address(out, row, column, num_bytes=4),
                    *numbers_of(pair),
                    arith.extui(int32, arith.andi(where.has(row), below(column, head_dim))),
                )

        store(out, x, *self._scalars(item, item.out_row))

    @interpreted_by(_store_one_by_one)
    def store_vector(self, x: jax.Array, out: Any, item: Item) -> None:
        """Stores x f32 [rows] to out, GMEM f32 [tokens, heads]."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS_FIRST.vector, *[SPLAT] * 4))
        def store(_: Any, out: Any, x: Any, *scalars: Any) -> None:
            where = _ItemRows.of(self.config, *scalars)

            def put(value: Any, at: tuple) -> None:
                row = arith.index_cast(integer(), at[0])
                with ir.InsertionPoint(scf.IfOp(where.has(row)).then_block):
                    memref.store(value, out, where.of_row(row))
                    scf.yield_([])

            x.foreach(put)

        store(out, x, *self._scalars(item, item.out_row))

    def _scalars(self, item: Item, row: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.int32(self.first_row), row, item.head, item.num_tokens


@dataclasses.dataclass(frozen=True)
class _ItemRows:
    """The place of the item's rows in an array [tokens, heads, ...], as i32 in MLIR."""

    config: Cut
    first_row: Any
    array_row: Any  # row of the item's first token in the array
    head: Any
    num_tokens: Any

    @classmethod
    def of(cls, config: Cut, *scalars: Any) -> "_ItemRows":
        return cls(config, *map(scalar_of, scalars))

    def _split(self, row: Any) -> tuple[Any, Any]:
        row, tokens = arith.addi(row, self.first_row), i32(self.config.item_tokens)
        return arith.divui(row, tokens), arith.remui(row, tokens)

    def has(self, row: Any) -> Any:
        head, token = self._split(row)
        return arith.andi(is_less(token, self.num_tokens), below(head, self.config.heads))

    def of_row(self, row: Any) -> list[Any]:
        """The indices [token, head] of a row."""
        head, token = self._split(row)
        sums = arith.addi(token, self.array_row), arith.addi(head, self.head)
        return [arith.index_cast(ir.IndexType.get(), x) for x in sums]

    def address(self, array: Any, row: Any, column: Any, *, num_bytes: int) -> Any:
        """The i64 address of a number in an array [tokens, heads, head_dim]."""
        _, heads, head_dim = ir.MemRefType(array.type).shape
        start = pointer(array, 64)
        head, token = self._split(row)
        first_row = arith.addi(product(wide(self.array_row), heads), wide(self.head))
        number = arith.addi(product(arith.addi(product(token, heads), head), head_dim), column)  # offset in the item
        return total(start, product(first_row, head_dim * num_bytes), wide(product(number, num_bytes)))


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """16 bytes that a thread copies."""

    smem: Any  # address, i32
    gmem: Any  # address, i64
    is_there: Any  # i1


def _chunks(array: Any, smem: Any, where: _ItemRows, start: int = 0) -> Iterator[_Chunk]:
    """The chunks of rows in SMEM, and in an array [tokens, heads, head_dim] with columns from `start` on."""
    head_dim = ir.MemRefType(array.type).shape[-1]
    for chunk in chunks(smem):
        column = arith.addi(quotient(chunk.byte, 2), i32(start))
        is_there = arith.andi(where.has(chunk.row), below(column, head_dim))
        yield _Chunk(chunk.smem, where.address(array, chunk.row, column, num_bytes=2), is_there)


def _asm(text: str, constraints: str, *operands: Any) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)
