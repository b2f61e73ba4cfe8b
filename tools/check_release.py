"""Checks dist/, the sdist and the wheel of a release: `make release` builds them and runs this program.

The wheel: metadata, size and top-level packages. Then, for each Python, an empty environment with the wheel alone: the
README's snippets in an empty folder, `python -m jaxpaged.selftest`, and mypy and pyright on a user's file. Last, an
example and tests of the sdist without its packages, so that the wheel is imported. The whole suite needs too long for
each Python: by default only the quick tests of the allocator and the cache run. --tests names others.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {"jaxpaged", "pallas_kernels"}
MAX_BYTES = 1_000_000
TESTS = ["tests/allocator", "tests/cache"]

# Two mistakes: each checker reports an ignored error that it does not find, as it would if jaxpaged had no types.
USERS_FILE = """\
# pyright: reportUnnecessaryTypeIgnoreComment=true
import jax
import jax.numpy as jnp
from jaxpaged import AttentionStep, BlockAllocator, KVCache, SamplingParams

cache = KVCache.create(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
allocator = BlockAllocator.create(num_blocks=64, block_size=16, num_seqs=4, max_blocks_per_seq=8)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVCache, jax.Array]:
    after, slots, _ = allocator.append(jnp.ones(4, jnp.int32))
    step = AttentionStep.create(after, slots)
    return step.attend(q, k, v, cache)


params = SamplingParams(max_tokens=8, stop_token_ids=(2,))
wrong: int = allocator.lengths  # type: ignore[assignment]
SamplingParams(max_tokens="eight")  # type: ignore[arg-type]
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=cwd, env=environment)


def check_wheel(wheel: Path) -> None:
    if (size := wheel.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{wheel} has {size} bytes, more than {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    if (packages := {name for name in folders if not name.endswith(".dist-info")}) != PACKAGES:
        raise SystemExit(f"{wheel} has {sorted(packages)} at its top, not {sorted(PACKAGES)}")


def read_snippets(sdist: Path) -> list[str]:
    """The README's Python snippets, except those for the root of a checkout."""
    snippets = re.findall(r"```python\n(.*?)```", (sdist / "README.md").read_text(), re.DOTALL)
    anywhere = [snippet for snippet in snippets if '"examples"' not in snippet]
    if not anywhere:
        raise SystemExit(f"{sdist}/README.md has no snippet that runs without a checkout")
    return anywhere


def check_installed(interpreter: str, wheel: Path, sdist: Path, folder: Path, tests: list[str]) -> None:
    """Checks the wheel in an environment of its own, in a new folder. `sdist`: the unpacked files without packages."""
    (empty := folder / "empty").mkdir(parents=True)
    run(interpreter, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, wheel)
    for snippet in read_snippets(sdist):
        run(python, "-W", "error", "-c", snippet, cwd=empty)
    run(python, "-m", "jaxpaged.selftest", cwd=empty)

    (folder / "user.py").write_text(USERS_FILE)
    checkers = [sys.executable, "-m"]
    run(*checkers, "mypy", "--strict", "--python-executable", python, "user.py", cwd=folder)
    run(*checkers, "pyright", "--pythonpath", python, "user.py", cwd=folder)

    run(python, "examples/decode_loop.py", cwd=sdist)
    run(*pip, "--group", f"{sdist}/pyproject.toml:dev")
    run(python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *tests, cwd=sdist)


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--pythons", nargs="+", default=["python3.12", "python3.13"], help="names on PATH, or paths")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of the sdist")
    arguments = parser.parse_args()
    pythons = {name: shutil.which(name) for name in arguments.pythons}
    if missing := [name for name, path in pythons.items() if path is None]:
        raise SystemExit(f"No {' or '.join(missing)} on PATH: name interpreters, as in make release PYTHONS='a/python'")

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
        for i, interpreter in enumerate(filter(None, pythons.values())):
            check_installed(interpreter, wheel, files, Path(name) / f"python{i}", arguments.tests)
    print(f"{wheel.name} and {sdist.name} are right with {' and '.join(pythons)}")


if __name__ == "__main__":
    main()
