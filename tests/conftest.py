import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Set before NumPy starts, whose threads spin while they wait. Without them 14 workers on 16 cores need a quarter of
# the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.memory_maps import MemoryMaps

# Implicit changes of dtype or rank are errors in tests, and so are leaked tracers.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for tests of several devices; other tests use the first
if jax.__version_info__ < (0, 12):  # its compiler crashes on programs with many arrays on a mesh
    jax.config.update("jax_use_shardy_partitioner", False)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
if jax.default_backend() == "gpu":  # no TF32 in the float32 models that tests compare
    jax.config.update("jax_default_matmul_precision", "highest")
else:  # most programs run once or twice: skipping LLVM's passes saves a third. XLA's passes do not change
    jax.config.update("jax_disable_most_optimizations", True)
    # A program is compiled once for all workers, modules and runs. `make clean` deletes the cache.
    if not jax.config.jax_compilation_cache_dir:  # JAX_COMPILATION_CACHE_DIR: shared by several checkouts
        jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / "build" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for name in (  # for the programs that tests start
        "jax_compilation_cache_dir",
        "jax_disable_most_optimizations",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_use_shardy_partitioner",
    ):
        os.environ[name.upper()] = str(jax.config.values[name])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(MemoryMaps(limit=40_000))  # Linux allows 65,530
    if jax.default_backend() == "gpu":  # many models in tests are float32, which no kernel supports
        config.addinivalue_line("filterwarnings", "ignore:XLA computes this call")


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects stay alive: exclude them from each collection
    gc.set_threshold(50_000)  # tracing makes many tuples and few cycles: collecting cost 4 to 9% of a test's time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if all(device.platform != "gpu" for device in jax.devices()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(scope="module")
def one_kind() -> Iterator[None]:
    from tests.toy_model import one_kind_of_steps

    with one_kind_of_steps():
        yield


@pytest.fixture
def optimised() -> Iterator[None]:
    """Compiles with optimisation: a real model runs longer than it compiles, unlike other tests."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
