"""Reads and writes rows of a pool in place, for any dtype.

XLA on a CPU has no float8: for a gather or a scatter it converts the whole cache to float16 and back. The functions
here therefore move float8 as uint8 on a CPU. GPUs move float8 like any other dtype.
"""

import jax
import jax.numpy as jnp
from jax import lax

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def take_rows(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """`pool[ids]`: rows `[..., *row]` of a pool `[rows, *row]`. All ids must be inside the pool."""
    if pool.dtype not in FLOAT8:
        return _take(pool, ids)
    return lax.platform_dependent(pool, ids, cpu=_take_bytes, default=_take)


def put_rows(pool: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes `rows` `[ids, *row]` at `ids` into a pool `[..., *row]`, whose leading axes are flattened. Rows with a
    negative id are dropped.

    All ids must be distinct, including negative ones. Without this promise XLA serialises the scatter on GPUs.
    """
    if ids.size == 0:
        return pool
    if pool.dtype not in FLOAT8:
        return _put(pool, ids, rows)
    return lax.platform_dependent(pool, ids, rows, cpu=_put_by_select, default=_put)


def _take(pool: jax.Array, ids: jax.Array) -> jax.Array:
    return pool.at[ids].get(mode="promise_in_bounds")


def _put(pool: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    if ids.size == 1:
        # XLA turns the scatter of a single row into a slice, a select and an update: more kernels on a GPU, and slower
        # on a CPU. A second row, which is dropped, prevents this.
        ids = jnp.concatenate([ids, jnp.minimum(ids, 0) - 1])
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    flat = pool.reshape(-1, *rows.shape[1:])
    flat = flat.at[ids].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return flat.reshape(pool.shape)


def _take_bytes(pool: jax.Array, ids: jax.Array) -> jax.Array:
    # The barrier ties the pool to the ids. Otherwise XLA converts the whole pool before a loop over tiles starts.
    pool, ids = lax.optimization_barrier((pool, ids))
    return lax.bitcast_convert_type(_take(lax.bitcast_convert_type(pool, jnp.uint8), ids), pool.dtype)


def _put_by_select(pool: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    # XLA would copy the pool before and after a scatter. This is one pass over it, in place, that selects the old or
    # the new row. (Reshaping the pool would be a copy here. The pass goes through float16, which represents every
    # float8 number; a NaN stays a NaN, but its bits may change.)
    shape = pool.shape[: pool.ndim - rows.ndim + 1]
    order = jnp.arange(ids.size, dtype=jnp.int32)
    which = _put(jnp.full(shape, -1, jnp.int32), ids, order)
    is_new = lax.broadcast_in_dim(which >= 0, pool.shape, tuple(range(which.ndim)))
    return jnp.where(is_new, _take_bytes(rows, jnp.maximum(which, 0)), pool)
