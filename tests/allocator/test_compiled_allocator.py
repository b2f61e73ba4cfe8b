"""What the compiled operations of the allocator hold: few fusions whatever the batch, no loop, no sort, no host."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from tests.compiled import instructions

NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS, WIDTH = 100_003, 16, 32, 256  # a prime: no other array has such an axis
BATCHES = 1, 64


def zeros(allocator, *shape, dtype=jnp.int32):
    return jnp.zeros((allocator.lengths.shape[0], *shape), dtype)


def in_order(result):
    """Of a prefix cache, in the order of the arguments: JAX gives a result the first donated buffer of its shape."""
    prefix_cache, allocator, *rest = result
    return allocator, prefix_cache, rest


def match_prefix(allocator, prefix_cache, tokens, lengths):
    return in_order(prefix_cache.match_prefix(allocator, tokens, lengths))


def insert(allocator, prefix_cache, tokens):
    return in_order(prefix_cache.insert(allocator, tokens))


def on_allocator(name, **static):
    return lambda allocator, prefix_cache, *rest: (getattr(allocator, name)(*rest, **static), prefix_cache)


COUNTS, MARKS, TOKENS = "counts", "marks", "tokens"

# The operations, what they take, and the most fusions that one may compile to, on a CPU and on an NVIDIA GPU. XLA on a
# CPU makes several of a prefix sum, the more the longer it is; for a GPU it makes a third as many of all. The bounds
# leave room for an XLA that fuses otherwise: about twice what was counted. Unrolled over 64 rows it would be far more.
OPERATIONS = {
    "append": (on_allocator("append"), (COUNTS,), 30),
    "append, in order": (lambda a, p, n: (a.append(n, order=n)[0], p), (COUNTS,), 30),
    "append 256": (on_allocator("append", q_len=256), (COUNTS,), 30),
    "free": (on_allocator("free"), (MARKS,), 60),
    "fork": (on_allocator("fork"), (COUNTS,), 90),
    "fork, replace": (on_allocator("fork", replace=True), (COUNTS,), 120),
    "rollback": (on_allocator("rollback"), (COUNTS,), 90),
    "prefix_groups": (lambda a, p: (a, p, a.prefix_groups()), (), 60),
    "match_prefix": (match_prefix, (TOKENS, COUNTS), 80),
    "insert": (insert, (TOKENS,), 260),
}
HOST_AND_LOOPS = "while", "sort", "callback", "infeed", "outfeed", "send", "recv"


def inputs(name, num_seqs, num_blocks=NUM_BLOCKS):
    allocator = BlockAllocator.create(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, num_seqs=num_seqs, max_blocks_per_seq=MAX_BLOCKS
    )
    arguments = {
        COUNTS: zeros(allocator),
        MARKS: zeros(allocator, dtype=jnp.bool_),
        TOKENS: zeros(allocator, WIDTH),
    }
    return (
        allocator,
        PrefixCache.create(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        *(arguments[kind] for kind in OPERATIONS[name][1]),
    )


def shapes(*args):
    return jax.eval_shape(lambda: inputs(*args))


@functools.cache
def compiled(name, num_seqs, donate=True):
    donated = (0, 1) if donate else ()
    return jax.jit(OPERATIONS[name][0], donate_argnums=donated).lower(*shapes(name, num_seqs)).compile()


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled():
    """Else some 60 programs, and their 4,000 memory maps, stay to the end of the run."""
    yield
    compiled.cache_clear()


def entry(text):
    """The entry computation: what is launched one after the other."""
    return text[text.index("\nENTRY") :]


def count_fusions(text):
    return sum(operation == "fusion" for operation, _, _ in instructions(entry(text)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_few_fusions_whatever_the_batch(name):
    *_, most = OPERATIONS[name]
    counts = {num_seqs: count_fusions(compiled(name, num_seqs).as_text()) for num_seqs in BATCHES}
    assert max(counts.values()) <= most, counts


def steps(name, *sizes):
    """How often each primitive stands in what is traced."""
    program = str(jax.make_jaxpr(OPERATIONS[name][0])(*shapes(name, *sizes)))
    return collections.Counter(re.findall(r" = (\w+)", program))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_program_is_the_same_whatever_the_batch_and_the_pool(name):
    few = steps(name, 4, 70)
    assert few.total() > 3
    assert few == steps(name, 64, 3001) == steps(name, 1024, 1_000_000)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_loop_no_sort_no_host(name, platform):
    traced = jax.jit(OPERATIONS[name][0]).trace(*shapes(name, 8))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    for word in HOST_AND_LOOPS:
        assert not re.search(rf"\w+\.{word}|{word}_", text), word


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_compiled_module_has_no_loop_no_sort_no_host(name):
    operations = {operation for operation, _, _ in instructions(compiled(name, 64).as_text())}
    assert not operations & set(HOST_AND_LOOPS)


def test_the_search_sees_a_loop_and_a_sort():
    def twin(x):
        return jax.lax.while_loop(lambda x: (x < 3).any(), lambda x: jnp.sort(x) + 1, x)

    lowered = jax.jit(twin).lower(jnp.zeros(4))
    assert {"stablehlo.while", "stablehlo.sort"} <= set(re.findall(r"\w+\.\w+", lowered.as_text()))
    assert {"while", "sort"} <= {operation for operation, _, _ in instructions(lowered.compile().as_text())}


def pool_sized(text):
    """(operation, line) of all whose result has an axis as long as the pool or as a prefix cache's table."""
    lengths = NUM_BLOCKS, PrefixCache.create(num_blocks=NUM_BLOCKS, block_size=1).listing.table.size
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
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(name, num_seqs)[:2]))
    assert module.memory_analysis().alias_size_in_bytes >= state


@pytest.mark.parametrize("name", ["free", "insert"])
def test_without_donation_the_state_is_copied(name):
    # The twin: it shows that the test above can see a copy.
    assert pool_sized_copies(compiled(name, 1, donate=False).as_text())


@pytest.mark.parametrize("name", ["append", "append, in order", "append 256"])
def test_nothing_as_large_as_the_pool_is_computed_in_a_decode_step(name):
    # Besides what is handed through, no instruction has a result as large as the pool: the cost follows the batch.
    handed = "parameter", "tuple", "get-tuple-element", "bitcast"
    assert [line for operation, line in pool_sized(compiled(name, 1).as_text()) if operation not in handed] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_few_fusions_on_a_gpu(name):
    counts = {num_seqs: count_fusions(compiled(name, num_seqs).as_text()) for num_seqs in (1, 32, 256, 1024)}
    print(f"{name}: {counts} fusions")
    assert max(counts.values()) <= OPERATIONS[name][-1]
