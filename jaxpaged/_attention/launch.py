"""The operands of a kernel, made of a call, and its launch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._attention.call import Call
from jaxpaged._attention.choose import Choice
from jaxpaged._attention.runs import by_token, cut_packed, cut_uniform, join_packed, join_uniform, place_runs
from jaxpaged._attention.tree import from_rows
from pallas_kernels.decode.partition_plan import PartitionPlan

Results = tuple[jax.Array, jax.Array]  # out, of `Call.out_shape`, in q's dtype, and its lse, f32


def launch(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    from pallas_kernels.common.interpret import interpret_mode  # here, so that only its callers import Mosaic

    with interpret_mode(choice.interpret):
        if choice.kernel in ("paged_decode", "paged_latent"):
            return _launch_decode(choice, call, plan)
        return _launch_prefill(choice, call)


def _launch_decode(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    from pallas_kernels.decode import kernel
    from pallas_kernels.latent import kernel as latent

    if call.query_starts is not None and choice.run == 1:
        out, lse = _launch_decode(choice, by_token(call), plan)
        return out[:, 0], lse[:, 0]
    if call.query_starts is not None:
        runs = place_runs(call, choice.run)
        return join_packed(*_launch_decode(choice, cut_packed(call, runs), plan), call, runs)
    a, tree = cut_uniform(call, choice.run), from_rows(call.tree_mask, call.lengths)
    config: Any = choice.config
    how: Any = dict(value_dim=call.value_dim, config=config)
    if choice.kernel == "paged_latent":
        results = latent.launch(a.q[:, 0], a.k_cache, a.block_tables, a.lengths, a.options.scale, **how)
        results = results[0][:, None], results[1][:, None]
    else:
        options = dataclasses.replace(a.options, tree_bits=None if tree is None else tree.bits)
        results = kernel.launch(a.q, a.k_cache, a.v_cache, a.block_tables, a.lengths, options, plan=plan, **how)
    out, lse = (join_uniform(x, call) for x in results)
    return out, lse


def _launch_prefill(choice: Choice, call: Call) -> Results:
    from pallas_kernels.prefill import kernel, launch
    from pallas_kernels.prefill.portable import kernel as portable
    from pallas_kernels.prefill.work_list import make_work_list

    p = call if call.query_starts is not None else _packed(call)
    config: Any = choice.config
    assert p.query_starts is not None
    assert p.v_cache is not None
    token_bytes = 2 * p.kv_heads * p.head_dim * p.itemsize
    work = make_work_list(p.query_starts, p.lengths, tokens=p.q.shape[0], token_bytes=token_bytes, config=config)
    form = kernel.form if choice.kernel == "paged_prefill" else portable.form
    out, lse = launch.launch(form, p.q, p.k_cache, p.v_cache, p.block_tables, work, p.options, config=config)
    return out.reshape(call.out_shape), lse.reshape(call.q.shape[:-1])


def _packed(call: Call) -> Call:
    """A uniform call as a packed one: the query tokens of one sequence after the other."""
    seqs, q_len, heads, head_dim = call.q.shape
    return dataclasses.replace(
        call,
        q=call.q.reshape(seqs * q_len, heads, head_dim),
        query_starts=jnp.arange(seqs + 1, dtype=jnp.int32) * q_len,
    )
