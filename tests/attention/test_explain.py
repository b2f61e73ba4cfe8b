"""`explain` for calls on GPUs that this machine does not have."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import KVCache, paged_attention, tree_mask
from jaxpaged.debug import explain
from jaxpaged.ops import PrefixGroups


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def arrays(
    *,
    seqs=8,
    q_len=None,
    heads=32,
    kv_heads=8,
    head_dim=128,
    block_size=16,
    max_blocks=128,
    cache_dtype=jnp.bfloat16,
):
    """8 sequences in tables for 2048 tokens, in a pool that just fills them."""
    rows = (seqs,) if q_len is None else (seqs, q_len)
    pool = shape(seqs * max_blocks, block_size, kv_heads, head_dim, dtype=cache_dtype)
    sizes = shape(seqs, max_blocks, dtype=jnp.int32), shape(seqs, dtype=jnp.int32)
    return shape(*rows, heads, head_dim), pool, pool, *sizes


@pytest.mark.parametrize(
    ("gpu", "shapes", "options", "kernel", "num_partitions"),
    [
        ("H100", {}, {}, "paged_decode", 4),
        ("H100", dict(q_len=16), {}, "paged_prefill", 2),
        ("H100", dict(q_len=16), dict(num_partitions=3), "paged_decode", 3),
        ("H100", dict(q_len=8), {}, "paged_decode", 4),
        ("H100", dict(q_len=16, head_dim=120), {}, "paged_decode", 4),
        ("H200", dict(seqs=1, max_blocks=512), {}, "paged_decode", 16),
        ("H100", dict(seqs=1, max_blocks=512), dict(sliding_window=100), "paged_decode", 1),
        ("H100", dict(seqs=1, max_blocks=512), dict(sliding_window=jnp.int32(100)), "paged_decode", 16),
        ("H100", {}, dict(num_partitions=3), "paged_decode", 3),
        ("H100", dict(max_blocks=1024), {}, "paged_decode", "plan"),
        (
            "H100",
            dict(max_blocks=1024, cache_dtype=jnp.int8),
            dict(k_scale=1.0, v_scale=1.0),
            "paged_decode",
            "plan",
        ),
        ("H100", dict(heads=48, kv_heads=1, head_dim=88), {}, "paged_decode", 8),
        ("H100", dict(heads=64, kv_heads=1), {}, "paged_decode", 8),
        ("H100", dict(heads=128, kv_heads=1), {}, "paged_prefill", 2),  # more heads than the decode kernel supports
        ("H100", dict(q_len=1024), {}, "paged_prefill", 1),
        ("H100", dict(seqs=1, q_len=256, max_blocks=512), {}, "paged_prefill", 2),
        ("H100", dict(seqs=1, q_len=9, max_blocks=512), {}, "paged_prefill", 11),  # 36 rows
        ("H100", dict(seqs=1, q_len=8, max_blocks=512), {}, "paged_decode", 16),
        ("H100", dict(seqs=8, q_len=8192, max_blocks=512), {}, "paged_prefill", 1),
        ("H100", dict(seqs=1, q_len=65535, heads=64, kv_heads=1, max_blocks=512), {}, "paged_prefill", 1),
        ("H100", dict(q_len=1024, cache_dtype=jnp.float8_e4m3fn), {}, "paged_prefill", 1),
        ("H100", dict(q_len=1024, cache_dtype=jnp.float8_e4m3fn, head_dim=256), {}, "paged_decode", 1),
        # A prompt with a wide table is not partitioned: the partials of many runs would need gigabytes.
        ("H100", dict(q_len=256, head_dim=120, max_blocks=64), {}, "paged_decode", 1),
        ("H100", dict(q_len=256, head_dim=120, max_blocks=8192), {}, "paged_decode", 1),
        ("H100", {}, dict(implementation="xla"), None, None),
        ("A100", {}, {}, "paged_decode", 3),
        ("A100", dict(q_len=16), {}, "portable_prefill", 1),
        (
            "L4",
            dict(q_len=16, head_dim=256, cache_dtype=jnp.int8),
            dict(k_scale=1.0, v_scale=1.0),
            "portable_prefill",
            1,
        ),
        ("B200", dict(seqs=1, q_len=256, max_blocks=512), {}, "portable_prefill", 2),
        ("A100", {}, dict(implementation="mosaic_gpu"), "paged_decode", 3),
        ("L4", dict(cache_dtype=jnp.float8_e4m3fn), dict(implementation="mosaic_gpu"), "paged_decode", 1),
        ("B200", dict(max_blocks=1024), dict(implementation="mosaic_gpu"), "paged_decode", "plan"),
        (  # partials of 40 rows, not of 64, are less than 128 MiB
            "B200",
            dict(seqs=1500, max_blocks=1024, heads=40, kv_heads=1, head_dim=256),
            dict(implementation="mosaic_gpu"),
            "paged_decode",
            "plan",
        ),
    ],
)
def test_kernels(gpu, shapes, options, kernel, num_partitions):
    explanation = explain(*arrays(**shapes), **options, gpu=gpu)
    assert (explanation.kernel, explanation.num_partitions) == (kernel, num_partitions)
    assert explanation.implementation == ("xla" if kernel is None else "mosaic_gpu")
    assert bool(explanation.reason) == (kernel is None)


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        (dict(cache_dtype=jnp.float32), {}, "a cache in q's dtype, .* got cache_dtype=float32, q_dtype=bfloat16"),
        (dict(cache_dtype=jnp.float16), {}, "got cache_dtype=float16"),
        (dict(head_dim=100), {}, "got head_dim=100"),
        (dict(head_dim=136, cache_dtype=jnp.int8), dict(k_scale=1.0, v_scale=1.0), "got head_dim=136"),
        (dict(block_size=24), {}, "got block_size=24"),
        (dict(), dict(k_scale=1.0), "support k_scale and v_scale with 8-bit caches"),
        (dict(heads=65, kv_heads=1), dict(num_partitions=2), "up to 64 rows .* got q_len=1, group=65"),
        (dict(q_len=8), dict(tree_mask=shape(8, 8, 1, dtype=jnp.uint32), sliding_window=9), "with sliding_window"),
    ],
)
def test_why_not(shapes, options, reason):
    explanation = explain(*arrays(**shapes), **options, gpu="H100")
    assert explanation.implementation == "xla"
    with pytest.raises(NotImplementedError, match=reason):
        explain(*arrays(**shapes), **options, gpu="H100", implementation="mosaic_gpu")
    assert str(explanation) == f"xla: {explanation.reason}"


def test_packed_tokens_and_a_shared_prefix():
    q, *rest = arrays()
    packed = explain(shape(100, 32, 128), *rest, query_starts=shape(9, dtype=jnp.int32), gpu="H100")
    assert packed.kernel == "paged_prefill"
    groups = PrefixGroups(shape(5, dtype=jnp.int32), shape(4, dtype=jnp.int32), shape(8, dtype=jnp.int32))
    whole = explain(q, *rest, prefix_groups=groups, gpu="H100")
    assert whole.shared.config != whole.config
    assert whole.shared.shared is None
    assert "the decode kernel" in str(whole)
    assert "for the shared prefix mosaic_gpu: the prefill kernel" in str(whole)


def test_the_text_names_kernel_partitions_and_configuration():
    lines = str(explain(*arrays(), gpu="H100")).splitlines()
    assert lines[:2] == ["mosaic_gpu: the decode kernel", "  partitions: 4 to a sequence"]
    assert lines[2].startswith("  Config(num_partitions=4, ")
    assert "by a plan, more for longer sequences" in str(explain(*arrays(max_blocks=1024), gpu="H100"))


def test_arrays_lists_and_trees_as_in_a_call():
    """Concrete arguments. Their contents are never read."""
    cache = KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    q = jnp.ones((1, 4, 4, 64), jnp.bfloat16)
    call = dict(block_tables=[[3, 5]], lengths=[20], tree_mask=tree_mask([[-1, 0, 0, 1]]))
    assert explain(q, cache.k, cache.v, **call, gpu="H100", return_lse=True).kernel == "paged_decode"
    assert paged_attention(q, cache.k, cache.v, **call).shape == q.shape


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of machines without a GPU")
def test_the_default_device():
    assert "need an NVIDIA GPU; got device.platform='cpu'" in explain(*arrays()).reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gpu="V100"), "gpu must be one of A100, L4, H100, H200, B200, or None .*got gpu='V100'"),
        (dict(num_partitions=0), "num_partitions must be an int of at least 1"),
        (dict(implementation="cuda"), "implementation must be None"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        explain(*arrays(), **changes)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [(576, jnp.float32, "supports q in bfloat16 or float16"), (704, jnp.bfloat16, "up to 640")],
)
def test_a_latent_too_large_for_shared_memory_uses_xla(head_dim, dtype, reason):
    q, pool, _, *sizes = arrays(heads=16, kv_heads=1, head_dim=head_dim, cache_dtype=dtype)
    q = shape(*q.shape, dtype=dtype)
    found = explain(q, pool, None, *sizes, value_dim=512, scale=1.0, gpu="L4")
    assert found.implementation == "xla"
    assert reason in found.reason
