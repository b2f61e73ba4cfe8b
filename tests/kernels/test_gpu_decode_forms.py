"""The decode kernel on a Hopper GPU, in every form: `pytest -m gpu`. Pools are poisoned, as in all cases.

tma        as on Hopper and above
cp_async   as below Hopper, but for what Mosaic makes of the rest
sm_80      cp_async, and Mosaic told that the GPU is an A100

What a Hopper GPU takes by default stands in `test_gpu.py`: tma for heads of a multiple of 64, cp_async for others.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _device, tree_mask
from jaxpaged._attention.run import run
from jaxpaged._by_kernel import StaticHints
from pallas_kernels.common import partition_plan
from tests.cases import OPTIONS, assert_lse, assert_within_budget, make_case, paired
from tests.kernels.interpret import by_decode, changed, make_call, partitions_per_seq
from tests.kernels.lowering import mosaic_for

pytestmark = pytest.mark.gpu

FORMS = ("tma", "cp_async", "sm_80")
NO_DEFAULT = ("cp_async", "sm_80")
LENGTHS = (0, 1, 15, 16, 17, 700, 1000, 2048)
BF16 = jnp.bfloat16


def check(case, form, num_partitions=None, plan=None, **changes):
    a = make_call(case)
    choice = by_decode(a, _device.gpu(), StaticHints(num_partitions=num_partitions))
    at_once = None if plan is None else plan.total_partitions
    choice = changed(choice, copies="tma" if form == "tma" else "cp_async", at_once=at_once, **changes)
    a = dataclasses.replace(a, plan=plan)
    with mosaic_for(8.0) if form == "sm_80" else contextlib.nullcontext():
        attend = jax.jit(lambda a: run(choice, a)).lower(a).compile()
    results = [(out, lse) if case.q.ndim == 4 else (out[:, 0], lse[:, 0]) for out, lse in (attend(a), attend(a))]
    assert_within_budget(case, results[0][0])
    assert_lse(case, results[0][1])
    for first, second in zip(*results, strict=True):
        assert (np.asarray(first, np.float32) == np.asarray(second, np.float32)).all()


def real(**shape):
    block_size = shape.get("block_size", 16)
    return make_case(**(dict(lengths=LENGTHS, max_blocks=2048 // block_size, dtype=BF16, head_dim=128) | shape))


HEAD_DIMS = 32, 40, 64, 72, 80, 96, 112, 120, 128, 168, 192, 256


@pytest.mark.parametrize(("form", "head_dim"), [("cp_async", n) for n in (64, 256)] + [("sm_80", n) for n in HEAD_DIMS])
def test_heads(form, head_dim):
    check(real(head_dim=head_dim), form)


@pytest.mark.parametrize(
    ("form", "block_size"), [("cp_async", 8), ("cp_async", 256)] + [("sm_80", n) for n in (8, 32, 64, 128, 256)]
)
def test_block_sizes(form, block_size):
    check(real(block_size=block_size, dtype=jnp.float16), form, 3)


GROUPS = (1, 1), (7, 1), (24, 2), (24, 1), (32, 8), (64, 4), (64, 2), (64, 1)


@pytest.mark.parametrize(("group", "form"), paired(GROUPS, ("sm_80", "sm_80", "cp_async")))
def test_groups(group, form):
    check(real(heads=group[0], kv_heads=group[1]), form, 1)


@pytest.mark.parametrize("form", FORMS)
def test_the_most_registers(form):
    check(real(heads=64, kv_heads=1, head_dim=256), form, 2)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", NO_DEFAULT)
def test_options(form, name):
    check(real(options=OPTIONS[name]), form, 2)


@pytest.mark.parametrize(("q_len", "heads", "options"), [(4, 6, "all"), (16, 8, "plain"), (13, 6, "all")])
@pytest.mark.parametrize("form", NO_DEFAULT)
def test_several_query_tokens(form, q_len, heads, options):
    """The last one in runs."""
    check(real(q_len=q_len, heads=heads, kv_heads=1 if q_len == 13 else 2, options=OPTIONS[options]), form)


A_PLAN = (
    dict(options=OPTIONS["all"]),
    dict(heads=64, kv_heads=1, head_dim=80, options={"sinks": np.linspace(-2.0, 4.0, 64, dtype=np.float32)}),
    dict(cache_dtype=jnp.int8, scale_shape="token_head", q_len=3),
)


@pytest.mark.parametrize(
    ("form", "shape"), [*paired(FORMS, A_PLAN[:1]), *paired(("sm_80", "cp_async"), A_PLAN[1:]), ("sm_80", A_PLAN[2])]
)
def test_a_plan(form, shape):
    plan = partition_plan.make(8 * jnp.asarray(LENGTHS), None, q_len=1, total_partitions=80)
    assert partitions_per_seq(plan).tolist() == [1, 1, 1, 1, 1, 11, 16, 32]
    check(real(**shape), form, 1, plan)


@pytest.mark.parametrize(("q_len", "heads"), [(8, 4), (40, 1)])
@pytest.mark.parametrize("form", NO_DEFAULT)
def test_trees(form, q_len, heads):
    case = real(q_len=q_len, heads=heads, kv_heads=1, lengths=(0, 40, 700, 1000))
    rng = np.random.default_rng(q_len)
    parents = np.stack([rng.integers(-1, np.arange(q_len)) for _ in range(4)])
    trees = {"tree_mask": tree_mask(jnp.asarray(parents, jnp.int32))}
    check(case.replace(options=case.options | trees), form, 2)


@pytest.mark.parametrize(("form", "num_stages"), [("tma", 1), ("tma", 2), ("tma", 4), ("cp_async", 4), ("sm_80", 1)])
def test_stages(form, num_stages):
    check(real(lengths=(2048,) * 40, kv_heads=2), form, 1, num_stages=num_stages)


@pytest.mark.parametrize("cache_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
@pytest.mark.parametrize(
    ("form", "scale_shape"), [("cp_async", "token_head"), ("sm_80", "head"), ("sm_80", "token_head")]
)
def test_8bit_caches(form, cache_dtype, scale_shape):
    check(real(cache_dtype=cache_dtype, scale_shape=scale_shape, options=OPTIONS["window"]), form, 2)


SHAPES_OF_8_BITS = (
    dict(head_dim=64, block_size=8),
    dict(head_dim=80, block_size=64),
    dict(head_dim=256, block_size=256),
    dict(heads=64, kv_heads=1),
    dict(dtype=jnp.float16, q_len=4),
)


@pytest.mark.parametrize(
    ("shape", "form"), paired(SHAPES_OF_8_BITS, ("sm_80",)) + paired(SHAPES_OF_8_BITS[2:4], ("cp_async",))
)
def test_shapes_of_8bit_caches(shape, form):
    check(real(**shape, cache_dtype=jnp.int8, scale_shape="token_head"), form)


LATENT = dict(kv_heads=1, head_dim=576, value_dim=512, is_latent=True)


WIDTHS = (
    LATENT | dict(heads=16, options={"sliding_window": 300}),
    LATENT | dict(heads=128),
    LATENT | dict(heads=20, cache_dtype=jnp.float8_e5m2, scale_shape="token_head"),
    dict(heads=8, kv_heads=2, head_dim=192, value_dim=128),
    LATENT | dict(heads=16, head_dim=640, cache_dtype=jnp.int8, scale_shape="token_head"),  # rotary numbers in two
)


@pytest.mark.parametrize(
    ("shape", "form"), [*paired(WIDTHS, ("tma",)), *paired(WIDTHS, ("sm_80",)), *paired(WIDTHS[::3], ("cp_async",))]
)
def test_latents_and_other_widths(shape, form):
    check(real(lengths=(0, 1, 63, 64, 65, 700, 333), block_size=64, max_blocks=11, **shape), form)
