from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _few_optimisations() -> Iterator[None]:
    """In interpret mode XLA for the CPU compiles what carries a kernel, to run it once or twice. Without optimisation
    that takes a quarter less time."""
    if jax.default_backend() != "cpu":
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
