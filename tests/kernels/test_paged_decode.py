"""The decode kernel in interpret mode: options and shapes, and no races."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged._attention import xla
from jaxpaged._attention.run import run
from jaxpaged._by_kernel import Choice, StaticHints
from jaxpaged._device import Gpu
from jaxpaged.debug import explain
from pallas_kernels.common import sizes
from tests.attention.conformance import Conformance
from tests.cases import OPTIONS, assert_within_budget, make_case, within_budget
from tests.kernels.interpret import H100, attend, by_decode, check, choose, make_call, races_found

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
SMALL = dict(lengths=(0, 1, 70), kv_heads=1, dtype=BF16)  # what equals it in shapes and options is compiled once


class TestDecode(Conformance):
    """Its heads, blocks and groups stand below, its caches in `test_8bit_caches`: in turns, not each by itself."""

    case = staticmethod(functools.partial(make_case, **SMALL))
    long_case = staticmethod(functools.partial(make_case, **SMALL | dict(lengths=(0, 1, 300), max_blocks=19)))
    options_of_partitions = "plain", "sinks", "all"
    options_of_8_bits = "plain", "window", "window of one", "soft cap", "alibi", "sinks", "all"
    q_lens = ()
    dtypes = (jnp.float16,)
    head_dims = block_sizes = groups = scaled_caches = ()
    numbers_of_partitions = 3, 4

    def attend(self, case, num_partitions=1):
        out, lse = attend(case, num_partitions=num_partitions)
        assert not races_found()
        return out, lse


def test_an_infinite_soft_cap_is_none():
    case = make_case(**SMALL)
    capped = case.replace(options={"logits_soft_cap": jnp.inf})
    assert_within_budget(case, attend(capped)[0])


@pytest.mark.parametrize(  # 3 heads: 6, 15 and 48 rows
    ("q_len", "num_partitions", "options"), [(2, 1, "window"), (5, 2, "window of all"), (16, 1, "window")]
)
def test_several_query_tokens(q_len, num_partitions, options):
    case = make_case(
        lengths=(3, 66, 130), max_blocks=9, q_len=q_len, kv_heads=1, heads=3, dtype=BF16, options=OPTIONS[options]
    )
    check(case, num_partitions=num_partitions)


@pytest.mark.parametrize(  # 6 heads: more than 64 rows, in 2 runs of 7 or 8 tokens
    ("q_len", "num_partitions", "options"), [(13, 1, "all"), (16, 2, "window of one"), (16, 1, "sinks")]
)
def test_query_tokens_in_runs(q_len, num_partitions, options):
    case = make_case(lengths=(3, 66, 130), max_blocks=9, q_len=q_len, kv_heads=1, dtype=BF16, options=OPTIONS[options])
    check(case, num_partitions=num_partitions)


def test_the_most_rows():
    """64 heads of 16 tokens, in 16 runs."""
    check(make_case(lengths=(9, 70), q_len=16, heads=64, kv_heads=1, dtype=BF16))


@pytest.mark.parametrize(("head_dim", "num_partitions"), [(40, 1), (72, 1), (120, 1), (120, 2)])
def test_heads_that_are_no_multiple_of_16(head_dim, num_partitions):
    case = make_case(lengths=(1, 130), max_blocks=9, kv_heads=2, head_dim=head_dim, dtype=BF16, options=OPTIONS["all"])
    check(case, num_partitions=num_partitions, zero_fill=True)


@pytest.mark.parametrize(  # none sets anything of another
    ("head_dim", "block_size", "heads", "kv_heads"),
    [
        (32, 256, 3, 3),
        (80, 8, 5, 1),
        (96, 64, 14, 2),
        (112, 32, 24, 2),
        (128, 128, 32, 1),
        (192, 16, 6, 1),
        (256, 384, 6, 2),
    ],
)
def test_heads_blocks_and_groups(head_dim, block_size, heads, kv_heads):
    sizes = dict(block_size=block_size, max_blocks=-(-70 // block_size) + 1, heads=heads, kv_heads=kv_heads)
    check(make_case(lengths=(1, block_size, 70), head_dim=head_dim, dtype=BF16, **sizes), zero_fill=head_dim % 64 != 0)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_several_query_tokens_and_stages(num_stages):
    case = make_case(lengths=(3, 250), max_blocks=16, q_len=5, kv_heads=1, heads=3, dtype=BF16)
    check(case.replace(options=OPTIONS["window of all"]), num_stages=num_stages)


def test_the_ring_goes_round():
    check(make_case(lengths=(64 * 5,), max_blocks=20, heads=2, kv_heads=1, dtype=BF16), num_stages=2)


def test_more_partitions_than_are_merged_at_once():
    case = make_case(lengths=(64 * 10,), block_size=64, max_blocks=10, heads=1, kv_heads=1, dtype=BF16)
    check(case, num_partitions=10)


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_an_infinite_value_stays_one(num_partitions):
    """Also where a partial is read twice, the second time without weight."""
    case = make_case(lengths=(64 * 3,), block_size=64, max_blocks=3, heads=1, kv_heads=1, dtype=BF16)
    block, slot = case.block_tables[0, 2], 5
    case = case.replace(v_cache=case.v_cache.at[block, slot].set(jnp.inf))
    out, _ = attend(case, num_partitions=num_partitions)
    assert (np.asarray(out, np.float32) == np.inf).all()


def test_traced_scalars_and_a_batch_neighbour():
    """Scale, window and cap traced; with the partitions fixed, who else is in the batch changes no bit."""
    case = make_case(lengths=(70, 17), kv_heads=1, dtype=BF16, options=OPTIONS["all"])
    whole = check(case, num_partitions=2)
    alone = case.replace(q=case.q[:1], block_tables=case.block_tables[:1], lengths=case.lengths[:1])
    assert (check(alone, num_partitions=2) == whole[:1]).all()


def test_table_width_changes_no_bit():
    case = make_case(lengths=(70, 17), max_blocks=5, kv_heads=1, dtype=BF16)
    wide = case.replace(block_tables=jnp.pad(case.block_tables, ((0, 0), (0, 50)), constant_values=2**31 - 1))
    assert (check(case, num_partitions=2) == check(wide, num_partitions=2)).all()


def test_a_dropped_partition_is_noticed(monkeypatch):
    case = make_case(lengths=(200,), max_blocks=13, kv_heads=1, dtype=BF16)
    real = sizes.count_tiles
    monkeypatch.setattr(
        sizes,
        "count_tiles",
        lambda first, end, count, partition: jnp.where(partition == 1, 0, real(first, end, count, partition)),
    )
    jax.clear_caches()
    assert not within_budget(case, attend(case, num_partitions=4)[0]).all()
    jax.clear_caches()


@pytest.mark.parametrize(
    "shape", [{}, dict(q_len=16, heads=64, kv_heads=1), dict(q_len=100), dict(heads=65, kv_heads=1)]
)
def test_what_is_taken(shape):
    assert isinstance(choose(make_call(make_case(dtype=BF16, **shape)), H100), Choice)


def test_a_gpu_without_kernels_says_so():
    a = make_call(make_case(dtype=BF16))
    assert "compute_capability=7.5" in choose(a, Gpu(68, 7.5)).message
    if jax.default_backend() != "gpu":
        assert "need an NVIDIA GPU; got device.platform='cpu'" in explain(*make_case(dtype=BF16).arrays).reason


def test_vmap_gradient_and_export():
    cases = [make_case(seed, lengths=(3, 50), max_blocks=4, dtype=BF16, options=OPTIONS["all"]) for seed in range(2)]
    choice = by_decode(make_call(cases[0]), H100, StaticHints(num_partitions=2))
    unchecked = dataclasses.replace(choice, interpret=plgpu.InterpretGPUParams())  # see `attend`
    interpreted, for_gpu = functools.partial(run, unchecked), functools.partial(run, choice)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(make_call, cases))
    out, _ = jax.vmap(interpreted)(stacked)
    for case, its in zip(cases, out, strict=True):
        assert_within_budget(case, its[:, 0])

    # Differentiated, its results are the same, and XLA computes the backward pass.
    def loss(attend, q):
        out, _ = attend(dataclasses.replace(make_call(cases[0]), q=q))
        return out.astype(jnp.float32).sum(), out

    q = make_call(cases[0]).q
    (_, values), ours = jax.value_and_grad(functools.partial(loss, interpreted), has_aux=True)(q)
    assert (values == out[0]).all()
    theirs, _ = jax.grad(functools.partial(loss, functools.partial(xla.attend, num_partitions=1)), has_aux=True)(q)
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0.02, atol=0.01)

    jax.jit(jax.vmap(for_gpu)).trace(stacked).lower(lowering_platforms=("cuda",))
    exported = export.export(jax.jit(for_gpu), platforms=["cuda"])(*[make_call(cases[0])])
    assert exported.platforms == ("cuda",)
