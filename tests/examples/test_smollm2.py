"""The real model's greedy tokens against Hugging Face transformers 5.23 on the same GGUF file in float32.

`gaps` are the differences of its best and second best logit at each step. After a near tie either token is right."""

import json
from pathlib import Path

import pytest

import generate
from lib import checkpoint

pytestmark = pytest.mark.slow

NEW_TOKENS = 18  # the file has 48; blocks have 16
NEAR_TIE = 0.005  # two orders of magnitude above the spread of its own attention implementations, 5e-5
DATA = Path(__file__).with_name("data") / "smollm2_greedy.jsonl"
CASES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return checkpoint.read_checkpoint(checkpoint.default_path()).tokenizer


def test_greedy_tokens(tokenizer, optimised, capsys):
    """All prompts in one batch, of 1 to 707 tokens; a conversation as the template writes it."""
    texts = [
        tokenizer.tokenizer.decode(c["prompt_tokens"], skip_special_tokens=False) if c["chat"] else c["prompt"]
        for c in CASES
    ]
    assert generate.main(["--json", f"--max-new-tokens={NEW_TOKENS}", *(f"--prompt={text}" for text in texts)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for case, line in zip(CASES, lines, strict=True):
        assert line["prompt_tokens"] == case["prompt_tokens"], case["name"]
        tie = next((i for i, gap in enumerate(case["gaps"]) if gap < NEAR_TIE), len(case["tokens"]))
        assert line["tokens"][:tie] == case["tokens"][: min(tie, NEW_TOKENS)], case["name"]


def test_conversations(tokenizer):
    chats = [case for case in CASES if case["chat"]]
    # transformers does not distinguish control tokens spelled in a prompt from real ones
    encoded = tokenizer.encode_chat([case["prompt"] for case in chats], allow_control_tokens=True)
    assert encoded == [case["prompt_tokens"] for case in chats]
