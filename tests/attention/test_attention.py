"""Every implementation of paged_attention against the oracle, and the oracle against dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _device, paged_attention, paged_attention_reference
from jaxpaged._attention import xla
from pallas_kernels.common.interface import AttentionOptions, Call
from tests.attention.conformance import Conformance
from tests.cases import (
    Case,
    assert_lse,
    assert_within_budget,
    jitted_attention,
    jitted_reference,
    make_case,
    oracle,
    within_budget,
)

BF16 = jnp.bfloat16


def attend(case: Case, **options):
    return jitted_attention(*case.arrays, **case.options | options, return_lse=True)


def check(case: Case, **options) -> None:
    out, lse = attend(case, **options)
    assert_within_budget(case, out)
    assert_lse(case, lse)


class TestXla(Conformance):
    block_sizes = 8, 24, 32, 256, 512
    options_of_8_bits = ()
    groups = *Conformance.groups, (12, 1), (64, 4)
    scaled_caches = *Conformance.scaled_caches, *((BF16, scale) for scale in (None, "tensor", "head", "token_head"))

    def attend(self, case, num_partitions=1):
        return attend(case, num_partitions=num_partitions)


class TestReference(Conformance):
    """The reference equals the oracle of all tests, which is written in NumPy."""

    options_of_partitions = options_of_8_bits = ()
    q_lens = 5, 100
    dtypes = (jnp.float32,)  # the reference returns only float32
    head_dims, block_sizes = (32, 120), (24,)
    scaled_caches = (BF16, None), (jnp.float8_e4m3fn, "tensor"), (jnp.float8_e5m2, "head"), (jnp.int8, "token_head")

    def attend(self, case, num_partitions=1):
        return jitted_reference(*case.arrays, **case.options, return_lse=True)


@pytest.mark.parametrize("max_blocks", [1, 3, 7, 13, 40])
@pytest.mark.parametrize("num_partitions", [None, 1, 2, 5])
def test_no_divisibility_rule(max_blocks, num_partitions):
    check(make_case(max_blocks=max_blocks, lengths=(16 * max_blocks, 1, 0)), num_partitions=num_partitions)


@pytest.mark.parametrize(
    ("shape", "partitions"),
    [
        (dict(), 64),  # all of 1 x 8192 in one step
        (dict(capacity=12288), 48),  # in two steps
        (dict(seqs=8), 8),
        (dict(seqs=64), 1),
        (dict(seqs=64, capacity=100), 1),
        (dict(cache_dtype=jnp.float8_e4m3fn), 32),  # widened to float32
        (dict(block_size=512), 64),
        (dict(q_len=512), 4),  # the logits of a prompt
    ],
)
def test_xla_partitions_fill_a_gpu(shape, partitions):
    def default(*, seqs=1, q_len=1, capacity=8192, block_size=8, cache_dtype=jnp.bfloat16, on_gpu=True):
        cache = jax.ShapeDtypeStruct((100, block_size, 8, 128), cache_dtype)
        a = Call(
            q=jax.ShapeDtypeStruct((seqs, q_len, 32, 128), jnp.bfloat16),
            k_cache=cache,
            v_cache=cache,
            block_tables=jax.ShapeDtypeStruct((seqs, capacity // block_size), jnp.int32),
            lengths=jax.ShapeDtypeStruct((seqs,), jnp.int32),
            options=AttentionOptions(scale=jax.ShapeDtypeStruct((), jnp.float32)),
            value_dim=128,
        )
        return xla.default_partitions(a, on_gpu=on_gpu)

    assert default(**shape) == partitions
    assert default(**shape, on_gpu=False) == 1


def test_xla_partitions_depend_on_the_device(monkeypatch):
    case = make_case(lengths=(0, 1, 300, 1100, 517), max_blocks=80)

    def traced(**options):
        return str(jax.make_jaxpr(functools.partial(paged_attention, implementation="xla", **options))(*case.arrays))

    assert traced() == traced(num_partitions=1)
    monkeypatch.setattr(_device, "is_gpu", lambda: True)
    assert traced() == traced(num_partitions=10)  # 1280 tokens


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_scale_with_an_unquantised_cache(dtype):
    check(make_case(dtype=dtype, cache_dtype=dtype, scale_shape="head"))


def test_blocks_of_several_tiles_with_token_scales():
    check(make_case(block_size=256, max_blocks=3, cache_dtype=jnp.int8, scale_shape="token_head"), num_partitions=2)


@pytest.mark.parametrize("q_len", [1, 2, 16, 40])
def test_query_rows_before_the_start_are_zero(q_len):
    case = make_case(q_len=q_len, lengths=(0, 1, 3, 30, 80))
    check(case)
    out, lse = attend(case)
    padding = np.arange(q_len) < q_len - np.asarray(case.lengths)[:, None]
    assert (np.asarray(out)[padding] == 0).all()
    assert (np.asarray(lse)[padding] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[~padding]).all()


def test_traced_scalars_compile_once():
    case = make_case()
    traces = []

    @jax.jit
    def run(case_arrays, scale, window, cap):
        traces.append(1)
        return paged_attention(*case_arrays, scale=scale, sliding_window=window, logits_soft_cap=cap)

    for scale, window, cap in ((0.3, 20, 3.0), (0.1, 4, 30.0)):
        options = dict(scale=scale, sliding_window=window, logits_soft_cap=cap)
        assert_within_budget(case.replace(options=options), run(case.arrays, scale, window, cap))
    assert len(traces) == 1


def test_a_window_may_be_a_numpy_scalar_of_any_dtype():
    case = make_case()
    expected = paged_attention(*case.arrays, sliding_window=7)
    for window in (np.uint8(7), np.int16(7), np.array(7)):
        assert (paged_attention(*case.arrays, sliding_window=window) == expected).all()


def test_a_window_that_slides_past_whole_blocks_never_reads_them():
    # An engine may reuse blocks before the window: they may hold another owner's NaN, and table entries may be garbage.
    case = make_case(lengths=(80, 77, 40), options={"sliding_window": 20}, q_len=3)
    expected, _ = oracle(case)
    tables = np.asarray(case.block_tables).copy()
    for row, length in zip(tables, (80, 77, 40), strict=True):
        row[: (length - 3 - 20 + 1) // 16] = -5
    out, _ = attend(case.replace(block_tables=jnp.asarray(tables)))
    np.testing.assert_allclose(np.asarray(out), expected, atol=2e-6)


def test_lengths_past_the_table_are_clamped():
    case = make_case(lengths=(80, 16), max_blocks=5)
    out, lse = attend(case)
    longer, longer_lse = attend(case.replace(lengths=jnp.asarray([10_000, 16], jnp.int32)))
    assert (out == longer).all()
    assert (lse == longer_lse).all()
    negative, _ = attend(case.replace(lengths=jnp.asarray([-3, 16], jnp.int32)))
    assert (negative[0] == 0).all()


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_two_runs_and_other_neighbours_give_equal_bits(num_partitions):
    case = make_case(lengths=(700, 30, 0, 1290), max_blocks=90)
    out, lse = attend(case, num_partitions=num_partitions)
    again, _ = attend(case, num_partitions=num_partitions)
    assert (out == again).all()
    # The same sequence in another row, with other neighbours.
    rows = jnp.asarray([2, 0, 1, 1])
    moved = case.replace(q=case.q[rows], block_tables=case.block_tables[rows], lengths=case.lengths[rows])
    among_others, its_lse = attend(moved, num_partitions=num_partitions)
    assert (among_others == out[rows]).all()
    assert (its_lse == lse[rows]).all()


def test_block_size_and_fragmentation_do_not_change_a_bit():
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, 3, 512, 2, 64)).astype(np.float32)
    q = jnp.asarray(rng.normal(size=(3, 6, 64)), jnp.float32)
    lengths = jnp.asarray([512, 300, 17], jnp.int32)
    outs = []
    for block_size in (8, 16, 64, 256):
        order = rng.permutation(3 * 512 // block_size)
        pools = [np.empty((len(order), block_size, 2, 64), np.float32) for _ in range(2)]
        for pool, values in zip(pools, (k, v), strict=True):
            pool[order] = values.reshape(pool.shape)
        tables = jnp.asarray(order.reshape(3, -1), jnp.int32)
        outs.append(np.asarray(paged_attention(q, *map(jnp.asarray, pools), tables, lengths)))
    for out in outs[1:]:
        assert (out == outs[0]).all()


# The oracle itself, against dense attention without blocks


def test_reference_is_dense_attention():
    rng = np.random.default_rng(2)
    length, q_len = 37, 5
    k, v = rng.normal(size=(2, 48, 2, 64)).astype(np.float32)
    q = rng.normal(size=(1, q_len, 6, 64)).astype(np.float32)
    order = np.asarray([2, 0, 1])
    pools = [np.empty((3, 16, 2, 64), np.float32) for _ in range(2)]
    for pool, values in zip(pools, (k, v), strict=True):
        pool[order] = values.reshape(pool.shape)
    tables, lengths = order[None].astype(np.int32), np.asarray([length], np.int32)
    out, lse = paged_attention_reference(q, *pools, tables, lengths, return_lse=True)
    # In float64, per token and head
    for row in range(q_len):
        seen = length - q_len + row + 1
        for head in range(6):
            logits = k[:seen, head // 3].astype(np.float64) @ q[0, row, head] / 8
            weights = np.exp(logits)
            expected = weights @ v[:seen, head // 3] / weights.sum()
            np.testing.assert_allclose(out[0, row, head], expected, atol=2e-6)
            np.testing.assert_allclose(lse[0, row, head], np.log(weights.sum()), atol=2e-6)


# Negative twins: each of these mistakes must exceed the budget.


def wrong(case: Case, mistake: str):
    match mistake:
        case "v is k":
            return case.replace(v_cache=case.k_cache), {}
        case "table rolled by one":
            return case.replace(block_tables=jnp.roll(case.block_tables, 1, axis=1)), {}
        case "one partition dropped":
            return case.replace(lengths=case.lengths - 40), {}
        case "scale left out":
            return case, {"scale": 1.0}
        case "window one short":
            return case, {"sliding_window": 99}
        case "kv heads swapped":
            return case.replace(k_cache=case.k_cache[:, :, ::-1]), {}
        case "causal mask off by one":
            return case.replace(lengths=case.lengths + 1), {}
    raise AssertionError(mistake)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "mistake",
    [
        "v is k",
        "table rolled by one",
        "one partition dropped",
        "scale left out",
        "window one short",
        "kv heads swapped",
        "causal mask off by one",
    ],
)
def test_negative_twins(mistake, dtype):
    case = make_case(lengths=(100, 127), max_blocks=8, dtype=dtype, options={"sliding_window": 100})
    assert within_budget(case, attend(case)[0]).all()
    case_with_it, options = wrong(case, mistake)
    good = within_budget(case, attend(case_with_it, **options)[0])
    assert not good.all(axis=-1).any(), "every sequence must show the mistake"
