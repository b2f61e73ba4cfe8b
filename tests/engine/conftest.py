"""Fixtures of the tests of the engine."""

import pytest

from tests.toy_model import ENGINES, assert_idle


@pytest.fixture
def idle_engines():
    """After the test, no engine that tests share has a request or a block left."""
    yield
    for engine in ENGINES:
        assert_idle(engine)
