"""examples/shared_prefix.py, and --shared-prefix of examples/generate.py: the tokens are those without sharing."""

import json
import re

import generate
import pytest
import shared_prefix

PREFIX = "All of these begin with the same fifty-odd characters: "  # a byte is a token of the tiny model
PROMPTS = ["a", "Hello there, paged world", "The quick brown fox"]


@pytest.fixture
def run(tiny, capsys):
    def call(*arguments, prompts=PROMPTS):
        command = ["--model", str(tiny.path), "--max-new-tokens", "10", "--json", *map(str, arguments)]
        code = generate.main(command + [f"--prompt={prompt}" for prompt in prompts])
        captured = capsys.readouterr()
        return code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return call


@pytest.fixture
def prefix_file(tmp_path):
    file = tmp_path / "prefix.txt"
    file.write_text(PREFIX)
    return file


def test_tokens_are_those_without_sharing_in_fewer_blocks(run, prefix_file):
    _, plain, plain_err = run("--block-size", 8, prompts=[PREFIX + prompt for prompt in PROMPTS])
    code, shared, err = run("--block-size", 8, "--shared-prefix", prefix_file)
    assert code == 0
    assert [line["prompt"] for line in shared] == PROMPTS
    for name in ("prompt_tokens", "tokens", "text"):
        assert [line[name] for line in shared] == [line[name] for line in plain]

    full, prompt_tokens = len(PREFIX) // 8, sum(len(PREFIX + prompt) for prompt in PROMPTS)
    left = prompt_tokens - 2 * full * 8
    found = f"{8 * full} tokens in {full} full blocks; the prompts found {3 * full} blocks again, {24 * full} tokens"
    assert f"prefix:  {found}: {left} prefilled instead of {prompt_tokens}" in err
    assert f"prefill: {left} tokens" in err
    assert "prefix:" not in plain_err
    in_use, in_use_plain = (int(re.search(r"(\d+) blocks of 8 tokens in use", text)[1]) for text in (err, plain_err))
    assert in_use == in_use_plain - 2 * full

    # A prefix that fills no block: each computes it for itself.
    code, alone, err = run("--block-size", 64, "--shared-prefix", prefix_file)
    assert code == 0
    assert [line["tokens"] for line in alone] == [line["tokens"] for line in plain]
    assert "the prompts found 0 blocks again" in err


def test_the_pool_holds_a_shared_prefix_once(run, prefix_file):
    # The prompts fill 7, 10 and 10 blocks, 6 of each the prefix's.
    code, _, err = run("--block-size", 8, "--shared-prefix", prefix_file, "--num-blocks", 12)
    assert code == 2
    assert "The prompts need 15 blocks of 8 tokens" in err
    code, _, err = run("--block-size", 8, "--num-blocks", 12, prompts=[PREFIX + prompt for prompt in PROMPTS])
    assert "The prompts need 27 blocks of 8 tokens" in err


def test_a_prefix_that_cannot_be_read(run):
    code, lines, err = run("--shared-prefix", "/nowhere.txt")
    assert (code, lines) == (2, [])
    assert "The shared prefix /nowhere.txt cannot be read" in err


@pytest.mark.parametrize(
    ("prompts", "prefix", "spared"),
    [
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 6]], [1, 2, 3, 4], 4),
        ([[1, 2, 3, 4], [1, 2, 3, 4, 6]], [1, 2, 3, 4], 1),  # a prompt's last token is always computed
        ([[1, 2], [1, 3]], [], 0),
        ([[1, 2, 3, 4]], [1, 2, 3, 4], 0),
    ],
)
def test_the_prefix_is_what_all_begin_with_in_full_blocks(prompts, prefix, spared):
    assert shared_prefix.common_prefix(prompts, 2) == prefix
    assert shared_prefix.num_spared_blocks(prompts, prefix, 2) == spared
