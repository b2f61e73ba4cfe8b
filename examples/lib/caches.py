"""The caches of an engine that serves as a learner's sampler."""

from typing import Any

import jaxpaged


def create_caches(
    options: jaxpaged.EngineOptions, max_model_len: int, *, num_layers: int, block_size: int, **sizes: Any
) -> tuple[jaxpaged.KVCache, ...]:
    """A cache for each layer, with room for `max_num_seqs` requests of `max_model_len` tokens.

    `sizes`: `num_kv_heads`, `head_dim` and `dtype`, as in `KVCache.create`. Raises `ValueError` if `options` leaves
    `max_num_seqs` to the engine, which chooses it by the caches.
    """
    if options.max_num_seqs is None:
        raise ValueError("options must set max_num_seqs, which determines the size of the caches; got None.")
    num_blocks = 1 + options.max_num_seqs * -(-max_model_len // block_size)
    create = jaxpaged.KVCache.create
    return tuple(create(num_blocks=num_blocks, block_size=block_size, **sizes) for _ in range(num_layers))
