"""Drafts: equal tokens with and without drafts, the choice of drafts, and when drafts pay."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from jaxpaged import SamplingParams
from jaxpaged._engine import program
from jaxpaged._engine.defaults import draft_widths
from jaxpaged._slice.drafting import KEPT, PRIOR, Drafting, repeated
from jaxpaged._slice.kinds import make_kinds, quickest
from tests.logits_model import with_changes
from tests.toy_model import (
    BLOCKS,
    ENGINES,
    MAX_TOKENS,
    SEATS,
    TIGHT,
    VOCAB,
    counting,
    create_cache,
    create_engine,
    fewer_blocks,
    finish,
    greedy,
    random_weights,
    requests,
    shared_engine,
    tokens_of,
    until_module_ends,
)

pytestmark = pytest.mark.usefixtures("idle_engines")
ANSWERS, DRAFTS = 64, 3


def draft_answers(weights, tokens, lengths, hidden):
    """Drafts from known answers, wrong in `errors` of 10 cases; -1 for a text without an answer."""
    index = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None]
    is_same = (weights["answers"][None] == tokens[:, None]) | (index >= lengths[:, None])[:, None]
    is_answer = is_same.all(axis=2)
    answers = weights["answers"][jnp.argmax(is_answer, axis=1)]
    places = lengths[:, None] + jnp.arange(DRAFTS, dtype=jnp.int32)[None]
    drafts = jnp.take_along_axis(answers, jnp.minimum(places, MAX_TOKENS - 1), axis=1)
    drafts = jnp.where((places * 7 + drafts) % 10 < weights["errors"], (drafts + 1) % VOCAB, drafts)
    return jnp.where(is_answer.any(axis=1)[:, None] & (lengths[:, None] % 8 > 0), drafts, -1)


def answer_weights(texts=(), errors=0, seed=0):
    answers = np.full((ANSWERS, MAX_TOKENS), -1, np.int32)
    for row, text in zip(answers, texts, strict=False):
        row[: len(text)] = text
    return random_weights(seed) | {"answers": jnp.asarray(answers), "errors": jnp.int32(errors)}


@until_module_ends
def create_drafting_engine():
    options = dict(widths=(2 * SEATS,), num_speculative_tokens=DRAFTS, prefix_cache=True, shares=True)
    ENGINES.append(create_engine(weights=answer_weights(), draft=draft_answers, **options))
    return ENGINES[-1]


def drafting_engine(prompts, outputs, **options):
    """An engine that drafts by `draft_answers`, with these outputs as answers."""
    engine = create_drafting_engine()
    texts = [
        [*prompt, *one.token_ids] for prompt, output in zip(prompts, outputs, strict=True) for one in output.outputs
    ]
    engine.update_weights(answer_weights(texts[: ANSWERS - 1], **options))
    return engine


def without_drafts(prompts, params, seed=0):
    engine = shared_engine(prefix_cache=True)
    engine.update_weights(random_weights(seed))
    return engine.generate(prompts, params)


def assert_same(completion, expected, *, is_whole=True):
    count = len(completion.token_ids)
    assert completion.token_ids == expected.token_ids[:count]
    np.testing.assert_allclose(completion.logprobs, expected.logprobs[:count], atol=1e-5)
    if is_whole:
        assert (count, completion.finish_reason) == (len(expected.token_ids), expected.finish_reason)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_equal_an_engine_without_drafts(seed):
    """Random requests, in a tight or a large pool, some of them aborted, with good or bad drafts. With penalties and
    other changes of the logits if the seed is odd."""
    rng = np.random.default_rng(seed)
    prompts, params = requests(int(rng.integers(3, 25)), seed)
    if rng.random() < 0.5:  # with a common prefix
        prompts = [[*prompts[0][:9], *prompt[: 30 - len(prompts[0][:9])]][:30] for prompt in prompts]
        params = [dataclasses.replace(one, max_tokens=min(one.max_tokens, MAX_TOKENS - 30)) for one in params]
    params = [dataclasses.replace(one, logprobs=True) for one in params]
    if seed % 2:
        params = with_changes(params, seed, VOCAB)
    expected = without_drafts(prompts, params, seed % 3)
    engine = drafting_engine(prompts, expected, errors=int(rng.choice([0, 3, 10])), seed=seed % 3)
    with fewer_blocks(engine, BLOCKS if rng.random() < 0.4 else TIGHT):
        ids = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
        outputs = {}
        while engine.has_unfinished_requests:
            if rng.random() < 0.1:
                engine.abort(int(rng.choice(ids)))
            outputs |= {output.request_id: output for output in engine.step()}
    for request_id, of_one in zip(ids, expected, strict=True):
        for completion, one in zip(outputs[request_id].outputs, of_one.outputs, strict=True):
            assert_same(completion, one, is_whole=completion.finish_reason != "abort")


def test_right_drafts_are_accepted_and_wrong_ones_cost_no_token():
    prompts, params = [[i, i + 1, i + 2] for i in range(SEATS)], SamplingParams(max_tokens=40, seed=1, logprobs=True)
    expected = without_drafts(prompts, params)

    def serve(errors):
        engine = drafting_engine(prompts, expected, errors=errors)
        with counting(engine) as counts:
            outputs = engine.generate(prompts, params)
        for output, of_one in zip(outputs, expected, strict=True):
            assert_same(output.outputs[0], of_one.outputs[0])
        assert counts.num_generated == 40 * SEATS
        return counts

    wrong, right = serve(errors=10), serve(errors=0)
    assert wrong.num_accepted == 0 < wrong.num_drafted < 100
    assert 100 <= right.num_accepted <= right.num_drafted
    assert 40 <= wrong.num_steps <= 45
    assert right.num_steps <= 25  # statistics of earlier requests do not count


def test_a_batch_invariant_engine_gives_equal_bits_with_drafts():
    prompts, params = requests(12, 5)
    prompts = [(prompt[:3] * 10)[:20] for prompt in prompts]  # repeated text
    params = [dataclasses.replace(one, logprobs=True, n=1, max_tokens=24) for one in params]
    params = with_changes(params, 5, VOCAB)
    engine = create_engine(num_speculative_tokens=2, batch_invariant=True, prefix_cache=True)
    alone = [engine.generate([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    assert engine.stats().num_accepted > 0
    with counting(engine) as counts:
        for left in (BLOCKS, TIGHT):
            with fewer_blocks(engine, left):
                together = engine.generate(prompts[::-1], params[::-1])[::-1]
            assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert counts.num_preempted > 0
    # Twice the number of seats: the last ones find their text in the others.
    with counting(engine) as counts:
        first, *others = tokens_of(engine.generate([[9, 8, 7]], dataclasses.replace(greedy(30), n=2 * SEATS)))
    assert others == [first] * len(others)
    assert counts.num_accepted >= 15 * SEATS
    scores = engine.score(prompts, tokens_of(alone))
    assert [score.logprobs for score in scores] == [output.outputs[0].logprobs for output in alone]


def naive(tokens, text, num_drafts):
    for count in range(8, 1, -1):
        ends = [i for i in range(count, len(text)) if text[i - count : i] == tokens[-count:]]
        if ends:
            return (text[ends[-1] :] * num_drafts)[:num_drafts]
    return [-1] * num_drafts


@pytest.mark.parametrize("other", [0, 1], ids=["its own text", "another text"])
def test_the_continuation_of_an_earlier_occurrence_is_drafted(other):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 33, (2, 200)).astype(np.int32)
    tokens = rng.integers(0, 3, (2, 200, 32), np.int32)
    drafts, num_equal = jax.jit(repeated, static_argnums=4)(tokens[0], lengths[0], tokens[other], lengths[other], 5)
    own, texts = ([x[:n].tolist() for x, n in zip(tokens[i], lengths[i], strict=True)] for i in (0, other))
    assert drafts.tolist() == [naive(*both, 5) for both in zip(own, texts, strict=True)]
    assert ((num_equal >= 2) == (drafts[:, 0] >= 0)).all()
    assert num_equal.max() > 4


def test_completions_search_each_others_texts_in_turn():
    drafting = Drafting.create(num_seats=4, num_drafts=2, max_requests=6)
    drafting = drafting.reset(jnp.int32([0, 2, 3, 5, 6]), jnp.int32([7, 7, 7, 8, 7]))
    seated = jnp.int32([2, 5, 0, 6])
    seen = [drafting.companions(seated, jnp.full(4, n, jnp.int32)).tolist() for n in range(6)]
    assert {of_each[0] for of_each in seen} == {0, 3}
    assert {of_each[2] for of_each in seen} == {2, 3}
    assert {(of_each[1], of_each[3]) for of_each in seen} == {(6, 6)}


def test_a_requests_hit_rate_comes_from_its_own_drafts():
    drafting = Drafting.create(num_seats=3, num_drafts=2, max_requests=5)
    step = SimpleNamespace(request_ids=jnp.int32([4, 1, 5]), num_drafts=jnp.int32([2, 2, 0]))
    drafting = drafting.update(step, jnp.int32([3, 1, 0]))
    assert (int(drafting.num_drafted), int(drafting.num_accepted)) == (4, 2)
    drafting = drafting.update(step, jnp.int32([2, 1, 0]))  # the second of the two was wrong
    silent = SimpleNamespace(request_ids=jnp.int32([1, 2, 5]), num_drafts=jnp.int32([0, 0, 0]))
    drafting = drafting.update(silent, jnp.int32([1, 1, 0]), jnp.bool_([False, True, False]))
    np.testing.assert_allclose(drafting.hits, [0, 0, 0, 0, 1 + 2 * KEPT], rtol=1e-6)
    np.testing.assert_allclose(drafting.tries, [0, (1 + KEPT) * KEPT, 1, 0, 2 + 2 * KEPT], rtol=1e-6)
    known = (1 + 2 * KEPT + PRIOR) / (3 + 2 * KEPT)
    for chances in ([known, PRIOR, PRIOR], [PRIOR, PRIOR, PRIOR]):
        found = drafting.chances(SimpleNamespace(seated=jnp.int32([4, 0, 5])))
        np.testing.assert_allclose(found, np.stack([chances, np.square(chances)], axis=1), rtol=1e-6)
        drafting = drafting.reset(jnp.int32([4, 5]), jnp.int32([1, 1]))  # a new request


@pytest.mark.parametrize(
    ("row_cost", "expected"),
    [  # a step of the two required rows costs 2 + row_cost, another row costs 1
        (0, [[-1, -1, -1], [-1, -1, -1]]),
        (0.08, [[-1, -1, -1], [0, -1, -1]]),
        (1, [[-1, -1, -1], [0, 0, 0]]),
        (40, [[0, -1, -1], [0, 0, 0]]),
    ],
)
def test_drafts_must_be_worth_their_rows(row_cost, expected):
    seats = jnp.arange(2, dtype=jnp.int32)
    scheduler = SimpleNamespace(seated=seats, num_known=seats + 5)
    drafting = dataclasses.replace(Drafting.create(2, 3, 2), hits=jnp.float32([0, 9]), tries=jnp.float32([9, 9]))
    drafting = drafting.with_drafts(scheduler, SimpleNamespace(lengths=seats + 4), draft_answers, row_cost)
    assert drafting.guesses.tolist() == expected  # chances of 7.5% and 97.5% for each draft of a row


def test_drafting_resumes_when_drafts_are_right_again():
    prompts = [[5, 6]]
    expected = without_drafts(prompts, greedy(40))
    engine = drafting_engine(prompts, expected, errors=10)
    with counting(engine) as wrong:
        engine.add_request(prompts[0], greedy(40))
        before = engine.stats().num_generated
        while engine.stats().num_generated - before < 16:
            engine.step()
    assert wrong.num_accepted == 0
    assert wrong.num_drafted < 3 * 16  # drafting stopped
    with counting(engine) as right:
        drafting_engine(prompts, expected)
        assert tokens_of(finish(engine).values()) == tokens_of(expected)
    assert right.num_accepted > 0


CHAIN = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32)  # logits after each of five tokens


def apply_chain(weights, tokens, positions, cache, step):
    """A model whose logits depend only on the last token."""
    nothing = jnp.zeros((len(tokens), 1, 8), jnp.float32)
    cache, _ = step.attend(nothing, nothing, nothing, cache)
    return cache, weights["chain"][tokens]


def draft_likely_or_unlikely(weights, tokens, lengths, hidden):
    """Drafts the likeliest tokens for half of the seats, the least likely ones for the others."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1, mode="clip")[:, 0]
    drafts = []
    for _ in range(DRAFTS):
        logits = weights["chain"][last % 5]
        last = jnp.where(jnp.arange(len(lengths)) % 2 == 0, logits.argmax(axis=1), logits.argmin(axis=1))
        drafts.append(last.astype(jnp.int32))
    return jnp.stack(drafts, axis=1)


def test_drafts_do_not_change_the_distribution():
    # 100,000 draws at temperature 1.
    max_num_seqs, new = 64, 50
    sizes = dict(max_num_seqs=max_num_seqs, max_model_len=52, max_requests=4 * max_num_seqs, steps_per_slice=64)
    sizes |= dict(chunk_tokens=3 * max_num_seqs, num_speculative_tokens=DRAFTS)
    with mock.patch.object(program, "step_cost", return_value=1000.0):  # rows cost nothing
        engine = create_engine(
            model=apply_chain,
            head=None,
            weights={"chain": jnp.asarray(CHAIN)},
            cache=create_cache(1 + max_num_seqs * 13, num_kv_heads=1),
            draft=draft_likely_or_unlikely,
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
    """A head that knows the next token."""
    token, position = (hidden[name].reshape(-1).astype(jnp.int32) for name in ("token", "position"))
    following = ((token * 7 + position * 3 + 1) % VOCAB)[:, None]
    return jnp.where(jnp.arange(VOCAB)[None] == following, 9.0, 0.0).astype(jnp.float32)


def by_head(weights, tokens, lengths, hidden):
    """Two drafts by the rule, from hidden states only. The second may be wrong. Without a state there are none."""
    token, position = (hidden[name].reshape(-1).astype(jnp.int32) for name in ("token", "position"))
    is_there = ((token > 0) | (position > 0))[:, None]
    drafts = []
    for i in range(3):
        token = (token * 7 + (position + i) * 3 + 1) % VOCAB  # first the newest token, which is known
        drafts.append(token)
    drafts[2] += weights["error"]
    return jnp.where(is_there, jnp.stack(drafts[1:], axis=1), -1)


def test_a_head_drafts_from_hidden_states():
    # Prompts of one token, chunks, preemption, cached prefixes: with another token's state the drafts would be wrong.
    model = dict(model=with_hidden, head=by_rule, weights={"error": jnp.int32(0)}, draft=by_head)
    options = dict(widths=(2 * SEATS,), num_speculative_tokens=2, prefix_cache=True)
    engine = create_engine(**model, cache=create_cache(num_kv_heads=1), **options)
    prompts = [[3 + i] * (1 + 5 * i % 23) for i in range(3 * SEATS)]
    for error in (0, 1):
        engine.update_weights({"error": jnp.int32(error)})
        with counting(engine) as counts, fewer_blocks(engine, TIGHT):
            outputs = tokens_of(engine.generate(prompts, greedy(20)))
        for prompt, tokens in zip(prompts, outputs, strict=True):
            text = list(prompt)
            for position in range(len(prompt) - 1, len(prompt) + 19):
                text.append((text[-1] * 7 + position * 3 + 1) % VOCAB)
            assert tokens == text[len(prompt) :]
        assert counts.num_preempted > 0
        assert counts.num_drafted > 100
        least = counts.num_drafted / 2 if error else counts.num_drafted
        assert least <= counts.num_accepted <= counts.num_drafted


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
        (12, 4, [0.22, 0], TWICE),  # otherwise prompts would use their rows
        (12, 0, [0.19, 0], DRAFTS_FOR_ALL),
        (12, 0, [0.1, 0], ALL),  # packed rows cost more
        (16, 0, [0.1, 0.5], ALL),  # second drafts get no row
    ],
)
def test_drafts_use_the_step_that_pays(num_needing, num_pending, gains, expected):
    assert [(kind.width, kind.draws_all) for kind in KINDS[:-1]] == [(8, True), (16, False), (16, True), (32, True)]
    seat_gains = jnp.where(jnp.arange(16)[:, None] < num_needing, jnp.float32(gains)[None], 0.0)
    assert int(quickest(KINDS[:-1], jnp.int32(num_needing), jnp.int32(num_pending), seat_gains)) == expected


@pytest.mark.parametrize(
    ("num_seats", "num_drafts", "is_gpu", "expected"),
    [
        (1, 4, True, [64]),
        (8, 4, True, [64]),
        (32, 4, True, [64, 128, 256]),
        (384, 4, True, [64, 128, 256]),
        (1, 4, False, [5]),
        (8, 4, False, [5, 16, 40]),
        (8, 1, False, [2, 16]),
        (2, 8, False, [9, 18]),
    ],
)
def test_widths_have_room_for_drafts(num_seats, num_drafts, is_gpu, expected):
    assert draft_widths(num_seats, num_drafts, 1000, is_gpu=is_gpu) == expected


def test_no_width_for_drafts_is_the_widest():
    assert draft_widths(64, 4, 200, is_gpu=True) == [64, 128]
