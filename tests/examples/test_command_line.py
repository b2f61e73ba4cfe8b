"""The examples on a command line: closed pipes, full disks, Ctrl-C, wrong tokens."""

import argparse
import dataclasses
import functools
import io
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lib import command_line, generation
from lib.checkpoint import Checkpoint, CheckpointError
from lib.sampling import Sampling, sample
from lib.start import PoolError, start

EXAMPLES = Path(__file__).parents[2] / "examples"


class Ended(BaseException):
    pass


@pytest.fixture
def end(monkeypatch):
    """Runs a script's main with the given stdout and stderr. Returns the exit code."""

    def leave(code: int):
        raise Ended(code)

    monkeypatch.setattr(command_line, "end_on_interrupt", lambda: None)
    monkeypatch.setattr(command_line.os, "_exit", leave)
    monkeypatch.setattr(sys, "exit", leave)

    def call(main, stdout=..., stderr=...):
        with monkeypatch.context() as patched:
            for name, stream in (("stdout", stdout), ("stderr", stderr)):
                patched.setattr(sys, name, io.TextIOWrapper(io.BytesIO()) if stream is ... else stream)
            with pytest.raises(Ended) as ended:
                command_line.run(main)
            sys.stderr.seek(0)
            return ended.value.args[0], sys.stderr.read()

    return call


class Broken(io.BytesIO):
    def __init__(self, error: OSError):
        super().__init__()
        self.error = error

    def write(self, _) -> int:
        raise self.error

    def close(self) -> None:  # what is still in a buffer before it stays there
        pass


@pytest.fixture
def compilation_cache(monkeypatch):
    """The folder for compiled programs after `keep_compiled_programs` with these environment variables."""
    before = jax.config.jax_compilation_cache_dir

    def folder(**variables):
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        jax.config.update("jax_compilation_cache_dir", None)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        command_line.keep_compiled_programs()
        return jax.config.jax_compilation_cache_dir

    yield folder
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_kept_in_the_users_cache(compilation_cache, tmp_path):
    assert compilation_cache(XDG_CACHE_HOME=tmp_path) == str(tmp_path / "jaxpaged" / "compiled")
    assert compilation_cache(XDG_CACHE_HOME="", HOME=tmp_path) == str(tmp_path / ".cache" / "jaxpaged" / "compiled")
    assert compilation_cache(XDG_CACHE_HOME=tmp_path, JAX_COMPILATION_CACHE_DIR="") is None
    assert compilation_cache(XDG_CACHE_HOME="/proc/nowhere") is None


def say_hello() -> int:
    print("hello")
    return 3


def stop() -> None:
    raise SystemExit(2)


def test_the_exit_code_is_the_return_value_of_main(end):
    assert end(say_hello)[0] == 3
    assert end(lambda: None)[0] is None
    assert end(stop)[0] == 2
    assert end(say_hello, None)[0] == 3  # closed


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 2, "The results cannot be written: No space left on device.\n"),
    ],
)
def test_closed_pipes_and_full_disks(end, error, code, message):
    ended, err = end(say_hello, io.TextIOWrapper(Broken(error)))
    assert ended == code
    assert err.endswith(message)
    assert len(err.splitlines()) == bool(message)
    broken = io.TextIOWrapper(Broken(error), write_through=True)
    assert end(say_hello, io.TextIOWrapper(Broken(error)), broken)[0] == code


def test_an_ascii_stream_gets_the_whole_output(end):
    written = io.BytesIO()
    assert end(lambda: print("caf\u00e9 \udcff"), io.TextIOWrapper(written, encoding="ascii"))[0] is None
    assert written.getvalue() == b"caf\\xe9 \\udcff\n"


@pytest.mark.parametrize("error", [command_line.RequestError, CheckpointError, PoolError])
def test_refusals_are_one_sentence_and_code_2(end, error):
    def refuse() -> None:
        raise error("It cannot be.")

    code, err = end(refuse)
    assert (code, err.endswith(": It cannot be.\n")) == (2, True)


def test_a_missing_backend_is_one_sentence(monkeypatch, capsys):
    def start():
        raise RuntimeError("Unable to initialize backend 'nonsense'")

    monkeypatch.setattr(jax, "default_backend", start)
    assert command_line.exit_code(command_line.dtype_name, "float32") == 2
    assert "JAX does not start: Unable to initialize backend 'nonsense'." in capsys.readouterr().err


def test_interrupting_one_long_call_ends_it_at_once():
    script = (
        "import signal, sys; sys.path.insert(0, sys.argv[1]); import jax; from lib import command_line\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it\n"
        "loop = jax.jit(lambda: jax.lax.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 7, 0)).lower().compile()\n"
        "command_line.run(lambda: print('running', flush=True) or jax.block_until_ready(loop()))\n"
    )
    command = [sys.executable, "-c", script, EXAMPLES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.split() == ["-c:", "Interrupted."]


def test_tokens_beyond_the_vocabulary_are_refused(tiny):
    config = dataclasses.replace(tiny.config, vocab_size=70)
    checkpoint = Checkpoint(config, tiny.tokenizer, {})
    with pytest.raises(CheckpointError, match=r"gives token \d+; the model knows 70 tokens"):
        command_line.encode_prompts(["hello"], checkpoint, argparse.Namespace(chat=False))


def test_sampling_comes_from_the_command_line_then_the_model_then_the_script(tiny, capsys):
    parser = command_line.sampling_arguments(temperature=0.8)
    checkpoint = Checkpoint(tiny.config, tiny.tokenizer, {}, {"temperature": 0.6, "top_k": 20})

    def read(*arguments):
        return command_line.read_sampling(parser.parse_args(arguments), checkpoint)

    assert read() == Sampling(0.6, 20, 1.0)
    assert capsys.readouterr().err == (
        "Default sampling of the model: temperature 0.6, top_k 20; --generation-config none ignores it.\n"
    )
    assert read("--temperature=0", "--top-p=0.5") == Sampling(0.0, 20, 0.5)
    assert read("--top-k=3") == Sampling(0.6, 3, 1.0)
    capsys.readouterr()
    assert read("--generation-config=none") == Sampling(0.8, None, 1.0)
    assert capsys.readouterr().err == ""
    with pytest.raises(command_line.RequestError, match="--temperature must be 0 or"):
        read("--temperature=nan")


@pytest.mark.parametrize("top_p", [1e-46, 1e-30, 1e-6])
def test_the_most_likely_token_is_always_among_the_likely(top_p):
    logits = jnp.asarray([[0.0, 1.0, 5.0, 2.0]], jnp.float32)
    assert sample(logits, jax.random.split(jax.random.key(0), 1), Sampling(temperature=9.0, top_p=top_p)) == 2


def test_a_step_has_the_same_dtypes_under_x64(tiny):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        empty = functools.partial(start, max_new_tokens=4, block_size=16, num_blocks=None, seed=0)
        state = empty(tiny.config, [[1, 2]], dtype="float32")
        more = functools.partial(generation.decode, eos_ids=(), sampling=Sampling())
        after = jax.eval_shape(more, *nnx.split(tiny.model), state, jnp.int32(1))
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
