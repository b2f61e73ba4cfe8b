"""Engines on a GPU with their own compiler options give the tokens of a plain one: `pytest -m gpu`."""

import functools

import jax
import numpy as np
import pytest

from tests.engine.grammar_requests import MASKS, STATES, VOCABULARY, requests_with_grammars
from tests.toy_model import BLOCKS, SEATS, create_engine, over_heads, requests

pytestmark = pytest.mark.gpu

PROMPTS, PARAMS = requests(60, seed=3)
HOST_MEMORY = dict(prefix_cache=True, num_blocks=BLOCKS // 2, host_cache_bytes=2**24)


def on_two_gpus(num_blocks=BLOCKS + 1, **options):
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    model, _ = over_heads(2, num_blocks)
    return create_engine(**model, **options)


ENGINES = {
    "plain": create_engine,
    "widths": functools.partial(create_engine, widths=(2, 3)),
    "prefix cache": functools.partial(create_engine, prefix_cache=True, num_blocks=BLOCKS // 2),
    "host memory": functools.partial(create_engine, **HOST_MEMORY),
    "drafts": functools.partial(create_engine, widths=(SEATS, 2 * SEATS), num_speculative_tokens=3),
    "exact": functools.partial(create_engine, batch_invariant=True),
    "two GPUs": on_two_gpus,
    "two GPUs, host memory": functools.partial(on_two_gpus, **HOST_MEMORY),
    "two GPUs, drafts": functools.partial(on_two_gpus, widths=(SEATS, 2 * SEATS), num_speculative_tokens=3),
}


@functools.cache
def expected():
    return create_engine(compiler_options={}).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gives_the_tokens_of_a_plain_one(name):
    engine = ENGINES[name](compiler_options=None)
    for _ in range(2):
        for output, plain in zip(engine.generate(PROMPTS, PARAMS), expected(), strict=True):
            for ours, theirs in zip(output.outputs, plain.outputs, strict=True):
                assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
                if theirs.logprobs is not None:
                    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    [alone] = engine.score(PROMPTS[:1], [[1, 2, 3]])
    assert np.isfinite(alone.logprobs).all()


@pytest.mark.parametrize("name", ["plain", "widths", "prefix cache", "drafts"])
def test_an_engine_changes_logits_and_follows_grammars(name):
    prompts, params, expected = requests_with_grammars()
    sizes = dict(num_stop_ids=3, num_grammar_states=STATES, num_grammar_masks=MASKS)
    engine = ENGINES[name](vocabulary=VOCABULARY, compiler_options=None, **sizes)
    for order in (slice(None), slice(None, None, -1)):
        outputs = engine.generate(prompts[order], params[order])
        assert [[each.token_ids for each in output.outputs] for output in outputs] == expected[order]
