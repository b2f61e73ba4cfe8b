"""The prefill kernel: in interpret mode with race detection, lowered for Hopper, and how it is configured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged._by_kernel import NO_HINTS
from jaxpaged._device import Gpu
from pallas_kernels.common.interface import AttentionOptions, Call, Shapes
from pallas_kernels.prefill import config as prefill_config
from pallas_kernels.prefill.portable import config as portable_config
from pallas_kernels.prefill.work_list import make_work_list
from tests.attention.conformance import Conformance
from tests.cases import OPTIONS, make_case
from tests.kernels import prefill
from tests.kernels.interpret import races_found
from tests.kernels.lowering import traced_prefill

pytestmark = pytest.mark.slow

BF16, E4M3, INT8 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8
HEAD, TOKEN_HEAD = ("head", "head"), ("token_head", "token_head")
SHAPES = Shapes(group=4, head_dim=128, value_dim=128, block_size=16, q_dtype=BF16, cache_dtype=BF16)
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# None of a sequence, a prompt, and the last of a long one.
LENGTHS, COUNTS = (20, 5, 150), (0, 5, 1)


def ragged_case(**shape):
    return make_case(
        **(dict(lengths=LENGTHS, max_blocks=10, q_len=max(COUNTS), heads=6, kv_heads=2, dtype=BF16) | shape)
    )


class TestPrefill(Conformance):
    """None of a sequence, a prompt, and the last token of a long one."""

    case = staticmethod(ragged_case)
    long_case = staticmethod(ragged_case)  # three tiles at most, so that some parts have none
    options = "plain", "all"
    options_of_partitions = "sinks", "all"
    options_of_8_bits = q_lens = block_sizes = ()
    dtypes = (jnp.float16,)
    head_dims = 80, 208  # 208: O in columns of 128 and of 80
    groups = ((8, 1),)
    scaled_caches = ((INT8, "token_head"),)
    numbers_of_partitions = (2,)

    def attend(self, case, num_partitions=1):
        lengths = np.asarray(case.lengths)
        counts = tuple(np.minimum(lengths, COUNTS if len(lengths) == len(COUNTS) else max(COUNTS)).tolist())
        out, lse = prefill.attend(case, counts, num_sms=2, interpret=INTERPRET, num_parts=num_partitions)
        assert not races_found()
        tokens = sum(counts)
        assert not np.asarray(out[tokens:]).any()
        assert (np.asarray(lse[tokens:]) == -np.inf).all()
        return prefill.unpacked(case, counts, out, lse)


def test_queries_that_all_see_the_whole_sequence():
    """As many sequences of one token each, with one table. Two tiles, the second of which is masked."""
    case = make_case(lengths=(150,) * 5, max_blocks=10, heads=3, kv_heads=1, dtype=BF16)
    case = case.replace(block_tables=jnp.repeat(case.block_tables[:1], 5, axis=0))
    prefill.check_shared(case, num_sms=1, interpret=INTERPRET)
    assert not races_found()


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        (dict(cache_dtype=INT8, scale_shape="token_head", options=OPTIONS["all"]), COUNTS),
        # Nine tiles for rings of three; a scale of each head, which may be negative.
        (
            dict(
                lengths=(530,),
                max_blocks=34,
                q_len=5,
                heads=2,
                kv_heads=1,
                head_dim=128,
                cache_dtype=E4M3,
                options={"k_scale": jnp.array([-0.3]), "v_scale": jnp.float32(-2.0)},
            ),
            (5,),
        ),
    ],
    ids=["all", "many tiles"],
)
def test_8bit_caches(shape, counts):
    prefill.check(ragged_case(**shape), counts, num_sms=1, interpret=INTERPRET)
    assert not races_found()


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        (dict(lengths=(140,), q_len=42, heads=3, kv_heads=1, options={"scale": -0.3}), (42,)),  # two items
    ],
)
def test_shapes(shape, counts):
    prefill.check(ragged_case(**shape), counts, interpret=INTERPRET)
    assert not races_found()


def lower(**shape):
    text = traced_prefill(**shape).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    "shape",
    [
        dict(head_dim=64, block_size=8),
        dict(head_dim=80, group=1, dtype=jnp.float16),
        dict(head_dim=96, group=5, block_size=32),
        dict(group=16, block_size=256),
        dict(head_dim=192, group=3),
        dict(head_dim=256, group=64, block_size=128),
        dict(options=("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")),
        dict(num_parts=3, options=("sliding_window", "sinks")),
        dict(head_dim=80, num_parts=2),
        dict(causal=False, options=("sliding_window", "alibi_slopes")),
        dict(cache_dtype=E4M3, scales=HEAD),
        dict(cache_dtype=jnp.float8_e5m2, scales=TOKEN_HEAD, options=("sliding_window", "logits_soft_cap", "sinks")),
        dict(cache_dtype=INT8, scales=("tensor", "token_head"), head_dim=80, block_size=8),
        dict(cache_dtype=E4M3, head_dim=112, dtype=jnp.float16, block_size=256),
        dict(cache_dtype=E4M3, scales=TOKEN_HEAD, head_dim=192, num_parts=2),
    ],
    ids=str,
)
def test_lowers_for_hopper(shape):
    lower(**shape)


@pytest.mark.parametrize(
    ("group", "heads", "tokens"),
    [
        *[(1, 1, 128), (2, 2, 64), (3, 3, 40), (4, 4, 32), (5, 5, 24), (6, 3, 40), (7, 7, 16), (8, 8, 16)],
        *[(12, 4, 32), (16, 16, 8), (32, 16, 8), (64, 16, 8)],
    ],
)
def test_an_item_fills_its_rows(group, heads, tokens):
    assert prefill_config.heads_and_tokens(group) == (heads, tokens)


@pytest.mark.parametrize(
    ("compute_capability", "changes", "by_hopper", "by_portable"),
    [
        (9.0, dict(), True, True),
        (9.0, dict(cache_dtype=INT8), True, True),
        (9.0, dict(head_dim=256, value_dim=256), True, True),
        (9.0, dict(value_dim=64), False, False),
        (9.0, dict(is_latent=True), False, False),
        (9.0, dict(head_dim=272, value_dim=272), False, False),
        (9.0, dict(head_dim=120, value_dim=120), False, False),
        (9.0, dict(block_size=24), False, False),
        (9.0, dict(q_dtype=jnp.float32), False, False),
        (9.0, dict(cache_dtype=jnp.float16), False, False),
        (9.0, dict(cache_dtype=jnp.int4), False, False),
        (9.0, dict(cache_dtype=INT8, head_dim=160, value_dim=160), False, True),
        (8.6, dict(), False, True),
        (8.6, dict(cache_dtype=E4M3), False, False),
        (7.5, dict(), False, False),
    ],
)
def test_what_it_takes(compute_capability, changes, by_hopper, by_portable):
    call = shaped_call(**changes)
    on_hopper = prefill_config.limits(call, Gpu(132, compute_capability), NO_HINTS)
    assert (not list(on_hopper)) == by_hopper
    elsewhere = 10.0 if compute_capability == 9.0 else compute_capability
    assert (not list(portable_config.limits(call, Gpu(132, elsewhere), NO_HINTS))) == by_portable


def shaped_call(
    tokens=100,
    counts=(100,),
    lengths=(100,),
    *,
    head_dim=128,
    value_dim=128,
    block_size=16,
    q_dtype=BF16,
    cache_dtype=BF16,
    is_latent=False,
    kv_heads=1,
):
    """Packed, of a group of 4."""
    shape, pool = jax.ShapeDtypeStruct, (9, block_size, kv_heads)
    values = None if is_latent else shape((*pool, value_dim), cache_dtype)
    return Call(
        shape((tokens, 4 * kv_heads, head_dim), q_dtype),
        shape((*pool, head_dim), cache_dtype),
        values,
        None,
        jnp.asarray(lengths, jnp.int32),
        AttentionOptions(scale=None),
        value_dim,
        query_starts=jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
    )


def make_entries(counts, lengths, *, tokens, kv_heads=8):
    """32 tokens an item; by default 4096 bytes a token."""
    config = prefill_config.default_config(SHAPES, num_sms=132)
    call = shaped_call(tokens, counts, lengths, kv_heads=kv_heads)
    work = jax.jit(
        lambda starts, lengths: make_work_list(dataclasses.replace(call, query_starts=starts, lengths=lengths), config)
    )(call.query_starts, call.lengths)
    return np.asarray(work.entries)[: int(work.num_entries[0])]


@pytest.mark.parametrize("kv_heads", [8, 2000])
def test_the_work_list_covers_each_row_once(kv_heads):
    counts, lengths = (0, 100, 1, 32), (50, 400, 7, 32)
    entries = make_entries(counts, lengths, tokens=140, kv_heads=kv_heads)
    rows = [row for _, start, _, count, _ in entries for row in range(start, start + count)]
    assert sorted(rows) == list(range(140))
    for seq, start, position, count, length in entries:
        if start < 133:
            assert length == lengths[seq]
            assert position - start == length - sum(counts[: seq + 1])
        else:
            assert (count, length) == (7, 0)
            assert position < 0


def test_the_longest_come_first_and_a_sequence_together():
    entries = make_entries((64, 64), (1024, 1024), tokens=128)
    assert entries[:, 0].tolist() == [0, 0, 1, 1]
    assert entries[:2, 2].tolist() == [992, 960]
    assert make_entries((64, 64), (1024, 4096), tokens=128)[0, 0] == 1


def test_beyond_the_l2_cache_a_sequence_follows_the_other():
    entries = make_entries((96, 96, 64), (1024, 4096, 2048), tokens=256, kv_heads=2000)
    assert entries[:, 0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert entries[:, 2].tolist() == [4064, 4032, 4000, 1984, 2016, 992, 960, 928]
    entries = make_entries((96, 96), (1024, 4096), tokens=192, kv_heads=2000)
    assert entries[:, 2].tolist() == [4000, 4032, 4064, 992, 960, 928]
