"""Compiled operations of the allocator: few fusions whatever the batch, no loop, no sort, no host."""

import collections
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from tests.compiled import instructions

NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS, WIDTH = 100_003, 16, 32, 256  # a prime: no other array has such an axis
BATCHES = 1, 64


class Rows(NamedTuple):
    """Arguments of an operation, one row for each sequence."""

    counts: jax.Array
    marks: jax.Array
    tokens: jax.Array


def in_order(result):
    """Results in the order of the arguments, because JAX gives a result the first donated buffer of its shape."""
    prefix_cache, allocator, *rest = result
    return allocator, prefix_cache, rest


# The operations, and the limit of fusions on a CPU and on an NVIDIA GPU. On a CPU, XLA compiles a prefix sum to several
# fusions, more for longer ones; for a GPU it makes a third in all. The limits are about twice the count, in case XLA
# fuses differently. A loop unrolled over 64 rows would exceed them by far.
OPERATIONS = {
    "append": (lambda a, p, rows: (a.append(rows.counts), p), 30),
    "append, in order": (lambda a, p, rows: (a.append(rows.counts, order=rows.counts)[0], p), 30),
    "append 256": (lambda a, p, rows: (a.append(rows.counts, q_len=256), p), 30),
    "free": (lambda a, p, rows: (a.free(rows.marks), p), 60),
    "fork": (lambda a, p, rows: (a.fork(rows.counts), p), 90),
    "fork, replace": (lambda a, p, rows: (a.fork(rows.counts, replace=True), p), 120),
    "rollback": (lambda a, p, rows: (a.rollback(rows.counts), p), 90),
    "prefix_groups": (lambda a, p, rows: (a, p, a.prefix_groups()), 60),
    "match_prefix": (lambda a, p, rows: in_order(p.match_prefix(a, rows.tokens, rows.counts)), 80),
    "insert": (lambda a, p, rows: in_order(p.insert(a, rows.tokens)), 260),
}
HOST_AND_LOOPS = "while", "sort", "callback", "infeed", "outfeed", "send", "recv"


def shapes(num_seqs, num_blocks=NUM_BLOCKS):
    sizes = dict(num_blocks=num_blocks, block_size=BLOCK_SIZE)

    def arguments():
        counts = jnp.zeros(num_seqs, jnp.int32)
        rows = Rows(counts, counts > 0, jnp.zeros((num_seqs, WIDTH), jnp.int32))
        allocator = BlockAllocator.create(**sizes, num_seqs=num_seqs, max_blocks_per_seq=MAX_BLOCKS)
        return allocator, PrefixCache.create(**sizes), rows

    return jax.eval_shape(arguments)


@functools.cache
def compiled(name, num_seqs, donate=True):
    donated = (0, 1) if donate else ()
    return jax.jit(OPERATIONS[name][0], donate_argnums=donated).lower(*shapes(num_seqs)).compile()


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled():
    """Otherwise about 60 programs with 4,000 memory maps stay until the end of the run."""
    yield
    compiled.cache_clear()


def count_fusions(text):
    """Counts fusions in the entry computation, which are launched one after another."""
    return sum(operation == "fusion" for operation, *_ in instructions(text[text.index("\nENTRY") :]))


def check_fusions(name, batches):
    counts = {num_seqs: count_fusions(compiled(name, num_seqs).as_text()) for num_seqs in batches}
    print(f"{name}: {counts} fusions")
    assert max(counts.values()) <= OPERATIONS[name][1]


@pytest.mark.parametrize("name", OPERATIONS)
def test_fusions_are_few_for_any_batch(name):
    check_fusions(name, BATCHES)


def steps(name, *sizes):
    """The count of each primitive in the traced program."""
    program = str(jax.make_jaxpr(OPERATIONS[name][0])(*shapes(*sizes)))
    return collections.Counter(re.findall(r" = (\w+)", program))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_program_does_not_depend_on_batch_or_pool_size(name):
    few = steps(name, 4, 70)
    assert few.total() > 3
    assert few == steps(name, 64, 3001) == steps(name, 1024, 1_000_000)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_loop_no_sort_no_host(name, platform):
    traced = jax.jit(OPERATIONS[name][0]).trace(*shapes(8))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    for word in HOST_AND_LOOPS:
        assert not re.search(rf"\w+\.{word}|{word}_", text), word


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_compiled_module_has_no_loop_no_sort_no_host(name):
    operations = {operation for operation, _, _ in instructions(compiled(name, 64).as_text())}
    assert not operations & set(HOST_AND_LOOPS)


def test_the_search_finds_a_loop_and_a_sort():
    def twin(x):
        return jax.lax.while_loop(lambda x: (x < 3).any(), lambda x: jnp.sort(x) + 1, x)

    lowered = jax.jit(twin).lower(jnp.zeros(4))
    assert {"stablehlo.while", "stablehlo.sort"} <= set(re.findall(r"\w+\.\w+", lowered.as_text()))
    assert {"while", "sort"} <= {operation for operation, _, _ in instructions(lowered.compile().as_text())}


def pool_sized(text):
    """(operation, line) of instructions whose result has an axis as long as the pool or a prefix cache's table."""
    lengths = NUM_BLOCKS, PrefixCache.create(num_blocks=NUM_BLOCKS, block_size=1).cached.table.size
    axis = re.compile(rf"[\[,]({'|'.join(map(str, lengths))})[\],]")
    found = ((operation, line) for operation, _, line in instructions(text))
    return [(operation, line) for operation, line in found if axis.search(line.split(f" {operation}(")[0])]


def pool_sized_copies(text):
    return [line for operation, line in pool_sized(text) if operation.startswith("copy")]


@pytest.mark.parametrize("num_seqs", BATCHES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_donated_state_is_updated_in_place(name, num_seqs):
    module = compiled(name, num_seqs)
    assert pool_sized_copies(module.as_text()) == []
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(num_seqs)[:2]))
    assert module.memory_analysis().alias_size_in_bytes >= state


@pytest.mark.parametrize("name", ["free", "insert"])
def test_without_donation_the_state_is_copied(name):
    # The twin: the test above can detect a copy.
    assert pool_sized_copies(compiled(name, 1, donate=False).as_text())


@pytest.mark.parametrize("name", ["append", "append, in order", "append 256"])
def test_a_decode_step_computes_no_pool_sized_array(name):
    # Apart from pass-through results, no instruction has a result as large as the pool: the cost depends on the batch.
    handed = "parameter", "tuple", "get-tuple-element", "bitcast"
    assert [line for operation, line in pool_sized(compiled(name, 1).as_text()) if operation not in handed] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_few_fusions_on_a_gpu(name):
    check_fusions(name, (1, 32, 256, 1024))
