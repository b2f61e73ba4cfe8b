"""Drafts: the tokens are those of an engine without, whatever is drafted; what is drafted, and where it pays."""

import dataclasses
import functools
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from jaxpaged import KVCache, SamplingParams
from jaxpaged._engine import program
from jaxpaged._engine.defaults import draft_widths
from jaxpaged._slice.drafting import KEPT, PRIOR, Drafting, repeated
from jaxpaged._slice.kinds import make_kinds, quickest
from tests.toy_model import (
    BLOCKS,
    MAX_TOKENS,
    SEATS,
    TIGHT,
    VOCAB,
    WIDTHS,
    create_engine,
    fewer_blocks,
    finish,
    random_weights,
    requests,
    shared_engine,
)

ANSWERS, DRAFTS = 64, 3
ENGINES = {}


def knowing(weights, tokens, lengths, hidden, num_drafts=DRAFTS):
    """Drafts of one who knows the answers, and errs in `errors` of 10 cases; -1 where it knows no answer."""
    index = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None]
    is_same = (weights["answers"][None] == tokens[:, None]) | (index >= lengths[:, None])[:, None]
    is_answer = is_same.all(axis=2)
    answers = weights["answers"][jnp.argmax(is_answer, axis=1)]
    places = lengths[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    drafts = jnp.take_along_axis(answers, jnp.minimum(places, MAX_TOKENS - 1), axis=1)
    drafts = jnp.where((places * 7 + drafts) % 10 < weights["errors"], (drafts + 1) % VOCAB, drafts)
    return jnp.where(is_answer.any(axis=1)[:, None] & (lengths[:, None] % 8 > 0), drafts, -1)


def knowing_weights(texts=(), errors=0, seed=0):
    answers = np.full((ANSWERS, MAX_TOKENS), -1, np.int32)
    for row, text in zip(answers, texts, strict=False):
        row[: len(text)] = text
    return random_weights(seed) | {"answers": jnp.asarray(answers), "errors": jnp.int32(errors)}


def drafting_engine(num_drafts=DRAFTS, **options):
    """An engine whose drafts come from its weights' answers."""
    key = num_drafts, *options.items()
    if key not in ENGINES:
        options |= dict(widths=(2 * SEATS,), num_speculative_tokens=num_drafts, prefix_cache=True, shares=True)
        draft = functools.partial(knowing, num_drafts=num_drafts)
        ENGINES[key] = create_engine(weights=knowing_weights(), draft=draft, **options)
    return ENGINES[key]


@pytest.fixture(autouse=True)
def idle_engines():
    """After each test nothing is left of its requests."""
    yield
    for engine in ENGINES.values():
        assert engine._books.is_settled
        state = jax.tree.map(np.asarray, engine._runner.state)
        assert state.scheduler.broken_invariants(state.allocator) == ()
        assert state.allocator.broken_invariants() == ()
        assert state.allocator.num_free == BLOCKS


def texts_of(prompts, outputs):
    return [
        [*prompt, *one.token_ids] for prompt, of_one in zip(prompts, outputs, strict=True) for one in of_one.outputs
    ]


def assert_same(completion, expected, *, is_whole=True):
    count = len(completion.token_ids)
    assert completion.token_ids == expected.token_ids[:count]
    np.testing.assert_allclose(completion.logprobs, expected.logprobs[:count], atol=1e-5)
    if is_whole:
        assert (count, completion.finish_reason) == (len(expected.token_ids), expected.finish_reason)


def play(engine, seed):
    """Random requests, in a pool tight or not, some of them aborted, with drafts good or bad, against an engine without
    drafts."""
    rng = np.random.default_rng(seed)
    prompts, params = requests(int(rng.integers(3, 25)), seed)
    if rng.random() < 0.5:  # that begin alike
        prompts = [[*prompts[0][:9], *prompt[: 30 - len(prompts[0][:9])]][:30] for prompt in prompts]
        params = [dataclasses.replace(one, max_tokens=min(one.max_tokens, MAX_TOKENS - 30)) for one in params]
    params = [dataclasses.replace(one, logprobs=True) for one in params]
    without = shared_engine(16, prefix_cache=True)
    without.update_weights(random_weights(seed % 3))
    expected = without.generate(prompts, params)
    texts = texts_of(prompts, expected)[: ANSWERS - 1]
    engine.update_weights(knowing_weights(texts, int(rng.choice([0, 3, 10])), seed % 3))
    with fewer_blocks(engine, BLOCKS if rng.random() < 0.4 else TIGHT):
        ids = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
        aborted, outputs = set(), {}
        while engine.has_unfinished_requests:
            if rng.random() < 0.1:
                aborted.add(ids[int(rng.integers(len(ids)))])
                engine.abort(max(aborted))
                aborted.add(max(aborted))
            outputs |= {output.request_id: output for output in engine.step()}
    for request_id, of_one in zip(ids, expected, strict=True):
        for completion, one in zip(outputs[request_id].outputs, of_one.outputs, strict=True):
            assert_same(completion, one, is_whole=completion.finish_reason != "abort")


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_an_engine_without_drafts(seed):
    play(drafting_engine(), seed)


def test_right_drafts_are_accepted_and_wrong_ones_cost_no_token():
    engine, without = drafting_engine(), shared_engine(16, prefix_cache=True)
    params = SamplingParams(max_tokens=40, seed=1, logprobs=True)
    prompts = [[i, i + 1, i + 2] for i in range(SEATS)]
    without.update_weights(random_weights())
    expected = without.generate(prompts, params)
    num_steps = []
    for errors in (10, 0):
        engine.update_weights(knowing_weights(texts_of(prompts, expected), errors))
        before = engine.stats()
        outputs = engine.generate(prompts, params)
        after = engine.stats()
        for output, of_one in zip(outputs, expected, strict=True):
            assert_same(output.outputs[0], of_one.outputs[0])
        num_steps.append(after.num_steps - before.num_steps)
        num_accepted, num_drafted = (after.num_accepted - before.num_accepted, after.num_drafted - before.num_drafted)
        assert num_accepted == 0 if errors else num_accepted >= 100
        assert 0 < num_drafted < 100 if errors else num_drafted >= num_accepted
        assert (after.num_generated - before.num_generated) == 40 * SEATS
    assert 40 <= num_steps[0] <= 45
    assert num_steps[1] <= 25  # new requests: what is known of those before does not count


def test_a_stop_ends_an_accepted_run():
    engine, without = drafting_engine(), shared_engine(16, prefix_cache=True)
    without.update_weights(random_weights())
    params = SamplingParams(max_tokens=40, temperature=0)
    expected = without.generate([[5, 6]], params)
    engine.update_weights(knowing_weights(texts_of([[5, 6]], expected)))
    (tokens,) = [one.token_ids for one in expected[0].outputs]
    for stop in range(8, 16):
        (output,) = engine.generate([[5, 6]], dataclasses.replace(params, stop_token_ids=(tokens[stop],)))
        assert output.outputs[0].token_ids == tokens[: tokens.index(tokens[stop]) + 1]
        assert output.outputs[0].finish_reason == "stop"


def test_scores_and_rollouts_are_those_without_drafts():
    engine, without = drafting_engine(), shared_engine(16, prefix_cache=True)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    params = SamplingParams(max_tokens=30, seed=3, n=2, prompt_logprobs=True)
    without.update_weights(random_weights())
    expected = without.generate(prompts, dataclasses.replace(params, logprobs=True))
    engine.update_weights(knowing_weights(texts_of(prompts, expected)))
    outputs = engine.generate(prompts, params)
    for output, of_one in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.prompt_logprobs[1:], of_one.prompt_logprobs[1:], atol=1e-5)
    completions = [one for of_one in expected for one in of_one.outputs]
    rollout = engine.rollout(prompts, dataclasses.replace(params, prompt_logprobs=False))
    assert rollout.tokens.tolist() == [one.token_ids for one in completions]
    np.testing.assert_allclose(rollout.logprobs, [one.logprobs for one in completions], atol=1e-5)
    given = [one.outputs[0].token_ids for one in expected]
    engine.add_request(prompts[0], params)
    scores = engine.score(prompts, given)
    finish(engine)
    for score, one in zip(scores, expected, strict=True):
        np.testing.assert_allclose(score.logprobs, one.outputs[0].logprobs, atol=1e-5)


def test_a_batch_invariant_engine_gives_equal_bits_with_drafts():
    prompts, params = requests(12, 5)
    prompts = [(prompt[:3] * 10)[:20] for prompt in prompts]  # what occurred before
    params = [dataclasses.replace(one, logprobs=True, n=1, max_tokens=24) for one in params]
    engine = create_engine(num_speculative_tokens=2, batch_invariant=True, prefix_cache=True)
    alone = [engine.generate([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    before = engine.stats()
    for left in (BLOCKS, TIGHT):
        with fewer_blocks(engine, left):
            together = engine.generate(prompts[::-1], params[::-1])[::-1]
        assert [output.outputs for output in together] == [output.outputs for output in alone]
    after = engine.stats()
    assert before.num_accepted > 0
    assert after.num_preempted > before.num_preempted
    # Twice as many completions as seats: those that begin last find their text in the others'.
    (output,) = engine.generate([[9, 8, 7]], SamplingParams(max_tokens=30, temperature=0, n=2 * SEATS))
    assert {tuple(one.token_ids) for one in output.outputs} == {tuple(output.outputs[0].token_ids)}
    assert engine.stats().num_accepted - after.num_accepted >= 15 * SEATS
    scores = engine.score(prompts, [output.outputs[0].token_ids for output in alone])
    assert [score.logprobs for score in scores] == [output.outputs[0].logprobs for output in alone]


def naive(text, num_drafts):
    for count in range(8, 1, -1):
        places = [i for i in range(count - 1, len(text) - 1) if text[i - count + 1 : i + 1] == text[-count:]]
        if places:
            follows = text[places[-1] + 1 :]
            return (follows * num_drafts)[:num_drafts]
    return [-1] * num_drafts


def test_what_followed_the_newest_tokens_before_is_drafted():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 33, 200)
    tokens = rng.integers(0, 3, (200, 32), np.int32)
    lengths = lengths.astype(np.int32)
    own = tokens, lengths, tokens, lengths
    drafts, num_equal = jax.jit(repeated, static_argnums=4)(*own, 5)
    expected = [naive(text[:n].tolist(), 5) for text, n in zip(tokens, lengths, strict=True)]
    assert drafts.tolist() == expected
    assert ((num_equal >= 2) == (drafts[:, 0] >= 0)).all()
    assert num_equal.max() > 4


def test_what_followed_in_another_text_is_drafted():
    tokens, text = jnp.int32([[0, 1, 2, 3, 9]] * 4), jnp.int32([[2, 3, 4, 5, 2, 3, 6, 7]] * 4)
    drafts, num_equal = repeated(tokens, jnp.int32([4, 4, 3, 1]), text, jnp.int32([8, 6, 8, 8]), 3)
    assert drafts.tolist() == [[6, 7, 6], [4, 5, 2], [-1] * 3, [-1] * 3]
    assert num_equal.tolist() == [2, 2, 0, 0]


def test_completions_look_into_each_others_texts_in_turn():
    drafting = Drafting.create(num_seats=4, num_drafts=2, max_requests=6)
    drafting = drafting.reset(jnp.int32([0, 2, 3, 5, 6]), jnp.int32([7, 7, 7, 8, 7]))
    seated = jnp.int32([2, 5, 0, 6])
    seen = [drafting.companions(seated, jnp.full(4, n, jnp.int32)).tolist() for n in range(6)]
    assert {of_each[0] for of_each in seen} == {0, 3}
    assert {of_each[2] for of_each in seen} == {2, 3}
    assert {(of_each[1], of_each[3]) for of_each in seen} == {(6, 6)}


def test_a_request_is_known_by_its_own_drafts():
    drafting = Drafting.create(num_seats=3, num_drafts=2, max_requests=5)
    step = SimpleNamespace(request_ids=jnp.int32([4, 1, 5]), num_drafts=jnp.int32([2, 2, 0]))
    drafting = drafting.update(step, jnp.int32([3, 1, 0]))
    assert (int(drafting.num_drafted), int(drafting.num_accepted)) == (4, 2)
    drafting = drafting.update(step, jnp.int32([2, 1, 0]))  # of which the second was wrong
    np.testing.assert_allclose(drafting.hits, [0, 0, 0, 0, 1 + 2 * KEPT], rtol=1e-6)
    np.testing.assert_allclose(drafting.tries, [0, 1 + KEPT, 0, 0, 2 + 2 * KEPT], rtol=1e-6)
    silent = SimpleNamespace(request_ids=jnp.int32([1, 2, 5]), num_drafts=jnp.int32([0, 0, 0]))
    drafting = drafting.update(silent, jnp.int32([1, 1, 0]), jnp.bool_([False, True, False]))
    np.testing.assert_allclose(drafting.tries[1:3], [(1 + KEPT) * KEPT, 1], rtol=1e-6)
    scheduler = SimpleNamespace(seated=jnp.int32([4, 0, 5]))
    chance = (1 + 2 * KEPT + PRIOR) / (3 + 2 * KEPT)
    expected = [[chance, chance**2], [PRIOR, PRIOR**2], [PRIOR, PRIOR**2]]
    np.testing.assert_allclose(drafting.chances(scheduler), expected, rtol=1e-6)
    drafting = drafting.reset(jnp.int32([4, 5]), jnp.int32([1, 1]))
    np.testing.assert_allclose(drafting.chances(scheduler)[0], expected[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("row_cost", "expected"),
    [  # a step of the two rows that are needed costs 2 + row_cost, one more 1
        (0, [[-1, -1, -1], [-1, -1, -1]]),
        (0.08, [[-1, -1, -1], [0, -1, -1]]),
        (1, [[-1, -1, -1], [0, 0, 0]]),
        (40, [[0, -1, -1], [0, 0, 0]]),
    ],
)
def test_guesses_are_worth_their_rows(row_cost, expected):
    seats = jnp.arange(2, dtype=jnp.int32)
    scheduler = SimpleNamespace(seated=seats, num_known=seats + 5)
    drafting = dataclasses.replace(Drafting.create(2, 3, 2), hits=jnp.float32([0, 9]), tries=jnp.float32([9, 9]))
    drafting = drafting.with_drafts(scheduler, SimpleNamespace(lengths=seats + 4), knowing, row_cost)
    assert drafting.guesses.tolist() == expected  # chances of 7.5% and of 97.5% for each draft in a row


def test_drafts_become_right_again():
    engine, without = drafting_engine(), shared_engine(16, prefix_cache=True)
    without.update_weights(random_weights())
    params = SamplingParams(max_tokens=40, temperature=0)
    (expected,) = without.generate([[5, 6]], params)
    texts = texts_of([[5, 6]], [expected])
    engine.update_weights(knowing_weights(texts, errors=10))
    engine.add_request([5, 6], params)
    before = engine.stats()
    while engine.stats().num_generated - before.num_generated < 16:
        engine.step()
    after = engine.stats()
    assert after.num_accepted == before.num_accepted
    assert after.num_drafted - before.num_drafted < 3 * 16  # it gave up
    engine.update_weights(knowing_weights(texts))
    (output,) = finish(engine).values()
    assert output.outputs == expected.outputs
    assert engine.stats().num_accepted > after.num_accepted


CHAIN = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32)  # logits after each of five tokens


def small_cache(num_blocks=BLOCKS + 1):
    return KVCache.create(num_blocks=num_blocks, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")


def in_a_chain(weights, tokens, positions, cache, step):
    """A model whose logits follow from the last token alone."""
    nothing = jnp.zeros((len(tokens), 1, 8), jnp.float32)
    cache, _ = step.attend(nothing, nothing, nothing, cache)
    return cache, weights["chain"][tokens]


def likely_or_not(weights, tokens, lengths, hidden):
    """Drafts of the likeliest tokens for half of the seats, of the least likely ones for the others."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1, mode="clip")[:, 0]
    drafts = []
    for _ in range(DRAFTS):
        logits = weights["chain"][last % 5]
        last = jnp.where(jnp.arange(len(lengths)) % 2 == 0, logits.argmax(axis=1), logits.argmin(axis=1))
        drafts.append(last.astype(jnp.int32))
    return jnp.stack(drafts, axis=1)


def test_drafts_leave_the_distribution_as_it_is():
    # 100,000 draws at temperature 1.
    max_num_seqs, new = 64, 50
    sizes = dict(max_num_seqs=max_num_seqs, max_model_len=52, max_requests=4 * max_num_seqs, steps_per_slice=64)
    sizes |= dict(chunk_tokens=3 * max_num_seqs, num_speculative_tokens=DRAFTS)
    with mock.patch.object(program, "step_cost", return_value=1000.0):  # rows cost nothing
        engine = create_engine(
            model=in_a_chain,
            head=None,
            weights={"chain": jnp.asarray(CHAIN)},
            cache=small_cache(1 + max_num_seqs * 13),
            draft=likely_or_not,
            batch_invariant=True,
            **sizes,
        )
    outputs = engine.generate(
        [[i % 5] for i in range(2000)], [SamplingParams(max_tokens=new, seed=i) for i in range(2000)]
    )
    stats = engine.stats()
    assert stats.num_accepted > 10_000
    assert stats.num_drafted > stats.num_accepted + 10_000
    counts = np.zeros((5, 5), np.int64)
    for i, output in enumerate(outputs):
        tokens = [i % 5, *output.outputs[0].token_ids]
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    assert counts.sum() == 100_000

    def p_value(logits):
        expected = counts.sum(axis=1, keepdims=True) * np.asarray(
            jax.nn.softmax(jnp.asarray(logits), axis=1), np.float64
        )
        return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 5 * 4))

    assert p_value(CHAIN) > 1e-3
    more_of_the_likely = 0.05 * np.eye(5, dtype=np.float32)[CHAIN.argmax(axis=1)]
    assert p_value(CHAIN + more_of_the_likely) < 1e-3


def with_hidden(weights, tokens, positions, cache, step):
    """A model whose hidden states are two arrays: each token, and its position."""
    nothing = jnp.zeros((len(tokens), 1, 8), jnp.float32)
    cache, _ = step.attend(nothing, nothing, nothing, cache)
    return cache, {"token": tokens.astype(jnp.float32), "position": positions[:, None].astype(jnp.float32)}


def by_rule(weights, hidden):
    """A head that knows what follows."""
    token, position = (hidden[name].reshape(-1).astype(jnp.int32) for name in ("token", "position"))
    following = ((token * 7 + position * 3 + 1) % VOCAB)[:, None]
    return jnp.where(jnp.arange(VOCAB)[None] == following, 9.0, 0.0).astype(jnp.float32)


def by_head(weights, tokens, lengths, hidden):
    """Two drafts by the rule, from hidden states alone, the second of them perhaps wrong; without a state, none."""
    token, position = (hidden[name].reshape(-1).astype(jnp.int32) for name in ("token", "position"))
    is_there = ((token > 0) | (position > 0))[:, None]
    drafts = []
    for i in range(3):
        token = (token * 7 + (position + i) * 3 + 1) % VOCAB  # first the newest token, which is known
        drafts.append(token)
    drafts[2] += weights["error"]
    return jnp.where(is_there, jnp.stack(drafts[1:], axis=1), -1)


def test_a_head_drafts_from_hidden_states():
    # Prompts of one token, chunks, preemption, found prefixes: were a state another token's, drafts would be wrong.
    weights = {"error": jnp.int32(0)}
    options = dict(widths=(2 * SEATS,), num_speculative_tokens=2, draft=by_head, prefix_cache=True)
    engine = create_engine(model=with_hidden, head=by_rule, weights=weights, cache=small_cache(), **options)
    prompts = [[3 + i] * (1 + 5 * i % 23) for i in range(3 * SEATS)]
    for error in (0, 1):
        engine.update_weights({"error": jnp.int32(error)})
        before = engine.stats()
        with fewer_blocks(engine, TIGHT):
            outputs = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
        for prompt, output in zip(prompts, outputs, strict=True):
            text = list(prompt)
            for position in range(len(prompt) - 1, len(prompt) + 19):
                text.append((text[-1] * 7 + position * 3 + 1) % VOCAB)
            assert output.outputs[0].token_ids == text[len(prompt) :]
        after = engine.stats()
        num_drafted, num_accepted = after.num_drafted - before.num_drafted, after.num_accepted - before.num_accepted
        assert after.num_preempted > before.num_preempted
        assert num_drafted > 100
        assert 2 * num_accepted >= num_drafted if error else num_accepted == num_drafted


def test_a_seat_that_a_request_has_left_keeps_no_hidden_state_of_it():
    # One that is preempted may get tokens in another seat, and come back.
    drafting, nobody = Drafting.create(2, 1, 8).with_room(jax.ShapeDtypeStruct((1,), jnp.float32)), 8
    owners = []
    for seated, num_new in (((5, 3), (1, 1)), ((5, 3), (0, 1)), ((nobody, 5), (0, 1)), ((5, nobody), (0, 0))):
        rows = jnp.arange(2, dtype=jnp.int32)
        step = SimpleNamespace(seats=rows, request_ids=jnp.array(seated), last=rows, num_drafts=0 * rows)
        drafting = drafting.with_hidden(jnp.ones((2, 1)), step, jnp.array(num_new), is_mixed=False)
        owners.append(drafting.owners.tolist())
    assert owners == [[5, 3], [5, 3], [-1, 5], [-1, -1]]


KINDS = make_kinds(16, 80, (8, 16, 32), cost=lambda rows: 100.0 + rows)
EIGHT, ALL, DRAFTS_FOR_ALL, TWICE, _ = range(5)


@pytest.mark.parametrize(
    ("num_needing", "num_pending", "gains", "expected"),
    [
        (4, 0, [0, 0], EIGHT),  # drafts or not
        (8, 0, [0, 0], EIGHT),
        (9, 0, [0, 0], ALL),
        (16, 0, [0, 0], ALL),
        (16, 0, [0.1, 0], ALL),  # twice the rows would cost more
        (16, 0, [0.9, 0.8], TWICE),
        (12, 0, [0.22, 0], DRAFTS_FOR_ALL),  # for four of them
        (12, 4, [0.22, 0], TWICE),  # else prompts would take their rows
        (12, 0, [0.19, 0], DRAFTS_FOR_ALL),
        (12, 0, [0.1, 0], ALL),  # packed rows take longer
        (16, 0, [0.1, 0.5], ALL),  # the second drafts get no row
    ],
)
def test_drafts_take_a_step_that_pays(num_needing, num_pending, gains, expected):
    assert [(kind.width, kind.draws_all) for kind in KINDS[:-1]] == [(8, True), (16, False), (16, True), (32, True)]
    of_seats = jnp.where(jnp.arange(16)[:, None] < num_needing, jnp.float32(gains)[None], 0.0)
    assert int(quickest(KINDS[:-1], jnp.int32(num_needing), jnp.int32(num_pending), of_seats)) == expected


def test_widths_have_room_for_drafts():
    gpu = functools.partial(draft_widths, widest=1000, is_gpu=True)
    assert [gpu(1, 4), gpu(8, 4), gpu(32, 4), gpu(64, 4), gpu(384, 4)] == [[64], [64], [64, 128, 256]] + [
        [64, 128, 256]
    ] * 2
    assert draft_widths(64, 4, 200, is_gpu=True) == [64, 128]
    cpu = functools.partial(draft_widths, widest=1000, is_gpu=False)
    assert [cpu(1, 4), cpu(8, 4), cpu(8, 1), cpu(2, 8)] == [[5], [5, 16, 40], [2, 16], [9, 18]]


def test_what_drafts_cannot_be():
    for wrong, message in {
        -1: "at least 0",
        True: "an int",
        10**6: f"at most {MAX_TOKENS}; got num_speculative_tokens=1000000",
    }.items():
        with pytest.raises(ValueError, match=f"num_speculative_tokens must be {message}"):
            create_engine(num_speculative_tokens=wrong, widths=WIDTHS)
    with pytest.raises(ValueError, match=r"drafts are verified in steps of widths.*pass widths"):
        create_engine(num_speculative_tokens=2, widths=())
    with pytest.raises(ValueError, match=r"draft must be a function, .* of at least 1; got draft=3"):
        create_engine(draft=3, num_speculative_tokens=1)
    with pytest.raises(ValueError, match=r"at least 1; got draft=<function.*num_speculative_tokens=0"):
        create_engine(draft=knowing)
    with pytest.raises(ValueError, match=r"draft must return int32 \[6, 2\], .* got int32 \[6\]"):
        create_engine(draft=lambda weights, tokens, lengths, hidden: lengths, num_speculative_tokens=2, widths=(6,))


def main(count):
    """Plays so many scenarios, with one to eight drafts: `python -m tests.engine.test_drafts 500`."""
    totals = Counter()
    for seed in range(count):
        num_drafts = (1, 3, 8)[seed % 3]
        play(drafting_engine(num_drafts), seed)
    for num_drafts in (1, 3, 8):
        stats = drafting_engine(num_drafts).stats()
        totals.update({name: getattr(stats, name) for name in ("num_generated", "num_drafted", "num_accepted")})
        totals.update({name: getattr(stats, name) for name in ("num_steps", "num_preempted", "num_found")})
    print(f"{count} scenarios: {dict(totals)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
