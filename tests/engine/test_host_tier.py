"""The host tier: cached blocks that the pool loses come back from host memory, and tokens stay the same."""

import dataclasses
import signal

import jax
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine.host_copies import Moved, Piece
from jaxpaged._engine.host_tier import HostTier
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
GREEDY = SamplingParams(temperature=0, max_tokens=6)
MADE = []  # the engine, which is made once


@pytest.fixture
def engine():
    """In a pool for two requests at their limit."""
    if not MADE:
        options = dict(prefix_cache=True, host_cache_bytes=150 * BLOCK_BYTES, exact=True, chunk_tokens=CHUNK)
        MADE.append(create_engine(num_blocks=TIGHT + 1, **options))
    engine = MADE[0]
    assert not engine.has_unfinished_requests
    engine.update_weights(random_weights())
    engine.generate([[0]], GREEDY)  # the slices before the next ones are read: nothing of older weights is left
    return engine


def counts(engine, before=None):
    """Tokens found, brought and computed."""
    stats = engine.stats()
    now = np.array([stats.num_found, stats.num_brought, stats.num_computed])
    return now if before is None else (now - before).tolist()


def check(engine):
    scheduler, allocator = jax.tree.map(np.asarray, (engine._state.scheduler, engine._state.allocator))
    assert allocator.broken_invariants() == scheduler.broken_invariants(allocator) == ()
    assert engine.stats().host_bytes <= 150 * BLOCK_BYTES


def serve(engine, prompt, params=GREEDY, seed=0):
    (output,) = engine.generate([prompt], params)
    assert output.outputs[0].token_ids == continuation(random_weights(seed), prompt, params)[0]
    return prompt + output.outputs[0].token_ids


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def push_out(engine, weights=0):
    """Other prompts, until the pool has lost all that it had cached."""
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


def test_conversations_in_turn_find_all_that_an_endless_pool_would_find(engine):
    talks, endless, before = [prompt_of(seed, 12) for seed in range(12)], 0, counts(engine)
    for turn in range(3):
        for i in range(0, len(talks), 2):
            endless += sum((len(talk) - 6) // BLOCK_SIZE * BLOCK_SIZE if turn else 0 for talk in talks[i : i + 2])
            for j, output in enumerate(engine.generate(talks[i : i + 2], GREEDY), i):
                assert output.outputs[0].token_ids == continuation(random_weights(), talks[j], GREEDY)[0]
                talks[j] = talks[j] + output.outputs[0].token_ids + prompt_of(turn, 5)
    found, brought, _ = counts(engine, before)
    assert found >= 0.95 * endless > 0
    assert brought > 0.5 * found
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


def test_other_weights_find_nothing_of_the_old_ones(engine):
    talk = serve(engine, prompt_of(5, 20))
    push_out(engine)
    before = counts(engine)
    engine.add_request([*talk, 7], GREEDY)
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
    tier = engine._tier
    engine.generate([[0]], GREEDY)
    assert (tier._fetches, tier._coming, tier._num_staged) == ([], set(), 0)
    assert all(serial > 0 for serial in tier._listed.values())


def test_the_programs_copy_no_cache(engine):
    cache, copies = engine._state.caches, engine._copies
    shape = f"f32[{','.join(map(str, cache.k.shape))}]"
    for program in (copies._put_in, copies._take_out):
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
    blocks = [engine._copies._nothing] * 2
    for first, is_listed in ((1, False), (0, True), (1, True)):
        salt = int(engine._state.scheduler.prefixes.salt[0])
        engine._state_of_slice, (_, ids, serials) = engine._copies.put(
            engine._state, Piece(prompt[: first + 2], salt, first, keys, blocks)
        )
        assert (np.asarray(serials[:2]) > 0).tolist() == [is_listed] * 2
        assert (np.asarray(ids[:2]) > 0).all() == is_listed
        check(engine)
    engine.update_weights(random_weights())  # they hold nothing


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_a_copy_to_host_memory_that_fails_loses_no_token(engine, monkeypatch, is_interrupt):
    device_put, failures = jax.device_put, [MemoryError("no room for a copy")]

    def failing(blocks, where):
        if failures and where == engine._copies._on_host:
            failure = failures.pop()
            if not is_interrupt:
                raise failure
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as interrupt:
                raise ValueError("as JAX makes of it") from interrupt
        return device_put(blocks, where)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(jax, "device_put", failing)
    prompt, params = prompt_of(8, 9), dataclasses.replace(GREEDY, max_tokens=30)
    engine.add_request(prompt, params)
    with pytest.raises(KeyboardInterrupt if is_interrupt else MemoryError):
        finish(engine)
    signal.signal(signal.SIGINT, before)
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == continuation(random_weights(), prompt, params)[0]
    check(engine)


def test_a_copy_that_fails_behind_a_slice_takes_the_engine_down(engine, monkeypatch):
    def fail(*args):
        raise MemoryError("no room for a copy")

    MADE.clear()
    monkeypatch.setattr(engine._copies, "take", fail)
    request = engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match=r"engine is lost: .* MemoryError: no room for a copy"):
        finish(engine)
    assert request in engine._books.requests


def test_what_a_host_tier_needs():
    options = dict(num_blocks=9, host_cache_bytes=10**6)
    for more, message in (
        (dict(), "pass prefix_cache=True"),
        (dict(prefix_cache=True, host_cache_bytes=BLOCK_BYTES - 1), f"a block, of {BLOCK_BYTES} bytes; got"),
        (dict(prefix_cache=True, windows=(None, 8)), "one group of layers; got windows="),
    ):
        with pytest.raises(ValueError, match=message):
            create_engine(**options | more)


# The books, without a device.

SIZE, POOL = 2, 32


def make_tier(**options):
    sizes = dict(num_blocks=POOL, block_size=SIZE, capacity=8, least_tokens=3, at_once=2, most_staged=4)
    return HostTier(**sizes | options, bring=lambda blocks: [(FakeCopy(*block),) for block in blocks])


class FakeCopy:
    """Of a block, there at once."""

    def __init__(self, of):
        self.of = of

    def is_ready(self):
        return self.of != "slow"


def row(*tokens):
    return Row(0, np.array(tokens, np.int32), SamplingParams(), 0)


def moved(tier, listed, salt=0, put=()):
    """Behind a slice: `listed` of each place its serial, its parent's, its tokens and its copy; None: known already."""
    serials = np.zeros(POOL, np.int32)
    taken = []
    for place, (serial, parent, tokens, copy) in listed.items():
        serials[place] = serial
        if tokens is not None:
            taken.append((np.array(tokens, np.int32), serial, parent, salt, (copy,)))
    tier.take(Moved(list(put), taken, serials, [salt]))


CHAIN = {5: (1, 0, (1, 2), "a"), 6: (2, 1, (3, 4), "b"), 7: (3, 2, (5, 6), "c")}
PROMPT = 1, 2, 3, 4, 5, 6, 7


def test_what_the_device_has_lost_is_brought_from_the_first_loss_on():
    tier = make_tier()
    moved(tier, CHAIN)
    assert not tier.holds(row(*PROMPT))  # all is there
    moved(tier, {5: (1, 0, None, None)})
    waiting = row(*PROMPT)
    assert tier.holds(waiting)
    assert tier.holds(row(*PROMPT))  # for the same copy
    assert tier.num_fetches == 1
    (piece,) = tier.take_arrived()
    assert (piece.first, piece.salt, [block.of for (block,) in piece.blocks]) == (1, 0, ["b", "c"])
    assert piece.tokens.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tier.num_fetches == 0
    assert not tier.holds(waiting)  # it goes out with them
    put = piece, np.array([8, 9]), np.array([4, 5])
    moved(tier, {5: (1, 0, None, None), 8: (4, 0, None, None), 9: (5, 0, None, None)}, put=[put])
    assert (tier.num_brought, tier._num_staged) == (4, 0)
    assert not tier.holds(waiting)


def test_what_could_not_be_listed_is_not_taken_to_be_there():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {})
    assert tier.holds(row(*PROMPT))
    pieces = tier.take_arrived()
    assert [len(piece.keys) for piece in pieces] == [2, 1]
    moved(tier, {}, put=[(pieces[0], np.array([8, 9]), np.array([4, 5]))])  # gone again within the slice
    tier.lose(pieces[1:])
    assert (tier._listed, tier._num_staged, tier.num_brought) == ({}, 0, 0)
    assert tier.holds(row(*PROMPT))


def test_few_tokens_are_not_worth_a_copy():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {5: (1, 0, None, None), 6: (2, 1, None, None)})
    assert not tier.holds(row(*PROMPT))  # two tokens of the least three
    assert tier.num_fetches == 0


def test_pieces_on_their_way_are_few_and_may_take_long():
    tier = make_tier(at_once=1, most_staged=2)
    moved(tier, CHAIN | {7: (3, 2, (5, 6), "slow")})
    moved(tier, {})
    assert tier.holds(row(*PROMPT))
    assert tier._num_staged == 2
    first = tier.take_arrived()
    assert [piece.first for piece in first] == [0, 1]
    assert tier._num_staged == 2  # until the slice that lists them is read
    tier.lose(first)
    assert tier.take_arrived() == []
    assert tier._num_staged == 1  # the slow one
    assert tier.num_fetches == 1
    tier.clear()
    assert (tier._num_staged, tier.num_fetches, tier.num_kept) == (0, 0, 0)


def test_nothing_waits_for_blocks_that_left_host_memory_meanwhile():
    tier = make_tier(at_once=1, most_staged=1, capacity=3)
    moved(tier, CHAIN)
    moved(tier, {})
    assert tier.holds(row(*PROMPT))
    moved(tier, {8: (9, 0, (9, 9), "x")})  # in the place of the tail
    arrived = []
    while tier.num_fetches:
        pieces = tier.take_arrived()
        arrived += [block.of for piece in pieces for (block,) in piece.blocks]
        tier.lose(pieces)
    assert arrived == ["a", "b"]
    assert (tier._coming, tier._num_staged) == (set(), 0)


def test_the_tail_leaves_host_memory_before_the_head():
    tier = make_tier(capacity=3)
    moved(tier, {5: CHAIN[5], 6: CHAIN[6]})
    moved(tier, {5: (1, 0, None, None), 6: (2, 1, None, None), 7: CHAIN[7]})
    moved(tier, {8: (9, 0, (9, 9), "x")})
    assert [block for *_, (block,) in tier._kept.values()] == ["b", "a", "x"]
    tier = make_tier(capacity=3)
    moved(tier, CHAIN)
    moved(tier, {})
    tier.holds(row(1, 2, 3, 4, 5))  # now two are newer than the third
    moved(tier, {8: (9, 0, (9, 9), "x")})
    assert [block for *_, (block,) in tier._kept.values()] == ["b", "a", "x"]


def test_blocks_of_another_salt_leave():
    tier = make_tier()
    moved(tier, CHAIN)
    moved(tier, {8: (9, 0, (1, 2), "new")}, salt=1)
    moved(tier, {8: (9, 0, None, None), 9: (10, 0, (1, 2), "old")}, salt=0)
    assert tier.num_kept == 1
    tier = make_tier()
    moved(tier, CHAIN)
    late = np.array((7, 8), np.int32), 4, 0, 0, ("late",)
    tier.take(Moved([], [late], np.zeros(POOL, np.int32), [1]))
    assert tier.num_kept == 0


def test_a_block_comes_back_for_its_own_adapter():
    tier = make_tier(num_adapters=2)

    def of(adapter):
        return dataclasses.replace(row(*PROMPT), params=SamplingParams(adapter=adapter))

    serials = np.zeros(POOL, np.int32)
    serials[[5, 6, 7]] = 1, 2, 3
    taken = [(np.array(t, np.int32), serial, parent, 2, (copy,)) for serial, parent, t, copy in CHAIN.values()]
    tier.take(Moved([], taken, serials, [0, 1, 2]))
    tier.take(Moved([], [], serials * 0, [0, 1, 2]))
    assert [tier.holds(of(adapter)) for adapter in (None, 0, 1)] == [False, False, True]
    assert {piece.salt for piece in tier.take_arrived()} == {2}
    tier.take(Moved([], [], serials * 0, [3, 1, 2]))
    assert tier.num_kept == 3
    tier.take(Moved([], [], serials * 0, [3, 1, 5]))
    assert tier.num_kept == 0


def test_a_block_whose_parent_was_lost_is_not_kept():
    tier = make_tier()
    moved(tier, {6: (2, 1, (3, 4), "b")})
    assert tier.num_kept == 0
