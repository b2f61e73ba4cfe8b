"""Every pair of the engine's options together, against a plain model in float64: tokens, logprobs and scores."""

import contextlib
import dataclasses
import functools
import itertools
import random
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import Engine, EngineOptions, KVCache, SamplingParams, layer_groups, rotary_frequencies
from jaxpaged._engine import program
from jaxpaged._engine.requests import completion_seed
from jaxpaged._slice import kinds
from tests.toy_model import VOCAB, drawn, head, kept, one_kind_of_steps

pytestmark = pytest.mark.slow

FEATURES, HEADS, HEAD_DIM, BLOCK_SIZE, SEATS, MAX_LENGTH, MOST_LIKELY, ADAPTERS = 24, 2, 8, 4, 5, 48, 3, 2
FREQUENCIES = rotary_frequencies(HEAD_DIM)
OPTIONS = {
    "windows": ((None, None), (None, 10)),
    "cached": ("no", "yes", "read once", "host memory"),
    "drafts": ("none", "from text", "from hidden states"),
    "exact": (False, True),
    "processed": (False, True),
    "top_logprobs": (False, True),
    "adapters": (False, True),
    "tight": (False, True),
    "chunk_tokens": (5, 16),
    "steps_per_slice": (1, 8),
    "narrow": (False, True),
}


def is_possible(config):
    if config["windows"] != (None, None) and config["cached"] in ("read once", "host memory"):
        return False
    return not (config["narrow"] and (config["exact"] or config["drafts"] != "none"))


def pairs_of(config):
    return set(itertools.combinations(config.items(), 2))


def covering_configs():
    """Configs in which each possible pair of values of two options occurs, the best of many random ones each time."""
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


def random_weights(seed):
    shapes = {
        "embedding": (VOCAB, FEATURES),
        "adapters": (1 + ADAPTERS, FEATURES),
        "qkv": (2, FEATURES, 3 * HEADS * HEAD_DIM),
        "out": (2, HEADS * HEAD_DIM, FEATURES),
        "head": (FEATURES, VOCAB),
    }
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32) for name, shape in shapes.items()}


def apply(config, groups, weights, tokens, positions, caches, step):
    x, caches = weights["embedding"][tokens], list(caches)
    if config["adapters"]:
        x += weights["adapters"][1 + step.adapters]
    for i, (window, (index, group)) in enumerate(zip(config["windows"], groups.layers, strict=True)):
        q, k, v = jnp.split((x @ weights["qkv"][i]).reshape(len(x), 3 * HEADS, HEAD_DIM), 3, axis=1)
        options = dict(sliding_window=window, rotary_frequencies=FREQUENCIES)
        caches[index], out = step.group(group).attend(q, k, v, caches[index], **options)
        x += jnp.tanh(out.reshape(len(x), -1) @ weights["out"][i])
    return caches, x, {"tokens": tokens, "positions": positions[:, None]}


def logits_of(windows, weights, tokens, adapter, *, has_adapters):
    """The logits after each token of a text, [tokens, vocab], in float64 and without a cache."""
    positions = np.arange(len(tokens))
    distance = positions[:, None] - positions
    turn = np.exp(1j * np.outer(positions, np.asarray(FREQUENCIES)))[:, None]
    x = weights["embedding"][tokens]
    if has_adapters:
        x = x + weights["adapters"][0 if adapter is None else 1 + adapter]
    for qkv, out, window in zip(weights["qkv"], weights["out"], windows, strict=True):
        q, k, v = np.split((x @ qkv).reshape(len(tokens), -1, HEAD_DIM), 3, axis=1)
        turned = [(y[..., : HEAD_DIM // 2] + 1j * y[..., HEAD_DIM // 2 :]) * turn for y in (q, k)]
        q, k = (np.concatenate([y.real, y.imag], axis=-1) for y in turned)
        scores = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = np.where((distance >= 0) & (distance < (window or MAX_LENGTH)), np.exp(scores), 0)
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + np.tanh(attended.reshape(len(tokens), -1) @ out)
    return x @ weights["head"]


def from_hidden(weights, tokens, lengths, hidden):
    newest = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    best = jnp.argmax((hidden + weights["embedding"][newest]) @ weights["head"], axis=1)
    return jnp.stack([best, newest], axis=1).astype(jnp.int32)


def create_engine(config):
    groups = layer_groups(config["windows"])
    seats_blocks = SEATS * groups.num_blocks(MAX_LENGTH, block_size=BLOCK_SIZE, chunk_tokens=config["chunk_tokens"])
    num_blocks = 1 + (seats_blocks // 2 if config["tight"] else seats_blocks)
    sizes = dict(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    drafts = {
        "none": dict(num_speculative_tokens=0),
        "from text": dict(num_speculative_tokens=3),
        "from hidden states": dict(num_speculative_tokens=2),
    }[config["drafts"]]
    widths = (7,) if drafts["num_speculative_tokens"] and not config["exact"] else (2,) if config["narrow"] else ()
    least = 1 if config["cached"] == "read once" else None
    with mock.patch.object(program, "chosen_least_saved_reads", return_value=least), few_shared_tokens():
        return Engine(
            functools.partial(apply, config, groups),
            random_weights(0),
            [KVCache.create(**sizes) for _ in range(groups.num_caches)],
            head=head,
            draft=from_hidden if config["drafts"] == "from hidden states" else None,
            options=EngineOptions(
                vocab_size=VOCAB,
                windows=groups.windows,
                max_num_seqs=SEATS,
                max_model_len=MAX_LENGTH,
                max_requests=12,
                num_stop_ids=2,
                widths=widths,
                batch_invariant=config["exact"],
                chunk_tokens=config["chunk_tokens"],
                steps_per_slice=config["steps_per_slice"],
                prefix_cache=config["cached"] != "no",
                host_cache_bytes=2**20 if config["cached"] == "host memory" else None,
                processed_logprobs=config["processed"],
                max_logprobs=MOST_LIKELY if config["top_logprobs"] else 0,
                num_adapters=ADAPTERS if config["adapters"] else 0,
                compiler_options={"xla_backend_optimization_level": 0},
                **drafts,
            ),
        )


def few_shared_tokens() -> contextlib.AbstractContextManager:
    return mock.patch.object(kinds, "SHARING_TOKENS", 0)


def requests(config, seed, count=14):
    """Prompts that begin alike, or repeat themselves, and parameters of every kind."""
    rng = np.random.default_rng(seed)
    shared, prompts, params = rng.integers(0, VOCAB, 20).tolist(), [], []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        if i % 3 == 0:
            prompt = shared[: int(rng.integers(5, 20))] + prompt[:8]
        elif i % 3 == 1:
            prompt = (prompt[:3] * 6)[:17]
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_tokens=int(rng.integers(1, min(20, MAX_LENGTH - len(prompt)) + 1)),
                temperature=(0.0, 0.7, 1.3)[i % 3],
                top_k=(0, 5)[i // 2 % 2],
                top_p=(1.0, 0.8)[i // 4 % 2],
                min_p=(0.0, 0.05)[i // 3 % 2],
                seed=int(rng.integers(0, 2**32)),
                stop_token_ids=((), (3, 17))[i % 2],
                n=3 if i % 7 == 2 else 1,
                logprobs=i % 4 != 1,
                prompt_logprobs=i % 5 == 0,
                top_logprobs=i % (1 + MOST_LIKELY) if config["top_logprobs"] else 0,
                adapter=(None, 0, 1)[i % 3] if config["adapters"] else None,
                head_start=i % 2,
            )
        )
    return prompts, params


def log_softmax(logits):
    return (
        logits
        - logits.max(-1, keepdims=True)
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


class Checker:
    """Compares outputs with the plain model under one version of the weights."""

    def __init__(self, config, seed):
        self.config = config
        self.weights = {name: np.asarray(x, np.float64) for name, x in random_weights(seed).items()}

    def logits(self, tokens, adapter):
        has_adapters = self.config["adapters"]
        return logits_of(self.config["windows"], self.weights, np.asarray(tokens), adapter, has_adapters=has_adapters)

    def check_output(self, prompt, params, output):
        assert output.finished
        assert len(output.outputs) == params.n
        for index, completion in enumerate(output.outputs):
            self.check_completion(prompt, params, index, completion)
        if params.prompt_logprobs:
            logprobs = log_softmax(self.logits(prompt, params.adapter))
            assert output.prompt_logprobs[0] is None
            expected = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(np.array(output.prompt_logprobs[1:], float), expected, atol=1e-3)
            if params.top_logprobs:
                for likely, row in zip(output.prompt_top_logprobs[1:], logprobs, strict=False):
                    check_likely(likely, row, params.top_logprobs)

    def check_completion(self, prompt, params, index, completion):
        text = prompt + completion.token_ids
        logits = self.logits(text, params.adapter)[len(prompt) - 1 : -1]
        params = dataclasses.replace(params, seed=completion_seed(params.seed, index))
        expected, logprobs = [], []
        for position, row in enumerate(logits, len(prompt)):
            scores = row / params.temperature if params.temperature else row
            expected.append(int(drawn(scores, params, position) if params.temperature else row.argmax()))
            if self.config["processed"] and params.temperature:
                weights = np.exp(scores - scores.max())
                scores = np.where(kept(weights, params.top_k, params.top_p, params.min_p), scores, -np.inf)
                logprobs.append(log_softmax(scores)[text[position]])
            else:
                logprobs.append(log_softmax(row)[text[position]])
        assert completion.token_ids == expected
        assert completion.aux["tokens"].tolist() == text[len(prompt) - 1 : -1]
        assert completion.aux["positions"].tolist() == [[p] for p in range(len(prompt) - 1, len(text) - 1)]
        is_stopped = completion.token_ids[-1] in params.stop_token_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(completion.token_ids) == params.max_tokens
        assert not set(completion.token_ids[:-1]) & set(params.stop_token_ids)
        if params.logprobs:
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-3)
        if params.top_logprobs:
            for likely, row in zip(completion.top_logprobs, log_softmax(logits), strict=True):
                check_likely(likely, row, params.top_logprobs)

    def check_score(self, prompt, tokens, adapter, score):
        logits = self.logits(prompt + tokens, adapter)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(score.logprobs, log_softmax(logits)[np.arange(len(tokens)), tokens], atol=1e-3)
        assert score.is_greedy == (logits.argmax(axis=1) == tokens).tolist()


def check_likely(likely, logprobs, num):
    best = np.argsort(-logprobs)[:num]
    assert list(likely) == best.tolist()
    np.testing.assert_allclose(list(likely.values()), logprobs[best], atol=1e-3)


@pytest.fixture(params=CONFIGS, ids=map(str, range(len(CONFIGS))))
def config(request):
    """One of CONFIGS. Its engine has one kind of steps where no option asks for more, and leaves no program behind."""
    has_more = request.param["narrow"] or request.param["cached"] == "read once"
    with contextlib.nullcontext() if has_more else one_kind_of_steps():
        yield request.param
    jax.clear_caches()


def test_options_of_every_pair_give_the_tokens_of_a_plain_model(config):
    engine = create_engine(config)
    for version in range(2):
        checker, rng = Checker(config, seed=version), np.random.default_rng(version)
        if version:
            engine.sleep()
            engine.update_weights(random_weights(version))
            engine.wake_up()
        prompts, params = requests(config, seed=7 + version)
        for _ in range(2 if config["cached"] != "no" else 1):  # the second time prefixes are cached
            added = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
            doomed = engine.add_request(prompts[0], SamplingParams(max_tokens=12))
            outputs = {output.request_id: output for output in engine.step()}
            engine.abort(doomed)
            adapter = 1 if config["adapters"] else None
            texts = [(prompts[i], [0, *rng.integers(0, VOCAB, 5).tolist()]) for i in (0, 1, 4)]
            for text, score in zip(texts, engine.score(*zip(*texts, strict=True), adapter=adapter), strict=True):
                checker.check_score(*text, adapter, score)
            while engine.has_unfinished_requests:
                outputs |= {output.request_id: output for output in engine.step()}
            assert outputs.keys() - {doomed} == set(added)
            for request_id, prompt, of_one in zip(added, prompts, params, strict=True):
                checker.check_output(prompt, of_one, outputs[request_id])
    state = jax.tree.map(np.asarray, engine._runner.state)
    assert state.allocator.broken_invariants() == ()
    assert state.scheduler.broken_invariants(state.allocator) == ()
    assert state.allocator.num_free == engine._options.num_blocks - 1


def test_every_pair_of_options_occurs():
    """In one config or another; one config less and a pair is missing."""
    possible = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    every = set().union(*(pairs_of(config) for config in possible if is_possible(config)))
    assert set().union(*map(pairs_of, CONFIGS)) == every
    assert set().union(*map(pairs_of, CONFIGS[1:])) < every
