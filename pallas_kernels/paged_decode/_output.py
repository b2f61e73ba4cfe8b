"""How a program writes finished rows.

A program may exit once its results have been read from SMEM; only a later kernel uses them.
Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._merge import Sums
from pallas_kernels._rows import ROWS_FIRST
from pallas_kernels._walk import Partition
from pallas_kernels.paged_decode._refs import Refs


@dataclasses.dataclass(frozen=True)
class Output:
    """Of one sequence and KV head."""

    refs: Refs
    partition: Partition
    q_len: int
    group: int

    def write(self, sums: Sums) -> None:
        q_flat_smem, lse_smem = self.refs.q_flat_smem, self.refs.lse_smem  # [rows + 1, width]; f32 [rows]
        rows, columns = sums.acc[0].shape
        factor, lse = _rows.normalise(sums.m, sums.l, self.sinks())
        out = [(part * ROWS_FIRST.over(factor, part.shape)).astype(q_flat_smem.dtype) for part in sums.acc]
        # Q is no longer needed.
        places = [q_flat_smem.at[pl.ds(0, rows), pl.ds(c * columns, columns)] for c in range(len(out))]
        _rows.store_together(*zip(places, out, strict=True), (lse_smem, lse), orientation=ROWS_FIRST)
        plgpu.commit_smem()
        self.copy_rows(q_flat_smem)
        self.copy_lse(lse_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sinks(self) -> jax.Array | None:
        """f32 [rows]."""
        if self.refs.sinks is None:
            return None
        return plgpu.load(self.refs.sinks.at[self.partition.kv_head], layout=ROWS_FIRST.vector, optimized=False)

    def copy_rows(self, rows_smem: Any) -> None:
        """Starts to copy finished rows, [rows, width]."""
        heads = pl.ds(self.partition.kv_head * self.group, self.group)
        for token in range(self.q_len):
            plgpu.copy_smem_to_gmem(
                rows_smem.at[pl.ds(token * self.group, self.group)],
                self.refs.out.at[self.partition.seq, token, heads, slice(None)],  # [seqs, q_len, heads, width]
            )

    def copy_lse(self, lse_smem: Any) -> None:
        """f32 [rows]."""
        plgpu.copy_smem_to_gmem(lse_smem, self.refs.lse.at[self.partition.seq, self.partition.kv_head])
