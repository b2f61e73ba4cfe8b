"""The body of the decode kernel for Hopper, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _launch, _merge, _sizes
from pallas_kernels._fetch import Ring, fetch, rows_of_copy
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Partials
from pallas_kernels._rows import ROWS, ROWS_FIRST
from pallas_kernels._walk import Order, Partition, Walk, grid_of
from pallas_kernels.attention_options import AttentionOptions, bits_by_row, by_row, operands_of
from pallas_kernels.decode_config import Config
from pallas_kernels.paged_decode._many_rows import ManyRows
from pallas_kernels.paged_decode._output import Output
from pallas_kernels.paged_decode._refs import Refs, scratch
from pallas_kernels.partition_plan import PartitionPlan


def _kernel(
    refs: Refs,
    *,
    config: Config,
    q_len: int,
    group: int,
    num_parts: int,  # of a head
    width: int,  # head_dim, or each of its parts, rounded up to a multiple of 64
) -> None:
    q_flat_smem = refs.q_flat_smem.at[pl.ds(0, refs.q_smem.shape[0])]  # without the extra row
    k_ring = Ring(refs.k_cache, refs.k_smem, refs.k_full, refs.k_free)
    v_ring = Ring(refs.v_cache, refs.v_smem, refs.v_full, refs.v_free)

    warpgroup = lax.axis_index("warpgroup")
    partition = Partition.of(refs, num_partitions=config.num_partitions)
    seq, kv_head = partition.seq, partition.kv_head
    # A copy as wide as SMEM reaches past the end of a narrower head, where the copy engine writes zeros. The start
    # must look dynamic, or tracing refuses the slice.
    whole = pl.ds(0, width) if refs.q.shape[-1] == width else pl.ds(seq - seq, width)
    filled = whole if num_parts == 1 else pl.ds(seq - seq, width // num_parts)

    def parts_of(x: Any) -> list[Any]:
        """The parts of kv head or stage x, in the cache or in SMEM."""
        return [x] if num_parts == 1 else [x * num_parts + part for part in range(num_parts)]

    # 1. Which tiles are ours, from the true length.
    walk = Walk.of(
        partition,
        window=None if refs.sliding_window is None else refs.sliding_window[0],
        q_len=q_len,
        block_size=refs.k_cache.shape[1],
        tile=config.tile,
    )
    partition = walk.partition

    order = Order(walk, config.num_stages)

    # 2. Warpgroup 1 fetches.
    @pl.when(warpgroup == 1)
    def _fetch_tiles() -> None:
        fetch(
            order,
            (k_ring, v_ring),
            refs.block_tables,
            kv_head=kv_head,
            parts_of=parts_of,
            columns=filled,
        )

    # 3. Warpgroup 0 computes. Only one can: Mosaic has one scratch buffer for reductions over all four warps, and two
    # warpgroups that use it at once overwrite each other (wrong on an H100, not seen by interpret mode; jax 0.11.2).
    @pl.when(jnp.logical_and(warpgroup == 0, partition.works))
    def _compute() -> None:
        for token in range(q_len):
            plgpu.copy_gmem_to_smem(
                refs.q.at[seq, token, pl.ds(kv_head * group, group), whole],
                q_flat_smem.at[pl.ds(token * group, group)],
                refs.q_full,
            )
        logits_of = Logits.of(refs, walk, group, ROWS_FIRST, refs.tree_bits)

        plgpu.barrier_wait(refs.q_full)
        # The rows between q_len * group and `rows` are what SMEM held: rows do not mix.
        refs.q_smem.T[...] = plgpu.load(q_flat_smem.T, layout=ROWS, optimized=False)
        plgpu.commit_smem()
        steps = ManyRows(order, logits_of, k_ring, v_ring, refs.q_smem, parts_of)

        carry = steps.start()
        for start, end, masked in order.runs():
            carry = lax.fori_loop(start, end, functools.partial(steps.step, masked=masked), carry)
        output = Output(refs, partition, q_len, group)
        partials = Partials(refs, partition, partition.count, orientation=ROWS_FIRST)
        pl.when(partition.count == 1)(lambda: output.write(steps.sums(carry)))
        pl.when(partition.count != 1)(lambda: partials.merge(steps.sums(carry), output.write))


def launch(
    q: jax.Array,  # [seqs, q_len, heads, head_dim]
    k_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    block_tables: jax.Array,  # int32 [seqs, max_blocks]
    lengths: jax.Array,  # int32 [seqs], within 0 and the capacity of a table row
    options: AttentionOptions,
    *,
    plan: PartitionPlan | None = None,  # instead of the config's partitions, which are 1
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype, and lse f32 [seqs, q_len, heads]."""
    assert plan is None or config.num_partitions == 1
    assert k_cache.dtype == q.dtype
    seqs, q_len, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    rows, width = _sizes.filled_rows(q_len, group, rows_first=True), _sizes.padded_width(head_dim)
    num_parts = _sizes.num_parts(head_dim)
    if num_parts > 1:
        part = head_dim // num_parts
        q = q.reshape(*q.shape[:3], num_parts, part)
        q = jnp.pad(q, ((0, 0),) * 4 + ((0, width // num_parts - part),)).reshape(*q.shape[:3], width)
        k_cache, v_cache = (c.reshape(num_blocks, block_size, kv_heads * num_parts, part) for c in (k_cache, v_cache))

    per_row = functools.partial(by_row, kv_heads=kv_heads, q_len=q_len, rows=rows)
    inputs = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": block_tables,
        "lengths": lengths,
        **({} if plan is None else vars(plan)),
        **operands_of(
            options,
            per_row,
            tree_bits=None if options.tree_bits is None else bits_by_row(options.tree_bits, group=group, rows=rows),
        ),
    }
    out_types = {
        "out": jax.ShapeDtypeStruct((seqs, q_len, heads, width), q.dtype),
        "lse": jax.ShapeDtypeStruct((seqs, kv_heads, rows), jnp.float32),
    }
    programs = dict(seqs=seqs, num_partials=config.num_partitions, kv_heads=kv_heads)
    out_types |= _merge.types_of(plan, **programs, width=width, rows=rows)
    scratch_types = scratch(
        config,
        q_len=q_len,
        group=group,
        head_dim=head_dim,
        copies_of_tile=config.tile // rows_of_copy(block_size, config.tile),
        dtype=q.dtype,
    )
    kernel = functools.partial(_kernel, config=config, q_len=q_len, group=group, num_parts=num_parts, width=width)
    out, lse, *_ = _launch.launch(
        "paged_decode",
        kernel,
        Refs,
        inputs,
        out_types,
        **grid_of(plan, **programs),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch_types,
    )
    # [seqs, kv_heads, rows] -> [seqs, q_len, heads]: a kernel of its own, which XLA drops where nobody asks for lse.
    lse = lse[..., : q_len * group].reshape(seqs, kv_heads, q_len, group).swapaxes(1, 2).reshape(seqs, q_len, heads)
    if num_parts == 1:
        return out[..., :head_dim], lse
    out = out.reshape(*out.shape[:3], num_parts, -1)[..., : head_dim // num_parts]
    return out.reshape(*out.shape[:3], head_dim), lse
