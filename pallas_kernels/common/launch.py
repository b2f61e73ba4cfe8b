"""Launch of an attention kernel: passes arrays and options by the names of the kernel's `Refs`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import interpret
from pallas_kernels.common.interface import AttentionOptions, given


def launch(
    name: str,
    body: Callable[[Any], None],  # called with the refs
    refs: Callable[..., Any],  # makes the refs
    inputs: dict[str, Any],  # arrays and pytrees of arrays; None: not used by this call
    out_types: dict[str, Any],
    *,
    reduction_bytes: int = 2048,  # SMEM for reductions across warps
    **how: Any,  # arguments of `plgpu.kernel`
) -> Any:
    """Returns the outputs. If the last one is `arrivals`, it starts as zeros."""
    operands, structure = jax.tree.flatten(tuple(inputs.values()))

    def kernel(*arrays: Any, **scratch_refs: Any) -> None:
        its_inputs = jax.tree.unflatten(structure, arrays[: len(operands)])
        named = dict(zip((*inputs, *out_types), (*its_inputs, *arrays[len(operands) :]), strict=True))
        body(refs(**named, **scratch_refs))

    kernel.__name__ = name
    params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=reduction_bytes)
    make = functools.partial(interpret.kernel, kernel, compiler_params=params, **how)
    types = tuple(out_types.values())
    if "arrivals" not in out_types:
        return make(out_type=types)(*operands)
    written = make()

    # A kernel that writes into its operands cannot be mapped (jax 0.11.2 and 0.12.0).
    @jax.custom_batching.sequential_vmap
    def one_after_the_other(operands: list[jax.Array]) -> Any:
        first = *pl.empty_like(types[:-1]), jnp.zeros_like(types[-1])
        return pl.run_state(lambda results: written(*operands, *results))(first)

    return one_after_the_other(operands)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptionRefs:
    """The options: arrays before the launch, refs inside the kernel. None: the call does not use the option."""

    scale: Any  # f32 [1]
    sliding_window: Any  # int32 [1]
    logits_soft_cap: Any  # f32 [1]
    alibi_slopes: Any  # f32, one per row of a program
    sinks: Any  # as alibi_slopes; also None if a later merge applies them
    tree_bits: Any  # int32 [seqs, words, rows]
    k_scale: Any  # f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    v_scale: Any  # as k_scale

    @classmethod
    def of(
        cls,
        options: AttentionOptions,
        per_row: Callable[[jax.Array], jax.Array],  # from f32 [heads]
        *,
        with_sinks: bool = True,
        tree_bits: jax.Array | None = None,
    ) -> "OptionRefs":
        def number(x: jax.Array) -> jax.Array:
            return x.reshape(1)

        return cls(
            scale=number(options.scale),
            sliding_window=given(options.sliding_window, number),
            logits_soft_cap=given(options.logits_soft_cap, number),
            alibi_slopes=given(options.alibi_slopes, per_row),
            sinks=given(options.sinks if with_sinks else None, per_row),
            tree_bits=tree_bits,
            k_scale=given(options.k_scale, jnp.atleast_1d),
            v_scale=given(options.v_scale, jnp.atleast_1d),
        )

    @property
    def window(self) -> jax.Array | None:
        return given(self.sliding_window, lambda window: window[0])

    @property
    def cap(self) -> jax.Array | None:
        return given(self.logits_soft_cap, lambda cap: cap[0])


def bits_by_row(bits: jax.Array, *, group: int, rows: int) -> jax.Array:
    """uint32 [seqs, q_len, words] -> int32 [seqs, words, rows]: repeated for each head, zero in the padding."""
    by_row = jnp.repeat(lax.bitcast_convert_type(bits, jnp.int32).swapaxes(1, 2), group, axis=2)
    return jnp.pad(by_row, ((0, 0), (0, 0), (0, rows - by_row.shape[2])))


def by_row(by_head: jax.Array, *, kv_heads: int, q_len: int, rows: int) -> jax.Array:
    """f32 [heads] -> [kv_heads, rows]: repeated for each query token, zero in the padding."""
    by_head = by_head.reshape(kv_heads, 1, -1)
    group = by_head.shape[-1]
    by_row = jnp.broadcast_to(by_head, (kv_heads, q_len, group)).reshape(kv_heads, q_len * group)
    return jnp.pad(by_row, ((0, 0), (0, rows - q_len * group)))
