import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged import CacheLayer, KVCache, paged_attention
from jaxpaged.ops import write_kv
from tests.cases import make_case

SMALL = dict(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="float32")


def tokens(*values: float) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.float32)[:, None, None], (len(values), 1, 8))


def shown(pool: jax.Array) -> list[float]:
    return pool[..., 0, 0].ravel().tolist()


def test_writes_land_in_their_slots_and_nowhere_else():
    cache = write_kv(KVCache.create(**SMALL), tokens(1, 2, 3), tokens(4, 5, 6), jnp.asarray([7, 2, 3], jnp.int32))
    assert shown(cache.k) == [0, 0, 2, 3, 0, 0, 0, 1]
    assert shown(cache.v) == [0, 0, 5, 6, 0, 0, 0, 4]
    assert (cache.k == cache.k[..., :1]).all()


@pytest.mark.parametrize("padding", [-1, -2, 8, 9, 2**31 - 1, -(2**31)])
def test_slots_outside_the_pool_are_dropped(padding):
    slots = jnp.asarray([padding, 5, padding], jnp.int32)
    cache = write_kv(KVCache.create(**SMALL), tokens(1, 2, 3), tokens(4, 5, 6), slots)
    assert shown(cache.k) == [0, 0, 0, 0, 0, 2, 0, 0]
    assert shown(cache.v) == [0, 0, 0, 0, 0, 5, 0, 0]


def test_the_default_is_the_dtype_that_the_kernels_take():
    cache = KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_no_token(dtype):
    empty = KVCache.create(**SMALL | dict(dtype=dtype))
    nothing = jnp.zeros((0, 1, 8))
    cache = write_kv(empty, nothing, nothing, jnp.zeros(0, jnp.int32))
    assert not np.asarray(cache.k, np.float32).any()


@pytest.mark.parametrize("slot", [-1, 0, 5, 7, 8])
def test_one_token(slot):
    cache = write_kv(KVCache.create(**SMALL), tokens(2), tokens(3), jnp.asarray([slot], jnp.int32))
    assert shown(cache.k) == [2 * (i == slot) for i in range(8)]
    assert shown(cache.v) == [3 * (i == slot) for i in range(8)]


def test_writes_take_any_leading_axes_and_cast_to_the_cache():
    cache = KVCache.create(**SMALL | dict(dtype=jnp.bfloat16))
    k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1, 8)), jnp.float32)
    cache = write_kv(cache, k, k, jnp.asarray([[2, 3, 4], [5, 6, 7]], jnp.int32))
    assert cache.k.dtype == jnp.bfloat16
    assert (cache.k.reshape(8, 1, 8)[2:] == k.reshape(6, 1, 8).astype(jnp.bfloat16)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_blocks=0), r"num_blocks must be at least 1; got num_blocks=0"),
        (dict(block_size=-1), r"block_size must be at least 1; got block_size=-1"),
        (dict(num_layers=0), r"num_layers must be at least 1; got num_layers=0"),
        (dict(dtype=jnp.int32), r"dtype must be one of float32, .*, int8; got dtype=int32"),
        (dict(dtype=None), r"dtype must be one of float32, .*; got dtype=None"),
        (dict(is_latent=True), r"needs value_dim, .*; got value_dim=None with head_dim=8. Pass value_dim="),
    ],
)
def test_create_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        KVCache.create(**SMALL | changes)


@pytest.mark.parametrize(
    ("cache", "k", "slots", "message"),
    [
        (
            SMALL,
            (3, 1, 8),
            jnp.zeros(2, jnp.int32),
            r"got k.shape=\(3, 1, 8\), slots.shape=\(2,\)",
        ),
        (SMALL, (3, 2, 8), jnp.zeros(3, jnp.int32), r"slots \[\.\.\.\] and the cache's \[1, 8\]"),
        (SMALL, (3, 1, 8), jnp.zeros(3, jnp.float32), r"slots must be int32; got slots.dtype=float32"),
        (SMALL | dict(num_layers=2), (3, 1, 8), jnp.zeros(3, jnp.int32), r"got cache.k.shape=\(2, .*CacheLayer"),
    ],
)
def test_write_errors(cache, k, slots, message):
    with pytest.raises(ValueError, match=message):
        write_kv(KVCache.create(**cache), jnp.zeros(k), jnp.zeros(k), slots)


def test_a_cache_that_write_kv_cannot_write():
    narrow = jnp.zeros((4, 2, 1, 8), jnp.int8)
    with pytest.raises(ValueError, match=r"a quantised cache has scales .* got k.dtype=int8 and k_scale missing"):
        write_kv(KVCache(narrow, narrow), tokens(1), tokens(1), jnp.zeros(1, jnp.int32))


def test_a_layer_of_a_stack_is_that_cache_by_itself():
    layers = [make_case(seed, lengths=(20, 33), max_blocks=3) for seed in (1, 2, 3)]
    stack = KVCache(k=jnp.stack([c.k_cache for c in layers]), v=jnp.stack([c.v_cache for c in layers]))
    for i, case in enumerate(layers):
        layer = CacheLayer(stack, i)
        tables = layer.block_tables(case.block_tables)
        out = paged_attention(case.q, layer.pool.k, layer.pool.v, tables, case.lengths)
        alone = paged_attention(*case.arrays)
        assert (out == alone).all()


def test_slots_of_a_layer_shift_tokens_and_keep_padding():
    slots = jnp.asarray([0, 7, 8, -1, 2**31 - 1], jnp.int32)
    stack = KVCache.create(**SMALL, num_layers=3)
    assert CacheLayer(stack, 2).slots(slots).tolist() == [16, 23, -1, -1, -1]
    written = write_kv(CacheLayer(stack, 1), tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 5), slots)
    assert shown(written.stack.k) == [0] * 8 + [1] + [0] * 6 + [2] + [0] * 8


def test_a_layer_is_of_a_stack():
    cache = KVCache.create(**SMALL)
    for wrong in ((cache, cache), CacheLayer((cache, cache), 0)):
        with pytest.raises(ValueError, match=r"must be a KVCache, .*; got a tuple. .* index it, or make an Engine"):
            write_kv(wrong, tokens(1), tokens(1), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=r"takes a stack \[layers, blocks, ...\]; got k.shape=\(4, 2, 1, 8\)"):
        write_kv(CacheLayer(KVCache.create(**SMALL), 0), tokens(1), tokens(1), jnp.zeros(1, jnp.int32))


def test_a_cache_is_a_pytree_that_can_be_emptied_and_shaped():
    cache = KVCache.create(**SMALL)
    assert jax.tree.map(lambda x: None, cache) == KVCache(k=None, v=None)
    assert jax.eval_shape(lambda: KVCache.create(**SMALL)).k.shape == (4, 2, 1, 8)
    assert jaxpaged.KVCache is KVCache
