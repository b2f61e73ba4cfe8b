"""How a program's sums leave it: as finished rows, or as a float32 partial for the merge kernel.

The partitions of one cluster merge first, in shared memory: each leaves its partial in its own, all wait for each
other, and member i adds up columns 64 i to 64 i + 63 of the head_dim out of everybody's. So a few partitions cost no
second kernel and no round trip through memory.

Interpret mode cannot see a peer's shared memory: there the partials pass through an array in GMEM, `exchange`.
A program leaves once its results have left its shared memory: who reads them is a later kernel.
Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._rows import COLUMNS, ROWS, over_rows
from pallas_kernels._walk import Partition

EXCHANGE = "exchange_"


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rows of the output a program works on, and what it is among the programs that work on them."""

    partition: Partition
    num_partials: int  # of its sequence and KV head, each from one cluster
    cluster: int  # members
    q_len: int
    group: int

    @property
    def seq(self) -> jax.Array:
        return self.partition.seq

    @property
    def kv_head(self) -> jax.Array:
        return self.partition.kv_head

    @property
    def heads(self) -> Any:
        return pl.ds(self.kv_head * self.group, self.group)


def scratch(*, cluster: int, num_partials: int, rows: int, width: int, chunk: int, dtype: Any) -> dict[str, Any]:
    """What `finish` needs beside the `q_flat_smem` and `row_smem` of the kernel."""
    if cluster == 1:
        return {} if num_partials == 1 else {"acc_smem": plgpu.SMEM((chunk, rows), jnp.float32)}
    everybody = ("member",)
    return {
        # An array each: a peer's memory can be read an array at a time only, not a slice of one (jax 0.11.2).
        **{f"acc{i}_smem": plgpu.SMEM((COLUMNS, rows), jnp.float32) for i in range(width // COLUMNS)},
        "m_smem": plgpu.SMEM((rows,), jnp.float32),
        "l_smem": plgpu.SMEM((rows,), jnp.float32),
        "columns_smem": plgpu.SMEM((rows, COLUMNS), dtype)
        if num_partials == 1
        else plgpu.SMEM((COLUMNS, rows), jnp.float32),
        "merged_smem": plgpu.SMEM((2, rows), jnp.float32),  # lse, or m and l
        "partials_written": plgpu.ClusterBarrier(collective_axes=everybody),
        "partials_read": plgpu.ClusterBarrier(collective_axes=everybody),
    }


def scratch_bytes(*, cluster: int, num_partials: int, rows: int, width: int, chunk: int) -> int:
    if cluster == 1:
        return 0 if num_partials == 1 else chunk * rows * 4
    return width * rows * 4 + COLUMNS * rows * (2 if num_partials == 1 else 4) + 1024


def exchange(*, programs: int, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in GMEM that stand in for the peers' shared memory in interpret mode."""
    names = {f"acc{i}": (COLUMNS, rows) for i in range(width // COLUMNS)} | {"m": (rows,), "l": (rows,)}
    return {EXCHANGE + name: jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for name, shape in names.items()}


def finish(refs: dict[str, Any], acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array, place: Place) -> None:
    """`acc`: f32 [chunk, rows] each, together O^T; m, in units of log2, and l: f32 [rows]."""
    if "partitions" in refs:
        ours, whole = place.partition.index < place.partition.count, place.partition.count == 1
        pl.when(jnp.logical_and(ours, whole))(lambda: _write_rows(refs, acc, m, l, place))
        pl.when(jnp.logical_and(ours, jnp.logical_not(whole)))(lambda: _write_partial(refs, acc, m, l, place))
    elif place.cluster > 1:
        _merge_cluster(refs, acc, m, l, place)
    elif place.num_partials > 1:
        _write_partial(refs, acc, m, l, place)
    else:
        _write_rows(refs, acc, m, l, place)


def _write_rows(refs: dict[str, Any], acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array, place: Place) -> None:
    q_flat_smem = refs["q_flat_smem"]  # [rows + 1, width]; Q is no longer needed
    rows, chunk = m.shape[0], acc[0].shape[0]
    factor, lse = _rows.normalise(m, l, _sinks(refs, place))
    for c, part in enumerate(acc):
        columns = q_flat_smem.at[pl.ds(0, rows), pl.ds(c * chunk, chunk)]
        _rows.store(columns.T, (part * over_rows(factor, part.shape)).astype(columns.dtype))
    refs["row_smem"][0] = lse
    plgpu.commit_smem()
    for token in range(place.q_len):
        plgpu.copy_smem_to_gmem(
            q_flat_smem.at[pl.ds(token * place.group, place.group)],
            refs["out"].at[place.seq, token, place.heads],  # [seqs, q_len, heads, width]
        )
    plgpu.copy_smem_to_gmem(refs["row_smem"].at[0], refs["lse"].at[place.seq, place.kv_head])  # [seqs, kv_heads, rows]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write_partial(refs: dict[str, Any], acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array, place: Place) -> None:
    acc_smem, row_smem = refs["acc_smem"], refs["row_smem"]  # f32 [chunk, rows], [2, rows]
    row_smem[0] = m
    row_smem[1] = l
    chunk = acc_smem.shape[0]
    for c, part in enumerate(acc):
        if c > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        acc_smem[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(acc_smem, _partial_out(refs, place).at[pl.ds(c * chunk, chunk)])
    _copy_rows(refs, row_smem, place)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_cluster(refs: dict[str, Any], acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array, place: Place) -> None:
    m_smem, l_smem = refs["m_smem"], refs["l_smem"]  # f32 [rows]
    acc_smem = [refs[f"acc{i}_smem"] for i in range(acc[0].shape[0] // COLUMNS)]  # f32 [64, rows] each
    columns_smem, merged_smem = refs["columns_smem"], refs["merged_smem"]  # [rows, 64] or f32 [64, rows]; f32 [2, rows]
    member = lax.axis_index("member")

    # 1. Everybody's partial stands where everybody can read it.
    (whole,) = acc
    for i, target in enumerate(acc_smem):
        target[...] = whole[i * COLUMNS : (i + 1) * COLUMNS]
    m_smem[...] = m
    l_smem[...] = l
    partial = {f"acc{i}": part for i, part in enumerate(acc_smem)} | {"m": m_smem, "l": l_smem}
    exchange = {name: refs[EXCHANGE + name] for name in partial if EXCHANGE + name in refs}
    everybody = (place.partition.stack * place.num_partials + place.partition.partial) * place.cluster
    if exchange:
        plgpu.commit_smem()
        for name, target in exchange.items():
            plgpu.copy_smem_to_gmem(partial[name], target.at[everybody + member])
        plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(refs["partials_written"])
    plgpu.barrier_wait(refs["partials_written"])

    def of_peer(name: str, peer: int) -> Any:
        if exchange:
            return exchange[name].at[everybody + peer]
        return plgpu.cluster_ref(partial[name], {"member": jnp.int32(peer)})

    def merge(group: int) -> None:
        column = group * COLUMNS
        peers = range(place.cluster)
        m_peers = [_rows.load_rows(of_peer("m", peer)) for peer in peers]
        m_all = m_peers[0]
        for m_peer in m_peers[1:]:
            m_all = jnp.maximum(m_all, m_peer)
        merged = plgpu.layout_cast(jnp.full((COLUMNS, m.shape[0]), 0.0, jnp.float32), ROWS)
        l_all = plgpu.layout_cast(jnp.full(m.shape, 0.0, jnp.float32), _rows.ROW_VECTOR)
        for peer, m_peer in zip(peers, m_peers, strict=True):
            weight = jnp.exp2(m_peer - m_all)
            part = plgpu.load(of_peer(f"acc{group}", peer), layout=ROWS, optimized=False)
            part *= over_rows(weight, part.shape)
            l_peer = _rows.load_rows(of_peer("l", peer)) * weight
            merged, l_all = merged + part, l_all + l_peer
        if place.num_partials == 1:
            factor, lse = _rows.normalise(m_all, l_all, _sinks(refs, place))
            _rows.store(columns_smem.T, (merged * over_rows(factor, merged.shape)).astype(columns_smem.dtype))
            merged_smem[0] = lse
            plgpu.commit_smem()
            for token in range(place.q_len):
                plgpu.copy_smem_to_gmem(
                    columns_smem.at[pl.ds(token * place.group, place.group)],
                    refs["out"].at[place.seq, token, place.heads, pl.ds(column, COLUMNS)],
                )
        else:
            columns_smem[...] = merged
            merged_smem[0] = m_all
            merged_smem[1] = l_all
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(columns_smem, _partial_out(refs, place).at[pl.ds(column, COLUMNS)])
        if group == 0:
            if place.num_partials == 1:
                plgpu.copy_smem_to_gmem(merged_smem.at[0], refs["lse"].at[place.seq, place.kv_head])
            else:
                _copy_rows(refs, merged_smem, place)

    # 2. The members share out the columns.
    for group in range(len(acc_smem)):

        @pl.when(member == group % place.cluster)
        def _ours(group: int = group) -> None:
            if group >= place.cluster:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns have left
            merge(group)

    # 3. Nobody leaves while a peer may still read its memory.
    plgpu.barrier_arrive(refs["partials_read"])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(refs["partials_read"])


def _sinks(refs: dict[str, Any], place: Place) -> jax.Array | None:
    return None if "sinks" not in refs else _rows.load_rows(refs["sinks"].at[place.kv_head])


def _partial_out(refs: dict[str, Any], place: Place) -> Any:
    stack, padded = place.partition.stack, refs["partial_ml"].shape[1]
    return refs["partial_out"].at[stack * padded + place.partition.partial]  # [stacks * padded, width, rows]


def _copy_rows(refs: dict[str, Any], ml_smem: Any, place: Place) -> None:
    stack, partial = place.partition.stack, place.partition.partial
    for i in range(2):  # [stacks * 2, padded, rows]
        plgpu.copy_smem_to_gmem(ml_smem.at[i], refs["partial_ml"].at[2 * stack + i, partial])
