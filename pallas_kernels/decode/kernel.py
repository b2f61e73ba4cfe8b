"""The body of the decode kernel, and its launch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import Ids
from pallas_kernels.common.interface import Call, Shapes, given
from pallas_kernels.common.interpret import in_this_mode
from pallas_kernels.common.launch import OptionRefs, bits_by_row, by_row
from pallas_kernels.common.launch import launch as launch_kernel
from pallas_kernels.common.merge_parts import merge
from pallas_kernels.common.rows import LOWEST, RIGHT, ROWS_LAST, zeros
from pallas_kernels.common.scales import of_head, over_tokens, scaled
from pallas_kernels.common.sizes import COLUMNS, rem, round_up
from pallas_kernels.common.softmax import normalise
from pallas_kernels.decode.config import TILE, Config
from pallas_kernels.decode.copies import copies_of
from pallas_kernels.decode.logits import Logits, softmax
from pallas_kernels.decode.refs import Refs, scratch
from pallas_kernels.decode.results import Partials, Sums, partial_types, store_rows
from pallas_kernels.decode.tiles import Tiles, product
from pallas_kernels.decode.walk import Walk, make_grid

QUERY_REGISTERS = 32  # per thread; Q stays in registers if it fits into these


class State(NamedTuple):
    """The carry of the loop over tiles."""

    acc: tuple[jax.Array, ...]  # O^T, f32 [64, rows] for each 64 columns of the head
    m: jax.Array  # f32 [rows], the highest logit so far, in units of log2
    l: jax.Array  # f32 [64, rows], sums of the weights by token of a tile, summed over the tokens at the end
    values_ids: Ids  # blocks of the next tile whose values are copied
    keys_ids: Ids  # blocks of the next tile whose keys are copied


def _kernel(refs: Refs, *, config: Config) -> None:
    # 1. The tiles of this program, computed from the length of its sequence.
    walk = Walk.of(refs, num_partitions=config.num_partitions)
    # XLA merges the results of all programs, even those without a tile.
    works = True if config.merged_by == "xla" else walk.partition.works
    pl.when(works)(functools.partial(_attend, refs, walk, config=config))


def _attend(refs: Refs, walk: Walk, *, config: Config) -> None:
    partition = walk.partition
    (rows, width), stages = refs.q_smem.shape, config.num_stages
    chunks = range(width // COLUMNS)
    tiles = Tiles.of(refs)

    # 2. Start copying Q and the first tiles.
    copies = copies_of(config.copies)(refs, walk, tiles.rings(), stages=stages)
    copies.start_query()
    ids = [copies.read_ids(jnp.int32(i)) for i in range(stages + 1)]
    for i in range(stages):
        copies.start_keys(jnp.int32(i), ids[i])
        if i < stages - 1:
            copies.start_values(jnp.int32(i), ids[i])

    # 3. Wait for Q.
    logits_of = Logits.of(refs, walk)
    copies.wait_query()
    factor = tiles.prepare_query()
    kept = [tiles.query(c) for c in chunks] if rows * width // 64 <= QUERY_REGISTERS else None

    # 4. The loop over tiles.
    def step(i: jax.Array, state: State, *, masked: bool) -> State:
        acc, m, l, values_ids, keys_ids = state
        tile, stage = walk.tile_at(i), rem(i, stages)

        # a. S^T = K Q^T
        copies.wait_keys(stage)  # all warps have finished with the values of the previous tile
        copies.start_values(i + stages - 1, values_ids)
        scores = zeros((TILE, rows))
        for c in chunks:
            scores = product(scores, tiles.keys(stage, c), tiles.query(c) if kept is None else kept[c])
        if factor is not None:
            scores *= ROWS_LAST.over(factor, scores.shape)
        if (k_scales := tiles.k_scales(stage)) is not None:
            scores *= over_tokens(k_scales, scores.shape, ROWS_LAST)

        # b. Online softmax.
        logits, visible = logits_of(scores, tile, masked)
        m, l, alpha, p = softmax(logits, visible, tiles.v_scales(stage), m, l, tiles.headroom)
        refs.p_smem[...] = p.astype(refs.p_smem.dtype)  # with a barrier: all warps have finished with the keys

        # c. O^T += V^T P^T
        if not tiles.is_latent:
            copies.start_keys(i + stages, keys_ids)
        next_ids = copies.read_ids(i + stages + 1)
        copies.wait_values(stage)
        weights = plgpu.load(refs.p_smem, layout=RIGHT)
        seen = functools.partial(walk.seen, tile) if masked else None
        acc = tuple(
            product(part * ROWS_LAST.over(alpha, part.shape), tiles.values(stage, c, seen), weights)
            for c, part in enumerate(acc)
        )
        if tiles.is_latent:
            copies.start_latent(i + stages, keys_ids)
        return State(acc, m, l, keys_ids, next_ids)

    state = State(
        acc=tuple(zeros((COLUMNS, rows)) for _ in range(round_up(refs.out.shape[3], COLUMNS) // COLUMNS)),
        m=ROWS_LAST.full(rows, LOWEST),
        l=zeros((TILE, rows)),
        values_ids=ids[stages - 1],
        keys_ids=ids[stages],
    )
    for start, end, masked in walk.runs():
        state = lax.fori_loop(start, end, functools.partial(step, masked=masked), state)

    # 5. Write the rows; if the sequence has several partitions, only in the program that merges them.
    def finish(sums: Sums) -> None:
        sinks = given(refs.options.sinks, lambda sinks: ROWS_LAST.load(sinks.at[partition.kv_head]))
        factor, lse = normalise(sums.m, sums.l, sinks)
        factor = scaled(factor, of_head(refs.options.v_scale, refs.cache_head(partition.kv_head)))
        parts = [tiles.ordered(part * ROWS_LAST.over(factor, part.shape)).astype(refs.out.dtype) for part in sums.acc]
        store_rows(parts, lse, refs.out, refs.lse, row, partition.kv_head, refs.group)

    def sums() -> Sums:  # inside a branch: before it they need 35 more registers
        return Sums(state.acc, state.m, state.l.sum(axis=0))

    row = partition.seq
    if config.merged_by == "xla":
        row += partition.index * refs.lengths.shape[0]
        return finish(sums())
    partials = Partials(refs, partition)
    pl.when(partition.count == 1)(lambda: finish(sums()))
    pl.when(partition.count != 1)(lambda: partials.merge(sums(), finish))


def launch(call: Call, config: Config) -> tuple[jax.Array, jax.Array]:
    """Launches a uniform call, with `tree_bits` for its mask and a plan if `config` follows one. Under `jax.vmap` no
    plan is followed, see `Config.mapped`.

    Returns out [seqs, q_len, heads, value_dim] in q's dtype, and lse f32 [seqs, q_len, heads].
    """
    compute = functools.partial(_launch, config=config)
    if config.mapped_stages is None:
        return compute(call)

    def mapped(axis_size: int, is_mapped: list[Any], call: Call) -> Any:
        axes = jax.tree.map(lambda its: 0 if its else None, is_mapped[0])
        one_partition = functools.partial(_launch, config=config.mapped())
        return jax.vmap(one_partition, (axes,), axis_size=axis_size)(call), (True, True)

    unless_mapped = jax.custom_batching.custom_vmap(compute)
    unless_mapped.def_vmap(in_this_mode(mapped))
    return unless_mapped(call)


def _launch(call: Call, *, config: Config) -> tuple[jax.Array, jax.Array]:
    q, options, plan = call.q, call.options, None if config.at_once is None else call.plan
    seqs, q_len, heads, _ = q.shape
    shapes = Shapes.of(q, call.k_cache, call.v_cache, call.value_dim, q_len=q_len, parts=config.head_parts)
    kv_heads, out_dim, rows = heads // shapes.group, shapes.value_dim, shapes.rows
    by_xla = config.merged_by == "xla"

    per_row = functools.partial(by_row, kv_heads=kv_heads, q_len=q_len, rows=rows)
    tree_bits = given(options.tree_bits, functools.partial(bits_by_row, group=shapes.group, rows=rows))
    inputs = {
        "q": q,
        "k_cache": call.k_cache,
        "v_cache": call.v_cache,
        "block_tables": call.block_tables,
        "lengths": call.lengths,
        "num_read": call.num_read,
        "partitions": given(plan, lambda plan: plan.partitions),
        "options": OptionRefs.of(options, per_row, with_sinks=not by_xla, tree_bits=tree_bits),
    }
    # For XLA: the first partition of every sequence, then the second of every sequence: [partitions * seqs, ...].
    num_rows = seqs * (config.num_partitions if by_xla else 1)
    out_types = {
        "out": jax.ShapeDtypeStruct((num_rows, q_len, heads, out_dim), jnp.float32 if by_xla else q.dtype),
        "lse": jax.ShapeDtypeStruct((num_rows, q_len, heads), jnp.float32),
    }
    programs = dict(seqs=seqs, num_partials=config.num_partitions, kv_heads=kv_heads)
    if not by_xla:
        out_types |= partial_types(plan, **programs, width=round_up(out_dim, COLUMNS), rows=rows)
    out, lse, *_ = launch_kernel(
        "paged_decode",
        functools.partial(_kernel, config=config),
        functools.partial(Refs, head_parts=config.head_parts),
        inputs,
        out_types,
        **make_grid(plan, **programs),
        scratch_types=scratch(config, shapes, (options.k_scale, options.v_scale)),
    )
    if not by_xla:
        return out, lse
    outs, lses = (x.reshape(config.num_partitions, seqs * q_len, *x.shape[2:]) for x in (out, lse))
    merged, lse = merge(outs, lses, options.sinks)
    return merged.astype(q.dtype).reshape(*q.shape[:3], out_dim), lse.reshape(q.shape[:3])
