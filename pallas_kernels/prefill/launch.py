"""The launch of both prefill kernels: inputs, outputs, and the merge of the parts of an item."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import merge_parts
from pallas_kernels.common.interface import Call
from pallas_kernels.common.interpret import interpreted
from pallas_kernels.common.launch import OptionRefs
from pallas_kernels.common.launch import launch as launch_kernel
from pallas_kernels.prefill.config import Cut
from pallas_kernels.prefill.work_list import make_work_list


def launch_items(
    name: str,
    body: Callable[[Any], None],
    refs: Callable[..., Any],
    call: Call,
    config: Cut,
    *,
    rows: int,  # rows of an item
    **how: Any,  # arguments of `common.launch`
) -> tuple[jax.Array, jax.Array]:
    """Launches a packed call. Returns out [tokens, heads, head_dim] in q's dtype, and lse f32 [tokens, heads]."""
    parts, in_parts = config.num_parts, config.num_parts > 1

    def per_row(by_head: jax.Array) -> jax.Array:
        by_item = jnp.repeat(by_head.reshape(-1, config.heads), config.item_tokens, axis=1)
        return jnp.pad(by_item, ((0, 0), (0, rows - by_item.shape[1])))

    def launch(call: Call) -> tuple[jax.Array, jax.Array]:
        tokens, heads, head_dim = call.q.shape
        work = make_work_list(call, config)
        inputs = {
            "q": call.q,
            "k_cache": call.k_cache,
            "v_cache": call.v_cache,
            "block_tables": call.block_tables,
            "entries": work.entries,
            "num_entries": work.num_entries,
            "options": OptionRefs.of(call.options, per_row, with_sinks=not in_parts),
        }
        out_types = {
            "out": jax.ShapeDtypeStruct((parts * tokens, heads, head_dim), jnp.float32 if in_parts else call.q.dtype),
            "lse": jax.ShapeDtypeStruct((parts * tokens, heads), jnp.float32),
        }
        grid: Any = dict(grid=(config.num_programs,), grid_names=("program",))
        out, lse = launch_kernel(name, body, refs, inputs, out_types, **grid, **how)
        if not in_parts:
            return out, lse
        shape = parts, tokens, heads
        out, lse = merge_parts.merge(out.reshape(*shape, head_dim), lse.reshape(shape), call.options.sinks)
        return out.astype(call.q.dtype), lse

    # A call already occupies every SM, so mapped calls run one after the other.
    return launch(call) if interpreted() else jax.custom_batching.sequential_vmap(launch)(call)
