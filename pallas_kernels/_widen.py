"""8-bit caches on chip: two neighbouring columns of the head at a time, from SMEM straight to the operands of a product.

The tensor cores multiply 16-bit numbers, and they transpose only such. So a tile of 8-bit numbers is read as 16-bit
words, transposed where it holds V, and each word is taken apart in registers: its low byte is an even column of the
head, its high byte the odd one beside it. Widened to float16 the two halves are the left operands of one product each:

    S^T = K_even Q_even^T + K_odd Q_odd^T,    O_even^T += V_even^T P^T,    O_odd^T += V_odd^T P^T

Nothing widened ever goes back to SMEM. Q is split into its even and odd columns once, before the first tile, and O is
put together again once, after the last, both through a small buffer in SMEM.

float16 holds every number that float8_e4m3fn, float8_e5m2 or int8 can, subnormals, infinities and NaN among them. It
does not hold every bfloat16: so each row of a Q in bfloat16 is first divided by the power of two of its largest number.
Then no number of it is above 2, those down to 2^-14 of the largest are exact, and the logits are multiplied with that
power again.

Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._rows import ROWS, over_rows

DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
WORDS = 64  # 16-bit words, the M of one product
COLUMNS = 2 * WORDS  # of the head


def is_narrow(cache_dtype: Any) -> bool:
    return cache_dtype in DTYPES


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tiles of an 8-bit cache in SMEM, [stages, tile, width], and the same bytes as words.

    Interpret mode knows no two views of one buffer: there `words` is None and the bytes are split instead.
    """

    narrow: Any
    words: Any | None  # int16 [stages, tile, width / 2]

    @staticmethod
    def scratch(shape: tuple[int, int, int], dtype: Any, head_dim: int, interpret: Any) -> Any:
        stages, tile, width = shape
        columns = columns_of_copy(head_dim, 128)
        narrow = plgpu.SMEM(shape, dtype, transforms=_matrix(columns, columns))
        if interpret:
            return narrow
        words = plgpu.SMEM((stages, tile, width // 2), jnp.int16, transforms=_matrix(columns // 2, columns))
        return plgpu.RefUnion(narrow, words)

    @classmethod
    def of(cls, ref: Any) -> "Ring":
        return cls(*ref) if isinstance(ref, (tuple, list)) else cls(ref, None)

    def halves(self, stage: jax.Array, piece: int, *, transposed: bool) -> tuple[jax.Array, jax.Array]:
        """Even and odd columns of piece `piece` of 128, float16 [tile, 64], or [64, tile] where `transposed`."""
        if self.words is None:
            columns = self.narrow[stage, :, pl.ds(piece * COLUMNS, COLUMNS)].astype(jnp.float16)
            pairs = columns.reshape(-1, WORDS, 2)
            even, odd = pairs[..., 0], pairs[..., 1]
            return (even.T, odd.T) if transposed else (even, odd)
        words = self.words.at[stage, :, pl.ds(piece * WORDS, WORDS)]
        return widen(plgpu.load(words.T if transposed else words, layout=ROWS), self.narrow.dtype)


def columns_of_copy(head_dim: int, most: int) -> int:
    """Columns of a tile that the copy engine takes: it must divide the head, or hold all of it."""
    return next(
        columns for columns in (128, 64, 32, 16) if columns <= most and (head_dim % columns == 0 or head_dim < columns)
    )


def _matrix(columns: int, row_bytes: int) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(row_bytes)  # type: ignore[abstract]


def widen(words: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The low and the high bytes of int16 `words`, each a number of type `dtype`, as float16."""
    eight = jnp.full(words.shape, 8, jnp.int16)
    if dtype == jnp.int8:
        # 0x6400 + u is the float16 1024 + u for a u of 8 bits, and u = x + 128 is x with its sign bit turned over. The
        # conversion that the compiler knows goes number by number.
        low, high = words & jnp.int16(0xFF), lax.shift_right_logical(words, eight)
        both = (lax.bitcast_convert_type(u ^ jnp.int16(0x6480), jnp.float16) for u in (low, high))
        low, high = (biased - jnp.full(words.shape, 1152, jnp.float16) for biased in both)
        return low, high
    if dtype == jnp.float8_e5m2:  # the upper half of a float16
        low, high = lax.shift_left(words, eight), words & jnp.int16(-256)
        return lax.bitcast_convert_type(low, jnp.float16), lax.bitcast_convert_type(high, jnp.float16)
    low, high = words.astype(jnp.int8), lax.shift_right_logical(words, eight).astype(jnp.int8)
    low, high = (lax.bitcast_convert_type(x, dtype).astype(jnp.float16) for x in (low, high))
    return low, high


def scratch(*, rows: int, width: int, tile: int) -> dict[str, Any]:
    matrix = _matrix(WORDS, 2 * WORDS)
    return {
        "q_halves_smem": plgpu.SMEM((2, rows, width // 2), jnp.float16, transforms=matrix),
        "p_smem": plgpu.SMEM((rows, tile), jnp.float16, transforms=matrix),
        "pairs_smem": plgpu.SMEM((WORDS, 2, rows), jnp.float32),
    }


def split_q(refs: dict[str, Any], rows: int) -> jax.Array | None:
    """Writes the even and the odd columns of Q; returns what the logits of each row must be multiplied with, f32 [rows].

    None stands for ones.
    """
    q_flat_smem, halves_smem = refs["q_flat_smem"], refs["q_halves_smem"]  # [rows + 1, width], [2, rows, width / 2]
    width = q_flat_smem.shape[1]
    pieces = [
        plgpu.load(q_flat_smem.at[pl.ds(0, rows), pl.ds(piece, COLUMNS)].T, layout=ROWS, optimized=False)
        for piece in range(0, width, COLUMNS)
    ]
    pieces = [piece.astype(jnp.float32) for piece in pieces]
    unit = None
    if q_flat_smem.dtype == jnp.bfloat16:
        largest = None
        for piece in pieces:
            most = jnp.abs(piece).max(axis=0)
            largest = most if largest is None else jnp.maximum(largest, most)
        unit = _power_of_two(largest)
        inverse = 1.0 / unit
        pieces = [piece * over_rows(inverse, piece.shape) for piece in pieces]
    for i, piece in enumerate(pieces):
        for h, half in enumerate(_split(piece, refs["pairs_smem"])):
            halves_smem.at[h, :, pl.ds(i * WORDS, WORDS)].T[...] = half.astype(jnp.float16)
    plgpu.commit_smem()
    return unit


def join(acc: tuple[jax.Array, ...], chunk: int, pairs_smem: Any) -> tuple[jax.Array, ...]:
    """`acc`: even and odd columns in turn, f32 [64, rows] each; returns the columns in order, f32 [chunk, rows] each."""
    joined = []
    columns_smem = pairs_smem.reshape(COLUMNS, pairs_smem.shape[-1])
    for halves in zip(acc[::2], acc[1::2], strict=True):
        plgpu.commit_smem()  # what was read from the buffer before has been read
        for h, half in enumerate(halves):
            _rows.store(pairs_smem.at[:, h], half)
        plgpu.commit_smem()
        for start in range(0, COLUMNS, chunk):
            joined.append(plgpu.load(columns_smem.at[pl.ds(start, chunk)], layout=ROWS, optimized=False))
    return tuple(joined)


def _split(columns: jax.Array, pairs_smem: Any) -> tuple[jax.Array, jax.Array]:
    """f32 [128, rows] to its even and its odd rows, [64, rows] each."""
    plgpu.commit_smem()  # what was read from the buffer before has been read
    _rows.store(pairs_smem.reshape(columns.shape), columns)
    plgpu.commit_smem()
    even, odd = (plgpu.load(pairs_smem.at[:, h], layout=ROWS, optimized=False) for h in range(2))
    return even, odd


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above x, within what has an inverse, f32."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.full(x.shape, 0x7F800000, jnp.int32)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.minimum(jnp.maximum(power, jnp.full(x.shape, 2.0**-120)), jnp.full(x.shape, 2.0**120))


def product(
    shape: tuple[int, int], lefts: tuple[jax.Array, ...], rights: tuple[Any, ...], interpret: Any
) -> jax.Array:
    """The sum of left @ right over the pairs, f32 `shape`; the left ones in registers, the right ones in SMEM."""
    if interpret:  # which has no product with an operand in registers
        return sum(
            jnp.dot(left, right[...], preferred_element_type=jnp.float32)
            for left, right in zip(lefts, rights, strict=True)
        )

    def multiply(acc: Any) -> jax.Array:
        for left, right in zip(lefts, rights, strict=True):
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
