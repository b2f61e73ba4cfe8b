"""What stands in for XLA in interpret mode gives the same numbers, and finds races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.evaluate import OPERATIONS, evaluate
from tests.kernels.interpret import races_found


def every_operation(x, y, i, j):
    """x f32 [4, 6], y bf16 [6, 4], i and j int32 [4]."""
    wide = y.astype(jnp.float32).T
    numbers = [x + wide, x - wide, x * wide, x / wide, lax.max(x, wide), lax.min(x, wide), jnp.abs(x), -x]
    numbers += [jnp.exp(x), jnp.exp2(x), jnp.log(x), jnp.tanh(x), jnp.sign(x), lax.clamp(-1.0, x, 1.0), y * y]
    numbers += [x.max(axis=1), x.sum(axis=0), x.reshape(3, 8), x[1:4:2, ::3], x[:1].squeeze(0)]
    numbers += [lax.dot(x, y.astype(jnp.float32)), lax.dot(y, y.T, preferred_element_type=jnp.float32)]
    numbers += [lax.select_n(i > 0, i, j), lax.select_n(i % 3, i, j, i + j), lax.dynamic_slice(x, (i[0], 9), (2, 3))]
    integers = [i + j, i * j, lax.div(i, j), lax.rem(i, j), i & j, i | j, i ^ j, ~i, lax.clamp(-2, i, 2)]
    bools = [i < j, i <= j, i > j, i >= j, i == j, i != j, ~(i < j)]
    numbers += [jnp.concatenate([i, j]), jnp.stack([i, j]), lax.iota(jnp.int32, 4) + i, i[:, None] + j[None]]
    numbers += [lax.bitcast_convert_type(x, jnp.int32), x.astype(jnp.int32), x.astype(jnp.bfloat16), i[j % 4]]
    numbers += lax.cond(i[0] > 0, lambda i: [i], lambda i: [-i], i)
    numbers += [lax.while_loop(lambda c: c.sum() < 40, lambda c: c + jnp.abs(i), j)]
    numbers += [lax.fori_loop(0, 3, lambda n, c: c * i + n, j), lax.scan(lambda c, n: (c + n, c * n), i[0], j)[1]]
    numbers += [io_callback(lambda one, all_of_j: all_of_j + np.int32(one), jax.typeof(j), i[1], j)]
    return numbers + integers + bools


def test_numpy_gives_the_numbers_of_xla():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 6)).astype(np.float32), jnp.asarray(rng.normal(size=(6, 4)), jnp.bfloat16)
    args = x, np.asarray(y), np.int32([-7, 7, 5, 1]), np.int32([2, -2, -3, 4])
    jaxpr = jax.make_jaxpr(every_operation)(*args)
    names = {equation.primitive.name for equation in jaxpr.eqns}
    names |= {inner.primitive.name for e in jaxpr.eqns if e.primitive.name == "jit" for inner in e.params["jaxpr"].eqns}
    assert set(OPERATIONS) <= names
    results = evaluate(jaxpr.jaxpr, jaxpr.consts, *args)
    for i, (expected, found) in enumerate(zip(jax.jit(every_operation)(*args), results, strict=True)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), i
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2e-6)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_race_is_found(is_ordered):
    """One warpgroup writes a scratch that the other reads; with a barrier between them it is no race."""

    def kernel(out, scratch, barrier):
        is_first = lax.axis_index("warpgroup") == 0

        @pl.when(is_first)
        def _():
            scratch[...] = jnp.ones((8, 128), jnp.float32)
            if is_ordered:
                plgpu.barrier_arrive(barrier)

        @pl.when(jnp.logical_not(is_first))
        def _():
            if is_ordered:
                plgpu.barrier_wait(barrier)
            out[...] = scratch[...]

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((8, 128), jnp.float32), plgpu.Barrier()],
        num_threads=2,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    if is_ordered:
        assert (np.asarray(run()) == 1).all()
        assert not races_found()
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
            jax.block_until_ready(run())
