"""Answers of an engine under 200 random JSON schemas parse, and are valid unless they are cut."""

import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import Engine, EngineOptions, KVCache, SamplingParams
from jaxpaged.grammar import compile_json_schema
from tests.grammar.samples import END, TOKENS, VOCABULARY, random_schema

jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.slow

NUM_SCHEMAS, MAX_TOKENS = 200, 120
CLOSING = [*map(ord, '"}]')]  # likely, so that most answers end


def apply(weights, tokens, positions, cache, step):
    x = jnp.ones((len(tokens), 1, 8))
    cache, out = step.attend(x, x, x, cache)
    return cache, out.reshape(len(tokens), -1)


def head(weights, hidden):
    """The same logits for each token: all equal, except for what ends an answer."""
    return jnp.broadcast_to(weights, (len(hidden), len(weights)))


def create_engine(**options):
    """An engine with blocks for two answers of full length, and seats for 16."""
    weights = np.zeros(len(VOCABULARY), np.float32)
    weights[CLOSING], weights[END] = 5.0, 4.0
    cache = KVCache.create(num_blocks=33, block_size=8, num_kv_heads=1, head_dim=8, dtype="float32")
    sizes = dict(max_num_seqs=16, max_model_len=MAX_TOKENS + 8, chunk_tokens=16, num_grammar_states=2048)
    sizes |= dict(compiler_options={"xla_backend_optimization_level": 0})
    options = EngineOptions(**sizes | options)
    return Engine(apply, jnp.asarray(weights), cache, head=head, vocabulary=VOCABULARY, options=options)


@pytest.fixture(scope="module")
def requests():
    """Schemas, and requests that are greedy or sampled, some with two completions."""
    rng, schemas, params = random.Random(0), [], []
    while len(schemas) < NUM_SCHEMAS:
        schema = random_schema(rng)
        try:
            grammar = compile_json_schema(schema, VOCABULARY, max_states=1500)
        except ValueError:  # too many states
            continue
        i = len(schemas)
        schemas.append(schema)
        temperature, n = (0.0, 0.7, 1.0, 3.0)[i % 4], 2 if i % 5 == 0 else 1
        params.append(SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=i, n=n, grammar=grammar))
    return schemas, params


@pytest.mark.parametrize(
    "options", [{"widths": ()}, {"num_speculative_tokens": 2, "widths": (16,)}], ids=["plain", "drafts"]
)
def test_answers_are_valid(requests, options):
    schemas, params = requests
    engine, ended = create_engine(**options), 0
    outputs = engine.generate([[i % 7] for i in range(NUM_SCHEMAS)], params)
    for schema, output in zip(schemas, outputs, strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                text = b"".join(TOKENS[token] for token in completion.token_ids[:-1]).decode()
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                ended += 1
    assert ended > NUM_SCHEMAS / 2
    assert engine.stats().num_preempted > 0
    assert bool(engine.stats().num_accepted) == ("num_speculative_tokens" in options)
