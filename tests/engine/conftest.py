"""Fixtures of the tests of the engine."""

import pytest

from tests.toy_model import ENGINES, assert_idle, drop_cached


@pytest.fixture(scope="module", autouse=True)
def _drop_cached():
    yield
    drop_cached()


@pytest.fixture
def idle_engines():
    """Asserts that no shared engine has a request or a block left after the test."""
    yield
    for engine in ENGINES:
        assert_idle(engine)
