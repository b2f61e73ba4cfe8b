"""Caches whose numbers identify their blocks, and the expected copies of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache
from jaxpaged._cache.kv_cache import map_blocks

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)

EVERY_CACHE = pytest.mark.parametrize(
    ("dtype", "scale"),
    [(dtype, None) for dtype in DTYPES]
    + [(dtype, scale) for dtype in EIGHT_BITS for scale in ("tensor", "head", "token_head")],
    ids=lambda x: x if isinstance(x, str) else x and jnp.dtype(x).name,
)

EVERY_DTYPE = pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT_BITS], ids=lambda dtype: jnp.dtype(dtype).name)

COPIES = pytest.mark.parametrize(
    ("source_ids", "destination_ids", "expected"),
    [
        pytest.param([1, 2], [4, 5], [0, 1, 2, 3, 1, 2], id="plain"),
        pytest.param([], [], [0, 1, 2, 3, 4, 5], id="none"),
        pytest.param([0, 0, 1], [0, 0, 4], [0, 1, 2, 3, 1, 5], id="padding"),
        pytest.param([0, 3], [2, 0], [0, 1, 2, 3, 4, 5], id="the null block is neither read nor written"),
        pytest.param([3, 3], [3, 4], [0, 1, 2, 3, 3, 5], id="over itself"),
        pytest.param([1, 2, 3], [2, 3, 1], [0, 3, 1, 2, 4, 5], id="a cycle reads before it writes"),
        pytest.param([1, 2, 3], [5, 5, 5], [0, 1, 2, 3, 4, 3], id="the last of one destination"),
        pytest.param([1, 2, -1, 9], [5, 4, 5, 4], [0, 1, 2, 3, 2, 1], id="the last legal one"),
        pytest.param([-1, 6, 2**31 - 1, -(2**31)], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5], id="sources outside"),
        pytest.param([1, 2, 3, 4], [-1, 6, 2**31 - 1, -(2**31)], [0, 1, 2, 3, 4, 5], id="destinations outside"),
    ],
)


def numbered(num_layers: int | None = None, num_blocks: int = 6, dtype=jnp.float32) -> KVCache:
    """Numbers of k identify their block, 10 * layer + block; numbers of v add 100."""
    named = 10 * np.arange(num_layers or 1)[:, None] + np.arange(num_blocks)[None]
    named = named if num_layers else named[0]
    k = np.broadcast_to(named[..., None, None, None], (*named.shape, 2, 1, 8))
    return KVCache(*(jax.device_put(values.astype(dtype)) for values in (k, k + 100)))


def ids(*values: int) -> jax.Array:
    return jax.device_put(np.asarray(values, np.int32))


def shown(pool: jax.Array) -> list:
    """The source block of each block's numbers, which must all agree."""
    pool = np.asarray(pool, np.float32)
    assert (pool == pool[..., :1, :1, :1]).all()
    return pool[..., 0, 0, 0].astype(int).tolist()


def filled(dtype, scale, num_layers=None, num_blocks=6) -> KVCache:
    """A cache with different bits in every number and in every token's scale."""
    rng = np.random.default_rng(0)
    given = dict(k_scale=0.5, v_scale=0.25) if scale in ("tensor", "head") else {}
    sizes = dict(num_blocks=num_blocks, block_size=4, num_kv_heads=3, head_dim=8, num_layers=num_layers)
    empty = KVCache.create(**sizes, dtype=dtype, scale_per=scale, **given)

    def fill(leaf):
        numbers = rng.normal(size=leaf.shape).astype(np.float32)
        return jax.device_put((np.round(40 * numbers) if leaf.dtype == jnp.int8 else numbers).astype(leaf.dtype))

    return map_blocks(fill, empty)


def block_leaves(cache: KVCache) -> list[np.ndarray]:
    """Every array with a block axis, as [layers, blocks, bytes]."""
    layers = cache.k.shape[0] if cache.k.ndim == 5 else 1
    blocks = cache.k.shape[-4]
    leaves = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim >= cache.k.ndim - 1]
    return [np.ascontiguousarray(leaf).view(np.uint8).reshape(layers, blocks, -1) for leaf in leaves]


def same_bits(cache: KVCache, other: KVCache) -> bool:
    return all((a == b).all() for a, b in zip(block_leaves(cache), block_leaves(other), strict=True))


def random_pairs(seed: int, num_pairs: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Random ids, some outside the pool: chains, cycles, duplicates, padding."""
    rng = np.random.default_rng(seed)
    return tuple(ids(*rng.integers(-1, num_blocks + 1, num_pairs)) for _ in range(2))


def by_numpy(pool: np.ndarray, source_ids: jax.Array, destination_ids: jax.Array) -> np.ndarray:
    """The result of `copy_blocks` on a pool [layers, blocks, bytes]."""
    new = pool.copy()
    for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
        if 0 < source < pool.shape[1] and 0 < destination < pool.shape[1]:
            new[:, destination] = pool[:, source]
    return new
