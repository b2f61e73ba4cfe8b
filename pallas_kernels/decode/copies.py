"""Copies of Q, K and V to SMEM. Only `start_tile` and the waits differ between GPUs.

The i-th tile of a program is in stage i % stages of two rings. The copy of its keys starts when the keys of tile
i - stages have been used, and the copy of its values half a step later. On all GPUs the order is Q K0 V0 K1 V1 ... The
values of a latent are part of its keys, so its copy starts when both have been used.

    CpAsync   threads copy 16 bytes at a time; arrivals are counted in groups; Ampere and newer
    Tma       the copy engine copies blocks, started by one thread a warp; arrivals complete barriers; Hopper and newer
"""

import dataclasses
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import cp_async, scales
from pallas_kernels.common.fetch import Ids, Ring, blocks_of_tile, copy_tile
from pallas_kernels.common.interpret import interpreted
from pallas_kernels.common.rows import matrix
from pallas_kernels.common.sizes import COLUMNS, rem
from pallas_kernels.decode.config import TILE
from pallas_kernels.decode.refs import Refs
from pallas_kernels.decode.walk import Walk


@dataclasses.dataclass(frozen=True)
class CpAsync:
    """The keys of a tile are one group of copies, and so are its values if they have a ring. Past the last tile the
    groups are empty, so that each step has the same number of groups in flight."""

    refs: Refs
    walk: Walk
    rings: list[Ring]  # K and V, or one
    stages: int

    def read_ids(self, i: jax.Array) -> Ids:
        """Block ids of this program's i-th tile."""
        refs, walk = self.refs, self.walk
        entries, start = walk.entries_to_follow(), walk.tile_at(i) * TILE
        return blocks_of_tile(refs.block_tables, walk.seq, start, TILE, entries, refs.k_cache)

    def start_query(self) -> None:
        refs, partition = self.refs, self.walk.partition
        first = partition.seq, partition.kv_head * refs.group
        num_rows = refs.q.shape[1] * refs.group
        cp_async.copy_rows(refs.q, refs.q_smem, matrix(COLUMNS, 2), first, group=refs.group, num_rows=num_rows)
        cp_async.commit()

    def start_keys(self, i: jax.Array, ids: Ids) -> None:
        self.start(i, ids, self.rings[0], self.scales)

    def start_values(self, i: jax.Array, ids: Ids) -> None:
        for ring in self.rings[1:]:
            self.start(i, ids, ring, [])

    def start_latent(self, i: jax.Array, ids: Ids) -> None:  # replaces values that are still in use
        cp_async.barrier()
        self.start_keys(i, ids)

    def wait_query(self) -> None:  # in flight: the first tiles, without the values of the last
        cp_async.wait(len(self.rings) * (self.stages - 1) + 1)

    def wait_keys(self, stage: jax.Array) -> None:  # in flight: this tile's values, and stages - 1 tiles
        cp_async.wait(len(self.rings) * (self.stages - 1))

    def wait_values(self, stage: jax.Array) -> None:  # in flight: as above, and the keys of one more tile
        if len(self.rings) > 1:
            cp_async.wait(2 * self.stages - 1)

    @property
    def scales(self) -> list[tuple[Any, Any]]:
        """The per-token scales and the rings of the scales, which are copied with the keys."""
        return scales.rings(self.refs)

    def start(self, i: jax.Array, ids: Ids, ring: Ring, scales: list[tuple[Any, Any]]) -> None:
        @pl.when(i < self.walk.num_tiles)
        def _start() -> None:
            stage = rem(i, self.stages)
            kv_head = self.refs.cache_head(self.walk.partition.kv_head)
            # The tile's first slot in its first block.
            offset = rem(self.walk.tile_at(i) * TILE, self.walk.block_size)
            self.start_tile(ring, stage, ids, offset, kv_head)
            for source, target in scales:
                cp_async.copy_scales(source, target.at[stage], ids, offset, kv_head)

        cp_async.commit()

    def start_tile(self, ring: Ring, stage: jax.Array, ids: Ids, offset: jax.Array, kv_head: jax.Array) -> None:
        transforms = matrix(COLUMNS, ring.source.dtype.itemsize)
        cp_async.copy_tile(ring.source, ring.target.at[stage], transforms, ids, offset, kv_head)


class Tma(CpAsync):
    """Copies K and V with the Tensor Memory Accelerator (TMA).

    Q, which may have any number of rows, and per-token scales are copied as in CpAsync.
    """

    @property
    def columns(self) -> Any:
        """A head's columns, as wide as SMEM. Past the end of a narrower head the copy engine writes zeros; only
        interpret mode copies narrower heads this way."""
        width, head_dim = self.refs.q_smem.shape[1], self.refs.q.shape[-1]
        seq = self.walk.seq  # makes the start look dynamic: a static start past the end is refused while tracing
        return slice(None) if head_dim == width else pl.ds(seq - seq, width)

    def start_latent(self, i: jax.Array, ids: Ids) -> None:
        self.start_keys(i, ids)  # all warps have waited for each other here

    def wait_keys(self, stage: jax.Array) -> None:
        plgpu.barrier_wait(self.rings[0].full.at[stage])
        if self.scales:
            super().wait_keys(stage)

    def wait_values(self, stage: jax.Array) -> None:
        for ring in self.rings[1:]:
            plgpu.barrier_wait(ring.full.at[stage])

    def start_tile(self, ring: Ring, stage: jax.Array, ids: Ids, offset: jax.Array, kv_head: jax.Array) -> None:
        def copy(block_id: jax.Array, tokens: Any, rows: Any) -> None:
            source = ring.source.at[block_id, tokens, kv_head, self.columns]
            plgpu.copy_gmem_to_smem(source, ring.target.at[stage, rows], ring.full.at[stage])

        copy_tile(copy, ids, offset, self.walk.block_size, TILE)


def copies_of(name: Literal["tma", "cp_async"]) -> type[CpAsync]:
    """The class for `Config.copies`. Interpret mode copies heads of any size by TMA."""
    return {"tma": Tma, "cp_async": CpAsync}["tma" if interpreted() else name]
