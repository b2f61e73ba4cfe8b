"""The host tier: cached blocks that the pool loses come back from host memory, and tokens stay the same."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine.host_tier.copies import HostCopies, Run
from jaxpaged._engine.host_tier.tier import HostTier, Moves
from jaxpaged._engine.requests import CompletionState
from jaxpaged._scheduler.records import RequestStatus
from tests.compiled import instructions
from tests.toy_model import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    MAX_TOKENS,
    TIGHT,
    VOCAB,
    continuation,
    create_engine,
    finish,
    random_weights,
    with_blocks_back,
    without_blocks,
)

CHUNK = 8
BLOCK_BYTES = 2 * BLOCK_SIZE * HEADS * HEAD_DIM * 4
PAGE_BYTES = 8 * BLOCK_BYTES
HOST_BYTES = 100 * PAGE_BYTES
GREEDY = SamplingParams(temperature=0, max_tokens=6)
MADE = []  # the engine, which is made once


@pytest.fixture
def engine():
    """In a pool for two requests at their limit."""
    if not MADE:
        options = dict(
            prefix_cache=True, host_cache_bytes=HOST_BYTES, batch_invariant=True, chunk_tokens=CHUNK, steps_per_slice=2
        )
        MADE.append(create_engine(num_blocks=TIGHT + 1, **options))
    engine = MADE[0]
    assert engine._books.is_settled
    engine.update_weights(random_weights())
    settle(engine)  # nothing of older weights is left
    return engine


def settle(engine):
    """What slices have listed is in host memory."""
    for seed in range(2):
        engine.generate([[seed]], GREEDY)


def counts(engine, before=None):
    """Tokens found, brought and computed."""
    stats = engine.stats()
    now = np.array([stats.num_found, stats.num_brought, stats.num_computed])
    return now if before is None else (now - before).tolist()


def check(engine):
    scheduler, allocator = jax.tree.map(np.asarray, (engine._runner.state.scheduler, engine._runner.state.allocator))
    assert allocator.broken_invariants() == scheduler.broken_invariants(allocator) == ()
    assert engine.stats().host_bytes <= HOST_BYTES


def on_the_way(tier):
    """What waits or moves in either direction."""
    return [*tier._wanted, *tier._leaving, *tier._coming, *tier._arrived]


def serve(engine, prompt, params=GREEDY, seed=0):
    (output,) = engine.generate([prompt], params)
    assert output.outputs[0].token_ids == continuation(random_weights(seed), prompt, params)[0]
    return prompt + output.outputs[0].token_ids


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def push_out(engine, weights=0):
    """Other prompts, until the pool has lost all that it had cached."""
    settle(engine)
    for seed in range(3):
        serve(engine, prompt_of(100 + seed, 40), seed=weights)


def test_a_prefix_that_the_pool_has_lost_comes_back(engine):
    talk = serve(engine, prompt_of(1, 20))
    push_out(engine)
    before = counts(engine)
    serve(engine, [*talk, 7])  # 25 of its 26 tokens and the prompt were computed: six full blocks
    assert counts(engine, before) == [24, 24, 3 + 5]
    before = counts(engine)
    serve(engine, [*talk, 8])
    assert counts(engine, before) == [24, 0, 3 + 5]  # now it is in the pool
    check(engine)


def test_a_few_tokens_are_computed_instead(engine):
    for length, found in ((CHUNK // 2 + 1, CHUNK // 2), (CHUNK // 2 - 1, 0)):
        prompt = prompt_of(2 + length, length)
        serve(engine, prompt, SamplingParams(temperature=0, max_tokens=1))
        push_out(engine)
        before = counts(engine)
        serve(engine, [*prompt, 1], SamplingParams(temperature=0, max_tokens=1))
        assert counts(engine, before) == [found, found, length + 1 - found]


# Twelve do not fit into the pool: what is listed may be overwritten in the next slice, before it is copied.
@pytest.mark.parametrize(("at_once", "part"), [(2, 0.95), (12, 0.4)])
def test_conversations_in_turn_find_what_an_endless_pool_would_find(engine, at_once, part):
    talks, endless, before = [prompt_of(seed, 12) for seed in range(12)], 0, counts(engine)
    for turn in range(3):
        for i in range(0, len(talks), at_once):
            these = talks[i : i + at_once]
            endless += sum((len(talk) - 6) // BLOCK_SIZE * BLOCK_SIZE if turn else 0 for talk in these)
            for j, output in enumerate(engine.generate(these, GREEDY), i):
                assert output.outputs[0].token_ids == continuation(random_weights(), talks[j], GREEDY)[0]
                talks[j] = talks[j] + output.outputs[0].token_ids + prompt_of(turn, 5)
    found, brought, _ = counts(engine, before)
    assert found >= part * endless > 0
    assert 0.5 * found < brought <= found  # nothing came back in vain
    check(engine)


def test_several_that_begin_alike_wait_for_one_copy(engine):
    prompt = serve(engine, prompt_of(3, 24))
    push_out(engine)
    before = counts(engine)
    params = SamplingParams(temperature=1.0, max_tokens=4, seed=3, n=3)
    (output,) = engine.generate([[*prompt, 1]], params)
    assert output.outputs[0].token_ids == continuation(random_weights(), [*prompt, 1], params)[0]
    found, brought, _ = counts(engine, before)
    assert (found, brought) == (3 * 28, 28)


def test_scores_begin_with_what_comes_back_but_for_their_last_token(engine):
    prompt = serve(engine, prompt_of(4, 22))
    (expected,) = engine.score([prompt[:21]], [prompt[21:]])
    push_out(engine)
    before = counts(engine)
    (score,) = engine.score([prompt[:21]], [prompt[21:]])
    assert counts(engine, before)[:2] == [20, 20]
    np.testing.assert_array_equal(score.logprobs, expected.logprobs)


def test_other_weights_find_nothing_of_the_old_ones(engine, monkeypatch):
    talk = serve(engine, prompt_of(5, 20))
    push_out(engine)
    before = counts(engine)
    engine.add_request([*talk, 7], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "is_there", False)
        engine.step()  # its blocks are on their way
    engine.update_weights(random_weights(1))
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == continuation(random_weights(1), [*talk, 7], GREEDY)[0]
    assert counts(engine, before)[0] == 0  # what came was listed for the old ones
    push_out(engine, 1)
    before = counts(engine)
    serve(engine, [*talk, 7, 3], seed=1)
    assert counts(engine, before)[:2] == [24, 24]


def test_sleep_gives_the_host_memory_back(engine):
    talk = serve(engine, prompt_of(6, 20))
    assert engine.stats().host_bytes > 0
    engine.sleep()
    assert engine.stats().host_bytes == 0
    engine.wake_up()
    before = counts(engine)
    serve(engine, [*talk, 7])
    assert counts(engine, before)[:2] == [0, 0]
    check(engine)


def test_sleep_is_whole_after_an_interrupt(engine, monkeypatch):
    serve(engine, prompt_of(9, 20))
    before, clear = signal.signal(signal.SIGINT, signal.default_int_handler), engine._runner.tier.clear

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        clear()

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.tier, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
    signal.signal(signal.SIGINT, before)
    assert engine.stats().host_bytes == 0
    assert all(pool.is_deleted() for pool in (engine._runner.state.caches.k, engine._runner.state.caches.v))
    engine.wake_up()
    serve(engine, prompt_of(9, 20))
    check(engine)


def test_random_requests_in_a_tight_pool_get_their_own_tokens(engine):
    rng, before = np.random.default_rng(0), counts(engine)
    begins, expected, wanted = [prompt_of(20 + i, 30) for i in range(6)], {}, {}
    for _ in range(60):
        begin = begins[rng.integers(len(begins))]
        prompt = begin[: rng.integers(1, 31)] + prompt_of(int(rng.integers(3)), int(rng.integers(0, 5)))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, MAX_TOKENS - len(prompt) + 1)),
            temperature=float(rng.integers(2)),
            seed=int(rng.integers(4)),
            prompt_logprobs=bool(rng.random() < 0.1),
            head_start=int(rng.integers(-3, 3)),
        )
        request = engine.add_request(prompt, params)
        wanted[request] = prompt, params
        if rng.random() < 0.1:
            engine.abort(int(rng.choice(list(wanted))))
        for output in engine.step():
            expected[output.request_id] = output
        check(engine)
    expected |= finish(engine)
    assert expected.keys() == wanted.keys()
    for request, output in expected.items():
        prompt, params = wanted[request]
        tokens = continuation(random_weights(), prompt, params)[0]
        got = output.outputs[0].token_ids
        assert got == tokens[: len(got)]
        assert output.outputs[0].finish_reason == "abort" or got == tokens
    assert engine.stats().num_preempted > 0
    assert counts(engine, before)[1] > 100
    assert engine.stats().num_free_blocks == TIGHT
    tier = engine._runner.tier
    engine.generate([[0]], GREEDY)
    assert on_the_way(tier) == []


def test_what_waits_needs_room_twice_as_others_may_come_in_the_place_of_its_blocks(engine):
    params = dataclasses.replace(GREEDY, max_tokens=20)
    for seed in range(6):
        engine.add_request(prompt_of(seed, 20), params)
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
    shape = f"f32[{','.join(map(str, cache.k.shape))}]"
    assert len(copies._put_in) > 1
    for program in (*copies._put_in.values(), *copies._take_out.values()):
        found = [
            (name, line) for name, _, line in instructions(program.as_text()) if shape in line.split(name + "(")[0]
        ]
        assert found  # the search sees the cache
        assert [name for name, _ in found if name.startswith("copy")] == []
    for program in copies._put_in.values():
        assert program.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def test_blocks_behind_a_gap_are_not_listed(engine):
    prompt = np.array(serve(engine, prompt_of(7, 20)), np.int32)[:24].reshape(6, BLOCK_SIZE)
    push_out(engine)
    copies, salt = engine._runner.tier._copies, int(engine._runner.state.scheduler.prefixes.salt[0])
    for begin, end, is_listed in ((4, 6, False), (0, 4, True), (4, 6, True)):
        keys = [bytes([i]) for i in range(end)]
        run = Run(None, salt, prompt[:end], keys, begin, 1, [copies._nothing])
        (engine._runner.state_of_slice,) = copies.put(engine._runner.state, [run])
        ids, serials = np.asarray(run.where)[:, run.index, begin:end]
        assert (ids > 0).tolist() == (serials > 0).tolist() == [is_listed] * (end - begin)
        check(engine)
    engine.update_weights(random_weights())  # they hold nothing


def test_blocks_without_room_are_neither_written_nor_listed(engine):
    prompt = np.array(serve(engine, prompt_of(8, 20)), np.int32)[:16].reshape(4, BLOCK_SIZE)
    push_out(engine)
    runner, copies = engine._runner, engine._runner.tier._copies
    salt = int(runner.state.scheduler.prefixes.salt[0])
    allocator, hidden = without_blocks(runner.state.allocator, int(runner.state.allocator.num_free) - 3)
    before = jax.tree.map(np.array, runner.state.caches)
    page = jax.tree.map(jnp.ones_like, copies._nothing)
    run = Run(None, salt, prompt, [bytes([i]) for i in range(4)], 0, 1, [page])
    (state,) = copies.put(dataclasses.replace(runner.state, allocator=allocator), [run])
    runner.state_of_slice = dataclasses.replace(state, allocator=with_blocks_back(state.allocator, hidden))
    assert not np.asarray(run.where)[:, run.index].any()
    jax.tree.map(np.testing.assert_array_equal, state.caches, before)  # the null block too
    check(engine)


def test_other_weights_find_nothing_if_the_copies_before_their_first_slice_fail(engine, monkeypatch):
    prompt = serve(engine, prompt_of(10, 20))
    settle(engine)
    engine.update_weights(random_weights(1))
    tier, failures = engine._runner.tier, [MemoryError("no room for a copy")]
    move = tier.run

    def failing(state, moves):
        if failures:
            raise failures.pop()
        yield from move(state, moves)

    monkeypatch.setattr(tier, "run", failing)
    engine.add_request([1], GREEDY)
    outputs = {}
    for add in (lambda: engine.add_request([*prompt, 7], GREEDY), lambda: None):
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except MemoryError:
            assert not failures
        add()
    try:
        outputs |= finish(engine)
    except MemoryError:
        outputs |= finish(engine)
    last = outputs[max(outputs)].outputs[0].token_ids
    assert last == continuation(random_weights(1), [*prompt, 7], GREEDY)[0]


@pytest.mark.parametrize("name", ["take", "put", "bring"])
def test_copies_that_fail_lose_no_token(engine, monkeypatch, name):
    talk = serve(engine, prompt_of(8, 20))
    push_out(engine)
    settle(engine)
    copies, failures = engine._runner.tier._copies, [MemoryError("no room for a copy")]
    function = getattr(copies, name)

    def failing(*args):
        if failures and args[-1]:
            raise failures[0] if name == "bring" else failures.pop()  # for ever, or once
        return function(*args)

    monkeypatch.setattr(copies, name, failing)
    before, params = counts(engine), dataclasses.replace(GREEDY, max_tokens=15)
    engine.add_request([*talk, 7], params)
    with pytest.raises(MemoryError, match="no room for a copy"):
        finish(engine)
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == continuation(random_weights(), [*talk, 7], params)[0]
    assert counts(engine, before)[:2] == ([24, 24] if name == "take" else [0, 0])  # the slice ran without
    failures.clear()
    settle(engine)
    assert on_the_way(engine._runner.tier) == []


def test_what_a_host_tier_needs():
    options = dict(num_blocks=9, host_cache_bytes=10**6)
    needs = "pass prefix_cache=True, a max_model_len of at least 4, and no windows; got max_model_len="
    for more, message in (
        (dict(), needs),
        (dict(prefix_cache=True, max_model_len=BLOCK_SIZE - 1), needs + "3"),
        (dict(prefix_cache=True, windows=(None, 8)), needs),
        (dict(prefix_cache=True, host_cache_bytes=BLOCK_BYTES), f"at least {PAGE_BYTES}, the bytes of a page"),
    ):
        with pytest.raises(ValueError, match=message):
            create_engine(**options | more)


# The books, without a device.

SIZE, POOL = 2, 32


class FakeCopies:
    block_size, num_blocks, page_bytes, num_prompts = SIZE, POOL, 1, 2
    batches = HostCopies._batches

    def __init__(self, in_page=1, num_pages=2, most_staged=4, capacity=8, num_adapters=0):
        self.in_page, self.num_pages, self.most_staged, self.capacity = in_page, num_pages, most_staged, capacity
        self.most_leaving, self.salts = 2 * num_pages, list(range(1 + num_adapters))

    def bring(self, pages):
        return pages


class FakeNumbers:
    """Of a page, on the device at once, or never."""

    def __init__(self, name, *, is_slow=False):
        self.name, self.is_slow = name, is_slow

    def is_ready(self):
        return not self.is_slow


class FakeDevice:
    """Has blocks by key, in places with serials; what requests hold is `held`."""

    def __init__(self, tier, salts=(0,)):
        self.tier, self.salts, self.places, self.held, self.num_listed = tier, list(salts), {}, set(), 0
        self.room = POOL

    def list(self, keys):
        for key in keys:
            if key not in self.places:
                self.num_listed += 1
                self.places[key] = self.num_listed % (POOL - 1) + 1, self.num_listed

    def lose(self, keys):
        for key in keys:
            self.places.pop(key, None)

    def slice(self, *rows, moves=None, slow=(), lost=()):
        """Moves, then loses blocks. `slow`: names of pages that never come back."""
        moves = self.tier.next_moves() if moves is None else moves
        for run in (*moves.out, *moves.back):
            found = [key in self.places for key in run.keys]
            if run in moves.back and all(found[: run.begin]):
                self.list(run.keys)
                found = [True] * len(found)
            run.where = np.zeros((2, 1, len(run.keys) + 1), np.int32)
            num_found = (*found, False).index(False)
            for column, key in enumerate(run.keys[:num_found]):
                run.where[:, 0, column] = self.places[key]
            if run in moves.out:
                firsts = range(run.begin, len(run.keys), self.tier._copies.in_page)
                names = ["/".join(map(str, run.tokens[first].tolist())) for first in firsts]
                run.pages = [(FakeNumbers(name, is_slow=name in slow),) for name in names]
        self.lose(lost)
        serials = np.zeros(POOL, np.int32)
        for key, (place, serial) in self.places.items():
            serials[place] = serial if key in self.held else -serial
        self.tier.after_report(Reported(serials, np.array(self.salts), np.array(self.room)), moves, rows)


@dataclasses.dataclass
class Reported:
    serials: np.ndarray
    salts: np.ndarray
    room: np.ndarray


def make_tier(*, least_tokens=3, growth=0, **options):
    tier = HostTier(FakeCopies(**options), least_tokens=least_tokens, growth=growth)
    return tier, FakeDevice(tier, tier._copies.salts)


def row(*tokens, **params):
    return CompletionState(0, np.array(tokens, np.int32), SamplingParams(max_tokens=1, **params), 0)


def kept(tier):
    return [page[0].name for page in (of_page.page for of_page in tier._pages)]


def keep(tier, device, *rows, slow=(), lost=True):
    """These end, and what they computed is in host memory; then it is `lost` on the device."""
    for each in rows:
        each.finish_reason = "length"
        device.list(tier._keys_of(each))
    device.slice(*rows)
    device.slice(slow=slow)
    while tier._wanted:
        device.slice(slow=slow)
    if lost:
        device.lose(list(device.places))
        device.slice()


def names(runs):
    return [[page[0].name for page in run.pages] for run in runs]


def arriving(tier, *rows, sent=()):
    """The runs that the next slice is given when these rows are asked for."""
    tier.before_send(sent)
    for each in rows:
        tier.holds(each)
    return tier.next_moves().back


PROMPT = 1, 2, 3, 4, 5, 6, 7


def test_what_the_device_has_lost_is_brought_from_the_first_loss_on():
    tier, device = make_tier(num_pages=4)
    keep(tier, device, row(*PROMPT), lost=False)
    tier.before_send([])
    assert not tier.holds(row(*PROMPT))  # all is there
    keys = tier._keys_of(row(*PROMPT))
    device.held = {keys[0]}
    device.lose(keys[1:])
    device.slice()
    waiting, other = row(*PROMPT), row(*PROMPT)
    tier.before_send([])
    assert not tier.holds(waiting)  # it goes out with the others
    assert not tier.holds(other)
    moves = tier.next_moves()
    (run,) = moves.back
    assert (run.begin, run.salt, names([run])) == (1, 0, [["3/4", "5/6"]])
    assert run.tokens.tolist() == [[1, 2], [3, 4], [5, 6]]
    device.slice(moves=moves)
    assert (tier.num_brought, on_the_way(tier)) == (4, [])
    assert not tier.holds(waiting)
    assert on_the_way(tier) == []


def test_what_the_device_may_be_losing_is_brought_too():
    tier, device = make_tier(num_pages=4)
    keep(tier, device, row(*PROMPT), lost=False)
    keys = tier._keys_of(row(*PROMPT))
    device.lose(keys[1:])
    device.slice()
    assert names(arriving(tier, row(*PROMPT))) == [["1/2", "3/4", "5/6"]]
    tier, device = make_tier(num_pages=4)
    keep(tier, device, row(*PROMPT))
    device.list(keys[:1])
    device.slice()
    assert names(arriving(tier, row(*PROMPT))) == [["1/2", "3/4", "5/6"]]  # it was not seen that this one is back


def test_what_could_not_be_listed_is_not_taken_to_be_there():
    tier, device = make_tier(least_tokens=1)
    keep(tier, device, row(*PROMPT))
    first, second = arriving(tier, row(*PROMPT))
    device.slice(moves=Moves(back=[first]), lost=tier._keys_of(row(*PROMPT)))  # gone again within the slice
    tier.lose(Moves(back=[second]))
    assert (tier.num_brought, on_the_way(tier)) == (0, [])
    assert names(arriving(tier, row(*PROMPT))) == [["1/2", "3/4"], ["5/6"]]


def test_few_tokens_are_not_worth_a_copy():
    tier, device = make_tier()
    keep(tier, device, row(*PROMPT), lost=False)
    device.lose(tier._keys_of(row(*PROMPT))[2:])
    device.slice()
    tier.before_send([])
    assert not tier.holds(row(*PROMPT))  # two tokens of the least three
    assert on_the_way(tier) == []


def test_what_is_on_its_way_is_little_and_may_take_long():
    tier, device = make_tier(num_pages=2, most_staged=2)
    prompt = (*PROMPT, 8, 9)
    keep(tier, device, row(*prompt), slow=["5/6"])
    waiting, other = row(*prompt), row(*prompt, 8)
    tier.before_send([])
    assert tier.holds(waiting)
    assert tier.holds(other)  # for the same copies
    moves = tier.next_moves()
    assert names(moves.back) == [["1/2", "3/4"]]
    moves.back[0].pages = []  # put in
    assert arriving(tier, waiting, other) == []
    (run,) = {run for run in tier._coming.values() if not run.is_sent}
    assert names([run]) == [["5/6", "7/8"]]  # the slow one, once
    device.slice(moves=moves)
    run.pages[0][0].is_slow = False
    assert arriving(tier, waiting) == [run]
    tier.before_send([])
    assert not tier.holds(waiting)
    tier.clear()
    assert (on_the_way(tier), tier.host_bytes) == ([], 0)


def come_in_parts(num_slices, head_lost_in=None):
    """A tier, its device, a row that waits, and the pages that came for it in so many slices, of which one loses the
    first block again."""
    tier, device = make_tier(num_pages=1, most_staged=1, least_tokens=1)
    waiting, came = row(*PROMPT, 8, 9), []
    keep(tier, device, row(*PROMPT, 8, 9))
    for i in range(num_slices):
        moves = Moves(back=arriving(tier, waiting))
        came += names(moves.back)
        device.slice(moves=moves, lost=tier._keys_of(waiting)[:1] if i == head_lost_in else ())
    return tier, device, waiting, came


def test_a_prompt_longer_than_what_may_be_on_its_way_comes_part_by_part_and_each_once():
    tier, device, waiting, came = come_in_parts(4)
    assert came == [["1/2"], ["3/4"], ["5/6"], ["7/8"]]
    tier.before_send([])
    assert not tier.holds(waiting)
    # What has come and is lost meanwhile comes again.
    keep(tier, device, waiting)
    assert names(arriving(tier, waiting)) == [["1/2"]]


def test_what_came_in_parts_does_not_come_again_if_the_head_is_lost():
    *_, came = come_in_parts(5, head_lost_in=2)
    assert came == [["1/2"], ["3/4"], ["5/6"], ["1/2"], ["7/8"]]


def test_nothing_goes_out_in_the_room_of_what_comes_part_by_part():
    tier, device = make_tier(num_pages=1, most_staged=1, least_tokens=1)
    keep(tier, device, row(*PROMPT, 8, 9))
    for room, is_held in ((5, True), (6, False)):  # the prompt needs five blocks, the other request one
        device.room = room
        device.slice()
        tier.before_send([])
        assert tier.holds(row(*PROMPT, 8, 9))
        assert tier.holds(row(9, 9)) == is_held


def test_a_request_in_front_does_not_keep_those_from_going_out_whose_copies_it_waits_for():
    tier, device = make_tier(num_pages=2, most_staged=2, capacity=30)
    first, second = row(*range(10, 19)), row(*range(20, 29))  # five blocks each
    keep(tier, device, row(*range(20, 29)))
    keep(tier, device, row(*range(10, 19)), lost=False)
    device.room = 4
    device.slice()
    tier.before_send([])
    assert tier.holds(first)  # it is in the pool, which has no room for it
    assert tier.holds(second)
    device.lose(list(device.places))
    device.room = 9  # for one of them
    device.slice()
    waiting = [first, second]
    for _ in range(4):
        tier.before_send([])
        waiting = [each for each in waiting if tier.holds(each)]
        device.slice(moves=tier.next_moves())
    assert waiting == []


def test_every_prompt_ends_where_one_token_is_a_chunk():
    tier, _ = make_tier(least_tokens=0)
    assert not tier.holds(row(*PROMPT))


def test_what_comes_in_parts_and_cannot_be_put_in_is_computed():
    tier, device = make_tier(num_pages=1, most_staged=1, least_tokens=1)
    waiting = row(*PROMPT, 8, 9)
    keep(tier, device, row(*PROMPT, 8, 9))
    tier.lose(Moves(back=arriving(tier, waiting)))
    tier.before_send([])
    assert not tier.holds(waiting)


def test_a_copy_that_fails_on_its_way_is_told_once():
    tier, device = make_tier()
    waiting = row(*PROMPT)
    keep(tier, device, row(*PROMPT), slow=["1/2"])
    assert arriving(tier, waiting) == []
    for (numbers,) in next(iter(tier._coming.values())).pages:
        numbers.block_until_ready = lambda: [][0]
    with pytest.raises(IndexError):
        tier.wait()
    tier.wait()
    tier.before_send([])
    assert not tier.holds(waiting)


def test_what_arrived_is_forgotten_with_the_rest():
    tier, device = make_tier()
    keep(tier, device, row(*PROMPT))
    tier.before_send([])
    assert not tier.holds(row(*PROMPT))
    tier.clear()
    assert (tier.next_moves(), on_the_way(tier), tier.host_bytes, tier._at) == (Moves(), [], 0, {})


def test_a_request_that_ended_waits_for_nothing():
    tier, device = make_tier()
    keep(tier, device, row(*PROMPT), slow=["1/2"])
    waiting = row(*PROMPT)
    assert arriving(tier, waiting) == []
    assert len(on_the_way(tier)) == 2  # blocks
    waiting.is_aborted = True
    tier.before_send([])
    assert on_the_way(tier) == []


def test_a_request_goes_out_with_what_comes_back_once_there_is_room_for_it():
    tier, device = make_tier(num_pages=4, growth=2)
    keep(tier, device, row(*PROMPT))
    waiting, small, under_way, read = row(*PROMPT), row(9, 9), row(8, 8, 8), row(8, 8, 8)
    read.place = 0  # the room is told without what it may need
    for room, is_held in ((5, True), (6, False)):  # it needs four blocks, the one under way two
        device.room = room
        device.slice()
        tier.before_send([under_way, read])
        assert tier.holds(waiting) == is_held
        assert tier.holds(small) == is_held  # behind the other
    assert names(tier.next_moves().back) == [["1/2", "3/4", "5/6"]]
    long = dataclasses.replace(row(*PROMPT), params=SamplingParams(max_tokens=9))
    assert (tier._needed(waiting), tier._needed(long)) == (4, 5)


def test_a_prefix_that_others_hold_needs_room_once():
    tier, device = make_tier()
    keep(tier, device, row(*PROMPT), lost=False)
    device.room, device.held = 1, set(tier._keys_of(row(*PROMPT)))
    device.slice()
    tier.before_send([])
    assert not tier.holds(row(*PROMPT))
    assert tier.holds(row(*PROMPT))
    assert not make_tier()[0].holds(row(*PROMPT))


def test_a_request_without_anything_to_find_needs_no_room():
    tier, device = make_tier()
    device.room = -5
    device.slice()
    tier.before_send([])
    assert not tier.holds(row(*PROMPT))


def test_nothing_waits_for_blocks_that_left_host_memory_meanwhile():
    tier, device = make_tier(num_pages=2, most_staged=2, capacity=4)
    waiting = row(*PROMPT, 8, 9)
    keep(tier, device, row(*PROMPT, 8, 9), slow=["1/2"])
    assert arriving(tier, waiting) == []
    (run,) = set(tier._coming.values())
    keep(tier, device, row(9, 9, 9, 9, 9))  # in the place of the tail
    run.pages[0][0].is_slow = False
    assert arriving(tier, waiting) == [run]
    run.pages = []
    tier.before_send([])
    assert not tier.holds(waiting)


def test_the_tail_leaves_host_memory_before_the_head():
    tier, device = make_tier(capacity=3)
    keep(tier, device, row(1, 2, 3, 4, 5))
    keep(tier, device, row(*PROMPT))
    keep(tier, device, row(9, 9, 9))
    assert kept(tier) == ["3/4", "1/2", "9/9"]
    tier, device = make_tier(capacity=3)
    keep(tier, device, row(*PROMPT))
    tier.before_send([])
    tier.holds(row(1, 2, 3, 4, 5))  # now two are newer than the third
    keep(tier, device, row(9, 9, 9))
    assert kept(tier) == ["3/4", "1/2", "9/9"]
    assert len(tier._places) == 3


def test_blocks_of_another_salt_leave():
    tier, device = make_tier()
    keep(tier, device, row(*PROMPT))
    late = row(7, 8, 9)
    late.finish_reason = "length"
    device.list(tier._keys_of(late))
    device.slice(late)
    device.salts = [1]  # its copy is under way
    device.slice()
    assert tier.host_bytes == 0
    keep(tier, device, row(*PROMPT))
    assert tier.host_bytes == 3


def test_a_block_comes_back_for_its_own_adapter():
    tier, device = make_tier(num_adapters=2, num_pages=4)
    keep(tier, device, row(*PROMPT, adapter=1))
    assert [len(arriving(tier, row(*PROMPT, adapter=adapter))) for adapter in (None, 0, 1)] == [0, 0, 1]
    device.salts = [3, 1, 2]
    device.slice()
    assert tier.host_bytes == 3
    device.salts = [3, 1, 5]
    device.slice()
    assert tier.host_bytes == 0


def test_a_fuller_page_takes_the_place_of_the_page_that_it_begins_with():
    tier, device = make_tier(in_page=4)
    keep(tier, device, row(1, 2, 3, 4, 5))
    assert kept(tier) == ["1/2"]
    keep(tier, device, row(*PROMPT), row(1, 2, 3, 4, 9, 9, 9))
    assert [len(page.keys) for page in tier._pages] == [3, 3]
    assert len(tier._places) == 4
    keep(tier, device, row(1, 2, 3, 4, 5))  # it has that
    assert len(tier._pages) == 2


def test_blocks_in_the_middle_of_pages_come_back():
    tier, device = make_tier(in_page=2)
    keep(tier, device, row(1, 2, 3, 4, 5, 6, 7, 8, 9), lost=False)
    keys = tier._keys_of(row(1, 2, 3, 4, 5, 6, 9))
    device.held = {keys[0]}
    device.lose(keys[1:])
    device.slice()
    (run,) = arriving(tier, row(1, 2, 3, 4, 5, 6, 9))
    assert (run.begin, len(run.keys), names([run])) == (0, 3, [["1/2", "5/6"]])


def test_what_was_overwritten_before_its_copy_is_not_kept():
    tier, device = make_tier(in_page=2)
    ended = row(1, 2, 3, 4, 5, 6, 7, 8, 9)
    ended.finish_reason = "length"
    keys = tier._keys_of(ended)
    device.list(keys)
    device.slice(ended)
    device.lose(keys[1:2])
    device.slice(lost=keys)
    assert (kept(tier), list(tier._places), tier._leaving) == (["1/2"], keys[:1], set())
    assert not tier._is_there(keys[0])


def test_what_a_request_has_filled_is_wanted_once_and_no_more_than_may_be_on_its_way():
    tier, device = make_tier(in_page=2)
    running, same = (
        dataclasses.replace(row(*range(9)), params=SamplingParams(max_tokens=9), token_ids=[]) for _ in range(2)
    )
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
    running.finish_reason = "length"
    device.list(tier._keys_of(running))
    device.slice(running)
    assert [(run.begin, len(run.keys)) for run in tier._wanted] == [(4, 6)]
    others = [row(i, *range(12)) for i in range(20, 23)]
    for each in others:
        each.finish_reason = "length"
    device.slice(*others)  # they are wanted behind it, of three pages each
    assert [run.num_pages for run in tier.next_moves().out] == [2, 1]


def test_runs_of_several_prompts_go_through_one_program_but_for_the_block_before():
    tier, device = make_tier(num_pages=2, most_staged=8, least_tokens=1)
    prompts = PROMPT, (1, 9, 3, 9, 0), (2, 9, 4, 9, 0)
    keep(tier, device, *(row(*tokens) for tokens in prompts))
    runs = arriving(tier, *(row(*tokens) for tokens in prompts))
    assert [run.num_pages for run in runs] == [2, 1, 2, 2]
    assert [[run.num_pages for run in batch] for batch in tier._copies.batches(runs)] == [[2], [1], [2], [2]]
    tier._copies.num_pages = 9
    assert [[run.num_pages for run in batch] for batch in tier._copies.batches(runs)] == [[2], [1, 2], [2]]
