"""Explains to a user which kernel computes a call."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Unpack

import jax
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._attention.public import AttentionKeywords, check
from jaxpaged._attention.run import decide
from jaxpaged._attention.shared_prefix import split
from jaxpaged._by_kernel import Refusal, StaticHints
from pallas_kernels.common.interface import Call


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call of `paged_attention` is computed. Print it to read it."""

    implementation: Literal["mosaic_gpu", "xla"]
    reason: str  # why no kernel computes the call; empty if one does
    kernel: str | None  # its name in profiles; None for "xla"
    config: Any  # the kernel's `Config`; None for "xla"
    # Partitions of each sequence; "plan" if they depend on its length. None for "xla".
    num_partitions: int | Literal["plan"] | None
    # With prefix groups: the call on the shared blocks. The other fields are then for the call on the other blocks.
    shared: Explanation | None = None
    _title: str = dataclasses.field(default="", repr=False)  # the kernel's title

    def __str__(self) -> str:
        if self.kernel is None:
            text = f"xla: {self.reason}"
        else:
            partitions = f"{self.num_partitions} to a sequence"
            if self.num_partitions == "plan":
                partitions = "by a plan, more for longer sequences"
            text = f"mosaic_gpu: {self._title}\n  partitions: {partitions}\n  {self.config}"
        return text if self.shared is None else f"{text}\nfor the shared prefix {self.shared}"


def explain(
    q: ArrayLike | jax.ShapeDtypeStruct,
    k_cache: ArrayLike | jax.ShapeDtypeStruct,
    v_cache: ArrayLike | jax.ShapeDtypeStruct,
    block_tables: ArrayLike | jax.ShapeDtypeStruct,
    lengths: ArrayLike | jax.ShapeDtypeStruct,
    *,
    gpu: str | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Explanation:
    """Explains which kernel computes a call of `paged_attention`, in which configuration, or why none does.

    Nothing runs and no array is read, so any array may be a `jax.ShapeDtypeStruct`. Pass options in the same form as
    the call: a sliding window is known beforehand only as a number, not in an array. For arrays on several devices,
    pass the shapes on one device.

    Args:
        q: as in `paged_attention`.
        k_cache: as in `paged_attention`.
        v_cache: as in `paged_attention`.
        block_tables: as in `paged_attention`.
        lengths: as in `paged_attention`.
        gpu: "A100", "L4", "H100", "H200" or "B200"; default: JAX's default device.
        return_lse: has no effect here.
        options: the other options of `paged_attention`.

    Returns:
        The `Explanation`; print it to read it.

    Raises:
        ValueError: as `paged_attention`, or an unknown `gpu`.
        NotImplementedError: as `paged_attention`, if `implementation="mosaic_gpu"` and the kernels refuse the call.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> q = jax.ShapeDtypeStruct((8, 32, 128), jnp.bfloat16)
        >>> pool = jax.ShapeDtypeStruct((1024, 16, 8, 128), jnp.bfloat16)
        >>> tables, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 128), (8,)))
        >>> print(jaxpaged.debug.explain(q, pool, pool, tables, lengths, gpu="H100").kernel)
        paged_decode
        >>> wide = jax.ShapeDtypeStruct(pool.shape, jnp.float32)
        >>> print(jaxpaged.debug.explain(q, wide, wide, tables, lengths, gpu="H100"))
        xla: the decode kernel supports a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; got \
cache_dtype=float32, q_dtype=bfloat16.
    """
    on = None if gpu is None else _device.named(gpu)
    found: list[Explanation] = []
    leaves, tree = jax.tree.flatten(((q, k_cache, v_cache, block_tables, lengths), options))
    is_array = [isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves]

    def trace(arrays: list[Any]) -> None:
        traced = iter(arrays)
        given = [next(traced) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)]
        arguments, named = jax.tree.unflatten(tree, given)
        groups = named.pop("prefix_groups", None)
        call, hints = check(arguments, **named)
        parts = None if groups is None else split(call, groups)
        found.extend(_explanation(part, hints, on) for part in ([call] if parts is None else parts[:2]))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, array in zip(leaves, is_array, strict=True) if array]
    jax.eval_shape(trace, shapes)
    *shared, last = found
    return dataclasses.replace(last, shared=shared[0]) if shared else last


def _explanation(call: Call, hints: StaticHints, gpu: _device.Gpu | None) -> Explanation:
    choice = decide(call, hints, gpu)
    if isinstance(choice, Refusal):
        return Explanation("xla", choice.message, None, None, None)
    kernel, config = choice.kernel, choice.config
    return Explanation("mosaic_gpu", "", kernel.name, config, config.partitions, _title=kernel.title)
