"""The partitions of one cluster merge before their sums leave it.

Each member adds up some columns of the head_dim, from the sums that all members send it (`_inbox`). A few partitions
therefore cost no round trip through memory.

Everything here is traced inside the decode kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._interpret import interpreted
from pallas_kernels._merge import Partials, Sums, weighted
from pallas_kernels._rows import ROWS_LAST
from pallas_kernels._walk import Partition
from pallas_kernels.paged_decode._inbox import SHARE, SHARE_ROWS, Inbox, InterpretedInbox, Sharing
from pallas_kernels.paged_decode._output import Output
from pallas_kernels.paged_decode._refs import Refs


def inbox_of(refs: Refs, partition: Partition, sharing: Sharing) -> Inbox | InterpretedInbox:
    if not interpreted():
        return Inbox(refs, sharing)
    cluster = (partition.first_place + partition.partial) * refs.lse.shape[1] + partition.kv_head
    return InterpretedInbox(refs, sharing, cluster * sharing.cluster)


def merge(sums: Sums, output: Output, sharing: Sharing, num_clusters: int) -> None:
    """In every program of a cluster, one of `num_clusters` of its sequence and KV head."""
    inbox = inbox_of(output.refs, output.partition, sharing)
    (acc,) = sums.acc
    inbox.exchange(acc, sums.m, sums.l)
    for turn in range(sharing.num_turns):
        if turn > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns are read
        share = turn * sharing.cluster + lax.axis_index("member")
        add_up = functools.partial(_merge_share, share, turn, inbox, output, num_clusters)
        pl.when(share < sharing.num_shares)(add_up)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_share(
    share: jax.Array, turn: int, inbox: Inbox | InterpretedInbox, output: Output, num_clusters: int
) -> None:
    """Adds up the columns of a share, and writes them."""
    columns, members = inbox.sharing.columns, range(inbox.sharing.cluster)
    m_members, l_members = zip(*(inbox.m_and_l(member) for member in members), strict=True)
    m = functools.reduce(jnp.maximum, m_members)
    weights = [jnp.exp2(m_member - m) for m_member in m_members]
    l = functools.reduce(jnp.add, [l_member * weight for l_member, weight in zip(l_members, weights, strict=True)])
    merged = functools.reduce(
        jnp.add, [weighted(inbox.columns(i, turn), weights[i], ROWS_LAST, SHARE) for i in members]
    )

    def write(sums: Sums) -> None:
        columns_smem, lse_smem = output.refs.columns_smem, output.refs.lse_smem  # [rows, columns], f32 [rows]
        factor, lse = _rows.normalise(sums.m, sums.l, output.sinks(SHARE_ROWS))
        out = weighted(sums.acc[0], factor, ROWS_LAST, SHARE).astype(columns_smem.dtype)
        _rows.store_together((lse_smem, lse), transposed=[(columns_smem, out)], layout=SHARE, orientation=ROWS_LAST)
        plgpu.commit_smem()
        output.copy_rows(columns_smem, pl.ds(share * columns, columns))
        pl.when(share == 0)(lambda: output.copy_lse(lse_smem))  # the lse of the first share stands for all

    sums = Sums((merged,), m, l)
    if num_clusters == 1:
        write(sums)
    else:
        Partials(output.refs, output.partition, num_clusters, share, columns, SHARE).merge(sums, write)
