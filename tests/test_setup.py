"""The shell scripts behind make: which Python they find, and which extra for which driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def machine(tmp_path):
    """An empty machine: a PATH with the shell's own tools alone, an empty home, and programs to be put on it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sort", "head", "printf", "dirname"):
        (programs / name).symlink_to(shutil.which(name))

    def add(where: str, script: str) -> Path:
        path = tmp_path / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def run(script: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(programs), "HOME": str(tmp_path / "home")}
        return subprocess.run([TOOLS / script], env=environment, capture_output=True, text=True, check=False)

    return add, run


REAL = f'exec {sys.executable} "$@"'
TOO_OLD = "exit 1"  # what the version check exits with


def test_a_python_on_path_comes_first(machine):
    add, run = machine
    add("home/.pyenv/versions/3.12.1/bin/python", REAL)
    found = add("bin/python3", REAL)
    assert run("find_python.sh").stdout.strip() == str(found)


def test_an_old_python_on_path_is_passed_over_for_the_oldest_of_pyenv_that_will_do(machine):
    add, run = machine
    add("bin/python3", TOO_OLD)
    add("home/.pyenv/versions/3.9.18/bin/python", TOO_OLD)
    add("home/.pyenv/versions/3.13.0/bin/python", REAL)
    found = add("home/.pyenv/versions/3.12.1/bin/python", REAL)
    assert run("find_python.sh").stdout.strip() == str(found)


def test_uv_comes_last(machine):
    add, run = machine
    python = add("somewhere/python", REAL)
    add("bin/uv", f'[ "$1 $2" = "python find" ] && echo {python}')
    assert run("find_python.sh").stdout.strip() == str(python)


def test_no_python_is_one_clear_message(machine):
    _, run = machine
    done = run("find_python.sh")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "jaxpaged needs Python 3.12 or newer" in done.stderr


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        ("echo 580.159.04", "cuda13"),
        ("echo 610.1; echo 610.1", "cuda13"),
        ("echo 550.54.15", "cuda12"),
        ("echo 470.82", ""),
        ("echo No devices were found; exit 6", ""),
    ],
)
def test_the_extra_follows_the_driver(machine, answer, extra):
    add, run = machine
    add("bin/nvidia-smi", answer)
    assert run("find_extra.sh").stdout.strip() == extra


def test_no_driver_no_extra(machine):
    _, run = machine
    assert run("find_extra.sh").stdout == ""
    assert os.access(TOOLS / "setup.sh", os.X_OK)
