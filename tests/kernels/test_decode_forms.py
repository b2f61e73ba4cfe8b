"""The decode kernel: in interpret mode at toy sizes, without races, and lowered for five GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged import tree_mask
from jaxpaged._attention.run import run
from jaxpaged._by_kernel import Choice
from jaxpaged.debug import explain
from pallas_kernels.common import partition_plan
from pallas_kernels.decode.config import KERNEL, Config
from tests.cases import OPTIONS, assert_lse, assert_within_budget, make_case, within_budget
from tests.kernels.interpret import A100, choose, make_call, races_found
from tests.kernels.lowering import OPTIONS as ALL_OPTIONS
from tests.kernels.lowering import mosaic_for, traced_decode

pytestmark = pytest.mark.slow

BF16, F16, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2


def make_choice(interpret, num_partitions=1, num_stages=2, plan=None):
    """For up to 64 query tokens of one head a KV head."""
    at_once = None if plan is None else plan.total_partitions
    config = Config(num_partitions, num_stages, "tma", run=64, at_once=at_once)
    return Choice(KERNEL, config, interpret=interpret)


def attend(case, *, num_partitions=1, num_stages=2, plan=None):
    # The detector does not know that programs count each other before they read what others wrote.
    interpret = plgpu.InterpretGPUParams(detect_races=plan is None and num_partitions == 1)
    call = dataclasses.replace(make_call(case), plan=plan)
    out, lse = run(make_choice(interpret, num_partitions, num_stages, plan), call)
    jax.block_until_ready(out)
    assert not races_found()
    return (out, lse) if case.q.ndim == 4 else (out[:, 0], lse[:, 0])


def check(case, **how):
    out, lse = attend(case, **how)
    assert_within_budget(case, out)
    assert_lse(case, lse)
    return np.asarray(out, np.float32)


def make_plan(lengths, total, *, q_len=1):
    return partition_plan.make(jnp.asarray(lengths, jnp.int32), None, q_len=q_len, total_partitions=total)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_plan(name):
    """Sequences that are whole, split, and empty; of 10 partitions of the longest the merge takes 8 and 2 at once."""
    lengths = 0, 1, 620, 70
    plan = make_plan((0, 1, 64 * 80, 64 * 16), 17)
    assert jnp.diff(plan.partition_starts).tolist() == [1, 1, 10, 2]
    check(make_case(lengths=lengths, max_blocks=39, kv_heads=1, dtype=BF16, options=OPTIONS[name]), plan=plan)


def test_a_plan_for_other_lengths_and_several_query_tokens():
    """Partitions without a tile, and a head of two times 64 columns."""
    shape = dict(lengths=(3, 150), max_blocks=10, q_len=5, kv_heads=1, head_dim=128, dtype=BF16)
    check(make_case(**shape, options=OPTIONS["sinks"]), plan=make_plan((64 * 40, 1), 7, q_len=5))


def test_a_plan_that_loses_a_partition_is_noticed():
    plan = make_plan((64 * 16, 3), 5)
    assert plan.partitions[1].tolist() == [0, 1, 2]
    shorter = dataclasses.replace(plan, partitions=plan.partitions.at[1, 1].set(2))  # now it is one left over
    case = make_case(lengths=(150, 3), max_blocks=10, kv_heads=1, dtype=BF16)
    out, _ = attend(case, plan=shorter)
    assert within_budget(case, out).reshape(2, -1).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_several_query_tokens_and_stages(num_stages):
    case = make_case(lengths=(3, 250), max_blocks=16, q_len=5, kv_heads=1, heads=3, dtype=BF16)
    check(case.replace(options=OPTIONS["window of all"]), num_stages=num_stages)


def test_on_other_gpus_than_hopper():
    make = functools.partial(make_case, lengths=(0, 1, 70), kv_heads=1, dtype=BF16)
    case = make(options=OPTIONS["all"])
    how = dict(case.options, gpu="A100")
    assert explain(*case.arrays, **how).kernel == "paged_decode"
    assert explain(*case.arrays, **how, query_starts=jnp.asarray([0, 0, 1, 3], jnp.int32)).kernel == "portable_prefill"
    plan = make_plan((3, 64), 5)
    planned = choose(dataclasses.replace(make_call(case), plan=plan), A100)
    assert planned.kernel == KERNEL
    assert planned.config.at_once is not None  # it follows the plan
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
    trace, config = traced_decode(**SHAPES[name], compute_capability=compute_capability)
    head_dim = SHAPES[name].get("head_dim", 128)
    assert config.copies == (GPUS[compute_capability] if head_dim % 64 == 0 else "cp_async")
    with mosaic_for(compute_capability):
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
