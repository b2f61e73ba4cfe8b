"""Trees that move between host and device as one array."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._slice.packing import pack, unpack

TREE = {
    "many": np.arange(6, dtype=np.int32).reshape(2, 3),
    "seed": np.asarray([2**32 - 1, 7], np.uint32),
    "real": np.asarray([[0.1, -np.inf, np.nan]], np.float32),
    "experts": np.asarray([[-128, 127, 3], [0, 255 - 256, 5]], np.int8),
    "tokens": np.asarray([[2**16 - 1], [1], [2]], np.uint16),
    "narrow": np.asarray([1.5, -np.inf, 3.0], jnp.bfloat16),
    "no bytes": np.zeros((0, 3), np.uint8),
    "flags": np.asarray([True, False]),
    "flag": np.asarray(True),
    "none": np.zeros((0, 4), np.int32),
    "number": np.asarray(-3, np.int32),
}


def assert_bits_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, np.asarray(a).tobytes()) == (b.shape, b.dtype, b.tobytes())


def test_a_tree_survives_host_to_device_and_back_bit_for_bit():
    on_device = jax.jit(lambda words: unpack(words, TREE))(pack(TREE))
    assert_bits_equal(on_device, TREE)
    words = jax.jit(lambda tree: pack(tree, jnp))(TREE)
    assert (words.shape, words.dtype) == ((21,), np.int32)
    assert_bits_equal(unpack(np.asarray(words), TREE), TREE)
