"""examples/decode_loop.py, and that every example is short enough to read."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import decode_loop

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_decode_loop_runs_as_a_script():
    command, x64 = [sys.executable, EXAMPLES / "decode_loop.py"], os.environ | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=x64).stdout.splitlines()
    assert len(done) == decode_loop.SEQS + 1
    assert done[-1].endswith("blocks are free")


def test_decode_loop_stops_frees_and_survives_a_pool_that_is_too_small():
    def run(num_blocks):
        cache = decode_loop.KVCache.create(
            num_blocks=num_blocks,
            block_size=decode_loop.BLOCK_SIZE,
            num_kv_heads=decode_loop.KV_HEADS,
            head_dim=decode_loop.HEAD_DIM,
            dtype="float32",
        )
        allocator = decode_loop.BlockAllocator.create(
            num_blocks=num_blocks,
            block_size=decode_loop.BLOCK_SIZE,
            num_seqs=decode_loop.SEQS,
            max_blocks_per_seq=decode_loop.MAX_BLOCKS,
        )
        _, allocator, generated = jax.jit(decode_loop.decode)(
            decode_loop.weights, cache, allocator, jnp.arange(decode_loop.SEQS)
        )
        return allocator, np.asarray(generated)

    _, plenty = run(decode_loop.NUM_BLOCKS)
    allocator, scarce = run(7)
    for full, cut in zip(plenty, scarce, strict=True):
        count = (cut >= 0).sum()
        assert (full[:count] == cut[:count]).all()
        assert (cut[count:] == -1).all()
    assert (scarce >= 0).sum() < (plenty >= 0).sum()
    assert int(allocator.num_free) == 6 - int(-(-allocator.lengths // decode_loop.BLOCK_SIZE).sum())


def test_decode_loop_is_about_sixty_lines():
    assert len((EXAMPLES / "decode_loop.py").read_text().splitlines()) <= 65
