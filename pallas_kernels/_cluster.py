"""The partitions of one cluster merge before their sums leave it.

Each member adds up some columns of the head_dim, from the sums that all members send it (`_inbox`). A few partitions
therefore cost no second kernel and no round trip through memory.

Everything here is traced inside the decode kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._inbox import SHARE, SHARE_ROWS, Inbox, InterpretedInbox, Sharing
from pallas_kernels._place import Place
from pallas_kernels._rows import ROWS_LAST


def columns_of(*, width: int, cluster: int, q_len: int, group: int) -> int:
    """Columns of the head_dim that a member of a cluster adds up at a time.

    As few as need no second turn, or 64. A token's rows of them begin at multiples of 128 bytes, which the copy engine
    needs.
    """
    least = 16 if q_len == 1 else 64 // min(4, group & -group)
    return next((columns for columns in (16, 32) if columns >= least and columns * cluster >= width), 64)


def sharing_of(*, rows: int, width: int, cluster: int, q_len: int, group: int) -> Sharing:
    columns = columns_of(width=width, cluster=cluster, q_len=q_len, group=group)
    return Sharing(cluster=cluster, columns=columns, width=width, rows=rows)


def scratch(*, sharing: Sharing, num_partials: int, dtype: Any, interpret: Any) -> dict[str, Any]:
    columns, rows = sharing.columns, sharing.rows
    return {
        "columns_smem": plgpu.SMEM((rows, columns), dtype)
        if num_partials == 1
        else plgpu.SMEM((columns, rows), jnp.float32),
        **sharing.scratch(interpret),
    }


def inbox_of(place: Place) -> Inbox | InterpretedInbox:
    sharing = place.sharing
    if not place.interpret:
        return Inbox(place.refs, sharing)
    cluster_index = place.partition.stack * place.num_partials + place.partition.partial
    return InterpretedInbox(place.refs, sharing, cluster_index * sharing.cluster)


def merge(acc: jax.Array, m: jax.Array, l: jax.Array, place: Place) -> None:
    """As `_finish.finish`, in every program of a cluster."""
    inbox, sharing = inbox_of(place), place.sharing
    inbox.exchange(acc, m, l)
    for turn in range(sharing.num_turns):
        if turn > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns are read
        share = turn * sharing.cluster + lax.axis_index("member")
        pl.when(share < sharing.num_shares)(functools.partial(_merge_share, share, turn, inbox, place))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_share(share: jax.Array, turn: int, inbox: Inbox | InterpretedInbox, place: Place) -> None:
    """Adds up the columns of a share; the first share's lse, or m and l, stand for all."""
    columns_smem, row_smem = place.refs["columns_smem"], place.refs["row_smem"]  # as in `scratch`; f32 [2, rows]
    ours = pl.ds(share * place.sharing.columns, place.sharing.columns)
    members = range(place.sharing.cluster)

    m_members, l_members = zip(*(inbox.m_and_l(member) for member in members), strict=True)
    m = functools.reduce(jnp.maximum, m_members)
    weights = [jnp.exp2(m_member - m) for m_member in m_members]
    l = functools.reduce(jnp.add, [l_member * weight for l_member, weight in zip(l_members, weights, strict=True)])
    merged = functools.reduce(jnp.add, [_weighted(inbox.columns(i, turn), weights[i]) for i in members])
    if place.num_partials == 1:
        factor, lse = _rows.normalise(m, l, place.sinks(SHARE_ROWS))
        out = _weighted(merged, factor).astype(columns_smem.dtype)
        _rows.store_together(
            (row_smem.at[0], lse),
            transposed=[(columns_smem, out)],
            layout=SHARE,
            orientation=ROWS_LAST,
            interpret=place.interpret,
        )
    else:
        _rows.store_together(
            (columns_smem, merged),
            (row_smem.at[0], m),
            (row_smem.at[1], l),
            layout=SHARE,
            orientation=ROWS_LAST,
            interpret=place.interpret,
        )
    plgpu.commit_smem()
    if place.num_partials == 1:
        place.copy_rows(columns_smem, ours)
        pl.when(share == 0)(lambda: place.copy_lse(row_smem.at[0]))
    else:
        place.copy_partial(columns_smem, ours)
        pl.when(share == 0)(lambda: place.copy_m_and_l(row_smem))


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * plgpu.layout_cast(ROWS_LAST.over(weight, x.shape), SHARE)
