"""How the programs of a cluster send each other their sums.

Each member of the cluster adds up some columns of the head_dim. It needs these columns of all members' O^T, and all m
and l. The members store them from registers to its shared memory (st.async), where a barrier counts the bytes. So no
program waits until its writes are visible (a fence of the cluster costs 0.3 us on an H100), fetches a peer's sums, or
stays until a peer has fetched its own. The barrier is set up at the start, long before the first bytes come. Other
forms are slower (benchmarks/results/decisions/cluster_h100.json).

Interpret mode has no peer's shared memory: there the partials pass through arrays in GMEM, `InterpretedInbox`.
Everything here is traced inside the decode kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels._interpret import interpreted
from pallas_kernels._rows import ROWS, ROWS_LAST, SCALAR

# [columns, rows], a number a thread of each 16 columns of 8 rows.
SHARE = plgpu.Layout.TILED(
    fragmented_array.Tiling(((16, 8), (4, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
SHARE_ROWS = SHARE.reduce(0)  # [rows]


@dataclasses.dataclass(frozen=True)
class Sharing:
    """In turn t, member `i` of `cluster` adds up `columns` columns from (t * cluster + i) * columns on."""

    cluster: int
    columns: int
    width: int
    rows: int

    @property
    def num_shares(self) -> int:
        return self.width // self.columns

    @property
    def num_turns(self) -> int:
        return -(-self.num_shares // self.cluster)

    def scratch(self) -> dict[str, Any]:
        if interpreted():
            return {
                "acc_smem": plgpu.SMEM((self.width, self.rows), jnp.float32),
                "m_smem": plgpu.SMEM((self.rows,), jnp.float32),
                "l_smem": plgpu.SMEM((self.rows,), jnp.float32),
                "partials_written": plgpu.ClusterBarrier(collective_axes=("member",)),
            }
        return {
            "acc_smem": plgpu.SMEM((self.num_turns * self.cluster * self.columns, self.rows), jnp.float32),
            "ml_smem": plgpu.SMEM((self.cluster * 2, self.rows), jnp.float32),  # m in row 2 i, l in the next
            "arrived_smem": plgpu.SMEM((2,), jnp.int32),  # the barrier
            "ready": plgpu.ClusterBarrier(collective_axes=("member",)),
        }


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


@dataclasses.dataclass(frozen=True)
class Inbox:
    """Sums that the members of the cluster have sent to this one, by the number of the member."""

    refs: Any  # `_refs.Refs`
    sharing: Sharing

    def open(self) -> None:
        """Sets up the barrier at the start, long before anything comes; `ready` tells the others.

        No rule orders this program's writes before its arrival there, for the others. But this SM stores what they
        send, and it sets up the barrier before it sends its arrival. A fence would cost every call 0.3 us (H100).
        """
        sharing = self.sharing
        member = lax.axis_index("member")
        ours = lax.div(sharing.num_shares - 1 - member, jnp.int32(sharing.cluster)) + 1
        ours = jnp.where(member < sharing.num_shares, ours, 0)
        num_bytes = (ours * sharing.columns + 2) * (sharing.cluster * sharing.rows * 4)

        def set_up(_: Any, arrived: ir.Value, num_bytes: mgpu.FragmentedArray) -> None:
            utils.inline_ptx(
                "@$2 mbarrier.init.shared::cta.b64 [$0], 1; @$2 fence.mbarrier_init.release.cluster; "
                "@$2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
                _address(arrived),
                num_bytes.registers.item(),
                utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
                has_side_effects=True,
            )
            utils.warpgroup_barrier()  # the arrivals below come from other warps than the one that has set it up

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))(set_up)(self.refs.arrived_smem, num_bytes)
        plgpu.barrier_arrive(self.refs.ready)

    def exchange(self, acc: jax.Array, m: jax.Array, l: jax.Array) -> None:
        """Sends our partial, f32 [width, rows] and [rows], and waits for all."""
        plgpu.barrier_wait(self.refs.ready)
        types = ROWS, ROWS_LAST.vector, ROWS_LAST.vector, SCALAR, *[plgpu.RefType()] * 3

        def send(_: Any, *operands: Any) -> None:
            acc, m, l, member, *refs = operands
            _send(self.sharing, (acc, m, l), member.registers.item(), refs)
            _wait_for_all(refs[-1])

        inbox = self.refs.acc_smem, self.refs.ml_smem, self.refs.arrived_smem
        plgpu.inline_mgpu(arg_types=types)(send)(acc, m, l, lax.axis_index("member"), *inbox)

    def m_and_l(self, member: int) -> tuple[jax.Array, jax.Array]:
        """f32 [rows] each."""
        m, l = (plgpu.load(self.refs.ml_smem.at[2 * member + i], layout=SHARE_ROWS, optimized=False) for i in range(2))
        return m, l

    def columns(self, member: int, turn: int) -> jax.Array:
        """f32 [columns, rows], of our share of this turn."""
        start = (turn * self.sharing.cluster + member) * self.sharing.columns
        source = self.refs.acc_smem.at[pl.ds(start, self.sharing.columns)]
        return plgpu.load(source, layout=SHARE, optimized=False)


@dataclasses.dataclass(frozen=True)
class InterpretedInbox:
    """The same in interpret mode."""

    refs: Any  # `_refs.Refs`
    sharing: Sharing
    first: jax.Array  # where the first member's partial stands in GMEM

    def open(self) -> None:
        pass

    def exchange(self, acc: jax.Array, m: jax.Array, l: jax.Array) -> None:
        refs, place = self.refs, self.first + lax.axis_index("member")
        refs.acc_smem[...], refs.m_smem[...], refs.l_smem[...] = acc, m, l
        plgpu.commit_smem()
        for ours, sent in (
            (refs.acc_smem, refs.sent_acc),
            (refs.m_smem, refs.sent_m),
            (refs.l_smem, refs.sent_l),
        ):
            plgpu.copy_smem_to_gmem(ours, sent.at[place])
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.refs.partials_written)
        plgpu.barrier_wait(self.refs.partials_written)

    def m_and_l(self, member: int) -> tuple[jax.Array, jax.Array]:
        return self.refs.sent_m[self.first + member], self.refs.sent_l[self.first + member]

    def columns(self, member: int, turn: int) -> jax.Array:
        share = turn * self.sharing.cluster + lax.axis_index("member")
        columns = pl.ds(share * self.sharing.columns, self.sharing.columns)
        return self.refs.sent_acc[self.first + member, columns]


def interpreted_types(*, programs: int, rows: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of `InterpretedInbox`."""
    shapes = {"acc": (width, rows), "m": (rows,), "l": (rows,)}
    return {f"sent_{name}": jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for name, shape in shapes.items()}


def _send(sharing: Sharing, partial: tuple[mgpu.FragmentedArray, ...], us: ir.Value, refs: list[ir.Value]) -> None:
    i32 = ir.IntegerType.get_signless(32)
    acc, *m_and_l = partial
    acc_inbox, ml_inbox, arrived = (_address(ref) for ref in refs)
    cluster, columns, rows = sharing.cluster, sharing.columns, sharing.rows

    def const(x: int) -> ir.Value:
        return utils.c(x, i32)

    def plus(*terms: ir.Value) -> ir.Value:
        total, *rest = terms
        for term in rest:
            total = arith.addi(total, term)
        return total

    def times(x: ir.Value, y: int) -> ir.Value:
        return arith.muli(x, const(y))

    # Of ROWS: warp w holds rows 16 w to 16 w + 15 of each 64, lane l those l // 4 and 8 + l // 4 of them, and of each 8
    # columns 2 (l % 4) and the next. Its rows are our columns.
    thread = arith.andi(utils.thread_idx(), const(127))
    warp, lane = arith.shrui(thread, const(5)), arith.andi(thread, const(31))
    column, row = arith.shrui(lane, const(2)), times(arith.andi(lane, const(3)), 2)

    for i in range(sharing.width // 64):
        share = plus(const(64 // columns * i), arith.divui(times(warp, 16), const(columns)))
        member, turn = arith.remui(share, const(cluster)), arith.divui(share, const(cluster))
        first = plus(
            times(plus(times(turn, cluster), us), columns), arith.remui(times(warp, 16), const(columns)), column
        )
        for j in range(rows // 8):
            for h in range(2):
                number = plus(times(plus(first, const(8 * h)), rows), const(8 * j), row)
                address = plus(acc_inbox, times(number, 4))
                _start_store(address, acc.registers[i, j, 0, 0, h, 0, 0, 0, 0], member, arrived)

    # Every lane has a pair of rows of m and l, eight of them the same one, in every warp: these eight send it to a
    # member each, m from warp 0 and l from warp 1.
    for i, vector_of_rows in enumerate(m_and_l):
        ours = arith.andi(
            arith.cmpi(arith.CmpIPredicate.eq, warp, const(i)),
            arith.cmpi(arith.CmpIPredicate.ult, column, const(cluster)),
        )
        for j in range(rows // 8):
            number = plus(times(plus(times(us, 2), const(i)), rows), const(8 * j), row)
            _start_store(plus(ml_inbox, times(number, 4)), vector_of_rows.registers[j, 0, 0], column, arrived, ours)


def _wait_for_all(arrived: ir.Value) -> None:
    utils.inline_ptx(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0; "
        "@p bra DONE; bra WAIT; DONE: }",
        _address(arrived),
        has_side_effects=True,
    )


def _start_store(
    address: ir.Value, pair: ir.Value, member: ir.Value, barrier: ir.Value, predicate: ir.Value | None = None
) -> None:
    """Two numbers to where `address` is in a member's shared memory, counted by its `barrier`."""
    i32 = ir.IntegerType.get_signless(32)
    words = vector.bitcast(ir.VectorType.get((2,), i32), pair)
    first, second = (vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(2))
    guard = "" if predicate is None else "@$5 "
    utils.inline_ptx(
        f"{{ .reg .b32 a, b; {guard}mapa.shared::cluster.u32 a, $0, $3; {guard}mapa.shared::cluster.u32 b, $4, $3; "
        f"{guard}st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [a], {{$1, $2}}, [b]; }}",
        address,
        first,
        second,
        member,
        barrier,
        *(() if predicate is None else (predicate,)),
        has_side_effects=True,
    )


def _address(ref: ir.Value) -> ir.Value:
    """In shared memory, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))
