"""`debug_checks` reports each mistake, inside every transformation, and does not report right calls."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpaged import AttentionStep, BlockAllocator, CacheLayer, KVCache, PrefixCache, SamplingParams, paged_attention
from jaxpaged.debug import debug_checks
from jaxpaged.ops import context_parallel_attention, context_parallel_slots, write_kv
from tests.cases import OPTIONS, make_case
from tests.toy_model import create_engine

SIZES = dict(num_blocks=6, block_size=4)
KV = jnp.ones((2, 1, 8))


def create_cache(**changes):
    return KVCache.create(**SIZES | dict(num_kv_heads=1, head_dim=8, dtype="float32") | changes)


def create_allocator(*lengths, **sizes):
    allocator = BlockAllocator.create(**SIZES | dict(num_seqs=len(lengths), max_blocks_per_seq=3) | sizes)
    return allocator.append(jnp.asarray(lengths, jnp.int32), q_len=max(lengths))


def step(cache, allocator, slots, kv=KV):
    return AttentionStep.create(allocator, slots).attend(kv, kv, kv, cache)


def call(function, *args):
    return jax.jit(function)(*args)


def wrong_block_size():
    """Slots of an allocator with blocks of 2, its tables read with blocks of 4."""
    allocator, slots, _ = create_allocator(5, 4, num_blocks=12, block_size=2)

    def write_and_attend(cache):
        cache = write_kv(cache, KV, KV, slots[:, -1])
        return paged_attention(KV, cache.k, cache.v, allocator.block_tables, allocator.lengths)

    call(write_and_attend, create_cache())


def older_allocator(**layers):
    older, _, _ = create_allocator(4, 4)
    _, slots, _ = older.append(jnp.ones(2, jnp.int32))
    call(lambda cache: step(CacheLayer(cache, 1) if layers else cache, older, slots), create_cache(**layers))


def written(*slots):
    call(lambda cache: write_kv(cache, KV, KV, jnp.array(slots)), create_cache())


def attended(tables, lengths, k=None):
    cache = create_cache()
    k = cache.k if k is None else k
    call(lambda k: paged_attention(KV, k, cache.v, jnp.array(tables), jnp.array(lengths)), k)


def jax_layout():
    """[kv_heads, pages, page_size, head_dim] with a page size that divides the heads: 2 blocks of 6 tokens."""
    pages, tables = jnp.zeros((2, 6, 4, 8)), jnp.array([[1, 5]])
    call(lambda pages: paged_attention(jnp.ones((1, 8, 8)), pages, pages, tables, jnp.array([7])), pages)


def allocated(method, *rows):
    call(method, create_allocator(5, 4)[0], jnp.array(rows))


def matched(allocator, lengths):
    return PrefixCache.create(**SIZES).match_prefix(allocator, jnp.zeros((2, 8), jnp.int32), lengths)


MISTAKES = {
    "wrong block size": (wrong_block_size, r"slots just written that are no token .*: 1, the first at \[1\]: 11"),
    "older allocator": (older_allocator, r"slots just written .*: 2, the first at \[0\]: 12"),
    "older allocator, a layer": (
        lambda: older_allocator(num_layers=2),
        r"slots just written .*: 2, the first at \[0\]: 12",
    ),
    "null block": (lambda: written(4, 3), r"test_debug.py:\d+: slots in the null block: 1, the first at \[1\]: 3$"),
    "past the pool": (
        lambda: written(24, 25),
        r"slots past the pool's 24, and not 24 as padding is: 1, the first at \[1\]: 25",
    ),
    "length above the capacity": (
        lambda: attended([[1, 2, 3], [4, 5, 4]], [5, 13]),
        r"lengths outside 0 to 12: 1, the first at \[1\]: 13",
    ),
    "negative length": (lambda: attended([[1], [1]], [-1, 4]), r"lengths outside 0 to 4: 1, .*: -1"),
    "id outside": (
        lambda: attended([[1, 99], [2, 6]], [4, 5]),
        r"outside the pool of 6: 1, the first at \[1, 1\]: 6",
    ),
    "null block with tokens": (
        lambda: attended([[1, 0], [2, 0]], [4, 5]),
        r"the null block with tokens: 1, the first at \[1, 1\]: 0",
    ),
    "NaN": (
        lambda: attended([[1, 2], [3, 4]], [5, 6], create_cache().k.at[4, 1].set(jnp.nan)),
        r"keys that are not finite, .*: 1, the first at \[1, 1, 1\]: 4",
    ),
    "layout of JAX": (jax_layout, r"block ids outside the pool of 2: 1, the first at \[0, 1\]: 5"),
    "append": (
        lambda: allocated(functools.partial(BlockAllocator.append, q_len=2), 3, -1),
        "num_tokens of append outside 0 to q_len=2: 2, .*: 3",
    ),
    "fork": (lambda: allocated(BlockAllocator.fork, 2, -2), "parents of fork outside -1 to 1: 2, .*: 2"),
    "rollback": (
        lambda: allocated(BlockAllocator.rollback, 1, 5),
        r"lengths of rollback outside 0 to the present ones: 1, .*\[1\]: 5",
    ),
    "match_prefix": (lambda: allocated(matched, 9, 8), "lengths of match_prefix outside 0 to width=8: 1, .*: 9"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name):
    make, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message), debug_checks():
        make()


@pytest.mark.parametrize(
    "way",
    {
        "nothing": lambda f, ids: f(ids),
        "scan": lambda f, ids: jax.lax.scan(lambda c, _: (f(c), None), ids, length=2),
        "vmap": lambda f, ids: jax.vmap(f)(ids[None]),
        "while": lambda f, ids: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, ids)),
        "grad": lambda f, ids: jax.grad(lambda x: f(ids, x)[0] * 1.0, allow_int=True)(1.0),
        "shard_map": lambda f, ids: jax.jit(
            jax.shard_map(f, mesh=jax.make_mesh((1,), ("x",)), in_specs=P(), out_specs=P())
        )(ids),
    }.items(),
    ids=lambda way: way[0],
)
def test_inside_transformations(way):
    cache = create_cache()

    def call(ids, factor=1.0):
        out = paged_attention(KV[:1] * factor, cache.k, cache.v, ids[None], jnp.array([4]))
        return ids.astype(jnp.float32) * out.sum() if way[0] == "grad" else ids + 0 * out.sum().astype(jnp.int32)

    with pytest.raises(ValueError, match=r"outside the pool of 6: 1, the first at \[0, 0\]: 77"), debug_checks():
        way[1](call, jnp.array([77]))


def test_right_calls_are_not_reported():
    """Padding, garbage after the lengths and before the window, empty sequences, layers, packed tokens, no blocks."""
    allocator, slots, _ = create_allocator(5, 0)
    prompt = jnp.ones((2, 5, 1, 8))
    case = make_case(q_len=3, options=OPTIONS["all"])
    with debug_checks():
        cache, _ = step(create_cache(), allocator, slots, prompt)  # the padding is 24
        layer, _ = step(CacheLayer(create_cache(num_layers=2), 1), allocator, slots, prompt)
        AttentionStep.create(allocator, slots).attend(prompt, None, None, layer)
        packed = AttentionStep.create(allocator, slots[0], query_starts=jnp.array([0, 5, 5]))
        packed.attend(prompt[0], prompt[0], prompt[0], cache)
        packed.attend(prompt[0], None, None, layer)
        create_allocator(5, 4)[0].append(jnp.asarray([8, 8]), q_len=8)  # refused: too few blocks
        before_the_window = allocator.block_tables.at[0, 0].set(-9)
        paged_attention(KV, cache.k, cache.v, before_the_window, allocator.lengths, sliding_window=1)
        paged_attention(*case.arrays, **case.options)
        write_kv(cache, KV, KV, jnp.array([-1, -7]))
        # The window passes the first block, which a padding row before the new token would read.
        allocator, slots, _ = create_allocator(5, windows=(2,))
        cache = write_kv(create_cache(), prompt[:1], prompt[:1], slots)
        behind = AttentionStep.create(*allocator.append(jnp.array([1]), q_len=5)[:2])
        behind.attend(prompt[:1], prompt[:1], prompt[:1], cache, sliding_window=2)


def test_context_parallel_attention_is_not_checked():
    """Each device holds half of each sequence, so the lengths exceed its tables."""
    allocator, slots, _ = create_allocator(9, 12)

    def device(cache):
        own = context_parallel_slots(slots[:, -1], block_size=2, axis_name="x")
        cache = write_kv(cache, KV, KV, own)
        tables, lengths = allocator.block_tables, allocator.lengths
        return context_parallel_attention(KV, cache.k, cache.v, tables, lengths, axis_name="x")

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    run = jax.shard_map(device, mesh=mesh, in_specs=P(None, "x"), out_specs=P(), check_vma=False)
    with debug_checks():
        jax.jit(run)(jax.device_put(create_cache(), jax.NamedSharding(mesh, P(None, "x"))))


def test_disabled_checks_cost_nothing_and_enabling_them_recompiles():
    cache, slots = create_cache(), jnp.array([4, 3])
    write = jax.jit(write_kv)

    def effects():
        return jax.make_jaxpr(write_kv)(cache, KV, KV, slots).effects

    write(cache, KV, KV, slots)
    assert not effects()
    for _ in range(2):
        with pytest.raises(ValueError, match="null block"), debug_checks():
            write(cache, KV, KV, slots)
        assert not effects()
        write(cache, KV, KV, slots)


def test_an_exception_of_the_block_has_the_findings_as_notes():
    with pytest.raises(KeyError) as caught, debug_checks():
        {}[write_kv(create_cache(), KV, KV, jnp.array([3, 4])).k.ndim]
    assert "slots in the null block: 1, the first at [0]: 3" in caught.value.__notes__[0]


def test_an_engine_is_not_reported():
    with debug_checks():
        engine = create_engine(batch_invariant=True)
        prompts = [[1, 2, 3], [4] * 9, [5]]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert len(outputs) == 3
