"""The body of the decode kernel for Hopper, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _launch, _merge, _scales, _sizes, _widen
from pallas_kernels._fetch import Ring, fetch, rows_of_copy
from pallas_kernels._interpret import interpreted
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Partials, Sums
from pallas_kernels._rows import ROWS, ROWS_FIRST, ROWS_LAST
from pallas_kernels._walk import Partition, Walk, grid_of
from pallas_kernels.attention_options import AttentionOptions, bits_by_row, by_row, operands_of
from pallas_kernels.decode_config import Config
from pallas_kernels.paged_decode import _cluster
from pallas_kernels.paged_decode._few_rows import FewRows
from pallas_kernels.paged_decode._inbox import Sharing, interpreted_types, sharing_of
from pallas_kernels.paged_decode._many_rows import ManyRows
from pallas_kernels.paged_decode._narrow_cache import NarrowCache
from pallas_kernels.paged_decode._output import Output
from pallas_kernels.paged_decode._refs import Refs, scratch
from pallas_kernels.partition_plan import PartitionPlan


def _kernel(
    refs: Refs,
    *,
    config: Config,
    q_len: int,
    group: int,
    sharing: Sharing | None,  # of the columns among the members of a cluster
    num_parts: int,  # of a head
    width: int,  # head_dim, or each of its parts, rounded up to a multiple of 64
) -> None:
    q_flat_smem = refs.q_flat_smem.at[pl.ds(0, refs.q_smem.shape[0])]  # without the extra row
    narrow = _sizes.is_narrow(refs.k_cache.dtype)
    k_smem, v_smem = refs.k_smem, refs.v_smem
    if narrow:
        k_tiles, v_tiles = _widen.Tiles.of(k_smem), _widen.Tiles.of(v_smem)
        k_smem, v_smem = k_tiles.narrow, v_tiles.narrow
    k_ring = Ring(refs.k_cache, k_smem, refs.k_full, refs.k_free)
    v_ring = Ring(refs.v_cache, v_smem, refs.v_full, refs.v_free)

    warpgroup = lax.axis_index("warpgroup")
    partition = Partition.of(refs, num_partitions=config.num_partitions, cluster=config.cluster)
    seq, kv_head = partition.seq, partition.kv_head
    stages = config.num_stages
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
        unsplit_tiles=config.unsplit_tiles,
    )
    partition = walk.partition

    scales = _scales.Scales(
        k=refs.k_scale,
        v=refs.v_scale,
        kv_head=kv_head,
        ring=refs.scales_smem,
        full=refs.scales_full,
        stages=stages,
        orientation=ROWS_LAST,  # a cache with scales of tokens has no more rows
    )

    # 2. Warpgroup 1 fetches.
    @pl.when(warpgroup == 1)
    def _fetch_tiles() -> None:
        fetch(
            walk.order(stages, last_first=config.last_first),
            (k_ring, v_ring),
            scales,
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
        if sharing is not None:
            pl.when(partition.count != 1)(_cluster.inbox_of(refs, partition, sharing).open)
        orientation = ROWS_FIRST if config.rows_first else ROWS_LAST
        logits_of = Logits.of(refs, walk, group, orientation, refs.tree_bits)
        v_scale = _scales.of_head(refs.v_scale, kv_head)
        order = walk.order(stages, last_first=config.last_first)

        plgpu.barrier_wait(refs.q_full)
        # The rows between q_len * group and `rows` are what SMEM held: rows do not mix.
        steps: FewRows | NarrowCache | ManyRows
        if narrow:
            unit = _widen.load_q(q_flat_smem, lambda start: refs.q_smem.at[:, pl.ds(start, 64)].T)
            plgpu.commit_smem()
            steps = NarrowCache(
                order,
                logits_of,
                scales,
                refs.block_tables,
                rings=(k_ring, v_ring),
                tiles=(k_tiles, v_tiles),
                q=refs.q_smem,
                p=refs.p_smem,
                unit=unit,
                chunk=config.chunk,
            )
        else:
            refs.q_smem.T[...] = plgpu.load(q_flat_smem.T, layout=ROWS, optimized=False)
            plgpu.commit_smem()
        if config.rows_first:
            steps = ManyRows(order, logits_of, k_ring, v_ring, refs.q_smem, parts_of)
        elif not narrow:
            steps = FewRows(
                order,
                logits_of,
                k_ring,
                v_ring,
                refs.q_smem,
                refs.p_smem,
                parts_of,
                config.chunk,
                config.keys_ahead,
            )

        carry = steps.start()
        for start, end, masked in order.runs():
            carry = lax.fori_loop(start, end, functools.partial(steps.step, masked=masked), carry)
        output = Output(refs, partition, q_len, group, orientation)

        def sums() -> Sums:
            sums = steps.sums(carry)
            return sums if v_scale is None else sums._replace(acc=tuple(part * v_scale for part in sums.acc))

        def share() -> None:
            if sharing is not None:
                _cluster.merge(sums(), output, sharing, config.num_partials)
            else:
                Partials(refs, partition, partition.count, orientation=orientation).merge(sums(), output.write)

        pl.when(partition.count == 1)(lambda: output.write(sums()))
        pl.when(partition.count != 1)(share)


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
    assert not (config.rows_first and config.cluster > 1)  # a cluster adds up O^T
    assert not config.unsplit_tiles or config.cluster == config.num_partitions
    seqs, q_len, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    rows, width = _sizes.filled_rows(q_len, group, rows_first=config.rows_first), _sizes.padded_width(head_dim)
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
    if interpreted() and config.cluster > 1:
        out_types |= interpreted_types(programs=seqs * kv_heads * config.num_partitions, rows=rows, width=width)
    sharing = None
    if config.cluster > 1:
        sharing = sharing_of(rows=rows, width=width, cluster=config.cluster, q_len=q_len, group=group)
    programs = dict(seqs=seqs, num_partials=config.num_partials, kv_heads=kv_heads)
    shares = 1 if sharing is None else sharing.num_shares
    out_types |= _merge.types_of(plan, **programs, shares=shares, width=width, rows=rows)
    scratch_types = scratch(
        config,
        q_len=q_len,
        group=group,
        head_dim=head_dim,
        copies_of_tile=config.tile // rows_of_copy(block_size, config.tile),
        token_scales=len(_scales.of_tokens(options.k_scale, options.v_scale)),
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
    )
    kernel = functools.partial(
        _kernel, config=config, q_len=q_len, group=group, sharing=sharing, num_parts=num_parts, width=width
    )
    clusters: dict[str, Any] = {}
    if config.cluster > 1:
        clusters = {"cluster": (config.cluster,), "cluster_names": ("member",)}
    out, lse, *_ = _launch.launch(
        "paged_decode",
        kernel,
        Refs,
        inputs,
        out_types,
        **grid_of(plan, **programs),
        **clusters,
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
