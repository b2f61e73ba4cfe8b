"""Turns what our docstrings write into what the site shows; mkdocs.yml names this file."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^Returns:\n(?: {4}.*\n?)+", indent_rest, text, flags=re.MULTILINE)
            text = re.sub(r"`docs/(\w+\.md)`", r"[`docs/\1`](../\1)", text)  # pages of the API lie in docs/api
            obj.docstring.value = re.sub(r"`(jaxpaged(?:\.\w+)+)`", r"[`\1`][\1]", text)


def indent_rest(section: re.Match[str]) -> str:
    """A line at the margin would be another result: only one with a name is."""
    return re.sub(r"(?<!^Returns:)\n {4}(?=\S)(?!\w+: )", "\n        ", section[0])
