"""Paged decode attention, a Mosaic GPU kernel for Hopper (sm_90a).

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

One program computes one partition of one sequence for one KV head: `group` query heads of each of the last `q_len`
tokens, together `rows` rows, against tiles of `tile` tokens. With up to 32 rows the tokens are the M dimension of both
matrix products, so that a group of 4 is padded to 8 columns, not to 64 rows:

    S^T [tile, rows]      = K [tile, head_dim]   Q^T [head_dim, rows]
    O^T [head_dim, rows] += V^T [head_dim, tile] P^T [tile, rows]

More rows of a 16-bit cache are the M dimension themselves, padded to 64, and S, P and O are not transposed.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to a ring of SMEM tiles, one copy a cache block or quarter of a tile, by four warps in turn |
| block tables, lengths, scalars | read from GMEM when they are needed, so that all of them may be traced |
| Q | GMEM to SMEM row by row, once, and from there through registers to the layout of the products |
| P | registers to SMEM, transposed; with many rows it stays in registers |
| m, l, O^T | registers, float32; at the end to GMEM through SMEM, as finished rows or float32 partials |

Caches of 8 bits are widened to float16 between SMEM and the products (`_widen`), and the SMEM of K and V is free as
soon as they are read. `_scales` says where their scales are used.

| file | has |
|---|---|
| `decode_config` | what the kernel takes, and how a call is cut up |
| `_walk` | which tiles of its sequence a program computes |
| `_fetch` | how tiles are fetched |
| `_steps`, for many rows `_row_steps` | what is done with a tile |
| `_products`, `_logits` | the work of the tensor cores, and from the products of Q and K to the logits |
| `_finish`, in a cluster `_cluster` and `_inbox` | how the sums are written |
| `_place` | where the sums are written |

A program has two warpgroups: warpgroup 0 computes, warpgroup 1 fetches. The copy itself pads a head_dim with zeros to a
multiple of 64: the cache is read in place. A head_dim that is not a multiple of 16 is copied in parts, each padded to
64 columns (`_sizes.num_parts`).

Only table entries of blocks with a token that some query sees are followed, and ids are clamped to the pool. Instead of
other blocks, block 0 is fetched and masked. Rows of V that no query may see are zeroed in SMEM before the product,
because 0 x NaN is NaN; only tiles with such a row need that.

Sources: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135) for the online softmax; Hong et al.,
FlashDecoding++, 2023 (https://arxiv.org/abs/2311.01282) for padding the few rows to 8 rather than to 64; Kwon et al.,
2023 (https://arxiv.org/abs/2309.06180) for the blocks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _cluster, _finish, _inbox, _scales, _scratch, _sizes, _widen, paged_merge
from pallas_kernels._fetch import Ring, fetch, rows_of_copy
from pallas_kernels._logits import Logits
from pallas_kernels._place import Place
from pallas_kernels._products import Products
from pallas_kernels._row_steps import RowSteps
from pallas_kernels._rows import ROWS, ROWS_FIRST, ROWS_LAST
from pallas_kernels._steps import NarrowSteps, WideSteps
from pallas_kernels._walk import Partition, Walk
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.decode_config import Config


def _kernel(
    # Inputs, GMEM. An option that was not given is not among them.
    refs: dict[str, Any],
    *,
    config: Config,
    q_len: int,
    group: int,
    num_parts: int,  # of a head
    width: int,  # head_dim, or each of its parts, rounded up to a multiple of 64
    interpret: Any,
) -> None:
    q_gmem = refs["q"]  # [seqs, q_len, heads, head_dim], or of `width` where a head has several parts
    k_gmem = refs["k_cache"]  # [blocks, block_size, kv_heads * parts, head_dim / parts]
    v_gmem = refs["v_cache"]  # [blocks, block_size, kv_heads * parts, head_dim / parts]
    tables_gmem = refs["block_tables"]  # int32 [seqs, max_blocks]
    # lengths, int32 [seqs]
    scale_gmem = refs["scale"]  # f32 [1]
    window_gmem = refs.get("sliding_window")  # int32 [1]
    cap_gmem = refs.get("logits_soft_cap")  # f32 [1]
    slopes_gmem = refs.get("alibi_slopes")  # f32 [kv_heads, rows]
    tree_gmem = refs.get("tree_bits")  # int32 [seqs, words, rows]
    # and sinks, f32 [kv_heads, rows], k_scale and v_scale, f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    q_smem = refs["q_smem"]  # [rows, width]
    q_flat_smem = refs["q_flat_smem"].at[pl.ds(0, q_smem.shape[0])]  # [rows, width]
    narrow = _sizes.is_narrow(k_gmem.dtype)
    k_smem, v_smem = refs["k_smem"], refs["v_smem"]  # [stages * parts, tile, width / parts]
    if narrow:
        k_tiles, v_tiles = _widen.Tiles.of(k_smem, interpret), _widen.Tiles.of(v_smem, interpret)
        k_smem, v_smem = k_tiles.narrow, v_tiles.narrow
    p_smem = refs.get("p_smem")  # [rows, tile]; not where rows come first
    k_ring = Ring(k_gmem, k_smem, refs["k_full"], refs["k_free"])  # and their barriers [stages]
    v_ring = Ring(v_gmem, v_smem, refs["v_full"], refs["v_free"])

    warpgroup = lax.axis_index("warpgroup")
    partition = Partition.of(
        refs,
        num_partitions=config.num_partitions,
        cluster=config.cluster,
        num_kv_heads=k_gmem.shape[2] // num_parts,
    )
    seq, kv_head = partition.seq, partition.kv_head
    stages = config.num_stages
    # A copy as wide as SMEM reaches past the end of a narrower head, where the copy engine writes zeros. The start
    # must look dynamic, or tracing refuses the slice.
    whole = pl.ds(0, width) if q_gmem.shape[-1] == width else pl.ds(seq - seq, width)
    filled = whole if num_parts == 1 else pl.ds(seq - seq, width // num_parts)

    def parts_of(x: Any) -> list[Any]:
        """The parts of kv head or stage x, in the cache or in SMEM."""
        return [x] if num_parts == 1 else [x * num_parts + part for part in range(num_parts)]

    # 1. Which tiles are ours, from the true length.
    walk = Walk.of(
        partition,
        window=None if window_gmem is None else window_gmem[0],
        q_len=q_len,
        block_size=k_gmem.shape[1],
        tile=config.tile,
        unsplit_tiles=config.unsplit_tiles,
    )
    partition = walk.partition

    scales = _scales.Scales(
        k=refs.get("k_scale"),
        v=refs.get("v_scale"),
        kv_head=kv_head,
        ring=refs.get("scales_smem"),
        full=refs.get("scales_full"),
        stages=stages,
        interpret=interpret,
        orientation=ROWS_LAST,  # a cache with scales of tokens has no more rows
    )

    # 2. Warpgroup 1 fetches.
    @pl.when(warpgroup == 1)
    def _fetch_tiles() -> None:
        fetch(
            walk,
            (k_ring, v_ring),
            scales,
            tables_gmem,
            stages=stages,
            last_first=config.last_first,
            kv_head=kv_head,
            parts_of=parts_of,
            columns=filled,
        )

    # 3. Warpgroup 0 computes. Only one can: Mosaic has one scratch buffer for reductions over all four warps, and two
    # warpgroups that use it at once overwrite each other (wrong on an H100, not seen by interpret mode; jax 0.11.2).
    @pl.when(jnp.logical_and(warpgroup == 0, partition.works))
    def _compute() -> None:
        place = Place(
            refs,
            partition,
            num_partials=config.num_partials,
            sharing=_cluster.sharing_of(
                rows=q_smem.shape[0], width=width, cluster=config.cluster, q_len=q_len, group=group
            ),
            q_len=q_len,
            group=group,
            interpret=interpret,
        )
        for token in range(q_len):
            plgpu.copy_gmem_to_smem(
                q_gmem.at[seq, token, pl.ds(kv_head * group, group), whole],
                q_flat_smem.at[pl.ds(token * group, group)],
                refs["q_full"],
            )
        if config.cluster > 1:
            pl.when(place.split)(_cluster.inbox_of(place).open)
        scale = scale_gmem[0]
        cap = None if cap_gmem is None else cap_gmem[0]
        orientation = ROWS_FIRST if config.rows_first else ROWS_LAST
        slopes = None if slopes_gmem is None else orientation.load(slopes_gmem.at[kv_head])
        first_query = walk.first_query
        k_scale, v_scale = scales.of_head(scales.k), scales.of_head(scales.v)
        if k_scale is not None:
            scale = scale * k_scale
        tree_bits = None
        if tree_gmem is not None:
            words = range(tree_gmem.shape[1])
            tree_bits = [orientation.load(tree_gmem.at[seq, word]) for word in words]
        logits_of = Logits(walk, first_query, scale, cap, slopes, group, orientation, tree_bits)

        order = walk.last_first(stages) if config.last_first else None

        def place_of(j: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Of the j-th tile to be computed: its index in the sequence, and its stage in the rings."""
            i = j if order is None else order.worked(j)
            return walk.tile_of(i), lax.rem(i if order is None else order.turn_of(i), jnp.int32(stages))

        plgpu.barrier_wait(refs["q_full"])
        # The rows between q_len * group and `rows` are what SMEM held: rows do not mix.
        steps: WideSteps | NarrowSteps | RowSteps
        if narrow:
            unit = _widen.load_q(q_flat_smem, lambda start: q_smem.at[:, pl.ds(start, 64)].T, interpret)
            plgpu.commit_smem()
            steps = NarrowSteps(
                walk,
                logits_of,
                place_of,
                scales,
                tables_gmem,
                rings=(k_ring, v_ring),
                tiles=(k_tiles, v_tiles),
                q=q_smem,
                p=p_smem,
                unit=unit,
                chunk=config.chunk,
                interpret=interpret,
            )
        else:
            q_smem.T[...] = plgpu.load(q_flat_smem.T, layout=ROWS, optimized=False)
            plgpu.commit_smem()
        if config.rows_first:
            steps = RowSteps(walk, logits_of, place_of, k_ring, v_ring, q_smem, parts_of, interpret)
        elif not narrow:
            products = Products(k_ring, v_ring, q_smem, p_smem, num_parts, parts_of, config.chunk)
            steps = WideSteps(walk, logits_of, place_of, products, config.keys_ahead)

        carry = steps.start()

        def work(start: Any, end: jax.Array, carry: Any, *, masked: bool) -> Any:
            return lax.fori_loop(start, end, functools.partial(steps.step, masked=masked), carry)

        if order is None:
            start, end = walk.whole_tiles()
            if walk.window is not None:
                carry = work(0, start, carry, masked=True)
            carry = work(start, end, carry, masked=False)
            carry = work(end, walk.num_tiles, carry, masked=True)
        else:
            carry = work(0, order.num_masked, carry, masked=True)
            carry = work(order.num_masked, walk.num_tiles, carry, masked=False)
        acc, m, l = steps.sums(carry)
        if v_scale is not None:
            acc = tuple(part * v_scale for part in acc)
        _finish.finish(acc, m, l, place, orientation=orientation)


def launch(
    q: jax.Array,  # [seqs, q_len, heads, head_dim]
    k_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    block_tables: jax.Array,  # int32 [seqs, max_blocks]
    lengths: jax.Array,  # int32 [seqs], within 0 and the capacity of a table row
    options: AttentionOptions,
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype, and lse f32 [seqs, q_len, heads]."""
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

    named = {
        "sliding_window": None if options.sliding_window is None else options.sliding_window.reshape(1),
        "logits_soft_cap": None if options.logits_soft_cap is None else options.logits_soft_cap.reshape(1),
        "alibi_slopes": None if options.alibi_slopes is None else by_row(options.alibi_slopes, kv_heads, q_len, rows),
        "sinks": None if options.sinks is None else by_row(options.sinks, kv_heads, q_len, rows),
        "tree_bits": None if options.tree_bits is None else _bits_by_row(options.tree_bits, group, rows),
        "k_scale": None if options.k_scale is None else jnp.atleast_1d(options.k_scale),
        "v_scale": None if options.v_scale is None else jnp.atleast_1d(options.v_scale),
    }
    if config.num_partials > 1:
        del named["sinks"]  # only the merge kernel adds them
    inputs = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": block_tables,
        "lengths": lengths,
        "scale": options.scale.reshape(1),
        **{name: value for name, value in named.items() if value is not None},
    }
    finished_types = {
        "out": jax.ShapeDtypeStruct((seqs, q_len, heads, width), q.dtype),
        "lse": jax.ShapeDtypeStruct((seqs, kv_heads, rows), jnp.float32),
    }
    num_stacks = seqs * kv_heads
    room = _sizes.round_up(config.num_partials, paged_merge.partials_of_copy(rows))
    ml_room = _sizes.round_up(config.num_partials, paged_merge.WEIGHTS)
    partial_types = {
        "partial_out": jax.ShapeDtypeStruct((num_stacks * room, width, rows), jnp.float32),
        "partial_ml": jax.ShapeDtypeStruct((num_stacks * 2, ml_room, rows), jnp.float32),
    }
    out_types = finished_types if config.num_partials == 1 else partial_types
    if interpret and config.cluster > 1:
        out_types |= _inbox.interpreted_types(programs=seqs * kv_heads * config.num_partitions, rows=rows, width=width)
    scratch = _scratch.scratch(
        config,
        q_len=q_len,
        group=group,
        head_dim=head_dim,
        copies_of_tile=config.tile // rows_of_copy(block_size, config.tile),
        token_scales=len(_scales.of_tokens(options.k_scale, options.v_scale)),
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        interpret=interpret,
    )
    names = (*inputs, *out_types)

    def paged_decode(*operands: Any, **scratch_refs: Any) -> None:
        refs = dict(zip(names, operands, strict=True)) | scratch_refs
        _kernel(
            refs,
            config=config,
            q_len=q_len,
            group=group,
            num_parts=num_parts,
            width=width,
            interpret=interpret,
        )

    clusters: dict[str, Any] = {}
    if config.cluster > 1:
        clusters = {"cluster": (config.cluster,), "cluster_names": ("member",)}
    results = plgpu.kernel(
        paged_decode,
        out_type=tuple(out_types.values()),
        grid=(seqs, config.num_partials, kv_heads),
        grid_names=("seq", "partial", "kv_head"),
        **clusters,
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs.values())

    made = dict(zip(out_types, results, strict=True))
    if config.num_partials == 1:
        out, lse = made["out"], made["lse"]
    else:
        out, lse = paged_merge.launch(
            made["partial_out"],
            made["partial_ml"],
            lengths,
            sliding_window=inputs.get("sliding_window"),
            sinks=None if options.sinks is None else by_row(options.sinks, kv_heads, q_len, rows),
            q_len=q_len,
            heads=heads,
            dtype=q.dtype,
            config=paged_merge.default_config(
                num_partials=config.num_partials,
                cluster=config.cluster,
                rows=rows,
                tile=config.tile,
            ),
            interpret=interpret,
        )
    # [seqs, kv_heads, rows] -> [seqs, q_len, heads]: a kernel of its own, which XLA drops where nobody asks for lse.
    lse = lse[..., : q_len * group].reshape(seqs, kv_heads, q_len, group).swapaxes(1, 2).reshape(seqs, q_len, heads)
    if num_parts == 1:
        return out[..., :head_dim], lse
    out = out.reshape(*out.shape[:3], num_parts, -1)[..., : head_dim // num_parts]
    return out.reshape(*out.shape[:3], head_dim), lse


def by_row(by_head: jax.Array, kv_heads: int, q_len: int, rows: int) -> jax.Array:
    """f32 [heads] -> [kv_heads, rows], the same for every query token, zero in the padding."""
    by_head = by_head.reshape(kv_heads, 1, -1)
    group = by_head.shape[-1]
    by_row = jnp.broadcast_to(by_head, (kv_heads, q_len, group)).reshape(kv_heads, q_len * group)
    return jnp.pad(by_row, ((0, 0), (0, rows - q_len * group)))


def _bits_by_row(bits: jax.Array, group: int, rows: int) -> jax.Array:
    """uint32 [seqs, q_len, words] -> int32 [seqs, words, rows], the same for every head, zero in the padding."""
    by_row = jnp.repeat(lax.bitcast_convert_type(bits, jnp.int32).swapaxes(1, 2), group, axis=2)
    return jnp.pad(by_row, ((0, 0), (0, 0), (0, rows - by_row.shape[2])))
