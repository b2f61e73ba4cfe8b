"""The host tier: cached blocks that the pool loses come back from host memory, and tokens stay the same."""

import dataclasses
import itertools
import signal

import jax
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine.host_copies import Piece, Taken, Wanted, in_pages
from jaxpaged._engine.host_tier import HostTier, Moves
from jaxpaged._engine.requests import Row
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
)

CHUNK = 8
BLOCK_BYTES = 2 * BLOCK_SIZE * HEADS * HEAD_DIM * 4
HOST_BYTES = 100 * 4 * BLOCK_BYTES  # a hundred pages
GREEDY = SamplingParams(temperature=0, max_tokens=6)
MADE = []  # the engine, which is made once


@pytest.fixture
def engine():
    """In a pool for two requests at their limit."""
    if not MADE:
        options = dict(
            prefix_cache=True, host_cache_bytes=HOST_BYTES, exact=True, chunk_tokens=CHUNK, steps_per_slice=2
        )
        MADE.append(create_engine(num_blocks=TIGHT + 1, **options))
    engine = MADE[0]
    assert not engine.has_unfinished_requests
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
        patch.setattr(Piece, "is_there", False)
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
            priority=int(rng.integers(-3, 3)),
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
    assert (tier._fetches, tier._num_staged) == ([], 0)
    assert all(serial > 0 for serial in tier._listed.values())


def test_the_programs_copy_no_cache(engine):
    cache, copies = engine._runner.state.caches, engine._runner.tier._copies
    shape = f"f32[{','.join(map(str, cache.k.shape))}]"
    for program in (copies._put_in, *copies._take_out.values()):
        found = [
            (name, line) for name, _, line in instructions(program.as_text()) if shape in line.split(name + "(")[0]
        ]
        assert found  # the search sees the cache
        assert [name for name, _ in found if name.startswith("copy")] == []
    assert copies._put_in.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def test_blocks_behind_a_gap_are_not_listed(engine):
    prompt = np.array(serve(engine, prompt_of(7, 20)), np.int32)[:24].reshape(6, BLOCK_SIZE)
    push_out(engine)
    keys = [bytes([i]) for i in range(2)]
    copies = engine._runner.tier._copies
    for first, is_listed in ((1, False), (0, True), (1, True)):
        salt = int(engine._runner.state.scheduler.prefixes.salt[0])
        columns = np.array([[first, -1, -1, -1], [-1, -1, first + 1, -1]], np.int32)
        engine._runner.state_of_slice, (_, where) = copies.put(
            engine._runner.state, [Piece(prompt[: first + 2], salt, first, keys, columns, [copies._nothing] * 2)]
        )
        ids, serials = np.asarray(where)[:, [0, 1], [0, 2]]
        assert (serials > 0).tolist() == [is_listed] * 2
        assert (ids > 0).all() == is_listed
        check(engine)
    engine.update_weights(random_weights())  # they hold nothing


@pytest.mark.parametrize("name", ["take", "put", "bring"])
def test_copies_that_fail_lose_no_token(engine, monkeypatch, name):
    talk = serve(engine, prompt_of(8, 20))
    push_out(engine)
    copies, failures = engine._runner.tier._copies, [MemoryError("no room for a copy")]
    function = getattr(copies, name)

    def failing(*args):
        if failures:
            raise failures.pop()
        return function(*args)

    monkeypatch.setattr(copies, name, failing)
    before, params = counts(engine), dataclasses.replace(GREEDY, max_tokens=15)
    engine.add_request([*talk, 7], params)
    with pytest.raises(MemoryError, match="no room for a copy"):
        finish(engine)
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == continuation(random_weights(), [*talk, 7], params)[0]
    assert counts(engine, before)[:2] == [24, 24]
    settle(engine)
    assert (engine._runner.tier._fetches, engine._runner.tier._num_staged) == ([], 0)
    assert (engine._runner.tier._known == engine._runner.tier._serials).all()


def test_what_a_host_tier_needs():
    options = dict(num_blocks=9, host_cache_bytes=10**6)
    for more, message in (
        (dict(), "pass prefix_cache=True"),
        (dict(prefix_cache=True, host_cache_bytes=BLOCK_BYTES), f"the {4 * BLOCK_BYTES} bytes that are moved at once"),
        (dict(prefix_cache=True, max_length=BLOCK_SIZE - 1), "no request fills one; got max_length=3"),
        (dict(prefix_cache=True, windows=(None, 8)), "one group of layers, without a window; got windows="),
    ):
        with pytest.raises(ValueError, match=message):
            create_engine(**options | more)


# The books, without a device.

SIZE, POOL = 2, 32


class FakeCopies:
    page_bytes = 1

    def __init__(self, in_page=1, num_pages=2, most_staged=4):
        self.in_page, self.num_pages, self.most_staged, self.most_leaving = in_page, num_pages, most_staged, 2

    def bring(self, pages):
        return pages


class FakeCopy:
    """Of a page, there at once."""

    def __init__(self, of):
        self.of = of

    def is_ready(self):
        return self.of != "slow"


def make_tier(*, in_page=1, num_pages=2, most_staged=4, **options):
    sizes = dict(num_blocks=POOL, block_size=SIZE, capacity=8, least_tokens=3, growth=0)
    return HostTier(FakeCopies(in_page, num_pages, most_staged), **sizes | options)


def row(*tokens):
    return Row(0, np.array(tokens, np.int32), SamplingParams(), 0)


def taken(place, serial, parent, tokens, copy, salt=0):
    """A page of one block."""
    words = np.array([*tokens, salt, serial], np.int32)
    return Taken(
        Wanted(np.array([[place]]), np.array([[serial]]), np.array([parent])), words[None, None], [(FakeCopy(copy),)]
    )


@dataclasses.dataclass
class Told:
    serials: np.ndarray
    parents: np.ndarray
    salts: list


def told(tier, serials, salts=(0,), *, put=(), pages=()):
    tier.take(Told(serials, serials * 0, np.array(salts)), Moves(taken=list(pages), put=list(put)))


def moved(tier, listed, salt=0, put=()):
    """Behind a slice: `listed` of each place its serial, its parent's, its tokens and its copy; None: known already."""
    serials = np.zeros(POOL, np.int32)
    serials[list(listed)] = [serial for serial, *_ in listed.values()]
    pages = [taken(place, *block, salt) for place, block in listed.items() if block[2] is not None]
    told(tier, serials, [salt], put=put, pages=pages)


def going(tier, *rows, sent=()):
    """The pieces that go out when these rows are asked for."""
    tier.look_again()
    for each in rows:
        tier.holds(each, sent)
    return pieces_of(tier)


def pieces_of(tier):
    return list(itertools.chain.from_iterable(tier.next_moves().batches))


def copies_of(pieces):
    return [copy.of for piece in pieces for (copy,) in piece.pages]


def kept(tier):
    return [copy.of for of_page in tier._pages for copy in of_page.page]


CHAIN = {5: (1, 0, (1, 2), "a"), 6: (2, 1, (3, 4), "b"), 7: (3, 2, (5, 6), "c")}
PROMPT = 1, 2, 3, 4, 5, 6, 7


def test_what_the_device_has_lost_is_brought_from_the_first_loss_on():
    tier = make_tier()
    moved(tier, CHAIN)
    assert not tier.holds(row(*PROMPT), [])  # all is there
    moved(tier, {5: (1, 0, None, None)})
    waiting, other = row(*PROMPT), row(*PROMPT)
    tier.look_again()
    assert not tier.holds(waiting, [row(1, 2, 9)])  # which holds the first; it goes out with the others
    (piece,) = pieces_of(tier)
    assert (piece.first, piece.salt, copies_of([piece])) == (1, 0, ["b", "c"])
    assert (piece.tokens.tolist(), piece.columns.tolist()) == ([[1, 2], [3, 4], [5, 6]], [[1], [2]])
    assert len(tier._fetches) == 0
    assert not tier.holds(other, [])
    put = [piece], np.array([[[8], [9]], [[4], [5]]])
    moved(tier, {5: (1, 0, None, None), 8: (4, 0, None, None), 9: (5, 0, None, None)}, put=[put])
    assert (tier.num_brought, tier._num_staged) == (4, 0)
    assert not tier.holds(waiting, [])


def test_what_the_device_may_be_losing_is_brought_too():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {5: (1, 0, None, None)})
    assert copies_of(going(tier, row(*PROMPT))) == ["a", "b", "c"]
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {5: (1, 0, None, None)})
    tier._drop(tier._places[tier._keys_of(row(*PROMPT))[0]][0])
    assert kept(tier) == ["c", "b"]  # the first is on the device only
    assert copies_of(going(tier, row(*PROMPT))) == ["b", "c"]


def test_what_could_not_be_listed_is_not_taken_to_be_there():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {})
    pieces = going(tier, row(*PROMPT))
    assert [len(piece.keys) for piece in pieces] == [2, 1]
    moved(tier, {}, put=[(pieces[:1], np.array([[[8], [9]], [[4], [5]]]))])  # gone again within the slice
    tier.lose(Moves(None, [pieces[1:]]))
    assert (tier._listed, tier._num_staged, tier.num_brought) == ({}, 0, 0)
    assert copies_of(going(tier, row(*PROMPT))) == ["a", "b", "c"]


def test_few_tokens_are_not_worth_a_copy():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {5: (1, 0, None, None), 6: (2, 1, None, None)})
    assert not tier.holds(row(*PROMPT), [])  # two tokens of the least three
    assert going(tier) == []


def test_pieces_on_their_way_are_few_and_may_take_long():
    tier = make_tier(num_pages=1, most_staged=2)
    moved(tier, CHAIN | {7: (3, 2, (5, 6), "slow")})
    moved(tier, {})
    waiting, other = row(*PROMPT), row(*PROMPT, 8)
    assert tier.holds(waiting, [])
    assert tier.holds(other, [])  # for the same copies
    first = pieces_of(tier)
    assert copies_of(first) == ["a", "b"]
    tier.lose(Moves(None, [first]))
    assert going(tier, waiting) == []
    assert tier._num_staged == 1  # the slow one
    assert len(tier._fetches) == 1
    tier.clear()
    assert (tier._num_staged, len(tier._fetches), tier.host_bytes) == (0, 0, 0)


def test_a_request_that_ended_waits_for_nothing():
    tier = make_tier(num_pages=1, most_staged=2)
    moved(tier, CHAIN | {5: (1, 0, (1, 2), "slow")})
    moved(tier, {})
    waiting = row(*PROMPT)
    assert tier.holds(waiting, [])
    waiting.is_aborted = True
    tier.look_again()
    assert (tier._num_staged, len(tier._fetches)) == (0, 0)


def test_a_request_goes_out_with_what_comes_back_once_there_is_room_for_it():
    tier = make_tier()
    tier._num_blocks = 12
    moved(tier, CHAIN)
    moved(tier, {})
    waiting, small, running = row(*PROMPT), row(9, 9), row(*range(10, 17))
    for length, is_held in ((3, True), (2, False)):  # it needs five of eleven blocks; ten tokens need seven, nine six
        running.token_ids = [0] * length
        tier.look_again()
        assert tier.holds(waiting, [running]) == is_held
        assert tier.holds(small, [running]) == is_held  # behind the other
    assert copies_of(pieces_of(tier)) == ["a", "b", "c"]
    tier._growth, running.token_ids = 2, [0]
    tier.look_again()
    moved(tier, {})
    assert tier.holds(row(*PROMPT), [running])  # as with three


def test_a_prefix_that_others_hold_needs_room_once():
    tier = make_tier()
    tier._num_blocks = 12
    moved(tier, CHAIN)
    moved(tier, {})
    assert not tier.holds(row(*PROMPT), [row(*PROMPT), row(*PROMPT)])
    assert copies_of(pieces_of(tier)) == ["a", "b", "c"]


def test_nothing_waits_for_blocks_that_left_host_memory_meanwhile():
    tier = make_tier(num_pages=1, most_staged=1, capacity=3)
    moved(tier, CHAIN)
    moved(tier, {})
    waiting, arrived = row(*PROMPT), []
    assert tier.holds(waiting, [])
    moved(tier, {8: (9, 0, (9, 9), "x")})  # in the place of the tail
    for _ in range(2):
        pieces = going(tier, waiting)
        arrived += copies_of(pieces)
        tier.lose(Moves(None, [pieces]))
    assert arrived == ["a", "b"]
    assert (tier._fetches, tier._num_staged) == ([], 0)


def test_the_tail_leaves_host_memory_before_the_head():
    tier = make_tier(capacity=3)
    moved(tier, {5: CHAIN[5], 6: CHAIN[6]})
    moved(tier, {5: (1, 0, None, None), 6: (2, 1, None, None), 7: CHAIN[7]})
    moved(tier, {8: (9, 0, (9, 9), "x")})
    assert kept(tier) == ["b", "a", "x"]
    tier = make_tier(capacity=3)
    moved(tier, CHAIN)
    moved(tier, {})
    tier.holds(row(1, 2, 3, 4, 5), [])  # now two are newer than the third
    moved(tier, {8: (9, 0, (9, 9), "x")})
    assert kept(tier) == ["b", "a", "x"]
    assert len(tier._places) == 3


def test_blocks_of_another_salt_leave():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {8: (9, 0, (1, 2), "new")}, salt=1)
    moved(tier, {8: (9, 0, None, None), 9: (10, 0, (1, 2), "old")}, salt=0)
    assert tier.host_bytes == 1
    tier = make_tier()
    moved(tier, CHAIN)
    told(tier, np.zeros(POOL, np.int32), [1], pages=[taken(5, 4, 0, (7, 8), "late")])
    assert tier.host_bytes == 0


def test_a_block_comes_back_for_its_own_adapter():
    tier = make_tier(num_adapters=2)

    def of(adapter):
        return dataclasses.replace(row(*PROMPT), params=SamplingParams(adapter=adapter))

    serials = np.zeros(POOL, np.int32)
    serials[[5, 6, 7]] = 1, 2, 3
    pages = [taken(place, *block, salt=2) for place, block in CHAIN.items()]
    told(tier, serials, [0, 1, 2], pages=pages)
    told(tier, serials * 0, [0, 1, 2])
    assert [len(going(tier, of(adapter))) for adapter in (None, 0, 1)] == [0, 0, 2]
    told(tier, serials * 0, [3, 1, 2])
    assert tier.host_bytes == 3
    told(tier, serials * 0, [3, 1, 5])
    assert tier.host_bytes == 0


def test_a_block_whose_parent_was_lost_is_not_kept():
    tier = make_tier()
    moved(tier, {6: (2, 1, (3, 4), "b")})
    assert tier.host_bytes == 0


def test_a_page_holds_blocks_that_follow_each_other():
    serials, parents = np.zeros(POOL, np.int32), np.zeros(POOL, np.int32)
    ids = [9, 4, 7, 5, 20, 21, 22]  # by serial; 20 follows 9, 21 and 22 follow 5
    serials[ids] = [11, 12, 13, 14, 15, 16, 17]
    parents[ids] = [3, 11, 12, 13, 11, 14, 16]
    assert in_pages(np.sort(ids), serials, parents, 2).tolist() == [[9, 4], [7, 5], [20, 0], [21, 22]]
    assert in_pages(np.array([], np.int64), serials, parents, 2).shape == (0, 2)


def test_blocks_in_the_middle_of_pages_come_back():
    tier = make_tier(in_page=2)
    words = np.array([[[1, 2, 0, 1], [3, 4, 0, 2]], [[5, 6, 0, 3], [7, 8, 0, 4]]], np.int32)
    pages = [(FakeCopy("ab"),), (FakeCopy("cd"),)]
    serials = np.zeros(POOL, np.int32)
    serials[[5, 6, 7, 8]] = 1, 2, 3, 4
    wanted = Wanted(np.array([[5, 6], [7, 8]]), np.array([[1, 2], [3, 4]]), np.array([0, 2]))
    told(tier, serials, pages=[Taken(wanted, words, pages)])
    told(tier, serials * (serials == 1))
    (piece,) = going(tier, row(1, 2, 3, 4, 5, 6, 9), sent=[row(1, 2, 9)])
    assert (piece.first, copies_of([piece])) == (1, ["ab", "cd"])
    assert piece.columns.tolist() == [[-1, 1], [2, -1]]


def test_what_was_overwritten_before_its_copy_is_not_kept():
    tier = make_tier(in_page=2)
    words = np.array([[[1, 2, 0, 1], [3, 4, 0, 0]], [[5, 6, 0, 3], [7, 8, 0, 4]]], np.int32)
    wanted = Wanted(np.array([[5, 6], [7, 8]]), np.array([[1, 2], [3, 4]]), np.array([0, 2]))
    serials = np.zeros(POOL, np.int32)
    serials[[7, 8]] = 3, 4  # 5 was overwritten behind its copy
    told(tier, serials, pages=[Taken(wanted, words, [(FakeCopy("a"),), (FakeCopy("b"),)])])
    assert kept(tier) == ["a"]
    assert (tier._listed, tier._key_of) == ({}, {})


def test_what_a_slice_lists_is_wanted_once_and_no_more_than_may_be_on_its_way():
    tier = make_tier(in_page=2)
    serials, parents = np.zeros(POOL, np.int32), np.zeros(POOL, np.int32)
    serials[[3, 4, 5, 6, 7]] = 1, 2, 3, 4, 5
    parents[[4, 5, 6, 7]] = 1, 2, 3, 4
    for expected in ([[3, 4], [5, 6]], [[7, 0]], None):
        tier.take(Told(serials, parents, np.array([0])), Moves())
        assert tier.needs_looks == (expected == [[3, 4], [5, 6]])
        wanted = tier.next_moves().wanted
        assert (wanted if wanted is None else wanted.ids.tolist()) == expected
    tier.lose(Moves(Wanted(np.array([[7, 0]]), np.array([[5, 0]]), np.array([4]))))
    tier.take(Told(serials, parents, np.array([0])), Moves())
    assert tier.next_moves().wanted.ids.tolist() == [[7, 0]]


def test_pieces_of_several_prompts_go_out_together():
    tier = make_tier(num_pages=2, most_staged=8)
    others = {8: (4, 0, (1, 9), "x"), 9: (5, 4, (3, 9), "y"), 10: (6, 0, (2, 9), "z"), 11: (7, 6, (4, 9), "w")}
    moved(tier, CHAIN | others)
    moved(tier, {})
    tier.look_again()
    for tokens in (PROMPT, (1, 9, 3, 9, 0), (2, 9, 4, 9, 0)):
        assert not tier.holds(row(*tokens), [])
    assert [[len(piece.pages) for piece in batch] for batch in tier.next_moves().batches] == [[2], [1], [2], [2]]
    tier = make_tier(num_pages=3, most_staged=12)
    moved(tier, CHAIN | others)
    moved(tier, {})
    for tokens in ((1, 9, 3, 9, 0), (2, 9, 4, 9, 0), PROMPT):
        assert not tier.holds(row(*tokens), [])
    assert [[len(piece.pages) for piece in batch] for batch in tier.next_moves().batches] == [[2], [2], [3]]
