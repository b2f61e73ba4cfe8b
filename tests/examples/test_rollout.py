"""examples/rollout.py: the reward rises, a seed gives the same run again, and a prompt is computed once."""

import jax
import numpy as np
import pytest

import rollout
from jaxpaged import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_kind")]


@pytest.fixture(scope="module")
def run():
    return list(rollout.train(12, seed=0))


def test_the_reward_rises(run):
    rewards = [reward for reward, _ in run]
    assert rewards[0] < 0.2
    assert rewards[-1] > rewards[0] + 0.25  # above 0.9 after 30 rounds
    for i, (_, completions) in enumerate(run):
        assert completions.mask.all()
        assert (completions.weight_versions == i).all()


def test_a_seed_gives_the_same_run_again(run):
    again = list(rollout.train(3, seed=0))
    for (reward, completions), (expected, others) in zip(again, run[:3], strict=True):
        assert reward == expected
        assert jax.tree.all(jax.tree.map(np.array_equal, completions, others))


def test_sampler_and_learner_agree_and_a_prompt_is_computed_once():
    weights = rollout.first_weights(1)
    engine = rollout.create_engine(weights)
    prompts = [[letter] * (rollout.PROMPT - 1) + [15] for letter in (3, 4)]
    completions = engine.rollout(prompts, SamplingParams(max_tokens=rollout.NEW, n=4, seed=5))
    texts = np.concatenate([np.repeat(prompts, 4, axis=0), completions.tokens], axis=1)
    learned = rollout.logprobs_of(weights, jax.numpy.asarray(texts, np.int32))[:, rollout.PROMPT - 1 :]
    np.testing.assert_allclose(completions.logprobs, learned, atol=1e-5)
    assert engine.stats().num_found == 2 * 3 * (rollout.PROMPT - 1)


def test_drafts_change_no_token():
    weights = rollout.first_weights(1)
    prompts = [[letter] * (rollout.PROMPT - 1) + [15] for letter in range(8)]
    params = SamplingParams(max_tokens=rollout.NEW, n=8, seed=5, temperature=0.3)
    engine, without = (rollout.create_engine(weights, num_drafts) for num_drafts in (2, 0))
    np.testing.assert_array_equal(engine.rollout(prompts, params).tokens, without.rollout(prompts, params).tokens)
    assert engine.stats().num_accepted > 0


def test_printed_output(run, monkeypatch, capsys):
    def train(num_rounds, seed, num_drafts):
        assert (num_rounds, seed, num_drafts) == (11, 2, 3)
        return run[:11]

    monkeypatch.setattr(rollout, "train", train)
    rollout.main(["--rounds=11", "--seed=2", "--num-speculative-tokens=3"])
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"round {i}: mean reward {run[i][0]:.3f}" for i in (0, 10)]
    assert printed.err.endswith(" s\n")
