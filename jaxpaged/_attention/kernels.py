"""The attention kernels, and the launch of one: query tokens are split into runs, or packed."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._attention.runs import by_token, cut_packed, cut_uniform, join_packed, join_uniform, place_runs
from jaxpaged._attention.tree import from_rows
from jaxpaged._by_kernel import Choice
from pallas_kernels import decode, latent, prefill
from pallas_kernels.common.interface import Call, given
from pallas_kernels.prefill import portable

# The first kernel that supports a call computes it. The prefill kernels, one for Hopper and one for other GPUs, compute
# packed query tokens, several tokens per sequence with more than 32 rows (query tokens times query heads per KV head),
# and single tokens with more than 64 rows. The latent kernel computes latents with a multiple of 64 heads and no
# options, on Hopper. The decode kernel computes all other calls: up to 64 rows, or more in runs; a tree must fit into
# one run.
KERNELS = (prefill.KERNEL, portable.KERNEL, latent.KERNEL, decode.KERNEL)

Results = tuple[jax.Array, jax.Array]  # out, in the shape `Call.out_shape` and q's dtype, and its lse, f32


def launch(choice: Choice, call: Call) -> Results:
    run = choice.config.run
    if not run:
        out, lse = choice.kernel.launch(_packed(call), choice.config)
        return out.reshape(call.out_shape), lse.reshape(call.q.shape[:-1])
    if call.query_starts is not None and run == 1:
        out, lse = launch(choice, by_token(call))
        return out[:, 0], lse[:, 0]
    if call.query_starts is not None:
        runs = place_runs(call, run)
        return join_packed(*launch(choice, cut_packed(call, runs)), call, runs)
    tree_bits = given(from_rows(call.tree_mask, call.lengths), lambda tree: tree.bits)
    cut = cut_uniform(call, run)
    cut = dataclasses.replace(cut, tree_mask=None, options=dataclasses.replace(cut.options, tree_bits=tree_bits))
    out, lse = (join_uniform(x, call) for x in choice.kernel.launch(cut, choice.config))
    return out, lse


def _packed(call: Call) -> Call:
    """Converts a uniform call to a packed one."""
    if call.query_starts is not None:
        return call
    seqs, q_len, heads, head_dim = call.q.shape
    return dataclasses.replace(
        call,
        q=call.q.reshape(seqs * q_len, heads, head_dim),
        query_starts=jnp.arange(seqs + 1, dtype=jnp.int32) * q_len,
    )
