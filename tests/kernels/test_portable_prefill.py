"""The portable prefill kernel: in interpret mode at toy sizes, and lowered for six GPUs."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.interface import Shapes
from pallas_kernels.prefill.portable import config as portable_config
from tests.attention.conformance import Conformance
from tests.cases import assert_lse, assert_within_budget, make_case
from tests.kernels import prefill
from tests.kernels.interpret import races_found
from tests.kernels.lowering import OPTIONS as OPTION_NAMES
from tests.kernels.lowering import mosaic_for, traced_prefill

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# None of a sequence, a prompt, and the last of a long one.
LENGTHS, COUNTS = (20, 5, 150), (0, 5, 1)


def ragged_case(**shape):
    return make_case(
        **(dict(lengths=LENGTHS, max_blocks=10, q_len=max(COUNTS), heads=6, kv_heads=2, dtype=BF16) | shape)
    )


class TestPortablePrefill(Conformance):
    """None of a sequence, a prompt, and the last token of a long one."""

    case = staticmethod(ragged_case)
    long_case = staticmethod(ragged_case)  # three tiles at most, so that some parts have none
    options = "plain", "all"
    options_of_partitions = "sinks", "all"
    options_of_8_bits = ("all",)
    q_lens = ()
    scaled_caches = (jnp.int8, "token_head"), (jnp.float8_e5m2, "head")
    dtypes = (jnp.float16,)
    head_dims = 80, 256
    block_sizes = 8, 64, 128
    groups = (8, 1), (64, 1)
    numbers_of_partitions = (2,)

    def attend(self, case, num_partitions=1):
        lengths = np.asarray(case.lengths)
        counts = tuple(np.minimum(lengths, COUNTS if len(lengths) == len(COUNTS) else max(COUNTS)).tolist())
        how = dict(num_sms=2, interpret=INTERPRET, num_parts=num_partitions, portable_for=8.9)
        out, lse = prefill.attend(case, counts, **how)
        assert not races_found()
        tokens = sum(counts)
        assert not np.asarray(out[tokens:]).any()
        assert (np.asarray(lse[tokens:]) == -np.inf).all()
        return prefill.unpacked(case, counts, out, lse)


# Of every GPU that the kernel is for: compute capability, and tokens and stages of a tile of head_dim 128.
GPUS = {8.0: (64, 1), 8.6: (32, 1), 8.9: (32, 1), 9.0: (64, 2), 10.0: (64, 2), 12.0: (32, 1)}
SHAPES = {
    "plain": dict(),
    "blocks of 8": dict(block_size=8, head_dim=32, dtype=jnp.float16),
    "blocks of 256": dict(block_size=256, head_dim=256),
    "all options": dict(group=5, head_dim=96, options=OPTION_NAMES),
    "parts": dict(group=16, num_parts=3, causal=False),
    "int8": dict(cache_dtype=jnp.int8, scales=("head", "token_head"), head_dim=80),
    "float8_e5m2": dict(cache_dtype=jnp.float8_e5m2, scales=("token_head", "token_head"), block_size=8, head_dim=256),
}


@pytest.mark.parametrize(
    ("name", "compute_capability"),
    [("plain", gpu) for gpu in GPUS] + [(name, gpu) for name in SHAPES if name != "plain" for gpu in (8.0, 8.6)],
)
def test_lowers(name, compute_capability):
    trace = traced_prefill(**SHAPES[name], portable_for=compute_capability)
    with mosaic_for(compute_capability):
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_two_programs_share_the_memory_of_an_sm_if_the_head_is_not_wide():
    dtypes = dict(q_dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16)
    shapes = Shapes(group=4, head_dim=128, value_dim=128, block_size=16, **dtypes)
    for gpu, tile in GPUS.items():
        config = portable_config.default_config(shapes, compute_capability=gpu)
        assert (config.tile_tokens, config.num_stages) == tile
        smem = portable_config.smem_bytes(config.rows, *tile, width=128, itemsize=2)
        assert smem <= portable_config.program_smem(gpu, 2)


def test_a_part_without_a_tile_sees_nothing():
    """Its item has two tiles, both of them whole, for three parts."""
    case = ragged_case(lengths=(128,), max_blocks=8, q_len=1, head_dim=32)
    out, lse = prefill.attend(case, (1,), num_sms=2, interpret=INTERPRET, num_parts=3, portable_for=8.0)
    results = prefill.unpacked(case, (1,), out, lse)
    assert_within_budget(case, results[0])
    assert_lse(case, results[1])
