"""Groups of layers in the engine: the tokens of a model without a cache, from fewer blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import Engine, EngineOptions, KVCache, LayerGroups, SamplingParams, layer_groups, rotary_frequencies
from jaxpaged._allocator import state
from jaxpaged._engine.requests import completion_seed
from tests.toy_model import VOCAB, continuation_of, not_compiled

FEATURES, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SEATS, MAX_LENGTH = 24, 4, 2, 8, 4, 5, 72
FAMILIES = {  # the windows of their layers: no multiple of a block, and shorter than a chunk
    "gemma 3": (10, 10, None, 10, None),
    "gpt-oss": (6, None),
    "mistral": (9,),
}
FREQUENCIES = rotary_frequencies(HEAD_DIM)


def random_weights(num_layers, seed=0):
    shapes = {
        "qkv": (num_layers, FEATURES, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "out": (num_layers, HEADS * HEAD_DIM, FEATURES),
    }
    shapes |= {"embedding": (VOCAB, FEATURES), "head": (FEATURES, VOCAB)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) * 0.4 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def apply(windows, groups: LayerGroups, weights, tokens, positions, caches, step):
    caches, x = list(caches), weights["embedding"][tokens]
    for i, (window, (index, group)) in enumerate(zip(windows, groups.layers, strict=True)):
        heads = (x @ weights["qkv"][i]).reshape(len(tokens), -1, HEAD_DIM)
        q, k, v = jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
        caches[index], out = step.group(group).attend(
            q, k, v, caches[index], sliding_window=window, rotary_frequencies=FREQUENCIES
        )
        x = x + jnp.tanh(out.reshape(len(tokens), -1) @ weights["out"][i])
    return caches, x


def head(weights, hidden):
    return hidden @ weights["head"]


def logits_after(windows, weights, tokens):
    """The same by NumPy, of all tokens at once and without a cache: logits `[vocab]` after the last."""
    positions = np.arange(len(tokens))
    distance = positions[:, None] - positions
    turn = np.exp(1j * np.outer(positions, np.asarray(FREQUENCIES)))[:, None]
    x = weights["embedding"][tokens]
    for qkv, out, window in zip(weights["qkv"], weights["out"], windows, strict=True):
        q, k, v = np.split((x @ qkv).reshape(len(tokens), -1, HEAD_DIM), (HEADS, HEADS + KV_HEADS), axis=1)
        turned = [(y[..., : HEAD_DIM // 2] + 1j * y[..., HEAD_DIM // 2 :]) * turn for y in (q, k)]
        q, k = (np.concatenate([y.real, y.imag], axis=-1) for y in turned)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = np.where((distance >= 0) & (distance < (window or MAX_LENGTH)), np.exp(scores), 0)
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + np.tanh(attended.reshape(len(tokens), -1) @ out)
    return x[-1] @ weights["head"]


def expected_tokens(family, prompts, params):
    """Of each completion of each prompt."""
    windows = FAMILIES[family]
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), random_weights(len(windows)))
    logits_of = functools.partial(logits_after, windows, weights)

    def of_one(prompt, params, index):
        params = dataclasses.replace(params, seed=completion_seed(params.seed, index))
        return continuation_of(logits_of, prompt, params)[0]

    return [
        [of_one(prompt, of_each, i) for i in range(of_each.n)] for prompt, of_each in zip(prompts, params, strict=True)
    ]


@functools.cache
def engine(family, *, num_blocks, widths=None, prefix_cache=False, num_drafts=0):
    """`widths` None: one kind of steps, which compiles sooner."""
    windows = FAMILIES[family]
    groups = layer_groups(windows)
    cache = functools.partial(
        KVCache.create, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    return Engine(
        functools.partial(apply, windows, groups),
        random_weights(len(windows)),
        [cache(dtype="float32") for _ in range(groups.num_caches)],
        head=head,
        options=EngineOptions(
            windows=groups.windows,
            max_num_seqs=SEATS,
            max_model_len=MAX_LENGTH,
            chunk_tokens=24,
            widths=widths,
            batch_invariant=widths is None,
            steps_per_slice=8,
            prefix_cache=prefix_cache,
            num_speculative_tokens=num_drafts,
            compiler_options={"xla_backend_optimization_level": 0},
        ),
    )


def requests(seed, count=12):
    """Some prompts begin alike; some requests have several completions."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, VOCAB, 40).tolist()
    prompts, params = [], []
    for i in range(count):
        prompt = begin[: rng.integers(0, 41)] if rng.random() < 0.6 else []
        prompt = prompt + rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_tokens=int(rng.integers(1, MAX_LENGTH - len(prompt) + 1)),
                temperature=(0.0, 0.8)[i % 2],
                seed=int(rng.integers(2**32)),
                n=3 if rng.random() < 0.15 else 1,
            )
        )
    return prompts, params


def tokens(engine, prompts, params):
    return [[c.token_ids for c in output.outputs] for output in engine.generate(prompts, params)]


def least_blocks(family):
    """A pool for the longest request and little more."""
    groups, columns = layer_groups(FAMILIES[family]).windows, -(-(MAX_LENGTH - 1) // BLOCK_SIZE)
    return 1 + sum(columns if w is None else min(columns, -(-(w - 1) // BLOCK_SIZE) + 1) for w in groups)


# In the smallest pool that serves every request.
tight_gemma = functools.partial(engine, "gemma 3", num_blocks=least_blocks("gemma 3"), prefix_cache=True, num_drafts=3)


@pytest.mark.parametrize(
    ("family", "make_engine"),
    [
        ("gemma 3", tight_gemma),
        ("gpt-oss", functools.partial(engine, "gpt-oss", num_blocks=least_blocks("gpt-oss") + 3, widths=())),
        ("mistral", functools.partial(engine, "mistral", num_blocks=least_blocks("mistral") + 3, prefix_cache=True)),
    ],
    ids=FAMILIES,
)
def test_tokens_are_those_of_a_model_without_a_cache(family, make_engine):
    grouped = make_engine()
    prompts, params = requests(seed=1)
    assert tokens(grouped, prompts, params) == expected_tokens(family, prompts, params)
    assert grouped.stats().num_preempted > 0 or family == "mistral"  # whose pool is never short
    assert (grouped.stats().num_found > 0) == (family != "gpt-oss")
    assert (0 < grouped.stats().num_accepted < grouped.stats().num_drafted) == (family == "gemma 3")
    scheduler, allocator = grouped._runner.state.scheduler, grouped._runner.state.allocator
    assert allocator.broken_invariants() == scheduler.broken_invariants(allocator) == ()
    assert int(allocator.num_held) == 0


def test_a_window_that_passes_a_block_too_many_makes_other_tokens(monkeypatch):
    # The twin: its blocks are handed out again, and overwritten.
    right = state.num_passed_blocks
    monkeypatch.setattr(state, "num_passed_blocks", lambda window, lengths, size: right(window and 1, lengths, size))
    prompts, params = requests(seed=1)
    wrong = engine("mistral", num_blocks=30)
    assert tokens(wrong, prompts, params) != expected_tokens("mistral", prompts, params)


def test_a_request_that_fits_only_because_of_windows_is_served_alone():
    num_blocks = least_blocks("gemma 3")
    assert num_blocks - 1 < len(layer_groups(FAMILIES["gemma 3"]).windows) * MAX_LENGTH // BLOCK_SIZE
    prompts, params = [list(range(40)) + [1] * 20] * 2, [SamplingParams(max_tokens=12, temperature=0)] * 2
    assert tokens(tight_gemma(), prompts, params) == expected_tokens("gemma 3", prompts, params)


def test_a_request_that_never_fits_is_refused():
    with not_compiled():
        tiny = engine("gemma 3", num_blocks=least_blocks("gemma 3") - 1)
    with pytest.raises(ValueError, match="72 tokens need 26 blocks"):
        tiny.add_request([1] * 70, SamplingParams(max_tokens=2))


def test_a_layer_must_name_its_group_and_keep_to_its_window():
    def without(name, weights, tokens, positions, caches, step):
        q = jnp.zeros((len(tokens), 1, HEAD_DIM))
        step, options = (step, dict(sliding_window=6)) if name == "group" else (step.group(1), {})
        cache, out = step.attend(q, q, q, caches[0], **options)
        return [cache], out[:, 0]

    cache = KVCache.create(num_blocks=9, block_size=4, num_kv_heads=1, head_dim=HEAD_DIM, dtype="float32")
    options = EngineOptions(windows=(None, 6), max_num_seqs=2, max_model_len=8)
    for name, message in (
        ("group", r"call step.group\(i\)"),
        ("sliding_window", "pass sliding_window=6 or less; got None"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(functools.partial(without, name), {}, [cache], head=None, options=options)
