"""Asynchronous copies from GMEM to SMEM, 16 bytes a thread (cp.async), on every NVIDIA GPU since Ampere.

SMEM is tiled and swizzled as Mosaic's products expect. All functions are traced inside the kernel and run on all 128
threads of a program. In interpret mode the copies are synchronous.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.common.interpret import interpreted_by, nothing
from pallas_kernels.common.mlir import (
    CHUNK,
    THREADS,
    arith,
    below,
    chunks,
    i32,
    pointer,
    product,
    quotient,
    remainder,
    scalar_of,
    thread,
    total,
    wide,
)
from pallas_kernels.common.rows import SCALAR
from pallas_kernels.common.sizes import zero_unless


def _copy_rows_at_once(
    source: Any, target: Any, _: Any, first: Sequence[jax.Array], *, group: int, num_rows: int
) -> None:
    seq, head = first
    for token in range(num_rows // group):
        q = source[seq, token, pl.ds(head, group), :]
        rest = jnp.zeros((group, target.shape[1] - q.shape[1]), q.dtype)
        target[pl.ds(token * group, group)] = jnp.concatenate([q, rest], axis=1)


def _copy_tile_at_once(
    source: Any,
    target: Any,
    _: Any,
    ids: Sequence[jax.Array],
    slot: jax.Array,
    kv_head: jax.Array,
    seen: tuple[jax.Array, ...],
) -> None:
    count, width = target.shape[0] // len(ids), target.shape[1]
    for j, block_id in enumerate(ids):
        rows = source[block_id, pl.ds(slot, count), kv_head, :]
        rows = jnp.concatenate([rows, jnp.zeros((count, width - rows.shape[1]), rows.dtype)], axis=1)
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0) + j * count
        ours = jnp.logical_and(row >= seen[0], row < seen[1])
        target[pl.ds(j * count, count)] = zero_unless(ours, rows)


def _copy_scales_at_once(
    source: Any, target: Any, ids: Sequence[jax.Array], slot: jax.Array, kv_head: jax.Array, threads: int = THREADS
) -> None:
    count = target.shape[0] // len(ids)
    for j, block_id in enumerate(ids):
        target[pl.ds(j * count, count)] = source[block_id, pl.ds(slot, count), kv_head]


@interpreted_by(_copy_rows_at_once)
def copy_rows(
    source: Any, target: Any, transforms: Any, first: Sequence[jax.Array], *, group: int, num_rows: int
) -> None:
    """Starts copying Q from `source` [seqs, q_len, heads, head_dim] to `target` [rows, width].

    `first` is a sequence and its first head. Row r is token r // group and head r % group from there. Rows past
    `num_rows` and columns past head_dim become zero.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), SCALAR, SCALAR))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        seq, head = map(scalar_of, scalars)
        _, q_len, heads, head_dim = ir.MemRefType(source.type).shape
        for chunk in chunks(target):
            token, of_group = quotient(chunk.row, group), remainder(chunk.row, group)
            row = total(product(seq, q_len * heads), product(token, heads), head, of_group)
            is_there = arith.andi(below(chunk.row, num_rows), below(chunk.byte, 2 * head_dim))
            # cp.async reads nothing for a missing row, but its address must still be within q.
            row = arith.select(is_there, row, i32(0))
            copy(_address(source, wide(row), 2 * head_dim, chunk.byte), chunk.smem, is_there)

    start(source, target, *first)


@interpreted_by(_copy_tile_at_once)
def copy_tile(
    source: Any,  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any,  # SMEM [tile, width]
    transforms: Any,
    ids: Sequence[jax.Array],  # the tile's blocks
    slot: jax.Array,  # the tile's first slot in the first block
    kv_head: jax.Array,
    seen: tuple[jax.Array, ...] = (),  # rows of the tile to copy: the first, and one past the last; empty: all rows
) -> None:
    """Starts copying a tile. Rows outside `seen` and columns past head_dim become zero."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), *[SCALAR] * (2 + len(seen) + len(ids))))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        slot, kv_head, *rest = map(scalar_of, scalars)
        (first, end), block_ids = (rest[:2], rest[2:]) if seen else ((None, None), rest)
        row_tiles, _, tile_rows, _ = ir.MemRefType(target.type).shape
        tile = row_tiles * tile_rows
        _, block_size, kv_heads, head_dim = ir.MemRefType(source.type).shape
        row_bytes = head_dim * utils.bitwidth(ir.MemRefType(source.type).element_type) // 8
        for chunk in chunks(target):
            is_there = None if row_bytes == chunk.width else below(chunk.byte, row_bytes)
            byte = chunk.byte if is_there is None else arith.select(is_there, chunk.byte, i32(0))
            block_id, of_thread, after = _locate(chunk.thread_row, chunk.rows_after, chunk.rows, block_ids, tile)
            # The part that depends on the thread comes first: it stays in a register from tile to tile.
            place = total(product(of_thread, kv_heads * row_bytes), byte)
            of_tile = product(total(product(arith.addi(slot, i32(after)), kv_heads), kv_head), row_bytes)
            block = product(wide(block_id), block_size * kv_heads * row_bytes)
            address = arith.addi(arith.addi(pointer(source, 64), wide(place)), arith.addi(block, wide(of_tile)))
            if seen:
                first_seen, end_seen = (arith.subi(bound, i32(chunk.rows_after)) for bound in (first, end))
                is_seen = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, chunk.thread_row, first_seen),
                    arith.cmpi(arith.CmpIPredicate.slt, chunk.thread_row, end_seen),
                )
                is_there = is_seen if is_there is None else arith.andi(is_there, is_seen)
            copy(address, chunk.smem, is_there)

    start(source, target, slot, kv_head, *seen, *ids)


@interpreted_by(_copy_scales_at_once)
def copy_scales(
    source: Any, target: Any, ids: Sequence[jax.Array], slot: jax.Array, kv_head: jax.Array, threads: int = THREADS
) -> None:
    """Starts copying the scales of a tile's tokens, f32 [blocks, block_size, kv_heads], to `target` [tile]. Each of the
    `threads` threads, a warpgroup or a warp, copies at most one."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * (2 + len(ids))))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        slot, kv_head, *block_ids = map(scalar_of, scalars)
        _, block_size, kv_heads = ir.MemRefType(source.type).shape
        (tile,) = ir.MemRefType(target.type).shape
        own = remainder(thread(), threads)
        token = remainder(own, tile)
        block_id, of_thread, _ = _locate(token, 0, range(tile), block_ids, tile)
        row = total(product(arith.addi(slot, of_thread), kv_heads), kv_head)
        number = arith.addi(product(wide(block_id), block_size * kv_heads), wide(row))
        address = arith.addi(pointer(target), product(token, 4))
        utils.inline_ptx(
            "cp.async.ca.shared.global [$0], [$1], 4;",
            address,
            _address(source, number, 4, i32(0)),
            predicate=below(own, tile),
            has_side_effects=True,
        )

    start(source, target, slot, kv_head, *ids)


@interpreted_by(nothing)
def commit() -> None:
    """Makes one group of all copies started since the last call."""

    @plgpu.inline_mgpu()
    def commit_group(_: Any) -> None:
        nvvm.cp_async_commit_group()

    commit_group()


@interpreted_by(plgpu.commit_smem)
def barrier() -> None:
    """Waits for all threads of the warpgroup. Their writes to SMEM are then visible to each other."""

    @plgpu.inline_mgpu()
    def wait_for_warps(_: Any) -> None:
        utils.warpgroup_barrier()

    wait_for_warps()


@interpreted_by(nothing)
def wait_own(pending: int) -> None:
    """Waits until all but the last `pending` groups of this thread have arrived."""

    @plgpu.inline_mgpu()
    def wait_group(_: Any) -> None:
        nvvm.cp_async_wait_group(pending)

    wait_group()


@interpreted_by(nothing)
def wait(pending: int) -> None:
    """Waits until all but the last `pending` groups of every thread have arrived."""

    @plgpu.inline_mgpu()
    def wait_group(_: Any) -> None:
        nvvm.cp_async_wait_group(pending)
        utils.warpgroup_barrier()

    wait_group()


def _locate(thread_row: Any, rows_after: int, rows: range, ids: Sequence[Any], tile: int) -> tuple[Any, Any, int]:
    """Locates a row of a tile: its block id, and its row within the tile's part of that block.

    The row is `thread_row + rows_after`, which is in `rows`. The result has the same form: a row that may depend on the
    thread, and static rows after it.
    """
    run = tile // len(ids)
    first = rows[0] // run
    if rows[-1] // run == first and rows_after >= first * run:
        return ids[first], thread_row, rows_after - first * run
    row, block_id = arith.addi(thread_row, i32(rows_after)), ids[first]
    for i in range(first + 1, rows[-1] // run + 1):
        block_id = arith.select(below(row, i * run), block_id, ids[i])
    return block_id, remainder(row, run), 0


def copy(gmem: Any, smem: Any, is_there: Any | None) -> None:
    """Copies 16 bytes from one address to another, or writes zeros if the source is missing."""
    if is_there is None:
        utils.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16;", smem, gmem, has_side_effects=True)
        return
    num_bytes = arith.select(is_there, i32(CHUNK), i32(0))  # bytes that are not read become zero
    utils.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", smem, gmem, num_bytes, has_side_effects=True)


def _address(array: Any, row: Any, row_bytes: int, byte: Any) -> Any:
    """The i64 address of a byte in a row of an array in GMEM."""
    return arith.addi(pointer(array, 64), arith.addi(product(row, row_bytes), wide(byte)))
