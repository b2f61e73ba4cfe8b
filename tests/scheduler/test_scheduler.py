"""The scheduler: traces of its rules, and a toy model in a loop of steps inside one jit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from jaxpaged.scheduling import Requests, RequestStatus, Sampling, Scheduler, SubmitStatus
from tests.compiled import instructions

# Sizes of the loops. The pool holds four sequences at their limit, or all seats and more.
REQUESTS, SEATS, TOKENS, STEPS, BLOCK_SIZE = 40, 16, 32, 12, 4
MAX_BLOCKS = TOKENS // BLOCK_SIZE
POOLS = {"tight": 4 * MAX_BLOCKS + 1, "plenty": SEATS * MAX_BLOCKS + 1}
ROWS, WIDTH, FEATURES = 20, 24, 64


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def next_token(history, seed):
    """The toy model: a hash of all tokens, one after the other, and of the request's seed."""
    state = seed
    for token in history:
        state = (state * 31 + token + 7) % 65_521
    return state % 50


def model(cache, allocator, step):
    """The same, of what stands in the cache: each token is written to its slot and found again through the table."""
    cache = cache.at[step.slots].set(jnp.broadcast_to(step.tokens[:, None], (len(step.tokens), FEATURES)), mode="drop")
    positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (SEATS, TOKENS))
    seats = jnp.broadcast_to(jnp.arange(SEATS, dtype=jnp.int32)[:, None], positions.shape)
    # A slot that was never written for this sequence holds -1 or another's token: either changes the hash.
    read = cache.at[allocator.slots(seats, positions), 0].get(mode="fill", fill_value=0)
    state = step.sampling.seed.astype(jnp.int32)

    def hash_one(position, state):
        return jnp.where(position < allocator.lengths, (state * 31 + read[:, position] + 7) % 65_521, state)

    return cache, jax.lax.fori_loop(0, TOKENS, hash_one, state) % 50


def run_slice(cache, scheduler, allocator, arrivals, aborts, slip, chunk_tokens):
    scheduler, allocator = scheduler.abort(allocator, aborts)
    prompts, lengths, new_tokens, seeds = arrivals
    stop_ids = jnp.full((ROWS, 1), 13, jnp.int32)
    requests = Requests(prompts, lengths, new_tokens, stop_ids=stop_ids, sampling=Sampling(seed=seeds))
    scheduler, ids, submit_statuses = scheduler.submit(allocator, requests)

    def one_step(carry):
        cache, scheduler, allocator = carry
        scheduler = scheduler.admit(allocator)
        scheduler, allocator, step = scheduler.plan(allocator, chunk_tokens=chunk_tokens)
        step = dataclasses.replace(step, slots=step.slots + jnp.where(step.positions == 4, slip, 0))
        cache, tokens = model(cache, allocator, step)
        return cache, *scheduler.commit(allocator, step, tokens)

    carry = cache, scheduler, allocator
    cache, scheduler, allocator = jax.lax.while_loop(lambda carry: carry[1].has_work, one_step, carry)
    scheduler, outbox = scheduler.drain()
    return cache, scheduler, allocator, outbox, ids, submit_statuses


def start(pool):
    allocator = BlockAllocator.create(
        num_blocks=POOLS[pool], block_size=BLOCK_SIZE, num_seqs=SEATS, max_blocks_per_seq=MAX_BLOCKS
    )
    cache = jnp.full((POOLS[pool] * BLOCK_SIZE, FEATURES), -1, jnp.int32)
    scheduler = Scheduler.create(
        max_requests=REQUESTS, num_seqs=SEATS, max_length=TOKENS, max_steps=STEPS, num_stop_ids=1
    )
    return cache, scheduler, allocator


def nothing():
    rows = (np.zeros(ROWS, dtype) for dtype in (np.int32, np.int32, np.uint32))
    return (np.zeros((ROWS, WIDTH), np.int32), *rows), np.zeros(REQUESTS, bool)


@functools.cache
def compiled(pool, chunk_tokens):
    function = functools.partial(run_slice, chunk_tokens=chunk_tokens)
    # Not optimised: compiling takes longer than running.
    options = {"xla_backend_optimization_level": 0}
    jitted = jax.jit(function, donate_argnums=(0, 1, 2), compiler_options=options)
    return jitted.lower(*start(pool), *nothing(), np.int32(0)).compile()


@dataclasses.dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    seed: int

    def generated(self):
        tokens = []
        while len(tokens) < self.new_tokens and 13 not in tokens:
            tokens.append(next_token(self.prompt + tokens, self.seed))
        return tokens


def requests(count, rng):
    lengths = rng.integers(1, WIDTH, count)
    return [
        Request(rng.integers(0, 50, n).tolist(), int(rng.integers(1, TOKENS - n + 1)), int(rng.integers(0, 1000)))
        for n in lengths
    ]


def serve(pool, chunk_tokens, queue, rng, *, abort_rate=0.0, slip=0):
    """Runs slices until all have ended. (tokens of each request in the order of the queue, how each ended, the last)"""
    state, waiting, ends = start(pool), list(range(len(queue))), {}
    tokens, of_id = [[] for _ in queue], {}
    while waiting or of_id:
        now, (arrivals, aborts) = waiting[:ROWS], nothing()
        for row, i in enumerate(now):
            prompt = queue[i].prompt
            arrivals[0][row, : len(prompt)] = prompt
            for array, value in zip(arrivals[1:], (len(prompt), queue[i].new_tokens, queue[i].seed), strict=True):
                array[row] = value
        aborts[list(of_id)] = rng.random(len(of_id)) < abort_rate
        *state, outbox, ids, submit_statuses = compiled(pool, chunk_tokens)(*state, arrivals, aborts, np.int32(slip))
        outbox, ids, submit_statuses = jax.tree.map(np.asarray, (outbox, ids, submit_statuses))
        for i, request_id, refusal in zip(now, ids.tolist(), submit_statuses, strict=False):
            assert refusal in (SubmitStatus.ACCEPTED, SubmitStatus.QUEUE_FULL)
            if refusal == SubmitStatus.ACCEPTED:
                assert request_id not in of_id
                of_id[request_id] = i
        waiting = [i for i in waiting if i not in of_id.values() and i not in ends]
        for step in range(outbox.num_steps):
            for seat in np.flatnonzero(outbox.request_ids[step] < REQUESTS):
                tokens[of_id[int(outbox.request_ids[step, seat])]].append(int(outbox.tokens[step, seat]))
        for request_id in np.flatnonzero(outbox.finished).tolist():
            i = of_id.pop(request_id)
            assert i not in ends
            ends[i] = RequestStatus(int(outbox.finished[request_id]))
        scheduler, allocator = jax.tree.map(np.asarray, state[1:])
        assert scheduler.broken_invariants(allocator) == ()
        assert allocator.broken_invariants() == ()
    assert int(allocator.num_free) == POOLS[pool] - 1
    return tokens, [ends[i] for i in range(len(queue))], scheduler


@pytest.mark.parametrize(("pool", "chunk_tokens"), [("tight", 16), ("plenty", 64)])  # each compiles
def test_tokens_do_not_depend_on_the_load(pool, chunk_tokens):
    rng = np.random.default_rng(0)
    queue = requests(60, rng)
    expected = [request.generated() for request in queue]
    num_preempted = 0
    for order in (np.arange(60), np.arange(60)[::-1], rng.permutation(60)):
        tokens, ends, scheduler = serve(pool, chunk_tokens, [queue[i] for i in order], rng)
        assert tokens == [expected[i] for i in order]
        stopped = [RequestStatus.STOPPED if 13 in of_one else RequestStatus.EXHAUSTED for of_one in tokens]
        assert ends == stopped
        num_preempted += int(scheduler.num_preempted)
    assert (num_preempted > 0) == (pool == "tight")


def test_a_wrong_slot_changes_the_tokens():
    # The twin: the fifth token of each request stands one slot beside its own.
    rng = np.random.default_rng(0)
    queue = requests(20, rng)
    right, wrong = (serve("plenty", 64, queue, rng, slip=slip)[0] for slip in (0, 1))
    assert [tokens[:1] for tokens in right] != [tokens[:1] for tokens in wrong]


def test_soak_in_a_pool_of_a_quarter_of_the_seats():
    rng = np.random.default_rng(0)
    queue = requests(2000, rng)
    tokens, ends, scheduler = serve("tight", 16, queue, rng, abort_rate=0.02)
    for request, of_one, end in zip(queue, tokens, ends, strict=True):
        expected = request.generated()
        if end == RequestStatus.ABORTED:
            assert of_one == expected[: len(of_one)]
            assert len(of_one) < len(expected)
        else:
            assert of_one == expected
    assert 20 < ends.count(RequestStatus.ABORTED) < 400
    assert 0 < scheduler.num_recomputed <= 0.02 * scheduler.num_computed


def test_the_compiled_slice_copies_no_cache_and_never_calls_the_host():
    # It is one program for all: `serve` calls what was compiled before the first request was known.
    cache, *_ = start("tight")
    module = compiled("tight", 16)
    text = module.as_text()
    copies = [line for name, size, line in instructions(text) if name.startswith("copy") and size >= cache.size]
    assert copies == []
    operations = {name for name, _, _ in instructions(text)}
    assert not operations & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in text
    assert module.memory_analysis().alias_size_in_bytes >= cache.nbytes


def test_dtypes_hold_with_64_bits_switched_on():
    state = start("tight")
    with jax.enable_x64(True):
        function = functools.partial(run_slice, chunk_tokens=16)
        after = jax.eval_shape(function, *state, *nothing(), np.int32(0))  # the loop checks its own state
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(after[:3]), strict=True):
        assert one.dtype == other.dtype
    # A weak type would compile a slice a second time.
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, after)))
    allocator = state[2]
    scheduler = with_prefix_cache(allocator, max_requests=REQUESTS, num_seqs=SEATS, max_length=TOKENS)
    with jax.enable_x64(True):
        after = jax.eval_shape(lambda scheduler: scheduler.forget_prefixes().change_seats(allocator), scheduler)
    for one, other in zip(jax.tree.leaves((scheduler, allocator)), jax.tree.leaves(after), strict=True):
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_loop_no_branch_no_sort_no_host(platform):
    def all_of_them(scheduler, allocator, aborts):
        scheduler, allocator = scheduler.abort(allocator, aborts)
        scheduler, allocator = scheduler.change_seats(allocator)
        scheduler = scheduler.admit(allocator)
        scheduler, allocator, step = scheduler.plan(allocator, chunk_tokens=16)
        scheduler, allocator = scheduler.commit(allocator, step, step.tokens[step.last])
        return *scheduler.drain(), allocator

    _, _, allocator = start("tight")
    scheduler = with_prefix_cache(allocator, max_requests=REQUESTS, num_seqs=SEATS, max_length=TOKENS)
    text = (
        jax.jit(all_of_them).trace(scheduler, allocator, np.zeros(REQUESTS, bool)).lower(lowering_platforms=(platform,))
    )
    operations = set(re.findall(r"stablehlo\.(\w+)", text.as_text()))
    assert "scatter" in operations  # the search sees operations
    assert not operations & {"while", "case", "if", "sort", "custom_call", "infeed", "outfeed", "send", "recv"}


def with_prefix_cache(allocator, **sizes):
    prefix_cache = PrefixCache.create(num_blocks=allocator.num_blocks, block_size=allocator.block_size)
    return Scheduler.create(**sizes, prefix_cache=prefix_cache)


def test_what_can_never_be_served_is_refused():
    allocator = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=2, max_blocks_per_seq=5)
    scheduler = Scheduler.create(max_requests=2, num_seqs=2, max_length=22)
    prompts = jnp.zeros((10, 20), jnp.int32)
    lengths = int32(0, 1, 1, 21, 20, 9, 1, 1, -1, 1)
    new_tokens = int32(1, 0, 2**31 - 1, 1, 3, 13, 20, 20, 1, 1)
    # 9 + 13 - 1 = 21 tokens need 6 blocks; 20 fit. Two places: the third that could be served finds the queue full.
    expected = [
        SubmitStatus.NO_PROMPT,
        SubmitStatus.NO_NEW_TOKENS,
        SubmitStatus.TOO_LONG,
        SubmitStatus.TOO_LONG,
        SubmitStatus.TOO_LONG,
        SubmitStatus.NEVER_FITS,
        SubmitStatus.ACCEPTED,
        SubmitStatus.ACCEPTED,
        SubmitStatus.NO_PROMPT,
        SubmitStatus.QUEUE_FULL,
    ]
    submit = jax.jit(Scheduler.submit)
    submitted, ids, submit_statuses = submit(scheduler, allocator, Requests(prompts, lengths, new_tokens))
    assert submit_statuses.tolist() == expected
    assert ids.tolist() == [2, 2, 2, 2, 2, 2, 0, 1, 2, 2]
    assert submitted.broken_invariants(allocator) == ()


def test_text_and_misuse():
    allocator = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=1, max_blocks_per_seq=5)
    scheduler = Scheduler.create(max_requests=2, num_seqs=1, max_length=20)
    prompts = jnp.ones((2, 3), jnp.int32)
    seated = dict(seated=int32(0), statuses=int32(2, 1), num_known=int32(3, 2), limits=int32(8, 3))
    scheduler = dataclasses.replace(scheduler, **seated)
    step = scheduler.sampling  # any: the tokens are looked at first
    assert int(scheduler.num_pending(allocator)) == 2
    assert str(scheduler).splitlines() == [
        "Scheduler: 1 of 1 seats taken, 1 requests waiting, 0 finished (of 2), 0 of 64 steps in the outbox",
        "  seat 0: request 0, 3 of at most 8 tokens known",
    ]
    jax.eval_shape(lambda scheduler: (str(scheduler), scheduler)[1], scheduler)  # while tracing too
    other = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=3, max_blocks_per_seq=5)

    def submit(**fields):
        requests = dict(prompts=prompts, prompt_lengths=int32(1, 1), max_new_tokens=int32(1, 1)) | fields
        return scheduler.submit(allocator, Requests(**requests))

    calls = {
        "num_seqs must be at least 1; got num_seqs=0": lambda: Scheduler.create(
            max_requests=1, num_seqs=0, max_length=1
        ),
        "num_stop_ids must be at least 0; got num_stop_ids=-1": lambda: Scheduler.create(
            max_requests=1, num_seqs=1, max_length=1, num_stop_ids=-1
        ),
        "got num_seqs=3 of the allocator, 1 of the scheduler": lambda: scheduler.plan(other),
        "chunk_tokens must be at least 0; got chunk_tokens=-1": lambda: scheduler.plan(allocator, chunk_tokens=-1),
        r"tokens must be int32 \[1\]; got float32": lambda: scheduler.commit(allocator, step, jnp.ones(1)),
        r"requests must be bool \[2\]; got int32": lambda: scheduler.abort(allocator, int32(0, 1)),
        r"prompts must be int32 \[rows, width\]; got int32 \[2\]": lambda: submit(prompts=int32(1, 2)),
        r"prompt_lengths must be int32 \[2\], one for each prompt; got int32 \[1\]": lambda: submit(
            prompt_lengths=int32(1)
        ),
        r"seed must be uint32 \[2\], one for each prompt; got int32": lambda: submit(
            sampling=Sampling(seed=int32(1, 1))
        ),
        r"stop_ids must be int32 \[2, n\], n at most 4 .*; got int32 \[2, 5\]": lambda: submit(
            stop_ids=jnp.zeros((2, 5), jnp.int32)
        ),
        "requests must be jaxpaged.scheduling.Requests; got ArrayImpl": lambda: scheduler.submit(allocator, prompts),
        "got num_seqs=3 of the allocator, 1 of the scheduler.": lambda: scheduler.admit(other),
    }
    few = dict(max_requests=2, num_seqs=1, max_length=3)
    calls |= {
        "max_length=3 is less than a block of 4": lambda: with_prefix_cache(allocator, **few),
        "create the scheduler with a prefix_cache to call this": lambda: scheduler.change_seats(allocator),
        "there is nothing to forget": scheduler.forget_prefixes,
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


BROKEN = {
    "seats_name_requests": dict(seated=int32(7, 0)),
    "nobody_has_two_seats": dict(seated=int32(0, 0)),
    "the_seated_run": dict(seated=int32(0, 3)),
    "free_seats_hold_no_tokens": dict(seated=int32(3, 1)),
    "what_is_computed_is_known": dict(num_known=int32(1, 2, 0)),
    "the_live_may_grow": dict(limits=int32(3, 7, 0)),
    "the_live_fit_the_pool": dict(limits=int32(24, 7, 0)),
    "statuses_are_known": dict(statuses=int32(2, 2, 6)),
    "order_has_each_request_once": dict(order=int32(0, 1, 1)),
    "ranks_are_places_in_the_order": dict(ranks=int32(0, 2, 1)),
    "the_live_stand_in_order": dict(keys=int32(5, 0, 9)),
    "outbox_holds_its_steps": dict(num_steps=jnp.asarray(65, jnp.int32)),
    "unused_rows_of_the_outbox_are_empty": dict(outbox_request_ids=jnp.zeros((64, 2), jnp.int32)),
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
    listing = dataclasses.replace(prefixes.cache.listing, tokens=jnp.ones((6, 2), jnp.int32))
    other_tokens = dataclasses.replace(prefixes.cache, listing=listing)
    broken = {
        "who_left_has_no_seat": dict(left=int32(0, 3), is_due=jnp.asarray(True)),
        "a_change_is_due_where_somebody_left": dict(left=int32(3, 1)),
        "cached_blocks_have_the_tokens_of_those_who_hold_them": dict(cache=other_tokens),
    }
    for invariant, changes in broken.items():
        changed = dataclasses.replace(scheduler, prefixes=dataclasses.replace(prefixes, **changes))
        assert invariant in changed.broken_invariants(allocator)
