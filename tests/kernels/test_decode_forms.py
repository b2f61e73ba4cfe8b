"""The decode kernel lowers for five GPUs on a machine without one: catches what interpret mode alone would let pass."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from jaxpaged import tree_mask
from jaxpaged.debug import explain
from pallas_kernels.common import partition_plan
from tests.cases import OPTIONS, make_case
from tests.kernels.interpret import A100, choose, make_call
from tests.kernels.lowering import OPTIONS as ALL_OPTIONS
from tests.kernels.lowering import mosaic_for, traced_decode

pytestmark = pytest.mark.slow

BF16, F16, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2


def test_on_other_gpus_than_hopper():
    make = functools.partial(make_case, lengths=(0, 1, 70), kv_heads=1, dtype=BF16)
    case = make(options=OPTIONS["all"])
    how = dict(case.options, gpu="A100")
    assert explain(*case.arrays, **how).kernel == "paged_decode"
    assert explain(*case.arrays, **how, query_starts=jnp.asarray([0, 0, 1, 3], jnp.int32)).kernel == "portable_prefill"
    plan = partition_plan.make(case.lengths, None, q_len=1, total_partitions=5)
    planned = choose(dataclasses.replace(make_call(case), plan=plan), A100)
    assert (planned.kernel.name, planned.config.partitions) == ("paged_decode", "plan")
    tree = tree_mask(jnp.full((3, 2), -1, jnp.int32))
    assert explain(*make(q_len=2).arrays, gpu="A100", tree_mask=tree).kernel == "paged_decode"


# Of every GPU that the kernel is for: compute capability, and how it copies where head_dim is a multiple of 64.
GPUS = {8.0: "cp_async", 8.9: "cp_async", 9.0: "tma", 10.0: "tma", 12.0: "tma"}
SHAPES = {
    "plain": dict(),
    "blocks of 8": dict(block_size=8, head_dim=32),
    "blocks of 256": dict(block_size=256, head_dim=256, dtype=F16),
    "64 rows": dict(group=16, q_len=4, head_dim=96, num_partitions=3),
    "a plan": dict(total_partitions=5, options=("sinks",)),
    "24 rows": dict(group=24, head_dim=120, options=ALL_OPTIONS),
    "a tree": dict(q_len=4, options=("tree_bits", "logits_soft_cap")),
    "int8": dict(cache_dtype=jnp.int8, scales=("head", "token_head"), head_dim=80),
    "float8_e5m2": dict(cache_dtype=E5M2, scales=("token_head", "token_head"), block_size=8, group=64),
}


@pytest.mark.parametrize(
    ("name", "compute_capability"),
    [("plain", gpu) for gpu in GPUS]
    + [(name, 8.0) for name in SHAPES if name != "plain"]
    + [(name, 9.0) for name, shape in SHAPES.items() if shape.get("head_dim", 128) % 64 == 0 and name != "plain"]
    + [("blocks of 256", 12.0), ("64 rows", 12.0)],  # whose shared memory is smaller
)
def test_lowers(name, compute_capability):
    config = lower(**SHAPES[name], compute_capability=compute_capability)
    head_dim = SHAPES[name].get("head_dim", 128)
    assert config.copies == (GPUS[compute_capability] if head_dim % 64 == 0 else "cp_async")


def lower(compute_capability=9.0, **shape):
    """Returns the configuration."""
    trace, config = traced_decode(**shape, compute_capability=compute_capability)
    with mosaic_for(compute_capability):
        assert trace.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1
    return config


# A block's size sets the copies of a tile, head_dim its products: all of both, and the extremes of both meet.
HEADS_OF_BLOCKS = {8: (32, 192, 256), 16: (64, 112), 32: (96, 120), 64: (80,), 128: (128,), 256: (32, 256)}


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(head_dim, size) for size, heads in HEADS_OF_BLOCKS.items() for head_dim in heads]
)
def test_heads_and_blocks(head_dim, block_size):
    lower(head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize(
    ("group", "q_len", "dtype"),
    [(group, q_len, BF16) for group, q_len in ((1, 1), (3, 1), (33, 1), (64, 1), (7, 9), (1, 33))]
    + [(64, 1, F16), (4, 16, F16)],
)
def test_groups_and_dtypes(group, q_len, dtype):
    lower(group=group, q_len=q_len, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "num_partitions"), [(64, 8), (120, 16), (256, 3)])
def test_partitions(head_dim, num_partitions):
    lower(head_dim=head_dim, num_partitions=num_partitions)


@pytest.mark.parametrize("options", [("sinks",), ("tree_bits",), ALL_OPTIONS])
def test_a_plan(options):
    lower(total_partitions=5, options=options)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 168])
def test_heads_of_other_models(head_dim):
    lower(head_dim=head_dim)


@pytest.mark.parametrize("option", [*ALL_OPTIONS, "tree_bits"])
def test_each_option_alone(option):
    lower(options=(option,))
