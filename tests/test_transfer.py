"""Moving whole blocks, as literal traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, copy_blocks, fold_layers, unfold_layers
from tests.test_compiled import CACHE_ELEMENTS, cache_sized_copies, inputs

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def numbered(num_layers: int | None = None, num_blocks: int = 6, dtype=jnp.float32) -> KVCache:
    """Every number of k says which block it is in: 10 * layer + block; those of v are that + 100."""
    layers = jnp.arange(num_layers or 1, dtype=jnp.float32)[:, None] * 10
    named = layers + jnp.arange(num_blocks, dtype=jnp.float32)[None]
    named = named if num_layers else named[0]
    k = jnp.broadcast_to(named[..., None, None, None], (*named.shape, 2, 1, 8))
    return KVCache(k=k.astype(dtype), v=(k + 100).astype(dtype))


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def shown(pool: jax.Array) -> list:
    """What block each block's numbers came from; they must all agree."""
    pool = np.asarray(pool, np.float32)
    assert (pool == pool[..., :1, :1, :1]).all()
    return pool[..., 0, 0, 0].astype(int).tolist()


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("num_layers", [None, 3])
def test_copy_blocks(source_ids, destination_ids, expected, num_layers):
    cache = copy_blocks(numbered(num_layers), ids(*source_ids), ids(*destination_ids))
    layers = [expected] if num_layers is None else [[10 * i + block for block in expected] for i in range(num_layers)]
    assert shown(cache.k) == (layers[0] if num_layers is None else layers)
    assert shown(cache.v) == jax.tree.map(lambda x: x + 100, layers[0] if num_layers is None else layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_keeps_every_bit(dtype):
    width = np.uint32 if dtype == jnp.float32 else np.uint16
    bits = np.random.default_rng(0).integers(0, np.iinfo(width).max, (6, 2, 3, 8), width)  # many kinds of NaN
    k = jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)
    copied = copy_blocks(KVCache(k, k), ids(1, 2), ids(4, 5)).k
    expected = np.asarray(k)[[0, 1, 2, 3, 1, 2]]
    assert np.asarray(copied).tobytes() == expected.tobytes()


def test_copying_within_a_stack_is_copying_in_each_of_its_layers():
    stack = numbered(3)
    pool = fold_layers(stack)
    shifted = ids(1, 2 + 6, 3 + 12), ids(4, 4 + 6, 4 + 12)
    assert shown(unfold_layers(copy_blocks(pool, *shifted), 3).k)[1] == [10, 11, 12, 13, 12, 15]
    alone = [copy_blocks(KVCache(k, v), ids(1), ids(5)) for k, v in zip(stack.k, stack.v, strict=True)]
    assert shown(copy_blocks(stack, ids(1), ids(5)).v) == [shown(cache.v) for cache in alone]


def test_copy_blocks_in_place():
    cache, *_ = inputs()
    some = ids(*range(1, 9))
    compiled = jax.jit(copy_blocks, donate_argnums=0).lower(cache, some, some + 8).compile()
    assert cache_sized_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 4 * CACHE_ELEMENTS
    assert compiled.memory_analysis().temp_size_in_bytes < CACHE_ELEMENTS


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "message"),
    [
        (ids(1), ids(1, 2), r"got source_ids.shape=\(1,\), destination_ids.shape=\(2,\). Pad with the null block"),
        (ids(1)[None], ids(1), r"source_ids must be int32, of one axis; got int32 \[1, 1\]"),
        (ids(1), jnp.zeros(1), r"destination_ids must be int32, of one axis; got float32 \[1\]"),
    ],
)
def test_copy_blocks_errors(source_ids, destination_ids, message):
    with pytest.raises(ValueError, match=message):
        copy_blocks(numbered(), source_ids, destination_ids)


def test_what_is_no_cache():
    with pytest.raises(ValueError, match=r"got k.shape=\(3, 8\)"):
        copy_blocks(KVCache(jnp.zeros((3, 8)), jnp.zeros((3, 8))), ids(1), ids(2))
