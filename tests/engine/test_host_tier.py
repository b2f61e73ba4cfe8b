"""The host tier: cached blocks that the pool loses are restored from host memory, and tokens do not change."""

import contextlib
import dataclasses
import functools
import itertools
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.soak.engine import soak
from jaxpaged import SamplingParams
from jaxpaged._engine.host_tier import copies
from jaxpaged._engine.host_tier.copies import HostCopies, Run
from jaxpaged._engine.host_tier.tier import HostTier, Moves
from jaxpaged._engine.requests import CompletionState
from jaxpaged._scheduler.records import RequestStatus
from tests.toy_model import (
    BLOCK_SIZE,
    TIGHT,
    VOCAB,
    assert_idle,
    assert_invariants,
    counting,
    create_engine,
    expected_tokens,
    finish,
    greedy,
    operations_on,
    random_weights,
    tokens_of,
    until_module_ends,
    with_blocks_back,
    without_blocks,
)

CHUNK = 8


@until_module_ends
def tight_engine():
    """An engine whose pool has blocks for two requests at their limit."""
    options = dict(prefix_cache=True, host_cache_bytes=10**6, batch_invariant=True, chunk_tokens=CHUNK)
    return create_engine(num_blocks=TIGHT + 1, steps_per_slice=2, parts=copies.PARTS, **options)


@pytest.fixture
def engine():
    engine = tight_engine()
    engine.update_weights(random_weights())
    settle(engine)  # no blocks of older weights are left
    yield engine
    assert_idle(engine)


def settle(engine):
    """Waits until all cached blocks are in host memory."""
    for seed in range(2):
        engine.generate([[seed]], greedy(6))


def pending_copies(tier):
    """Blocks and runs that wait or move in either direction."""
    return [*tier._wanted, *tier._leaving, *tier._coming, *tier._arrived]


def serve(engine, prompt, params=greedy(6), seed=0):  # noqa: B008  # it is frozen
    """Serves a prompt, checks its tokens, and returns the prompt with them."""
    (tokens,) = tokens_of(engine.generate([prompt], params))
    assert tokens == expected_tokens(prompt, params, seed)
    return prompt + tokens


def make_prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def evict_cached(engine, weights=0):
    """Serves other prompts until all cached blocks are evicted from the pool."""
    settle(engine)
    for seed in range(3):
        serve(engine, make_prompt(100 + seed, 40), seed=weights)


def count(engine, prompt, *args, **options):
    """(tokens found, brought and computed) for one request."""
    with counting(engine) as counts:
        serve(engine, prompt, *args, **options)
    return counts.num_found, counts.num_brought, counts.num_computed


def test_a_prefix_that_the_pool_has_lost_is_restored(engine):
    talk = serve(engine, make_prompt(1, 20))
    evict_cached(engine)
    # 25 of its 26 tokens and the prompt were computed: six full blocks.
    assert count(engine, [*talk, 7]) == (24, 24, 3 + 5)
    assert count(engine, [*talk, 8]) == (24, 0, 3 + 5)  # now it is in the pool


@pytest.mark.parametrize(("length", "found"), [(CHUNK // 2 + 1, CHUNK // 2), (CHUNK // 2 - 1, 0)])
def test_a_short_prefix_is_computed_instead(engine, length, found):
    prompt = make_prompt(2 + length, length)
    serve(engine, prompt, greedy(1))
    evict_cached(engine)
    assert count(engine, [*prompt, 1], greedy(1)) == (found, found, length + 1 - found)


# Twelve do not fit into the pool: cached blocks may be overwritten in the next slice, before they are copied.
@pytest.mark.parametrize(("at_once", "part"), [(2, 0.95), (12, 0.4)])
def test_alternating_conversations_find_most_of_what_an_endless_pool_would(engine, at_once, part):
    talks, endless = [make_prompt(seed, 12) for seed in range(12)], 0
    with counting(engine) as counts:
        for turn in range(3):
            for i in range(0, len(talks), at_once):
                these = talks[i : i + at_once]
                endless += sum((len(talk) - 6) // BLOCK_SIZE * BLOCK_SIZE if turn else 0 for talk in these)
                for j, tokens in enumerate(tokens_of(engine.generate(these, greedy(6))), i):
                    assert tokens == expected_tokens(talks[j], greedy(6))
                    talks[j] = talks[j] + tokens + make_prompt(turn, 5)
    assert counts.num_found >= part * endless > 0
    assert 0.5 * counts.num_found < counts.num_brought <= counts.num_found  # no block was restored in vain


def test_completions_of_one_prompt_wait_for_one_copy(engine):
    prompt, params = [*serve(engine, make_prompt(3, 24)), 1], SamplingParams(max_tokens=4, seed=3, n=3)
    evict_cached(engine)
    with counting(engine) as counts:
        first, *_ = tokens_of(engine.generate([prompt], params))
    assert first == expected_tokens(prompt, params)
    assert (counts.num_found, counts.num_brought) == (3 * 28, 28)


def test_scores_use_restored_blocks_except_for_their_last_token(engine):
    prompt = serve(engine, make_prompt(4, 22))
    (expected,) = engine.score([prompt[:21]], [prompt[21:]])
    evict_cached(engine)
    with counting(engine) as counts:
        (score,) = engine.score([prompt[:21]], [prompt[21:]])
    assert (counts.num_found, counts.num_brought) == (20, 20)
    np.testing.assert_array_equal(score.logprobs, expected.logprobs)


def test_new_weights_match_no_old_blocks(engine, monkeypatch):
    prompt = [*serve(engine, make_prompt(5, 20)), 7]
    evict_cached(engine)
    with counting(engine) as counts:
        engine.add_request(prompt, greedy(6))
        with monkeypatch.context() as patch:
            patch.setattr(Run, "is_there", False)
            engine.step()  # its blocks are in transit
        engine.update_weights(random_weights(1))
        assert tokens_of(finish(engine).values()) == [expected_tokens(prompt, greedy(6), 1)]
    assert counts.num_found == 0  # the arrived blocks were cached for the old weights
    evict_cached(engine, 1)
    assert count(engine, [*prompt, 3], seed=1)[:2] == (24, 24)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_sleep_frees_host_memory(engine, monkeypatch, is_interrupted):
    talk, clear = serve(engine, make_prompt(6, 20)), engine._runner.tier.clear
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert engine.stats().host_bytes > 0
    if is_interrupted:
        raise_signal = functools.partial(signal.raise_signal, signal.SIGINT)
        monkeypatch.setattr(engine._runner.tier, "clear", lambda: (raise_signal(), clear()))
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        engine.sleep()
    signal.signal(signal.SIGINT, handler)
    assert engine.stats().host_bytes == 0
    assert all(pool.is_deleted() for pool in (engine._runner.state.caches.k, engine._runner.state.caches.v))
    engine.wake_up()
    assert count(engine, [*talk, 7])[:2] == (0, 0)


def test_random_requests_in_a_tight_pool_get_the_right_tokens(engine):
    result = soak(engine, 250, num_kinds=40)
    assert min(result[name] for name in ("abort", "preempted")) > 0
    assert result["brought"] > 100
    settle(engine)  # it is cached again: the soak ends with a sleep
    settle(engine)
    assert pending_copies(engine._runner.tier) == []


def test_a_waiting_request_reserves_room_twice_as_its_blocks_may_be_replaced(engine):
    for seed in range(6):
        engine.add_request(make_prompt(seed, 20), greedy(20))
    engine.step()
    while engine._books.under_way:
        engine._runner.receive()
    scheduler, allocator = jax.tree.map(np.asarray, (engine._runner.state.scheduler, engine._runner.state.allocator))
    num_running, num_held = engine.stats().num_running, int((-(-allocator.lengths // BLOCK_SIZE)).sum())
    known = scheduler.num_known[scheduler.statuses == RequestStatus.RUNNING]
    growth = 2 * 2  # two slices of two steps
    needed = int((-(-(known + growth) // BLOCK_SIZE)).sum()) + 2 * (6 - num_running) * (20 + growth) // BLOCK_SIZE
    assert 0 < num_running < 6
    assert engine._runner.tier._room == allocator.num_free + num_held - needed
    engine.abort()
    finish(engine)


def test_the_programs_copy_no_cache(engine):
    cache, copies = engine._runner.state.caches, engine._runner.tier._copies
    assert len(copies._put_in) > 1
    for program in (*copies._put_in.values(), *copies._take_out.values()):
        names = operations_on(program.as_text(), f"f32[{','.join(map(str, cache.k.shape))}]")
        assert names  # the search sees the cache
        assert [name for name in names if name.startswith("copy")] == []
    for program in copies._put_in.values():
        assert program.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def lost_run_maker(engine, seed):
    """A function that makes runs of a prompt whose blocks the pool has lost."""
    prompt = np.array(serve(engine, make_prompt(seed, 20)), np.int32)[:24].reshape(6, BLOCK_SIZE)
    evict_cached(engine)
    salt = int(engine._runner.state.scheduler.prefixes.salt[0])
    return lambda begin, end, page: Run(None, salt, prompt[:end], [bytes([i]) for i in range(end)], begin, 1, [page])


def test_blocks_after_a_gap_are_not_inserted(engine):
    make_run, copies = lost_run_maker(engine, 7), engine._runner.tier._copies
    for begin, end, is_cached in ((4, 6, False), (0, 4, True), (4, 6, True)):
        run = make_run(begin, end, copies._nothing)
        (engine._runner.state_of_slice,) = copies.put(engine._runner.state, [run])
        ids, serials = np.asarray(run.where)[:, run.index, begin:end]
        assert (ids > 0).tolist() == (serials > 0).tolist() == [is_cached] * (end - begin)
        assert_invariants(engine)
    engine.update_weights(random_weights())  # the pool holds no cached blocks


def test_blocks_without_room_are_neither_written_nor_inserted(engine):
    make_run, runner, copies = lost_run_maker(engine, 8), engine._runner, engine._runner.tier._copies
    allocator, hidden = without_blocks(runner.state.allocator, int(runner.state.allocator.num_free) - 3)
    before = jax.tree.map(np.array, runner.state.caches)
    run = make_run(0, 4, jax.tree.map(jnp.ones_like, copies._nothing))
    (state,) = copies.put(dataclasses.replace(runner.state, allocator=allocator), [run])
    runner.state_of_slice = dataclasses.replace(state, allocator=with_blocks_back(state.allocator, hidden))
    assert not np.asarray(run.where)[:, run.index].any()
    jax.tree.map(np.testing.assert_array_equal, state.caches, before)  # the null block too


def test_new_weights_match_nothing_if_the_copies_before_their_first_slice_fail(engine, monkeypatch):
    prompt = [*serve(engine, make_prompt(10, 20)), 7]
    settle(engine)
    engine.update_weights(random_weights(1))
    tier, failures = engine._runner.tier, [MemoryError("no room for a copy")]
    move = tier.run

    def failing(state, moves):
        if failures:
            raise failures.pop()
        yield from move(state, moves)

    monkeypatch.setattr(tier, "run", failing)
    engine.add_request([1], greedy(6))
    engine._runner.advance()
    request = engine.add_request(prompt, greedy(6))
    with pytest.raises(MemoryError):
        finish(engine)
    assert tokens_of([finish(engine)[request]]) == [expected_tokens(prompt, greedy(6), 1)]


@pytest.mark.parametrize("name", ["take", "put", "bring"])
def test_copies_that_fail_lose_no_token(engine, monkeypatch, name):
    prompt, params = [*serve(engine, make_prompt(8, 20)), 7], greedy(15)
    evict_cached(engine)
    settle(engine)
    copies, failures = engine._runner.tier._copies, [MemoryError("no room for a copy")]
    function = getattr(copies, name)

    def failing(*args):
        if failures and args[-1]:
            raise failures[0] if name == "bring" else failures.pop()  # always, or once
        return function(*args)

    monkeypatch.setattr(copies, name, failing)
    with counting(engine) as counts:
        engine.add_request(prompt, params)
        with pytest.raises(MemoryError, match="no room for a copy"):
            finish(engine)
        assert tokens_of(finish(engine).values()) == [expected_tokens(prompt, params)]
    assert counts.num_found == counts.num_brought == (24 if name == "take" else 0)  # the slice ran without them
    failures.clear()
    settle(engine)
    assert pending_copies(engine._runner.tier) == []


# The books, without a device.

SIZE, POOL, PROMPT = 2, 32, (1, 2, 3, 4, 5, 6, 7)


class FakeDevice:
    """A device whose blocks have keys, places and serials. Requests hold the blocks in `held`. Copies of pages named in
    `slow` never arrive."""

    def __init__(self, *, least_tokens=3, growth=0, num_adapters=0, **sizes):
        self.salts = list(range(1 + num_adapters))
        sizes = dict(in_page=1, num_pages=2, most_staged=4, capacity=8, salts=self.salts) | sizes
        pool = dict(block_size=SIZE, num_blocks=POOL, page_bytes=1, num_prompts=2)
        self.copies = SimpleNamespace(**pool, **sizes, most_leaving=2 * sizes["num_pages"], bring=lambda pages: pages)
        self.tier = HostTier(self.copies, least_tokens=least_tokens, growth=growth)
        self.places, self.held, self.slow, self.num_inserted, self.room = {}, set(), set(), 0, POOL

    def list(self, keys):
        for key in keys:
            if key not in self.places:
                self.num_inserted += 1
                self.places[key] = self.num_inserted % (POOL - 1) + 1, self.num_inserted

    def slice(self, *rows, moves=None, lost=()):
        """Runs the moves of a slice, then loses blocks."""
        moves = self.tier.next_moves() if moves is None else moves
        for run in (*moves.out, *moves.back):
            if run in moves.back and all(key in self.places for key in run.keys[: run.begin]):
                self.list(run.keys)
            found = [self.places[key] for key in itertools.takewhile(self.places.__contains__, run.keys)]
            run.where = np.zeros((2, 1, len(run.keys) + 1), np.int32)
            run.where[:, 0, : len(found)] = np.reshape(found, (-1, 2)).T
            if run in moves.out:
                run.pages = [
                    (self.make_page("/".join(map(str, run.tokens[first].tolist()))),)
                    for first in range(run.begin, len(run.keys), self.copies.in_page)
                ]
        for key in lost:
            self.places.pop(key, None)
        serials = np.zeros(POOL, np.int32)
        for key, (place, serial) in self.places.items():
            serials[place] = serial if key in self.held else -serial
        report = SimpleNamespace(serials=serials, salts=np.array(self.salts), room=np.array(self.room))
        self.tier.after_report(report, moves, rows)

    def make_page(self, name):
        return SimpleNamespace(name=name, is_ready=lambda: name not in self.slow)

    def end(self, row):
        """Ends a request and lists all its blocks. Returns their keys."""
        row.finish_reason = "length"
        self.list(self.tier._keys_of(row))
        return self.tier._keys_of(row)

    def keep(self, *rows, lost=True):
        """Ends requests, moves their blocks to the host, and drops them on the device if `lost`. Keys of the first."""
        keys, *_ = [self.end(each) for each in rows]
        self.slice(*rows)
        self.slice()
        while self.tier._wanted:
            self.slice()
        if lost:
            self.slice(lost=list(self.places))
        return keys

    def holds(self, *rows, sent=()):
        """Which of these requests are held on the host."""
        self.tier.before_send(sent)
        return [self.tier.holds(each) for each in rows]

    def arriving(self, *rows):
        """The runs of the next slice after these requests were looked at."""
        self.holds(*rows)
        return self.tier.next_moves().back

    @property
    def kept(self):
        return [page.page[0].name for page in self.tier._pages]


def row(*tokens, **params):
    return CompletionState(0, np.array(tokens, np.int32), SamplingParams(**dict(max_tokens=1) | params), 0)


def names(runs):
    return [[page[0].name for page in run.pages] for run in runs]


def test_blocks_are_restored_from_the_first_lost_one_on():
    device = FakeDevice(num_pages=4)
    keys = device.keep(row(*PROMPT), lost=False)
    assert device.holds(row(*PROMPT)) == [False]  # no block is lost
    device.held = {keys[0]}
    device.slice(lost=keys[1:])
    waiting = row(*PROMPT)
    assert device.holds(waiting, row(*PROMPT)) == [False, False]  # the second is sent with the first
    moves = device.tier.next_moves()
    (run,) = moves.back
    assert (run.begin, run.salt, names([run])) == (1, 0, [["3/4", "5/6"]])
    assert run.tokens.tolist() == [[1, 2], [3, 4], [5, 6]]
    device.slice(moves=moves)
    assert (device.tier.num_brought, pending_copies(device.tier)) == (4, [])
    assert device.holds(waiting) == [False]
    assert pending_copies(device.tier) == []


def test_blocks_that_the_device_may_be_losing_are_restored_too():
    device = FakeDevice(num_pages=4)
    keys = device.keep(row(*PROMPT), lost=False)
    device.slice(lost=keys[1:])
    assert names(device.arriving(row(*PROMPT))) == [["1/2", "3/4", "5/6"]]
    device = FakeDevice(num_pages=4)
    keys = device.keep(row(*PROMPT))
    device.list(keys[:1])
    device.slice()
    assert names(device.arriving(row(*PROMPT))) == [["1/2", "3/4", "5/6"]]  # the tier has not noticed its return


def test_blocks_that_could_not_be_inserted_count_as_lost():
    device = FakeDevice(least_tokens=1)
    keys = device.keep(row(*PROMPT))
    first, second = device.arriving(row(*PROMPT))
    device.slice(moves=Moves(back=[first]), lost=keys)  # lost again within the slice
    device.tier.lose(Moves(back=[second]))
    assert (device.tier.num_brought, pending_copies(device.tier)) == (0, [])
    assert names(device.arriving(row(*PROMPT))) == [["1/2", "3/4"], ["5/6"]]


def test_few_blocks_are_in_transit_at_once_and_may_arrive_late():
    device, prompt = FakeDevice(num_pages=2, most_staged=2), (*PROMPT, 8, 9)
    device.slow = {"5/6"}
    device.keep(row(*prompt))
    waiting, other = row(*prompt), row(*prompt, 8)
    assert device.holds(waiting, other) == [True, True]  # for the same copies
    moves = device.tier.next_moves()
    assert names(moves.back) == [["1/2", "3/4"]]
    moves.back[0].pages = []  # restored
    assert device.arriving(waiting, other) == []
    (run,) = {run for run in device.tier._coming.values() if not run.is_sent}
    assert names([run]) == [["5/6", "7/8"]]  # only the slow one
    device.slice(moves=moves)
    device.slow.clear()
    assert device.arriving(waiting) == [run]
    assert device.holds(waiting) == [False]
    device.tier.clear()
    assert (pending_copies(device.tier), device.tier.host_bytes) == ([], 0)


def slow_restore():
    """A device that restores one block at a time, with a prompt of four blocks in host memory."""
    device = FakeDevice(num_pages=1, most_staged=1, least_tokens=1)
    return device, row(*PROMPT, 8, 9), device.keep(row(*PROMPT, 8, 9))


@pytest.mark.parametrize(
    ("head_lost_in", "expected"),
    [(None, ["1/2", "3/4", "5/6", "7/8"]), (2, ["1/2", "3/4", "5/6", "1/2", "7/8"])],
    ids=["all stay", "the first is lost again"],
)
def test_a_long_prompt_is_restored_in_parts_and_each_once(head_lost_in, expected):
    device, waiting, keys = slow_restore()
    for i, name in enumerate(expected):
        moves = Moves(back=device.arriving(waiting))
        assert names(moves.back) == [[name]]
        device.slice(moves=moves, lost=keys[:1] if i == head_lost_in else ())
    if head_lost_in is None:
        assert device.holds(waiting) == [False]
        device.keep(waiting)  # it is lost
        assert names(device.arriving(waiting)) == [["1/2"]]


def test_no_request_is_sent_into_the_room_of_a_partial_restore():
    device, _, _ = slow_restore()
    for room, is_held in ((5, True), (6, False)):  # the prompt needs five blocks, the other request one
        device.room = room
        device.slice()
        assert device.holds(row(*PROMPT, 8, 9), row(9, 9)) == [True, is_held]


def test_a_request_in_front_does_not_block_the_requests_whose_copies_it_waits_for():
    device = FakeDevice(num_pages=2, most_staged=2, capacity=30)
    waiting = [row(*range(10, 19)), row(*range(20, 29))]  # five blocks each
    device.keep(row(*range(20, 29)))
    device.keep(row(*range(10, 19)), lost=False)
    device.room = 4
    device.slice()
    assert device.holds(*waiting) == [True, True]  # the first is cached in the pool, which has no room for it
    device.room = 9  # for one of them
    device.slice(lost=list(device.places))
    for _ in range(4):
        held = device.holds(*waiting)
        waiting = [each for each, is_held in zip(waiting, held, strict=True) if is_held]
        device.slice()
    assert waiting == []


def test_the_lookup_stops_at_the_end_of_the_prompt():
    assert FakeDevice(least_tokens=0).holds(row(*PROMPT)) == [False]


def test_a_partial_restore_that_fails_is_recomputed():
    device, waiting, _ = slow_restore()
    device.tier.lose(Moves(back=device.arriving(waiting)))
    assert device.holds(waiting) == [False]


def test_a_failed_copy_is_reported_once():
    device, waiting = FakeDevice(), row(*PROMPT)
    device.slow = {"1/2"}
    device.keep(row(*PROMPT))
    assert device.arriving(waiting) == []
    for (numbers,) in next(iter(device.tier._coming.values())).pages:
        numbers.block_until_ready = lambda: [][0]
    with pytest.raises(IndexError):
        device.tier.wait()
    device.tier.wait()
    assert device.holds(waiting) == [False]


def test_arrived_blocks_are_forgotten_with_the_rest():
    device = FakeDevice()
    device.keep(row(*PROMPT))
    assert device.holds(row(*PROMPT)) == [False]
    device.tier.clear()
    assert (device.tier.next_moves(), pending_copies(device.tier), device.tier._at) == (Moves(), [], {})
    assert device.tier.host_bytes == 0


def test_a_finished_request_waits_for_nothing():
    device, waiting = FakeDevice(), row(*PROMPT)
    device.slow = {"1/2"}
    device.keep(row(*PROMPT))
    assert device.arriving(waiting) == []
    assert len(pending_copies(device.tier)) == 2  # blocks
    waiting.is_aborted = True
    device.holds()
    assert pending_copies(device.tier) == []


def test_a_request_is_sent_with_its_blocks_once_there_is_room():
    device = FakeDevice(num_pages=4, growth=2)
    device.keep(row(*PROMPT))
    sent, read = row(8, 8, 8), row(8, 8, 8)
    read.place = 0  # the reported room does not include what it may need
    for room, is_held in ((5, True), (6, False)):  # it needs four blocks, the sent request two
        device.room = room
        device.slice()
        # The small request is after the other.
        assert device.holds(row(*PROMPT), row(9, 9), sent=[sent, read]) == [is_held, is_held]
    assert names(device.tier.next_moves().back) == [["1/2", "3/4", "5/6"]]
    assert [device.tier._needed(each) for each in (row(*PROMPT), row(*PROMPT, max_tokens=9))] == [4, 5]


def test_a_prefix_held_by_others_needs_room_once():
    device = FakeDevice()
    device.held = {*device.keep(row(*PROMPT), lost=False)}
    device.room = 1
    device.slice()
    assert device.holds(row(*PROMPT), row(*PROMPT)) == [False, True]


def test_a_request_without_cached_blocks_needs_no_room():
    device = FakeDevice()
    device.room = -5
    device.slice()
    assert device.holds(row(*PROMPT)) == [False]


def test_no_request_waits_for_blocks_evicted_from_host_memory():
    device, waiting = FakeDevice(num_pages=2, most_staged=2, capacity=4), row(*PROMPT, 8, 9)
    device.slow = {"1/2"}
    device.keep(row(*PROMPT, 8, 9))
    assert device.arriving(waiting) == []
    (run,) = set(device.tier._coming.values())
    device.keep(row(9, 9, 9, 9, 9))  # replaces the tail
    device.slow.clear()
    assert device.arriving(waiting) == [run]
    run.pages = []
    assert device.holds(waiting) == [False]


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_the_tail_is_evicted_from_host_memory_before_the_head(is_looked_up):
    device = FakeDevice(capacity=3)
    if is_looked_up:
        device.keep(row(*PROMPT))
        device.holds(row(1, 2, 3, 4, 5))  # two blocks are now newer than the third
    else:
        device.keep(row(1, 2, 3, 4, 5))
        device.keep(row(*PROMPT))
    device.keep(row(9, 9, 9))
    assert device.kept == ["3/4", "1/2", "9/9"]
    assert len(device.tier._places) == 3


def test_blocks_of_another_salt_are_dropped():
    device, late = FakeDevice(), row(7, 8, 9)
    device.keep(row(*PROMPT))
    device.end(late)
    device.slice(late)
    device.salts = [1]  # while its copy is in transit
    device.slice()
    assert device.tier.host_bytes == 0
    device.keep(row(*PROMPT))
    assert device.tier.host_bytes == 3


def test_a_block_is_restored_only_for_its_own_adapter():
    device = FakeDevice(num_adapters=2, num_pages=4)
    device.keep(row(*PROMPT, adapter=1))
    assert [len(device.arriving(row(*PROMPT, adapter=adapter))) for adapter in (None, 0, 1)] == [0, 0, 1]
    for device.salts, num_kept in (([3, 1, 2], 3), ([3, 1, 5], 0)):
        device.slice()
        assert device.tier.host_bytes == num_kept


def test_a_fuller_page_replaces_its_prefix_page():
    device = FakeDevice(in_page=4)
    device.keep(row(1, 2, 3, 4, 5))
    assert device.kept == ["1/2"]
    device.keep(row(*PROMPT), row(1, 2, 3, 4, 9, 9, 9))
    assert [len(page.keys) for page in device.tier._pages] == [3, 3]
    assert len(device.tier._places) == 4
    device.keep(row(1, 2, 3, 4, 5))  # these blocks are already there
    assert len(device.tier._pages) == 2


def test_blocks_in_the_middle_of_pages_are_restored():
    device, prompt = FakeDevice(in_page=2), (1, 2, 3, 4, 5, 6, 9)
    keys = device.keep(row(1, 2, 3, 4, 5, 6, 7, 8, 9), lost=False)
    device.held = {keys[0]}
    device.slice(lost=keys[1:3])
    (run,) = device.arriving(row(*prompt))
    assert (run.begin, len(run.keys), names([run])) == (0, 3, [["1/2", "5/6"]])


def test_blocks_that_were_overwritten_before_their_copy_are_not_kept():
    device, ended = FakeDevice(in_page=2), row(1, 2, 3, 4, 5, 6, 7, 8, 9)
    keys = device.end(ended)
    device.slice(ended)
    del device.places[keys[1]]
    device.slice(lost=keys)
    assert (device.kept, list(device.tier._places), device.tier._leaving) == (["1/2"], keys[:1], set())
    assert not device.tier._is_there(keys[0])


def test_full_blocks_are_copied_out_once_and_few_at_a_time():
    device = FakeDevice(in_page=2)
    tier, (running, same) = device.tier, (row(*range(9), max_tokens=9) for _ in range(2))
    device.list(tier._keys_of(running))
    device.slice(running)
    assert tier.next_moves() == Moves()  # its prompt is not computed
    running.token_ids, same.token_ids = [1], [1]
    device.slice(running, same)
    moves = tier.next_moves()
    assert [(run.begin, len(run.keys), run.num_pages) for run in moves.out] == [(0, 4, 2)]
    tier.lose(moves)
    again = tier.next_moves()
    assert again.out == moves.out
    device.slice(running, same, moves=again)
    assert tier.next_moves() == Moves()
    running.token_ids = [1] * 5  # 14 tokens, 13 of them computed
    device.end(running)
    device.slice(running)
    assert [(run.begin, len(run.keys)) for run in tier._wanted] == [(4, 6)]
    others = [row(i, *range(12)) for i in range(20, 23)]
    for each in others:
        each.finish_reason = "length"
    device.slice(*others)  # their runs of three pages each come after it
    assert [run.num_pages for run in tier.next_moves().out] == [2, 1]


def test_runs_of_several_prompts_share_a_program_unless_one_needs_the_previous_block():
    device = FakeDevice(num_pages=2, most_staged=8, least_tokens=1)
    prompts = PROMPT, (1, 9, 3, 9, 0), (2, 9, 4, 9, 0)
    device.keep(*(row(*tokens) for tokens in prompts))
    runs = device.arriving(*(row(*tokens) for tokens in prompts))
    for device.copies.num_pages, expected in ((2, [[2], [1], [2], [2]]), (9, [[2], [1, 2], [2]])):
        batches = HostCopies._batches(device.copies, runs)
        assert [[run.num_pages for run in batch] for batch in batches] == expected
