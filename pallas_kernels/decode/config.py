"""The limits of the decode kernel, and how a call is divided into runs, partitions and stages.

All functions are pure functions of shapes, are not traced, and are tested on a CPU.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.common import partition_plan
from pallas_kernels.common.interface import MOST_ROWS, MOST_SEQS, Call, Gpu, Hints, Kernel, Shapes
from pallas_kernels.common.sizes import (
    COLUMNS,
    DTYPES_16BIT,
    LEAST_COMPUTE_CAPABILITY,
    divides_tiles,
    round_up,
    smem_per_sm,
)

TILE = 64  # tokens of a tile: 16 for each of four warps, the M dimension of their products
MOST_SUMS = 128 * 128  # numbers of O that fit into the registers of a program
MOST_HEAD_DIM, MOST_LATENT = 256, 640
PROGRAM_OVERHEAD = 4 * 1024  # bytes of SMEM: 1024 that CUDA uses, 2048 for Mosaic's reductions, barriers


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head
    num_stages: int  # tiles of K, and of V, in SMEM at a time
    copies: Literal["tma", "cp_async"]  # how tiles are copied to SMEM, see `copies`
    head_parts: int = 1  # programs that share the query heads of a KV head
    merged_by: Literal["last", "xla"] = "last"  # partitions are merged by the last program of a sequence, or by XLA
    run: int = 1  # query tokens of a run
    at_once: int | None = None  # partitions of a plan that run at the same time; None: no plan
    mapped_stages: int | None = None  # num_stages under `jax.vmap`, see `mapped`; None: no change there

    @property
    def partitions(self) -> int | Literal["plan"]:
        return self.num_partitions if self.at_once is None else "plan"

    def mapped(self) -> "Config":
        """The configuration under `jax.vmap`: one partition per sequence and no plan, because calls whose programs
        merge partials would run one after the other."""
        assert self.mapped_stages is not None
        changes: Any = dict(num_partitions=1, num_stages=self.mapped_stages, merged_by="last")
        return dataclasses.replace(self, **changes, at_once=None, mapped_stages=None)


def limits(call: Call, gpu: Gpu, hints: Hints) -> Iterator[str]:
    """Reasons to refuse a call, each with the limit and the value. A later limit assumes that the earlier ones hold."""
    yield from call.option_limits()
    run = _run(call, gpu.compute_capability)
    yield from shape_limits(call.shapes(run), gpu.compute_capability)
    if call.tree_mask is not None and run != call.tokens_per_seq:
        yield (
            f"the decode kernel supports a tree_mask of up to {MOST_ROWS} rows (q_len * heads / kv_heads), on a latent "
            f'fewer; got q={list(call.q.shape)}, kv_heads={call.kv_heads}. Pass implementation="xla".'
        )
    num_runs = call.num_runs(run)
    if num_runs > MOST_SEQS:
        seqs, q_len, group = call.lengths.shape[0], call.tokens_per_seq, call.group
        yield (
            f"the decode kernel supports up to {MOST_SEQS} runs of query tokens in a call; got {seqs=}, "
            f"{q_len=}, {group=}: {num_runs} runs of {run}. Pass fewer sequences or query tokens at a time."
        )


def shape_limits(shapes: Shapes, compute_capability: float) -> Iterator[str]:
    """The limits that depend on shapes alone, as in `limits`."""
    if compute_capability < LEAST_COMPUTE_CAPABILITY:
        yield f"the decode kernel needs compute capability 8.0 (Ampere) or higher; got {compute_capability=}."
    q_dtype, cache_dtype = shapes.q_dtype, shapes.cache_dtype
    if q_dtype not in DTYPES_16BIT:
        yield f"the decode kernel supports q in bfloat16 or float16; got {q_dtype=!s}."
    if cache_dtype != q_dtype and not shapes.is_8bit:
        yield (
            "the decode kernel supports a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; "
            f"got {cache_dtype=!s}, {q_dtype=!s}."
        )
    if cache_dtype == jnp.float8_e4m3fn and compute_capability < 8.9:
        yield (
            "the decode kernel supports float8_e4m3fn from compute capability 8.9 on, float8_e5m2 and int8 "
            f"from 8.0; got {compute_capability=}."
        )
    multiple = 16 // shapes.itemsize  # 16 bytes, one asynchronous copy
    most = MOST_LATENT if shapes.is_latent else MOST_HEAD_DIM
    head_dim, value_dim, block_size = shapes.head_dim, shapes.value_dim, shapes.block_size
    if any(width > most or width % multiple for width in shapes.widths):
        yield (
            f"the decode kernel supports a head_dim up to {most} that is a multiple of 8, of 16 with an 8-bit cache; "
            f"got {head_dim=}, {value_dim=}, {cache_dtype=!s}."
        )
    if not divides_tiles(block_size):
        yield f"the decode kernel supports block sizes 8, 16, 32, or multiples of 64; got {block_size=}."
    shapes = of_program(shapes, compute_capability)
    q_len, group = shapes.q_len, shapes.group
    if q_len * group > MOST_ROWS:
        yield f"the decode kernel supports up to {MOST_ROWS} rows (q_len * group) per KV head; got {q_len=}, {group=}."
    needed, room = smem_bytes(shapes, 1), program_smem(compute_capability)
    if needed > room:
        yield (
            f"the decode kernel has {room} bytes of shared memory on this GPU, and needs {needed} for "
            f"{head_dim=}, {q_len=}, {group=}. Pass fewer query tokens at a time."
        )


def configure(call: Call, gpu: Gpu, hints: Hints) -> Config:
    run = _run(call, gpu.compute_capability)
    shapes = call.shapes(run)
    if not call.causal:  # all query tokens see the same tokens, so they become heads
        shapes = dataclasses.replace(shapes, q_len=1, group=run * call.group)
    seqs, pairs = call.lengths.shape[0], call.num_runs(run) * call.kv_heads
    at_once = partition_plan.programs_at_once(gpu.num_sms, call.kv_heads)
    planned = call.follows_plan
    if call.plan is None and hints.num_partitions is None:
        seen = call.visible(hints.window)
        pays = partition_plan.plan_pays(gpu.num_sms, pairs=seqs * call.kv_heads, seen=seen)
        planned = pays and call.can_follow(partition_plan.default_total(seqs, at_once))
    of_call = functools.partial(
        default_config,
        shapes,
        pairs=pairs,
        capacity=call.capacity,
        num_sms=gpu.num_sms,
        compute_capability=gpu.compute_capability,
        window=hints.window,
    )
    config = of_call(num_partitions=hints.num_partitions, planned=planned)
    mapped_stages = None
    if planned or (hints.num_partitions is None and config.num_partitions > 1):
        mapped_stages = of_call(num_partitions=1).num_stages
    return dataclasses.replace(config, run=run, at_once=at_once if planned else None, mapped_stages=mapped_stages)


def launch(call: Call, config: Config) -> Any:
    from pallas_kernels.decode import kernel

    return kernel.launch(call, config)


KERNEL = Kernel("paged_decode", "the decode kernel", limits, configure, launch)


def default_config(
    shapes: Shapes,
    *,
    pairs: int,  # sequences * KV heads
    capacity: int,  # tokens that a table row can hold, an upper bound of the lengths
    num_sms: int,
    compute_capability: float,
    window: int | None = None,  # sliding window in tokens, if known: it bounds the tokens read
    num_partitions: int | None = None,  # if fixed by the caller
    planned: bool = False,  # use the partitions of a plan
) -> Config:
    """The configuration for the shapes of a run."""
    one = of_program(shapes, compute_capability)
    parts = shapes.group // one.group

    def fitting_stages(resident: int) -> int:
        room = program_smem(compute_capability, resident)
        return next(n for n in itertools.count() if smem_bytes(one, n + 1) > room)

    # With several programs per SM, one computes while the others wait; many rows need the registers of two. A plan
    # balances lengths better with more programs. [one_kernel_h200, plans_h100 of benchmarks/results/decisions/]
    resident = 2 if fitting_stages(2) >= 2 else 1
    if one.rows <= 16 and fitting_stages(4) >= (1 if planned else 2):
        resident = 4
    num_stages = max(1, fitting_stages(resident))
    if planned:
        num_partitions = 1
    if num_partitions is None:
        # Merging n partials costs the last program about the time of n tiles. [one_kernel_h200]
        seen = capacity if window is None else min(capacity, window + shapes.q_len - 1)
        most = seen // (2 * TILE) if shapes.is_latent else 2 * math.isqrt(seen // 128)
        num_partitions = max(1, min(resident * num_sms // (pairs * parts), most))
    is_whole = not any(width % COLUMNS for width in shapes.widths)
    return Config(
        num_partitions=min(num_partitions, max(1, -(-capacity // TILE))),  # more partitions would have no tile
        num_stages=num_stages,
        # [portable_stages_h100 of benchmarks/results/decisions/]
        copies="tma" if compute_capability >= 9.0 and is_whole else "cp_async",
        head_parts=parts,
        # A partial of a latent is half as large as a tile. One program would need too long to read many of them.
        # [latents_h100 of benchmarks/results/decisions/]
        merged_by="xla" if shapes.is_latent and num_partitions > 1 else "last",
    )


def _run(call: Call, compute_capability: float) -> int:
    """Query tokens of a run."""
    is_plain = call.causal and call.v_cache is not None
    return call.run_tokens(MOST_ROWS if is_plain else most_rows(call.shapes(), compute_capability))


def most_rows(shapes: Shapes, compute_capability: float) -> int:
    """Most rows, a multiple of 8, that a program has shared memory and registers for, for any q_len and group."""
    return _most_rows(dataclasses.replace(shapes, q_len=1, group=1), compute_capability)


@functools.cache  # limits and configuration both need it
def _most_rows(shapes: Shapes, compute_capability: float) -> int:
    room, width = program_smem(compute_capability), round_up(shapes.value_dim, COLUMNS)
    # The addresses of cp.async also need registers.
    most_sums = MOST_SUMS // 2 if shapes.is_latent and compute_capability < 9.0 else MOST_SUMS
    fitting = (
        rows
        for rows in range(8, MOST_ROWS + 1, 8)
        if rows * width <= most_sums and smem_bytes(dataclasses.replace(shapes, group=rows), 1) <= room
    )
    return max(fitting, default=8)  # even 8 rows are too many: `limits` refuses the call


def of_program(shapes: Shapes, compute_capability: float) -> Shapes:
    """The shapes of one program. The query heads of a latent are divided among the fewest programs possible."""
    if not shapes.is_latent:
        return shapes
    most, group = most_rows(shapes, compute_capability), shapes.group
    return dataclasses.replace(shapes, group=next(n for n in range(group, 0, -1) if group % n == 0 and n <= most))


def program_smem(compute_capability: float, resident: int = 1) -> int:
    """Bytes of SMEM for the arrays of a program, if `resident` programs share an SM."""
    return smem_per_sm(compute_capability) // resident - PROGRAM_OVERHEAD


def smem_bytes(shapes: Shapes, num_stages: int) -> int:
    """Bytes of the arrays of `refs.scratch`, without barriers and without Mosaic's own SMEM."""
    q = shapes.rows * round_up(shapes.head_dim, COLUMNS) * 2
    rings = [round_up(width, COLUMNS) * shapes.itemsize for width in shapes.widths]
    sizes = [q, TILE * shapes.rows * 2]
    if shapes.itemsize == 1:
        sizes.append(q)  # in float16
        rings += [4] * len(rings)  # per-token scales
    return sum(round_up(size, 1024) for size in [*sizes, *(num_stages * TILE * ring for ring in rings)])
