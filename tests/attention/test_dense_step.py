"""`dense_step`: the same outputs as from a cache, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged import (
    AttentionSettings,
    AttentionStep,
    BlockAllocator,
    KVCache,
    LatentSettings,
    dense_step,
    rotary_frequencies,
)
from jaxpaged.nnx import LatentAttention, PagedAttention
from tests import toy_model

LENGTHS, BLOCKS = (5, 0, 7), dict(num_blocks=20, block_size=4)
STARTS, TOKENS = np.cumsum([0, *LENGTHS]).astype(np.int32), sum(LENGTHS)


def both_steps():
    allocator = BlockAllocator.create(**BLOCKS, num_seqs=3, max_blocks_per_seq=4)
    allocator, _, _ = allocator.append(jnp.array(LENGTHS), q_len=max(LENGTHS))
    dense = dense_step(TOKENS, query_starts=jnp.asarray(STARTS))
    slots = allocator.slots(dense.seqs, dense.positions)
    return dense, AttentionStep.create(allocator, slots, query_starts=jnp.asarray(STARTS))


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), (TOKENS, *shape))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(sliding_window=3),
        dict(logits_soft_cap=2.0, sinks=jnp.ones(4)),
        dict(logits_soft_cap=1e30),
        dict(alibi_slopes=jnp.array([0.1, 0.2, 0.3, 0.4]), scale=0.3),
        dict(rotary_frequencies=rotary_frequencies(16)),
        dict(rotary_frequencies=rotary_frequencies(16), interleaved=True),
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_outputs_equal_a_cached_step(options):
    dense, paged = both_steps()
    assert (dense.positions == paged.positions).all()
    q, k, v = random(4, 16), random(2, 16, seed=1), random(2, 16, seed=2)
    cache = KVCache.create(**BLOCKS, num_kv_heads=2, head_dim=16, dtype="float32")
    expected = paged.attend(q, k, v, cache, **options)[1]
    unchanged, out = dense.attend(q, k, v, None, **options)
    assert unchanged is None
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_array_equal(dense.group(1).attend(q[None], k[None], v[None], None, **options)[1], out[None])


def test_modules_accept_it():
    dense, paged = both_steps()
    settings = AttentionSettings(num_heads=4, num_kv_heads=2, head_dim=8, rotary_frequencies=rotary_frequencies(8))
    module, x = PagedAttention(16, settings, rngs=nnx.Rngs(0)), random(16)
    cache = KVCache.create(**BLOCKS, num_kv_heads=2, head_dim=8, dtype="float32")
    np.testing.assert_allclose(module(x, None, dense)[1], module(x, cache, paged)[1], atol=1e-5)


@pytest.mark.parametrize("expanded_from", [1, 512])
def test_latent_modules_accept_it(expanded_from):
    dense, paged = both_steps()
    sizes = dict(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=None)
    settings = LatentSettings(**sizes, rotary_frequencies=rotary_frequencies(4), expanded_from=expanded_from)
    module, x = LatentAttention(16, settings, rngs=nnx.Rngs(0)), random(16)
    sizes = dict(is_latent=True, num_kv_heads=1, head_dim=36, value_dim=32, dtype="float32")
    cache = KVCache.create(**BLOCKS, **sizes)
    np.testing.assert_allclose(module(x, cache, dense)[1], module(x, cache, paged)[1], atol=1e-5)
    with pytest.raises(ValueError, match="a latent layer needs a cache"):
        module(x, None, dense)


def test_a_learner_runs_the_apply_of_an_engine():
    weights, tokens = toy_model.random_weights(), jnp.array([3, 1, 4, 1, 5, 9], jnp.int32)
    step = dense_step(len(tokens))

    def compute_logits(weights):
        _, hidden = toy_model.apply(weights, tokens, step.positions, None, step)
        return toy_model.head(weights, hidden)

    def loss(weights):
        logprobs = jax.nn.log_softmax(compute_logits(weights))
        return -jnp.take_along_axis(logprobs[:-1], tokens[1:, None], axis=1).mean()

    expected = toy_model.logits_after(weights, np.asarray(tokens), len(tokens))
    np.testing.assert_allclose(compute_logits(weights)[-1], expected, atol=1e-4)
    grads = jax.grad(loss)(weights)
    direction = jax.tree.map(lambda g: g / sum((x**2).sum() for x in jax.tree.leaves(grads)) ** 0.5, grads)
    more, less = (
        loss(jax.tree.map(lambda w, d, step=step: w + step * d, weights, direction)) for step in (1e-2, -1e-2)
    )
    slope = sum((g * d).sum() for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose((more - less) / 2e-2, slope, rtol=1e-2)


def test_invalid_arguments_are_refused():
    q = random(4, 16)
    with pytest.raises(ValueError, match=r"q must have the 3 tokens of the step; got \[12, 4, 16\]"):
        dense_step(3).attend(q, q, q, None)
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        dense_step(0)
    with pytest.raises(ValueError, match=r"query_starts must be int32 \[seqs \+ 1\]"):
        dense_step(3, query_starts=jnp.int32(3))
    with pytest.raises(ValueError, match=r"adapters must be int32 \[3\]"):
        dense_step(3, adapters=jnp.zeros(2, jnp.int32))
