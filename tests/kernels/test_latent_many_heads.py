"""The kernel for latents of many heads: in interpret mode at toy sizes, without races, and lowered for Hopper."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged._by_kernel import StaticHints
from jaxpaged.debug import explain
from tests.cases import OPTIONS, assert_lse, assert_within_budget, make_case
from tests.kernels.interpret import (
    H100,
    check_mistakes_of_latents,
    check_queries_of_a_history,
    choose,
    make_call,
    run_without_races,
)
from tests.kernels.lowering import mosaic_for, traced_latent

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
latent_case = functools.partial(
    make_case, kv_heads=1, heads=64, head_dim=192, value_dim=128, is_latent=True, dtype=BF16
)


def compute(call, num_partitions=1):
    choice = choose(call, H100, StaticHints(num_partitions=num_partitions))
    assert choice.kernel.name == "paged_latent"
    return run_without_races(choice, call)


def attend(case, **how):
    out, lse = compute(make_call(case), **how)
    return (out, lse) if case.q.ndim == 4 else (out[:, 0], lse[:, 0])


def check(case, **how):
    out, lse = attend(case, **how)
    assert_within_budget(case, out)
    assert_lse(case, lse)
    return np.asarray(out, np.float32)


def test_tiles():
    """None, one, and the last one of either warpgroup, whole or not; the same bits twice."""
    case = latent_case(lengths=(0, 1, 64, 65, 128, 200), max_blocks=13)
    assert (check(case) == check(case)).all()


@pytest.mark.parametrize("num_partitions", [2, 7])
def test_partitions(num_partitions):
    """More than there are tiles too: those write that they saw nothing."""
    check(latent_case(lengths=(0, 1, 250), max_blocks=28), num_partitions=num_partitions)


def test_query_tokens():
    """Each has its own end, and 128 heads two programs."""
    check(latent_case(lengths=(2, 66, 129), max_blocks=9, q_len=3, heads=128))


@pytest.mark.parametrize(("block_size", "max_blocks"), [(8, 17), (64, 3), (128, 2)])
def test_blocks(block_size, max_blocks):
    blocks = dict(block_size=block_size, max_blocks=max_blocks, dtype=jnp.float16)
    check(latent_case(lengths=(3, 130), **blocks, options=dict(scale=-0.3)))  # the highest logits: the lowest products


def test_logits_that_grow():
    """So that what a warpgroup has summed up is scaled when the other one finds a higher logit."""
    case = latent_case(lengths=(255,), max_blocks=16, options=dict(scale=1.0))
    grows = (jnp.arange(case.k_cache.shape[0] * 16) % 7).reshape(-1, 16, 1, 1).astype(BF16)
    check(case.replace(k_cache=case.k_cache * grows, v_cache=case.v_cache * grows))


def test_packed_tokens():
    """Each reads its sequence by itself; before and behind them is padding."""
    case = latent_case(lengths=(70, 3), q_len=3)
    rows = jnp.concatenate([case.q[:1, 0], case.q[0], case.q[1, 2:], case.q[:1, 0]])
    call = dataclasses.replace(make_call(case), q=rows, query_starts=jnp.asarray([1, 4, 5], jnp.int32))
    out, lse = compute(call)
    assert (out[jnp.asarray([0, 5])] == 0).all()
    assert (lse[jnp.asarray([0, 5])] == -jnp.inf).all()
    out, lse = (jnp.stack([x[1:4], jnp.broadcast_to(x[4], x[1:4].shape)]) for x in (out, lse))
    for i in range(3):
        token = case.replace(q=jnp.stack([case.q[0, i], case.q[1, 2]]), lengths=jnp.asarray([68 + i, 3], jnp.int32))
        assert_within_budget(token, out[:, i])
        assert_lse(token, lse[:, i])


def test_queries_of_a_history():
    """In runs whose tokens are heads."""
    check_queries_of_a_history(latent_case(lengths=(70, 3), q_len=5, heads=16), compute)


def test_mistakes_are_noticed():
    check_mistakes_of_latents(latent_case(lengths=(27, 100), max_blocks=7), attend)


@pytest.mark.parametrize(("block_size", "num_partitions"), [(64, 1), (16, 3)])
def test_lowers(block_size, num_partitions):
    trace = traced_latent(block_size=block_size, num_partitions=num_partitions)
    with mosaic_for(9.0):
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def kernel_of(gpu="H100", **case):
    case = latent_case(lengths=(3,), **case)
    return explain(*case.arrays, **case.options, gpu=gpu).kernel


def test_which_kernel():
    assert kernel_of() == kernel_of(heads=128, q_len=2) == "paged_latent"
    assert kernel_of(heads=96) == kernel_of(head_dim=256) == kernel_of(gpu="A100") == "paged_decode"
    assert kernel_of(options=OPTIONS["window"]) == kernel_of(options=OPTIONS["soft cap"]) == "paged_decode"
    for option in ("sinks", "alibi_slopes"):
        assert kernel_of(options={option: jnp.zeros(64)}) == "paged_decode"
    assert kernel_of(cache_dtype=jnp.float8_e4m3fn, scale_shape="head") == "paged_decode"
