"""Imports never run upwards or in cycles. Only `nnx.py` and `linen.py` import flax, and one file imports matplotlib.

One file of jaxpaged queries JAX for the hardware.
"""

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "pallas_kernels": {"jax", "jaxlib", "numpy", "pallas_kernels"},
    "jaxpaged": {"jax", "jaxlib", "numpy", "pallas_kernels", "jaxpaged"},
}
EXTRAS = {"jaxpaged.nnx": "flax", "jaxpaged.linen": "flax", "jaxpaged._allocator.plot": "matplotlib"}


def imported_names(source: str) -> set[str]:
    """Dotted names of all imports in a source, at any depth."""
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


def read_sources(package: str) -> dict[str, str]:
    """The sources of a package's modules, by dotted name."""
    files = {file.relative_to(ROOT).with_suffix(""): file for file in sorted((ROOT / package).rglob("*.py"))}
    return {".".join(path.parts).removesuffix(".__init__"): file.read_text() for path, file in files.items()}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_downwards(package):
    assert (ROOT / package / "py.typed").exists()
    for name, source in read_sources(package).items():
        assert imported(source) <= ALLOWED[package] | {EXTRAS.get(name, "")}, name


def test_the_walk_finds_an_import_inside_a_function():
    assert imported("def f():\n    from flax.core import x\n    import os, jaxpaged.nnx") == {"flax", "jaxpaged"}


def test_a_kernel_imports_no_other_kernel():
    kernels = {folder.name for folder in (ROOT / "pallas_kernels").iterdir() if (folder / "kernel.py").exists()}
    assert kernels == {"decode", "latent", "prefill", "copy_blocks"}
    for name, source in read_sources("pallas_kernels").items():
        wing = name.split(".")[1:2]
        theirs = {other.split(".")[1] for other in imported_names(source) if other.startswith("pallas_kernels.")}
        assert theirs & kernels <= set(wing), name


def test_traced_code_of_the_engine_imports_no_host_code():
    for name, source in read_sources("jaxpaged/_slice").items():
        assert not any(other.startswith("jaxpaged._engine") for other in imported_names(source)), name


def test_xla_calls_import_neither_mosaic_nor_flax():
    script = """
        import sys
        import jax.numpy as jnp, jaxpaged
        cache = jaxpaged.KVCache.create(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=8)
        tables, lengths = jnp.array([[1]]), jnp.array([3])
        jaxpaged.paged_attention(jnp.ones((1, 1, 8)), cache.k, cache.v, tables, lengths, implementation="xla")
        assert {"flax", "jax.experimental.pallas.mosaic_gpu"}.isdisjoint(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def check_no_cycle(sources: dict[str, str]) -> None:
    """Raises `CycleError` if imports form a cycle, at module level or inside functions."""

    def find_module(name: str) -> str:  # `jaxpaged._cache.write.write_kv` is in `jaxpaged._cache.write`
        return name if name in sources else name.rpartition(".")[0]

    imports = {module: map(find_module, imported_names(source)) for module, source in sources.items()}
    graphlib.TopologicalSorter(imports).prepare()


def queries_devices(source: str) -> bool:
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return not attributes.isdisjoint({"devices", "local_devices", "default_backend", "core_count", "device_kind"})


def test_imports_have_no_cycle():
    check_no_cycle(read_sources("jaxpaged"))


@pytest.mark.parametrize("a", ["from jaxpaged import b", "def f():\n    import jaxpaged.b"])
def test_the_walk_finds_a_cycle(a):
    sources = {"jaxpaged": "", "jaxpaged.a": a, "jaxpaged.b": "", "jaxpaged.c": "from jaxpaged.a import y"}
    check_no_cycle(sources)
    with pytest.raises(graphlib.CycleError):
        check_no_cycle(sources | {"jaxpaged.b": "from jaxpaged.c import z"})


def test_one_file_queries_the_hardware():
    asking = {name for name, source in read_sources("jaxpaged").items() if queries_devices(source)}
    assert asking == {"jaxpaged._device"}


def test_no_test_module_is_imported():
    """Code shared by tests is in a separate module."""
    found = {name: imported_tests(source) for name, source in read_sources("tests").items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_the_walk_finds_the_import_of_a_test_module():
    assert imported_tests("from tests.test_a import b\nfrom tests.kernels import test_c") == {"test_a", "test_c"}
