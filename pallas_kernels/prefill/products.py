"""The two products of a step, in flight together: with the keys of one tile, and with the values of another.

    S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
    O [64, head_dim] += P [64, tile]      V [tile, head_dim]

`plgpu.wgmma` would fence P between the two products, and ptxas would then serialise them. Here all registers are fenced
before the first product.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels.common.interpret import interpreted
from pallas_kernels.common.mlir import constant, integer, make_array
from pallas_kernels.common.rows import ROWS

F32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Products:
    transforms: tuple[Any, ...]  # transforms of matrices in SMEM

    def scores(self, q: Any, k: Any) -> jax.Array:
        """S f32 [64, tile], from SMEM [64, width] and [tile, width]."""

        def product(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, q, k.T)
            return ref[...]

        return pl.run_scoped(product, plgpu.ACC((q.shape[0], k.shape[0]), F32))

    def add(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        """O + P V, f32 [64, width], with the values of a tile, SMEM [tile, width]."""

        def add(ref: Any) -> None:
            plgpu.wgmma(ref, p, v)

        return pl.run_state(add)(plgpu.ACC.init(acc))

    def start(
        self,
        acc: jax.Array,  # f32 [64, width]
        p: jax.Array,  # [64, tile], the weights for v
        q: Any,  # SMEM [64, width]
        k: Any,  # SMEM [tile, width]
        v: Any,  # SMEM [tile, width]
    ) -> tuple[jax.Array, jax.Array]:
        """Starts both products and returns O and S. Pass each through `wait` before use; O is the first group."""
        swizzle = self.transforms[1].swizzle
        ref = plgpu.RefType(self.transforms)
        scores = plgpu.ShapeDtypeStruct((acc.shape[0], k.shape[0]), F32, ROWS)

        @plgpu.inline_mgpu(
            arg_types=(ROWS, ROWS, ref, ref, ref),
            return_type=(plgpu.ShapeDtypeStruct(acc.shape, F32, ROWS), scores),
        )
        def products(_: Any, acc: Any, p: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            s = fa.FragmentedArray.splat(constant("f32", 0.0), scores.shape, fa.WGMMA_LAYOUT).to_layout(
                fa.WGMMA_LAYOUT_ACC_32BIT
            )
            acc = acc.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            s, acc, p = fa.optimization_barrier(s, acc, p)
            nvvm.wgmma_fence_aligned()
            accumulator = WGMMAAccumulator(_value=s, _original_layout=fa.WGMMA_LAYOUT, _sync=False)
            s = wgmma(accumulator, q, utils.memref_transpose(k, (1, 0, 3, 2)), swizzle=swizzle).value
            nvvm.wgmma_commit_group_sync_aligned()
            acc = _add(acc, p, v, swizzle)
            nvvm.wgmma_commit_group_sync_aligned()
            return acc.to_layout(fa.WGMMA_LAYOUT), s

        return products(acc, p, q, k, v)

    def wait(self, n: int, x: Any) -> Any:
        """Returns x when at most the last n products are in flight."""
        plgpu.wgmma_wait(n)
        return lax.optimization_barrier(x)


class Interpreted(Products):
    """Products in interpret mode, which has neither operands in registers nor asynchronous products."""

    def add(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        added = jnp.dot(p, v[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders the reads before the copy engine's writes, as a product would
        return acc + added

    def start(self, acc: jax.Array, p: jax.Array, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        return self.add(acc, p, v), self.scores(q, k)

    def wait(self, n: int, x: Any) -> Any:
        return x


def products_of(transforms: tuple[Any, ...]) -> Products:
    return Interpreted(transforms) if interpreted() else Products(transforms)


def _add(acc: Any, p: Any, v: Any, swizzle: int) -> Any:
    """acc + p v, like `wgmma.wgmma`, but for a p that is already fenced."""
    columns = swizzle // utils.bytewidth(p.mlir_dtype)
    width = acc.shape[1]
    (start, (_, k_stride)), (_, group_stride), fastest = mma_utils.create_descriptor(
        v, swizzle=swizzle, large_tile=(columns, columns), group_size=(columns, width), logical_k_major=True
    )
    registers = acc.registers.copy()
    for group in range(p.shape[1] // columns):
        offset = utils.c(mma_utils.encode_addr(group * group_stride), integer(64))
        registers = wgmma_m64(
            registers,
            p[:, group * columns : (group + 1) * columns],
            llvm.add(start, offset, overflow_flags=llvm.IntegerOverflowFlags.none),
            a_transpose=None,
            b_transpose=fastest != mma_utils.Dim.K,
            a_k_stride=None,
            b_k_stride=k_stride[0],
            n=width,
            swizzle=swizzle,
            a_element_type=p.mlir_dtype,
            b_element_type=p.mlir_dtype,
        )
    return make_array(registers.flat, acc.layout, acc.shape)
