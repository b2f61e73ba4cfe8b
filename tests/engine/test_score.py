"""Engine.score and prompt_logprobs: the model's logprobs of given tokens; with batch_invariant, the sampler's bits."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged import SamplingParams
from tests.toy_model import (
    BLOCKS,
    FREQUENCIES,
    MAX_TOKENS,
    SEATS,
    TIGHT,
    VOCAB,
    apply,
    create_engine,
    fewer_blocks,
    finish,
    head,
    logits_after,
    project,
    random_weights,
    requests,
    shared_engine,
)


def expected_score(prompt, tokens, seed=0):
    """One by one: the logprobs of the tokens, and whether each is the best."""
    text, logprobs, is_greedy = [*prompt, *tokens], [], []
    padded = np.zeros(MAX_TOKENS, np.int32)
    padded[: len(text)] = text
    for length in range(len(prompt), len(text)):
        logits = np.asarray(logits_after(random_weights(seed), padded, np.int32(length)), np.float64)
        logprobs.append(logits[text[length]] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        is_greedy.append(bool(logits.argmax() == text[length]))
    return logprobs, is_greedy


def texts_to_score(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 24, (count, 2)).tolist()
    return [tuple(rng.integers(0, VOCAB, n).tolist() for n in of_one) for of_one in lengths]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_scores_are_the_models_beside_requests_that_generate(left, prefix_cache):
    engine = shared_engine(16, prefix_cache=prefix_cache)
    engine.update_weights(random_weights())  # whatever was served before
    (alone,) = engine.generate([[7, 8, 9]], SamplingParams(max_tokens=40, temperature=0))
    tokens = alone.outputs[0].token_ids
    texts = [*texts_to_score(24), ([7, 8, 9], tokens), ([7, 8, 9], [*tokens[:20], 5])]
    expected = [expected_score(*text) for text in texts]
    before = engine.stats()
    with fewer_blocks(engine, left):
        request = engine.add_request([7, 8, 9], SamplingParams(max_tokens=40, temperature=0))
        scores = engine.score(*zip(*texts, strict=True))
        assert finish(engine)[request].outputs == alone.outputs
    for score, (logprobs, is_greedy) in zip(scores, expected, strict=True):
        np.testing.assert_allclose(score.logprobs, logprobs, atol=1e-4)
        assert score.is_greedy == is_greedy
    assert all(scores[-2].is_greedy)
    after = engine.stats()
    assert after.num_generated - before.num_generated == 40
    num_scored = sum(len(tokens) for _, tokens in texts)
    assert after.num_scored - before.num_scored >= num_scored  # again after a preemption
    if left == BLOCKS:
        assert after.num_scored - before.num_scored == num_scored


def test_a_batch_invariant_engine_scores_to_the_bits_that_it_sampled():
    prompts, params = requests(20)
    params = [dataclasses.replace(of_one, logprobs=True, n=1) for of_one in params]
    exact = shared_engine(16, prefix_cache=True, batch_invariant=True)

    def sample(engine):
        sampled = [output.outputs[0] for output in engine.generate(prompts, params)]
        return sampled, [completion.token_ids for completion in sampled]

    def differing(scores, sampled):
        return sum(score.logprobs != completion.logprobs for score, completion in zip(scores, sampled, strict=True))

    sampled, texts = sample(exact)
    alone = [exact.score([prompt], [tokens])[0] for prompt, tokens in zip(prompts, texts, strict=True)]
    assert differing(alone, sampled) == 0
    with fewer_blocks(exact, TIGHT):
        for prompt in prompts[:5]:
            exact.add_request(prompt[::-1], SamplingParams(max_tokens=10))
        assert differing(exact.score(prompts, texts), sampled) == 0
    finish(exact)
    sampled, texts = sample(shared_engine(16))
    assert differing(shared_engine(16).score(prompts, texts), sampled)  # a difference would be seen


def test_a_prompt_is_found_but_for_what_its_scores_need():
    engine = shared_engine(16, prefix_cache=True)
    engine.update_weights(random_weights())
    prompt, answers = [*range(21)], [[30, 31], [32], [33, 34, 35]]

    def counts(prompts):
        before = engine.stats()
        scores = engine.score(prompts, answers)
        after = engine.stats()
        return scores, after.num_computed - before.num_computed, after.num_found - before.num_found

    scores, num_computed, num_found = counts([prompt] * 3)
    # Its last token is computed for each: it is the row that scores the first answer token. A block has four tokens.
    assert (num_computed, num_found) == (22 + 1 + 3, 2 * 20)
    for score, answer in zip(scores, answers, strict=True):
        np.testing.assert_allclose(score.logprobs, expected_score(prompt, answer)[0], atol=1e-4)
    assert counts([prompt[:20]] * 3)[1:] == (3 * 4 + 1 + 2, 3 * 16)  # 20 tokens are listed, and the last is needed


def test_given_tokens_are_listed_and_not_those_that_the_model_would_take():
    engine = shared_engine(16, prefix_cache=True)
    engine.update_weights(random_weights())
    text, params = [*range(13, 25)], SamplingParams(max_tokens=1, temperature=0)
    for _ in range(2):  # the last of them fills a block in the second round
        engine.score([text[:-1]], [text[-1:]])
        text += [3, 5, 7, 11]
    before = engine.stats().num_found
    (output,) = engine.generate([[*text, 1]], params)
    assert engine.stats().num_found - before == 12  # what follows was never computed
    assert expected_score([*text, 1], output.outputs[0].token_ids)[1] == [True]


def test_prompt_logprobs_come_with_the_first_completion():
    engine = shared_engine(16, prefix_cache=True)
    engine.update_weights(random_weights())
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=3, prompt_logprobs=True, logprobs=True)
    prompt = [*range(30, 9, -1)]
    for _ in range(2):  # the second time the cache knows the prompt
        found = engine.stats().num_found
        output, short = engine.generate([prompt, [7]], params)
        assert engine.stats().num_found - found == 2 * 20
        assert output.prompt_logprobs[0] is None
        np.testing.assert_allclose(output.prompt_logprobs[1:], expected_score(prompt[:1], prompt[1:])[0], atol=1e-4)
        assert short.prompt_logprobs == [None]
    (plain,) = engine.generate([prompt], dataclasses.replace(params, prompt_logprobs=False))
    assert plain.prompt_logprobs is None
    assert [c.token_ids for c in plain.outputs] == [c.token_ids for c in output.outputs]


def test_logits_exist_for_one_group_of_rows_at_a_time():
    program = shared_engine(16)._runner.program.run.as_text()
    assert f"f32[{SEATS},{VOCAB}]" in program
    assert f"f32[{SEATS + 16},{VOCAB}]" not in program


def test_groups_of_rows_have_more_than_the_sequences_if_these_are_few():
    def apply_by_parts(weights, tokens, positions, cache, step):
        x, q, k, v = project(weights, tokens)
        cache, out = step.attend(q, k, v, cache, rotary_frequencies=FREQUENCIES)
        return cache, (x, out)

    def head(weights, hidden):
        x, out = hidden
        return (x + out.reshape(x.shape)) @ weights["head"]

    engine = create_engine(
        model=apply_by_parts, head=head, max_num_seqs=2, chunk_tokens=30, widths=(), batch_invariant=True
    )
    prompts = [[7, 8, 9] * 5, [3, 1], [4] * 11]
    params = [SamplingParams(max_tokens=20, temperature=t, seed=i, logprobs=True) for i, t in enumerate((0, 1, 0.7))]
    sampled = [output.outputs[0] for output in engine.generate(prompts, params)]
    scores = engine.score(prompts, [one.token_ids for one in sampled])
    assert [score.logprobs for score in scores] == [one.logprobs for one in sampled]
    np.testing.assert_allclose(scores[1].logprobs, expected_score([3, 1], sampled[1].token_ids)[0], atol=1e-4)


def test_what_cannot_be_scored_is_refused():
    engine = shared_engine(16)
    wrong = {
        "pass tokens for each prompt; got len\\(prompts\\)=1, len\\(tokens\\)=2": ([[1]], [[2], [3]]),
        "tokens to score must be a list of at least one": ([[1]], [[]]),
        "a prompt must be a list of at least one": ([[]], [[1]]),
        "more than the engine's max_model_len=48": ([[1] * 40], [[2] * 9]),
    }
    for message, texts in wrong.items():
        with pytest.raises(ValueError, match=message):
            engine.score(*texts)
    engine.score([[1] * 40], [[2] * 8])
    with pytest.raises(ValueError, match="prompt_logprobs must be True or False; got prompt_logprobs=5"):
        SamplingParams(prompt_logprobs=5)


def test_the_head_sees_only_rows_that_are_drawn_or_scored_and_the_model_is_traced_once_for_a_number_of_tokens():
    traced, rows = [], []

    def apply_and_count(weights, tokens, positions, cache, step):
        traced.append(len(tokens))
        return jax.jit(apply)(weights, tokens, positions, cache, step)

    def head_and_count(weights, hidden):
        rows.append(len(hidden))
        return head(weights, hidden)

    create_engine(model=apply_and_count, head=head_and_count, widths=(2,), chunk_tokens=30)
    assert sorted(traced) == [2, SEATS, SEATS + 30]
    assert max(rows) < SEATS + 30
