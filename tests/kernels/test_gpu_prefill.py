"""The prefill kernel on a GPU: ragged batches and prompts, with poisoned pools."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import paged_attention
from jaxpaged.ops import PrefixGroups
from pallas_kernels.prefill import kernel
from tests.attention.conformance import FAULTS
from tests.cases import OPTIONS, assert_lse, assert_within_budget, find_groups, make_case, oracle, paired
from tests.kernels import prefill

pytestmark = pytest.mark.gpu
BF16, E4M3, E5M2, INT8 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
LENGTHS = (0, 1, 15, 33, 300, 777, 1040, 64)
COUNTS = (0, 1, 15, 7, 300, 100, 33, 64)
attend = functools.partial(prefill.attend, interpret=None)


def ragged_case(**shape):
    block_size = shape.get("block_size", 16)
    max_blocks = -(-max(LENGTHS) // block_size)
    return make_case(**(dict(lengths=LENGTHS, max_blocks=max_blocks, q_len=max(COUNTS), dtype=BF16) | shape))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    prefill.check(ragged_case(options=OPTIONS[name], head_dim=128), COUNTS, num_sms=132)


@pytest.mark.parametrize(("block_size", "head_dim"), paired((8, 16, 32, 64, 128, 256), (128, 64)))
def test_blocks(head_dim, block_size):
    prefill.check(ragged_case(head_dim=head_dim, block_size=block_size), COUNTS, num_sms=132)


@pytest.mark.parametrize(("head_dim", "name"), paired((32, 48, 80, 96, 112, 160, 192, 256), ("plain", "all", "all")))
def test_heads(head_dim, name):
    prefill.check(ragged_case(head_dim=head_dim, options=OPTIONS[name]), COUNTS, num_sms=132)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (5, 1), (7, 1), (8, 1), (16, 1)])
def test_groups(heads, kv_heads):
    prefill.check(ragged_case(heads=heads, kv_heads=kv_heads, head_dim=128, dtype=jnp.float16), COUNTS, num_sms=132)


@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_any_number_of_programs(num_sms):
    prefill.check(ragged_case(head_dim=128), COUNTS, num_sms=num_sms)


@pytest.mark.parametrize(
    ("head_dim", "num_parts", "name"), [(64, 2, "plain"), (128, 2, "plain"), (128, 7, "all"), (256, 2, "plain")]
)
def test_parts_of_keys(name, head_dim, num_parts):
    case = ragged_case(head_dim=head_dim, options=OPTIONS[name])
    prefill.check(case, COUNTS, num_sms=132, num_parts=num_parts)


@pytest.mark.parametrize("scale_shape", [None, "tensor", "head", "token_head"])
@pytest.mark.parametrize(("cache_dtype", "head_dim"), [(E4M3, 64), (E5M2, 128), (INT8, 128)])
def test_8bit_caches(head_dim, cache_dtype, scale_shape):
    case = ragged_case(head_dim=head_dim, cache_dtype=cache_dtype, scale_shape=scale_shape)
    prefill.check(case, COUNTS, num_sms=132)


@pytest.mark.parametrize(("name", "scale_shape"), paired(OPTIONS, ("token_head", "head")))
def test_options_of_an_8bit_cache(name, scale_shape):
    case = ragged_case(head_dim=128, cache_dtype=E4M3, scale_shape=scale_shape, options=OPTIONS[name])
    prefill.check(case, COUNTS, num_sms=132)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_blocks_of_an_8bit_cache(block_size):
    shape = dict(block_size=block_size, cache_dtype=E4M3, scale_shape="token_head", options=OPTIONS["window"])
    prefill.check(ragged_case(head_dim=128, **shape), COUNTS, num_sms=132)


@pytest.mark.parametrize(("head_dim", "cache_dtype"), paired((32, 80, 112, 192), (E4M3, INT8)))
def test_heads_of_an_8bit_cache(head_dim, cache_dtype):
    case = ragged_case(head_dim=head_dim, cache_dtype=cache_dtype, scale_shape="head", options=OPTIONS["all"])
    prefill.check(case, COUNTS, num_sms=132)


@pytest.mark.parametrize(("num_sms", "dtype"), [(1, BF16), (7, jnp.float16)])
def test_any_number_of_programs_and_an_8bit_cache(dtype, num_sms):
    case = ragged_case(head_dim=128, dtype=dtype, cache_dtype=E4M3, scale_shape="token_head")
    prefill.check(case, COUNTS, num_sms=num_sms)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_parts_of_an_8bit_cache(head_dim):
    case = ragged_case(head_dim=head_dim, cache_dtype=E4M3, scale_shape="token_head", options=OPTIONS["all"])
    prefill.check(case, COUNTS, num_sms=132, num_parts=7)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_queries_that_float16_does_not_hold(factor):
    case = ragged_case(head_dim=128, cache_dtype=E4M3, scale_shape="head")
    q = (case.q.astype(jnp.float32) * factor).astype(BF16)
    case = case.replace(q=q, options=case.options | {"scale": 0.1 / factor})
    prefill.check(case, COUNTS, num_sms=132)


def test_scales_below_zero():
    case = ragged_case(head_dim=128, kv_heads=2, cache_dtype=E4M3)
    for k_scale, v_scale in ((jnp.array([-0.3, 0.2]), jnp.float32(-2.0)), (jnp.float32(-0.3), jnp.array([1.0, -3.0]))):
        prefill.check(case.replace(options={"k_scale": k_scale, "v_scale": v_scale}), COUNTS, num_sms=132)


def test_a_scale_below_zero():
    prefill.check(ragged_case(head_dim=128, options={"scale": -0.3}), COUNTS, num_sms=132)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_noticed(fault):
    case = ragged_case(lengths=(5, 9), q_len=2, head_dim=128, options={"scale": 0.03})
    out, _ = attend(FAULTS[fault](case), (2, 2), num_sms=132)
    assert not prefill.good_rows(case, (2, 2), out).all(axis=-1).any()


@pytest.mark.parametrize("shape", [{}, dict(cache_dtype=E4M3, scale_shape="token_head")], ids=str)
def test_equal_bits_twice(shape):
    case = ragged_case(head_dim=128, **shape)
    first, second = (attend(case, COUNTS, num_sms=132) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert (np.asarray(x[:-1]).view(np.uint8) == np.asarray(y[:-1]).view(np.uint8)).all()


@pytest.mark.parametrize(
    ("name", "shape"), [("plain", dict(cache_dtype=E4M3, scale_shape="token_head")), ("all", {})], ids=str
)
def test_prompts_through_the_public_function(name, shape, monkeypatch):
    launched = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: launched.append(0) or launch(*args))
    jax.clear_caches()
    case = make_case(
        lengths=(5, 1040, 700),
        max_blocks=65,
        heads=6,
        kv_heads=2,
        q_len=1000,
        head_dim=128,
        dtype=BF16,
        options=OPTIONS[name],
        **shape,
    )
    out, lse = paged_attention(*case.arrays, **case.options, implementation="mosaic_gpu", return_lse=True)
    assert launched
    assert_within_budget(case, out)
    assert_lse(case, lse)


def test_under_vmap():
    case = make_case(lengths=(1040, 700), max_blocks=65, q_len=700, head_dim=128, dtype=BF16)
    attend = functools.partial(paged_attention, implementation="mosaic_gpu")
    out = jax.jit(attend)(*case.arrays)
    mapped = jax.jit(jax.vmap(lambda q: attend(q, *case.arrays[1:])))(jnp.stack([case.q, -case.q]))
    assert (mapped[0] == out).all()
    assert not (mapped[1] == out).all()


@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (120, 16)])
def test_packed_queries_through_the_public_function(head_dim, block_size):
    """Of heads of 128 by the prefill kernel, of 120 by the decode kernel in runs."""
    case = ragged_case(head_dim=head_dim, block_size=block_size, options=OPTIONS["all"])
    q = np.concatenate([prefill.packed(case.q, COUNTS), np.full((3, *case.q.shape[2:]), np.nan, case.q.dtype)])
    starts = jnp.asarray(np.cumsum([0, *COUNTS]), jnp.int32)
    how = dict(query_starts=starts, implementation="mosaic_gpu", return_lse=True)
    out, lse = paged_attention(jnp.asarray(q), *case.arrays[1:], **case.options, **how)
    assert prefill.good_rows(case, COUNTS, out[:-3]).all()
    np.testing.assert_allclose(lse[:-3], prefill.packed(oracle(case)[1], COUNTS), rtol=2e-3, atol=2e-3)
    assert not np.asarray(out[-3:]).any()


@pytest.mark.parametrize(("head_dim", "num_parts"), [(64, 5), (128, 1), (256, 5)])
def test_queries_that_all_see_the_whole_sequence(head_dim, num_parts):
    case = make_case(lengths=(777,) * 70, max_blocks=49, head_dim=head_dim, dtype=BF16)
    case = case.replace(block_tables=jnp.repeat(case.block_tables[:1], 70, axis=0))
    prefill.check_shared(case, num_sms=132, num_parts=num_parts)


def prefix_case(groups, **shape):
    """32 sequences; a group's share 640 tokens, but for one that is empty and one that is short."""
    lengths = (0, 5, *(641 + 37 * i for i in range(30)))
    case = make_case(**(dict(lengths=lengths, max_blocks=144, head_dim=128, dtype=BF16) | shape))
    tables = np.array(case.block_tables)
    for rows in np.split(np.arange(32), groups):
        rows = rows[rows > 1]
        tables[rows, :40] = tables[rows[-1], :40]
    return case.replace(block_tables=jnp.asarray(tables))


@pytest.mark.parametrize(
    ("shape", "is_wide", "groups"),
    [
        (dict(options=OPTIONS["sinks"]), False, 4),
        (dict(heads=16), True, 4),
        (dict(q_len=4, head_dim=64), False, 1),
        (dict(head_dim=120), False, 4),
        (dict(head_dim=120), True, 1),
        (dict(cache_dtype=jnp.float8_e4m3fn, scale_shape="token_head"), True, 4),
    ],
    ids=str,
)
def test_a_shared_prefix(shape, groups, is_wide):
    """It may be as long as the table is wide."""
    case = prefix_case(groups, **shape)
    found = find_groups(case)
    assert int((found.num_blocks >= 40).sum()) >= 28
    q, k_cache, v_cache, tables, lengths = case.arrays
    if is_wide:
        tables = jnp.pad(tables, ((0, 0), (0, 8192)), constant_values=-7)
    named = dict(**case.options, prefix_groups=found, implementation="mosaic_gpu", return_lse=True)
    out, lse = paged_attention(q, k_cache, v_cache, tables, lengths, **named)
    assert_within_budget(case, out)
    assert_lse(case, lse)


@pytest.mark.parametrize("members", [(30,), (6, 8, 8, 8)])
def test_a_shared_prefix_as_an_engine_passes_it(members):
    """The two sequences of no group are the last; some groups have no sequence."""
    case, rows = prefix_case(len(members)), np.asarray([*range(2, 32), 0, 1])
    case = case.replace(q=case.q[rows], block_tables=case.block_tables[rows], lengths=case.lengths[rows])
    starts = np.pad(np.cumsum([0, *members]), (0, 12), constant_values=30)
    first = np.minimum(starts[:-1], 29)
    prefix = PrefixGroups(*(jnp.asarray(x, jnp.int32) for x in (starts, first, [40] * 30 + [0] * 2)))
    out, lse = paged_attention(*case.arrays, prefix_groups=prefix, implementation="mosaic_gpu", return_lse=True)
    assert_within_budget(case, out)
    assert_lse(case, lse)


@pytest.mark.parametrize("head_dim", [128, 120])
def test_a_shared_prefix_of_packed_queries(head_dim):
    counts = (0, 5, *(1 + 3 * (i % 11) for i in range(30)))
    case = prefix_case(4, q_len=max(counts), head_dim=head_dim)
    q, starts = jnp.asarray(prefill.packed(case.q, counts)), jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    how = dict(query_starts=starts, implementation="mosaic_gpu", return_lse=True)
    groups = find_groups(case, query_starts=starts)
    assert groups.num_blocks.any()
    out, lse = paged_attention(q, *case.arrays[1:], **how, prefix_groups=groups)
    assert prefill.good_rows(case, counts, out).all()
    np.testing.assert_allclose(lse, prefill.packed(oracle(case)[1], counts), rtol=2e-3, atol=2e-3)
