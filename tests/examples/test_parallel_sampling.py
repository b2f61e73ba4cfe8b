"""examples/parallel_sampling.py: the same tokens as a loop without sharing, from fewer blocks."""

from types import SimpleNamespace

import numpy as np
import pytest

import parallel_sampling
from lib.generation import generated
from lib.sampling import Sampling
from tests.examples.compiled_examples import read_compiled
from tests.examples.tiny_checkpoint import greedy

pytestmark = pytest.mark.slow

PROMPTS = ["The quick brown fox jum", "a", "12345678"]  # 23, 1 and 8 tokens: 2 full blocks, none and 1
SIZES = dict(max_new_tokens=12, block_size=8)


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]


def complete(tiny, prompts, temperature, num_completions=3):
    return parallel_sampling.sample_in_parallel(
        tiny.model,
        tiny.config,
        prompts,
        **SIZES,
        num_completions=num_completions,
        sampling=Sampling(temperature),
        seed=4,
    )


def repeat(rows):
    return [row for row in rows for _ in range(3)]


def test_greedy_tokens_equal_a_model_without_sharing(tiny, prompts, monkeypatch):
    expected = [greedy(tiny.tensors, prompt, 12, None) for prompt in prompts]
    state, num_shared = complete(tiny, prompts, 0.0)
    assert generated(state) == repeat(expected)
    assert state.allocator.broken_invariants() == ()
    assert int(state.allocator.num_held) == 0
    assert num_shared == 3  # the full blocks; the partly filled ones of the first two prompts have copies
    # At the end a completion has 34, 12 or 19 tokens in 5, 2 or 3 blocks.
    assert int(state.peak_unshared) == 3 * (5 + 2 + 3)
    assert int(state.peak_blocks) == 3 * (5 + 2 + 3) - 2 * num_shared == state.allocator.num_blocks - 1

    # The twin: without the copies, the children's last blocks are empty.
    monkeypatch.setattr(parallel_sampling, "copy_blocks", lambda cache, source_ids, destination_ids: cache)
    parallel_sampling.complete.clear_cache()
    wrong = generated(complete(tiny, prompts, 0.0)[0])
    parallel_sampling.complete.clear_cache()
    assert wrong[0] == expected[0]  # the parent
    assert wrong[1] != expected[0]


def test_samples_equal_a_loop_without_sharing(tiny, prompts, monkeypatch):
    apart, none_shared = complete(tiny, repeat(prompts), 2.0, num_completions=1)
    checked = read_compiled(monkeypatch, parallel_sampling, "complete")
    state, num_shared = complete(tiny, prompts, 2.0)
    assert checked == [True]
    assert generated(state) == generated(apart)
    assert len(set(map(tuple, generated(state)))) == 9
    assert (none_shared, int(apart.peak_blocks)) == (0, int(apart.peak_unshared))
    assert int(state.peak_blocks) == int(apart.peak_blocks) - 2 * num_shared


def test_printed_output(tiny, printed):
    rows = np.array([tiny.tokenizer.encode(text) for text in ("cd", "ef", "gh", "ij")])
    blocks = dict(peak_blocks=np.array(5), peak_unshared=np.array(8))
    result = SimpleNamespace(tokens=rows, num_tokens=np.array([2, 2, 1, 2]), **blocks), 1
    options = ["-n=2", "--seed=3", "--temperature=0.5", "--top-k=7", "--top-p=0.9", "--prompt=ab", "--prompt=kl"]
    lines, prompts, named = printed(parallel_sampling, "sample_in_parallel", result, *options)
    assert prompts == ["ab", "kl"]
    assert named.items() >= dict(num_completions=2, sampling=Sampling(0.5, 7, 0.9), seed=3).items()
    assert lines == [
        *("[0] ab", "--> cd", "--> ef", "", "[1] kl", "--> g", "--> ij", ""),
        "blocks:  1 shared after the fork; 5 of 16 tokens in use at the peak; without sharing 8: 3 saved",
    ]
