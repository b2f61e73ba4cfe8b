"""Imports never run upwards: pallas_kernels, jaxpaged, examples. Flax in the two module files, matplotlib in one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "pallas_kernels": {"jax", "jaxlib", "numpy", "pallas_kernels"},
    "jaxpaged": {"jax", "jaxlib", "numpy", "pallas_kernels", "jaxpaged"},
}
FILES_OF_EXTRAS = {"jaxpaged/nnx.py": "flax", "jaxpaged/linen.py": "flax", "jaxpaged/_allocator/plot.py": "matplotlib"}


def imported(source: str) -> set[str]:
    """Top-level packages that a source imports, wherever in it."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            packages.add((node.module or "").split(".")[0])
    return packages - sys.stdlib_module_names


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_downwards(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        allowed = ALLOWED[package] | {FILES_OF_EXTRAS.get(name, "")}
        assert imported(file.read_text()) <= allowed, name


def test_the_walk_sees_an_import_inside_a_function():
    assert imported("def f():\n    from flax.core import x\n    import os, jaxpaged.nnx") == {"flax", "jaxpaged"}


@pytest.mark.parametrize("package", ["jaxpaged", "pallas_kernels"])
def test_import_does_not_import_flax(package):
    code = f"import sys, {package}; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
