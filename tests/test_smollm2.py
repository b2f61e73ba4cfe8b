"""The real model's greedy tokens against those that Hugging Face transformers 5.23 gives for the same GGUF file in
float32. `gaps` are its best logit less the second best at each step: behind a near tie either token is right."""

import json
from pathlib import Path

import checkpoint
import generate
import pytest

pytestmark = pytest.mark.slow

NEAR_TIE = 0.005  # two orders of magnitude above the spread of its own attention implementations, 5e-5
DATA = Path(__file__).with_name("data") / "smollm2_greedy.jsonl"
CASES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
GROUPS = {
    "raw": [case for case in CASES if not case["chat"] and len(case["prompt_tokens"]) <= 100],
    "chat": [case for case in CASES if case["chat"]],
    "long": [case for case in CASES if len(case["prompt_tokens"]) > 100],
}


def test_every_case_is_in_a_group():
    assert sum(map(len, GROUPS.values())) == len(CASES) == 44


@pytest.mark.parametrize("group", GROUPS)
def test_greedy_tokens(group, capsys):
    cases = GROUPS[group]
    command = ["--json", "--max-new-tokens", "48"]
    if group == "chat":  # transformers takes control tokens that a prompt spells for such
        command += ["--chat", "--allow-control-tokens"]
    assert generate.main(command + [f"--prompt={case['prompt']}" for case in cases]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for case, line in zip(cases, lines, strict=True):
        assert line["prompt_tokens"] == case["prompt_tokens"], case["name"]
        tie = next((i for i, gap in enumerate(case["gaps"]) if gap < NEAR_TIE), len(case["tokens"]))
        assert line["tokens"][:tie] == case["tokens"][:tie], case["name"]


def test_the_weights_are_there():
    assert checkpoint.default_path().stat().st_size > 90e6
