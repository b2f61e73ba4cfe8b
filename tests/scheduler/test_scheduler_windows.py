"""The scheduler over groups of layers in a tight pool: invariants hold in each step, and each request ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from jaxpaged.scheduling import Requests, RequestStatus, Scheduler
from tests.toy_model import without_blocks

WINDOWS, REQUESTS, SEATS, MAX_LENGTH, BLOCK_SIZE, NUM_BLOCKS, CHUNK = (None, 3, 6), 6, 3, 20, 2, 22, 5
ROWS, VOCABULARY = 2, 2


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def arrive(scheduler, allocator, prompts, lengths, new_tokens, aborted):
    scheduler, allocator = scheduler.abort(allocator, aborted)
    scheduler, _, submit_statuses = scheduler.submit(allocator, Requests(prompts, lengths, new_tokens))
    return scheduler, allocator, submit_statuses


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def step(scheduler, allocator, sampled):
    scheduler, allocator, planned = scheduler.admit(allocator).plan(allocator, chunk_tokens=CHUNK)
    scheduler, allocator = scheduler.commit(allocator, planned, sampled)
    if scheduler.prefixes is not None:
        scheduler, allocator = scheduler.change_seats(allocator)
    return *scheduler.drain(), allocator


def create(has_cache):
    sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    cache = PrefixCache.create(**sizes, num_groups=len(WINDOWS)) if has_cache else None
    scheduler = Scheduler.create(
        max_requests=REQUESTS, num_seqs=SEATS, max_length=MAX_LENGTH, max_steps=2, prefix_cache=cache
    )
    columns = MAX_LENGTH // BLOCK_SIZE
    return scheduler, BlockAllocator.create(**sizes, num_seqs=SEATS, max_blocks_per_seq=columns, windows=WINDOWS)


def test_drafts_need_room_in_each_group():
    """If a draft lacked room in one group, the known token would not be computed in any step."""
    sizes = dict(num_seqs=1, max_blocks_per_seq=8)
    scheduler = Scheduler.create(max_requests=1, num_seqs=1, max_length=16, max_steps=4, num_drafts=2)
    allocator = BlockAllocator.create(num_blocks=20, block_size=2, windows=(None, None), **sizes)
    prompt = np.arange(4, dtype=np.int32)[None]
    scheduler, _, _ = scheduler.submit(allocator, Requests(prompt, np.int32(4), np.int32(8)))
    scheduler, allocator, planned = scheduler.admit(allocator).plan(allocator, chunk_tokens=4)
    scheduler, allocator = scheduler.commit(allocator, planned, np.int32([7]))
    allocator, _ = without_blocks(allocator, int(allocator.num_free) - 3)  # two drafts need four blocks
    scheduler, allocator, planned = scheduler.plan(allocator, chunk_tokens=4, drafts=jnp.int32([[8, 9]]))
    assert allocator.lengths.tolist() == [6]
    assert planned.num_drafts.tolist() == [1]


@pytest.mark.parametrize("has_cache", [False, True])
def test_every_request_ends_and_every_block_is_freed(has_cache):
    rng, (scheduler, allocator) = np.random.default_rng(0), create(has_cache)
    num_accepted = num_ended = num_idle = 0
    for i in range(180):
        is_open = i < 140
        prompts = rng.integers(0, VOCABULARY, (ROWS, MAX_LENGTH), np.int32)
        lengths = rng.integers(0, 15, ROWS).astype(np.int32) * (is_open and rng.random() < 0.5)
        new_tokens = rng.integers(1, 6, ROWS).astype(np.int32)
        aborted = rng.random(REQUESTS) < 0.01 * is_open
        scheduler, allocator, submit_statuses = arrive(scheduler, allocator, prompts, lengths, new_tokens, aborted)
        num_accepted += int((submit_statuses == 0).sum())
        sampled = rng.integers(0, VOCABULARY, SEATS, np.int32)
        scheduler, outbox, allocator = step(scheduler, allocator, sampled)
        num_ended += int((outbox.finished > 0).sum())
        num_idle = num_idle + 1 if not is_open and not scheduler.has_work else 0
        on_host = jax.tree.map(np.asarray, (scheduler, allocator))
        assert on_host[1].broken_invariants() == on_host[0].broken_invariants(on_host[1]) == ()
    assert num_idle > 0
    assert num_ended == num_accepted > 40
    assert int(allocator.num_held) == 0
    assert (scheduler.statuses == RequestStatus.FREE).all()
    assert int(scheduler.num_preempted) > 1
    assert not has_cache or int(scheduler.prefixes.cache.num_hits) > 10
    assert jnp.all(allocator.num_passed == 0)
