"""Groups of layers in the engine: the tokens of a model without a cache, from fewer blocks."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import Engine, EngineOptions, SamplingParams, layer_groups
from jaxpaged._allocator import state
from tests.engine.layered_model import create_engine, logits_of, random_weights
from tests.toy_model import (
    BLOCK_SIZE,
    VOCAB,
    assert_idle,
    continuation_of,
    create_cache,
    greedy,
    not_compiled,
    tokens_of,
    until_module_ends,
)

MAX_LENGTH = 72
FAMILIES = {  # the windows of their layers: no multiple of a block, and shorter than a chunk
    "gemma 3": (10, 10, None, 10, None),
    "mistral": (9,),
}


@until_module_ends
def engine(family, *, more_blocks=0, **options):
    """An engine whose pool has blocks for the longest request and a few more."""
    groups, columns = layer_groups(FAMILIES[family]).windows, -(-(MAX_LENGTH - 1) // BLOCK_SIZE)
    least = 1 + sum(columns if w is None else min(columns, -(-(w - 1) // BLOCK_SIZE) + 1) for w in groups)
    sizes = dict(max_model_len=MAX_LENGTH, chunk_tokens=24, steps_per_slice=8, batch_invariant=True)
    return create_engine(FAMILIES[family], num_blocks=least + more_blocks, **sizes, **options)


tight_gemma = functools.partial(engine, "gemma 3", more_blocks=6, prefix_cache=True, num_speculative_tokens=3)


def requests(count=12):
    """Some prompts have a common prefix, some requests have several completions."""
    rng = np.random.default_rng(1)
    begin = rng.integers(0, VOCAB, 40).tolist()
    prompts, params = [], []
    for i in range(count):
        prompt = begin[: rng.integers(0, 41)] if rng.random() < 0.6 else []
        prompts.append(prompt + rng.integers(0, VOCAB, rng.integers(1, 20)).tolist())
        numbers = dict(max_tokens=rng.integers(1, MAX_LENGTH - len(prompts[-1]) + 1), seed=rng.integers(2**32))
        numbers["n"] = 3 if rng.random() < 0.15 else 1
        params.append(SamplingParams(temperature=(0.0, 0.8)[i % 2], **{name: int(x) for name, x in numbers.items()}))
    return prompts, params


def expected_tokens(family, prompts, params):
    windows = FAMILIES[family]
    weights = random_weights(len(windows))
    return [
        continuation_of(lambda tokens: logits_of(windows, weights, tokens)[-1], prompt, of_one, i)[0]
        for prompt, of_one in zip(prompts, params, strict=True)
        for i in range(of_one.n)
    ]


@pytest.mark.parametrize(
    ("family", "make_engine"),
    [
        ("gemma 3", tight_gemma),
        ("mistral", functools.partial(engine, "mistral", more_blocks=3, prefix_cache=True)),
    ],
    ids=FAMILIES,
)
def test_tokens_equal_a_model_without_a_cache(family, make_engine):
    grouped = make_engine()
    prompts, params = requests()
    assert tokens_of(grouped.generate(prompts, params)) == expected_tokens(family, prompts, params)
    stats = grouped.stats()
    assert stats.num_preempted > 0 or family == "mistral"  # whose pool is never short
    assert stats.num_found > 0
    assert (0 < stats.num_accepted < stats.num_drafted) == (family == "gemma 3")
    assert_idle(grouped)


def test_a_window_that_frees_a_block_too_many_changes_tokens(monkeypatch):
    # The twin: its blocks are reused and overwritten.
    right = state.num_passed_blocks
    monkeypatch.setattr(state, "num_passed_blocks", lambda window, lengths, size: right(window and 1, lengths, size))
    prompts, params = requests()
    wrong = engine("mistral", more_blocks=26)
    assert tokens_of(wrong.generate(prompts, params)) != expected_tokens("mistral", prompts, params)


def test_a_request_that_fits_only_because_of_windows_is_served_alone():
    num_groups = len(layer_groups(FAMILIES["gemma 3"]).windows)
    assert tight_gemma().stats().num_blocks < num_groups * MAX_LENGTH // BLOCK_SIZE
    prompts, params = [list(range(40)) + [1] * 20] * 2, greedy(12)
    expected = expected_tokens("gemma 3", prompts[:1], [params])
    assert tokens_of(tight_gemma().generate(prompts, params)) == expected * 2


def test_a_request_that_never_fits_is_refused():
    with not_compiled():
        tiny = engine("gemma 3", more_blocks=-1)
    with pytest.raises(ValueError, match=r"72 tokens need 26 blocks of 4, .*: 69 tokens fit"):
        tiny.add_request([1] * 70, SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("group", "window", "message"),
    [(None, 6, r"call step.group\(i\)"), (1, None, "pass sliding_window=6 or less; got None")],
)
def test_a_layer_must_name_its_group_and_keep_to_its_window(group, window, message):
    def apply(weights, tokens, positions, cache, step):
        q = jnp.zeros((len(tokens), 1, 8))
        step = step if group is None else step.group(group)
        cache, out = step.attend(q, q, q, cache, sliding_window=window)
        return cache, out[:, 0]

    options = EngineOptions(windows=(None, 6), max_num_seqs=2, max_model_len=8)
    with pytest.raises(ValueError, match=message):
        Engine(apply, {}, create_cache(9, num_kv_heads=1), head=None, options=options)
