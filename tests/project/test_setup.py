"""The scripts of make: the choice of Python and extra, complete set-up, and detection of broken links."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def machine(tmp_path):
    """An empty machine: a PATH with only the shell's own tools, an empty home, and a function that adds programs."""
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


PYENV = "home/.pyenv/versions"


@pytest.mark.parametrize(
    ("programs", "found"),
    [
        ({"bin/python3": REAL, f"{PYENV}/3.12.1/bin/python": REAL}, "bin/python3"),
        (
            {"bin/python3": TOO_OLD}
            | {f"{PYENV}/{version}/bin/python": REAL for version in ("3.13.0", "3.12.1")}
            | {f"{PYENV}/3.9.18/bin/python": TOO_OLD},
            f"{PYENV}/3.12.1/bin/python",
        ),
        ({"home/python": REAL, "bin/uv": '[ "$1 $2" = "python find" ] && echo $HOME/python'}, "home/python"),
    ],
    ids=["on the path", "the oldest of pyenv that will do", "by uv"],
)
def test_which_python_is_found(machine, tmp_path, programs, found):
    add, run = machine
    for where, script in programs.items():
        add(where, script)
    assert run("find_python.sh").stdout.strip() == str(tmp_path / found)


def test_a_missing_python_is_one_clear_message(machine):
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
        (None, ""),
    ],
)
def test_the_extra_follows_the_driver(machine, answer, extra):
    add, run = machine
    if answer is not None:
        add("bin/nvidia-smi", answer)
    assert run("find_extra.sh").stdout.strip() == extra


# A fake Python that creates virtual environments of itself, pretends to install, and logs its calls.
FAKE_PYTHON = f"""
case "$1 $2" in
    "-m venv") echo venv >>"$CALLS"; mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"
               ${{VENV_ENDS_HERE:+exit 130}}; touch "$3/pip" ;;
    "-m pip") [ -e "${{0%/bin/python}}/pip" ] || exit 1
              case "$*" in *--version*) ;; *) echo pip >>"$CALLS" ;; esac ;;
    *) exec {sys.executable} "$@" ;;
esac"""


@pytest.fixture
def checkout(tmp_path, machine):
    """A clone under a path with a space, a function that runs its make setup, and one that lists the calls."""
    add, _ = machine
    for name in ("find", "sed", "touch", "rm", "mkdir", "cp", "make"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    add("bin/python3", FAKE_PYTHON)
    folder = tmp_path / "a clone"
    shutil.copytree(TOOLS, folder / "tools")
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(TOOLS.parent / name, folder)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "CALLS": str(tmp_path / "calls")}

    def setup(**more: str) -> subprocess.CompletedProcess:
        command = ["make", "setup", "VENV=some venv"]
        return subprocess.run(command, cwd=folder, env=environment | more, capture_output=True, text=True, check=False)

    return folder / "some venv", setup, lambda: (tmp_path / "calls").read_text().split()


def test_a_second_make_has_nothing_to_do_and_a_newer_lock_is_installed(checkout):
    venv, setup, calls = checkout
    assert setup().returncode == 0
    first = calls()
    assert first == ["venv", "pip", "pip", "pip"]
    assert setup().returncode == 0
    assert calls() == first
    os.utime(venv / ".installed", (0, 0))
    assert setup().returncode == 0
    assert calls() == [*first, "pip", "pip", "pip"]


def test_an_interrupted_make_is_repeated(checkout):
    venv, setup, calls = checkout
    assert setup(VENV_ENDS_HERE="yes").returncode != 0
    assert setup().returncode == 0
    assert calls().count("venv") == 2
    assert (venv / ".installed").exists()


def test_a_folder_that_is_no_virtual_environment_is_not_touched(checkout):
    venv, setup, _ = checkout
    venv.mkdir()
    (venv / "thesis.txt").touch()
    done = setup()
    assert done.returncode == 2
    assert "is no virtual environment" in done.stderr
    assert (venv / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("page.html#here", None),
        ("page.html?q=1#two%20words", None),
        ("#top", None),
        ("folder/", None),
        ("/page.html", None),
        ("https://elsewhere.invalid/page.html", None),
        ("no_page.html", "no such file"),
        ("page.html#nowhere", "no such anchor"),
        ("#nowhere", "no such anchor"),
        ("../outside.html", "no such file"),
    ],
)
def test_a_broken_link_in_the_site_is_detected(tmp_path, link, broken):
    site = tmp_path / "site"
    (site / "folder").mkdir(parents=True)
    (tmp_path / "outside.html").touch()
    (site / "folder" / "index.html").touch()
    (site / "page.html").write_text('<h1 id="here">Here</h1><a name="two words"></a>')
    (site / "index.html").write_text(f'<p id="top"><a href="{link}">a link</a><img src="page.html"></p>')
    done = subprocess.run([sys.executable, TOOLS / "check_site.py", site], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (int(broken is not None), "")
    assert done.stdout.startswith(f"index.html: {link}: {broken}\n" if broken else "0 broken links")
