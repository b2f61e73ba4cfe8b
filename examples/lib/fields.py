"""Reads fields of a JSON object, and refuses values of a wrong type or out of range."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUIRED = object()
# Upper limits of a model's sizes, beyond any real model but small enough to compute shapes with.
MOST_TOKENS, MOST_FEATURES, MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 2**24, 2**20, 2**12, 2**12, 2**10
THETAS = 1, 1e30
FACTORS = 1e-3, 1e9


class MissingFieldError(KeyError):
    """A required field is missing. `path` is its name after the names of the objects around it."""

    def __init__(self, name: str, path: str):
        super().__init__(name)
        self.path = path


class FieldError(ValueError):
    """A field is wrong: the message is one clause for the user. `path` is as in `MissingFieldError`."""

    def __init__(self, message: str, path: str):
        super().__init__(message)
        self.path = path


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are read one by one. A null field counts as missing.

    Reading raises `MissingFieldError`, a `KeyError`, or `FieldError`, a `ValueError`.

    Attributes:
        values: the object.
        within: prefix of the paths of its fields, such as "messages[0].".
        read: names of the fields read so far.
    """

    values: dict[str, Any]
    within: str = ""
    read: set[str] = dataclasses.field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise FieldError(f"expected a JSON object; got {short(self.values)}", self.within.rstrip("."))

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        if value is None and default is REQUIRED:
            raise MissingFieldError(name, self.within + name)
        return default if value is None else value

    def whole(self, name: str, least: int, most: int, default: Any = REQUIRED) -> int:
        value = self.get(name, default)
        if not is_whole(value) or not least <= value <= most:
            raise self.error(name, f"must be a whole number from {least} to {most}; got {short(value)}")
        return value

    def real(self, name: str, least: float, most: float, default: Any = REQUIRED) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:  # nor NaN
            raise self.error(name, f"must be a number from {least:g} to {most:g}; got {short(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false; got {short(value)}")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a text; got {short(value)}")
        return value

    def items(self, name: str, is_item: Callable[[Any], bool], clause: str, most: float = math.inf) -> list[Any]:
        """A list of at most `most` items, empty by default. A single string counts as a list of one."""
        value = self.get(name, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > most or not all(map(is_item, items)):
            raise self.error(name, clause)
        return items

    def error(self, name: str, clause: str) -> FieldError:
        """The error for a wrong field. `clause` continues the sentence after the field's name."""
        return FieldError(f"{name} {clause}", self.within + name)


def read_json(file: Path) -> Fields:
    try:
        return Fields(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}") from error


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
