"""Asynchronous copies of 16 bytes a thread from GMEM to SMEM (cp.async), which every NVIDIA GPU since Ampere has.

SMEM is tiled and swizzled as Mosaic's products expect it. Everything here is traced inside the kernel, by all 128
threads of a program.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels.common.mlir import arith, constant
from pallas_kernels.common.rows import SCALAR
from pallas_kernels.decode.config import TILE

THREADS = 128
CHUNK = 16  # bytes


def copy_rows(
    source: Any, target: Any, transforms: Any, first: Sequence[jax.Array], *, group: int, num_rows: int
) -> None:
    """Starts to copy q: row r of `target` [rows, width] from `source` [seqs, q_len, heads, head_dim] at `first`, a
    sequence and a head, and from there token r // group, head r % group. Zeros past `num_rows` and past the head."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), SCALAR, SCALAR))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        seq, head = map(_scalar, scalars)
        _, q_len, heads, head_dim = ir.MemRefType(source.type).shape
        for chunk in _chunks(target):
            token, of_group = arith.divui(chunk.row, _i32(group)), arith.remui(chunk.row, _i32(group))
            row = _sum(_product(seq, q_len * heads), _product(token, heads), head, of_group)
            is_there = arith.andi(_below(chunk.row, num_rows), _below(chunk.byte, 2 * head_dim))
            # What is not there is not read either: it must not be past the end of q.
            row = arith.select(is_there, row, _i32(0))
            _copy(_address(source, _wide(row), 2 * head_dim, chunk.byte), chunk.smem, is_there)

    start(source, target, *first)


def copy_tile(
    source: Any,  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any,  # SMEM [64, width]
    transforms: Any,
    ids: Sequence[jax.Array],  # of the blocks of the tile
    slot: jax.Array,  # of the first block where the tile begins
    kv_head: jax.Array,
) -> None:
    """Starts to copy a tile, with zeros past the end of a head that is narrower than `target`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), *[SCALAR] * (2 + len(ids))))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        slot, kv_head, *block_ids = map(_scalar, scalars)
        _, block_size, kv_heads, head_dim = ir.MemRefType(source.type).shape
        row_bytes = head_dim * utils.bitwidth(ir.MemRefType(source.type).element_type) // 8
        for chunk in _chunks(target):
            block_id, its_slot = _place(chunk.row, chunk.rows, block_ids, slot)
            row = _sum(_product(its_slot, kv_heads), kv_head)
            number = arith.addi(_product(_wide(block_id), block_size * kv_heads), _wide(row))
            in_head = None if row_bytes == chunk.width else _below(chunk.byte, row_bytes)
            byte = chunk.byte if in_head is None else arith.select(in_head, chunk.byte, _i32(0))
            _copy(_address(source, number, row_bytes, byte), chunk.smem, in_head)

    start(source, target, slot, kv_head, *ids)


def copy_scales(source: Any, target: Any, ids: Sequence[jax.Array], slot: jax.Array, kv_head: jax.Array) -> None:
    """Starts to copy scales f32 [blocks, block_size, kv_heads] of the tokens of a tile to `target` [64]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * (2 + len(ids))))
    def start(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        slot, kv_head, *block_ids = map(_scalar, scalars)
        _, block_size, kv_heads = ir.MemRefType(source.type).shape
        token = arith.remui(_thread(), _i32(TILE))
        block_id, its_slot = _place(token, range(TILE), block_ids, slot)
        number = arith.addi(
            _product(_wide(block_id), block_size * kv_heads), _wide(_sum(_product(its_slot, kv_heads), kv_head))
        )
        place = arith.addi(_pointer(target), _product(token, 4))
        utils.inline_ptx(
            "cp.async.ca.shared.global [$0], [$1], 4;",
            place,
            _address(source, number, 4, _i32(0)),
            predicate=_below(_thread(), TILE),
            has_side_effects=True,
        )

    start(source, target, slot, kv_head, *ids)


def commit() -> None:
    """The copies that were started since the last call are one group."""

    @plgpu.inline_mgpu()
    def commit_group(_: Any) -> None:
        nvvm.cp_async_commit_group()

    commit_group()


def wait(pending: int) -> None:
    """All groups but the last `pending` have arrived, for every thread."""

    @plgpu.inline_mgpu()
    def wait_group(_: Any) -> None:
        nvvm.cp_async_wait_group(pending)
        utils.warpgroup_barrier()

    wait_group()


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """16 bytes that a thread copies."""

    row: Any  # i32, of the matrix in SMEM
    rows: range  # in which the row is, whatever the thread
    byte: Any  # i32, of the row
    width: int  # bytes of a row
    smem: Any  # address, i32


def _chunks(smem: Any) -> Iterator[_Chunk]:
    """Those of a matrix in SMEM that one thread copies; smem: [row tiles, column tiles, 8, columns of a tile]."""
    smem_type = ir.MemRefType(smem.type)
    row_tiles, column_tiles, tile_rows, tile_columns = smem_type.shape
    row_bytes = tile_columns * utils.bitwidth(smem_type.element_type) // 8  # of a tile
    width = column_tiles * row_bytes
    in_row = width // CHUNK
    num_chunks = row_tiles * tile_rows * in_row
    for first in range(0, num_chunks, THREADS):
        number = arith.addi(_thread(), _i32(first))
        if first + THREADS > num_chunks:  # few rows: some threads copy what others copy too
            number = arith.remui(number, _i32(num_chunks))
        row, byte = arith.divui(number, _i32(in_row)), _product(arith.remui(number, _i32(in_row)), CHUNK)
        tile = _sum(_product(arith.divui(row, _i32(tile_rows)), column_tiles), arith.divui(byte, _i32(row_bytes)))
        offset = _sum(
            _product(tile, tile_rows * row_bytes),
            _product(arith.remui(row, _i32(tile_rows)), row_bytes),
            arith.remui(byte, _i32(row_bytes)),
        )
        # The swizzle: bits 4 to 6 of an address, or fewer for narrower tiles, turned by bits 7 to 9.
        turn = arith.andi(arith.shrui(offset, _i32(7)), _i32(row_bytes // CHUNK - 1))
        offset = arith.xori(offset, arith.shli(turn, _i32(4)))
        rows = range(first // in_row, min((first + THREADS - 1) // in_row + 1, row_tiles * tile_rows))
        yield _Chunk(row, rows, byte, width, arith.addi(_pointer(smem), offset))


def _place(row: Any, rows: range, ids: Sequence[Any], slot: Any) -> tuple[Any, Any]:
    """The block, and the slot in it, of a row of a tile that is in `rows`; the first block begins at `slot`."""
    run = TILE // len(ids)
    first = rows[0] // run
    block_id = ids[first]
    for i in range(first + 1, rows[-1] // run + 1):
        block_id = arith.select(_below(row, i * run), block_id, ids[i])
    return block_id, arith.addi(slot, arith.remui(row, _i32(run)))


def _copy(gmem: Any, smem: Any, is_there: Any | None) -> None:
    if is_there is None:
        utils.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16;", smem, gmem, has_side_effects=True)
        return
    num_bytes = arith.select(is_there, _i32(CHUNK), _i32(0))  # what it does not read is zero
    utils.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", smem, gmem, num_bytes, has_side_effects=True)


def _address(array: Any, row: Any, row_bytes: int, byte: Any) -> Any:
    """i64, of a byte of a row of an array in GMEM."""
    start = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(array))
    return arith.addi(start, arith.addi(_product(row, row_bytes), _wide(byte)))


def _pointer(smem: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(smem))


def _thread() -> Any:
    return arith.remui(utils.thread_idx(), _i32(THREADS))


def _scalar(x: Any) -> Any:
    return x.registers.item()


def _i32(x: int) -> Any:
    return constant("i32", x)


def _wide(x: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), x)


def _product(x: Any, y: int) -> Any:
    return arith.muli(x, utils.c(y, x.type))


def _sum(*terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _below(x: Any, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, x, _i32(bound))
