"""The two ways of examples/lib/experts.py against a loop over tokens, and JAX's kernel for grouped products."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

import tests.kernels.interpret  # noqa: F401 (makes interpret mode faster)
from lib import experts
from lib.experts import ExpertWeights, Tiles, all_experts, compute_experts, grouped_experts, grouped_product
from lib.llama_config import Clipped
from lib.mlp import clipped_gated, gated
from tests.kernels.lowering import mosaic_for

EXPERTS, FEATURES, HIDDEN = 6, 16, 24
ACTIVATIONS = {"plain": gated, "clipped": functools.partial(clipped_gated, clipped=Clipped(alpha=1.7, limit=1.0))}


def random(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def make_weights(form, num_experts=EXPERTS, features=FEATURES, hidden=HIDDEN):
    weights = random(1, num_experts, 2 * hidden, features, scale=0.3), random(2, num_experts, hidden, features)
    if form == "plain":
        return ExpertWeights(*weights)
    return ExpertWeights(*weights, random(3, num_experts, 2 * hidden), random(4, num_experts, features))


def choose(tokens, k, among):
    """k different experts for each token, as a router returns them: in any order."""
    rng = np.random.default_rng(5)
    return jnp.asarray([rng.permutation(among)[:k] for _ in range(tokens)], jnp.int32)


CHOICES = {
    "random": choose(40, 2, EXPERTS),
    "pairs that are no multiple of 8": choose(7, 3, EXPERTS),
    "one token": choose(1, 2, EXPERTS),
    "most experts without a token": choose(20, 2, [1, 4]),
    "all experts": choose(9, EXPERTS, EXPERTS),
}


def expected(x, chosen, shares, weights, activate):
    """In float64, but for the activation."""
    gate_up, down, *biases = (None if each is None else np.asarray(each, np.float64) for each in weights)
    gate_up_bias, down_bias = (np.zeros((len(down), 1)) if bias is None else bias for bias in biases)
    out = np.zeros(x.shape)
    for t, of_token in enumerate(np.asarray(chosen)):
        for e, share in zip(of_token, np.asarray(shares, np.float64)[t], strict=True):
            hidden = activate(jnp.asarray(gate_up[e] @ np.asarray(x[t], np.float64) + gate_up_bias[e], jnp.float32))
            out[t] += share * (np.asarray(hidden, np.float64) @ down[e] + down_bias[e])
    return out


@pytest.mark.parametrize("form", ACTIVATIONS)
@pytest.mark.parametrize("name", CHOICES)
def test_both_ways_equal_a_loop(name, form):
    chosen, weights, activate = CHOICES[name], make_weights(form), ACTIVATIONS[form]
    x, shares = random(6, len(chosen), FEATURES), jnp.abs(random(7, *chosen.shape))
    right = expected(x, chosen, shares, weights, activate)
    for compute in (all_experts, functools.partial(grouped_experts, tiles=None)):
        compute = jax.jit(functools.partial(compute, activate=activate))
        np.testing.assert_allclose(compute(x, chosen, shares, weights), right, atol=1e-4)
        wrong = compute(x, chosen, jnp.roll(shares, 1, axis=1), weights)
        assert not np.isclose(wrong, right, atol=0.01).all(axis=1).any()


def test_a_token_that_is_not_finite_changes_no_other():
    chosen, weights = CHOICES["random"], make_weights("clipped")
    x, shares = random(6, len(chosen), FEATURES), jnp.abs(random(7, *chosen.shape))
    spoilt = x.at[3].set(jnp.nan)
    how = dict(activate=ACTIVATIONS["clipped"])
    for compute in (all_experts, functools.partial(grouped_experts, tiles=None)):
        plain, found = (
            jax.jit(functools.partial(compute, **how))(each, chosen, shares, weights) for each in (x, spoilt)
        )
        assert np.isnan(found[3]).all()
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(plain, 3, 0))


INTERPRETED = functools.partial(
    plgpu.kernel,  # as on a GPU, reads past the end of an array give zeros
    interpret=plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero"),
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64, 0), (0, 0, 128), (1, 0, 135), (70, 7, 59), (5, 3, 100)])
def test_the_kernel_with_empty_groups_and_partial_tiles(sizes, transposed):
    """96 outputs are a tile and a half. Of 136 rows, the last 28 may be in no group."""
    rows, weights = random(8, 136, 64), random(9, 3, 64, 96)
    rows, weights = (each.astype(jnp.bfloat16) for each in (rows, weights))
    tiles = Tiles(block_m=64, block_n=64, max_concurrent_steps=2, grid_block_n=2)
    with mock.patch.object(ragged_dot_mgpu.plgpu, "kernel", INTERPRETED):
        given = weights.swapaxes(1, 2) if transposed else weights
        out = grouped_product(rows, given, jnp.asarray(sizes, jnp.int32), transposed=transposed, tiles=tiles)
    wide = np.asarray(rows, np.float32), np.asarray(weights, np.float32)
    groups = np.repeat(np.arange(3), sizes)
    right = np.einsum("ri,rio->ro", wide[0][: len(groups)], wide[1][groups])
    np.testing.assert_allclose(np.asarray(out, np.float32)[: len(groups)], right, atol=0.2)
    assert not np.allclose(np.roll(right, 1, axis=0), right, atol=5)


def test_the_kernel_on_99_pairs():
    chosen = choose(33, 3, 5)
    weights = make_weights("clipped", 5, 64, 64)
    x, shares = random(6, 33, 64), jnp.abs(random(7, 33, 3)) / 3
    x, shares, weights = jax.tree.map(lambda each: each.astype(jnp.bfloat16), (x, shares, weights))
    with mock.patch.object(ragged_dot_mgpu.plgpu, "kernel", INTERPRETED):
        tiles = Tiles(block_m=64, block_n=64)
        out = grouped_experts(x, chosen, shares, weights, ACTIVATIONS["clipped"], tiles=tiles)
    x, shares, weights = jax.tree.map(lambda each: each.astype(jnp.float32), (x, shares, weights))
    right = all_experts(x, chosen, shares, weights, ACTIVATIONS["clipped"])
    errors = np.abs(np.asarray(out, np.float32) - right).max(axis=1) / np.abs(right).max(axis=1)
    assert errors.max() < 0.02
    others = np.abs(np.roll(right, 1, axis=0) - right).max(axis=1) / np.abs(right).max(axis=1)
    assert others.min() > 0.1


def test_gradients_of_a_batch_in_groups():
    """The kernel has no rule for either, so the batch is computed one by one, and XLA computes the gradients."""
    batch, tokens = 2, 8
    weights = make_weights("plain", 4, 64, 64)
    x, chosen = random(6, batch, tokens, 64), jnp.stack([choose(tokens, 3, 4)] * batch)
    shares = jnp.abs(random(7, batch, tokens, 3))
    tiles = Tiles(block_m=64, block_n=64)

    def loss(compute, weights, x, shares):
        return jnp.square(jax.vmap(compute, (0, 0, 0, None))(x, chosen, shares, weights)).mean()

    def gradients(compute):
        with_activation = functools.partial(compute, activate=ACTIVATIONS["plain"])
        return jax.grad(functools.partial(loss, with_activation), (0, 1, 2))(weights, x, shares)

    def ragged_dot(rows, weights, *, group_sizes, transpose_rhs, **tiles):
        assert rows.ndim == 2
        return grouped_product(rows, weights, group_sizes, transposed=transpose_rhs, tiles=None)

    with mock.patch.object(ragged_dot_mgpu, "ragged_dot", ragged_dot):
        found = gradients(functools.partial(grouped_experts, tiles=tiles))
    for ours, right in zip(jax.tree.leaves(found), jax.tree.leaves(gradients(all_experts)), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)
        assert np.abs(right).max() > 1e-3


def uses_groups(tokens, *, dtype=jnp.bfloat16, hidden=64, **how):
    weights = ExpertWeights(jnp.zeros((4, 2 * hidden, 64), dtype), jnp.zeros((4, hidden, 64), dtype))
    arrays = jnp.zeros((tokens, 64), dtype), jnp.zeros((tokens, 2), jnp.int32), jnp.zeros((tokens, 2), dtype)
    compute = functools.partial(compute_experts, weights=weights, activate=gated, **how)
    return "sort" in str(jax.make_jaxpr(compute)(*arrays))


def test_the_number_of_tokens_decides():
    assert not uses_groups(4096)  # not on a CPU
    assert uses_groups(1, grouped_above=0)
    assert uses_groups(10, grouped_above=9)
    assert not uses_groups(9, grouped_above=9)
    with mock.patch.object(experts, "is_hopper", return_value=True):
        assert not uses_groups(experts.GROUPED_ABOVE)
        assert uses_groups(experts.GROUPED_ABOVE + 1)
        assert not uses_groups(4096, grouped_above=4096)
        assert not uses_groups(4096, dtype=jnp.float32)
        assert not uses_groups(4096, hidden=96)


SHAPES = {  # experts, per token, features, hidden features
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
}


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("model", SHAPES)
def test_the_kernel_lowers_for_a_hopper_gpu(model, tokens):
    num_experts, k, features, hidden = SHAPES[model]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    down = shape((num_experts, hidden, features))
    weights = ExpertWeights(shape((num_experts, 2 * hidden, features)), down)
    chosen = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    with mock.patch.object(experts, "is_hopper", return_value=True), mosaic_for(9.0):
        traced = jax.jit(functools.partial(compute_experts, activate=gated)).trace
        text = traced(shape((tokens, features)), chosen, shape((tokens, k)), weights).lower(
            lowering_platforms=("cuda",)
        )
    assert text.as_text().count("mosaic_gpu_v2") == 2
