"""Reading and writing rows of a pool, in place, whatever the dtype.

XLA on a CPU knows no float8: it widens the operand of a gather or a scatter to float16, which is the whole cache, and
back. So there the bytes are moved as uint8; on GPUs float8 is moved as any other dtype is.
"""

import jax
import jax.numpy as jnp
from jax import lax

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def take_rows(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """`pool[ids]`: rows `[..., *row]` of a pool `[rows, *row]`. The ids are legal."""
    if pool.dtype not in FLOAT8:
        return _take(pool, ids)
    return lax.platform_dependent(pool, ids, cpu=_take_bytes, default=_take)


def put_rows(pool: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """The pool `[..., *row]` with `rows` `[ids, *row]` in their places, its leading axes counted as one; rows whose id
    is below zero are dropped.

    XLA is told that no two writes meet, or it would serialise the scatter on GPUs: the ids are distinct, also those
    below zero.
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
        # XLA makes a slice, a select and an update of the scatter of a single row: more kernels on a GPU, and slower on
        # a CPU (a token of 192 numbers: 11 us against 0.7). Not so of two rows, one of which is dropped.
        ids = jnp.concatenate([ids, jnp.minimum(ids, 0) - 1])
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    flat = pool.reshape(-1, *rows.shape[1:])
    flat = flat.at[ids].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return flat.reshape(pool.shape)


def _take_bytes(pool: jax.Array, ids: jax.Array) -> jax.Array:
    # Tied to the ids, so that a loop over tiles does not convert the whole pool before it starts.
    pool, ids = lax.optimization_barrier((pool, ids))
    return lax.bitcast_convert_type(_take(lax.bitcast_convert_type(pool, jnp.uint8), ids), pool.dtype)


def _put_by_select(pool: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    # Not a scatter, before and after which XLA would copy the pool, but one pass over it, in place: each row asks
    # which of the new ones it becomes. (Without a reshape of the pool, which would cost a copy here. The pass goes
    # through float16, which keeps every number; a NaN stays one, perhaps another one.)
    places = pool.shape[: pool.ndim - rows.ndim + 1]
    order = jnp.arange(ids.size, dtype=jnp.int32)
    which = _put(jnp.full(places, -1, jnp.int32), ids, order)
    is_new = lax.broadcast_in_dim(which >= 0, pool.shape, tuple(range(which.ndim)))
    return jnp.where(is_new, _take_bytes(rows, jnp.maximum(which, 0)), pool)
