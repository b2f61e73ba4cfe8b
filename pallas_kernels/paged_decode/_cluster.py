"""The partitions of one cluster merge before their sums leave it.

Each member adds up some columns of the head_dim, from the sums that all members send it (`_inbox`). A few partitions
therefore cost no second kernel and no round trip through memory.

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
from pallas_kernels._rows import ROWS_LAST
from pallas_kernels.paged_decode._inbox import SHARE, SHARE_ROWS, Inbox, InterpretedInbox
from pallas_kernels.paged_decode._output import Output


def inbox_of(output: Output) -> Inbox | InterpretedInbox:
    sharing = output.sharing
    if not interpreted():
        return Inbox(output.refs, sharing)
    cluster_index = output.partition.stack * output.num_partials + output.partition.partial
    return InterpretedInbox(output.refs, sharing, cluster_index * sharing.cluster)


def merge(acc: jax.Array, m: jax.Array, l: jax.Array, output: Output) -> None:
    """As `_finish.finish`, in every program of a cluster."""
    inbox, sharing = inbox_of(output), output.sharing
    inbox.exchange(acc, m, l)
    for turn in range(sharing.num_turns):
        if turn > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns are read
        share = turn * sharing.cluster + lax.axis_index("member")
        pl.when(share < sharing.num_shares)(functools.partial(_merge_share, share, turn, inbox, output))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_share(share: jax.Array, turn: int, inbox: Inbox | InterpretedInbox, output: Output) -> None:
    """Adds up the columns of a share; the first share's lse, or m and l, stand for all."""
    columns_smem, row_smem = output.refs.columns_smem, output.refs.row_smem  # as in `scratch`; f32 [2, rows]
    ours = pl.ds(share * output.sharing.columns, output.sharing.columns)
    members = range(output.sharing.cluster)

    m_members, l_members = zip(*(inbox.m_and_l(member) for member in members), strict=True)
    m = functools.reduce(jnp.maximum, m_members)
    weights = [jnp.exp2(m_member - m) for m_member in m_members]
    l = functools.reduce(jnp.add, [l_member * weight for l_member, weight in zip(l_members, weights, strict=True)])
    merged = functools.reduce(jnp.add, [_weighted(inbox.columns(i, turn), weights[i]) for i in members])
    if output.num_partials == 1:
        factor, lse = _rows.normalise(m, l, output.sinks(SHARE_ROWS))
        out = _weighted(merged, factor).astype(columns_smem.dtype)
        _rows.store_together(
            (row_smem.at[0], lse),
            transposed=[(columns_smem, out)],
            layout=SHARE,
            orientation=ROWS_LAST,
        )
    else:
        _rows.store_together(
            (columns_smem, merged),
            (row_smem.at[0], m),
            (row_smem.at[1], l),
            layout=SHARE,
            orientation=ROWS_LAST,
        )
    plgpu.commit_smem()
    if output.num_partials == 1:
        output.copy_rows(columns_smem, ours)
        pl.when(share == 0)(lambda: output.copy_lse(row_smem.at[0]))
    else:
        output.copy_partial(columns_smem, ours)
        pl.when(share == 0)(lambda: output.copy_m_and_l(row_smem))


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * plgpu.layout_cast(ROWS_LAST.over(weight, x.shape), SHARE)
