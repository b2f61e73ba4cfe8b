"""Latent attention as a module, against attention with expanded keys and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged
import jaxpaged.nnx
from jaxpaged import AttentionStep, BlockAllocator, KVCache, LatentSettings
from jaxpaged._cache.rotate import rotate
from tests.cases import Case, oracle

SETTINGS = LatentSettings(
    num_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    q_lora_rank=10,
    rotary_frequencies=(1.0, 0.3),
    rotary_factor=1.2,
    scale=0.4,
)
BLOCKS = dict(num_blocks=8, block_size=4)
FEATURES = 12


def make(**changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return jaxpaged.nnx.LatentAttention(FEATURES, settings, rngs=nnx.Rngs(0))


def inputs(seqs=1):
    return jax.random.normal(jax.random.key(1), (seqs, 7, FEATURES))


def new_cache(dtype="float32", *, width=20):
    return KVCache.create(**BLOCKS, is_latent=True, num_kv_heads=1, head_dim=width, value_dim=16, dtype=dtype)


def new_allocator(**options):
    return BlockAllocator.create(**BLOCKS, **dict(num_seqs=1, max_blocks_per_seq=4) | options)


def append(allocator, *num_tokens):
    """The step for these numbers of new tokens."""
    allocator, slots, _ = allocator.append(jnp.asarray(num_tokens), q_len=max(num_tokens))
    return AttentionStep.create(allocator, slots)


@functools.partial(jax.jit, static_argnums=0)
def jitted(graph, weights, *args, **options):
    return nnx.merge(graph, weights)(*args, **options)


def call(module, *args, **options):
    """The module's call in one program; eager operations would compile dozens."""
    return jitted(*nnx.split(module), *args, **options)


def expanded(module, x):
    """Ordinary attention on keys and values of each head, by the equations of the paper."""
    s, (q, k, v) = module.settings, projected(*nnx.split(module), x)
    options = dict(scale=12**-0.5 if s.scale is None else s.scale)
    if s.sliding_window is not None:
        options["sliding_window"] = s.sliding_window
    out, _ = oracle(Case(q, k, v, np.zeros((1, 1), np.int32), np.asarray([x.shape[1]]), options))
    return module.o_proj(jnp.asarray(out.reshape(1, x.shape[1], -1)))


@functools.partial(jax.jit, static_argnums=0)
def projected(graph, weights, x):
    """Queries, keys and values of each head."""
    module = nnx.merge(graph, weights)
    s, tokens = module.settings, x.shape[1]
    q = module.q_proj(x) if s.q_lora_rank is None else module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
    q = q.reshape(1, tokens, s.num_heads, -1)
    down = module.kv_a_proj_with_mqa(x)
    latent, key = module.kv_a_layernorm(down[..., : s.kv_lora_rank]), down[..., None, s.kv_lora_rank :]
    keys, v = (up(latent).reshape(1, tokens, s.num_heads, -1) for up in (module.k_b_proj, module.v_b_proj))
    angles = jnp.outer(jnp.arange(tokens, dtype=jnp.float32), jnp.asarray(s.rotary_frequencies))[None, :, None]
    cos, sin = (s.rotary_factor * f(angles) for f in (jnp.cos, jnp.sin))
    turn = lambda x: rotate(x, cos, sin, interleaved=s.interleaved, start=0)  # noqa: E731
    q = jnp.concatenate([q[..., : s.qk_nope_head_dim], turn(q[..., s.qk_nope_head_dim :])], axis=-1)
    return q, jnp.concatenate([keys, jnp.tile(turn(key), (1, 1, s.num_heads, 1))], axis=-1), v


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(q_lora_rank=None, interleaved=False, scale=None, use_bias=True),
    ],
)
def test_the_module_equals_expanded_heads(changes):
    module, x = make(**changes), inputs()
    _, out = call(module, x, new_cache(), append(new_allocator(), 7))
    np.testing.assert_allclose(out, expanded(module, x), atol=2e-5)


def test_single_and_packed_tokens_continue_a_prompt():
    module, x = make(), inputs()
    expected = expanded(module, x)
    step = append(new_allocator(), 5)
    packed = AttentionStep.create(step.allocator, step.slots[0], query_starts=jnp.asarray([0, 5]))
    cache, out = call(module, x[0, :5], new_cache(), packed)
    np.testing.assert_allclose(out, expected[0, :5], atol=2e-5)
    for i in (5, 6):
        step = append(step.allocator, 1)
        cache, out = call(module, x[:, i : i + 1], cache, step)
        np.testing.assert_allclose(out[:, 0], expected[:, i], atol=2e-5)


@pytest.mark.parametrize("changes", [dict(), dict(v_head_dim=16, rotary_factor=1.0)])
def test_prompts_with_expanded_heads(changes):
    """Fresh, and after a history; uniform and packed, with single tokens and padding in the same call."""
    module, x = make(expanded_from=2, **changes), inputs(seqs=2)
    expected = jnp.concatenate([expanded(module, x[:1]), expanded(module, x[1:])])
    step = append(new_allocator(num_seqs=2, max_blocks_per_seq=3), 4, 2)
    # The second sequence has two tokens, at the end of its row.
    rows = jnp.stack([x[0, :4], jnp.roll(x[1, :4], 2, axis=0)])
    cache, out = call(module, rows, new_cache(), step)
    np.testing.assert_allclose(out[0], expected[0, :4], atol=2e-5)
    np.testing.assert_allclose(out[1, 2:], expected[1, :2], atol=2e-5)

    step = append(step.allocator, 1, 5)
    packed = jnp.concatenate([x[0, 4:5], x[1, 2:], jnp.full((3, FEATURES), jnp.nan)])
    slots = jnp.concatenate([step.slots[0, -1:], step.slots[1], jnp.full(3, -1)])
    step = AttentionStep.create(step.allocator, slots, query_starts=jnp.asarray([0, 1, 6]))
    cache, out = call(module, packed, cache, step)
    np.testing.assert_allclose(out[0], expected[0, 4], atol=2e-5)
    np.testing.assert_allclose(out[1:6], expected[1, 2:], atol=2e-5)


def test_a_window_holds_for_any_number_of_new_tokens():
    module, x = make(expanded_from=2, sliding_window=3), inputs()
    _, out = call(module, x, new_cache(), append(new_allocator(), 7))
    np.testing.assert_allclose(out, expanded(module, x), atol=2e-5)


@pytest.mark.parametrize("expanded_from", [7, 8])
def test_which_prompts_expand_their_heads(expanded_from):
    """New tokens see each other with more than eight bits."""
    module, x = make(expanded_from=expanded_from), inputs()
    _, out = call(module, x, new_cache("int8"), append(new_allocator(), 7))
    error = np.abs(out - expanded(module, x)).max()
    assert (error < 2e-5) == (expanded_from == 7), error
    assert error < 0.1


@pytest.mark.parametrize("changes", [dict(), dict(expanded_from=2)])
def test_a_cache_with_rotary_numbers_in_two_parts(changes):
    """The width of the cache selects the form. Absorbed queries fit it, also with a history."""
    module, x = make(**changes), inputs()
    weights = module.kv_a_proj_with_mqa.kernel
    weights[...] = weights[...] * jnp.asarray([1.0] * 16 + [4.0] * 4)[None]  # gives the rotary part most weight
    expected = expanded(module, x)[:, 5:]

    def error(width):
        step = append(new_allocator(), 5)
        cache, _ = call(module, x[:, :5], new_cache("int8", width=width), step)
        return np.abs(call(module, x[:, 5:], cache, append(step.allocator, 2))[1] - expected).max()

    assert error(24) < error(20) / 2


def test_settings_store_frequencies_as_a_tuple():
    assert len({SETTINGS, dataclasses.replace(SETTINGS, rotary_frequencies=list(SETTINGS.rotary_frequencies))}) == 1


def test_errors():
    step, x = append(new_allocator(), 5), jnp.ones((1, 5, FEATURES))
    with pytest.raises(ValueError, match="must be a latent one of 20 numbers and values of 16"):
        make()(x, KVCache.create(**BLOCKS, num_kv_heads=1, head_dim=20), step)
    in_window = AttentionStep.create(new_allocator(windows=(4,)), step.slots)
    for expanded_from in (1, 10):
        with pytest.raises(ValueError, match=r"the layer's group has a window of 4 tokens.* got None"):
            make(expanded_from=expanded_from)(x, new_cache(), in_window)
    with pytest.raises(ValueError, match="1 to 2 numbers, one for each pair of the 4 dimensions; got 3"):
        dataclasses.replace(SETTINGS, rotary_frequencies=(1.0, 1.0, 1.0))
