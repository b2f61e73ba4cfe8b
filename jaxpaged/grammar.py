"""Compiles regexes, JSON schemas and lists of strings to arrays that restrict an answer token by token."""

from jaxpaged._grammar.public import compile_choice, compile_json_object, compile_json_schema, compile_regex
from jaxpaged._grammar.records import Grammar
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._publish import publish as _publish

__all__ = ["Grammar", "Vocabulary", "compile_choice", "compile_json_object", "compile_json_schema", "compile_regex"]

_publish(globals())
