import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before NumPy starts: its threads spin while they wait. 14 workers on 16 cores take a quarter of the time without them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.memory_maps import MemoryMaps

# A dtype or a rank that changes by itself is a defect here; so is a leaked tracer.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # for tests/test_several_devices.py; the others use the first

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
if jax.default_backend() == "gpu":  # float32 is float32 in the models that tests compare, not TF32
    jax.config.update("jax_default_matmul_precision", "highest")
else:  # most programs run once or twice; without LLVM's passes, a third less time. XLA's own are the same
    jax.config.update("jax_disable_most_optimizations", True)
    # A program is compiled once, whichever worker, module or run needs it. `make clean` forgets.
    if not jax.config.jax_compilation_cache_dir:  # JAX_COMPILATION_CACHE_DIR: one for several checkouts
        jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / "build" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for name in (  # of the programs that tests start
        "jax_compilation_cache_dir",
        "jax_disable_most_optimizations",
        "jax_persistent_cache_min_compile_time_secs",
    ):
        os.environ[name.upper()] = str(jax.config.values[name])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(MemoryMaps(limit=40_000))  # of the 65,530 that Linux allows
    if jax.default_backend() == "gpu":  # many models here are float32, which no kernel takes
        config.addinivalue_line("filterwarnings", "ignore:XLA computes this call")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: nothing to be looked at each time
    gc.set_threshold(50_000)  # tracing makes many tuples, and few cycles: 4 to 9% of a test's time went here


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
    """The work of a real model outweighs its compilation, unlike that of the other tests."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
