"""The kernels on a GPU, at real sizes: `pytest -m gpu`. Poisoned pools and garbage ids come with every case."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _device, paged_attention, tree_mask
from jaxpaged._attention.kernels import Results
from jaxpaged._attention.run import run
from jaxpaged._by_kernel import Choice, StaticHints
from jaxpaged._selftest import cases
from jaxpaged.debug import explain
from pallas_kernels.common import partition_plan
from pallas_kernels.common.interface import MOST_SEQS
from pallas_kernels.common.partition_plan import PartitionPlan
from tests.attention.conformance import Conformance
from tests.cases import OPTIONS, Case, assert_lse, assert_within_budget, make_case, oracle, paired, within_budget
from tests.kernels.interpret import by_decode, choose, make_call, partitions_per_seq

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 15, 16, 17, 700, 1000, 2048)
BF16 = jnp.bfloat16
NumPartitions = int | PartitionPlan | None


def results(a: Any, num_partitions: NumPartitions) -> Results:
    """By the default kernels, with the plan or the partitions that the test asks for."""
    if isinstance(num_partitions, PartitionPlan):
        planned = dataclasses.replace(a, plan=num_partitions)
        return run(by_decode(planned, _device.gpu()), planned)
    choice = choose(a, _device.gpu(), StaticHints(num_partitions=num_partitions, implementation="mosaic_gpu"))
    assert isinstance(choice, Choice)
    return run(choice, a)


def attend(case: Case, num_partitions: NumPartitions) -> Results:
    out, lse = results(make_call(case), num_partitions)
    return (out, lse) if case.q.ndim == 4 else (out[:, 0], lse[:, 0])


def check(case: Case, num_partitions: NumPartitions = None) -> np.ndarray:
    out, lse = attend(case, num_partitions)
    assert_within_budget(case, out)
    assert_lse(case, lse)
    again, lse_again = attend(case, num_partitions)
    for first, second in ((out, again), (lse, lse_again)):
        assert (np.asarray(first, np.float32) == np.asarray(second, np.float32)).all()
    return np.asarray(out, np.float32)


def real(**shape) -> Case:
    block_size = shape.get("block_size", 16)
    return make_case(**(dict(lengths=LENGTHS, max_blocks=2048 // block_size, dtype=BF16) | shape))


class OnGpu(Conformance):
    """Its heads, blocks, groups and caches stand below: with several numbers of partitions each."""

    options_of_8_bits = tuple(OPTIONS)
    dtypes = (jnp.float16,)
    head_dims = block_sizes = groups = scaled_caches = ()

    def attend(self, case, num_partitions=1):
        results, again = (attend(case, num_partitions) for _ in range(2))
        for first, second in zip(results, again, strict=True):
            np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))
        return results


class TestDecode(OnGpu):
    case = long_case = staticmethod(functools.partial(real, head_dim=128))
    q_lens = 2, 4, 16
    numbers_of_partitions = (8,)  # two, and other forms, in `test_gpu_decode_forms.py`


DEEPSEEK_WIDTHS = dict(kv_heads=1, head_dim=576, value_dim=512)
DEEPSEEK = dict(**DEEPSEEK_WIDTHS, is_latent=True, lengths=(0, 1, 15, 16, 17, 700, 333, 130), max_blocks=44)


class TestLatent(OnGpu):
    """One latent of DeepSeek's width; other heads, 8 bits and other forms stand in `test_gpu_decode_forms.py`."""

    case = long_case = staticmethod(functools.partial(real, **DEEPSEEK))
    options = options_of_partitions = ("all",)
    options_of_8_bits = ()
    q_lens = (2,)
    numbers_of_partitions = (7,)
    faults = "table rolled", "scale left out", "eight tokens fewer"

    def attend(self, case, num_partitions=1):
        if not case.options:  # the fault: another scale, and the same latent
            case = case.replace(options=dict(value_dim=512, scale=1.0))
        return super().attend(case, num_partitions)


@pytest.mark.parametrize(
    "shape",
    [
        dict(heads=64, block_size=64),
        dict(heads=64, num_partitions=3),
        dict(heads=128, q_len=2, num_partitions=1),
        dict(heads=192, block_size=8, dtype=jnp.float16),
        dict(heads=64, block_size=128, head_dim=192, value_dim=128),
    ],
)
def test_latents_of_many_heads(shape):
    """Against the reference: so many heads take NumPy minutes."""
    case = cases.make_case(**DEEPSEEK_WIDTHS | shape)
    attend = functools.partial(paged_attention, implementation="mosaic_gpu", return_lse=True)
    explained = explain(*case.arrays, **case.options, **case.how, value_dim=case.value_dim)
    assert explained.kernel == "paged_latent"
    assert cases.worst_error(case, attend) < cases.TOLERANCE
    wrong = cases.worst_error(case, lambda *x, **options: attend(*x, **options | {"scale": jnp.float32(0.03)}))
    assert wrong > cases.TOLERANCE


class TestManyRows(OnGpu):
    """39, as 3 heads of 13 tokens, of 64."""

    case = long_case = staticmethod(functools.partial(real, q_len=13, kv_heads=2, head_dim=128))
    options = "plain", "window", "sinks", "all"
    options_of_partitions = options_of_8_bits = "sinks", "all"
    q_lens = ()
    faults = "table rolled", "eight tokens fewer"


HEAD_DIMS = 32, 40, 64, 72, 80, 96, 112, 120, 128, 168, 192, 256


@pytest.mark.parametrize(("head_dim", "num_partitions"), paired(HEAD_DIMS, (1, 4, 16, 1, 4)))
def test_heads(head_dim, num_partitions):
    check(real(head_dim=head_dim), num_partitions)


@pytest.mark.parametrize(("block_size", "num_partitions"), paired((8, 32, 64, 128, 256), (None, 3)))
def test_block_sizes(block_size, num_partitions):
    check(real(block_size=block_size, head_dim=128), num_partitions)


GROUPS = (1, 1), (5, 1), (7, 1), (24, 2), (32, 8), (64, 4), (64, 2), (64, 1)


@pytest.mark.parametrize(("group", "num_partitions"), paired(GROUPS, (1, 5, 11)))
def test_groups(group, num_partitions):
    heads, kv_heads = group
    check(real(heads=heads, kv_heads=kv_heads, head_dim=128), num_partitions)


def test_the_most_registers():
    check(real(heads=64, kv_heads=1, head_dim=256), 2)


@pytest.mark.parametrize(("q_len", "heads", "num_partitions"), [(8, 8, None), (16, 8, 5), (64, 2, 1), (8, 8, "a plan")])
def test_trees(q_len, heads, num_partitions):
    rng = np.random.default_rng(0)
    parents = np.stack([rng.integers(-1, np.arange(q_len)) for _ in LENGTHS])
    case = real(q_len=q_len, heads=heads, kv_heads=2, head_dim=128)
    case = case.replace(options={"tree_mask": tree_mask(jnp.asarray(parents, jnp.int32))})
    out, lse = attend(case, planned(case) if num_partitions == "a plan" else num_partitions)
    np.testing.assert_allclose(np.asarray(out, np.float32), oracle(case)[0], atol=0.02)
    assert_lse(case, lse)


@pytest.mark.parametrize("num_partitions", [5, "a plan"])
def test_ten_thousand_calls_give_equal_bits(num_partitions):
    """The last program of a sequence merges what the others stored: none of it is used before it is there."""
    case = real(heads=64, kv_heads=4, head_dim=128)
    a = make_call(case)
    num_partitions = planned(case) if num_partitions == "a plan" else num_partitions

    @jax.jit
    def differing():
        first = results(a, num_partitions)

        def compare(_, count):
            q, count = jax.lax.optimization_barrier((a.q, count))
            again = results(dataclasses.replace(a, q=q), num_partitions)
            return count + sum((x != y).any().astype(jnp.int32) for x, y in zip(first, again, strict=True))

        return jax.lax.fori_loop(0, 10_000, compare, jnp.int32(0))

    assert differing() == 0


@pytest.mark.parametrize("window", [128, 5000])
def test_known_windows_of_wide_tables(window):
    lengths = (0, 1, 127, 129, 6000, 5555)
    case = real(lengths=lengths, max_blocks=512, options={"sliding_window": window}, head_dim=128)
    out, lse = paged_attention(*case.arrays, **case.options, return_lse=True, implementation="mosaic_gpu")
    assert_within_budget(case, out)
    assert_lse(case, lse)


@pytest.mark.parametrize(
    ("q_len", "heads", "options", "num_partitions"),
    [(13, 6, "all", None), (16, 6, "window", 3), (16, 64, "plain", 3)],
)
def test_query_tokens_in_runs(q_len, heads, options, num_partitions):
    check(real(q_len=q_len, heads=heads, kv_heads=1, options=OPTIONS[options]), num_partitions)


@pytest.mark.parametrize(("head_dim", "num_partitions"), paired((64, 80, 96, 112, 120, 128, 192, 256), (None, 1, 5)))
def test_many_rows(head_dim, num_partitions):
    """64, as 4 heads of 16 tokens."""
    check(real(q_len=16, heads=8, kv_heads=2, head_dim=head_dim), num_partitions)


@pytest.mark.parametrize("block_size", [8, 256])
def test_blocks_of_many_rows(block_size):
    check(real(q_len=16, heads=8, kv_heads=2, block_size=block_size, dtype=jnp.float16))


def test_blocks_that_a_window_has_passed_are_never_read():
    """As in test_prompts: three runs of 9 tokens, the first with two rows of padding."""
    lengths, q_len, window = (90, 602, 1034), 25, 50
    case = real(lengths=lengths, q_len=q_len, heads=5, kv_heads=1, options={"sliding_window": window})
    tables = np.asarray(case.block_tables).copy()
    for row, length in zip(tables, lengths, strict=True):
        row[: (length - q_len - window + 1) // 16] = -5
    call = make_call(case.replace(block_tables=jnp.asarray(tables)))
    out, lse = run(by_decode(call, _device.gpu()), call)
    assert_within_budget(case, out)
    assert_lse(case, lse)


PROMPTS = {
    "fresh": dict(lengths=(1024,), q_len=1024),
    "after a history": dict(lengths=(800, 800), q_len=300),
    "ragged": dict(lengths=(0, 7, 300, 301, 1111, 2048), q_len=300),
}


@pytest.mark.parametrize(("prompts", "dtype"), paired(PROMPTS, (BF16, jnp.float16)))
def test_prompts(prompts, dtype):
    check(real(**PROMPTS[prompts], heads=32, kv_heads=8, head_dim=128, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (40, 1)])
def test_prompts_by_group(heads, kv_heads):
    check(real(**PROMPTS["ragged"], heads=heads, kv_heads=kv_heads, head_dim=128))


@pytest.mark.parametrize("head_dim", [80, 120, 256])
def test_prompts_by_head_dim(head_dim):
    check(real(**PROMPTS["after a history"], heads=8, kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize(("options", "prompts"), [(dict(sliding_window=100), "fresh"), (OPTIONS["all"], "ragged")])
def test_prompts_with_options(prompts, options):
    check(real(**PROMPTS[prompts], head_dim=128, options=options))


@pytest.mark.parametrize(
    ("cache_dtype", "scale_shape", "head_dim"),
    [(jnp.float8_e4m3fn, "token_head", 64), (jnp.int8, "head", 256)],
)
def test_prompts_on_8bit_caches(cache_dtype, scale_shape, head_dim):
    shape = dict(heads=8, kv_heads=2, head_dim=head_dim, options=OPTIONS["window"])
    check(real(**PROMPTS["ragged"], **shape, cache_dtype=cache_dtype, scale_shape=scale_shape))


def test_prompts_go_through_the_kernels_by_default_and_their_gradients_through_xla():
    case = real(**PROMPTS["after a history"], head_dim=128)
    out = jax.jit(paged_attention)(*case.arrays)
    assert (out == attend(case, None)[0]).all()

    def loss(q, implementation):
        out = paged_attention(q, *case.arrays[1:], implementation=implementation)
        return out.astype(jnp.float32).sum()

    ours, theirs = (jax.jit(jax.grad(loss), static_argnums=1)(case.q, name) for name in (None, "xla"))
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=1e-2)


@pytest.mark.parametrize("q_len", [1, 17])
def test_as_many_runs_as_a_launch_takes(q_len):
    """The slowest axis of the grid is full. Too many sequences for the builder of cases: they share blocks freely."""
    num_runs = 1 if q_len == 1 else 2  # of at most 64 rows
    seqs, pool = MOST_SEQS // num_runs, (1000, 16, 1, 72)  # no head of the prefill kernel
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (seqs, q_len, 4, 72), BF16)
    k, v = (jax.random.normal(key, pool, BF16) for key in keys[1:3])
    tables = jax.random.randint(keys[3], (seqs, 3), 0, 1000, jnp.int32)
    lengths = jax.random.randint(keys[4], (seqs,), 0, 49, jnp.int32).at[-1].set(48)
    out = paged_attention(q, k, v, tables, lengths, implementation="mosaic_gpu").astype(jnp.float32)
    some = jnp.arange((seqs - 1) % 61, seqs, 61)  # the last among them; all would take gigabytes of "xla"
    expected = paged_attention(q[some], k, v, tables[some], lengths[some], implementation="xla").astype(jnp.float32)
    assert jnp.allclose(out[some], expected, rtol=2e-2, atol=2e-2)
    assert not jnp.allclose(out[-1], out[-2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fault", ["values replaced by keys", "history left out", "runs rolled"])
def test_a_wrong_prompt_is_noticed(fault):
    case = real(**PROMPTS["after a history"], head_dim=128)
    wrong = {
        "values replaced by keys": case.replace(v_cache=case.k_cache),
        "history left out": case.replace(lengths=case.lengths - 500),
        "runs rolled": case.replace(q=jnp.roll(case.q, 10, axis=1)),
    }[fault]
    assert within_budget(case, attend(wrong, None)[0]).mean() < 0.1


EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)


@pytest.mark.parametrize("scale_shape", [None, "tensor", "head", "token_head"])
@pytest.mark.parametrize(
    ("cache_dtype", "name", "num_partitions"), paired(EIGHT_BITS, ("plain", "all", "all"), (1, 5, 1))
)
def test_8bit_caches(cache_dtype, scale_shape, name, num_partitions):
    case = real(head_dim=128, cache_dtype=cache_dtype, scale_shape=scale_shape, options=OPTIONS[name])
    check(case, num_partitions)


@pytest.mark.parametrize(
    ("head_dim", "cache_dtype", "num_partitions"),
    paired((32, 64, 80, 96, 112, 128, 160, 192, 256), EIGHT_BITS, (None, 4))
    + paired((64, 128), EIGHT_BITS[::-1], (4,)),
)
def test_8bit_heads(head_dim, cache_dtype, num_partitions):
    check(real(head_dim=head_dim, cache_dtype=cache_dtype, scale_shape="token_head"), num_partitions)


GROUPS_OF_8_BITS = (5, 1), (24, 2), (32, 8), (64, 2), (64, 1)


@pytest.mark.parametrize(("block_size", "group"), paired((8, 32, 64, 128, 256), GROUPS_OF_8_BITS))
def test_8bit_blocks_and_groups(block_size, group):
    shape = dict(block_size=block_size, heads=group[0], kv_heads=group[1], head_dim=128)
    check(real(**shape, cache_dtype=jnp.float8_e4m3fn, scale_shape="token_head"), 2)


@pytest.mark.parametrize(("block_size", "group"), paired((8, 64, 256), GROUPS_OF_8_BITS[1:4]))
def test_8bit_blocks_and_groups_with_a_scale_a_head(block_size, group):
    shape = dict(block_size=block_size, heads=group[0], kv_heads=group[1], head_dim=128)
    check(real(**shape, cache_dtype=jnp.int8, scale_shape="head"))


def test_options_on_8bit_caches_with_partitions():
    shape = dict(options=OPTIONS["all"], head_dim=128, scale_shape="token_head")
    check(real(cache_dtype=jnp.float8_e4m3fn, **shape), 8)
    check(real(cache_dtype=jnp.int8, dtype=jnp.float16, q_len=4, **shape), 3)


@pytest.mark.parametrize("fault", ["k_scale left out", "scales rolled", "values replaced by keys"])
def test_a_wrong_8bit_result_is_noticed(fault):
    case = real(lengths=(700, 1000), head_dim=128, cache_dtype=jnp.int8, scale_shape="token_head")
    case = case.replace(options=case.options | {"k_scale": case.options["k_scale"] * 5.0})
    wrong = {
        "k_scale left out": case.replace(options=case.options | {"k_scale": jnp.float32(1.0)}),
        "scales rolled": case.replace(options=case.options | {"v_scale": jnp.roll(case.options["v_scale"], 1, axis=1)}),
        "values replaced by keys": case.replace(v_cache=case.k_cache),
    }[fault]
    assert not within_budget(case, attend(wrong, 2)[0]).all()


def test_many_partitions():
    check(make_case(lengths=(64 * 140, 64), max_blocks=64 * 10, heads=2, kv_heads=1, dtype=BF16), 140)


def planned(case: Case) -> PartitionPlan:
    a = make_call(case)
    at_once = partition_plan.programs_at_once(_device.gpu().num_sms, a.kv_heads)
    return partition_plan.default(a.lengths, a.options.sliding_window, q_len=a.q.shape[1], at_once=at_once)


@pytest.mark.parametrize(
    ("head_dim", "name"), [(64, "all"), (72, "window"), (128, "plain"), (128, "all"), (256, "plain")]
)
def test_plans(head_dim, name):
    case = real(head_dim=head_dim, options=OPTIONS[name])
    check(case, planned(case))


@pytest.mark.parametrize(("heads", "kv_heads", "q_len"), [(32, 8, None), (32, 8, 4), (64, 1, None), (24, 2, 5)])
def test_plans_for_rows(heads, kv_heads, q_len):
    case = real(heads=heads, kv_heads=kv_heads, q_len=q_len, head_dim=128)
    check(case, planned(case))


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS)
def test_plans_for_8bit_caches(cache_dtype):
    case = real(cache_dtype=cache_dtype, scale_shape="token_head", head_dim=128)
    check(case, planned(case))


def test_one_sequence_much_longer_than_the_others():
    """By default it is split: the pool could not fill tables for all."""
    lengths = (3, 0, 40_000, 64, 1000, 17)
    case = make_case(lengths=lengths, max_blocks=2500, heads=8, kv_heads=2, head_dim=128, dtype=BF16)
    assert partitions_per_seq(planned(case)).tolist() == [1, 1, 79, 1, 2, 1]
    a = make_call(case)
    choice = choose(a, _device.gpu())
    assert choice.config.at_once is not None
    out = np.asarray(run(choice, a)[0][:, 0], np.float32)
    assert (out == check(case, planned(case))).all()
    assert (out != check(case, 1)).any()


@pytest.mark.parametrize(("q_len", "num_partitions"), [(None, 4), (16, 1)])
def test_batch_neighbours_change_no_bit(num_partitions, q_len):
    case = real(head_dim=128, q_len=q_len, heads=12, kv_heads=4)
    whole = check(case, num_partitions)
    alone = dataclasses.replace(case, q=case.q[5:6], block_tables=case.block_tables[5:6], lengths=case.lengths[5:6])
    wider = dataclasses.replace(alone, block_tables=jnp.pad(alone.block_tables, ((0, 0), (0, 3000))))
    for one in (alone, wider):
        out, _ = attend(one, num_partitions)
        assert (np.asarray(out, np.float32) == whole[5:6]).all()


def test_a_wider_table_changes_no_bit():
    """A table of one tile is compiled for one, without keys multiplied ahead."""
    case = make_case(lengths=(60, 3), max_blocks=4, heads=32, kv_heads=8, head_dim=128, dtype=BF16)
    wider = dataclasses.replace(case, block_tables=jnp.pad(case.block_tables, ((0, 0), (0, 400))))
    assert (np.asarray(attend(wider, 1)[0], np.float32) == check(case, 1)).all()


@pytest.mark.parametrize("seed", range(4))  # `benchmarks/soak/random_cases.py` has as many as one likes
def test_random(seed):
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([8, 16, 32, 64, 128]))
    lengths = tuple(int(n) for n in rng.integers(0, 1500, 6))
    heads, kv_heads = [(8, 2), (6, 6), (21, 3), (16, 1)][rng.integers(4)]
    case = make_case(
        seed,
        lengths=lengths,
        block_size=block_size,
        max_blocks=-(-1500 // block_size) + int(rng.integers(5)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 96, 128, 192])),
        dtype=[BF16, jnp.float16][rng.integers(2)],
        options={"sliding_window": int(rng.integers(1, 1500))} if rng.integers(2) else {},
    )
    check(case, int(rng.integers(1, 9)))


def test_a_pool_of_more_than_2_to_the_31_numbers():
    small = real(head_dim=128, kv_heads=8, heads=32)
    num_blocks = 2**31 // (16 * 8 * 128) + 1000
    shift = num_blocks - small.k_cache.shape[0]  # the blocks in use stand at the very end

    def grow(cache):
        return jnp.full((num_blocks, *cache.shape[1:]), jnp.nan, cache.dtype).at[shift:].set(cache)

    tables = jnp.where(small.block_tables < small.k_cache.shape[0], small.block_tables + shift, small.block_tables)
    large = small.replace(k_cache=grow(small.k_cache), v_cache=grow(small.v_cache), block_tables=tables)
    for num_partitions in (1, 4):
        expected, _ = attend(small, num_partitions)
        out, _ = attend(large, num_partitions)
        assert (np.asarray(out, np.float32) == np.asarray(expected, np.float32)).all()
