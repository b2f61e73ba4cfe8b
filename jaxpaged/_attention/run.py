"""What a `Choice` says, done: operands, the call of the kernel, and what JAX's transformations make of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._attention import packed, query_runs, xla
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.choose import Call, Choice
from jaxpaged._by_kernel import by_kernel
from pallas_kernels.decode import partition_plan
from pallas_kernels.decode.partition_plan import PartitionPlan

PARTITIONED = (
    "the Mosaic GPU kernels got arrays on several devices, and their types do not say what lies where. XLA cannot "
    "partition a kernel: it would gather the whole cache on each device. Put the arrays on an explicit mesh, which is "
    "what jax.make_mesh makes by default; or call paged_attention inside jax.shard_map over the KV heads, or inside "
    'jax.sharding.explicit_axes; or pass implementation="xla", which XLA partitions.'
)

Results = tuple[jax.Array, jax.Array]  # out, of q's shape and dtype, and lse f32, of q's shape without head_dim


def run(choice: Choice, call: Call, plan: PartitionPlan | None = None) -> Results:
    """The call by its kernel. `plan`: the caller's; without it one is made for a choice that follows one."""
    if choice.at_once is None:
        plan = None
    elif plan is None:
        window, q_len = call.options.sliding_window, call.q.shape[1]
        plan = partition_plan.default(call.lengths, window, q_len=q_len, at_once=choice.at_once)
    return _run(choice, call, plan)


# Jitted by itself: otherwise every layer of a model lowers the kernel again, 0.4 s each.
@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    compute: Any = functools.partial(_on_platform, choice)
    if plan is not None or choice.mapped is not None:
        compute = jax.custom_batching.custom_vmap(compute)
        compute.def_vmap(functools.partial(_mapped, choice))
    elif choice.kernel == "paged_prefill" and choice.interpret is None:
        # One program is on each SM already, so that mapped calls follow one another.
        compute = jax.custom_batching.sequential_vmap(compute)
    return compute(call, plan)


@_run.__wrapped__.defjvp  # type: ignore[attr-defined]
def _run_jvp(choice: Choice, primals: tuple, tangents: tuple) -> tuple:
    # The kernels have no backward pass: a step that is differentiated computes what it needs through XLA.
    return jax.jvp(functools.partial(by_xla, None), primals[:1], tangents[:1])


def _mapped(choice: Choice, axis_size: int, is_mapped: Any, call: Call, plan: PartitionPlan | None) -> Any:
    """Mapped calls. With plans and partitions they would wait for each other, and copy a mapped pool: see
    `pallas_kernels.common.launch`."""
    axes = jax.tree.map(lambda its: 0 if its else None, is_mapped[0])
    mapped = dataclasses.replace(choice.mapped or choice, falls_back=choice.falls_back, interpret=choice.interpret)
    return jax.vmap(lambda call: _run(mapped, call, None), (axes,), axis_size=axis_size)(call), (True, True)


def _on_platform(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    """By the kernel; lowered for another platform than CUDA by XLA, if the choice falls back."""
    launch = functools.partial(_launch_prefill if choice.kernel == "paged_prefill" else _launch_decode, choice)
    if choice.interpret is not None:
        return launch(call, plan)
    elsewhere = functools.partial(by_xla, 1) if choice.falls_back else _refuse
    return by_kernel(launch, elsewhere, call, plan, refusal=PARTITIONED)


def by_xla(num_partitions: int | None, call: Call, *_: Any) -> Results:
    """The call by XLA."""
    if isinstance(call, PackedArguments):
        return xla.attend_packed(call, num_partitions=num_partitions)
    return xla.attend(call, num_partitions=num_partitions)


def _refuse(*_: Any) -> Results:
    raise NotImplementedError(
        'implementation="mosaic_gpu" is for NVIDIA GPUs, and this call is lowered for another platform. '
        'Leave it out, or pass "xla".'
    )


def _launch_decode(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    from pallas_kernels.common.interpret import interpret_mode
    from pallas_kernels.decode.kernel import launch  # here, so that only its callers import Mosaic

    if isinstance(call, PackedArguments):
        packed_runs = packed.runs_of(call, choice.run)
        out, lse = _launch_decode(choice, packed.cut(call, packed_runs), plan)
        return packed.join(out, lse, call, packed_runs)
    a = query_runs.cut(call, choice.run)
    options = dataclasses.replace(a.options, tree_bits=None if a.tree is None else a.tree.bits)
    with interpret_mode(choice.interpret):
        arrays = a.q, a.k_cache, a.v_cache, a.block_tables, a.lengths
        config: Any = choice.config
        out, lse = launch(*arrays, options, plan=plan, config=config)
    return query_runs.join(out, call), query_runs.join(lse, call)


def _launch_prefill(choice: Choice, call: Call, _: PartitionPlan | None) -> Results:
    from pallas_kernels.common.interpret import interpret_mode
    from pallas_kernels.prefill.kernel import launch
    from pallas_kernels.prefill.work_list import make_work_list

    p = call if isinstance(call, PackedArguments) else _packed(call)
    config: Any = choice.config
    token_bytes = 2 * p.k_cache.shape[2] * p.q.shape[-1] * p.k_cache.dtype.itemsize
    work = make_work_list(p.query_starts, p.lengths, tokens=p.q.shape[0], token_bytes=token_bytes, config=config)
    options = dataclasses.replace(p.options, tree_bits=packed.tree_by_place(p))
    with interpret_mode(choice.interpret):
        out, lse = launch(p.q, p.k_cache, p.v_cache, p.block_tables, work, options, config=config)
    return out.reshape(call.q.shape), lse.reshape(call.q.shape[:-1])


def _packed(a: AttentionArguments) -> PackedArguments:
    """A uniform call as a packed one: the query tokens of one sequence after the other."""
    seqs, q_len, heads, head_dim = a.q.shape
    return PackedArguments(
        q=a.q.reshape(seqs * q_len, heads, head_dim),
        k_cache=a.k_cache,
        v_cache=a.v_cache,
        block_tables=a.block_tables,
        lengths=a.lengths,
        query_starts=jnp.arange(seqs + 1, dtype=jnp.int32) * q_len,
        options=a.options,
        tree_mask=None if a.tree is None else a.tree.bits.reshape(seqs * q_len, -1),
        causal=a.causal,
    )
