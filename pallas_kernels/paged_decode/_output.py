"""Where a program writes its sums: to finished rows, or to a float32 partial for the merge kernel.

Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._rows import room_of_stack
from pallas_kernels._walk import Partition
from pallas_kernels.paged_decode._inbox import Sharing
from pallas_kernels.paged_decode._refs import Refs

WHOLE = slice(None)


@dataclasses.dataclass(frozen=True)
class Output:
    """Which rows of the output a program computes, and which of the programs of these rows it is."""

    refs: Refs
    partition: Partition
    num_partials: int  # of its sequence and KV head, each from one cluster
    sharing: Sharing  # of columns among the members of its cluster
    q_len: int
    group: int

    @property
    def whole(self) -> bool | jax.Array:
        """Whether this program has its whole sequence."""
        return self.partition.count == 1

    @property
    def split(self) -> bool | jax.Array:
        return self.partition.count != 1

    def sinks(self, layout: Any) -> jax.Array | None:
        """f32 [rows]."""
        if self.refs.sinks is None:
            return None
        return plgpu.load(self.refs.sinks.at[self.partition.kv_head], layout=layout, optimized=False)

    def copy_rows(self, rows_smem: Any, columns: Any = WHOLE) -> None:
        """Starts to copy finished rows, [rows, columns]."""
        heads = pl.ds(self.partition.kv_head * self.group, self.group)
        for token in range(self.q_len):
            plgpu.copy_smem_to_gmem(
                rows_smem.at[pl.ds(token * self.group, self.group)],
                self.refs.out.at[self.partition.seq, token, heads, columns],  # [seqs, q_len, heads, width]
            )

    def copy_lse(self, lse_smem: Any) -> None:
        """f32 [rows]."""
        plgpu.copy_smem_to_gmem(lse_smem, self.refs.lse.at[self.partition.seq, self.partition.kv_head])

    def copy_partial(self, acc_smem: Any, columns: Any) -> None:
        """Starts to copy some columns of O^T of a partial, f32 [columns, rows]."""
        partials = self.refs.partial_out  # [stacks * room, width, rows]
        room = room_of_stack(partials, self.refs.partial_ml)
        partial = partials.at[self.partition.stack * room + self.partition.partial]
        plgpu.copy_smem_to_gmem(acc_smem, partial.at[columns])

    def copy_m_and_l(self, ml_smem: Any) -> None:
        """f32 [2, rows]."""
        for i in range(2):  # [stacks * 2, ml_room, rows]
            partial = self.refs.partial_ml.at[2 * self.partition.stack + i, self.partition.partial]
            plgpu.copy_smem_to_gmem(ml_smem.at[i], partial)
