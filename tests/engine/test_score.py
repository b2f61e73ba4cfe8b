"""Engine.score and prompt_logprobs: the model's logprobs of given tokens; with batch_invariant, the sampler's bits."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged import SamplingParams
from tests.toy_model import (
    BLOCKS,
    FREQUENCIES,
    SEATS,
    TIGHT,
    VOCAB,
    apply,
    counting,
    create_engine,
    fewer_blocks,
    finish,
    greedy,
    head,
    log_softmax,
    next_logits,
    not_compiled,
    project,
    random_weights,
    requests,
    shared_engine,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("idle_engines")


def expected_score(prompt, tokens):
    """One by one, the logprob of each token, and whether it is the best token."""
    text = [*prompt, *tokens]
    rows = [next_logits(random_weights(), text[:length]) for length in range(len(prompt), len(text))]
    logprobs = [log_softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]
    return logprobs, [row.argmax() == token for row, token in zip(rows, tokens, strict=True)]


def texts_to_score(count):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 24, (count, 2)).tolist()
    return [tuple(rng.integers(0, VOCAB, n).tolist() for n in of_one) for of_one in lengths]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_scores_equal_the_models_while_requests_generate(left, prefix_cache):
    engine, params = shared_engine(prefix_cache=prefix_cache), greedy(40)
    (tokens,) = tokens_of(engine.generate([[7, 8, 9]], params))
    texts = [*texts_to_score(24), ([7, 8, 9], tokens), ([7, 8, 9], [*tokens[:20], 5])]
    with counting(engine) as counts, fewer_blocks(engine, left):
        engine.add_request([7, 8, 9], params)
        scores = engine.score(*zip(*texts, strict=True))
        assert tokens_of(finish(engine).values()) == [tokens]
    for score, text in zip(scores, texts, strict=True):
        logprobs, is_greedy = expected_score(*text)
        np.testing.assert_allclose(score.logprobs, logprobs, atol=1e-4)
        assert score.is_greedy == is_greedy
    assert all(scores[-2].is_greedy)
    assert counts.num_generated == 40
    num_scored = sum(len(tokens) for _, tokens in texts)
    assert counts.num_scored == num_scored or (left == TIGHT and counts.num_scored > num_scored)  # preempted


def test_a_batch_invariant_engine_scores_with_the_bits_of_its_samples():
    prompts, params = requests(20)
    params = [dataclasses.replace(of_one, logprobs=True, n=1) for of_one in params]
    exact = shared_engine(prefix_cache=True, batch_invariant=True)

    def sample(engine):
        outputs = engine.generate(prompts, params)
        return tokens_of(outputs), [output.outputs[0].logprobs for output in outputs]

    texts, logprobs = sample(exact)
    alone = [exact.score([prompt], [tokens])[0] for prompt, tokens in zip(prompts, texts, strict=True)]
    assert [score.logprobs for score in alone] == logprobs
    with fewer_blocks(exact, TIGHT):
        for prompt in prompts[:5]:
            exact.add_request(prompt[::-1], SamplingParams(max_tokens=10))
        assert [score.logprobs for score in exact.score(prompts, texts)] == logprobs
    finish(exact)
    texts, logprobs = sample(shared_engine())
    scores = shared_engine().score(prompts, texts)
    assert [score.logprobs for score in scores] != logprobs  # a difference would be noticed


def test_a_cached_prompt_is_computed_only_where_scores_need_it():
    engine = shared_engine(prefix_cache=True)
    prompt, answers = [*range(21)], [[30, 31], [32], [33, 34, 35]]

    def score(prompts):
        with counting(engine) as counts:
            scores = engine.score(prompts, answers)
        return scores, (counts.num_computed, counts.num_found)

    scores, counts = score([prompt] * 3)
    # The prompt's last token is computed each time: its row scores the first answer token. A block has four tokens.
    assert counts == (22 + 1 + 3, 2 * 20)
    for one, answer in zip(scores, answers, strict=True):
        np.testing.assert_allclose(one.logprobs, expected_score(prompt, answer)[0], atol=1e-4)
    _, counts = score([prompt[:20]] * 3)
    assert counts == (3 * 4 + 1 + 2, 3 * 16)  # 20 tokens are cached, and the last is needed


def test_given_tokens_are_cached_and_not_the_models_own():
    engine, text = shared_engine(prefix_cache=True), [*range(13, 25)]
    for _ in range(2):  # the last answer fills a block in the second round
        engine.score([text[:-1]], [text[-1:]])
        text += [3, 5, 7, 11]
    with counting(engine) as counts:
        (tokens,) = tokens_of(engine.generate([[*text, 1]], greedy(1)))
    assert counts.num_found == 12  # later tokens were never computed
    assert expected_score([*text, 1], tokens)[1] == [True]


def test_prompt_logprobs_come_with_the_first_completion():
    engine, prompt = shared_engine(prefix_cache=True), [*range(30, 9, -1)]
    params = SamplingParams(max_tokens=5, seed=3, n=3, prompt_logprobs=True, logprobs=True)
    for _ in range(2):  # the second time the cache knows the prompt
        with counting(engine) as counts:
            output, short = engine.generate([prompt, [7]], params)
        assert counts.num_found == 2 * 20
        assert output.prompt_logprobs[0] is None
        np.testing.assert_allclose(output.prompt_logprobs[1:], expected_score(prompt[:1], prompt[1:])[0], atol=1e-4)
        assert short.prompt_logprobs == [None]
    (plain,) = engine.generate([prompt], dataclasses.replace(params, prompt_logprobs=False))
    assert plain.prompt_logprobs is None
    assert tokens_of([plain]) == tokens_of([output])


def test_logits_exist_for_one_group_of_rows_at_a_time():
    program = shared_engine()._runner.program.run.as_text()
    assert f"f32[{SEATS},{VOCAB}]" in program
    assert f"f32[{SEATS + 16},{VOCAB}]" not in program


def test_groups_of_rows_exceed_the_sequences_if_these_are_few():
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
    sampled = engine.generate(prompts, params)
    scores = engine.score(prompts, tokens_of(sampled))
    assert [score.logprobs for score in scores] == [output.outputs[0].logprobs for output in sampled]
    np.testing.assert_allclose(scores[1].logprobs, expected_score([3, 1], tokens_of(sampled)[1])[0], atol=1e-4)


def test_the_head_sees_only_drawn_and_scored_rows_and_the_model_is_traced_once_per_size():
    traced, rows = [], []

    def apply_and_count(weights, tokens, positions, cache, step):
        traced.append(len(tokens))
        return jax.jit(apply)(weights, tokens, positions, cache, step)

    def head_and_count(weights, hidden):
        rows.append(len(hidden))
        return head(weights, hidden)

    with not_compiled():
        create_engine(model=apply_and_count, head=head_and_count, widths=(2,), chunk_tokens=30)
    assert sorted(traced) == [2, SEATS, SEATS + 30]
    assert max(rows) < SEATS + 30
