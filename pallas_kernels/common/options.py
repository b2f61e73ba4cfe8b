"""The options of attention, carried whole from the public function to the kernel."""

import dataclasses
from collections.abc import Callable

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Checked, as arrays. None: the option is left out, and costs a kernel nothing."""

    scale: jax.Array  # f32 []
    sliding_window: jax.Array | None = None  # int32 [], within 1 and the capacity of a table row
    logits_soft_cap: jax.Array | None = None  # f32 []
    alibi_slopes: jax.Array | None = None  # f32 [heads]
    sinks: jax.Array | None = None  # f32 [heads]
    k_scale: jax.Array | None = None  # f32 [], [kv_heads] or [blocks, block_size, kv_heads], of an 8-bit cache
    v_scale: jax.Array | None = None  # as k_scale
    tree_bits: jax.Array | None = None  # uint32 [seqs, q_len, words], which of the q_len tokens each of them sees


def given[X, Y](x: X | None, function: Callable[[X], Y]) -> Y | None:
    """`function(x)`; None of None, for an option that is left out."""
    return None if x is None else function(x)
