"""Engines whose requests change logits, by parameters and by `process_logits`: tokens, logprobs and errors."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams, generate
from tests.logits_model import (
    FUNCTION_SIZES,
    forbid_repeats,
    processed,
    random_changes,
    repeats_forbidden,
    with_changes,
)
from tests.toy_model import (
    BLOCK_SIZE,
    BLOCKS,
    ENGINES,
    HEAD_DIM,
    HEADS,
    SEATS,
    TIGHT,
    VOCAB,
    apply,
    continuation,
    counting,
    create_engine,
    fewer_blocks,
    greedy,
    head,
    log_softmax,
    next_logits,
    operations_on,
    random_weights,
    requests,
    shared_engine,
    tokens_of,
    until_module_ends,
)

pytestmark = pytest.mark.usefixtures("idle_engines")


@pytest.fixture(scope="module")
def load():
    """Requests, two of three with changed logits, and the expected tokens and logprobs of each completion."""
    prompts, params = requests(24, seed=1)
    params = [dataclasses.replace(one, logprobs=True) for one in with_changes(params, 0, VOCAB)]
    expected = [
        [continuation(random_weights(), prompt, one, i, processed) for i in range(one.n)]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    return prompts, params, expected


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix cache"])
@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_changed_tokens_do_not_depend_on_the_load(load, left, prefix_cache):
    """With chunked prompts, n completions and preemption. The logprobs are the model's."""
    prompts, params, expected = load
    engine = shared_engine(prefix_cache=prefix_cache)
    with counting(engine) as counts, fewer_blocks(engine, left):
        for order in (slice(None), slice(None, None, -1)):
            outputs = engine.generate(prompts[order], params[order])
            for output, of_one in zip(outputs, expected[order], strict=True):
                for completion, (tokens, logprobs) in zip(output.outputs, of_one, strict=True):
                    assert completion.token_ids == tokens
                    np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
    assert (counts.num_preempted > 0) == (left == TIGHT)


def test_the_parameters_matter(load):
    """The expected tokens of most requests with changes differ from those without."""
    prompts, params, expected = load
    changed = [i for i in range(len(prompts)) if i % 3]
    unchanged = [continuation(random_weights(), prompts[i], params[i])[0] for i in changed]
    assert np.mean([tokens != expected[i][0][0] for i, tokens in zip(changed, unchanged, strict=True)]) > 0.6


def test_each_parameter_has_its_documented_effect():
    engine, prompt = shared_engine(), [1, 2, 3]
    usual = engine.generate([prompt], greedy(20))[0].outputs[0].token_ids
    first, second = usual[:2]

    def tokens(**changes):
        (output,) = engine.generate([prompt], dataclasses.replace(greedy(20), **changes))
        return output.outputs[0].token_ids

    assert set(tokens(allowed_token_ids=(5, 9))) <= {5, 9}
    assert tokens(logit_bias={7: 100.0}) == [7] * 20
    assert first not in tokens(bad_words=[[first]])
    assert tokens(bad_words=[[first, second]])[0] == first
    assert tokens(bad_words=[[first, second]])[1] != second
    assert tokens(bad_words=[[prompt[-1], first]])[0] == first  # a word that begins in the prompt
    assert tokens(stop_token_ids=(first,)) == [first]
    longer = tokens(stop_token_ids=(first,), min_tokens=5)
    assert first not in longer[:5]
    assert len(longer) > 5
    assert tokens(logit_bias={7: 100.0}, presence_penalty=2.0) == [7] * 20
    assert tokens(logit_bias={7: 8.0}, frequency_penalty=2.0).count(7) < 10 < tokens(logit_bias={7: 8.0}).count(7)
    assert tokens(logit_bias={7: 8.0}, repetition_penalty=1e6).count(7) < 10


def test_a_given_token_is_scored_by_the_model_while_others_change_logits():
    engine = shared_engine(prefix_cache=True)
    prompt, tokens = [4, 5, 6], [7, 7, 8, 9]
    changes = random_changes(np.random.default_rng(0), VOCAB, 30, all_used=True)
    for seed in range(SEATS - 1):
        engine.add_request([seed], SamplingParams(max_tokens=30, seed=seed, **changes))
    params = SamplingParams(max_tokens=30, seed=0, prompt_logprobs=True, **changes)
    (output,) = engine.generate([[*prompt, *tokens]], params)
    (score,) = engine.score([prompt], [tokens])
    engine.abort()
    while engine.has_unfinished_requests:
        engine.step()
    text = [*prompt, *tokens]
    expected = [log_softmax(next_logits(random_weights(), text[:i]))[text[i]] for i in range(1, len(text))]
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=1e-4)
    np.testing.assert_allclose(score.logprobs, expected[-len(tokens) :], atol=1e-4)


def function_of_everything(logits, context):
    """`forbid_repeats`, and a bonus by adapter."""
    logits = forbid_repeats(logits, context)
    adapters = context.adapters[context.seqs]
    return logits.at[jnp.arange(len(logits)), adapters + 10].add(jnp.where(adapters >= 0, 6.0, 0.0))


def model_of_everything(logits, prompt, new, params):
    x = repeats_forbidden(logits, prompt, new, params)
    if params.adapter is not None:
        x[params.adapter + 10] += 6
    return x


@until_module_ends
def engine_with_function():
    options = dict(num_speculative_tokens=2, batch_invariant=True, prefix_cache=True, num_adapters=2)
    ENGINES.append(create_engine(process_logits=function_of_everything, **options, **FUNCTION_SIZES))
    return ENGINES[-1]


def test_a_function_gives_equal_bits_alone_and_among_others():
    """With drafts, preemption, cached prefixes, and numbers and an adapter for each request."""
    prompts, params = requests(14, 5)
    params = [
        dataclasses.replace(
            one,
            logprobs=True,
            n=1,
            max_tokens=min(one.max_tokens, 20),
            adapter=(None, 0, 1)[i % 3],
            logits_ints=[i],
            logits_floats=[i / 2 - 3],
        )
        for i, one in enumerate(params)
    ]
    params = with_changes(params, 5, VOCAB)
    engine = engine_with_function()
    with counting(engine) as counts:
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert counts.num_accepted > 0
    for prompt, one, output in zip(prompts, params, alone, strict=True):
        expected, logprobs = continuation(random_weights(), prompt, one, process=model_of_everything)
        assert output.outputs[0].token_ids == expected
        np.testing.assert_allclose(output.outputs[0].logprobs, logprobs, atol=1e-4)
        text = [prompt[-1], *expected]
        assert not any(a == b for a, b in itertools.pairwise(text))
    with counting(engine) as counts:
        for left in (BLOCKS, TIGHT):
            with fewer_blocks(engine, left):
                together = engine.generate(prompts[::-1], params[::-1])[::-1]
            assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert counts.num_preempted > 0
    scores = engine.score(prompts, tokens_of(alone))  # the function does not see them
    assert [score.logprobs for score in scores] == [output.outputs[0].logprobs for output in alone]
    scores = engine.score([[token] for token in range(VOCAB)], [[10]] * VOCAB, adapter=0)
    rows = [next_logits(random_weights(), [token]) for token in range(VOCAB)]
    assert [score.is_greedy for score in scores] == [[row.argmax() == 10] for row in rows]
    others = [model_of_everything(row, [token], [], SamplingParams(adapter=0)) for token, row in enumerate(rows)]
    assert sum(row.argmax() == 10 for row in others) > sum(row.argmax() == 10 for row in rows)


def test_generate_makes_an_engine_with_room_for_the_parameters():
    params = SamplingParams(
        max_tokens=6, temperature=0, allowed_token_ids=[3, 4, 5] * 110, logits_ints=[4], logits_floats=[1.5]
    )

    def model(weights, tokens, positions, caches, step):
        cache, x = apply(weights, tokens, positions, caches[0], step)
        return (cache,), x

    sizes = dict(head=head, num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", block_size=BLOCK_SIZE)
    (output,) = generate(model, random_weights(), [[1, 2]], params, process_logits=forbid_repeats, **sizes)
    expected, _ = continuation(random_weights(), [1, 2], params, process=repeats_forbidden)
    assert output.outputs[0].token_ids == expected
    assert set(expected) <= {3, 4, 5}


def test_the_parameters_change_logits_in_place():
    """The rows of given tokens need the model's logits after a function has run: only there is a copy."""

    def num_copies(engine, num_rows):
        return operations_on(engine._runner.program.run.as_text(), f"f32[{num_rows},{VOCAB}]").count("copy")

    assert num_copies(shared_engine(), SEATS) == 0
    assert num_copies(engine_with_function(), SEATS + 16) == 1  # 16: its chunk_tokens


WRONG = {
    r"process_logits must return the new logits, float32 \[6, 48\]; got float32 \[48\]": lambda logits, _: logits[0],
    r"float32 \[6, 48\]; got bfloat16 \[6, 48\]": lambda logits, _: logits.astype(jnp.bfloat16),
    "process_logits must be a function of logits and context; got 5": 5,
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_function_is_refused(message):
    with pytest.raises(ValueError, match=message):
        create_engine(process_logits=WRONG[message], batch_invariant=True)
