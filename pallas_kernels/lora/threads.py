"""What a thread of the warps copies for itself, multiplies and stores. All of it is traced inside the kernel.

In a warp, thread 4 g + t has rows g and g + 8 of a product's left operand and sums, column g of each 8 of its right
operand, and columns 2t and 2t + 1 of each 8 of its sums. Of the 16 numbers of a sum's terms it has those of places 2t,
2t + 1, 2t + 8 and 2t + 9 (m16n8k16 in the PTX manual). Which term stands in which place is ours to say:

    H:     numbers 8t to 8t + 7 of 32 features are two products, each of 4 terms of a thread
    out:   ranks 2t, 2t + 1, 2t + 8 and 2t + 9 of 16; column g of product j is column 8g + j of 64
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.common.chunks import THREADS, below, i32, is_less, pointer, product, remainder, thread, total
from pallas_kernels.common.cp_async import copy
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, constant, integer
from pallas_kernels.common.registers import load, make_array, numbers_of, scalar_of
from pallas_kernels.common.rows import ROWS as SUMS
from pallas_kernels.common.rows import ROWS_FIRST, SCALAR
from pallas_kernels.common.sizes import zero_unless
from pallas_kernels.lora.config import COLUMNS, FEATURES, ROWS, WARPS
from pallas_kernels.lora.registers import (
    address_of,
    column_of,
    find_place,
    load_words,
    narrowed,
    plus_product_of_words,
    rank_of,
    rows_of_thread,
    slot,
)

REF = plgpu.RefType()
OF_WARP = FEATURES // WARPS, COLUMNS // WARPS  # features and columns of a step
PAIR = 8  # bytes of two float32 numbers


def _copy_features_at_once(x: Any, a: Any, stage: Any, rows: jax.Array, first_rank: jax.Array, step: jax.Array) -> None:
    columns = pl.ds(step * FEATURES, FEATURES)
    for i in range(ROWS):
        is_there = rows[i] < x.shape[0]
        row = x[jnp.where(is_there, rows[i], 0), columns]
        stage[i] = zero_unless(is_there, row)
    rank = stage.shape[0] // 2
    stage[pl.ds(ROWS, rank)] = a[pl.ds(first_rank, rank), columns]


def _multiply_features_at_once(sums: jax.Array, stage: Any) -> jax.Array:
    step = stage[...]
    x, a = step[:ROWS], step[ROWS : ROWS + sums.shape[1]]
    quarters = (slice(i, i + OF_WARP[0]) for i in range(0, FEATURES, OF_WARP[0]))
    return sums + jnp.concatenate([jnp.dot(x[:, q], a[:, q].T, preferred_element_type=jnp.float32) for q in quarters])


def _store_sums_at_once(sums: jax.Array, sums_smem: Any) -> None:
    sums_smem[...] = sums


def _add_warps_at_once(sums_smem: Any, dtype: Any) -> jax.Array:
    *_, rank = sums_smem.shape
    warps = sums_smem[...].reshape(-1, ROWS, rank)
    return jnp.concatenate([functools.reduce(jnp.add, warps).astype(dtype)] * WARPS)


def _copy_columns_at_once(b: Any, stage: Any, first_rank: jax.Array, first: jax.Array, end: jax.Array) -> None:
    rank = stage.shape[0] // 2
    for i in range(WARPS):
        start, columns = first + i * OF_WARP[1], pl.ds(i % 2 * OF_WARP[1], OF_WARP[1])

        @pl.when(start < end)
        def _copy(i: int = i, start: jax.Array = start, columns: Any = columns) -> None:
            stage[pl.ds(i // 2 * rank, rank), columns] = b[pl.ds(first_rank, rank), pl.ds(start, OF_WARP[1])]


def _store_columns_at_once(
    h: jax.Array, stage: Any, out: Any, rows: jax.Array, first: jax.Array, end: jax.Array
) -> None:
    step, rank = stage[...], h.shape[1]
    b = jnp.concatenate([step[:rank], step[rank:]], axis=1)
    sums = jnp.dot(h[:ROWS], b, preferred_element_type=jnp.float32).astype(out.dtype)
    for i in range(ROWS):
        for start in range(0, COLUMNS, OF_WARP[1]):

            @pl.when(jnp.logical_and(rows[i] < out.shape[0], first + start < end))
            def _store(i: int = i, start: int = start) -> None:
                out[rows[i], pl.ds(first + start, OF_WARP[1])] = sums[i, start : start + OF_WARP[1]]


@interpreted_by(_copy_features_at_once)
def copy_features(
    x: Any,  # GMEM [tokens, features]
    a: Any,  # GMEM [ranks of all adapters and parts, features]
    stage: Any,  # SMEM [2 * rank, 128]
    rows: jax.Array,  # int32 [64], 16 rows of x for each warp; the number of tokens: zeros
    first_rank: jax.Array,
    step: jax.Array,
) -> None:
    """Starts to copy X and A of the `step`-th 128 features."""

    @plgpu.inline_mgpu(arg_types=(REF, REF, REF, ROWS_FIRST.vector, SCALAR, SCALAR))
    def start(_: Any, x: Any, a: Any, stage: Any, rows: Any, *scalars: Any) -> None:
        first_rank, step = map(scalar_of, scalars)
        warp, g, t = find_place()
        column = total(product(step, FEATURES), product(warp, OF_WARP[0]), product(t, 8))
        for i, row in enumerate(rows_of_thread(rows)):
            is_there = below(row, ir.MemRefType(x.type).shape[0])
            row = arith.select(is_there, row, i32(0))  # what is not there is not read either
            copy(address_of(x, row, column), slot(stage, i), is_there)
        for i in range(rank_of(stage) // 8):
            copy(address_of(a, total(first_rank, g, i32(8 * i)), column), slot(stage, 2 + i), None)

    start(x, a, stage, rows, first_rank, step)


@interpreted_by(_multiply_features_at_once)
def multiply_features(sums: jax.Array, stage: Any) -> jax.Array:
    """sums + X A^T of a step, f32 [64, rank]: 16 rows for each warp, of its own features."""

    @plgpu.inline_mgpu(arg_types=(SUMS, REF), return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, SUMS))
    def multiply(_: Any, sums: Any, stage: Any) -> fa.FragmentedArray:
        upper, lower, *a = (load_words(stage, i) for i in range(2 + rank_of(stage) // 8))
        for i in (0, 2):
            left = [upper[i], lower[i], upper[i + 1], lower[i + 1]]
            sums = plus_product_of_words(sums, left, [word for eight in a for word in eight[i : i + 2]], stage)
        return sums

    return multiply(sums, stage)


@interpreted_by(_store_sums_at_once)
def store_sums(sums: jax.Array, sums_smem: Any) -> None:
    """What a warpgroup has of H, f32 [64, rank]. sums_smem: of the same shape, in the order of threads."""

    @plgpu.inline_mgpu(arg_types=(SUMS, REF))
    def store(_: Any, sums: Any, sums_smem: Any) -> None:
        of_thread = total(pointer(sums_smem), product(thread(), PAIR))
        for i, pair in enumerate(sums.registers.flat):
            address = total(of_thread, i32(i * PAIR * THREADS))
            utils.inline_ptx("st.shared.v2.f32 [$0], {$1, $2};", address, *numbers_of(pair), has_side_effects=True)

    store(sums, sums_smem)


@interpreted_by(_add_warps_at_once)
def add_warps(sums_smem: Any, dtype: Any) -> jax.Array:
    """H, what all warps have stored, in `dtype` [64, rank]: the same 16 rows for each warp."""
    warpgroups, *shape = sums_smem.shape

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=plgpu.ShapeDtypeStruct(tuple(shape), dtype, SUMS))
    def add(_: Any, sums_smem: Any) -> fa.FragmentedArray:
        of_lane = total(pointer(sums_smem), product(remainder(thread(), 32), PAIR))
        h, num_pairs = [], math.prod(shape) // (2 * THREADS)  # of a thread
        for i in range(num_pairs):
            warps = itertools.product(range(i, warpgroups * num_pairs, num_pairs), range(0, THREADS, 32))
            places = (of_group * THREADS + of_warp for of_group, of_warp in warps)
            pairs = [
                load("ld.shared.v2.f32", ir.F32Type.get(), total(of_lane, i32(PAIR * place)), 2) for place in places
            ]
            h.append(narrowed([functools.reduce(arith.addf, numbers) for numbers in zip(*pairs, strict=True)], dtype))
        return make_array(h, SUMS.to_mgpu(), tuple(shape))

    return add(sums_smem)


@interpreted_by(_copy_columns_at_once)
def copy_columns(
    b: Any,  # GMEM [ranks of all adapters, outputs]
    stage: Any,  # SMEM [2 * rank, 128]
    first_rank: jax.Array,
    first: jax.Array,  # of the outputs
    end: jax.Array,  # of the part
) -> None:
    """Starts to copy B of 256 outputs, or of fewer at the end of a part."""

    @plgpu.inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR, SCALAR))
    def start(_: Any, b: Any, stage: Any, *scalars: Any) -> None:
        first_rank, first, end = map(scalar_of, scalars)
        warp, g, t = find_place()
        column = total(first, product(warp, OF_WARP[1]), product(g, 8))
        is_there = is_less(column, end)
        column = arith.select(is_there, column, i32(0))
        for i, (rank, near) in enumerate(itertools.product(range(0, rank_of(stage), 8), (0, 1))):
            row = total(first_rank, product(t, 2), i32(rank + near))
            copy(address_of(b, row, column), slot(stage, i), is_there)

    start(b, stage, first_rank, first, end)


@interpreted_by(_store_columns_at_once)
def store_columns(
    h: jax.Array,  # [64, rank]
    stage: Any,  # SMEM [2 * rank, 128]
    out: Any,  # GMEM [tokens, outputs]
    rows: jax.Array,  # int32 [64], as in `copy_features`
    first: jax.Array,
    end: jax.Array,
) -> None:
    """out = H B of a step."""
    dtype = h.dtype

    @plgpu.inline_mgpu(arg_types=(SUMS, REF, REF, ROWS_FIRST.vector, SCALAR, SCALAR))
    def store(_: Any, h: Any, stage: Any, out: Any, rows: Any, *scalars: Any) -> None:
        first, end = map(scalar_of, scalars)
        warp, _, t = find_place()
        sums = fa.FragmentedArray.splat(constant("f32", 0.0), (WARPS * ROWS, OF_WARP[1]), SUMS.to_mgpu())
        for rank in range(0, rank_of(stage), 16):
            b = [load_words(stage, rank // 4 + i) for i in range(4)]
            right = [column_of(b[i], b[i + 1], column) for column in range(8) for i in (0, 2)]
            sums = plus_product_of_words(sums, list(h[:, rank : rank + 16].registers.flat), right, stage)
        column = total(first, product(warp, OF_WARP[1]), product(t, 16))
        for row, pairs in zip(rows_of_thread(rows), sums.registers.reshape(8, 2).T, strict=True):
            is_there = arith.andi(below(row, ir.MemRefType(out.type).shape[0]), is_less(column, end))
            for i, eight in enumerate(zip(*map(numbers_of, pairs), strict=True)):
                narrow = (narrowed(eight[j : j + 2], dtype) for j in range(0, 8, 2))
                utils.inline_ptx(
                    "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
                    address_of(out, row, total(column, i32(8 * i))),
                    *(utils.bitcast(pair, integer()) for pair in narrow),
                    predicate=is_there,
                    has_side_effects=True,
                )

    store(h, stage, out, rows, first, end)
