"""Fixtures of the tests of the engine."""

import pytest

from tests.toy_model import ENGINES, assert_idle


@pytest.fixture
def idle_engines():
    """Asserts that no shared engine has a request or a block left after the test."""
    yield
    for engine in ENGINES:
        assert_idle(engine)
