"""`paged_attention` with partitions as a benchmark names them: a number, None for the default, or "plan"."""

from typing import Any, Literal

import jax

from jaxpaged import paged_attention, plan_partitions

Partitions = int | Literal["plan"] | None


def partitioned(partitions: Partitions, q: jax.Array, k_cache: jax.Array, *rest: Any, **options: Any) -> Any:
    """The call; with "plan", a plan is made from its lengths."""
    if partitions != "plan":
        return paged_attention(q, k_cache, *rest, num_partitions=partitions, **options)
    _, _, lengths = rest
    q_len = q.shape[1] if q.ndim == 4 else 1
    window = options.get("sliding_window")
    plan = plan_partitions(lengths, num_kv_heads=k_cache.shape[2], q_len=q_len, sliding_window=window)
    return paged_attention(q, k_cache, *rest, plan=plan, **options)
