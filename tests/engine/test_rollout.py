"""Engine.rollout, versions of the weights, sleep: results for a learner, compared with those of `generate`."""

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine import rollouts
from tests.toy_model import (
    BLOCKS,
    MAX_TOKENS,
    TIGHT,
    counting,
    expected_tokens,
    fewer_blocks,
    finish,
    greedy,
    random_weights,
    requests,
    shared_engine,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("idle_engines")


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_a_rollout_holds_the_outputs_of_generate_as_arrays(left):
    engine = shared_engine(prefix_cache=True)
    prompts, params = requests(20, seed=3)
    version = engine._books.version
    other = engine.add_request([5, 6], SamplingParams(max_tokens=30))
    with fewer_blocks(engine, left):
        rollout = engine.rollout(prompts, params)
        completions = [completion for output in engine.generate(prompts, params) for completion in output.outputs]
    assert finish(engine).keys() == {other}
    most = max(of_one.max_tokens for of_one in params)
    for array in jax.tree.leaves(rollout):
        assert isinstance(array, jax.Array)
        assert array.shape == (len(completions), most)
    tokens, logprobs, mask, versions = map(
        np.asarray, (rollout.tokens, rollout.logprobs, rollout.mask, rollout.weight_versions)
    )
    for i, completion in enumerate(completions):
        num = len(completion.token_ids)
        assert tokens[i, :num].tolist() == completion.token_ids
        assert mask[i].tolist() == [True] * num + [False] * (most - num)
        if completion.logprobs:
            np.testing.assert_allclose(logprobs[i, :num], completion.logprobs, atol=1e-5)
    assert (logprobs[mask] < 0).all()
    assert (versions[mask] == version).all()
    assert not any(array[~mask].any() for array in (tokens, logprobs, versions))


def test_a_rollout_without_memory_does_not_affect_others(monkeypatch):
    engine, params = shared_engine(), greedy(20)
    other = engine.add_request([1, 2], params)
    with monkeypatch.context() as patch:
        results = [mock.DEFAULT, MemoryError("no room for the arrays")]
        patch.setattr(rollouts, "_put", mock.Mock(wraps=rollouts._put, side_effect=results))
        with pytest.raises(MemoryError, match="no room for the arrays"):
            engine.rollout([[3]], params)
    outputs = finish(engine)
    assert outputs.keys() == {other}
    assert tokens_of(outputs.values()) == [expected_tokens([1, 2], params)]
    assert engine.rollout([[3]], params).tokens.tolist() == [expected_tokens([3], params)]


def test_each_token_has_the_version_of_its_weights():
    engine, prompt = shared_engine(), [1, 2, 3]
    version = engine._books.version
    request = engine.add_request(prompt, greedy(MAX_TOKENS - 3))
    engine.step()
    engine.step()
    engine.update_weights(random_weights(1))
    (completion,) = finish(engine)[request].outputs
    num_old = completion.weight_versions.count(version)
    num_new = len(completion.token_ids) - num_old
    assert min(num_old, num_new) > 0
    assert completion.weight_versions == [version] * num_old + [version + 1] * num_new
    old = expected_tokens(prompt, greedy(num_old + 4))
    assert old[:num_old] == completion.token_ids[:num_old]
    assert old != completion.token_ids[: num_old + 4]  # new weights made the last tokens
    assert engine.rollout([prompt], greedy(4)).weight_versions.tolist() == [[version + 1] * 4]


def test_an_engine_that_sleeps_holds_no_cache_and_wakes_up_unchanged(monkeypatch):
    engine, prompts, params = shared_engine(prefix_cache=True), [[*range(20)]] * 2, greedy(6)
    before, _ = tokens_of(engine.generate(prompts, params))
    engine.add_request([1], params)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.sleep()
    finish(engine)
    with contextlib.closing(engine.stream([[3] * 20], greedy(28))) as stream:
        next(stream)  # closes the stream before the device knows
    pools = [engine._runner.state.caches.k, engine._runner.state.caches.v]
    engine.sleep()
    engine.sleep()
    assert not engine._books.under_way  # their reports need device memory, too
    assert all(pool.is_deleted() for pool in [*pools, engine._runner.state.caches.k, engine._runner.state.caches.v])
    engine.update_weights(random_weights(1))
    engine.add_request(prompts[0], params)
    with pytest.raises(RuntimeError, match="asleep and has no caches; call wake_up"):
        engine.step()
    engine.update_weights(random_weights())
    with counting(engine) as counts:
        engine.wake_up()
        engine.wake_up()
        assert tokens_of(finish(engine).values()) == [before]
        engine.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(engine._books, "forget", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.wake_up()
        engine.wake_up()  # with the same weights
        assert tokens_of(engine.generate(prompts[:1], params)) == [before]
    assert counts.num_found == 0  # no cached block is left


def test_sleep_reports_a_slice_that_failed_once(monkeypatch):
    engine, params = shared_engine(), greedy(6)
    engine.generate([[1, 2]], params)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", mock.Mock(side_effect=RuntimeError("no room for the call")))
        engine._runner._send()  # as in `generate`: sends the next request before it reads the last tokens
    with pytest.raises(RuntimeError, match="no room for the call"):
        engine.sleep()
    engine.sleep()
    engine.wake_up()
    assert tokens_of(engine.generate([[1, 2]], params)) == [expected_tokens([1, 2], params)]
