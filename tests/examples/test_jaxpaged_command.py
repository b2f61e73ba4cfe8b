"""The command `jaxpaged`: its help, its errors, and a run in a folder outside of the checkout."""

import json
import os
import subprocess
import sys

import pytest

from tests.examples.tiny_checkpoint import greedy


@pytest.fixture
def run(tmp_path):
    """Runs `python -m jaxpaged` in an empty folder."""

    def call(*words):
        command = [sys.executable, "-m", "jaxpaged", *map(str, words)]
        environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)

    return call


@pytest.mark.parametrize("program", ["", "serve", "generate"])
def test_help_fits_a_screen(run, program):
    done = run(*program.split(), "--help")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith(f"usage: jaxpaged {program}".strip())
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_help_all_has_the_other_options(run):
    short, long = (run("generate", option).stdout for option in ("--help", "--help-all"))
    assert "--max-new-tokens" in short
    assert "--block-size" not in short
    assert "--block-size" in long


@pytest.mark.slow
def test_generate_accepts_options_between_the_model_and_the_prompts(run, tiny):
    words = ["--json", "Hello", "--max-new-tokens", 3, "world", "--prompt=!", "--dtype=float32"]
    done = run("generate", tiny.path, *words)
    lines = list(map(json.loads, done.stdout.splitlines()))
    assert [line["prompt"] for line in lines] == ["Hello", "world", "!"], done.stderr
    assert [line["tokens"] for line in lines] == [greedy(tiny.tensors, line["prompt_tokens"], 3) for line in lines]


def test_words_after_an_option_for_the_model_are_prompts(tmp_path, monkeypatch):
    import generate
    import serve

    words = ["--model", "a/folder", "first", "--prompt", "third", "second", "--dtype=float32"]
    args = generate.parse_arguments(words)
    assert (str(args.model), args.prompt) == ("a/folder", ["first", "second", "third"])
    assert str(serve.parse_arguments(["a/folder", "--dtype=float32"]).model) == "a/folder"

    args = generate.parse_arguments(["Name three rivers.", "and", "--dtype=float32"])  # no model has such a name
    assert (args.model, args.prompt) == (None, ["Name three rivers.", "and"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    args = generate.parse_arguments(["my model", "first", "--dtype=float32"])
    assert (str(args.model), args.prompt) == ("my model", ["first"])

    with pytest.raises(SystemExit):
        serve.parse_arguments(words[:3])


def test_errors_begin_with_the_command(run, tmp_path):
    done = run("generate", tmp_path / "nothing", "Hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"jaxpaged generate: There is no checkpoint at {tmp_path / 'nothing'}.\n"
