"""The decode kernel on latents, whose values are columns of their keys, and on values of another width than keys: in
interpret mode at toy sizes, without races, and lowered for five GPUs."""

import functools

import jax.numpy as jnp
import pytest

from jaxpaged._by_kernel import StaticHints
from jaxpaged.debug import explain
from tests.cases import OPTIONS, make_case
from tests.kernels.interpret import (
    H100,
    attend,
    by_decode,
    changed,
    check,
    check_mistakes_of_latents,
    check_queries_of_a_history,
    make_call,
    run_without_races,
)
from tests.kernels.lowering import mosaic_for, traced_decode

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
latent_case = functools.partial(make_case, kv_heads=1, head_dim=192, value_dim=128, is_latent=True, dtype=BF16)


@pytest.mark.parametrize("name", ["scale", "all"])
def test_a_latent(name):
    case = latent_case(lengths=(0, 1, 64, 200), max_blocks=13, options=OPTIONS[name])
    assert (check(case) == check(case)).all()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_of_one_ring(num_stages):
    check(latent_case(lengths=(3, 250), max_blocks=16, q_len=3, heads=3), num_stages=num_stages)


@pytest.mark.parametrize("num_partitions", [2, 7])
def test_partitions_that_xla_merges(num_partitions):
    """More than there are tiles too: those write that they saw nothing."""
    case = latent_case(lengths=(0, 1, 250), max_blocks=16, options=OPTIONS["sinks"])
    assert by_decode(make_call(case), H100, StaticHints(num_partitions=num_partitions)).config.merged_by == "xla"
    check(case, num_partitions=num_partitions)


def test_heads_in_parts():
    """Of ALiBi and sinks each part has its own."""
    check(latent_case(lengths=(70, 1), options=OPTIONS["all"]), head_parts=3)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(jnp.float8_e4m3fn, "token_head"), (jnp.int8, "head"), (jnp.float8_e5m2, "tensor")]
)
def test_8_bits(dtype, scale):
    check(latent_case(lengths=(0, 70), cache_dtype=dtype, scale_shape=scale, options=OPTIONS["window"]))


def test_queries_of_a_history():
    """In runs whose tokens are heads."""

    def compute(call):
        choice = by_decode(call, H100)
        assert choice.config.run == 2
        return run_without_races(changed(choice, copies="tma", mapped_stages=None), call)

    check_queries_of_a_history(latent_case(lengths=(70, 3), q_len=5, heads=24), compute)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 128)])
def test_values_of_another_width(head_dim, value_dim):
    case = make_case(lengths=(0, 70), kv_heads=2, head_dim=head_dim, value_dim=value_dim, dtype=BF16)
    check(case)


def test_mistakes_are_noticed():
    check_mistakes_of_latents(latent_case(lengths=(27, 100), max_blocks=7), attend)


DEEPSEEK = dict(kv_heads=1, head_dim=576, value_dim=512, is_latent=True, block_size=64)
SHAPES = {
    "16 heads": dict(group=16),
    "32 heads": dict(group=32),
    "128 heads, partitions": dict(group=128, num_partitions=3),
    "float8": dict(group=16, cache_dtype=jnp.float8_e5m2, scales=("token_head", "token_head")),
    "int8, rotary numbers in two": dict(
        group=16, head_dim=640, cache_dtype=jnp.int8, scales=("token_head", "token_head")
    ),
    "other widths": dict(kv_heads=2, head_dim=192, value_dim=128, is_latent=False, group=4),
}


@pytest.mark.parametrize(
    ("name", "compute_capability"),
    [("16 heads", gpu) for gpu in (8.0, 8.9, 9.0, 10.0, 12.0)]
    + [("128 heads, partitions", gpu) for gpu in (8.9, 9.0)]
    + [("32 heads", 8.9), ("float8", 9.0), ("int8, rotary numbers in two", 8.0), ("other widths", 8.9)],
)
def test_lowers(name, compute_capability):
    trace, config = traced_decode(**DEEPSEEK | SHAPES[name], compute_capability=compute_capability)
    if name == "128 heads, partitions":
        assert config.head_parts == (4 if compute_capability == 9.0 else 8)
    with mosaic_for(compute_capability):
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_which_kernel():
    """On Hopper and where it is named, of any number of query tokens."""
    for case in (latent_case(lengths=(3,)), make_case(lengths=(3,), head_dim=192, value_dim=128, dtype=BF16)):
        assert explain(*case.arrays, **case.options, gpu="H100").kernel == "paged_decode"
    packed = latent_case(lengths=(3,), q_len=2)
    starts = jnp.asarray([0, 2], jnp.int32)
    options = dict(packed.options, gpu="H100")
    assert explain(packed.q[0], *packed.arrays[1:], **options, query_starts=starts).kernel == "paged_decode"
