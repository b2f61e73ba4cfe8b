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


def imported_names(source: str) -> set[str]:
    """Dotted names of all that a source imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported(source: str) -> set[str]:
    """Top-level packages that a source imports."""
    return {name.split(".")[0] for name in imported_names(source)} - sys.stdlib_module_names


def imported_tests(source: str) -> set[str]:
    """Test modules that a source imports."""
    return {part for name in imported_names(source) for part in name.split(".")[:3] if part.startswith("test_")}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_downwards(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        allowed = ALLOWED[package] | {FILES_OF_EXTRAS.get(name, "")}
        assert imported(file.read_text()) <= allowed, name


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_offers_its_types(package):
    assert (ROOT / package / "py.typed").exists()


def test_the_walk_sees_an_import_inside_a_function():
    assert imported("def f():\n    from flax.core import x\n    import os, jaxpaged.nnx") == {"flax", "jaxpaged"}


@pytest.mark.parametrize("package", ["jaxpaged", "pallas_kernels"])
def test_import_does_not_import_flax(package):
    code = f"import sys, {package}; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_test_module_is_imported():
    """What several tests need stands in a module of its own."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert {file.name: imported_tests(file.read_text()) for file in files if imported_tests(file.read_text())} == {}


@pytest.mark.parametrize(
    "line", ["from tests.test_a import b", "from tests.kernels import test_a", "import tests.test_a"]
)
def test_the_walk_sees_the_import_of_a_test_module(line):
    assert imported_tests(line) == {"test_a"}
