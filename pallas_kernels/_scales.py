"""Scales of an 8-bit cache in the decode kernel: where they are read and what they are multiplied with.

    x_t = scale s^K_t q . k_t,    out = sum_t p_t s^V_t v_t / sum_t p_t

One of the tensor or of the KV head is a factor of the softmax scale and of the finished sums. One of each token and KV
head, f32 [blocks, block_size, kv_heads], is a factor of the token's logits, and of its weights. Weights are rounded to
float16, so the running maximum is then that of x_t + log2 |s^V_t|: no product of the two is above 1, and the largest is
about 1, however large or small the scales are. (Within 2^-100 to 2^100: l, the sum of the weights without their
scales, is relative to the same maximum.)

The scales of one head's tokens lie `kv_heads` numbers apart, too finely for the copy engine, and there are only two for
each 2 * head_dim bytes. So the computing warpgroup reads them itself: every thread those of the tokens whose rows it
holds. Two reads hang on each other, the id of the block and what lies in it: the ids are read two tiles ahead, the
scales one, so that nobody waits for either. The programs of all heads of a sequence run side by side: what lies between
the scales of one head, the others find in L2.

Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels._rows import LOG2E, LOWEST, ROWS
from pallas_kernels._walk import Walk

TOKENS = ROWS.reduce(1)  # [tile]: every thread holds the tokens of its rows
LEAST = 2.0**-100  # a scale of 0 has a logarithm too


@dataclasses.dataclass(frozen=True)
class Scales:
    """Those of one program's sequence and KV head."""

    k: Any | None  # GMEM, f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    v: Any | None  # likewise
    tables: Any  # GMEM, int32 [seqs, max_blocks]
    walk: Walk
    kv_head: jax.Array
    interpret: Any

    def of_head(self, scales: Any | None) -> jax.Array | None:
        """f32 []; None where there is none, or one a token."""
        if scales is None or len(scales.shape) == 3:
            return None
        return scales[self.kv_head if scales.shape[0] > 1 else 0]

    @property
    def of_tokens(self) -> tuple[Any, ...]:
        return tuple(scales for scales in (self.k, self.v) if scales is not None and len(scales.shape) == 3)

    def start(self, tile: jax.Array, next_tile: jax.Array) -> tuple[Any, ...]:
        """The loop's carry before the first tile."""
        if not self.of_tokens:
            return ()
        return self._load(self._slots(tile)), self._slots(next_tile)

    def step(self, ahead: tuple[Any, ...], tile: jax.Array) -> tuple[jax.Array | None, jax.Array | None, tuple]:
        """Those of K and V, f32 [tile] or None, at the tile the carry was for; the carry with `tile`, two ahead."""
        if not self.of_tokens:
            return None, None, ()
        loaded, slots = ahead
        k = loaded[0] if self.k is self.of_tokens[0] else None
        v = loaded[-1] if self.v is self.of_tokens[-1] else None
        return k, v, (self._load(slots), self._slots(tile))

    def _slots(self, tile: jax.Array) -> jax.Array:
        """The slots of the tokens of a tile, int32 [tile]; those of the null block where nothing may be read."""
        num_blocks, block_size, _ = self.of_tokens[0].shape
        max_blocks = self.tables.shape[1]
        tokens = plgpu.broadcasted_iota(jnp.int32, (self.walk.tile,), 0, layout=TOKENS) + tile * self.walk.tile
        entries = lax.div(tokens, jnp.full(tokens.shape, block_size, jnp.int32))
        ids = self._gather(self.tables, jnp.minimum(entries, max_blocks - 1), 1, self.walk.seq * max_blocks)
        first, end = self.walk.entries_to_follow()
        follow = jnp.logical_and(entries >= first, entries < end)
        ids = jnp.where(follow, jnp.minimum(jnp.maximum(ids, 0), num_blocks - 1), jnp.zeros_like(ids))
        return ids * block_size + (tokens - entries * block_size)

    def _load(self, slots: jax.Array) -> tuple[jax.Array, ...]:
        """f32 [tile] each."""
        return tuple(self._gather(scale, slots, scale.shape[2], self.kv_head) for scale in self.of_tokens)

    def _gather(self, ref: Any, indices: jax.Array, stride: int, offset: jax.Array) -> jax.Array:
        """ref[indices * stride + offset] of the flattened array, with an index of 64 bits."""
        if self.interpret:
            return ref[...].reshape(-1)[indices * stride + offset]

        def gather(_: Any, ref: ir.Value, indices: mgpu.FragmentedArray, offset: mgpu.FragmentedArray) -> Any:
            i64 = ir.IntegerType.get_signless(64)
            dtype = ir.MemRefType(ref.type).element_type
            start = arith.extsi(i64, offset.registers.item())
            base = utils.memref_ptr(ref)
            loaded = np.empty_like(indices.registers)
            for i, register in np.ndenumerate(indices.registers):
                index = arith.extsi(i64, vector.extract(register, dynamic_position=[], static_position=[0]))
                index = arith.addi(arith.muli(index, utils.c(stride, i64)), start)
                number = llvm.load(dtype, utils.getelementptr(base, [index], dtype))
                loaded[i] = vector.broadcast(ir.VectorType.get((1,), dtype), number)
            signed = True if isinstance(dtype, ir.IntegerType) else None
            return mgpu.FragmentedArray(_registers=loaded, _layout=indices.layout, _is_signed=signed)

        return plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), TOKENS, TOKENS),
            return_type=plgpu.ShapeDtypeStruct(indices.shape, ref.dtype, layout=TOKENS),
        )(gather)(ref, indices, offset)


def over_tokens(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def peaks(logits: jax.Array, v_scales: jax.Array, visible: jax.Array | None) -> jax.Array:
    """What the running maximum is taken of, f32 [tile, rows]."""
    size = jnp.maximum(jnp.abs(v_scales), jnp.full(v_scales.shape, LEAST, jnp.float32))
    logits += over_tokens(jnp.log(size) * LOG2E, logits.shape)
    return logits if visible is None else jnp.where(visible, logits, jnp.full(logits.shape, LOWEST, jnp.float32))
