"""Engine.rollout, versions of the weights, sleep: what a learner takes, against what `generate` returns."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine import rollouts
from tests.toy_model import (
    BLOCKS,
    MAX_TOKENS,
    TIGHT,
    apply,
    create_engine,
    fewer_blocks,
    finish,
    logits_after,
    random_weights,
    requests,
    shared_engine,
)


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_a_rollout_is_what_generate_returns_as_arrays(left):
    engine = shared_engine(16, prefix_cache=True)
    prompts, params = requests(20, seed=3)
    version = engine._books.version
    other = engine.add_request([5, 6], SamplingParams(max_tokens=30))
    with fewer_blocks(engine, left):
        rollout = engine.rollout(prompts, params)
        expected = [completion for output in engine.generate(prompts, params) for completion in output.outputs]
    assert finish(engine).keys() == {other}
    most = max(of_one.max_tokens for of_one in params)
    assert len(expected) > 20
    for array in jax.tree.leaves(rollout):
        assert isinstance(array, jax.Array)
        assert array.shape == (len(expected), most)
    lengths = rollout.mask.sum(axis=1).tolist()
    for i, completion in enumerate(expected):
        assert rollout.tokens[i, : lengths[i]].tolist() == completion.token_ids
        assert rollout.mask[i].tolist() == [True] * lengths[i] + [False] * (most - lengths[i])
        if completion.logprobs:
            np.testing.assert_allclose(rollout.logprobs[i, : lengths[i]], completion.logprobs, atol=1e-5)
    assert (np.asarray(rollout.logprobs)[np.asarray(rollout.mask)] < 0).all()
    for array in (rollout.tokens, rollout.logprobs, rollout.weight_versions):
        assert not np.asarray(array)[~np.asarray(rollout.mask)].any()
    assert (np.asarray(rollout.weight_versions)[np.asarray(rollout.mask)] == version).all()
    with pytest.raises(ValueError, match="at least one prompt"):
        engine.rollout([], SamplingParams())


def test_what_the_model_returns_beside_hidden_states_comes_with_the_tokens():
    """Here of each token itself, its position and whether it is even; completions are preempted meanwhile."""

    def apply_with_aux(weights, tokens, positions, cache, step):
        cache, hidden = apply(weights, tokens, positions, cache, step)
        return cache, hidden, {"where": jnp.stack([tokens, positions], axis=1), "is_even": tokens % 2 == 0}

    engine = create_engine(model=apply_with_aux, widths=(2,))
    prompts, params = requests(20, seed=3)
    with fewer_blocks(engine, TIGHT):
        rollout, outputs = engine.rollout(prompts, params), engine.generate(prompts, params)
    assert engine.stats().num_preempted > 0
    completions = [
        (prompt, completion) for prompt, output in zip(prompts, outputs, strict=True) for completion in output.outputs
    ]
    for row, (prompt, completion) in enumerate(completions):
        num, text = len(completion.token_ids), [*prompt, *completion.token_ids]
        drawn_from = [[text[i], i] for i in range(len(prompt) - 1, len(text) - 1)]
        for aux in (completion.aux, jax.tree.map(lambda x, row=row, num=num: x[row, :num], rollout.aux)):
            assert aux["where"].tolist() == drawn_from
            assert aux["is_even"].tolist() == [token % 2 == 0 for token, _ in drawn_from]
        assert not rollout.aux["where"][row, num:].any()


def test_a_rollout_that_finds_no_memory_takes_nothing_from_others(monkeypatch):
    engine, params = shared_engine(16), SamplingParams(max_tokens=20, temperature=0)
    expected = engine.generate([[1, 2], [3]], params)
    other = engine.add_request([1, 2], params)
    put = rollouts._put

    def failing(rollout, *args, **options):
        if np.asarray(rollout.mask).any():
            raise MemoryError("no room for the arrays")
        return put(rollout, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rollouts, "_put", failing)
        with pytest.raises(MemoryError, match="no room for the arrays"):
            engine.rollout([[3]], params)
    outputs = finish(engine)
    assert outputs.keys() == {other}
    assert outputs[other].outputs == expected[0].outputs
    assert engine.rollout([[3]], params).tokens.tolist() == [expected[1].outputs[0].token_ids]
    assert int(engine._runner.state.allocator.num_free) == BLOCKS


def test_each_token_says_which_weights_made_it():
    engine = shared_engine(16)
    before = engine._books.version
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=MAX_TOKENS - 3, temperature=0))
    for _ in range(2):
        engine.step()
    engine.update_weights(random_weights(1))
    (completion,) = finish(engine)[request].outputs
    assert len(completion.weight_versions) == len(completion.token_ids)
    changes = np.diff(completion.weight_versions)
    assert sorted(set(completion.weight_versions)) == [before, before + 1]
    assert (changes >= 0).all()
    first = int(np.flatnonzero(changes)[0]) + 1
    engine.update_weights(random_weights())
    params = SamplingParams(max_tokens=first, temperature=0)
    (old,) = engine.generate([[1, 2, 3]], params)
    assert old.outputs[0].token_ids == completion.token_ids[:first]
    assert old.outputs[0].weight_versions == [before + 2] * first
    (longer,) = engine.generate([[1, 2, 3]], dataclasses.replace(params, max_tokens=first + 4))
    assert longer.outputs[0].token_ids != completion.token_ids[: first + 4]  # no older weights made these
    rollout = engine.rollout([[1, 2, 3]], params)
    assert rollout.weight_versions.tolist() == [[before + 2] * first]


def test_an_engine_that_sleeps_holds_no_cache_and_wakes_up_the_same(monkeypatch):
    engine = shared_engine(16, prefix_cache=True)
    engine.update_weights(random_weights())
    prompts, params = [[*range(20)]] * 2, SamplingParams(max_tokens=6, temperature=0)
    before = engine.generate(prompts, params)
    request = engine.add_request([1], params)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.sleep()
    finish(engine)
    with contextlib.closing(engine.stream([[3] * 20], dataclasses.replace(params, max_tokens=28))) as stream:
        next(stream)  # and is left: the device does not know yet
    pools = [engine._runner.state.caches.k, engine._runner.state.caches.v]
    engine.sleep()
    engine.sleep()
    assert not engine._books.under_way  # their reports are memory of the device too
    assert all(pool.is_deleted() for pool in [*pools, engine._runner.state.caches.k, engine._runner.state.caches.v])
    engine.update_weights(random_weights(1))
    queued = engine.add_request(prompts[0], params)
    with pytest.raises(RuntimeError, match="asleep and has no caches; call wake_up"):
        engine.step()
    engine.update_weights(random_weights())
    found = engine.stats().num_found
    engine.wake_up()
    engine.wake_up()
    assert finish(engine)[queued].outputs == before[0].outputs
    assert engine.stats().num_found == found  # what was cached is gone
    engine.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(engine._books, "forget", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.wake_up()
    engine.wake_up()  # with the same weights
    assert engine.generate(prompts[:1], params)[0].outputs == before[0].outputs
    assert engine.stats().num_found == found
    assert request != queued


def test_sleep_tells_of_a_slice_that_failed_once(monkeypatch):
    engine, params = shared_engine(16), SamplingParams(max_tokens=6, temperature=0)
    before = engine.generate([[1, 2]], params)[0].outputs
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", mock.Mock(side_effect=RuntimeError("no room for the call")))
        engine._runner._send()  # as `generate` does for who comes next, before it reads its last tokens
    with pytest.raises(RuntimeError, match="no room for the call"):
        engine.sleep()
    engine.sleep()
    engine.wake_up()
    assert engine.generate([[1, 2]], params)[0].outputs == before


def test_processed_logprobs_are_those_of_the_distribution_that_is_drawn_from():
    engine = create_engine(batch_invariant=True, processed_logprobs=True)
    prompt, params = [3, 1, 4], SamplingParams(max_tokens=6, temperature=0.5, top_k=4, seed=2, n=3)
    rollout = engine.rollout([prompt], params)
    scores = engine.score([prompt] * 3, rollout.tokens.tolist())
    for tokens, logprobs, score in zip(rollout.tokens.tolist(), rollout.logprobs, scores, strict=True):
        padded = np.array([*prompt, *tokens] + [0] * (MAX_TOKENS - 9), np.int32)
        for i, token in enumerate(tokens):
            logits = np.asarray(logits_after(random_weights(), padded, np.int32(3 + i)), np.float64)
            drawn = np.where(logits >= np.sort(logits)[-4], logits / 0.5, -np.inf)
            assert logprobs[i] == pytest.approx(drawn[token] - np.logaddexp.reduce(drawn), abs=1e-4)
            assert score.logprobs[i] == pytest.approx(logits[token] - np.logaddexp.reduce(logits), abs=1e-4)
