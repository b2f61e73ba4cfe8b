"""Compiled modules: no copy of a cache, nothing as large as the gathered cache, no host."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import AttentionStep, CacheLayer, paged_attention
from jaxpaged._attention import xla_tiles
from tests.compiled import CACHE_ELEMENTS, SEQS, cache_sized_copies, decode_step, inputs, instructions


def test_a_donated_decode_step_copies_no_cache():
    compiled = jax.jit(decode_step, donate_argnums=(0, 1)).lower(*inputs()).compile()
    assert cache_sized_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 4 * CACHE_ELEMENTS


def test_the_same_step_without_donation_does_copy():
    # The twin: the test above can detect a copy.
    compiled = jax.jit(decode_step).lower(*inputs()).compile()
    assert len(cache_sized_copies(compiled.as_text())) >= 2


def whole_loop(cache, allocator, q, k, v):
    def body(carry):
        i, cache, allocator, q = carry
        cache, allocator, out = decode_step(cache, allocator, q, k, v)
        return i + 1, cache, allocator.free(allocator.lengths >= 40), out

    return jax.lax.while_loop(lambda carry: carry[0] < 50, body, (0, cache, allocator, q))


def test_a_whole_loop_copies_no_cache_and_never_calls_the_host():
    text = jax.jit(whole_loop, donate_argnums=(0, 1)).lower(*inputs()).compile().as_text()
    assert cache_sized_copies(text) == []
    operations = {operation for operation, _, _ in instructions(text)}
    assert not operations & {"outfeed", "infeed", "send", "recv", "sort"}
    assert "callback" not in text


def test_a_scan_over_a_stack_copies_no_cache():
    def step(stack, allocator, q, k, v):
        allocator, slots, _ = allocator.append(jnp.ones(SEQS, jnp.int32))
        step = AttentionStep.create(allocator, slots)

        def layer(carry, i):
            stack, q = carry
            layer, out = step.attend(q, k, v, CacheLayer(stack, i))
            return (layer.stack, out), None

        (stack, out), _ = jax.lax.scan(layer, (stack, q), jnp.arange(3))
        return stack, allocator, out

    text = jax.jit(step, donate_argnums=(0, 1)).lower(*inputs(num_layers=3)).compile().as_text()
    assert cache_sized_copies(text) == []


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_attention_holds_tiles_not_the_gathered_cache(num_partitions):
    # 64 sequences of 8k tokens: gathered, K alone would be 64 * 8192 * 8 * 128 numbers, 1 GB in bfloat16.
    seqs, kv_heads, head_dim, block_size, max_blocks = 64, 8, 128, 16, 512
    shapes = (
        jax.ShapeDtypeStruct((seqs, 32, head_dim), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((seqs * max_blocks, block_size, kv_heads, head_dim), jnp.bfloat16)] * 2,
        jax.ShapeDtypeStruct((seqs, max_blocks), jnp.int32),
        jax.ShapeDtypeStruct((seqs,), jnp.int32),
    )
    function = jax.jit(lambda *arrays: paged_attention(*arrays, num_partitions=num_partitions))
    temporary = function.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    tile = num_partitions * seqs * xla_tiles.TILE * kv_heads * head_dim
    # Keys and values in bfloat16, gathered and in the layout of the product, and in float32 where XLA on a CPU widens.
    assert temporary < 2 * tile * (2 + 2 + 4) + 2**25
    assert temporary < 0.3 * num_partitions * 2**30
