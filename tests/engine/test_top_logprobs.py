"""`top_logprobs`: the model's most likely tokens, for new tokens, prompts and scored tokens."""

import functools

import numpy as np
import pytest

from jaxpaged import SamplingParams, Score, generate
from jaxpaged._engine.requests import CompletionState
from jaxpaged._slice.sampling import TopLogprobs
from tests.toy_model import (
    BLOCKS,
    HEAD_DIM,
    HEADS,
    TIGHT,
    apply,
    create_once,
    fewer_blocks,
    greedy,
    head,
    log_softmax,
    next_logits,
    random_weights,
)

pytestmark = pytest.mark.usefixtures("idle_engines", "one_kind")
MOST = 4
engine = functools.partial(create_once, widths=(2,), num_speculative_tokens=2, max_logprobs=MOST)


def check(found, text, first, num):
    """Checks `found` for the tokens of a text from `first` on."""
    assert len(found) == len(text) - first
    for length, likely in enumerate(found, first):
        logprobs = log_softmax(next_logits(random_weights(), text[:length]))
        best = np.argsort(-logprobs)[:num]
        assert list(likely) == best.tolist()
        np.testing.assert_allclose(list(likely.values()), logprobs[best], atol=1e-4)


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_the_most_likely_tokens_are_the_models(left):
    # Repetitive prompts have drafts. Temperature does not change the most likely tokens.
    prompts = [[1, 2, 3] * 5, [5], [7, 8] * 9, [*range(20)], [4] * 11]
    params = [
        SamplingParams(
            max_tokens=6 + 3 * i, temperature=0.7 * (i % 2), seed=i, top_logprobs=num, prompt_logprobs=i != 2
        )
        for i, num in enumerate((MOST, 0, 1, 3, 2))
    ]
    with fewer_blocks(engine(), left):
        outputs = engine().generate(prompts, params)
    for prompt, of_one, output in zip(prompts, params, outputs, strict=True):
        (completion,), num = output.outputs, of_one.top_logprobs
        assert (completion.top_logprobs is not None) == (num > 0)
        assert (output.prompt_top_logprobs is not None) == (num > 0 and of_one.prompt_logprobs)
        if completion.top_logprobs:
            check(completion.top_logprobs, prompt + completion.token_ids, len(prompt), num)
            assert completion.logprobs is None
        if output.prompt_top_logprobs:
            assert output.prompt_top_logprobs[0] is None
            check(output.prompt_top_logprobs[1:], prompt, 1, num)
    assert engine().stats().num_accepted > 0


def test_a_prompts_top_logprobs_may_come_from_several_slices():
    row = CompletionState(0, np.arange(5), SamplingParams(top_logprobs=1, prompt_logprobs=True), 0, span=(1, 5))
    for positions in ([1, 2], [3], [4], [3]):  # the last one after a preemption
        top_logprobs = TopLogprobs(np.int32(positions)[:, None], -np.float32(positions)[:, None])
        is_best = np.ones(len(positions), np.bool_)
        row.take_scores(np.array(positions), top_logprobs.logprobs[:, 0], is_best, top_logprobs)
    assert row.score() == Score([-1, -2, -3, -4], [True] * 4, [{i: -i} for i in range(1, 5)])


def test_scores_have_top_logprobs_too():
    prompts, tokens = [[3, 1, 4], [9, 2]], [[1, 5, 9, 2, 6] * 4, [7]]
    for prompt, given, score in zip(prompts, tokens, engine().score(prompts, tokens, top_logprobs=3), strict=True):
        check(score.top_logprobs, prompt + given, len(prompt), 3)
        for token, of_token, logprob, is_greedy in zip(
            given, score.top_logprobs, score.logprobs, score.is_greedy, strict=True
        ):
            assert is_greedy == (token == next(iter(of_token)))
            assert of_token.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    assert engine().score([[1]], [[2]])[0].top_logprobs is None


def test_generate_makes_an_engine_that_reports_the_requested_number():
    def model(weights, tokens, positions, caches, step):
        cache, hidden = apply(weights, tokens, positions, *caches, step)
        return (cache,), hidden

    params = [greedy(3), SamplingParams(max_tokens=3, temperature=0, top_logprobs=2)]
    sizes = dict(head=head, num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    prompt = [3, 1, 4]
    _, output = generate(model, random_weights(), [prompt, prompt], params, **sizes)
    (completion,) = output.outputs
    check(completion.top_logprobs, prompt + completion.token_ids, len(prompt), 2)
