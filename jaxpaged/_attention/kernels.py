"""The kernels of attention, and how a call is given to one: its query tokens cut in runs, or packed."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._attention.runs import by_token, cut_packed, cut_uniform, join_packed, join_uniform, place_runs
from jaxpaged._attention.tree import from_rows
from jaxpaged._by_kernel import Choice
from pallas_kernels import decode, latent, prefill
from pallas_kernels.common.interface import Call, given
from pallas_kernels.prefill import portable

# The fastest comes first. Two kernels, one on Hopper and one elsewhere, compute packed query tokens, several tokens of
# a sequence with more than 32 rows (query tokens times heads of a KV head), and single ones with more than 64. The next
# one computes latents of 64 heads, 128 and so on, without options, on Hopper. The last computes all other calls, with
# up to 64 rows, and longer queries in runs; a tree must fit one run.
KERNELS = (prefill.KERNEL, portable.KERNEL, latent.KERNEL, decode.KERNEL)

Results = tuple[jax.Array, jax.Array]  # out, of `Call.out_shape`, in q's dtype, and its lse, f32


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
    """A uniform call as a packed one: the query tokens of one sequence after the other."""
    if call.query_starts is not None:
        return call
    seqs, q_len, heads, head_dim = call.q.shape
    return dataclasses.replace(
        call,
        q=call.q.reshape(seqs * q_len, heads, head_dim),
        query_starts=jnp.arange(seqs + 1, dtype=jnp.int32) * q_len,
    )
