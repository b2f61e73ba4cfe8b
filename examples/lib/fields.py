"""The fields of a JSON object, each read with its type and range; anything else is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

REQUIRED = object()
# Upper limits of a model's sizes. All are beyond any real model, and small enough to calculate shapes with.
MOST_TOKENS, MOST_FEATURES, MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 2**24, 2**20, 2**12, 2**12, 2**10
THETAS = 1, 1e30
FACTORS = 1e-3, 1e9


@dataclasses.dataclass(frozen=True)
class Fields:
    """A field that is null is missing. Raises `KeyError` if a required field is missing, and `ValueError`, with one
    clause for the user, if a field is wrong."""

    values: dict[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise ValueError(f"expected a JSON object; got {_short(self.values)}")

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(name)
        if value is None and default is REQUIRED:
            raise KeyError(name)
        return default if value is None else value

    def whole(self, name: str, least: int, most: int, default: Any = REQUIRED) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}; got {_short(value)}")
        return value

    def real(self, name: str, least: float, most: float, default: Any = REQUIRED) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:  # nor NaN
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}; got {_short(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false; got {_short(value)}")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text; got {_short(value)}")
        return value


def read_json(file: Path) -> Fields:
    try:
        return Fields(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
