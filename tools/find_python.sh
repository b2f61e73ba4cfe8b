#!/bin/sh
# Prints the path of a Python >= 3.12 that can make a virtual environment: one on PATH, one under
# ~/.pyenv/versions, or one that uv has or can fetch, in that order.
set -u

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

for name in python3 python3.12 python3.13 python3.14 python; do
    # A pyenv shim stands on PATH for every version, also for those that are not switched on: try it.
    if command -v "$name" >/dev/null 2>&1 && usable "$name"; then
        command -v "$name"
        exit 0
    fi
done

# The oldest that will do: it is the surest to have wheels of everything.
for python in $(printf '%s\n' "${HOME:-/nonexistent}"/.pyenv/versions/3.*[0-9]/bin/python | sort -V); do
    if [ -x "$python" ] && usable "$python"; then
        echo "$python"
        exit 0
    fi
done

if command -v uv >/dev/null 2>&1; then
    python=$(uv python find --no-project '>=3.12' 2>/dev/null) ||
        { uv python install 3.12 >&2 && python=$(uv python find --no-project 3.12); }
    if [ -n "${python:-}" ] && usable "$python"; then
        echo "$python"
        exit 0
    fi
fi

echo "jaxpaged needs Python 3.12 or newer, with its venv module, and found none on PATH, under ~/.pyenv/versions," \
    "or through uv. Install one (for example: uv python install 3.12) and run make again." >&2
exit 1
