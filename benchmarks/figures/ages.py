"""Writes how old each result file is into benchmarks/results/README.md: `python -m benchmarks.figures.ages`.

A file is as old as the number of commits that changed the code it measures since then. They are counted up to the last
commit that changed any such code, which the table names. To count takes the history of the repository.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.figures.cells import machine, table
from benchmarks.harness import RESULTS, ROOT

PAGE = RESULTS / "README.md"
KERNELS = ("jaxpaged/_attention", "pallas_kernels")
ALL = ("jaxpaged", "pallas_kernels")
MEASURED = {  # by how a file's name begins, without its folder; the first that fits
    "allocator": ("jaxpaged/_allocator",),
    "best_of": ("jaxpaged/_engine/sampling.py",),
    "cache_ops": ("jaxpaged/_cache", "pallas_kernels/copy_blocks"),
    "decode_step": ALL,
    "engine_server": (*ALL, "examples"),
    "engine": ALL,
    "generate": ("jaxpaged", "examples"),
    "gpu_tests": ALL,
    "groups": ("jaxpaged/_allocator",),
    "host_tier": ALL,
    "latent_forms": ("jaxpaged/_cache",),
    "perplexity": ("jaxpaged/_cache", "jaxpaged/_attention"),
    "read_order": ("benchmarks/harness.py",),
    "serve_soak": (*ALL, "examples"),
    "several_gpus": ALL,
    "text_drafts": (*ALL, "examples"),
    "trainer_logprobs": (*ALL, "examples"),
    "": KERNELS,
}


def find_code(path: Path) -> tuple[str, ...]:
    return next(code for begin, code in MEASURED.items() if path.stem.startswith(begin))


def git(*arguments: str) -> str | None:
    """What git says; None if it cannot, as without the history."""
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def has_history() -> bool:
    return git("rev-parse", "--is-shallow-repository") == "false" and git("cat-file", "-e", "HEAD") is not None


def find_commit(path: Path, content: dict[str, Any]) -> tuple[str, str]:
    """Which commit the file was measured at, and how the table says so."""
    recorded = (content["commit"] or "").removesuffix(" and changes")
    if recorded and git("merge-base", "--is-ancestor", recorded, "HEAD") is not None:
        return recorded, f"`{content['commit']}`"
    brought = git("log", "--diff-filter=A", "-1", "--format=%h", "--abbrev=7", "--", str(path.relative_to(ROOT)))
    if not brought:
        raise SystemExit(f"{path} is in no commit yet: commit it first, then count.")
    return brought, f"before `{brought}`"


def row(path: Path, counted_at: str) -> list[str]:
    content = json.loads(path.read_text())
    commit, text = find_commit(path, content)
    code = find_code(path)
    since = git("rev-list", "--count", f"{commit}..{counted_at}", "--", *code)
    name = f"`{path.relative_to(RESULTS)}`"
    return [name, machine(content), text, content["date"], ", ".join(f"`{each}`" for each in code), since or ""]


def ages(counted_at: str) -> str:
    rows = [row(path, counted_at) for path in sorted(RESULTS.rglob("*.json"))]
    heads = "file", "machine", "commit", "date", "code", "commits since"
    return f"Counted at `{counted_at}`.\n\n{table(heads, rows)}"


def filled(text: str, counted_at: str) -> str:
    return re.sub(
        r"(<!-- ages -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{ages(counted_at)}\n{found[2]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    every = {path for code in MEASURED.values() for path in code}
    counted_at = git("log", "-1", "--format=%h", "--abbrev=7", "--", *sorted(every))
    if not counted_at or not has_history():
        raise SystemExit("there is no whole history here to count commits in; run it in a full clone.")
    PAGE.write_text(filled(PAGE.read_text(), counted_at))


if __name__ == "__main__":
    main()
