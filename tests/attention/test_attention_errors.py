"""Refusals of paged_attention. Each message quotes what was received and says what to do."""

import dataclasses
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import (
    AttentionStep,
    BlockAllocator,
    KVCache,
    _device,
    paged_attention,
    paged_attention_reference,
)
from jaxpaged._device import GPUS
from jaxpaged._selftest import verdict
from tests.cases import make_case

H100 = GPUS["H100"]

SEQS, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 64

MISTAKES = {
    "q dtype": (dict(q=jnp.zeros((3, 6, 64), jnp.int32)), r"q must be float32, bfloat16, float16; got q.dtype=int32"),
    "cache dtype": (
        dict(k_cache=jnp.zeros((9, 16, 2, 64), jnp.int16)),
        r"k_cache must be one of .*float8_e4m3fn.*; got k_cache.dtype=int16",
    ),
    "two cache dtypes": (
        dict(v_cache=jnp.zeros((9, 16, 2, 64), jnp.bfloat16)),
        r"one dtype; got k_cache.dtype=float32, v_cache.dtype=bfloat16",
    ),
    "table dtype": (dict(block_tables=jnp.zeros((3, 4), jnp.uint32)), r"block_tables must be int32; got .*uint32"),
    "length dtype": (dict(lengths=jnp.zeros(3, jnp.float32)), r"lengths must be int32; got .*float32.*astype"),
    "q rank": (dict(q=jnp.zeros((6, 64))), r"q must be \[seqs, heads, head_dim\] or .*; got q.shape=\(6, 64\)"),
    "cache rank": (
        dict(k_cache=jnp.zeros((4, 9, 16, 2, 64)), v_cache=jnp.zeros((4, 9, 16, 2, 64))),
        r"got k_cache.shape=\(4, 9, 16, 2, 64\).*CacheLayer",
    ),
    "two cache shapes": (
        dict(v_cache=jnp.zeros((9, 16, 2, 32))),
        r"k_cache and v_cache must be alike but for their last axis",
    ),
    "empty axis": (dict(q=jnp.zeros((3, 0, 6, 64))), r"no axis may be empty; got q.shape=\(3, 0, 6, 64\)"),
    "head_dim": (dict(q=jnp.zeros((3, 6, 32))), r"one head_dim; got q.shape=\(3, 6, 32\), k_cache.shape"),
    "heads": (dict(q=jnp.zeros((3, 5, 64))), r"multiple of kv_heads; got heads=5, kv_heads=2.*kv_heads third"),
    "table shape": (
        dict(block_tables=jnp.zeros((2, 4), jnp.int32)),
        r"block_tables must be \[seqs, max_blocks\] with seqs=3.*got block_tables.shape=\(2, 4\).*pass query_starts",
    ),
    "lengths shape": (dict(lengths=jnp.zeros(2, jnp.int32)), r"lengths must be \[seqs\] with seqs=3.*\(2,\)"),
    "scale shape": (dict(scale=jnp.ones(6)), r"scale must have shape \[\]; got \[6\]"),
    "slopes shape": (dict(alibi_slopes=jnp.ones(2)), r"alibi_slopes must have shape \[6\]; got \[2\]"),
    "sinks shape": (dict(sinks=jnp.ones((6, 1))), r"sinks must have shape \[6\]; got \[6, 1\]"),
    "k_scale shape": (
        dict(k_scale=jnp.ones(6)),
        r"k_scale must have shape \[\] or \[kv_heads\]=\[2\] or .*=\[\d+, 16, 2\]; got \[6\]\.$",
    ),
    "v_scale of a stack": (dict(v_scale=jnp.ones((4, 2))), r"v_scale must have .*; got \[4, 2\].*CacheLayer"),
    "v_scale with kv_heads first": (dict(v_scale=jnp.ones((2, 9, 16))), r"v_scale must have .*; got \[2, 9, 16\]"),
    "v_scale with head_dim": (dict(v_scale=jnp.ones((9, 16, 2, 64))), r"v_scale must have .*; got \[9, 16, 2, 64\]"),
    "k_scale dtype": (dict(k_scale=jnp.ones(2, jnp.bfloat16)), r"k_scale must be float32; got bfloat16. Cast"),
    "windows": (dict(sliding_window=np.array([4, 5])), r"sliding_window must have shape \[\]; got \[2\]"),
    "window kind": (dict(sliding_window=2.5), r"sliding_window must be int32; got float64"),
    "window sign": (dict(sliding_window=0), r"sliding_window must be positive; got sliding_window=0. Pass None"),
    "cap sign": (dict(logits_soft_cap=-1.0), r"logits_soft_cap must be positive; got logits_soft_cap=-1.0"),
}


@pytest.mark.parametrize("function", [paged_attention, paged_attention_reference])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_value_errors(function, mistake):
    case = make_case(lengths=(1, 20, 0), max_blocks=4)
    names = ("q", "k_cache", "v_cache", "block_tables", "lengths")
    changes, message = MISTAKES[mistake]
    arguments = dict(zip(names, case.arrays, strict=True)) | changes
    arrays = [arguments.pop(name) for name in names]
    with pytest.raises(ValueError, match=message):
        function(*arrays, **arguments)


@pytest.mark.parametrize("options", [dict(sliding_window=0), dict(logits_soft_cap=-1.0)])
def test_numbers_are_checked_under_jit_too(options):
    case = make_case(lengths=(1, 20, 0))
    with pytest.raises(ValueError, match="must be positive"):
        jax.jit(lambda *arrays: paged_attention(*arrays, **options))(*case.arrays)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_partitions=0), ValueError, r"num_partitions must be an int of at least 1, .*; got num_partitions=0"),
        *(
            (dict(num_partitions=wrong), ValueError, r"num_partitions must be an int")
            for wrong in (True, 2.0, jnp.ones(2))
        ),
        (dict(num_partitions="even"), ValueError, r"num_partitions must be .*; got num_partitions='even'"),
        (dict(implementation="cuda"), ValueError, r'None, "mosaic_gpu" or "xla"; got implementation=\'cuda\''),
        (dict(implementation="mosaic_gpu"), NotImplementedError, r"need an NVIDIA GPU|supports q in bfloat16"),
    ],
)
def test_choice_of_implementation(options, error, message):
    with pytest.raises(error, match=message):
        paged_attention(*make_case(lengths=(1, 20, 0)).arrays, **options)


@pytest.mark.parametrize(
    ("plugin", "nvcc", "is_broken"),
    [
        ("0.12.0", "12.6.85", False),
        ("0.12.0", "12.8.61", True),
        ("0.12.0", "12.9.41", True),
        ("0.12.0", "12.9.86", False),
        ("0.12.0", None, False),
        (None, "12.8.93", False),  # JAX for CUDA 13, with another library's nvcc installed
    ],
)
def test_a_miscompiling_ptxas_is_detected(monkeypatch, plugin, nvcc, is_broken):
    versions = {"jax-cuda12-plugin": plugin, "nvidia-cuda-nvcc-cu12": nvcc}

    def version(name):
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _device.broken_ptxas.__wrapped__() == (nvcc if is_broken else None)


@pytest.fixture
def on_gpu(monkeypatch):
    """Fakes JAX's default device, in a process that has not warned yet."""

    def set_gpu(gpu):
        monkeypatch.setattr(_device, "gpu", lambda: gpu)
        monkeypatch.setattr(verdict, "_warned", {})

    return set_gpu


def test_no_kernel_is_compiled_with_a_miscompiling_ptxas(on_gpu):
    on_gpu(dataclasses.replace(H100, broken_ptxas="12.8.93"))
    case = make_case(lengths=(1, 20, 0), dtype=jnp.bfloat16)
    message = r"nvidia-cuda-nvcc-cu12 12\.8\.93, which miscompiles .* pip install \"nvidia-cuda-nvcc-cu12>=12\.9\.86\""
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(*case.arrays, implementation="mosaic_gpu")
    with pytest.warns(UserWarning, match=message):
        out = paged_attention(*case.arrays)
    assert (out == paged_attention(*case.arrays, implementation="xla")).all()


def wide(lengths=(1, 20, 0), **shape):
    """A bfloat16 query and a float32 cache."""
    return make_case(lengths=lengths, dtype=jnp.bfloat16, cache_dtype=jnp.float32, **shape)


def traced(*arrays, jit=False, **how):
    def call(*arrays):  # another each time, which no cache knows
        return paged_attention(*arrays, **how)

    jax.eval_shape(jax.jit(call) if jit else call, *arrays)


def traced_attend():
    cache = KVCache.create(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
    allocator = BlockAllocator.create(num_blocks=4, block_size=16, num_seqs=2, max_blocks_per_seq=2)
    q = jnp.ones((2, 4, 64), jnp.bfloat16)
    step = AttentionStep.create(allocator, jnp.zeros(2, jnp.int32))
    jax.eval_shape(lambda q: step.attend(q, None, None, cache)[1], q)


@pytest.mark.parametrize("how", ["called", "jitted", "through attend"])
def test_a_fallback_warns_once(on_gpu, how):
    on_gpu(H100)
    message = r"XLA computes this call: the decode kernel supports a cache in q's dtype.*got cache_dtype=float32"
    with pytest.warns(UserWarning, match=message) as warned:
        traced_attend() if how == "through attend" else traced(*wide().arrays, jit=how == "jitted")
    assert [warning.filename for warning in warned] == [__file__]  # points at the user's line
    traced(*wide(lengths=(9, 3)).arrays)  # another shape, same reason
    with pytest.warns(UserWarning, match="block_size=24"):
        traced(*make_case(lengths=(1, 20), dtype=jnp.bfloat16, block_size=24).arrays)


@pytest.mark.parametrize(
    ("gpu", "case", "implementation"),
    [
        (H100, wide(), "xla"),
        (_device.Gpu(68, 7.5, name="T4"), wide(), None),  # it has no kernels
        (H100, make_case(lengths=(1, 20), dtype=jnp.bfloat16), None),
    ],
)
def test_no_warning_if_no_kernel_was_expected(on_gpu, gpu, case, implementation):
    on_gpu(gpu)
    traced(*case.arrays, implementation=implementation)
