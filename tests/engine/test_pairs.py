"""Every pair of the engine's options together, against a plain model in float64: tokens, logprobs and scores."""

import contextlib
import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams, layer_groups
from jaxpaged._engine.requests import completion_seed
from tests.engine.layered_model import ADAPTERS, SEATS, create_engine, logits_of, random_weights
from tests.logits_model import FUNCTION_SIZES, forbid_repeats, processed, repeats_forbidden, with_changes
from tests.toy_model import (
    BLOCK_SIZE,
    MAX_TOKENS,
    VOCAB,
    assert_idle,
    drawn,
    finish,
    greedy,
    kept,
    log_softmax,
    one_kind_of_steps,
    requests,
)

pytestmark = pytest.mark.slow

MOST_LIKELY = 3
DRAFTS = {"none": 0, "from text": 3, "from hidden states": 2}
OPTIONS = {
    "windows": ((None, None), (None, 10)),
    "cached": ("no", "yes", "read once", "host memory"),
    "drafts": tuple(DRAFTS),
    "exact": (False, True),
    "processed": (False, True),
    "top_logprobs": (False, True),
    "adapters": (False, True),
    "tight": (False, True),
    "chunk_tokens": (5, 16),
    "steps_per_slice": (1, 8),
    "narrow": (False, True),
    "prompt_aux": (False, True),
    "changed": ("no", "by parameters", "by a function too"),
}


def is_possible(config):
    if config["windows"] != (None, None) and config["cached"] in ("read once", "host memory"):
        return False
    return not (config["narrow"] and (config["exact"] or config["drafts"] != "none"))


def pairs_of(config):
    return set(itertools.combinations(config.items(), 2))


def covering_configs():
    """Configs that cover each possible pair of values of two options, chosen greedily from random ones."""
    rng, names = random.Random(0), list(OPTIONS)
    every = (dict(zip(names, values, strict=True)) for values in itertools.product(*OPTIONS.values()))
    every = [config for config in every if is_possible(config)]
    missing = set().union(*map(pairs_of, every))
    while missing:
        best = max(rng.sample(every, 300), key=lambda config: len(pairs_of(config) & missing))
        if found := pairs_of(best) & missing:
            missing -= found
            yield best


CONFIGS = list(covering_configs())


def from_hidden(weights, tokens, lengths, hidden):
    newest = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    best = jnp.argmax((hidden + weights["embedding"][newest]) @ weights["head"], axis=1)
    return jnp.stack([best, newest], axis=1).astype(jnp.int32)


def create_engine_for(config):
    num_drafts, chunk_tokens = DRAFTS[config["drafts"]], config["chunk_tokens"]
    sizes = dict(block_size=BLOCK_SIZE, chunk_tokens=chunk_tokens)
    num_blocks = SEATS * layer_groups(config["windows"]).num_blocks(MAX_TOKENS, **sizes)
    return create_engine(
        config["windows"],
        num_blocks=1 + num_blocks // (1 + config["tight"]),
        draft=from_hidden if config["drafts"] == "from hidden states" else None,
        shares=config["cached"] == "read once",
        vocab_size=VOCAB,
        max_requests=12,
        widths=(7,) if num_drafts and not config["exact"] else (2,) if config["narrow"] else (),
        batch_invariant=config["exact"],
        chunk_tokens=chunk_tokens,
        steps_per_slice=config["steps_per_slice"],
        prefix_cache=config["cached"] != "no",
        host_cache_bytes=2**20 if config["cached"] == "host memory" else None,
        processed_logprobs=config["processed"],
        prompt_aux=config["prompt_aux"],
        max_logprobs=MOST_LIKELY * config["top_logprobs"],
        num_adapters=ADAPTERS * config["adapters"],
        num_speculative_tokens=num_drafts,
        process_logits=forbid_repeats if config["changed"] == "by a function too" else None,
        **FUNCTION_SIZES,
    )


def requests_for(config, seed):
    """Prompts with common prefixes or repetitions, and parameters of every kind."""
    prompts, params = requests(14, seed)
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        prompts[i] = ([*range(5 + i), *prompt[:8]], (prompt[:3] * 6)[:17], prompt[:19])[i % 3]
        params[i] = dataclasses.replace(
            one,
            max_tokens=min(one.max_tokens, 20),
            min_p=(0.0, 0.05)[i // 2 % 2],
            logprobs=i % 4 != 1,
            prompt_logprobs=i % 5 == 0,
            top_logprobs=i % (1 + MOST_LIKELY) if config["top_logprobs"] else 0,
            adapter=(None, 0, 1)[i % 3] if config["adapters"] else None,
            head_start=i % 2,
            logits_ints=[i] if i % 4 else [],
            logits_floats=[i / 3 - 2] if i % 5 else [],
        )
    return prompts, params if config["changed"] == "no" else with_changes(params, seed, VOCAB)


class Checker:
    """Compares outputs with the plain model under one version of the weights."""

    def __init__(self, config, seed):
        self.windows, self.is_processed = config["windows"], config["processed"]
        self.has_prompt_aux = config["prompt_aux"]
        self.process = repeats_forbidden if config["changed"] == "by a function too" else processed
        self.weights = random_weights(len(self.windows), seed)

    def logits(self, prompt, tokens, adapter):
        """The logits from which each token was drawn."""
        return logits_of(self.windows, self.weights, prompt + tokens, adapter)[len(prompt) - 1 : -1]

    def check_output(self, prompt, params, output):
        assert output.finished
        assert len(output.outputs) == params.n
        for index, completion in enumerate(output.outputs):
            seed = completion_seed(params.seed, index)
            self.check_completion(prompt, dataclasses.replace(params, seed=seed), completion)
        if params.prompt_logprobs:
            logprobs = log_softmax(self.logits(prompt[:1], prompt[1:], params.adapter))
            assert output.prompt_logprobs[0] is None
            check_logprobs(output.prompt_logprobs[1:], logprobs, prompt[1:])
            if params.top_logprobs:
                check_likely(output.prompt_top_logprobs[1:], logprobs, params.top_logprobs)

    def check_completion(self, prompt, params, completion):
        tokens, text = completion.token_ids, prompt + completion.token_ids
        logits = self.logits(prompt, tokens, params.adapter)
        changed = np.stack([self.process(row, prompt, tokens[:i], params) for i, row in enumerate(logits)])
        scores = changed / params.temperature if params.temperature else changed
        drawn_at = range(len(prompt), len(text))
        if params.temperature:
            assert tokens == [drawn(row, params, position) for row, position in zip(scores, drawn_at, strict=True)]
        else:
            assert tokens == scores.argmax(axis=1).tolist()
        check_aux(completion.aux, text, drawn_at)
        assert (completion.prompt_aux is not None) == self.has_prompt_aux
        if self.has_prompt_aux:
            check_aux(completion.prompt_aux, text, range(1, len(prompt)))
        is_stopped = tokens[-1] in params.stop_token_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(tokens) == params.max_tokens
        assert not set(tokens[:-1]) & set(params.stop_token_ids)
        if params.logprobs:
            if self.is_processed:
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                cuts = (params.top_k, params.top_p, params.min_p) if params.temperature else (0, 1, 0)
                is_kept = [kept(row, *cuts) for row in weights]
                check_logprobs(completion.logprobs, log_softmax(np.where(is_kept, scores, -np.inf)), tokens)
            else:
                check_logprobs(completion.logprobs, log_softmax(logits), tokens)
        if params.top_logprobs:
            check_likely(completion.top_logprobs, log_softmax(logits), params.top_logprobs)

    def check_score(self, prompt, tokens, adapter, score):
        logits = self.logits(prompt, tokens, adapter)
        check_logprobs(score.logprobs, log_softmax(logits), tokens)
        assert score.is_greedy == (logits.argmax(axis=1) == tokens).tolist()


def check_aux(aux, text, drawn_at):
    """Each row belongs to the token before."""
    assert aux["where"].tolist() == [[text[position - 1], position - 1] for position in drawn_at]
    assert aux["is_even"].tolist() == [text[position - 1] % 2 == 0 for position in drawn_at]


def check_logprobs(found, logprobs, tokens):
    expected = logprobs[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(np.array(found, float), expected, atol=1e-3)


def check_likely(found, logprobs, num):
    for likely, row in zip(found, logprobs, strict=True):
        best = np.argsort(-row)[:num]
        assert list(likely) == best.tolist()
        np.testing.assert_allclose(list(likely.values()), row[best], atol=1e-3)


@pytest.fixture(params=CONFIGS, ids=map(str, range(len(CONFIGS))))
def config(request):
    """One of CONFIGS. Its engine has one kind of steps unless an option needs more. No compiled program stays."""
    has_more = request.param["narrow"] or request.param["cached"] == "read once"
    with contextlib.nullcontext() if has_more else one_kind_of_steps():
        yield request.param
    jax.clear_caches()


def test_options_of_every_pair_give_the_tokens_of_a_plain_model(config):
    engine = create_engine_for(config)
    for version in range(2):
        checker, rng = Checker(config, seed=version), np.random.default_rng(version)
        if version:
            engine.sleep()
            engine.update_weights(checker.weights)
            engine.wake_up()
        prompts, params = requests_for(config, seed=7 + version)
        for _ in range(2 if config["cached"] != "no" else 1):  # prefixes are cached in the second round
            added = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
            doomed = engine.add_request(prompts[0], SamplingParams(max_tokens=12))
            outputs = {output.request_id: output for output in engine.step()}
            engine.abort(doomed)
            adapter = 1 if config["adapters"] else None
            texts = [(prompts[i], [0, *rng.integers(0, VOCAB, 5).tolist()]) for i in (0, 1, 4)]
            for text, score in zip(texts, engine.score(*zip(*texts, strict=True), adapter=adapter), strict=True):
                checker.check_score(*text, adapter, score)
            outputs |= finish(engine)
            assert outputs.keys() - {doomed} == set(added)
            for request_id, prompt, of_one in zip(added, prompts, params, strict=True):
                checker.check_output(prompt, of_one, outputs[request_id])
    rollout = engine.rollout(prompts[:1], greedy(5))
    text = prompts[0] + rollout.tokens[0].tolist()
    check_aux(jax.tree.map(lambda x: x[0], rollout.aux), text, range(len(prompts[0]), len(text)))
    if config["prompt_aux"]:
        check_aux(jax.tree.map(lambda x: x[0], rollout.prompt_aux), text, range(1, len(prompts[0])))
    assert_idle(engine)


def test_every_pair_of_options_occurs():
    """All configs together have every pair, and without the last one a pair is missing."""
    possible = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    every = set().union(*(pairs_of(config) for config in possible if is_possible(config)))
    assert set().union(*map(pairs_of, CONFIGS)) == every
    assert set().union(*map(pairs_of, CONFIGS[1:])) < every
