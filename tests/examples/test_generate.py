"""examples/generate.py on a tiny random checkpoint: right tokens for any blocks and batch, and clear refusals."""

import functools
import re

import jax
import pytest

import generate
from lib import prefill
from lib.generation import Timing
from tests.examples.tiny_checkpoint import CONTEXT, EOS, greedy, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_kind")]

PROMPTS = ["Hello there, paged world", "a", "The quick brown fox jumps over it"]


@pytest.fixture
def expected(tiny):
    """The tokens after a JSON line's prompt, by a model without paging."""
    return lambda line, count: greedy(tiny.tensors, line["prompt_tokens"], count)


@pytest.fixture
def run(tiny, run_generate):
    return functools.partial(run_generate, model=tiny.path, prompts=PROMPTS)


@pytest.fixture
def without_generation(monkeypatch):
    """Reads prompts but generates no token, so nothing is compiled."""
    monkeypatch.setattr(generate, "run_generation", lambda model, state, *_, **options: (state, Timing(1, 1, 1)))


@pytest.mark.parametrize(("tied", "num_layers"), [(False, 2), (True, 1)])
def test_tokens_equal_a_model_that_is_not_paged(tmp_path, run, tied, num_layers):
    tensors = write_checkpoint(tmp_path / "model", seed=5, tied=tied, num_layers=num_layers)
    code, lines, _ = run(model=tmp_path / "model")
    assert code == 0
    assert [line["prompt"] for line in lines] == PROMPTS
    for line in lines:
        assert set(line) == {"prompt", "prompt_tokens", "tokens", "text"}
        assert line["tokens"] == greedy(tensors, line["prompt_tokens"], 12)


def test_the_result_depends_only_on_the_prompt(run, expected):
    prompts = ["another one", *PROMPTS[::-1], *PROMPTS]
    code, lines, _ = run("--block-size", 64, "--num-blocks", 100, "--stream", prompts=prompts)
    assert code == 0
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        assert line["tokens"] == expected(line, 12)


def test_drafts_change_no_token(run, expected):
    code, lines, err = run("--num-speculative-tokens", 3, tokens=90)
    assert code == 0
    for line in lines:
        assert line["tokens"] == expected(line, 90)
    num_right, num_drafted = map(int, re.search(r"drafts:  (\d+) of (\d+) were right", err).groups())
    assert num_right <= num_drafted > 0
    code, out, _ = run("--num-speculative-tokens", 3, "--num-blocks", 9, as_json=False)
    assert (code, out) == (2, "")


def test_long_prompts_are_prefilled_in_chunks(run, expected, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    _, lines, _ = run(prompts=["x" * 100, "hello", "y" * 33])
    for line in lines:
        assert line["tokens"] == expected(line, 12)


def test_sampling_depends_on_the_seed_and_not_on_the_row(run):
    hot, prompts = ["--temperature", 5.0], [*PROMPTS, PROMPTS[1]]
    first, again, other = (
        [line["tokens"] for line in run(*hot, "--seed", seed, prompts=order)[1]]
        for seed, order in ((1, prompts), (1, prompts[::-1]), (2, prompts))
    )
    assert [first[0], first[2]] == [again[3], again[1]]
    assert first != other
    assert first[1] != first[3]  # the same prompt twice
    assert [first[1], first[3]] == [again[0], again[2]]


def test_the_narrowest_sampling_is_greedy(run):
    _, lines, _ = run()
    _, narrow, _ = run("--temperature", 5.0, "--top-k", 1)  # `test_command_line` narrows by top_p
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in narrow]


def test_eos_stops_and_is_the_last_token_unless_ignored(run, tmp_path):
    _, lines, _ = run()
    tokens = lines[0]["tokens"]
    eos = tokens[3]  # a generated token, used as eos
    write_checkpoint(tmp_path, eos_token_id=[eos, EOS])
    _, stopped, _ = run(model=tmp_path)
    assert stopped[0]["tokens"] == tokens[: tokens.index(eos) + 1]
    _, ignored, _ = run("--ignore-eos", model=tmp_path)
    assert ignored[0]["tokens"] == tokens


def test_blocks_are_freed_inside_the_loop(run):
    # Row 1 needs 4 blocks at the end. It finds only one until row 0 reaches its context limit and frees its 16.
    long = "x" * (CONTEXT - 4)
    code, lines, err = run("--block-size", 8, "--num-blocks", 1 + 16 + 1, tokens=30, prompts=[long, "abc"])
    assert code == 0
    assert [len(line["tokens"]) for line in lines] == [5, 30]
    assert "17 blocks of 8 tokens in use at the peak" in err


def test_running_out_of_blocks_marks_the_sequence_and_the_others_complete(run, expected):
    # Both need a third block in the same step and none is free: the last row frees its blocks.
    code, lines, err = run("--block-size", 8, "--num-blocks", 1 + 4, tokens=20, prompts=["abcdefgh", "ijklmnop"])
    assert code == 3
    finished, starved = lines
    assert finished["tokens"] == expected(finished, 20)
    assert "out_of_blocks" not in finished
    assert starved["out_of_blocks"] is True
    assert 0 < len(starved["tokens"]) < 20
    assert re.search(r"\[1\] stopped after \d+ tokens: the pool ran out of blocks; pass a larger --num-blocks", err)


def test_chat_and_prompt_file(run, tiny, tmp_path, without_generation):
    (tmp_path / "prompts.txt").write_text("\ufefffirst\r\n\nsec\u2028ond\n")
    _, lines, _ = run("--chat", "--prompt-file", tmp_path / "prompts.txt", prompts=["zeroth"])
    assert [line["prompt"] for line in lines] == ["zeroth", "first", "sec\u2028ond"]
    assert lines[1]["prompt_tokens"] == [EOS, *tiny.tokenizer.encode("first:")]


def test_bfloat16(run):
    with jax.numpy_dtype_promotion("standard"):  # Flax's RMSNorm promotes
        code, lines, _ = run("--dtype", "bfloat16")
    assert code == 0
    assert all(len(line["tokens"]) in range(1, 13) for line in lines)


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_the_default_dtype_suits_the_kernels(monkeypatch, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert generate.parse_arguments([]).dtype == dtype
    assert generate.parse_arguments(["--dtype=float32"]).dtype == "float32"


def test_printed_output(run):
    code, out, _ = run(as_json=False)
    assert code == 0
    for prompt in PROMPTS:
        assert f"] {prompt}\n--> " in out
    assert re.search(r"prefill: 58 tokens in [\d.]+ s, [\d.]+ tokens/s", out)
    assert re.search(r"decode:  \d+ tokens in [\d.]+ s, [\d.]+ tokens/s", out)
    assert re.search(r"cache:   \d+ blocks of 16 tokens .* contiguous .* reserve 9, .*: paging saved \d+%", out)
    if jax.default_backend() != "gpu":
        assert re.search(r"kernel:  prefill xla, decode xla, compiled in [\d.]+ s for cpu", out)


def test_streamed_pieces_join_to_the_text(run):
    _, lines, _ = run()
    _, out, _ = run("--stream", prompts=PROMPTS[:1], as_json=False)
    assert out.startswith(lines[0]["text"].rstrip("\ufffd"))
    _, out, _ = run("--stream", as_json=False)
    assert {"[0]", "[1]", "[2]"} <= set(re.findall(r"^\[\d\]", out, re.MULTILINE))


def test_a_chat_template_that_fails(run, tmp_path, without_generation):
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    code, _, err = run("--chat", model=tmp_path)
    assert code == 2
    assert "chat template failed" in err


def test_a_limit_beyond_the_context_reserves_no_more_than_the_context(run):
    code, lines, err = run(prompts=["x" * CONTEXT], tokens=10**10)
    assert code == 0
    assert len(lines[0]["tokens"]) == 1  # one past the context, which is computed completely
    assert f"would reserve {CONTEXT // 16}," in err


@pytest.mark.parametrize(
    ("arguments", "prompts", "message"),
    [
        ([], [], r"There is no prompt; write it after the model"),
        ([], ["a", ""], r"A prompt is empty"),
        (["--prompt-file", "/nowhere.txt"], [], r"The prompt file /nowhere.txt cannot be read"),
        (["--shared-prefix", "/nowhere.txt"], PROMPTS, r"The shared prefix /nowhere.txt cannot be read"),
        (["--num-blocks", 3], PROMPTS, r"The prompts need 6 blocks of 16 tokens .* at least --num-blocks 7"),
        ([], ["x" * (CONTEXT + 1)], r"has 129 tokens; the model's context is 128"),
        (["--model", "/nowhere"], PROMPTS, r"There is no checkpoint at /nowhere"),
        (["--temperature", -1], PROMPTS, r"--temperature must be 0 or a positive number"),
        (["--temperature", "nan"], PROMPTS, r"--temperature must be 0 or a positive number"),
        (["--top-p", 0], PROMPTS, r"--top-p above 0"),
        (["--seed", 2**63], PROMPTS, r"--seed must be within 0 and"),
        (["--num-blocks", 10**9], PROMPTS, r"A pool of 1000000000 blocks .* needs \d+ GB"),
        ([], ["\udcff"], r"A prompt is not valid UTF-8"),
        (["--model", "x" * 300], PROMPTS, r"cannot be read as a checkpoint"),
        (["--cache-scale", "head"], PROMPTS, r"--cache-scale goes with --cache-dtype float8_e4m3fn"),
        (["--num-speculative-tokens", 2, "--stream"], PROMPTS, r"--num-speculative-tokens: leave out .* --stream"),
        (
            ["--cache-dtype", "int8", "--cache-scale", "head", "--tensor-parallel", 2],
            PROMPTS,
            r"--cache-scale head is calibrated on one device",
        ),
    ],
)
def test_refusals_are_one_sentence_and_exit_code_2(run, arguments, prompts, message):
    code, lines, err = run(*arguments, prompts=prompts)
    assert code == 2
    assert lines == []
    assert re.search(message, err)
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("option", [["--block-size", "0"], ["--max-new-tokens", "-1"], ["--dtype", "int8"]])
def test_bad_options_exit_with_2(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        generate.main([*option, "--prompt", "a"])
    assert "error" in capsys.readouterr().err
