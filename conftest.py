"""Doctests of public names are collected once, from the files that define them."""

import doctest
import inspect
import re
from types import ModuleType
from typing import Any

PUBLIC = "jaxpaged", "jaxpaged.debug", "jaxpaged.grammar", "jaxpaged.ops", "jaxpaged.scheduling"
from_module = doctest.DocTestFinder._from_module


def is_defined_in(finder: doctest.DocTestFinder, module: ModuleType, value: Any) -> bool:
    if getattr(value, "__module__", None) not in PUBLIC:
        return from_module(finder, module, value)
    # `jaxpaged/_publish.py` made its `__module__` the public module, where doctest would miss the methods.
    return re.search(rf"^(?:class|def) {value.__name__}\b", inspect.getsource(module), re.MULTILINE) is not None


doctest.DocTestFinder._from_module = is_defined_in


def pytest_collection() -> None:
    import jaxpaged  # noqa: F401  # before pytest imports one of its files alone, which JAX would know twice
