"""The partitions of one cluster merge before their sums leave it.

Each leaves its partial in its own shared memory, all wait for each other, and each member adds up some columns of the
head_dim out of everybody's, so that nobody has to read much. So a few partitions cost no second kernel and no round
trip through memory.

Interpret mode cannot see a peer's shared memory: there the partials pass through an array in GMEM, `exchange`.
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
from pallas_kernels._place import Place
from pallas_kernels._rows import over_rows

_PARTIAL = ("acc", "m", "l")
# [columns, rows], a number a thread of each 16 columns of 8 rows.
_SHARE = mgpu.TiledLayout(
    fragmented_array.Tiling(((16, 8), (4, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
SHARE = plgpu.Layout.TILED(_SHARE.tiling, _SHARE.warp_dims, _SHARE.lane_dims, _SHARE.vector_dim)
SHARE_ROWS = SHARE.reduce(0)  # [rows]


def columns_of(*, width: int, cluster: int, q_len: int, group: int) -> int:
    """How many columns of the head_dim a member of a cluster adds up at a time.

    As few as need no second turn, or 64. A token's rows of them begin at multiples of 128 bytes, as the copy engine
    wants.
    """
    least = 16 if q_len == 1 else 64 // min(4, group & -group)
    return next((columns for columns in (16, 32) if columns >= least and columns * cluster >= width), 64)


def scratch(*, num_partials: int, rows: int, width: int, columns: int, dtype: Any) -> dict[str, Any]:
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


def scratch_bytes(*, num_partials: int, rows: int, width: int) -> int:
    """No less than `scratch` takes, each array rounded up to 1024 bytes."""
    return width * rows * 4 + 64 * rows * (2 if num_partials == 1 else 4) + 3 * 1024


def exchange(*, programs: int, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in GMEM that stand in for the peers' shared memory in interpret mode."""
    shapes = dict(zip(_PARTIAL, ((width, rows), (rows,), (rows,)), strict=True))
    return {_exchange(name): jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for name, shape in shapes.items()}


def _exchange(name: str) -> str:
    return f"exchange_{name}"


def merge(acc: jax.Array, m: jax.Array, l: jax.Array, place: Place) -> None:
    """As `_finish.finish`, in every program of a cluster."""
    refs, member = place.refs, lax.axis_index("member")
    first_of_cluster = (place.partition.stack * place.num_partials + place.partition.partial) * place.cluster

    # 1. Everybody's partial stands where everybody can read it.
    partial = {name: refs[f"{name}_smem"] for name in _PARTIAL}
    _rows.store_together(*zip(partial.values(), (acc, m, l), strict=True), for_peers=True, interpret=place.interpret)
    if place.interpret:
        plgpu.commit_smem()
        for name, source in partial.items():
            plgpu.copy_smem_to_gmem(source, refs[_exchange(name)].at[first_of_cluster + member])
        plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(refs["partials_written"])
    plgpu.barrier_wait(refs["partials_written"])

    # 2. The members share out the columns.
    columns = refs["columns_smem"].shape[1 if place.num_partials == 1 else 0]
    shares = acc.shape[0] // columns
    for turn in range(-(-shares // place.cluster)):
        if turn > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # our last columns have left
        share = turn * place.cluster + member
        pl.when(share < shares)(functools.partial(_merge_share, share, columns, first_of_cluster, place))

    # 3. Nobody leaves while a peer may still read its memory.
    plgpu.barrier_arrive(refs["partials_read"])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(refs["partials_read"])


def _merge_share(share: jax.Array, columns: int, first_of_cluster: jax.Array, place: Place) -> None:
    """Adds up columns `share * columns` and on; the first share's lse, or m and l, stand for all."""
    refs = place.refs
    columns_smem, merged_smem = refs["columns_smem"], refs["merged_smem"]  # [rows, columns] or its transpose; [2, rows]
    start = share * columns
    ours = pl.ds(start, columns)

    # Everything is on its way before any of it is used.
    peers = [_Peer(refs, member, first_of_cluster, place.interpret) for member in range(place.cluster)]
    m_peers, l_peers = ([peer.load_rows(name) for peer in peers] for name in ("m", "l"))
    parts = [peer.load_columns(start, columns) for peer in peers]

    m = functools.reduce(jnp.maximum, m_peers)
    weights = [jnp.exp2(m_peer - m) for m_peer in m_peers]
    l = functools.reduce(jnp.add, [l_peer * weight for l_peer, weight in zip(l_peers, weights, strict=True)])
    merged = functools.reduce(jnp.add, [_weighted(*pair) for pair in zip(parts, weights, strict=True)])
    if place.num_partials == 1:
        factor, lse = _rows.normalise(m, l, place.sinks(SHARE_ROWS))
        out = _weighted(merged, factor).astype(columns_smem.dtype)
        _rows.store_together(
            (merged_smem.at[0], lse), transposed=[(columns_smem, out)], layout=SHARE, interpret=place.interpret
        )
    else:
        _rows.store_together(
            (columns_smem, merged),
            (merged_smem.at[0], m),
            (merged_smem.at[1], l),
            layout=SHARE,
            interpret=place.interpret,
        )
    plgpu.commit_smem()
    if place.num_partials == 1:
        place.copy_rows(columns_smem, ours)
        pl.when(share == 0)(lambda: place.copy_lse(merged_smem.at[0]))
    else:
        place.copy_partial(columns_smem, ours)
        pl.when(share == 0)(lambda: place.copy_m_and_l(merged_smem))


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * plgpu.layout_cast(over_rows(weight, x.shape), SHARE)


@dataclasses.dataclass(frozen=True)
class _Peer:
    """What a member of the cluster has left for the others."""

    refs: dict[str, Any]
    member: int
    first_of_cluster: jax.Array  # where the first member's stands in `exchange`
    interpret: Any

    def load_rows(self, name: str) -> jax.Array:
        """m or l, f32 [rows]."""
        if self.interpret:
            return self.refs[_exchange(name)][self.first_of_cluster + self.member]
        theirs = plgpu.cluster_ref(self.refs[f"{name}_smem"], {"member": jnp.int32(self.member)})
        return plgpu.load(theirs, layout=SHARE_ROWS, optimized=False)

    def load_columns(self, start: jax.Array, size: int) -> jax.Array:
        """`size` columns of O^T from `start` on, f32 [size, rows]."""
        if self.interpret:
            return self.refs[_exchange("acc")][self.first_of_cluster + self.member, pl.ds(start, size)]
        acc_smem = self.refs["acc_smem"]

        # Pallas reads an array of a peer as a whole only (jax 0.11.2).
        def load(_: Any, acc: ir.Value, start: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            index = ir.IndexType.get()
            theirs = utils.get_cluster_ref(acc, gpu.Dimension.x, utils.c(self.member, index), generic=False)
            first = arith.index_cast(index, start.registers.item())
            return mgpu.FragmentedArray.load_untiled(
                utils.memref_slice(theirs, (utils.ds(first, size),)), layout=_SHARE, optimized=False
            )

        result = plgpu.ShapeDtypeStruct((size, acc_smem.shape[1]), jnp.dtype(jnp.float32), layout=SHARE)
        types = plgpu.RefType(), plgpu.Layout.WG_SPLAT
        return plgpu.inline_mgpu(arg_types=types, return_type=result)(load)(acc_smem, start)
