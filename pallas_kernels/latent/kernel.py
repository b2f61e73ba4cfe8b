"""The kernel for latents, and its launch. Read `__init__` first."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import Ids, blocks_of_tile, copy_tile, rows_of_copy
from pallas_kernels.common.interface import Call
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.launch import launch as launch_kernel
from pallas_kernels.common.merge_parts import merge
from pallas_kernels.common.rows import LOG2E, LOWEST, ROWS, ROWS_FIRST, matrix, store, zeros
from pallas_kernels.common.sizes import COLUMNS, ceil_div, count_tiles, rem, zero_unless
from pallas_kernels.common.softmax import normalise, raised, rescale
from pallas_kernels.latent.config import HEADS, REST, TILE, Config


@dataclasses.dataclass(frozen=True)
class Refs:
    """The refs of a program. A chunk is 64 heads; `half` is value_dim / 2."""

    # Inputs, GMEM
    q: Any  # [seqs, chunks, 64, head_dim]
    cache: Any  # [blocks, block_size, 1, head_dim]
    block_tables: Any  # int32 [seqs, max_blocks]
    lengths: Any  # int32 [seqs]
    scale: Any  # f32 [1]
    # Outputs, GMEM: the first partition of every sequence, then the second of every sequence
    out: Any  # [partitions * seqs, chunks, 64, value_dim]
    lse: Any  # f32 [partitions * seqs, chunks, 64]
    # SMEM
    q_smem: Any  # [64, head_dim]
    values_smem: Any  # [2, 2, 64, half], by stage and half
    rest_smem: Any  # [2, 64, 64], by stage: the last columns of the keys, then P
    m_smem: Any  # f32 [2, 64], by stage: the running maximum of a row up to this tile
    l_smem: Any  # f32 [2, 64], by warpgroup
    # Barriers
    q_full: Any  # []
    values_full: Any  # [4], two halves of the first stage, then two of the second
    rest_full: Any  # [2]
    weights_full: Any  # [2], P and m
    done: Any  # []


class State(NamedTuple):
    """A warpgroup's carry from tile to tile."""

    acc: jax.Array  # f32 [64, half], its half of O
    m: jax.Array  # f32 [64], the highest logit so far, or a little less, in units of log2
    l: jax.Array  # f32 [64], sum of the weights of its own tiles
    next_ids: Ids  # blocks of the next tile


def _plus_product_of_zero(acc: jax.Array, left: Any, right: Any) -> jax.Array:
    def multiply(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, left, right)
        return ref[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC((acc.shape[0], acc.shape[1]), jnp.float32))


@interpreted_by(_plus_product_of_zero)
def _plus_product(acc: jax.Array, left: Any, right: Any) -> jax.Array:
    """acc + left @ right, with operands in SMEM. Waits for the result."""

    def multiply(ref: Any) -> None:
        plgpu.wgmma(ref, left, right)

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One of the two warpgroups. Its index is also the stage of its own tiles."""

    refs: Refs
    index: jax.Array
    seq: jax.Array
    partition: jax.Array
    num_partitions: int
    chunk: jax.Array
    length: jax.Array  # tokens of the sequence
    num_tiles: jax.Array  # tiles of this program

    @classmethod
    def of(cls, refs: Refs, *, num_partitions: int) -> "Warpgroup":
        seq, partition, chunk = (lax.axis_index(name) for name in ("seq", "partition", "chunk"))
        length = refs.lengths[seq]
        num_tiles = count_tiles(jnp.int32(0), ceil_div(length, TILE), num_partitions, partition)
        return cls(refs, lax.axis_index("warpgroup"), seq, partition, num_partitions, chunk, length, num_tiles)

    def run(self) -> None:
        refs, half = self.refs, self.refs.values_smem.shape[-1]

        # 1. Start copying Q and two tiles. The last columns of the second follow in its warpgroup's first step.
        @pl.when(self.index == 0)
        def _start_query() -> None:
            plgpu.copy_gmem_to_smem(refs.q.at[self.seq, self.chunk], refs.q_smem, refs.q_full)

        first_ids, next_ids = self._read_ids(jnp.int32(0)), self._read_ids(jnp.int32(1))
        self._start_half(jnp.int32(0), first_ids)
        pl.when(self.index == 0)(lambda: self._start_rest(jnp.int32(0), first_ids))
        self._start_half(jnp.int32(1), next_ids)
        plgpu.barrier_wait(refs.q_full)

        # 2. The loop over tiles.
        def step(i: jax.Array, state: State) -> State:
            ids = self._read_ids(i + 2)
            is_own = rem(i, 2) == self.index
            acc, m, l = lax.cond(is_own, self._own_tile, self._other_tile, i, state)
            self._start_half(i + 2, ids)
            return State(acc, m, l, ids)

        nothing = State(zeros((HEADS, half)), ROWS_FIRST.full(HEADS, LOWEST), ROWS_FIRST.full(HEADS, 0.0), next_ids)
        acc, m, l, _ = lax.fori_loop(0, self.num_tiles, step, nothing)

        # 3. Add the sums of both warpgroups.
        store(refs.l_smem.at[self.index], l)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.done)
        plgpu.barrier_wait(refs.done)
        l = ROWS_FIRST.load(refs.l_smem.at[0]) + ROWS_FIRST.load(refs.l_smem.at[1])
        factor, lse = normalise(m, l, None)
        row = self.seq + self.partition * refs.lengths.shape[0]
        o = (acc * ROWS_FIRST.over(factor, acc.shape)).astype(refs.out.dtype)
        store(refs.out.at[row, self.chunk, :, pl.ds(self.index * half, half)], o)
        pl.when(self.index == 0)(lambda: store(refs.lse.at[row, self.chunk], lse))

    def _own_tile(self, i: jax.Array, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes the weights of an own tile, publishes them to the other warpgroup, and adds the values."""
        refs, own = self.refs, self.index
        acc, m, l, _ = state
        logits = self._scores() * (refs.scale[0] * LOG2E)
        logits = lax.cond(self._is_partial(i), functools.partial(self._masked, i), lambda x: x, logits)
        m_new, alpha = raised(m, logits.max(axis=1))
        p = jnp.exp2(logits - ROWS_FIRST.over(m_new, logits.shape))
        refs.rest_smem[own] = p.astype(refs.rest_smem.dtype)  # with a barrier: all warps have used the keys
        store(refs.m_smem.at[own], m_new)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.weights_full.at[own])
        return self._add(i, acc, alpha, own), m_new, l * alpha + p.sum(axis=1)

    def _other_tile(self, i: jax.Array, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds the values of the other warpgroup's tile, with that warpgroup's weights."""
        refs, other = self.refs, 1 - self.index
        acc, m, l, next_ids = state
        plgpu.barrier_wait(refs.weights_full.at[other])
        # The other warpgroup has used this one's previous weights, so the last columns of the next tile replace them.
        self._start_rest(i + 1, next_ids)
        m_new = ROWS_FIRST.load(refs.m_smem.at[other])
        alpha = jnp.exp2(m - m_new)
        return self._add(i, acc, alpha, other), m_new, l * alpha

    def _scores(self) -> jax.Array:
        """S f32 [64, 64] of the tile in the warpgroup's own stage."""
        refs, own = self.refs, self.index
        half = refs.values_smem.shape[-1]

        def multiply(acc: Any) -> jax.Array:
            for i in range(2):
                plgpu.barrier_wait(refs.values_full.at[2 * own + i])
                plgpu.wgmma(acc, refs.q_smem.at[:, pl.ds(i * half, half)], refs.values_smem.at[own, i].T)
            plgpu.barrier_wait(refs.rest_full.at[own])
            plgpu.wgmma(acc, refs.q_smem.at[:, pl.ds(2 * half, REST)], refs.rest_smem.at[own].T)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), jnp.float32))

    def _add(self, i: jax.Array, acc: jax.Array, alpha: jax.Array, stage: jax.Array) -> jax.Array:
        """O = alpha O + P V. Waits for the products."""
        values = self.refs.values_smem.at[stage, self.index]
        pl.when(self._is_partial(i))(lambda: self._zero_unseen(i, values))
        return _plus_product(rescale(acc, alpha), self.refs.rest_smem.at[stage], values)

    def _is_partial(self, i: jax.Array) -> jax.Array:
        """Whether a tile has tokens past the end of the sequence, which no row sees."""
        return self._tile_at(i) * TILE + TILE > self.length

    def _seen(self, i: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
        """bool `shape`: whether a token of a tile is within the sequence; tokens are on `axis`."""
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=ROWS) < self.length - self._tile_at(i) * TILE

    def _masked(self, i: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.where(self._seen(i, logits.shape, 1), logits, jnp.full_like(logits, -jnp.inf))

    def _zero_unseen(self, i: jax.Array, values: Any) -> None:
        """Zeroes the values that no row may see, because 0 x NaN is NaN."""
        for c in range(values.shape[1] // COLUMNS):
            part = values.at[:, pl.ds(c * COLUMNS, COLUMNS)]
            v = plgpu.load(part, layout=ROWS)
            part[...] = zero_unless(self._seen(i, v.shape, 0), v)
        plgpu.commit_smem()

    def _tile_at(self, i: jax.Array) -> jax.Array:
        """The index in the sequence of the program's i-th tile."""
        return self.partition + i * self.num_partitions

    def _read_ids(self, i: jax.Array) -> Ids:
        """Block ids of the program's i-th tile."""
        refs = self.refs
        entries = jnp.int32(0), ceil_div(self.length, refs.cache.shape[1])
        start = self._tile_at(i) * TILE
        return blocks_of_tile(refs.block_tables, self.seq, start, TILE, entries, refs.cache)

    def _start_half(self, i: jax.Array, ids: Ids) -> None:
        """Starts copying this warpgroup's half of a tile's values, over those of tile i - 2, which it has used."""
        stage, half = rem(i, 2), self.refs.values_smem.shape[-1]
        target, full = self.refs.values_smem.at[stage, self.index], self.refs.values_full.at[2 * stage + self.index]
        self._start(i, ids, pl.ds(self.index * half, half), target, full)

    def _start_rest(self, i: jax.Array, ids: Ids) -> None:
        """Starts copying the last columns of one of this warpgroup's own tiles."""
        refs = self.refs
        columns = pl.ds(refs.cache.shape[-1] - REST, REST)
        self._start(i, ids, columns, refs.rest_smem.at[self.index], refs.rest_full.at[self.index])

    def _start(self, i: jax.Array, ids: Ids, columns: Any, target: Any, full: Any) -> None:
        block_size = self.refs.cache.shape[1]
        offset = rem(self._tile_at(i) * TILE, block_size)

        def copy(block_id: jax.Array, tokens: Any, rows: Any) -> None:
            plgpu.copy_gmem_to_smem(self.refs.cache.at[block_id, tokens, 0, columns], target.at[rows], full)

        pl.when(i < self.num_tiles)(lambda: copy_tile(copy, ids, offset, block_size, TILE))


def _kernel(refs: Refs, *, config: Config) -> None:
    Warpgroup.of(refs, num_partitions=config.num_partitions).run()


def launch(call: Call, config: Config) -> tuple[jax.Array, jax.Array]:
    """Launches a uniform call with one query token per sequence.

    Returns out [seqs, 1, heads, value_dim] in q's dtype, and lse f32 [seqs, 1, heads].
    """
    q, cache, value_dim = call.q[:, 0], call.k_cache, call.value_dim
    seqs, heads, head_dim = q.shape
    chunks, partitions = heads // HEADS, config.num_partitions
    smem = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=matrix(COLUMNS, 2))
    copies = TILE // rows_of_copy(cache.shape[1], TILE)
    out, lse = launch_kernel(
        "paged_latent",
        functools.partial(_kernel, config=config),
        Refs,
        {
            "q": q.reshape(seqs, chunks, HEADS, head_dim),
            "cache": cache,
            "block_tables": call.block_tables,
            "lengths": call.lengths,
            "scale": call.options.scale.reshape(1),
        },
        {
            "out": jax.ShapeDtypeStruct(
                (partitions * seqs, chunks, HEADS, value_dim), q.dtype if partitions == 1 else jnp.float32
            ),
            "lse": jax.ShapeDtypeStruct((partitions * seqs, chunks, HEADS), jnp.float32),
        },
        grid=(seqs, partitions, chunks),
        grid_names=("seq", "partition", "chunk"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            q_smem=smem((HEADS, head_dim)),
            values_smem=smem((2, 2, TILE, value_dim // 2)),
            rest_smem=smem((2, TILE, REST)),
            m_smem=plgpu.SMEM((2, HEADS), jnp.float32),
            l_smem=plgpu.SMEM((2, HEADS), jnp.float32),
            q_full=plgpu.Barrier(),
            values_full=plgpu.Barrier(num_arrivals=copies, num_barriers=4),
            rest_full=plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            weights_full=plgpu.Barrier(num_barriers=2),
            done=plgpu.Barrier(num_arrivals=2),
        ),
    )
    outs, lses = out.reshape(partitions, seqs, heads, value_dim), lse.reshape(partitions, seqs, heads)
    out, lse = (outs[0], lses[0]) if partitions == 1 else merge(outs, lses, None)
    return out.astype(q.dtype)[:, None], lse[:, None]
