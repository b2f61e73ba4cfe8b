"""The scheduler: its lowered operations, its str, its refusals, and the invariants that it names.

`test_scheduler_machine.py` compares each step with a model; `tests/engine` serves a model in a loop of steps.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from jaxpaged.scheduling import Requests, Sampling, Scheduler, SubmitStatus


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def operations(scheduler, allocator, prompts, lengths, aborts):
    scheduler, allocator = scheduler.abort(allocator, aborts)
    scheduler, *_ = scheduler.submit(allocator, Requests(prompts, lengths, lengths))
    scheduler, allocator = scheduler.change_seats(allocator)
    scheduler, allocator, step = scheduler.admit(allocator).plan(allocator, chunk_tokens=16)
    scheduler, allocator = scheduler.commit(allocator, step, step.tokens[step.last])
    scheduler, outbox = scheduler.drain()
    return scheduler.forget_prefixes(), allocator, outbox


def arguments():
    allocator = BlockAllocator.create(num_blocks=33, block_size=4, num_seqs=16, max_blocks_per_seq=8)
    scheduler = with_prefix_cache(allocator, max_requests=40, num_seqs=16, max_length=32)
    return scheduler, allocator, np.zeros((20, 24), np.int32), np.zeros(20, np.int32), np.zeros(40, bool)


def test_dtypes_do_not_change_with_x64():
    state = arguments()
    with jax.enable_x64(True):
        after = jax.eval_shape(operations, *state)
    for one, other in zip(jax.tree.leaves(state[:2]), jax.tree.leaves(after[:2]), strict=True):
        assert one.dtype == other.dtype
    # A weak type would recompile a slice.
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state[:2], after)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_only_submit_sorts_and_nothing_loops_branches_or_calls_the_host(platform):
    text = jax.jit(operations).trace(*arguments()).lower(lowering_platforms=(platform,)).as_text()
    names = re.findall(r"stablehlo\.(\w+)", text)
    assert "scatter" in names  # the search finds operations
    assert names.count("sort") == 1
    assert not {*names} & {"while", "case", "if", "custom_call", "infeed", "outfeed", "send", "recv"}


def with_prefix_cache(allocator, **sizes):
    prefix_cache = PrefixCache.create(num_blocks=allocator.num_blocks, block_size=allocator.block_size)
    return create(**sizes, prefix_cache=prefix_cache)


def test_requests_that_can_never_be_served_are_refused():
    # The pool has 4 blocks for 16 tokens, a table row has room for 24, and there is one place.
    allocator = BlockAllocator.create(num_blocks=5, block_size=4, num_seqs=1, max_blocks_per_seq=6)
    scheduler = Scheduler.create(max_requests=1, num_seqs=1, max_length=22)
    rows = (
        (0, 1, SubmitStatus.NO_PROMPT),
        (-1, 1, SubmitStatus.NO_PROMPT),
        (1, 0, SubmitStatus.NO_NEW_TOKENS),
        (1, 2**31 - 1, SubmitStatus.TOO_LONG),
        (21, 1, SubmitStatus.TOO_LONG),  # longer than its row
        (20, 3, SubmitStatus.TOO_LONG),
        (9, 9, SubmitStatus.NEVER_FITS),  # 17 tokens are computed
        (9, 8, SubmitStatus.ACCEPTED),
        (1, 1, SubmitStatus.QUEUE_FULL),
    )
    lengths, new_tokens, expected = map(list, zip(*rows, strict=True))
    requests = Requests(jnp.zeros((len(rows), 20), jnp.int32), int32(*lengths), int32(*new_tokens))
    submitted, ids, submit_statuses = jax.jit(Scheduler.submit)(scheduler, allocator, requests)
    assert submit_statuses.tolist() == expected
    assert ids.tolist() == [0 if status == SubmitStatus.ACCEPTED else 1 for status in expected]
    assert submitted.broken_invariants(allocator) == ()


def test_the_str_shows_seats_and_requests():
    scheduler, allocator = one_running()
    assert int(scheduler.num_pending(allocator)) == 2
    assert str(scheduler).splitlines() == [
        "Scheduler: 1 of 1 seats taken, 1 requests waiting, 0 finished (of 2), 0 of 64 steps in the outbox",
        "  seat 0: request 0, 3 of at most 8 tokens known",
    ]
    jax.eval_shape(lambda scheduler: (str(scheduler), scheduler)[1], scheduler)  # while tracing too


def one_running(num_seqs=1):
    allocator = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=num_seqs, max_blocks_per_seq=5)
    scheduler = Scheduler.create(max_requests=2, num_seqs=1, max_length=20)
    seated = dict(seated=int32(0), statuses=int32(2, 1), num_known=int32(3, 2), limits=int32(8, 3))
    return dataclasses.replace(scheduler, **seated), allocator


def create(**changes):
    return Scheduler.create(**dict(max_requests=2, num_seqs=1, max_length=3) | changes)


def submit(scheduler, allocator, **fields):
    requests = dict(prompts=jnp.ones((2, 3), jnp.int32), prompt_lengths=int32(1, 1), max_new_tokens=int32(1, 1))
    return scheduler.submit(allocator, Requests(**requests | fields))


REFUSED = (
    ("num_seqs must be at least 1; got num_seqs=0", lambda *_: create(num_seqs=0)),
    ("num_stop_ids must be at least 0; got num_stop_ids=-1", lambda *_: create(num_stop_ids=-1)),
    ("max_length=3 is less than a block of 4", lambda _, allocator: with_prefix_cache(allocator, max_length=3)),
    ("got num_seqs=3 of the allocator, 1 of the scheduler", lambda scheduler, _: scheduler.plan(one_running(3)[1])),
    ("got num_seqs=3 of the allocator, 1 of the scheduler", lambda scheduler, _: scheduler.admit(one_running(3)[1])),
    ("chunk_tokens must be at least 0; got chunk_tokens=-1", lambda *both: both[0].plan(both[1], chunk_tokens=-1)),
    (  # tokens are checked before the step
        r"tokens must be int32 \[1\]; got float32",
        lambda scheduler, allocator: scheduler.commit(allocator, scheduler.sampling, jnp.ones(1)),
    ),
    (
        r"requests must be bool \[2\]; got int32",
        lambda scheduler, allocator: scheduler.abort(allocator, int32(0, 1)),
    ),
    (
        "requests must be jaxpaged.scheduling.Requests; got ArrayImpl",
        lambda scheduler, allocator: scheduler.submit(allocator, int32(0, 1)),
    ),
    (
        r"prompts must be int32 \[rows, width\]; got int32 \[2\]",
        lambda *both: submit(*both, prompts=int32(1, 2)),
    ),
    (
        r"prompt_lengths must be int32 \[2\], one for each prompt; got int32 \[1\]",
        lambda *both: submit(*both, prompt_lengths=int32(1)),
    ),
    (
        r"seed must be uint32 \[2\], one for each prompt; got int32",
        lambda *both: submit(*both, sampling=Sampling(seed=int32(1, 1))),
    ),
    (
        r"stop_ids must be int32 \[2, n\], n at most 4 .*; got int32 \[2, 5\]",
        lambda *both: submit(*both, stop_ids=jnp.zeros((2, 5), jnp.int32)),
    ),
    (
        "create the scheduler with a prefix_cache to call this",
        lambda scheduler, allocator: scheduler.change_seats(allocator),
    ),
    ("there is nothing to forget", lambda scheduler, _: scheduler.forget_prefixes()),
)


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_misuse_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call(*one_running())


BROKEN = {
    "seats_name_requests": dict(seated=int32(7, 0)),
    "nobody_has_two_seats": dict(seated=int32(0, 0)),
    "the_seated_run": dict(seated=int32(0, 3)),
    "free_seats_hold_no_tokens": dict(seated=int32(3, 1)),
    "what_is_computed_is_known": dict(num_known=int32(1, 2, 0)),
    "the_live_may_grow": dict(limits=int32(3, 7, 0)),
    "prompts_are_known": dict(prompt_lengths=int32(2, 3, 0)),
    "the_live_fit_the_pool": dict(limits=int32(24, 7, 0)),
    "statuses_are_known": dict(statuses=int32(2, 2, 6)),
    "order_has_each_request_once": dict(order=int32(0, 1, 1)),
    "ranks_are_places_in_the_order": dict(ranks=int32(0, 2, 1)),
    "the_live_stand_in_order": dict(keys=int32(5, 0, 9)),
    "outbox_holds_its_steps": dict(counters=int32(65, 0, 0, 0)),
    "unused_rows_of_the_outbox_are_empty": dict(outbox=jnp.zeros((64, 2, 2), jnp.int32)),
}


def two_running():
    """Two seats with a cached block each, in a scheduler with a prefix cache."""
    allocator = BlockAllocator.create(num_blocks=6, block_size=2, num_seqs=2, max_blocks_per_seq=5)
    scheduler = with_prefix_cache(allocator, max_requests=3, num_seqs=2, max_length=24)
    allocator, _, _ = allocator.append(int32(3, 2), q_len=3)
    pool = dataclasses.replace(allocator.pool, cached_at=int32(-1, 6, -1, 6, -1, -1))  # blocks 1 and 3
    scheduler = dataclasses.replace(
        scheduler,
        seated=int32(0, 1),
        statuses=int32(2, 2, 0),
        num_known=int32(3, 2, 0),
        prompt_lengths=int32(2, 2, 0),
        limits=int32(8, 7, 0),
        keys=int32(0, 1, 0),
        arrivals=int32(0, 1, 0),
    )
    allocator = dataclasses.replace(allocator, pool=pool)
    assert scheduler.broken_invariants(allocator) == ()
    assert allocator.broken_invariants() == ()
    return scheduler, allocator


@pytest.mark.parametrize("invariant", BROKEN)
def test_each_broken_invariant_is_named(invariant):
    scheduler, allocator = two_running()
    assert invariant in dataclasses.replace(scheduler, **BROKEN[invariant]).broken_invariants(allocator)


def test_each_broken_invariant_of_prefixes_is_named():
    scheduler, allocator = two_running()
    prefixes = scheduler.prefixes
    cached = dataclasses.replace(prefixes.cache.cached, tokens=jnp.ones((6, 2), jnp.int32))
    other_tokens = dataclasses.replace(prefixes.cache, cached=cached)
    broken = {
        "who_left_has_no_seat": dict(left=int32(0, 3), is_due=jnp.asarray(True)),
        "a_change_is_due_where_somebody_left": dict(left=int32(3, 1)),
        "cached_blocks_have_the_tokens_of_those_who_hold_them": dict(cache=other_tokens),
    }
    for invariant, changes in broken.items():
        changed = dataclasses.replace(scheduler, prefixes=dataclasses.replace(prefixes, **changes))
        assert invariant in changed.broken_invariants(allocator)
