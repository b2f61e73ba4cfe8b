"""Widening of 8-bit caches to float16 in registers, from SMEM to the left operands of the products.

The tensor cores multiply 16-bit numbers, and only 16-bit numbers can be transposed while they are read from SMEM. So a
tile is read as words of two neighbouring columns of the head, and transposed for V. Each register holds two words and
is split into two registers of two float16 each. Widened numbers never go back to SMEM.

The cheapest split permutes the columns of the head within each group of 16:

    K: position 8 h + 2 i + j holds column 4 i + 2 h + j,    V: position 8 h + i holds column 2 i + h

So Q is permuted to the order of K once, before the first tile, and O back from the order of V once, after the last.

float16 represents every float8_e4m3fn, float8_e5m2 and int8 exactly, with subnormals, infinities and NaN, but not every
bfloat16. Each row of a bfloat16 Q is divided by a power of two that brings its largest number between 1 and 2, and its
logits are multiplied by that power. Numbers below 2^-14 of the largest then lose bits, those below 2^-24 all of them.
Softmax weights up to 2^HEADROOM use float16's whole range: down to 2^-29 of the largest, the relative error of a
weight is at most 2^-11; in bfloat16 it would be 2^-9.

The prefill kernel widens K and V in SMEM and uses only the conversions of this module.

All functions are traced inside the kernels. Interpret mode has neither two views of one buffer nor products with an
operand in registers, so it makes the same orders by reshaping.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.common.interpret import interpreted_by, two_views
from pallas_kernels.common.mlir import integer, make_array, numbers_of
from pallas_kernels.common.rows import LEFT, ROWS, ROWS_LAST, matrix
from pallas_kernels.common.sizes import COLUMNS, zero_unless

HEADROOM = 15  # the running maximum is lowered by this, in units of log2
# [32 words, tokens], 8 words per warp: widened, they are the warp's 16 rows in ROWS.
WORDS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
K_ORDER = tuple(4 * i + 2 * h + j for h in range(2) for i in range(4) for j in range(2))
V_ORDER = tuple(2 * i + h for h in range(2) for i in range(8))


def scratch(shape: tuple[int, int, int], dtype: Any) -> Any:
    """SMEM for a ring of tiles, in two views: [stages, tile, width] for the copies, and words."""
    stages, tile, width = shape
    ring = plgpu.SMEM(shape, dtype, transforms=matrix(COLUMNS, 1))
    words = plgpu.SMEM((stages, tile, width // 2), jnp.int16, transforms=matrix(COLUMNS // 2, 2))
    return two_views(ring, words)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A ring of tiles, [stages, tile, width], and the same bytes as words (unused in interpret mode)."""

    narrow: Any
    words: Any  # int16 [stages, tile, width / 2]

    def _narrow_keys(self, stage: jax.Array) -> jax.Array:
        return _in_order(self.narrow[stage].astype(jnp.float16).T, K_ORDER).T

    @interpreted_by(_narrow_keys)
    def keys(self, stage: jax.Array) -> jax.Array:
        """K, float16 [tile, width], with the columns in the order of K."""
        words = plgpu.load(self.words.at[stage], layout=ROWS)
        return _widen(words, self.narrow.dtype, LEFT, transposed=False)

    def _load_narrow_values(self, stage: jax.Array) -> jax.Array:
        return self.narrow[stage].T

    @interpreted_by(_load_narrow_values)
    def load_values(self, stage: jax.Array) -> jax.Array:
        """A tile, transposed and not widened."""
        return plgpu.load(self.words.at[stage].T, layout=WORDS)

    def _zero_unseen_numbers(self, loaded: jax.Array, seen: Any) -> jax.Array:
        return zero_unless(seen(loaded.shape, 1, WORDS), loaded)

    @interpreted_by(_zero_unseen_numbers)
    def zero_unseen(self, loaded: jax.Array, seen: Any) -> jax.Array:
        """The result of `load_values`, with zeros for tokens outside `seen(shape, axis, layout)`."""
        ours = seen(loaded.shape, 1, WORDS)
        return loaded & jnp.where(ours, jnp.full(loaded.shape, -1, jnp.int16), jnp.zeros_like(loaded))

    def _narrow_values(self, loaded: jax.Array) -> jax.Array:
        return _in_order(loaded.astype(jnp.float16), V_ORDER)

    @interpreted_by(_narrow_values)
    def values(self, loaded: jax.Array) -> jax.Array:
        """The result of `load_values` widened: float16 [size, tile], with the columns in the order of V."""
        return _widen(loaded, self.narrow.dtype, LEFT, transposed=True)


def load_q(q: Any, wide: Any) -> jax.Array | None:
    """Copies Q, SMEM [rows, width], to `wide`, SMEM [width, rows], with the columns in the order of K.

    Returns the factor by which the products of each row must be multiplied, f32 [rows]; None if all are 1.
    """
    rows, width = q.shape

    def load(start: int) -> jax.Array:
        columns = q.at[:, pl.ds(start, 64)]  # in steps: many rows would not fit into the registers
        return plgpu.load(columns.T, layout=ROWS, optimized=False)

    factor = None
    if q.dtype == jnp.bfloat16:
        largest = ROWS_LAST.full(rows, 0.0)
        for start in range(0, width, 64):
            largest = jnp.maximum(largest, jnp.abs(load(start).astype(jnp.float32)).max(axis=0))
        factor = power_of_two(largest)
    for start in range(0, width, 64):
        columns = load(start)
        if factor is not None:
            columns = (columns.astype(jnp.float32) * ROWS_LAST.over(1.0 / factor, columns.shape)).astype(jnp.float16)
        wide[pl.ds(start, 64)] = _exchange(columns, K_ORDER)
    return factor


def ordered(acc: jax.Array) -> jax.Array:
    """Permutes the columns of f32 [columns, rows] from the order of V back to their own."""
    return _exchange(acc, tuple(V_ORDER.index(column) for column in range(16)))


def power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two up to x, f32, limited to powers whose inverse is finite and normal."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.full(x.shape, 0x7F800000, jnp.int32)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.minimum(jnp.maximum(power, jnp.full(x.shape, 2.0**-120)), jnp.full(x.shape, 2.0**120))


def _widen(words: jax.Array, dtype: Any, left: Any, *, transposed: bool) -> jax.Array:
    """Widens int16 words [m, n] in ROWS to float16 [m, 2 n] in `left`; if `transposed`, [m, n] in WORDS to [2 m, n]."""
    m, n = words.shape
    shape = (2 * m, n) if transposed else (m, 2 * n)

    def widen(_: Any, narrow: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        wide = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for (i, j, *rest), register in np.ndenumerate(narrow.registers):
            for h, half in enumerate(halves(register, dtype, transposed)):
                # [rows / 64, columns / 8, -, -, upper or lower 8 of a warp's 16 rows, -, -, -, -]
                target = (i, j, 0, 0, h) if transposed else (i, 2 * j + h, 0, 0, rest[2])
                wide[(*target, 0, 0, 0, 0)] = half
        return make_array(wide.flat, left.to_mgpu(), shape)

    return plgpu.inline_mgpu(
        arg_types=(WORDS if transposed else ROWS,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float16), layout=left),
    )(widen)(words)


def halves(register: ir.Value, dtype: Any, transposed: bool) -> list[ir.Value]:
    """Widens the four bytes of a register to two registers of two float16: 0, 1 and 2, 3, or `transposed` 0, 2 and
    1, 3."""
    i32 = integer()
    pairs = ((0, 2), (1, 3)) if transposed else ((0, 1), (2, 3))
    narrow = utils.bitcast(register, i32)

    def ptx(template: str, x: ir.Value) -> ir.Value:
        return utils.inline_ptx(template, x, result_types=i32)

    if dtype == jnp.float8_e4m3fn:
        if transposed:
            narrow = ptx("prmt.b32 $0, $1, 0, 0x3120;", narrow)
        wide = [
            ptx(f"{{ .reg .b16 h<2>; mov.b32 {{h0, h1}}, $1; cvt.rn.f16x2.e4m3x2 $0, h{h}; }}", narrow)
            for h in range(2)
        ]
    elif dtype == jnp.float8_e5m2:  # the upper half of a float16
        wide = [ptx(f"prmt.b32 $0, $1, 0, 0x{b}4{a}4;", narrow) for a, b in pairs]
    else:
        # For an 8-bit u, the bits 0x6400 + u are the float16 1024 + u, and u = x + 128 is x with its sign bit flipped.
        # The compiler's own conversion handles one number at a time.
        biased = ptx("xor.b32 $0, $1, 0x80808080;", narrow)
        wide = [ptx(f"prmt.b32 $0, $1, 0x64646464, 0x4{b}4{a};", biased) for a, b in pairs]
        wide = [ptx("{ .reg .b32 c; mov.b32 c, 0x64806480; sub.rn.f16x2 $0, $1, c; }", x) for x in wide]
    return [utils.bitcast(x, ir.VectorType.get((2,), ir.F16Type.get())) for x in wide]


def _in_order(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    groups = x.reshape(-1, 16, x.shape[1])
    return jnp.stack([groups[:, row] for row in order], axis=1).reshape(x.shape)


@interpreted_by(_in_order)
def _exchange(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Permutes the rows of x [m, n] in ROWS: row p of each 16 becomes row `order[p]`, from another lane of the warp."""
    # Lane l holds rows l // 4 and 8 + l // 4. Four bits per row, from bit 4 (l // 4) on, are the row that it needs.
    rows = [sum(row << 4 * i for i, row in enumerate(order[8 * h : 8 * h + 8])) for h in range(2)]

    def exchange(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = integer()
        lane = utils.inline_ptx("mov.u32 $0, %laneid;", result_types=i32)
        sources = [
            utils.inline_ptx(
                f"{{ .reg .b32 a, b; and.b32 a, $1, 28; shr.b32 a, {row:#x}, a; and.b32 b, $1, 3; "
                "shl.b32 a, a, 2; and.b32 a, a, 60; or.b32 $0, a, b; }",  # lane in bits 0 to 4, which eight in bit 5
                lane,
                result_types=i32,
            )
            for row in rows
        ]
        taken, dtype = np.empty_like(x.registers), x.registers.flat[0].type
        for index in np.ndindex(*x.registers.shape):
            eights = [split_words(x.registers[(*index[:4], h, *index[5:])]) for h in range(2)]
            words = [
                utils.inline_ptx(
                    "{ .reg .b32 a, b; .reg .pred p; shfl.sync.idx.b32 a, $1, $3, 31, -1; "
                    "shfl.sync.idx.b32 b, $2, $3, 31, -1; setp.lt.u32 p, $3, 32; selp.b32 $0, a, b, p; }",
                    *pair,
                    sources[index[4]],
                    result_types=i32,
                    has_side_effects=True,
                    convergent=True,
                )
                for pair in zip(*eights, strict=True)
            ]
            taken[index] = from_words(words, dtype)
        return make_array(taken.flat, x.layout, x.shape)

    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=ROWS))(
        exchange
    )(x)


def split_words(register: ir.Value) -> list[ir.Value]:
    """Splits a register into 32-bit words."""
    bits = utils.bitwidth(register.type)
    return numbers_of(vector.bitcast(ir.VectorType.get((bits // 32,), integer()), register))


def from_words(words: list[ir.Value], dtype: ir.Type) -> ir.Value:
    return vector.bitcast(dtype, vector.from_elements(ir.VectorType.get((len(words),), words[0].type), words))
