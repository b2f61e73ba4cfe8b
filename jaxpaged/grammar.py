"""Compiles regexes, JSON schemas, lists of strings and free texts to arrays that restrict an answer token by token."""

from jaxpaged._grammar.public import (
    compile_choice,
    compile_json_object,
    compile_json_schema,
    compile_regex,
    compile_text,
)
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.text import Control, FreeText, OneOf, Part, Repeat
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._publish import publish as _publish

__all__ = [
    "Control",
    "FreeText",
    "Grammar",
    "OneOf",
    "Part",
    "Repeat",
    "Vocabulary",
    "compile_choice",
    "compile_json_object",
    "compile_json_schema",
    "compile_regex",
    "compile_text",
]

_publish(globals())
