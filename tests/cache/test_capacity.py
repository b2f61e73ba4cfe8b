"""The capacity of a memory, against the bytes of real caches and against sequences allocated one by one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, cache_capacity

SIZES = dict(num_kv_heads=3, head_dim=24, block_size=5)


LATENT = dict(is_latent=True, value_dim=16)


def created_bytes(*, scale_per, **sizes):
    """The bytes of a cache from KVCache.create, without creating it."""
    scales = dict(k_scale=1.0) if scale_per in ("head", "tensor") else {}
    if scales and not sizes.get("is_latent"):
        scales["v_scale"] = 1.0
    create = functools.partial(KVCache.create, **sizes, scale_per=scale_per, **scales)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(create)))


@pytest.mark.parametrize("kind", [{}, LATENT, LATENT | dict(is_latent=False)], ids=["alike", "latent", "narrow values"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scale_per"),
    [
        ("float32", None),
        (jnp.bfloat16, None),
        *itertools.product((jnp.int8, "float8_e4m3fn"), ("token_head", "head", "tensor")),
    ],
)
def test_bytes_equal_the_caches_and_one_more_block_does_not_fit(dtype, scale_per, stacked, kind):
    memory, sizes = 1_000_003, SIZES | kind | dict(dtype=dtype, scale_per=scale_per)
    capacity = cache_capacity(memory, [7], num_layers=4, **sizes)

    def num_bytes(num_blocks):
        sizes["num_blocks"] = num_blocks
        return created_bytes(num_layers=4, **sizes) if stacked else 4 * created_bytes(**sizes)

    assert capacity.num_bytes == num_bytes(capacity.num_blocks) <= memory < num_bytes(capacity.num_blocks + 1)
    assert capacity.bytes_per_token * 5 == num_bytes(3) - num_bytes(2)


def test_the_number_of_sequences_equals_one_by_one_allocation():
    lengths = [1, 5, 6, 23, 40]
    capacity = cache_capacity(200_000, lengths, num_layers=2, **SIZES)
    free, num_seqs = capacity.num_blocks - 1, 0
    for length in itertools.cycle(lengths):
        free -= -(-length // 5)
        if free < 0:
            break
        num_seqs += 1
    assert num_seqs - len(lengths) < capacity.num_seqs < num_seqs + len(lengths)
    assert capacity.num_contiguous_seqs == 200_000 // (40 * capacity.bytes_per_token) < capacity.num_seqs
    assert cache_capacity(200_000, np.array(lengths), num_layers=2, **SIZES) == capacity
    longer = cache_capacity(200_000, lengths, num_layers=2, max_length=80, **SIZES)
    assert longer.num_contiguous_seqs == capacity.num_contiguous_seqs // 2


def test_windows_fit_more_sequences():
    sizes = dict(num_layers=6, **SIZES)
    one_table = cache_capacity(200_000, [100], **sizes)
    grouped = cache_capacity(200_000, [100], windows=[8, 8, None] * 2, **sizes)
    assert grouped.bytes_per_token == one_table.bytes_per_token
    assert grouped.num_bytes == 2 * created_bytes(
        dtype=jnp.bfloat16, scale_per=None, num_blocks=grouped.num_blocks, **SIZES
    )  # two caches
    # Two groups with windows hold three blocks each, the full group holds 20.
    assert grouped.num_seqs == (grouped.num_blocks - 1) // (20 + 2 * 3) > one_table.num_seqs
    assert grouped.num_tokens == (grouped.num_blocks - 1) // 3 * 5
    with pytest.raises(ValueError, match=r"one entry for each layer; got 2 and num_layers=6"):
        cache_capacity(200_000, [100], windows=[8, None], **sizes)


def test_a_capacity_as_text():
    capacity = cache_capacity(200_000, [6], num_layers=2, **SIZES)
    assert str(capacity) == (
        "0.2 MB: 69 blocks of 5 tokens for 340 tokens of 576 bytes\n"
        "34 sequences of the given lengths; a contiguous cache for 6 tokens each holds 57"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(memory_bytes=2 * 5 * 576 - 1), r"got memory_bytes=5759, which holds 1 blocks .* Pass at least 5760\."),
        (dict(memory_bytes=2.0), r"memory_bytes must be an int; got memory_bytes=2\.0"),
        (dict(lengths=[]), r"at least one length; .* pass \[average\]"),
        (dict(lengths=[3, 0]), r"a length must be at least 1"),
        (dict(max_length=6), r"max_length must be at least 7; got max_length=6"),
        (dict(head_dim=0), r"head_dim must be at least 1"),
        (dict(dtype="int4"), r"dtype must be one of float32"),
        (dict(scale_per="head"), r"a bfloat16 cache is not quantised"),
    ],
)
def test_invalid_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cache_capacity(**(dict(memory_bytes=10**6, lengths=[7], num_layers=2, **SIZES) | changes))
    assert cache_capacity(2 * 5 * 576, [7], num_layers=2, **SIZES).num_blocks == 2
