"""What the compiled operations of the allocator hold: few fusions whatever the batch, no loop, no sort, no host."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from tests.test_compiled import instructions

NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS, WIDTH = 1 << 17, 16, 32, 256


def zeros(allocator, *shape, dtype=jnp.int32):
    return jnp.zeros((allocator.lengths.shape[0], *shape), dtype)


def match_prefix(allocator, prefix_cache):
    return prefix_cache.match_prefix(allocator, zeros(allocator, WIDTH), zeros(allocator))


# The operations, and the most fusions that one compiles to, on a CPU and on an NVIDIA GPU, with 1 to 1024 sequences.
# XLA on a CPU makes several fusions of a prefix sum, the more the longer it is.
OPERATIONS = {
    "append": (lambda a, p: a.append(zeros(a)), 20),
    "append 256": (lambda a, p: a.append(zeros(a), max_tokens=256), 20),
    "free": (lambda a, p: a.free(zeros(a, dtype=jnp.bool_)), 25),
    "fork": (lambda a, p: a.fork(zeros(a)), 35),
    "fork, replace": (lambda a, p: a.fork(zeros(a), replace=True), 70),
    "rollback": (lambda a, p: a.rollback(zeros(a)), 55),
    "hold": (lambda a, p: a.hold(a), 10),
    "release": (lambda a, p: a.release(a), 50),
    "restore": (lambda a, p: a.restore(a), 15),
    "swap_out": (lambda a, p: a.swap_out(zeros(a, dtype=jnp.bool_)), 30),
    "swap_in": (lambda a, p: a.swap_in(zeros(a, dtype=jnp.bool_)), 10),
    "match_prefix": (match_prefix, 45),
    "insert": (lambda a, p: p.insert(a, zeros(a, WIDTH)), 170),
}


def inputs(num_seqs):
    allocator = BlockAllocator.create(NUM_BLOCKS, BLOCK_SIZE, num_seqs, MAX_BLOCKS)
    return allocator, PrefixCache.create(NUM_BLOCKS, BLOCK_SIZE)


@functools.cache
def compiled(name, num_seqs, donate=True):
    function, of_prefix_cache = OPERATIONS[name][0], name in ("match_prefix", "insert")

    def operation(allocator, prefix_cache):
        result = function(allocator, prefix_cache)
        if not of_prefix_cache:
            return result, prefix_cache  # all that is donated comes back
        # In the order of the arguments: JAX gives a result the first donated buffer of its shape and type.
        prefix_cache, allocator, *rest = result
        return allocator, prefix_cache, rest

    shapes = jax.eval_shape(lambda: inputs(num_seqs))
    return jax.jit(operation, donate_argnums=(0, 1) if donate else ()).lower(*shapes).compile()


def entry(text):
    """The entry computation: what is launched one after the other."""
    return text[text.index("\nENTRY") :]


def count_fusions(text):
    return sum(operation == "fusion" for operation, _, _ in instructions(entry(text)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_few_fusions_whatever_the_batch(name):
    _, most = OPERATIONS[name]
    for num_seqs in (1, 1024):
        assert count_fusions(compiled(name, num_seqs).as_text()) <= most


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_loop_no_sort_no_host(name, platform):
    operation, _ = OPERATIONS[name]
    text = jax.jit(operation).trace(*jax.eval_shape(lambda: inputs(8))).lower(lowering_platforms=(platform,)).as_text()
    for word in ("while", "sort", "callback", "infeed", "outfeed", "send", "recv"):
        assert not re.search(rf"\w+\.{word}|{word}_", text), word


def test_the_search_sees_a_loop_and_a_sort():
    def twin(x):
        return jax.lax.while_loop(lambda x: (x < 3).any(), lambda x: jnp.sort(x) + 1, x)

    text = jax.jit(twin).lower(jnp.zeros(4)).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.sort" in text


def pool_sized_copies(text):
    return [line for op, size, line in instructions(text) if op.startswith("copy") and size >= NUM_BLOCKS]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("hold", "release", "restore")])
def test_donated_state_is_updated_in_place(name):
    module = compiled(name, 8)
    assert pool_sized_copies(module.as_text()) == []
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(lambda: inputs(8)[0])))
    assert module.memory_analysis().alias_size_in_bytes >= state


def test_without_donation_the_state_is_copied():
    assert pool_sized_copies(compiled("free", 8, donate=False).as_text())


@pytest.mark.parametrize("name", ["append", "append 256", "swap_in"])
def test_nothing_as_large_as_the_pool_is_computed_in_a_decode_step(name):
    # Besides what is handed through, no instruction has a result as large as the pool: the cost follows the batch.
    work = {
        line
        for operation, size, line in instructions(compiled(name, 8).as_text())
        if size >= NUM_BLOCKS and operation not in ("parameter", "tuple", "get-tuple-element", "bitcast")
    }
    assert not work


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_few_fusions_on_a_gpu(name):
    counts = {num_seqs: count_fusions(compiled(name, num_seqs).as_text()) for num_seqs in (1, 32, 256, 1024)}
    print(f"{name}: {counts} fusions")
    assert max(counts.values()) <= OPERATIONS[name][1]
