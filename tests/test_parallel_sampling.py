"""examples/parallel_sampling.py: the tokens of a loop that never shares, from fewer blocks."""

import re

import parallel_sampling
import pytest
from generation import generate, generated, start
from sampling import Sampling

from tests.tiny_checkpoint import greedy

PROMPTS = ["The quick brown fox jum", "a", "12345678"]  # 23, 1 and 8 tokens: 2 full blocks, none and 1
SIZES = dict(max_new_tokens=12, block_size=8)


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]


def complete(tiny, prompts, temperature):
    return parallel_sampling.sample_in_parallel(
        tiny.model, tiny.config, prompts, **SIZES, num_completions=3, sampling=Sampling(temperature), seed=4
    )


def repeat(rows):
    return [row for row in rows for _ in range(3)]


def test_greedy_tokens_are_those_of_a_model_that_shares_nothing(tiny, prompts, monkeypatch):
    expected = [greedy(tiny.tensors, prompt, 12, None) for prompt in prompts]
    state, num_shared = complete(tiny, prompts, 0.0)
    assert generated(state) == repeat(expected)
    assert state.allocator.check() == ()
    assert int(state.allocator.num_held) == 0
    assert num_shared == 3  # the full blocks; the partly filled ones of the first two prompts have copies
    # In the end a completion's 34, 12 or 19 tokens fill 5, 2 and 3 blocks.
    assert int(state.peak_unshared) == 3 * (5 + 2 + 3)
    assert int(state.peak_blocks) == 3 * (5 + 2 + 3) - 2 * num_shared == state.allocator.num_blocks - 1

    # The twin: without the copies the children have not what stands in their last block.
    monkeypatch.setattr(parallel_sampling, "copy_blocks", lambda cache, source_ids, destination_ids: cache)
    parallel_sampling.complete.clear_cache()
    wrong = generated(complete(tiny, prompts, 0.0)[0])
    parallel_sampling.complete.clear_cache()
    assert wrong[0] == expected[0]  # the parent
    assert wrong[1] != expected[0]


def test_samples_are_those_of_a_loop_that_never_shares(tiny, prompts):
    apart = start(tiny.config, repeat(prompts), **SIZES, num_blocks=None, dtype="float32", seed=4)
    apart, _ = generate(tiny.model, apart, repeat(prompts), (), Sampling(2.0), steps_at_once=12)
    state, num_shared = complete(tiny, prompts, 2.0)
    assert generated(state) == generated(apart)
    assert len(set(map(tuple, generated(state)))) == 9
    assert int(state.peak_blocks) == int(apart.peak_blocks) - 2 * num_shared


def test_what_a_person_sees(tiny, capsys):
    parallel_sampling.main(
        ["--model", str(tiny.path), "--max-new-tokens=4", "--block-size=4", "-n", "3", "--prompt=hello", "--prompt=a"]
    )
    out = capsys.readouterr().out
    assert re.match(r"\[0\] hello\n(--> .*\n){3}\n\[1\] a\n(--> .*\n){3}\nblocks:  1 shared after the fork; ", out)
    assert re.search(r"\d+ of 4 tokens in use at the peak where a loop that never shares takes \d+: 2 saved", out)
    with pytest.raises(SystemExit, match="2"):
        parallel_sampling.main(["--temperature=-1", "--prompt=a"])
