"""How a form of the prefill kernel is called: what it reads and writes, and the merge of its parts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import merge_parts
from pallas_kernels.common.launch import launch as launch_kernel
from pallas_kernels.common.option_refs import OptionRefs
from pallas_kernels.common.options import AttentionOptions
from pallas_kernels.prefill.work_list import WorkList


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the kernel, as it computes a call."""

    name: str
    body: Callable[[Any], None]
    refs: Callable[..., Any]
    rows: int  # of an item
    num_programs: int
    how: dict[str, Any]  # of `common.launch`


def launch(
    form_of: Callable[..., Form],  # of q, k_cache, the work list, the options and the configuration
    q: jax.Array,  # [tokens, heads, head_dim]
    k_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array,  # [blocks, block_size, kv_heads, head_dim]
    block_tables: jax.Array,  # int32 [seqs, max_blocks]
    work: WorkList,
    options: AttentionOptions,
    *,
    config: Any,  # of the form
) -> tuple[jax.Array, jax.Array]:
    """Returns out [tokens, heads, head_dim] in q's dtype, and lse f32 [tokens, heads]."""
    form = form_of(q, k_cache, work, options, config)
    tokens, heads, head_dim = q.shape
    parts, in_parts = config.num_parts, config.num_parts > 1

    def per_row(by_head: jax.Array) -> jax.Array:
        by_item = jnp.repeat(by_head.reshape(-1, config.heads), config.item_tokens, axis=1)
        return jnp.pad(by_item, ((0, 0), (0, form.rows - by_item.shape[1])))

    inputs = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": block_tables,
        "entries": work.entries,
        "num_entries": work.num_entries,
        "options": OptionRefs.of(options, per_row, with_sinks=not in_parts),
    }
    out_types = {
        "out": jax.ShapeDtypeStruct((parts * tokens, heads, head_dim), jnp.float32 if in_parts else q.dtype),
        "lse": jax.ShapeDtypeStruct((parts * tokens, heads), jnp.float32),
    }
    grid: Any = dict(grid=(form.num_programs,), grid_names=("program",))
    out, lse = launch_kernel(form.name, form.body, form.refs, inputs, out_types, **grid, **form.how)
    if not in_parts:
        return out, lse
    out, lse = merge_parts.merge(out.reshape(parts, *q.shape), lse.reshape(parts, tokens, heads), options.sinks)
    return out.astype(q.dtype), lse
