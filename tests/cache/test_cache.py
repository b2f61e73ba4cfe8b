"""Creating caches, writing tokens, layers of a stack, and the refusals of these calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import CacheLayer, KVCache
from jaxpaged.ops import write_kv

SMALL = dict(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="float32")
PADDING = (-1, -2, 8, 9, 2**31 - 1, -(2**31))


def create(**changes) -> KVCache:
    return KVCache.create(**SMALL | changes)


def tokens(*values: float) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.float32)[:, None, None], (len(values), 1, 8))


def shown(pool: jax.Array) -> list[float]:
    assert (pool == pool[..., :1]).all()
    return pool[..., 0, 0].ravel().tolist()


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([7, 2, 3], [0, 0, 2, 3, 0, 0, 0, 1]),
        *(([padding, 5, padding], [0, 0, 0, 0, 0, 2, 0, 0]) for padding in PADDING),
        *(([slot], [int(slot == i) for i in range(8)]) for slot in (-1, 0, 5, 7, 8)),
    ],
    ids=str,
)
def test_writes_change_their_slots_and_nothing_else(slots, expected):
    k = tokens(1, 2, 3)[: len(slots)]
    cache = write_kv(create(), k, -k, jnp.asarray(slots, jnp.int32))
    assert shown(cache.k) == expected
    assert shown(-cache.v) == expected


def test_the_default_is_the_dtype_of_the_kernels():
    cache = KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_no_token(dtype):
    nothing = jnp.zeros((0, 1, 8))
    cache = write_kv(create(dtype=dtype), nothing, nothing, jnp.zeros(0, jnp.int32))
    assert not np.asarray(cache.k, np.float32).any()


def test_tokens_may_have_more_axes_and_are_cast_to_the_cache():
    k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1, 8)), jnp.float32)
    cache = write_kv(create(dtype="bfloat16"), k, k, jnp.asarray([[2, 3, 4], [5, 6, 7]], jnp.int32))
    assert cache.k.dtype == jnp.bfloat16
    assert (cache.k.reshape(8, 1, 8)[2:] == k.reshape(6, 1, 8).astype(jnp.bfloat16)).all()


FLOAT8 = dict(dtype="float8_e5m2", scale_per="head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_blocks=0), r"num_blocks must be at least 1; got num_blocks=0"),
        (dict(num_blocks=4.0), r"num_blocks must be an int; got num_blocks=4.0"),
        (dict(block_size=-1), r"block_size must be at least 1; got block_size=-1"),
        (dict(num_layers=0), r"num_layers must be at least 1; got num_layers=0"),
        (dict(num_layers="2"), r"num_layers must be an int; got num_layers='2'"),
        (dict(dtype=jnp.int32), r"dtype must be one of float32, .*, int8; got dtype=int32"),
        (dict(dtype=None), r"dtype must be one of float32, .*; got dtype=None"),
        (dict(is_latent=True), r"needs value_dim, .*; got value_dim=None with head_dim=8. Pass value_dim="),
        (dict(is_latent=True, value_dim=9), "value_dim=9, head_dim=8"),
        (FLOAT8 | dict(is_latent=True, value_dim=8, v_scale=1.0), "leave v_scale out"),
        (dict(scale_per="token_head"), r"a float32 cache is not quantised: leave scale_per out"),
        (dict(k_scale=1.0), r"a float32 cache is not quantised: leave k_scale out"),
        (dict(dtype="int8", scale_per="block"), r'scale_per must be "tensor", "head", .* got scale_per=\'block\''),
        (dict(dtype="int8", scale_per="head"), r"an int8 cache with scale_per='head' needs k_scale"),
        (dict(dtype="int8", k_scale=1.0), r'k_scale needs scale_per="tensor" or "head"'),
        (FLOAT8 | dict(v_scale=jnp.ones(3)), r"v_scale .* must be \[1\]; got \[3\]"),
        (FLOAT8 | dict(scale_per="tensor", k_scale=jnp.ones(3)), r"k_scale .* must be \[\]; got \[3\]"),
        (FLOAT8 | dict(num_layers=3, k_scale=jnp.ones((2, 2))), r"k_scale .* must be \[3, 1\]; got \[2, 2\]"),
        (FLOAT8 | dict(k_scale=jnp.ones(1, jnp.int32)), r"must be float32; got int32"),
    ],
)
def test_create_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        create(**changes)


CACHE, TOKENS = create(), tokens(1, 2, 3)
INT8, TWO_HEADS = create(dtype="int8", num_kv_heads=2), dict(k=jnp.ones((3, 2, 8)), v=jnp.ones((3, 2, 8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(slots=[2, 3]), r"got k.shape=\(3, 1, 8\), slots.shape=\(2,\)"),
        (dict(slots=jnp.zeros(3)), r"slots must be int32; got slots.dtype=float32"),
        (TWO_HEADS, r"slots \[\.\.\.\] and the cache's \[1, 8\]"),
        (dict(v=TOKENS[..., :6]), r"v must be .* cache's \[1, 8\]; got v.shape=\(3, 1, 6\)"),
        (dict(v=TOKENS.astype(jnp.complex64)), r"v must be floating point; got v.dtype=complex64"),
        (dict(v=TOKENS.astype(jnp.int8)), r"v must be floating point; got v.dtype=int8"),
        (dict(v=None), "v must be None for a latent cache and an array for any other"),
        (
            dict(cache=create(is_latent=True, value_dim=6)),
            "v must be None for a latent cache and an array for any other",
        ),
        (dict(cache=KVCache(CACHE.k, None), v=None), "value_dim at most the width"),
        (dict(cache=create(num_layers=2)), r"got cache.k.shape=\(2, .*CacheLayer"),
        (dict(cache=CacheLayer(CACHE, 0)), r"needs a stack \[layers, blocks, ...\]; got k.shape=\(4, 2, 1, 8\)"),
        *(
            (dict(cache=cache), r"must be a KVCache, .*; got a tuple\. Index a tuple, .* create the Engine")
            for cache in ((CACHE, CACHE), CacheLayer((CACHE, CACHE), 0))
        ),
        (
            TWO_HEADS | dict(cache=dataclasses.replace(INT8, k_scale=None)),
            r"a cache must have scales if it is quantised, .* got k.dtype=int8 and k_scale missing",
        ),
        *(
            (TWO_HEADS | dict(cache=dataclasses.replace(INT8, k_scale=jnp.ones(shape))), "k_scale must be")
            for shape in [3, (3, 2), (2, 4), (4, 2, 1), (2, 2, 2)]
        ),
    ],
)
def test_write_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        write_kv(**dict(cache=CACHE, k=TOKENS, v=TOKENS, slots=[2, 3, 4]) | changes)


def test_slots_of_a_layer_shift_tokens_and_keep_padding():
    slots = jnp.asarray([0, 7, 8, -1, 2**31 - 1], jnp.int32)
    stack = create(num_layers=3)
    assert CacheLayer(stack, 2).slots(slots).tolist() == [16, 23, -1, -1, -1]
    written = write_kv(CacheLayer(stack, 1), tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 5), slots)
    assert shown(written.stack.k) == [0] * 8 + [1] + [0] * 6 + [2] + [0] * 8


def test_a_cache_is_a_pytree_that_can_be_emptied_and_shaped():
    assert jax.tree.map(lambda x: None, create()) == KVCache(k=None, v=None)
    assert jax.eval_shape(create).k.shape == (4, 2, 1, 8)
