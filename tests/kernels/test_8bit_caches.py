"""The decode kernel on 8-bit caches in interpret mode: widening, scales, and no races."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import widen
from pallas_kernels.decode import logits
from tests.cases import OPTIONS, make_case, within_budget
from tests.kernels.interpret import attend, check

pytestmark = pytest.mark.slow

BF16, E4M3, E5M2, INT8 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
DTYPES = (E4M3, E5M2, INT8)


def case_8bit(seed=0, **shape):
    return make_case(
        seed,
        **(dict(lengths=(1, 70), kv_heads=1, dtype=BF16, cache_dtype=INT8, scale_shape="token_head") | shape),
    )


HEAD_DIMS, BLOCK_SIZES = (64, 32, 80, 96, 112, 128, 192, 256), (16, 8, 64, 128)


@pytest.mark.parametrize(  # every dtype with every kind of scales; in turns every head_dim and block size
    ("cache_dtype", "scale_shape", "head_dim", "block_size"),
    [
        (cache_dtype, scale_shape, HEAD_DIMS[i % 8], BLOCK_SIZES[(i + i // 4) % 4])
        for i, (cache_dtype, scale_shape) in enumerate(
            itertools.product(DTYPES, (None, "tensor", "head", "token_head"))
        )
    ],
)
def test_dtypes_and_scales(cache_dtype, scale_shape, head_dim, block_size):
    case = case_8bit(
        lengths=(0, block_size, 70),
        kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        max_blocks=-(-70 // block_size) + 1,
        cache_dtype=cache_dtype,
        scale_shape=scale_shape,
    )
    check(case, zero_fill=head_dim % 64 != 0)


def test_partitions():
    case = case_8bit(lengths=(0, 1, 300), max_blocks=19, options=OPTIONS["all"])
    check(case, num_partitions=3)


@pytest.mark.parametrize(("q_len", "num_partitions", "options"), [(2, 1, "window"), (5, 2, "all")])
def test_several_query_tokens(q_len, num_partitions, options):
    case = case_8bit(lengths=(3, 130), max_blocks=9, q_len=q_len, cache_dtype=E4M3, options=OPTIONS[options])
    check(case, num_partitions=num_partitions)


@pytest.mark.parametrize("head_dim", [112, 128])
def test_many_rows(head_dim):
    check(case_8bit(lengths=(130,), max_blocks=9, heads=64, head_dim=head_dim), num_partitions=2, zero_fill=True)


def test_float16():
    check(case_8bit(dtype=jnp.float16, options=OPTIONS["all"]))


@pytest.mark.parametrize("shape", [dict(scale_shape="head"), dict(), dict(heads=64, head_dim=128)])
def test_the_ring_goes_round(shape):
    check(case_8bit(**(dict(lengths=(64 * 4,), max_blocks=16, heads=2, cache_dtype=E4M3) | shape)), num_stages=2)


def test_one_scale_of_each_kind():
    case = case_8bit(kv_heads=2, cache_dtype=E4M3)
    tensor, head = jnp.float32(0.03), jnp.array([0.02, 0.05])
    check(case.replace(options=case.options | {"k_scale": tensor}))
    check(case.replace(options=case.options | {"v_scale": head}))
    check(case.replace(options={"v_scale": case.options["v_scale"]}))


@pytest.mark.parametrize("num_partitions", [1, 2])
def test_scales_and_queries_of_any_size(num_partitions):
    """float16 holds neither the scales, nor the queries, nor the weights times their scales."""
    case = case_8bit(lengths=(200,), max_blocks=13, dtype=BF16, options={"scale": 1e-6})
    rng = np.random.default_rng(1)
    powers = jnp.asarray(2.0 ** rng.integers(-30, 30, case.k_cache.shape[:3]), jnp.float32)
    scales = {"v_scale": case.options["v_scale"] * powers * rng.choice([-1.0, 1.0], powers.shape).astype(np.float32)}
    check(case.replace(q=case.q * jnp.asarray(1e6, BF16), options=case.options | scales), num_partitions=num_partitions)


def test_no_scale_at_all_in_some_tokens():
    case = case_8bit(lengths=(70, 33))
    check(case.replace(options=case.options | {"v_scale": case.options["v_scale"] * 0.0}))


@pytest.mark.parametrize("fault", ["k_scale left out", "scales exchanged", "scales rolled", "eight tokens fewer"])
def test_a_wrong_result_is_noticed(fault):
    case = case_8bit(lengths=(70, 33))
    k_scale, v_scale = case.options["k_scale"] * 5.0, case.options["v_scale"]
    case = case.replace(options={"k_scale": k_scale, "v_scale": v_scale})
    wrong = {
        "k_scale left out": case.replace(options={"k_scale": jnp.float32(1.0), "v_scale": v_scale}),
        "scales exchanged": case.replace(options={"k_scale": v_scale, "v_scale": k_scale}),
        "scales rolled": case.replace(options={"k_scale": k_scale, "v_scale": jnp.roll(v_scale, 1, axis=1)}),
        "eight tokens fewer": case.replace(lengths=case.lengths - 8),
    }[fault]
    assert not within_budget(case, attend(wrong)[0]).all()


def test_weights_without_their_maximum_would_not_do(monkeypatch):
    """The negative twin of the scales of any size: with the maximum of the logits alone, float16 overflows."""
    case = case_8bit(lengths=(70, 33))
    case = case.replace(options=case.options | {"v_scale": case.options["v_scale"] * 1e6})
    check(case)
    monkeypatch.setattr(logits, "peaks", lambda its, *_: its)
    assert not within_budget(case, attend(case, num_stages=3)[0]).all()
    jax.clear_caches()  # the kernel without the maximum


def test_nan_in_a_slot_in_use_shows():
    case = case_8bit(lengths=(70,), cache_dtype=E4M3, scale_shape="head")
    out, _ = attend(case.replace(lengths=case.lengths + 1))
    assert np.isnan(np.asarray(out, np.float32)).any()


def test_orders():
    assert sorted(widen.K_ORDER) == sorted(widen.V_ORDER) == list(range(16))
