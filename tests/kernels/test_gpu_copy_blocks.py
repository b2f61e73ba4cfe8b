"""`copy_blocks` on a GPU, at real sizes, against numpy: `pytest -m gpu`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache
from jaxpaged._cache import copy_blocks as copying
from jaxpaged.ops import copy_blocks
from tests.compiled import instructions
from tests.transfers import EVERY_CACHE, block_leaves, by_numpy, ids, random_pairs

pytestmark = pytest.mark.gpu


def random_cache(dtype, scale=None, *, num_layers=None, num_blocks=300, block=(16, 8, 128)) -> KVCache:
    """Every byte is random, also where that makes a NaN: of those no bit may change either."""
    given = dict(k_scale=0.5, v_scale=0.25) if scale in ("tensor", "head") else {}
    block_size, num_kv_heads, head_dim = block
    empty = KVCache.create(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        num_layers=num_layers,
        scale_per=scale,
        **given,
    )
    rng = np.random.default_rng(0)

    def fill(leaf):
        if leaf.ndim < empty.k.ndim - 1:
            return leaf
        numbers = rng.integers(0, 256, leaf.nbytes, np.uint8).view(leaf.dtype).reshape(leaf.shape)
        return jnp.asarray(numbers)

    return jax.tree.map(fill, empty)


def check(cache: KVCache, source_ids: jax.Array, destination_ids: jax.Array) -> None:
    before = block_leaves(cache)
    jitted = jax.jit(copy_blocks, donate_argnums=0)
    text = jitted.lower(cache, source_ids, destination_ids).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    after = block_leaves(jitted(cache, source_ids, destination_ids))
    for old, new in zip(before, after, strict=True):
        assert (new == by_numpy(old, source_ids, destination_ids)).all()


PAIRS = {
    "all direct": (jnp.arange(1, 101, dtype=jnp.int32), jnp.arange(101, 201, dtype=jnp.int32)),
    "one pair among padding": (ids(*[0] * 70, 7, *[0] * 200), ids(*[0] * 70, 9, *[0] * 200)),
    "nothing but padding": (ids(0, -1, 5, 400), ids(3, 4, 0, 6)),
    "a cycle of all blocks": (jnp.arange(1, 300, dtype=jnp.int32), jnp.roll(jnp.arange(1, 300, dtype=jnp.int32), 1)),
    "chains, cycles, duplicates": random_pairs(0, 250, 300),
    "few of those, many direct": random_pairs(1, 60, 300),
    "one destination": (jnp.arange(1, 200, dtype=jnp.int32), jnp.full(199, 250, jnp.int32)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("num_layers", [None, 3])
def test_pairs(name, num_layers):
    padded = (jnp.pad(some, (0, 300 - some.size)) for some in PAIRS[name])  # compiled once for all
    check(random_cache(jnp.bfloat16, num_layers=num_layers), *padded)


@EVERY_CACHE
def test_every_cache(dtype, scale):
    check(random_cache(dtype, scale, num_layers=2), *random_pairs(2, 120, 300))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
@pytest.mark.parametrize("block", [(2, 1, 8), (16, 1, 72), (16, 5, 80), (32, 2, 120), (256, 8, 256)])
def test_blocks(block, dtype):
    """Rows of 16, 192, 256 and 240 numbers, tiles of 1 to 32 of them."""
    check(random_cache(dtype, block=block, num_blocks=40), *random_pairs(3, 30, 40))


def test_many_pairs_of_a_stack_again_and_again():
    """Each call's blocks are the next one's sources: what was not yet there when a call returned would be seen."""
    cache = random_cache(jnp.bfloat16, num_layers=8, num_blocks=1040)
    expected = block_leaves(cache)
    jitted = jax.jit(copy_blocks, donate_argnums=0)
    for seed in range(8):
        pairs = random_pairs(seed, 512, 1040)
        cache = jitted(cache, *pairs)
        expected = [by_numpy(pool, *pairs) for pool in expected]
    for new, old in zip(block_leaves(cache), expected, strict=True):
        assert (new == old).all()


def test_a_pool_of_more_than_2_to_the_31_numbers():
    num_blocks = 2**31 // (16 * 8 * 128) + 100
    pool = jnp.zeros((num_blocks, 16, 8, 128), jnp.float8_e5m2).at[num_blocks - 3 :].set(1)
    cache = KVCache(pool, jnp.copy(pool), jnp.ones(()), jnp.ones(()))
    end = num_blocks
    copied = jax.jit(copy_blocks, donate_argnums=0)(cache, ids(end - 1, 1, end - 2), ids(7, end - 2, end - 50))
    sums = jax.jit(lambda pool: pool.astype(jnp.float32).mean(axis=(1, 2, 3)))(copied.v)
    assert np.flatnonzero(np.asarray(sums)).tolist() == [7, end - 50, end - 3, end - 1]


@pytest.mark.parametrize("num_layers", [None, 4])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_no_pool_is_copied(num_layers, by_kernel):
    """Neither by the kernel nor by XLA where it does it."""
    cache = random_cache(jnp.bfloat16, num_layers=num_layers, num_blocks=1040)
    function = copy_blocks if by_kernel else copying.copy_by_xla
    compiled = jax.jit(function, donate_argnums=0).lower(cache, ids(*range(1, 9)), ids(*range(11, 19))).compile()
    copies = [
        line for operation, size, line in instructions(compiled.as_text()) if operation[:4] == "copy" and size > 1e6
    ]
    assert copies == []
    assert compiled.memory_analysis().temp_size_in_bytes < cache.k.nbytes / 16
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * cache.k.nbytes
    assert bool(re.search("mosaic_gpu", compiled.as_text())) is by_kernel


@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_copy_is_noticed(monkeypatch, side):
    """The twin: direct pairs, or the others, left out."""
    plan = copying.plan

    def one_side(*arguments):
        pairs, counts = plan(*arguments)
        return pairs, counts.at[side].set(0)

    monkeypatch.setattr(copying, "plan", one_side)
    cache = random_cache(jnp.bfloat16, num_blocks=301 + side)  # a shape of its own: nothing compiled is found again
    with pytest.raises(AssertionError):
        check(cache, *PAIRS["few of those, many direct"])
