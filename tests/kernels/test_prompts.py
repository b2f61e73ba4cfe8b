"""Prompts through the decode kernel in interpret mode: in runs of tokens, each a sequence of its own, and no races."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged._attention import kernels, xla
from jaxpaged._attention.run import run
from jaxpaged._attention.runs import cut_uniform
from jaxpaged._attention.shared_prefix import split
from jaxpaged._by_kernel import StaticHints
from jaxpaged.debug import explain
from jaxpaged.ops import PrefixGroups
from tests.cases import OPTIONS, find_groups, make_case, oracle, within_budget
from tests.kernels.interpret import H100, attend, by_decode, check, choose, make_call, run_without_races
from tests.kernels.prefill import packed

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
LENGTHS = (0, 5, 26, 130)  # none, a prompt shorter than its row, one that just fills it, and one with a history


def prompt_case(**shape):
    """6 heads of 26 tokens: 3 runs of 9, the first of which begins with a row of padding."""
    return make_case(**(dict(lengths=LENGTHS, max_blocks=9, q_len=26, kv_heads=1, dtype=BF16) | shape))


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_a_ragged_batch_with_a_history(name):
    out = check(prompt_case(options=OPTIONS[name]))
    padding = np.arange(26) < 26 - np.asarray(LENGTHS)[:, None]
    assert padding.any()
    assert not out[padding].any()


def test_partitions():
    check(prompt_case(lengths=(150,), max_blocks=10, options=OPTIONS["sinks"]), num_partitions=2)


@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads"),
    [(130, 1, 1), (33, 4, 2), (3, 48, 1)],  # 3 runs of 44, 2 of 17, 3 of 1
)
def test_groups(q_len, heads, kv_heads):
    check(prompt_case(lengths=(140,), q_len=q_len, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_heads(head_dim):
    check(prompt_case(lengths=(70,), q_len=17, heads=4, head_dim=head_dim))


def test_float16():
    check(prompt_case(lengths=(5, 60), dtype=jnp.float16, options=OPTIONS["alibi"]))


@pytest.mark.parametrize(("cache_dtype", "scale_shape"), [(jnp.int8, "token_head"), (jnp.float8_e4m3fn, "head")])
def test_8bit_caches(cache_dtype, scale_shape):
    check(prompt_case(lengths=(100,), cache_dtype=cache_dtype, scale_shape=scale_shape, options=OPTIONS["window"]))


@pytest.mark.parametrize(("lengths", "counts"), [((77, 93), (26, 26)), ((68, 70), (1, 3))])
def test_blocks_that_a_window_has_passed_are_never_read(lengths, counts):
    """The padding of a run would see one token more: the last token of a block that is in the table no more. Its entry
    is garbage, and the null block, which it is clamped to, holds NaN."""
    window, is_packed = 20, counts[0] < 26
    case = prompt_case(lengths=lengths, options={"sliding_window": window})
    tables = np.asarray(case.block_tables).copy()
    for row, length, count in zip(tables, lengths, counts, strict=True):
        num_passed, rest = divmod(length - count - window + 1, 16)
        assert num_passed > 0
        assert rest == 0
        row[:num_passed] = -5
    call = make_call(case.replace(block_tables=jnp.asarray(tables)))
    if is_packed:
        starts = jnp.cumsum(jnp.array([0, *counts], jnp.int32), dtype=jnp.int32)
        call = dataclasses.replace(call, q=jnp.asarray(packed(case.q, counts)), query_starts=starts)
    out, lse = run_without_races(by_decode(call, H100, StaticHints(num_partitions=1)), call)
    expected, expected_lse = oracle(case)
    if is_packed:
        expected, expected_lse = packed(expected, counts), packed(expected_lse, counts)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


@pytest.mark.parametrize("fault", ["values replaced by keys", "one token fewer", "runs in another order"])
def test_a_wrong_result_is_noticed(fault, monkeypatch, request):
    case = wrong = prompt_case(lengths=(27, 60))  # no run without a token
    if fault == "values replaced by keys":
        wrong = case.replace(v_cache=case.k_cache)
    elif fault == "one token fewer":
        wrong = case.replace(lengths=case.lengths - 1)
    else:

        def reordered(a, run):
            runs = cut_uniform(a, run)
            return dataclasses.replace(runs, lengths=runs.lengths.reshape(2, 3)[:, ::-1].reshape(-1))

        monkeypatch.setattr(kernels, "cut_uniform", reordered)
        jax.clear_caches()
        request.addfinalizer(jax.clear_caches)
    out, _ = attend(wrong)
    good = within_budget(case, out)
    # The middle run is where it was.
    assert not (good[:, [*range(8), *range(17, 26)]] if fault == "runs in another order" else good).all(axis=-1).any()


def test_the_forward_pass_of_a_gradient_is_the_kernels():
    a = make_call(prompt_case(lengths=(5, 60), options=OPTIONS["all"]))
    choice = choose(a, H100, StaticHints(num_partitions=1))
    interpreted = functools.partial(
        run, dataclasses.replace(choice, interpret=plgpu.InterpretGPUParams(detect_races=True))
    )

    def loss(function, q):
        out, lse = function(dataclasses.replace(a, q=q))
        return out.astype(jnp.float32).sum() + jnp.where(lse > -jnp.inf, lse, 0.0).sum(), (out, lse)

    by_xla = functools.partial(xla.attend, num_partitions=1)
    (_, values), ours = jax.value_and_grad(functools.partial(loss, interpreted), has_aux=True)(a.q)
    assert all((got == wanted).all() for got, wanted in zip(values, interpreted(a), strict=True))
    assert not (values[1] == by_xla(a)[1]).all()  # XLA adds in another order
    theirs = jax.grad(functools.partial(loss, by_xla), has_aux=True)(a.q)[0]
    assert np.abs(np.asarray(theirs, np.float32)).max() > 0.1
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0.02, atol=0.01)


def shapes(*, seqs, q_len, heads, kv_heads, max_blocks=512, head_dim=128, cache_dtype=BF16):
    cache = jax.ShapeDtypeStruct((seqs * max_blocks, 16, kv_heads, head_dim), cache_dtype)
    return (
        jax.ShapeDtypeStruct((seqs, q_len, heads, head_dim), BF16),
        cache,
        cache,
        jax.ShapeDtypeStruct((seqs, max_blocks), jnp.int32),
        jax.ShapeDtypeStruct((seqs,), jnp.int32),
    )


@pytest.mark.parametrize(
    ("shape", "quoted"),
    [
        (dict(seqs=1, q_len=65536, heads=64, kv_heads=1, head_dim=120), "group=64: 65536 runs of 1"),
        (dict(seqs=2, q_len=2**19, heads=32, kv_heads=8, head_dim=120), "q_len=524288, group=4: 65536 runs of 16"),
        (dict(seqs=65536, q_len=1, heads=8, kv_heads=8), "seqs=65536, q_len=1, group=1: 65536 runs of 1"),
    ],
)
def test_more_runs_than_a_launch_takes_go_to_xla(shape, quoted):
    with pytest.raises(NotImplementedError, match=f"up to 65535 runs .*{quoted}"):
        explain(*shapes(**shape), gpu="H100", implementation="mosaic_gpu")
    explanation = explain(*shapes(**shape), gpu="H100")
    assert explanation.implementation == "xla"
    assert quoted in explanation.reason


@pytest.mark.parametrize(("max_blocks", "partitions", "num_parts"), [(32, 1, 2), (528, "plan", 8), (8192, "plan", 8)])
def test_which_kernel_takes_a_shared_prefix(max_blocks, partitions, num_parts):
    arrays = shapes(seqs=64, q_len=1, heads=32, kv_heads=8, max_blocks=max_blocks)
    groups = PrefixGroups(*(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (33, 32, 64)))
    explanation = explain(*arrays, prefix_groups=groups, gpu="H100")
    assert explanation.num_partitions == partitions
    assert explanation.shared.kernel == "paged_prefill"
    assert (explanation.shared.config.causal, explanation.shared.num_partitions) == (False, num_parts)


def test_the_prefill_kernel_takes_prefix_groups():
    """Some share nothing, and sequences without a token are before and in them."""
    case = make_case(lengths=(0, 20, 40, 45, 16, 33, 0, 70), heads=4, kv_heads=2, dtype=BF16)
    tables = np.array(case.block_tables)
    tables[3, :2], tables[5, :2] = tables[2, :2], tables[7, :2]
    case = case.replace(block_tables=jnp.asarray(tables))
    groups = find_groups(case)
    assert groups.num_blocks.tolist() == [0, 0, 2, 2, 0, 2, 0, 2]
    shared, rest, _ = split(make_call(case), groups)
    choice = choose(shared, H100)
    assert choice.kernel.name == "paged_prefill"
    out, lse = run_without_races(choice, shared)
    expected, expected_lse = xla.attend(shared, num_partitions=1)
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)
    unshared = jnp.array([0, 1, 4])
    assert not out[unshared].any()
    assert (lse[unshared] == -jnp.inf).all()
    assert rest.lengths.tolist() == [0, 20, 8, 13, 16, 1, 0, 38]


def test_a_shared_prefix_is_computed_in_runs_of_64_rows():
    a = make_call(make_case(lengths=(30,), q_len=70, heads=4, kv_heads=1, dtype=BF16))
    choice = by_decode(dataclasses.replace(a, causal=False), H100)
    assert choice.config.run == 14
    runs = cut_uniform(dataclasses.replace(a, causal=False), choice.config.run)
    assert (runs.q.shape, runs.block_tables.shape) == ((5, 1, 14 * 4, 64), (5, a.block_tables.shape[1]))
