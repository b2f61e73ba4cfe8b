"""Random interleavings of every operation of the scheduler against a plain model, to the last block id.

`HYPOTHESIS_PROFILE=long` runs 20 times the steps, with new random numbers each time.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxpaged import BlockAllocator, PrefixCache
from jaxpaged.scheduling import Requests, RequestStatus, Sampling, Scheduler
from tests.allocator_model import Model
from tests.scheduler.scheduler_model import PrefixSchedulerModel, SchedulerModel

LONGER = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1
ROWS, WIDTH, NUM_STOP_IDS = 3, 9, 2  # sizes of a batch of submissions
NUM_ADAPTERS = 2
CHUNK = 1  # tokens in addition to one per seat: few, so that they are scarce
# Kinds of steps: prompt tokens, and rows if fewer than the prompt tokens plus one per seat.
KINDS = SINGLE, MIXED, NARROW, NARROW_MIXED = (0, None), (CHUNK, None), (0, 1), (CHUNK, 3)
# (requests, seats, tokens, steps), (blocks, block size, seats, blocks of a sequence), drafts. Each one compiles; the
# second is for the long profile.
SHAPES = (((7, 4, 14, 6), (10, 2, 4, 6), 3), ((3, 2, 12, 3), (5, 4, 2, 3), 0))


def submit(scheduler, allocator, *args):
    *args, adapter = args  # in field order
    scheduler, *results = scheduler.submit(allocator, Requests(*args, sampling=Sampling(adapter=adapter)))
    return scheduler, allocator, *results


def plan(scheduler, allocator, drafts, kind):
    chunk_tokens, width = kind
    drafts = drafts if chunk_tokens and scheduler.num_drafts else None
    return scheduler.admit(allocator).plan(allocator, chunk_tokens=chunk_tokens, width=width, drafts=drafts)


def drain(scheduler, allocator):
    scheduler, outbox = scheduler.drain()
    return scheduler, allocator, outbox


# Without optimisation: compiling is slower than running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
OPERATIONS = {
    "submit": jit(submit),
    "abort": jit(Scheduler.abort),
    "plan": jit(plan, static_argnames="kind"),
    "commit": jit(Scheduler.commit),
    "drain": jit(drain),
    "change_seats": jit(Scheduler.change_seats),
    "forget": jit(lambda scheduler, allocator, which: (scheduler.forget_prefixes(which), allocator)),
}


def create(shape, has_cache=False):
    (requests, seats, tokens, steps), (num_blocks, block_size, num_seqs, max_blocks), num_drafts = shape
    scheduler = Scheduler.create(
        max_requests=requests,
        num_seqs=seats,
        max_length=tokens,
        max_steps=steps,
        num_stop_ids=NUM_STOP_IDS,
        num_drafts=num_drafts,
        num_adapters=NUM_ADAPTERS,
        prefix_cache=PrefixCache.create(num_blocks=num_blocks, block_size=block_size) if has_cache else None,
    )
    allocator = BlockAllocator.create(
        num_blocks=num_blocks, block_size=block_size, num_seqs=num_seqs, max_blocks_per_seq=max_blocks
    )
    return scheduler, allocator


class Twins:
    """The scheduler and its model, side by side."""

    def __init__(self, shape, model=SchedulerModel):
        sizes, pool, self.num_drafts = shape
        self.scheduler, self.allocator = create(shape, model.has_cache)
        self.model = model(*sizes, Model(*pool))
        # Few different tokens with a cache, so that requests have common prefixes.
        self.vocabulary = 2 if model.has_cache else 5

    def run(self, name, *args, **static):
        arrays = (jnp.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in args)
        self.scheduler, self.allocator, *results = OPERATIONS[name](self.scheduler, self.allocator, *arrays, **static)
        return jax.tree.map(np.asarray, results)

    def submit(self, rng):
        most = self.model.max_length
        prompts = rng.integers(0, self.vocabulary, (ROWS, WIDTH), np.int32)
        lengths = rng.integers(0, rng.choice([3, WIDTH + 1]), ROWS).astype(np.int32)
        new_tokens = rng.integers(1, most - 3, ROWS).astype(np.int32)
        if rng.random() < 0.3:  # an invalid request
            lengths += rng.integers(-2, 5, ROWS, np.int32)
            new_tokens += rng.integers(-4, 4, ROWS, np.int32) * (2**29 if rng.random() < 0.3 else 1)
        head_starts = rng.integers(-2, 6, ROWS, np.int32) * (rng.random(ROWS) < 0.4)
        stop_ids = np.where(rng.random((ROWS, NUM_STOP_IDS)) < 0.3, rng.integers(0, 5), -1).astype(np.int32)
        # Derived from the draws above, so that the random sequence does not change.
        has_adapter = new_tokens % 4 == 3
        adapters = np.where(has_adapter, prompts[:, -1] % NUM_ADAPTERS, -1).astype(np.int32)
        args = prompts, lengths, new_tokens, head_starts.astype(np.int32), stop_ids, adapters
        ids, submit_statuses = self.run("submit", *args)
        for row, (prompt, length, new, head_start, stops, adapter) in enumerate(zip(*args, strict=True)):
            # A length beyond the row is refused before the prompt is read.
            tokens = prompt.tolist() + [0] * 9 if length > WIDTH else prompt.tolist()
            stops = [stop for stop in stops.tolist() if stop >= 0]
            expected = self.model.submit(
                tokens[: max(length, 0)], WIDTH, int(new), int(head_start), stops, int(adapter)
            )
            assert (ids[row], submit_statuses[row]) == expected
        self.change_seats()

    def change_seats(self):
        assert bool(self.scheduler.is_change_due) == (self.model.has_cache and self.model.is_due)
        if self.scheduler.is_change_due:
            self.model.change_seats()
            self.run("change_seats")

    def forget(self, adapters):
        self.model.forget(adapters)
        self.run("forget", np.isin(np.arange(-1, NUM_ADAPTERS), adapters))

    def abort(self, rng, is_planned=False):
        marked = rng.random(self.model.max_requests) < 0.25
        self.model.abort(np.flatnonzero(marked).tolist())
        self.run("abort", marked)
        if not is_planned:
            self.change_seats()

    def step(self, rng, kind, aborting=False, draining=False):
        drafts = rng.integers(0, self.vocabulary, (len(self.model.seats), self.num_drafts), np.int32)
        drafts[rng.random(drafts.shape) < 0.1] = -1
        if rng.random() < 0.5:
            drafts[:] = -1
        planned = self.model.plan(*kind, drafts.tolist() if kind[0] and self.num_drafts else None)
        (step,) = self.run("plan", drafts, kind=kind)
        self.check_step(step, planned, kind)
        request_ids = list(self.model.seats)
        if aborting:
            self.abort(rng, is_planned=True)
        sampled = rng.integers(0, self.vocabulary, (len(request_ids), self.num_drafts + 1), np.int32)
        is_accepted = (drafts >= 0) & (rng.random(drafts.shape) < 0.6)
        sampled[:, :-1] = np.where(is_accepted, drafts, sampled[:, :-1])
        self.model.commit(planned, sampled.tolist(), request_ids)
        self.run("commit", step, sampled if kind[0] else sampled[:, 0])
        if draining:  # before leaving requests have left their rows
            self.drain()
        self.change_seats()

    def check_step(self, step, planned, kind):
        seats, no_slot = len(planned.tokens), self.allocator.num_blocks * self.allocator.block_size
        taken = np.diff(step.query_starts)
        assert len(step.tokens) == (kind[1] or seats + kind[0])
        assert step.is_sampled.nonzero()[0].tolist() == sorted(planned.sampled)
        assert step.num_drafts.tolist() == [len(drafts) for drafts in planned.drafts]
        assert step.is_victim.nonzero()[0].tolist() == [planned.victim] * (planned.victim is not None)
        used = np.zeros(len(step.tokens), bool)
        for seat, tokens in enumerate(planned.tokens):
            rows = step.query_starts[seat] + np.arange(len(tokens))
            used[rows] = True
            assert step.tokens[rows].tolist() == tokens
            assert step.positions[rows].tolist() == planned.positions[seat]
            assert step.slots[rows].tolist() == planned.slots[seat]
            assert (step.seats[rows] == seat).all()
            assert taken[seat] == (1 if kind == SINGLE else len(tokens))
            assert not tokens or step.last[seat] == rows[-1]
        assert (step.slots[~used] == no_slot).all()
        assert (step.seats[~used] == seats).all()
        assert not step.tokens[~used].any()
        assert not step.positions[~used].any()

    def drain(self):
        steps, finished = self.model.drain()
        (outbox,) = self.run("drain")
        assert int(outbox.num_steps) == len(steps)
        for tokens, ids, expected in zip(outbox.tokens, outbox.request_ids, steps, strict=False):
            is_sampled = ids < self.model.max_requests
            assert (tokens[~is_sampled] == -1).all()
            of_each = {i: tokens[ids == i].tolist() for i in ids[is_sampled].tolist()}
            assert of_each == expected
        assert {int(i): outbox.finished[i] for i in outbox.finished.nonzero()[0]} == finished
        self.change_seats()

    def compare(self):
        scheduler, allocator, model = *jax.tree.map(np.asarray, (self.scheduler, self.allocator)), self.model
        assert scheduler.broken_invariants(allocator) == ()
        assert allocator.broken_invariants() == ()
        for i in range(model.max_requests):
            request = model.requests.get(i)
            assert scheduler.statuses[i] == (request.status if request else RequestStatus.FREE)
            if request:
                assert scheduler.tokens[i, : scheduler.num_known[i]].tolist() == request.tokens
                assert scheduler.prompt_lengths[i] == request.prompt_length
        assert [None if i == model.max_requests else i for i in scheduler.seated] == model.seats
        assert allocator.lengths.tolist() == model.pool.lengths
        blocks = [table[table > 0].tolist() for table in allocator.block_tables]
        assert blocks == model.pool.blocks
        pool = allocator.pool
        indices = (pool.bottom + np.arange(pool.num_free)) % pool.num_blocks
        assert pool.free_list[indices].tolist() == model.pool.free
        assert pool.num_waiting == model.pool.num_waiting
        self.compare_prefixes(scheduler.prefixes)
        assert bool(scheduler.was_refused) == model.was_refused
        for name in ("num_computed", "num_recomputed", "num_preempted"):
            assert getattr(scheduler, name) == getattr(model, name), name
        any_live = any(request.is_live for request in model.requests.values())
        assert bool(scheduler.has_work) == (any_live and len(model.steps) < model.max_steps)

    def compare_prefixes(self, prefixes):
        model = self.model
        if not model.has_cache:
            assert prefixes is None
            return
        assert [None if i == model.max_requests else i for i in prefixes.left] == model.left
        assert np.where(prefixes.num_inserted < 2**31 - 1, prefixes.num_inserted, np.inf).tolist() == model.num_inserted
        for name in ("num_hits", "num_lookups"):
            assert getattr(prefixes.cache, name) == getattr(model, name), name


class SchedulerMachine(RuleBasedStateMachine):
    num_steps = 0

    @initialize(shape=st.sampled_from(SHAPES[:LONGER]), model=st.sampled_from((SchedulerModel, PrefixSchedulerModel)))
    def create(self, shape, model):
        self.twins = Twins(shape, model)

    @rule(seed=st.integers(0, 2**31))
    def submit(self, seed):
        self.twins.submit(np.random.default_rng(seed))

    @rule(seed=st.integers(0, 2**31))
    def abort(self, seed):
        self.twins.abort(np.random.default_rng(seed))

    @rule(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS))
    def step(self, seed, kind):
        self.twins.step(np.random.default_rng(seed), kind)

    @rule(seed=st.integers(0, 2**31), num_steps=st.integers(1, 20))
    def keep_busy(self, seed, num_steps):
        rng = np.random.default_rng(seed)
        for _ in range(num_steps):
            self.twins.submit(rng)
            self.twins.step(rng, KINDS[rng.choice(4, p=(0.4, 0.3, 0.15, 0.15))], draining=True)
            self.agrees()

    @rule(seed=st.integers(0, 2**31))
    def step_with_an_abort_before_the_commit(self, seed):
        self.twins.step(np.random.default_rng(seed), MIXED, aborting=True)

    @rule()
    def drain(self):
        self.twins.drain()

    @precondition(lambda self: self.twins.model.has_cache)
    @rule(adapters=st.sets(st.integers(-1, NUM_ADAPTERS - 1)).map(sorted))
    def forget(self, adapters):
        self.twins.forget(adapters)

    @invariant()
    def agrees(self):
        type(self).num_steps += 1
        self.twins.compare()


def test_the_scheduler_equals_the_model():
    SchedulerMachine.num_steps = 0
    # Without shrinking, which needs minutes; the steps of a failure are printed anyway.
    examples = settings(max_examples=14 * LONGER, stateful_step_count=40, phases=(Phase.generate,))
    run_state_machine_as_test(SchedulerMachine, settings=examples)
    # 500 to 1200: what Hypothesis draws depends on the modules that happen to be imported. That preemption and prefixes
    # are met is the matter of the mixtures below.
    assert SchedulerMachine.num_steps >= 250


def test_the_first_in_rank_is_never_a_victim():
    # It lacks blocks only if others allocate some in the meantime, which is not allowed. It waits then.
    scheduler = Scheduler.create(max_requests=7, num_seqs=4, max_length=14)
    allocator = BlockAllocator.create(num_blocks=10, block_size=2, num_seqs=4, max_blocks_per_seq=6)
    scheduler, *_ = scheduler.submit(allocator, Requests(np.ones((1, 9), np.int32), np.int32([9]), np.int32([3])))
    seen = []
    for _ in range(3):
        scheduler, allocator, step = OPERATIONS["plan"](scheduler, allocator, None, kind=MIXED)
        seen.append((int(allocator.lengths[0]), bool(scheduler.was_refused), bool(step.is_victim.any())))
        scheduler, allocator = OPERATIONS["commit"](scheduler, allocator, step, np.zeros(4, np.int32))
        allocator, _, _ = allocator.append(np.int32([0, 12 if len(seen) == 1 else 0, 0, 0]), q_len=12)
    assert seen == [(5, False, False), (5, True, False), (5, True, False)]


def random_steps(model, num_steps):
    """The rules in a fixed mixture that keeps the pool tight."""
    rng, twins = np.random.default_rng(1), Twins(SHAPES[0], model)
    for i in range(num_steps):
        twins.submit(rng)
        draining = i % 8 in (3, 7) and i % 40 != 3  # sometimes only after the outbox is full
        kind = NARROW if i % 7 == 5 else NARROW_MIXED if i % 7 == 2 else MIXED if i % 3 else SINGLE
        twins.step(rng, kind, aborting=i % 20 == 10, draining=draining)
        if model.has_cache and i % 50 == 49:
            twins.forget([[-1, 0], [1]][i // 50 % 2])
        twins.compare()
    return twins.model


def test_the_mixture_meets_preemption_and_accepts_drafts():
    model = random_steps(SchedulerModel, 240)
    assert model.num_preempted >= 5
    assert model.num_accepted >= 20


def test_the_mixture_meets_preemption_and_finds_prefixes():
    model = random_steps(PrefixSchedulerModel, 300)
    assert model.num_preempted >= 5
    assert model.num_hits >= 20


class AdmitsAfterARefusal(SchedulerModel):
    def admit(self):
        self.was_refused = False
        super().admit()


class AdmitsInOrderOfIds(SchedulerModel):
    def waiting(self):
        return sorted(super().waiting())


class LetsSmallRequestsOvertake(SchedulerModel):
    def admit(self):
        for i in self.waiting():
            self.waiting = lambda i=i: [i]
            super().admit()
        vars(self).pop("waiting", None)


class ReservesNoSpareBlock(SchedulerModel):
    def reserve(self, i):
        return self.pool.num_blocks_for(len(self.requests[i].tokens))


class ReservesBeyondTheLimit(SchedulerModel):
    def reserve(self, i):
        return self.pool.num_blocks_for(len(self.requests[i].tokens)) + 1


class SharesInOrderOfSeats(SchedulerModel):
    def to_share(self):
        return sorted(self.seated())


class GrantsInOrderOfSeats(SchedulerModel):
    def to_grant(self):
        return sorted(self.seated())


class PreemptsTheFirstCandidate(SchedulerModel):
    def victim(self, holders):
        return holders[0]


class IgnoresStopIds(SchedulerModel):
    def ends(self, request):
        return super().ends(dataclasses.replace(request, stop_ids=[]))


class SamplesOneTokenMore(SchedulerModel):
    def ends(self, request):
        return super().ends(dataclasses.replace(request, limit=request.limit + 1))


class DraftsInOrderOfSeats(SchedulerModel):
    def turns(self, guesses):
        return sorted(super().turns(guesses), key=lambda pair: pair[1])


class DraftsBeyondTheLimit(SchedulerModel):
    def may_follow(self, request, turn):
        return len(request.tokens) + turn <= request.limit


class DraftsUseBlocksOfOthers(SchedulerModel):
    def exceeds_the_pool(self, num_blocks):
        return False


class AcceptsEveryDraft(SchedulerModel):
    def accepts(self, draft, token, request):
        return request.is_live


class GoesOnAfterAStop(SchedulerModel):
    def accepts(self, draft, token, request):
        return draft == token


class KeepsSlotsOfRejectedDrafts(SchedulerModel):
    def num_kept(self, request):
        return len(request.tokens)


class KeepsBlocksOfFinishedRequests(SchedulerModel):
    def leave(self, seats):
        self.seats = [None if seat in seats else i for seat, i in enumerate(self.seats)]


class IgnoresHeadStarts(SchedulerModel):
    def key(self, arrival, head_start):
        return arrival


class AcceptsRequestsThatNeverFit(SchedulerModel):
    def fits(self, limit):
        return True


class KeepsPlacesOfFinishedRequests(SchedulerModel):
    def finished(self):
        return []


class NeverWaitsForAnother(PrefixSchedulerModel):
    def is_held_back(self, i, candidates):
        return False


class WaitsForLaterRequests(PrefixSchedulerModel):
    def comes_before(self, j, i):
        return j != i


class WaitingBlocksLaterRequests(PrefixSchedulerModel):
    def enter(self, i):
        candidates = self.waiting()[: len(self.seats)]
        ranks = [self.requests[j].rank for j in candidates if self.is_held_back(j, candidates)]
        return not any(rank < self.requests[i].rank for rank in ranks) and super().enter(i)


class CountsFoundBlocksAsNeeded(PrefixSchedulerModel):
    def saved(self, hits):
        return 0


class CountsFreeBlocksAsHeld(PrefixSchedulerModel):
    def saved(self, hits):
        return len(hits)


class ListsNoBlocksOfLeavingRequests(PrefixSchedulerModel):
    def list_blocks(self):
        self.pool.free_rows([i is not None for i in self.left])
        super().list_blocks()


class ListsOnlyLeavingRequests(PrefixSchedulerModel):
    def leave_after_commit(self, sampled, leaving):
        is_due = self.is_due or bool(leaving)
        super().leave_after_commit(sampled, leaving)
        self.is_due = is_due


class ForgetsNothing(PrefixSchedulerModel):
    def forget(self, adapters):
        pass


class ForgetsEverything(PrefixSchedulerModel):
    def forget(self, adapters):
        super().forget([-1, 0, 1])


class MatchesBlocksOfOtherAdapters(PrefixSchedulerModel):
    def salt(self, i):
        return self.rounds[self.requests[i].adapter]


class ListsOldBlocksAsNew(PrefixSchedulerModel):
    def forget(self, adapters):
        super().forget(adapters)
        self.pool.salts = [None if i is None else self.salt(i) for i in self.seats]


class AdmitsOnlyAfterAnEnd(PrefixSchedulerModel):
    def plan(self, *args):
        is_due = self.is_due
        planned = super().plan(*args)
        self.is_due = is_due
        return planned


MUTANTS = [model for model in SchedulerModel.__subclasses__() if not model.has_cache]
MUTANTS += PrefixSchedulerModel.__subclasses__()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_model_with_one_changed_rule_is_detected(mutant):
    # The twin: a comparison that detects a wrong model also detects a wrong scheduler.
    with pytest.raises(AssertionError):
        random_steps(mutant, 300)
