"""The scales of tokens of an 8-bit cache in the prefill kernel: their ring.

The warp that fetches some tokens also copies their scales, a lane each. Interpret mode has no such copies: there the
computing warpgroup reads them from GMEM. Everything here is traced inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.common.fetch import block_at
from pallas_kernels.common.interpret import interpreted
from pallas_kernels.common.rows import ROWS, SCALAR
from pallas_kernels.common.scales import of_tokens
from pallas_kernels.prefill.item import Item

LANES = 32


def scratch(num_scales: int, *, stages: int, tile_tokens: int, warps: int) -> dict[str, Any]:
    """SMEM for `num_scales` scales of each token of a ring of tiles, which `warps` warps fetch."""
    if num_scales == 0:
        return {}
    return {
        "scales_smem": plgpu.SMEM((stages, num_scales, tile_tokens), jnp.float32),
        "scales_full": plgpu.Barrier(num_arrivals=warps, num_barriers=stages),
    }


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of one program's sequence and KV head."""

    k: Any | None  # GMEM, f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    v: Any | None  # as k
    kv_head: jax.Array
    ring: Any  # SMEM, f32 [stages, 1 or 2, tile]: of K, V, or both; None where no token has one
    full: Any  # barriers [stages]; None if there is no ring
    stages: int

    @property
    def of_tokens(self) -> tuple[Any, ...]:
        return of_tokens(self.k, self.v)

    def of_tile(
        self, item: Item, tables: Any, tile: jax.Array, stage: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """The scales of K and of V, f32 [tile] or None, for a tile of the sequence that was fetched into `stage`."""
        if not self.of_tokens:
            return None, None
        if interpreted():
            slots = _slots(item, tables, tile, *self.of_tokens[0].shape[:2])
            loaded = [scales[...].reshape(-1)[slots * scales.shape[2] + self.kv_head] for scales in self.of_tokens]
        else:
            plgpu.barrier_wait(self.full.at[stage])
            ring = [self.ring.at[stage, j] for j in range(len(self.of_tokens))]
            layout = ROWS.reduce(0)  # every thread holds the scales of its part of the products
            loaded = [plgpu.load(scales, layout=layout, optimized=False) for scales in ring]
        k = loaded[0] if self.k is self.of_tokens[0] else None
        v = loaded[-1] if self.v is self.of_tokens[-1] else None
        return k, v

    @property
    def copied(self) -> tuple[Any, ...]:
        """Those that pass through the ring."""
        return () if interpreted() else self.of_tokens

    @property
    def lag(self) -> int:
        """How many tiles a warp goes on before it waits for the scales of one and announces them."""
        return self.stages // 2

    def fetch(self, block_id: jax.Array, offset: Any, stage: jax.Array, row: Any, size: int) -> None:
        """One warp starts to copy the scales of `size` tokens of a block, from `offset`, to a stage, from `row`."""
        for j, scales in enumerate(self.copied):
            _start_copy(scales, (block_id, offset, self.kv_head), self.ring.at[stage, j], row, size)

    def announce(self, turn: jax.Array) -> None:
        """One warp has started the copies of the tile that is fetched as the `turn`-th."""
        if not self.copied:
            return
        _commit_and_wait(self.lag)

        @pl.when(turn >= self.lag)
        def _announce() -> None:
            plgpu.barrier_arrive(self.full.at[lax.rem(turn - self.lag, jnp.int32(self.stages))])

    def announce_last(self, num_tiles: jax.Array) -> None:
        """One warp has started the copies of all its tiles."""
        if not self.copied:
            return
        _commit_and_wait(0)
        for back in range(1, self.lag + 1):

            @pl.when(num_tiles >= back)
            def _announce(back: int = back) -> None:
                plgpu.barrier_arrive(self.full.at[lax.rem(num_tiles - back, jnp.int32(self.stages))])


def _start_copy(scales: Any, source: tuple[Any, ...], target: Any, row: Any, size: int) -> None:
    """One warp: scales[block_id, offset + t, kv_head] to target[row + t] for t below `size`, a lane each."""
    assert size <= LANES
    _, block_size, kv_heads = scales.shape

    def start(_: Any, scales: ir.Value, target: ir.Value, *scalars: mgpu.FragmentedArray) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        block_id, offset, kv_head, row = (arith.extsi(i64, scalar.registers.item()) for scalar in scalars)
        lane = utils.inline_ptx("mov.u32 $0, %laneid;", result_types=i32)
        token = arith.extui(i64, lane)
        slot = arith.addi(arith.addi(arith.muli(block_id, utils.c(block_size, i64)), offset), token)
        number = arith.addi(arith.muli(slot, utils.c(kv_heads, i64)), kv_head)
        source = utils.getelementptr(utils.memref_ptr(scales), [number], f32)
        source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), source)
        address = utils.getelementptr(utils.memref_ptr(target), [arith.addi(row, token)], f32)
        ours = arith.cmpi(arith.CmpIPredicate.ult, lane, utils.c(size, i32)) if size < LANES else None
        utils.inline_ptx(
            "cp.async.ca.shared.global [$0], [$1], 4;", address, source, predicate=ours, has_side_effects=True
        )

    scalars = [jnp.asarray(scalar, jnp.int32) for scalar in (*source, row)]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * len(scalars)))(start)(
        scales, target, *scalars
    )


def _commit_and_wait(pending: int) -> None:
    """One warp: those copies that it started since the last call are one group; all but the last `pending` are done."""

    @plgpu.inline_mgpu()
    def _wait(_: Any) -> None:
        nvvm.cp_async_commit_group()
        nvvm.cp_async_wait_group(pending)

    _wait()


def _slots(item: Item, tables: Any, tile: jax.Array, num_blocks: int, block_size: int) -> jax.Array:
    """The slots of the tokens of a tile, int32 [tile]; slots of the null block for tokens that may not be read."""
    tokens = jnp.arange(item.tile_tokens, dtype=jnp.int32) + tile * item.tile_tokens
    ids = block_at(tables[...], item.seq, tokens // block_size, item.entries_to_follow(), num_blocks)
    return ids * block_size + tokens % block_size
