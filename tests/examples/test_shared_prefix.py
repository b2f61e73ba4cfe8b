"""examples/lib/shared_prefix.py, and --shared-prefix of examples/generate.py: sharing does not change tokens."""

import functools

import pytest

from lib import shared_prefix
from tests.examples.tiny_checkpoint import greedy

pytestmark = pytest.mark.slow

PREFIX = "All of these begin with the same fifty-odd characters: "  # a byte is a token of the tiny model
PROMPTS = ["a", "Hello there, paged world", "The quick brown fox"]


@pytest.fixture
def run(tiny, run_generate):
    return functools.partial(run_generate, model=tiny.path, prompts=PROMPTS, tokens=10)


@pytest.fixture
def prefix_file(tmp_path):
    file = tmp_path / "prefix.txt"
    file.write_text(PREFIX)
    return file


@pytest.fixture
def encoded(tiny):
    return [tiny.tokenizer.encode(PREFIX + prompt) for prompt in PROMPTS]


def test_tokens_equal_those_without_sharing_and_need_fewer_blocks(tiny, run, prefix_file, encoded):
    code, lines, err = run("--block-size", 8, "--shared-prefix", prefix_file)
    assert code == 0
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["prompt_tokens"] for line in lines] == encoded
    assert [line["tokens"] for line in lines] == [greedy(tiny.tensors, tokens, 10) for tokens in encoded]
    # The prefix has 55 tokens, the prompts 56, 79 and 74. With the generated tokens they fill 9, 11 and 11 blocks.
    assert "prefix:  48 tokens in 6 full blocks; the prompts found 18 blocks again, 144 tokens: 113 prefilled " in err
    assert "prefilled instead of 209\nprefill: 113 tokens" in err
    assert f"{9 + 11 + 11 - 2 * 6} blocks of 8 tokens in use at the peak" in err


def test_a_prefix_shorter_than_a_block_is_not_shared(tiny, run, prefix_file, encoded):
    _, lines, err = run("--block-size", 64, "--shared-prefix", prefix_file, tokens=1)
    assert [line["tokens"] for line in lines] == [greedy(tiny.tensors, tokens, 1) for tokens in encoded]
    assert "prefix:  0 tokens in 0 full blocks; the prompts found 0 blocks again, 0 tokens: 209 prefilled" in err


def test_the_pool_holds_a_shared_prefix_once(run, prefix_file):
    # The prompts fill 7, 10 and 10 blocks; 6 of each hold the prefix.
    code, _, err = run("--block-size", 8, "--shared-prefix", prefix_file, "--num-blocks", 12)
    assert code == 2
    assert "The prompts need 15 blocks of 8 tokens" in err
    code, _, err = run("--block-size", 8, "--num-blocks", 12, prompts=[PREFIX + prompt for prompt in PROMPTS])
    assert "The prompts need 27 blocks of 8 tokens" in err


@pytest.mark.parametrize(
    ("prompts", "prefix", "num_saved"),
    [
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 6]], [1, 2, 3, 4], 4),
        ([[1, 2, 3, 4], [1, 2, 3, 4, 6]], [1, 2, 3, 4], 1),  # a prompt's last token is always computed
        ([[1, 2], [1, 3]], [], 0),
        ([[1, 2, 3, 4]], [1, 2, 3, 4], 0),
    ],
)
def test_the_prefix_is_cut_to_full_blocks(prompts, prefix, num_saved):
    assert shared_prefix.common_prefix(prompts, 2) == prefix
    assert shared_prefix.num_saved_blocks(prompts, prefix, 2) == num_saved
