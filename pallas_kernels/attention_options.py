"""The options of attention, carried whole from the public function to the kernel."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Checked, as arrays. None: the option is left out, and costs a kernel nothing."""

    scale: jax.Array  # f32 []
    sliding_window: jax.Array | None = None  # int32 [], within 1 and the capacity of a table row
    logits_soft_cap: jax.Array | None = None  # f32 []
    alibi_slopes: jax.Array | None = None  # f32 [heads]
    sinks: jax.Array | None = None  # f32 [heads]
    k_scale: jax.Array | None = None  # f32 [], [kv_heads] or [blocks, block_size, kv_heads], of a narrow cache
    v_scale: jax.Array | None = None  # likewise
    # uint32 [seqs, q_len, words], which of the q_len tokens each of them sees; for the prefill kernel [tokens, words],
    # see `paged_prefill._tree`.
    tree_bits: jax.Array | None = None


def by_row(by_head: jax.Array, kv_heads: int, q_len: int, rows: int) -> jax.Array:
    """f32 [heads] -> [kv_heads, rows], the same for every query token, zero in the padding."""
    by_head = by_head.reshape(kv_heads, 1, -1)
    group = by_head.shape[-1]
    by_row = jnp.broadcast_to(by_head, (kv_heads, q_len, group)).reshape(kv_heads, q_len * group)
    return jnp.pad(by_row, ((0, 0), (0, rows - q_len * group)))
