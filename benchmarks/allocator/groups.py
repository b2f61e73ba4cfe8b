"""The most blocks that one sequence holds while it grows, in groups of layers and with one table for all layers.

    python -m benchmarks.allocator.groups

The layers of models with windows, prompts in chunks. One table keeps every block, in as many caches as there are
layers; with groups a block has a part of the layers. So blocks are counted in layers: `blocks * caches`.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks.checks import require
from benchmarks.harness import add_output, open_store
from jaxpaged import BlockAllocator, layer_groups

BLOCK_SIZE, CHUNK = 16, 256
MODELS = {
    "Gemma 3 27B": ([1024] * 5 + [None]) * 10 + [1024] * 2,
    "Gemma 3 4B": ([1024] * 5 + [None]) * 5 + [1024] * 4,
    "gpt-oss-20b": [128, None] * 12,
}
LENGTHS = (2048, 8192, 32768, 131072)


def peak(windows: tuple[int | None, ...], length: int) -> int:
    """The most blocks that a sequence holds in all groups until it has this length."""
    columns = length // BLOCK_SIZE
    sizes = dict(num_blocks=len(windows) * columns + 1, block_size=BLOCK_SIZE)
    allocator = BlockAllocator.create(**sizes, num_seqs=1, max_blocks_per_seq=columns, windows=windows)

    @jax.jit
    def grow(allocator: BlockAllocator) -> tuple[BlockAllocator, jax.Array]:
        def chunk(_: jax.Array, carry: tuple[BlockAllocator, jax.Array]) -> tuple[BlockAllocator, jax.Array]:
            allocator, most = carry
            allocator, _, ok = allocator.append(jnp.array([CHUNK]), q_len=CHUNK)
            return allocator, jnp.where(ok.all(), jnp.maximum(most, allocator.num_held), allocator.num_blocks)

        return jax.lax.fori_loop(0, length // CHUNK, chunk, (allocator, jnp.zeros((), jnp.int32)))

    allocator, most = grow(allocator)
    require(allocator.lengths.tolist() == [length], "not all tokens are there")
    require(not allocator.broken_invariants(), f"{allocator.broken_invariants()}")
    return int(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    store = open_store("groups", parser.parse_args(), block_size=BLOCK_SIZE, chunk_tokens=CHUNK)
    for model, windows in MODELS.items():
        groups = layer_groups(windows)
        for length in LENGTHS:
            one_table = peak((None,), length) * len(windows)
            in_groups = peak(groups.windows, length) * groups.num_caches
            figures = {"blocks_one_table": one_table, "blocks_groups": in_groups, "part": in_groups / one_table}
            print(f"{model}, {length} tokens: {figures['part']:.3f}", flush=True)
            store.add(f"{model}, {length} tokens", figures)


if __name__ == "__main__":
    main()
