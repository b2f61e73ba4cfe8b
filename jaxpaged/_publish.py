"""Public modules, which export names from private files."""

import typing
from typing import Any


def publish(module: dict[str, Any]) -> None:
    """Sets `__module__` of everything in `__all__` of a module, for `help`, errors and pickles.

    Args:
        module: the module's `globals()`.
    """
    for value in map(module.__getitem__, module["__all__"]):
        if isinstance(value, type):  # types first: their names are looked up in the defining module
            value.__annotations__ = typing.get_type_hints(value)
        value.__module__ = module["__name__"]
