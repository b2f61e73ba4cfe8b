"""examples/rollout.py: greedy completions and their logprobs are the plain model's."""

import numpy as np
import pytest

import rollout
from jaxpaged import Completion, RequestOutput
from lib.sampling import Sampling
from tests.examples.tiny_checkpoint import greedy, next_logits

pytestmark = pytest.mark.slow

PROMPTS = ["The quick brown fox jum", "a", "12345678"]


def roll_out(tiny, temperature, num_completions):
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    rounds = rollout.roll_out(
        tiny.model,
        tiny.config,
        prompts,
        num_completions=num_completions,
        num_rounds=2,
        max_new_tokens=12,
        block_size=8,
        sampling=Sampling(temperature),
    )
    return prompts, list(rounds)


def test_the_first_round_is_that_of_the_model_and_the_next_one_differs(tiny):
    prompts, (first, second) = roll_out(tiny, 0.0, 1)
    expected = [greedy(tiny.tensors, prompt, 12, None) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in first] == expected
    before, after = ([output.outputs[0].logprobs for output in outputs] for outputs in (first, second))
    assert not np.allclose(before[0][0], after[0][0], atol=1e-6)  # the weights have moved
    prompt, tokens = prompts[0], expected[0]
    for i, token in enumerate(tokens):
        logits = next_logits(tiny.tensors, prompt + tokens[:i]).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(logprobs[token] - before[0][i]) < 1e-3


def test_what_a_person_sees(tiny, monkeypatch, capsys):
    def roll_out(model, config, prompts, *, num_completions, num_rounds, sampling, seed, **options):
        assert (len(prompts), num_completions, num_rounds, sampling, seed) == (1, 2, 2, Sampling(0.5), 3)
        for _ in range(num_rounds):
            texts = [tiny.tokenizer.encode(text) for text in ("cdee", "ffff")]
            yield [RequestOutput(0, [Completion(ids, [-0.5] * 4, "length") for ids in texts], True)]

    monkeypatch.setattr(rollout, "roll_out", roll_out)
    options = ["-n=2", "--rounds=2", "--seed=3", "--temperature=0.5", "--prompt=ab"]
    rollout.main(["--model", str(tiny.path), *options])
    printed = capsys.readouterr()
    of_round = ["--> +1.00, logprob -2.0: cdee", "--> -1.00, logprob -2.0: ffff", ""]
    assert printed.out.splitlines() == ["[round 0] ab", *of_round, "[round 1] ab", *of_round]
    assert "round 1: 8 tokens" in printed.err
