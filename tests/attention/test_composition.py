"""paged_attention inside JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxpaged import BlockAllocator, CacheLayer, KVCache, paged_attention, paged_attention_reference
from jaxpaged.ops import write_kv
from tests.cases import OPTIONS, make_case, oracle

CASE = make_case(lengths=(0, 1, 40, 80), options=OPTIONS["all"])


def test_vmap_over_independent_pools():
    cases = [make_case(seed, lengths=(3, 50), max_blocks=4, options=OPTIONS["all"]) for seed in range(3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*(case.arrays for case in cases), strict=True)]
    out = jax.vmap(functools.partial(paged_attention, **cases[0].options))(*stacked)
    for case, its in zip(cases, out, strict=True):
        np.testing.assert_allclose(its, oracle(case)[0], atol=3e-6)


def test_scan_over_layers_of_a_stack_with_mixed_windows():
    cases = [make_case(seed, lengths=(3, 50), max_blocks=4) for seed in range(3)]
    stack = KVCache(k=jnp.stack([c.k_cache for c in cases]), v=jnp.stack([c.v_cache for c in cases]))
    windows = jnp.asarray([5, 1000, 17], jnp.int32)

    def layer(_, inputs):
        i, window, q, tables, lengths = inputs
        layer = CacheLayer(stack, i)
        pool, tables = layer.pool, layer.block_tables(tables)
        return None, paged_attention(q, pool.k, pool.v, tables, lengths, sliding_window=window)

    arrays = [jnp.stack([getattr(c, name) for c in cases]) for name in ("q", "block_tables", "lengths")]
    _, outs = jax.jit(lambda: jax.lax.scan(layer, None, (jnp.arange(3), windows, *arrays)))()
    for case, window, out in zip(cases, windows, outs, strict=True):
        np.testing.assert_allclose(out, oracle(case.replace(options={"sliding_window": window}))[0], atol=3e-6)


def test_while_loop():
    def body(carry):
        i, q = carry
        return i + 1, paged_attention(q, *CASE.arrays[1:])

    _, looped = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, CASE.q))
    q = CASE.q
    for _ in range(3):
        q = paged_attention(q, *CASE.arrays[1:])
    np.testing.assert_allclose(looped, q, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
@pytest.mark.parametrize("q_len", [None, 3, 50])  # 50: a prompt, longer than some of the sequences
def test_gradients_equal_the_reference(name, q_len):
    # Pools and scales hold NaN in every slot without a token, and so do rows of q before a sequence's start. None of
    # them may reach a gradient.
    scale_shape = "token_head" if name == "window" else None
    case = make_case(lengths=(0, 1, 40, 80), options=OPTIONS[name], q_len=q_len, scale_shape=scale_shape)
    if q_len is not None:
        starts = q_len - case.lengths
        is_padding = jnp.arange(q_len)[None, :, None, None] < starts[:, None, None, None]
        case = case.replace(q=jnp.where(is_padding, jnp.nan, case.q))
    floats = {k: jnp.float32(v) if np.ndim(v) == 0 else v for k, v in case.options.items() if k != "sliding_window"}
    window = {k: v for k, v in case.options.items() if k == "sliding_window"}

    def loss(function, q, k_cache, v_cache, options):
        out, lse = function(q, k_cache, v_cache, case.block_tables, case.lengths, **options, **window)
        return (jnp.sin(out) * out).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    ours = functools.partial(loss, functools.partial(paged_attention, return_lse=True, num_partitions=2))
    theirs = functools.partial(loss, functools.partial(paged_attention_reference, return_lse=True))
    arguments = case.q, case.k_cache, case.v_cache, floats
    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*arguments) for f in (ours, theirs))
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(leaf).all()
        np.testing.assert_allclose(leaf, other, atol=2e-4, rtol=2e-4)
    # Forward mode too: the derivative along ones is the sum of the gradient.
    tangent = jax.tree.map(jnp.ones_like, arguments)
    moved = jax.jit(lambda *primals: jax.jvp(ours, primals, tangent)[1])(*arguments)
    np.testing.assert_allclose(moved, sum(np.sum(leaf) for leaf in jax.tree.leaves(wanted)), rtol=1e-3)


def test_export_round_trip():
    function = jax.jit(functools.partial(paged_attention, sliding_window=20))
    restored = export.deserialize(export.export(function)(*CASE.arrays).serialize())
    assert (restored.call(*CASE.arrays) == function(*CASE.arrays)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_an_exported_decode_step_round_trips(dtype):
    def step(cache, allocator, x):
        allocator, slots, _ = allocator.append(jnp.ones(2, jnp.int32))
        cache = write_kv(cache, x[:, :2], x[:, 2:], slots)
        out = paged_attention(
            x,
            cache.k,
            cache.v,
            allocator.block_tables,
            allocator.lengths,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        return cache, allocator, out

    cache = KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=32, dtype=dtype)
    state = (
        cache,
        BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks_per_seq=3),
        jax.random.normal(jax.random.key(0), (2, 4, 32)),
    )
    restored = export.deserialize(export.export(jax.jit(step))(*state).serialize())
    theirs = ours = state
    for _ in range(3):
        theirs, ours = restored.call(*theirs), jax.jit(step)(*ours)
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    for left, right in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        assert (left == right).all()
    assert (ours[1].lengths == 3).all()
