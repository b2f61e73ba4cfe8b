"""The prefix cache, as traces with literal tables and free lists. Hash collisions must never match."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxpaged import KVCache, PrefixCache
from jaxpaged._allocator import cached_blocks
from jaxpaged._threefry import threefry
from tests.allocator import allocators
from tests.allocator.allocators import attend, counts, create_cache, free_ids, marks, write

A, B, C = [1, 2], [3, 4], [5, 6]  # blocks of two tokens


def create(num_blocks=8, block_size=2, **changes):
    return PrefixCache.create(num_blocks=num_blocks, block_size=block_size, **changes)


def make(num_blocks=8, **changes):
    return create(num_blocks, **changes), allocators.make(0, 0, 0, num_blocks=num_blocks, block_size=2)


def rows(*prompts: list[int]) -> jax.Array:
    """Three prompts, each at the end of its row, after padding that looks like a token."""
    return jnp.asarray([[9] * (8 - len(prompt)) + prompt for prompt in fill(prompts)], jnp.int32)


def fill(prompts):
    """By default the second and third prompts are empty."""
    return [*prompts, [], []][:3]


def begin(prefix_cache, allocator, *prompts, salts=(0, 0, 0), insert=True):
    """Matches, appends the rest and inserts, as a server does with new prompts. [] does not change a row."""
    tokens, lengths, salts = rows(*prompts), counts(*map(len, fill(prompts))), counts(*salts)
    prefix_cache, allocator, num_cached = prefix_cache.match_prefix(allocator, tokens, lengths, salts=salts)
    allocator, _, ok = allocator.append(lengths - num_cached, q_len=8)
    assert ok.all()
    if insert:
        prefix_cache, allocator = prefix_cache.insert(allocator, tokens, salts=salts)
    assert allocator.broken_invariants() == ()
    return prefix_cache, allocator, num_cached.tolist()


def test_prompts_with_a_common_prefix_share_its_blocks():
    prefix_cache, allocator, hits = begin(*make(), [*A, *B, 7])
    assert hits == [0, 0, 0]
    prefix_cache, allocator, hits = begin(prefix_cache, allocator, [], [*A, *B, 8], [*A, *C, 8])
    assert hits == [0, 4, 2]
    assert allocator.block_tables.tolist() == [[1, 2, 3, 0], [1, 2, 4, 0], [1, 5, 6, 0]]
    assert allocator.pool.num_holders().tolist() == [0, 3, 2, 1, 1, 1, 1, 0]
    assert int(prefix_cache.num_lookups) == 2 + 2 + 2
    assert int(prefix_cache.num_hits) == 2 + 1
    assert float(prefix_cache.hit_rate) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("prompt", "hits"),
    [
        ([*A, *B], 2),  # the last token is always computed
        ([*A, *B, 5], 4),
        ([*A], 0),
        ([*A, 3], 2),
        ([*B, *A, 7], 0),  # equal blocks after different ones do not match
        ([9, *A, *B], 0),
        ([*A, *C, *B, 7], 2),
    ],
)
def test_which_prefixes_match(prompt, hits):
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, *C])
    assert begin(prefix_cache, allocator, [], prompt)[2] == [0, hits, 0]


def test_free_blocks_stay_cached_until_they_are_reused():
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, *C, 7])
    allocator = allocator.free(marks(1, 0, 0))
    # The block that is not cached is reused first, then the tail before the head.
    assert int(allocator.num_waiting) == 3
    assert free_ids(allocator) == [1, 2, 3, 7, 6, 5, 4]
    prefix_cache, other, hits = begin(prefix_cache, allocator, [*A, *B, *C, 8])
    assert hits == [6, 0, 0]
    assert int(other.num_waiting) == 0
    # Four tokens more than fit the blocks that are not cached: C's block is overwritten, A and B stay.
    allocator, _, ok = allocator.append(counts(0, 8, 2), q_len=8)
    assert ok.all()
    assert allocator.block_tables.tolist() == [[0, 0, 0, 0], [4, 5, 6, 7], [3, 0, 0, 0]]
    allocator = allocator.free(marks(0, 1, 1))
    assert begin(prefix_cache, allocator, [*A, *B, *C, 8])[2] == [4, 0, 0]


def test_salts_isolate_tenants():
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, 7], salts=[5, 0, 0])
    assert begin(prefix_cache, allocator, [], [*A, *B, 7], salts=[0, 6, 0])[2] == [0, 0, 0]
    assert begin(prefix_cache, allocator, [], [*A, *B, 7], salts=[0, 5, 0])[2] == [0, 4, 0]


def test_clear_forgets_all_blocks_and_held_ones_can_be_cached_again():
    prefix_cache, before, _ = begin(*make(num_blocks=12), [*A, *B, 7], [*C, 7])
    before = before.free(marks(0, 1, 0))
    prefix_cache, allocator = prefix_cache.clear(before)
    assert allocator.broken_invariants() == ()
    assert allocator.block_tables.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert (int(allocator.num_waiting), int(allocator.num_free)) == (0, int(before.num_free))
    assert begin(prefix_cache, allocator, [], [*A, *B, 7], insert=False)[2] == [0, 0, 0]
    # The earlier allocator does not restore them.
    assert begin(prefix_cache, before, [], [*A, *B, 7], [*C, 7], insert=False)[2] == [0, 0, 0]
    # The blocks of the first row match once they are inserted again. All blocks can be allocated.
    prefix_cache, allocator = prefix_cache.insert(allocator, rows([*A, *B, 7]))
    _, allocator, hits = begin(prefix_cache, allocator, [], [*A, *B, 7], [*C, 7])
    assert hits == [0, 4, 0]
    allocator, _, ok = allocator.free(marks(1, 1, 1)).append(counts(8, 8, 6), q_len=8)
    assert ok.all()
    assert allocator.broken_invariants() == ()


@pytest.mark.parametrize("length", [-1, 9, 2**31 - 1])
def test_invalid_lengths_and_occupied_rows(length):
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, 7])
    tokens = rows([*A, *B, 7], [*A, *B, 7], [*A, *B, 7])
    prefix_cache, after, num_cached = prefix_cache.match_prefix(allocator, tokens, counts(5, length, 5))
    assert num_cached.tolist() == [0, 0, 4]
    assert after.lengths.tolist() == [5, 0, 4]
    # A sequence longer than the given tokens is skipped.
    short, _ = create().insert(allocator, tokens[:, -4:])
    assert int(short.cached.next_serial) == 1


def test_a_width_below_one_block_never_matches():
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, 7])
    one = jnp.ones((3, 1), jnp.int32)
    assert prefix_cache.match_prefix(allocator, one, counts(0, 1, 1))[2].tolist() == [0, 0, 0]
    assert prefix_cache.insert(allocator, one)[0] is prefix_cache


hashes = cached_blocks.chain_hashes


def all_equal(blocks, salts, secret):
    """Every block collides with every other."""
    return (jnp.full(blocks.shape[:2], 7, jnp.uint32),) * 2


def hash_without_salt(blocks, salts, secret):
    """Blocks with equal tokens collide, whatever their salts."""
    return hashes(blocks, jnp.zeros_like(salts), secret)


def hash_without_parent(blocks, salts, secret):
    """Blocks with equal tokens collide, whatever their parents."""
    alone = hashes(blocks.reshape(-1, 1, blocks.shape[2]), jnp.repeat(salts, blocks.shape[1]), secret)
    return tuple(half.reshape(blocks.shape[:2]) for half in alone)


@pytest.fixture
def patched(monkeypatch):
    """`monkeypatch` for functions in `match_prefix` and `insert`, which are traced again during and after the test."""

    def trace_again():
        PrefixCache._match_prefix.clear_cache()
        PrefixCache._insert.clear_cache()

    trace_again()
    yield monkeypatch
    monkeypatch.undo()
    trace_again()


@pytest.mark.parametrize("confirming", [True, False])
def test_a_hash_collision_is_no_match(patched, confirming):
    patched.setattr(cached_blocks, "chain_hashes", all_equal)
    if not confirming:  # the twin: hashes alone
        patched.setattr(cached_blocks.CachedBlocks, "_confirm", lambda self, ids, cached, blocks: cached)
    prefix_cache, allocator, _ = begin(*make(num_blocks=20), [*A, *B, 7], [*C, 7])
    other = rows([], [], [*B, *C, 7])
    _, _, num_cached = prefix_cache.match_prefix(allocator, other, counts(0, 0, 5))
    assert (num_cached == 0).all() == confirming
    if confirming:
        assert begin(prefix_cache, allocator, [], [], [*A, 7])[2] == [0, 0, 2]
        # One of the colliding blocks is cached. The sequences keep their own blocks.
        assert int(prefix_cache.cached.next_serial) == 2
        assert allocator.block_tables.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [0, 0, 0, 0]]


def test_blocks_that_collide_across_salts_neither_match_nor_hide_others(patched):
    # An attack by a tenant that knows the hashes: blocks of salt 1 have the tags and buckets of salt 0's blocks.
    patched.setattr(cached_blocks, "chain_hashes", hash_without_salt)
    prompt = [*A, *B, *C, 7]
    prefix_cache, allocator, hits = begin(*make(num_blocks=20), prompt, salts=[1, 0, 0])
    assert begin(prefix_cache, allocator, [], prompt, salts=[0, 0, 0])[2] == [0, 0, 0]
    prefix_cache, allocator, hits = begin(prefix_cache, allocator, [], prompt)
    assert hits == [0, 0, 0]
    # Each salt matches its own three blocks.
    _, together, hits = begin(prefix_cache, allocator.free(marks(1, 1, 0)), prompt, prompt, salts=[1, 0, 0])
    assert hits == [6, 6, 0]
    assert together.block_tables[:2, :3].tolist() == allocator.block_tables[:2, :3].tolist() == [[1, 2, 3], [5, 6, 7]]


def test_salts_that_collide_in_one_call_keep_their_blocks(patched):
    patched.setattr(cached_blocks, "chain_hashes", hash_without_salt)
    prompt = [*A, *B, 7]
    prefix_cache, allocator, _ = begin(*make(num_blocks=20), prompt, prompt, prompt, salts=[0, 1, 1])
    assert allocator.block_tables[:, :3].tolist() == [[1, 2, 3], [4, 5, 6], [4, 5, 9]]
    _, _, hits = begin(prefix_cache, allocator.free(marks(1, 1, 1)), prompt, prompt, salts=[0, 1, 0])
    assert hits == [4, 4, 0]


def test_blocks_after_blocks_that_collide_are_not_shared(patched):
    patched.setattr(cached_blocks, "chain_hashes", hash_without_parent)
    # Within one call, B after C differs from B after A.
    prefix_cache, allocator, _ = begin(*make(num_blocks=20), [*A, *B, 7], [*C, *B, 7])
    assert allocator.block_tables[:2, :3].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert int(prefix_cache.cached.next_serial) == 1 + 3
    # Across calls, a lookup finds A and C, and B only after A.
    allocator = allocator.free(marks(0, 1, 0))
    _, allocator, hits = begin(prefix_cache, allocator, [], [*C, *B, 8], [*A, *B, 8])
    assert hits == [0, 2, 4]
    assert allocator.block_tables[:, :2].tolist() == [[1, 2], [4, 5], [1, 2]]


def test_threefry_equals_jax():
    numbers = np.random.default_rng(0).integers(0, 2**32, (2, 2), np.uint32)
    ours = threefry(*jnp.asarray(numbers))
    np.testing.assert_array_equal(ours, threefry_2x32(*jnp.asarray(numbers)))


@pytest.mark.parametrize("change", [*(1 << shift for shift in (0, 32, 64, 96)), "salt"])
def test_other_secrets_and_salts_give_other_hashes(change):
    blocks, salts = jnp.asarray([[A, B]], jnp.int32), counts(3)
    other_salts, other = (counts(4), 0) if change == "salt" else (salts, change)
    before = hashes(blocks, salts, create().cached.secret)
    after = hashes(blocks, other_salts, create(secret=other).cached.secret)
    assert (np.asarray(before) != np.asarray(after)).all()


def test_a_secret_does_not_change_matches():
    prefix_cache, allocator, _ = begin(*make(secret=2**128 - 1), [*A, *B, 7])
    assert begin(prefix_cache, allocator, [], [*A, *B, 8], [*A, *C, 8])[2] == [0, 4, 2]


def test_a_block_without_a_free_bucket_is_not_cached(patched):
    def same_first_bucket(blocks, salts, secret):
        return hashes(blocks, salts, secret)[0], jnp.zeros(blocks.shape[:2], jnp.uint32)

    patched.setattr(cached_blocks, "chain_hashes", same_first_bucket)
    patched.setattr(cached_blocks, "PROBES", 1)
    prefix_cache, allocator, _ = begin(*make(), [*A, *B, 7], [*C, 7])
    assert int(prefix_cache.cached.next_serial) == 2
    assert begin(prefix_cache, allocator, [], [], [*A, *B, 7])[2] == [0, 0, 2]
    # Overwriting the block frees its bucket.
    allocator = allocator.free(marks(1, 1, 0))
    allocator, _, _ = allocator.append(counts(8, 6, 0), q_len=8)
    allocator = allocator.free(marks(1, 1, 0))
    prefix_cache, allocator, _ = begin(prefix_cache, allocator, [*C, 7])
    assert int(prefix_cache.cached.next_serial) == 3
    assert begin(prefix_cache, allocator, [], [*C, 8])[2] == [0, 2, 0]


def test_many_random_prompts_all_get_buckets():
    # Every block of the pool is cached with different tokens, and none is dropped from the table.
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50_000, (256, 33), np.int32))
    allocator = allocators.make(*[32] * 256, num_blocks=2049, max_blocks=8)
    prefix_cache, allocator = jax.jit(PrefixCache.insert)(create(2049, 4), allocator, tokens[:, :32])
    assert int(prefix_cache.cached.next_serial) == 2049
    allocator = allocator.free(jnp.ones(256, jnp.bool_))
    _, _, num_cached = jax.jit(PrefixCache.match_prefix)(prefix_cache, allocator, tokens, jnp.full(256, 33, jnp.int32))
    assert (num_cached == 32).all()


def test_attention_reads_the_tokens_of_shared_blocks():
    prefix_cache, allocator = make()
    cache, allocator = write(create_cache(allocator), allocator, [*A, *B, 7], [], [])
    prefix_cache, allocator = prefix_cache.insert(allocator, rows([*A, *B, 7]))
    allocator = allocator.free(marks(1, 0, 0))
    free = np.setdiff1d(np.arange(8), [1, 2])  # all blocks except the cached prefix
    cache = KVCache(cache.k.at[free].set(jnp.nan), cache.v.at[free].set(jnp.nan))
    _, allocator, num_cached = prefix_cache.match_prefix(allocator, rows([], [*A, *B, 8, 9]), counts(0, 6, 0))
    assert num_cached.tolist() == [0, 4, 0]
    cache, allocator = write(cache, allocator, [], [8, 9], [])
    np.testing.assert_allclose(attend(cache, allocator), [0, (1 + 2 + 3 + 4 + 8 + 9) / 6, 0], rtol=1e-6)


def test_the_compiled_insert_computes_each_hash_once():
    # Fused into every reader, the hashes would occur 39 times and compile for minutes on a CPU.
    insert = jax.jit(lambda p, a: p.insert(a, rows(A, B, C), salts=counts(1, 2, 3) + a.lengths))
    compiled = insert.lower(*make()).compile()
    assert compiled.as_text().count(str(0x1BD11BDA)) == 4  # Threefry's constant: two keys, tokens, sums


OTHER_SIZES = r"allocator's .*; got \(9, 2, 1\) for an allocator with \(8, 2, 1\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, a: create(1), r"num_blocks must be at least 2.*got num_blocks=1"),
        (lambda p, a: create(2**28), "num_blocks must be at most 134217728; got num_blocks=268435456"),
        (lambda p, a: create(secret=-1), r"secret must be from 0 to 2\^128 - 1"),
        (lambda p, a: create(secret=2**128), r"secret must be from 0 to 2\^128 - 1"),
        (lambda p, a: create(9).insert(a, rows(A)), OTHER_SIZES),
        (lambda p, a: create(9).clear(a), OTHER_SIZES),
        (
            lambda p, a: create(num_groups=2).clear(a),
            r"num_groups\); got \(8, 2, 2\) .* with \(8, 2, 1\)",
        ),
        (lambda p, a: p.insert(a, rows(A)[:2]), r"tokens must be int32 \[3, width\].*got int32 \[2, 8\]"),
        (lambda p, a: p.insert(a, jnp.zeros((3, 8))), r"tokens must be int32 .*got float32"),
        (lambda p, a: p.insert(a, rows(A), salts=counts(1)), r"salts must be int32 \[3\].*got int32 \[1\]"),
        (lambda p, a: p.match_prefix(a, rows(A), counts(1)), r"lengths must be int32 \[3\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(*make())
