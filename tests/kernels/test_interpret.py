"""What interpret mode needs of the process."""

import jax
import pytest

from tests.kernels.interpret import provide_threads


def test_too_late_for_threads(monkeypatch):
    jax.devices()
    monkeypatch.delenv("NPROC")
    with pytest.raises(RuntimeError, match="needs NPROC=32 in the environment, set before JAX starts"):
        provide_threads()
