"""How a program's sums leave it: as finished rows, or as a float32 partial for the merge kernel.

The partitions of one cluster merge first, in shared memory: each leaves its partial in its own, all wait for each
other, and each member adds up some columns of the head_dim out of everybody's, so that nobody has to read much. So a
few partitions cost no second kernel and no round trip through memory.

Interpret mode cannot see a peer's shared memory: there the partials pass through an array in GMEM, `exchange`.
A program leaves once its results have left its shared memory: who reads them is a later kernel.
Everything here is traced inside the decode kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_kernels import _rows
from pallas_kernels._rows import over_rows
from pallas_kernels._walk import Partition

EXCHANGE = "exchange_"
# [columns, rows], a number a thread of each 16 columns of 8 rows.
_SHARE = mgpu.TiledLayout(
    fragmented_array.Tiling(((16, 8), (4, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
SHARE = plgpu.Layout.TILED(_SHARE.tiling, _SHARE.warp_dims, _SHARE.lane_dims, _SHARE.vector_dim)


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rows of the output a program works on, and what it is among the programs that work on them."""

    partition: Partition
    num_partials: int  # of its sequence and KV head, each from one cluster
    cluster: int  # members
    q_len: int
    group: int
    interpret: Any

    @property
    def seq(self) -> jax.Array:
        return self.partition.seq

    @property
    def kv_head(self) -> jax.Array:
        return self.partition.kv_head

    @property
    def heads(self) -> Any:
        return pl.ds(self.kv_head * self.group, self.group)


def columns_of(*, width: int, cluster: int, q_len: int, group: int) -> int:
    """How many columns of the head_dim a member of a cluster adds up at a time.

    As few as give everybody some. A token's rows of them begin at multiples of 128 bytes, as the copy engine wants.
    """
    least = 16 if q_len == 1 else 64 // min(4, group & -group)
    return next((columns for columns in (16, 32) if columns >= least and columns * cluster >= width), 64)


def scratch(
    *, cluster: int, num_partials: int, rows: int, width: int, chunk: int, columns: int, dtype: Any
) -> dict[str, Any]:
    """What `finish` needs beside the `q_flat_smem` and `row_smem` of the kernel."""
    if cluster == 1:
        return {} if num_partials == 1 else {"acc_smem": plgpu.SMEM((chunk, rows), jnp.float32)}
    everybody = ("member",)
    return {
        "acc_smem": plgpu.SMEM((width, rows), jnp.float32),
        "m_smem": plgpu.SMEM((rows,), jnp.float32),
        "l_smem": plgpu.SMEM((rows,), jnp.float32),
        "columns_smem": plgpu.SMEM((rows, columns), dtype)
        if num_partials == 1
        else plgpu.SMEM((columns, rows), jnp.float32),
        "merged_smem": plgpu.SMEM((2, rows), jnp.float32),  # lse, or m and l
        "partials_written": plgpu.ClusterBarrier(collective_axes=everybody),
        "partials_read": plgpu.ClusterBarrier(collective_axes=everybody),
    }


def scratch_bytes(*, cluster: int, num_partials: int, rows: int, width: int, chunk: int) -> int:
    """No less than `scratch` takes."""
    if cluster == 1:
        return 0 if num_partials == 1 else chunk * rows * 4
    return width * rows * 4 + 64 * rows * (2 if num_partials == 1 else 4) + 1024


def exchange(*, programs: int, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in GMEM that stand in for the peers' shared memory in interpret mode."""
    shapes = {"acc": (width, rows), "m": (rows,), "l": (rows,)}
    return {EXCHANGE + name: jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for name, shape in shapes.items()}


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
    factor, lse = _rows.normalise(m, l, _sinks(refs, place, _rows.ROW_VECTOR))
    chunks = [q_flat_smem.at[pl.ds(0, rows), pl.ds(c * chunk, chunk)] for c in range(len(acc))]
    out = [(part * over_rows(factor, part.shape)).astype(q_flat_smem.dtype) for part in acc]
    _rows.store_together(
        (refs["row_smem"].at[0], lse), transposed=list(zip(chunks, out, strict=True)), interpret=place.interpret
    )
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
    chunk = acc_smem.shape[0]
    for c, part in enumerate(acc):
        pairs = [(acc_smem, part)]
        if c == 0:
            pairs += [(row_smem.at[0], m), (row_smem.at[1], l)]
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _rows.store_together(*pairs, interpret=place.interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(acc_smem, _partial_out(refs, place).at[pl.ds(c * chunk, chunk)])
    _copy_rows(refs, row_smem, place)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge_cluster(refs: dict[str, Any], acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array, place: Place) -> None:
    columns_smem, merged_smem = refs["columns_smem"], refs["merged_smem"]  # [rows, columns] or its transpose; [2, rows]
    columns = columns_smem.shape[1 if place.num_partials == 1 else 0]
    member, members = lax.axis_index("member"), range(place.cluster)

    # 1. Everybody's partial stands where everybody can read it.
    (whole,) = acc  # f32 [width, rows]
    shares = whole.shape[0] // columns
    partial = {name: refs[f"{name}_smem"] for name in ("acc", "m", "l")}  # f32 [width, rows], [rows], [rows]
    _rows.store_together(
        (partial["acc"], whole), (partial["m"], m), (partial["l"], l), for_peers=True, interpret=place.interpret
    )
    exchange = {name: refs[EXCHANGE + name] for name in partial} if place.interpret else {}
    everybody = (place.partition.stack * place.num_partials + place.partition.partial) * place.cluster
    if exchange:
        plgpu.commit_smem()
        for name, target in exchange.items():
            plgpu.copy_smem_to_gmem(partial[name], target.at[everybody + member])
        plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(refs["partials_written"])
    plgpu.barrier_wait(refs["partials_written"])

    def load_row(name: str, peer: int) -> jax.Array:
        if exchange:
            return exchange[name][everybody + peer]
        theirs = plgpu.cluster_ref(partial[name], {"member": jnp.int32(peer)})
        return plgpu.load(theirs, layout=SHARE.reduce(0), optimized=False)

    def load_columns(peer: int, start: jax.Array) -> jax.Array:
        if exchange:
            return exchange["acc"][everybody + peer, pl.ds(start, columns)]
        return _load_columns(partial["acc"], jnp.int32(peer), start, columns)

    def merge(share: jax.Array) -> None:
        ours = pl.ds(share * columns, columns)
        # Everything is on its way before any of it is used.
        m_peers = [load_row("m", peer) for peer in members]
        l_peers = [load_row("l", peer) for peer in members]
        parts = [load_columns(peer, share * columns) for peer in members]
        m_all = functools.reduce(jnp.maximum, m_peers)
        weights = [jnp.exp2(m_peer - m_all) for m_peer in m_peers]

        def weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
            return x * plgpu.layout_cast(over_rows(weight, x.shape), SHARE)

        l_all = functools.reduce(jnp.add, [l_peer * weight for l_peer, weight in zip(l_peers, weights, strict=True)])
        merged = functools.reduce(jnp.add, [weighted(*pair) for pair in zip(parts, weights, strict=True)])
        if place.num_partials == 1:
            factor, lse = _rows.normalise(m_all, l_all, _sinks(refs, place, SHARE.reduce(0)))
            out = weighted(merged, factor).astype(columns_smem.dtype)
            _rows.store_together(
                (merged_smem.at[0], lse), transposed=[(columns_smem, out)], layout=SHARE, interpret=place.interpret
            )
        else:
            _rows.store_together(
                (columns_smem, merged),
                (merged_smem.at[0], m_all),
                (merged_smem.at[1], l_all),
                layout=SHARE,
                interpret=place.interpret,
            )
        plgpu.commit_smem()
        if place.num_partials == 1:
            for token in range(place.q_len):
                plgpu.copy_smem_to_gmem(
                    columns_smem.at[pl.ds(token * place.group, place.group)],
                    refs["out"].at[place.seq, token, place.heads, ours],
                )
        else:
            plgpu.copy_smem_to_gmem(columns_smem, _partial_out(refs, place).at[ours])

        @pl.when(share == 0)
        def _rows_too() -> None:
            if place.num_partials == 1:
                plgpu.copy_smem_to_gmem(merged_smem.at[0], refs["lse"].at[place.seq, place.kv_head])
            else:
                _copy_rows(refs, merged_smem, place)

    # 2. The members share out the columns.
    for turn in range(-(-shares // place.cluster)):
        if turn > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns have left
        share = turn * place.cluster + member
        pl.when(share < shares)(functools.partial(merge, share))

    # 3. Nobody leaves while a peer may still read its memory.
    plgpu.barrier_arrive(refs["partials_read"])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(refs["partials_read"])


def _load_columns(acc_smem: Any, peer: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`size` columns of a peer's sums, from `start` on, f32 [size, rows]: Pallas reads an array of a peer as a whole
    only (jax 0.11.2)."""

    def load(_: Any, acc: ir.Value, *scalars: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        block, first = (arith.index_cast(ir.IndexType.get(), scalar.registers.item()) for scalar in scalars)
        theirs = utils.get_cluster_ref(acc, gpu.Dimension.x, block, generic=False)
        return mgpu.FragmentedArray.load_untiled(
            utils.memref_slice(theirs, (utils.ds(first, size),)), layout=_SHARE, optimized=False
        )

    result = plgpu.ShapeDtypeStruct((size, acc_smem.shape[1]), jnp.dtype(jnp.float32), layout=SHARE)
    scalar = plgpu.Layout.WG_SPLAT
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar), return_type=result)(load)(
        acc_smem, peer, start
    )


def _sinks(refs: dict[str, Any], place: Place, layout: Any) -> jax.Array | None:
    if "sinks" not in refs:
        return None
    return plgpu.load(refs["sinks"].at[place.kv_head], layout=layout, optimized=False)


def _partial_out(refs: dict[str, Any], place: Place) -> Any:
    stack, padded = place.partition.stack, refs["partial_ml"].shape[1]
    return refs["partial_out"].at[stack * padded + place.partition.partial]  # [stacks * padded, width, rows]


def _copy_rows(refs: dict[str, Any], ml_smem: Any, place: Place) -> None:
    stack, partial = place.partition.stack, place.partition.partial
    for i in range(2):  # [stacks * 2, padded, rows]
        plgpu.copy_smem_to_gmem(ml_smem.at[i], refs["partial_ml"].at[2 * stack + i, partial])
