"""`top_logprobs`: the model's most likely tokens beside new tokens, those of prompts and those that are scored."""

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
    MAX_TOKENS,
    TIGHT,
    VOCAB,
    apply,
    create_engine,
    fewer_blocks,
    head,
    logits_after,
    random_weights,
)

MOST = 4


@functools.cache
def engine():
    return create_engine(chunk_tokens=16, widths=(2,), num_speculative_tokens=2, max_logprobs=MOST)


def check(found, text, first, num):
    """`found`: of the tokens of a text from the `first` on."""
    assert len(found) == len(text) - first
    for length, of_token in enumerate(found, first):
        padded = np.zeros(MAX_TOKENS, np.int32)
        padded[:length] = text[:length]
        logits = np.asarray(logits_after(random_weights(), padded, np.int32(length)), np.float64)
        logprobs = logits - np.logaddexp.reduce(logits)
        best = np.argsort(-logprobs)[:num]
        assert list(of_token) == best.tolist()
        np.testing.assert_allclose(list(of_token.values()), logprobs[best], atol=1e-4)


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_the_most_likely_tokens_are_the_models(left):
    # Repetitive prompts have drafts; the temperature does not change what is likely.
    prompts = [[1, 2, 3] * 5, [5], [7, 8] * 9, [*range(20)], [4] * 11]
    params = [
        SamplingParams(
            max_tokens=6 + 3 * i,
            temperature=0.7 * (i % 2),
            seed=i,
            top_logprobs=(MOST, 0, 1, 3, 2)[i],
            prompt_logprobs=i != 2,
        )
        for i in range(len(prompts))
    ]
    with fewer_blocks(engine(), left):
        outputs = engine().generate(prompts, params)
    for prompt, of_one, output in zip(prompts, params, outputs, strict=True):
        (completion,) = output.outputs
        num = of_one.top_logprobs
        if not num:
            assert completion.top_logprobs is None
            assert output.prompt_top_logprobs is None
            continue
        text = prompt + completion.token_ids
        check(completion.top_logprobs, text, len(prompt), num)
        assert completion.logprobs is None
        if of_one.prompt_logprobs:
            assert output.prompt_top_logprobs[0] is None
            check(output.prompt_top_logprobs[1:], prompt, 1, num)
        else:
            assert output.prompt_top_logprobs is None
    assert engine().stats().num_accepted > 0


def test_those_of_a_prompt_may_come_over_several_slices():
    row = CompletionState(0, np.arange(5), SamplingParams(top_logprobs=1, prompt_logprobs=True), 0, span=(1, 5))
    for positions in ([1, 2], [3], [4], [3]):  # the last one after a preemption
        top_logprobs = TopLogprobs(np.int32(positions)[:, None], -np.float32(positions)[:, None])
        row.take_scores(
            np.array(positions), top_logprobs.logprobs[:, 0], np.ones(len(positions), np.bool_), top_logprobs
        )
    assert row.score() == Score([-1, -2, -3, -4], [True] * 4, [{i: -i} for i in range(1, 5)])


def test_scores_have_them_too():
    prompts, tokens = [[3, 1, 4], [9, 2]], [[1, 5, 9, 2, 6] * 4, [7]]
    for prompt, given, score in zip(prompts, tokens, engine().score(prompts, tokens, top_logprobs=3), strict=True):
        check(score.top_logprobs, prompt + given, len(prompt), 3)
        for token, of_token, logprob, is_greedy in zip(
            given, score.top_logprobs, score.logprobs, score.is_greedy, strict=True
        ):
            assert is_greedy == (token == next(iter(of_token)))
            assert of_token.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    assert engine().score([[1]], [[2]])[0].top_logprobs is None


def test_more_than_the_engine_looks_for_are_refused():
    with pytest.raises(ValueError, match="must be at most the engine's max_logprobs=4; got top_logprobs=5"):
        engine().add_request([1], SamplingParams(top_logprobs=5))
    with pytest.raises(ValueError, match="top_logprobs=5"):
        engine().score([[1]], [[2]], top_logprobs=5)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="top_logprobs must be"):
            SamplingParams(top_logprobs=wrong)
    with pytest.raises(ValueError, match="max_logprobs must be"):
        create_engine(max_logprobs=-1)
    with pytest.raises(ValueError, match=f"max_logprobs must be at most {VOCAB}, the logits of a token; got"):
        create_engine(max_logprobs=VOCAB + 1)


def test_generate_makes_an_engine_that_reports_as_many_as_are_asked_for():
    def model(weights, tokens, positions, caches, step):
        cache, hidden = apply(weights, tokens, positions, *caches, step)
        return (cache,), hidden

    params = [SamplingParams(max_tokens=3, temperature=0, top_logprobs=num) for num in (0, 2)]
    sizes = dict(head=head, num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    prompt = [3, 1, 4]
    _, output = generate(model, random_weights(), [prompt, prompt], params, **sizes)
    (completion,) = output.outputs
    check(completion.top_logprobs, prompt + completion.token_ids, len(prompt), 2)
