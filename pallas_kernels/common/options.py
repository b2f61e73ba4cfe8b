"""The options of attention, carried whole from the public function to the kernel."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


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


def name_operands(
    options: AttentionOptions,
    per_row: Callable[[jax.Array], jax.Array],  # of f32 [heads]
    *,
    with_sinks: bool = True,
    tree_bits: jax.Array | None = None,
) -> dict[str, jax.Array | None]:
    """As a kernel reads them, by its names: numbers as [1], numbers of heads by row. None: left out."""

    def number(x: jax.Array) -> jax.Array:
        return x.reshape(1)

    return {
        "scale": number(options.scale),
        "sliding_window": given(options.sliding_window, number),
        "logits_soft_cap": given(options.logits_soft_cap, number),
        "alibi_slopes": given(options.alibi_slopes, per_row),
        "sinks": given(options.sinks if with_sinks else None, per_row),
        "tree_bits": tree_bits,
        "k_scale": given(options.k_scale, jnp.atleast_1d),
        "v_scale": given(options.v_scale, jnp.atleast_1d),
    }


def bits_by_row(bits: jax.Array, *, group: int, rows: int) -> jax.Array:
    """uint32 [seqs, q_len, words] -> int32 [seqs, words, rows], the same for every head, zero in the padding."""
    by_row = jnp.repeat(lax.bitcast_convert_type(bits, jnp.int32).swapaxes(1, 2), group, axis=2)
    return jnp.pad(by_row, ((0, 0), (0, 0), (0, rows - by_row.shape[2])))


def by_row(by_head: jax.Array, *, kv_heads: int, q_len: int, rows: int) -> jax.Array:
    """f32 [heads] -> [kv_heads, rows], the same for every query token, zero in the padding."""
    by_head = by_head.reshape(kv_heads, 1, -1)
    group = by_head.shape[-1]
    by_row = jnp.broadcast_to(by_head, (kv_heads, q_len, group)).reshape(kv_heads, q_len * group)
    return jnp.pad(by_row, ((0, 0), (0, rows - q_len * group)))
