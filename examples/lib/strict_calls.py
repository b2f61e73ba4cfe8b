"""Grammars of answers that may call functions: a call that begins has arguments that match their schema."""

import re
from collections.abc import Iterator
from typing import Any

from jaxpaged.grammar import FreeText, OneOf, Part, Repeat, compile_json_schema, compile_regex
from lib.answer_start import AnswerStart
from lib.grammar_texts import Text, until
from lib.openai_tools import ToolUse
from lib.tool_formats import ToolFormat

S = "[ \n\t\r]*"  # white space of JSON
NO_PARAMETERS = {"type": "object", "additionalProperties": False}


def strict_calls(start: AnswerStart, tool_use: ToolUse, tool_format: ToolFormat) -> Text:
    """Any answer in which the calls of strict functions match their schemas.

    Raises:
        ValueError: a schema cannot be enforced.
    """
    return StrictCalls(start, tool_use, tool_format).answer()


class StrictCalls:
    """The calls of a request in one format."""

    def __init__(self, start: AnswerStart, tool_use: ToolUse, tool_format: ToolFormat):
        self._start, self._format, self._is_parallel = start, tool_format, tool_use.is_parallel
        functions = [tool["function"] for tool in tool_use.tools]
        self._strict = [function for function in functions if function["name"] in tool_use.strict_names]
        self._others = [function["name"] for function in functions if function["name"] not in tool_use.strict_names]

    def answer(self) -> Text:
        if not self._format.written:
            return self._messages()
        return self._start.after_reasoning(FreeText(tuple(self._marked() if self._format.mark else self._objects())))

    def _messages(self) -> Text:
        harmony = self._start.harmony
        if harmony is None:
            raise ValueError("The tokenizer has no control tokens for messages of gpt-oss")
        arguments: dict[str, Text] = {function["name"]: self._arguments(function) for function in self._strict}
        arguments |= dict.fromkeys(self._others, harmony.any_arguments)
        return harmony.calls(arguments, is_parallel=self._is_parallel)

    def _objects(self) -> Iterator[Part]:
        """Calls without a mark: they begin with an object of the function's name."""
        for function in self._strict:
            mark = rf'\{{{S}("type"{S}:{S}"function"{S},{S})?"name"{S}:{S}"{re.escape(function["name"])}"'
            arguments = self._regex(f', ?"{self._format.arguments}": ?'), self._arguments(function)
            yield Part(self._regex(mark), (*arguments, self._regex(r" ?\}")), is_last=not self._is_parallel)

    def _marked(self) -> Iterator[Part]:
        """Calls after a mark."""
        written = next(form for place, form in self._format.written.items() if place in self._start.template)
        calls = [self._other_call(written)] if self._others else []
        if "{name}" in written:
            calls += [
                self._fill(written, name=function["name"], arguments=self._arguments(function))
                for function in self._strict
            ]
        else:
            call = compile_json_schema(calls_schema(self._strict, self._format.arguments), self._start.vocabulary)
            several = Repeat(call, self._regex(", ?"), least=1) if self._is_parallel else call
            calls.append(self._fill(written, call=call, calls=several))
        after = OneOf(((), self._mark(self._format.after))) if self._format.after else ()
        yield Part(self._mark(self._format.mark), (OneOf(tuple(calls)), after), is_last=not self._is_parallel)

    def _other_call(self, written: str) -> Text:
        """A call of a function that is not strict: its name, then any text up to the mark that ends it."""
        names = "|".join(map(re.escape, self._others))
        begin, field, end = re.split(r"\{(arguments|calls?)\}", written)
        name = OneOf(tuple(self._others))
        text = self._fill(begin, name=name)
        if field != "arguments":
            text = text, self._regex(rf'\{{ ?"name": ?"({names})"')
        ends = [mark for mark in self._format.marks if mark in end]
        return (text, until(self._mark(ends[0]))) if ends else text

    def _fill(self, written: str, **fields: Text) -> Text:
        fields |= {"space": self._regex("[ \n]?"), "id": self._regex(r"\w{1,64}")}
        marks = "|".join(map(re.escape, self._format.marks))
        pieces = re.split(rf"(\{{\w+\}}|{marks})", written)
        texts = [piece if i % 2 == 0 else self._piece(piece, fields) for i, piece in enumerate(pieces)]
        return tuple(text for text in texts if text)

    def _piece(self, piece: str, fields: dict[str, Text]) -> Text:
        return fields[piece[1:-1]] if piece.startswith("{") else self._mark(piece)

    def _mark(self, mark: str) -> Text:
        """A mark as its control token or as plain text: the server reads both as the mark."""
        token = self._start.token(mark)
        return mark if token is None else OneOf((token, mark))

    def _arguments(self, function: dict[str, Any]) -> Text:
        return compile_json_schema(function.get("parameters") or NO_PARAMETERS, self._start.vocabulary)

    def _regex(self, pattern: str) -> Text:
        return compile_regex(pattern, self._start.vocabulary)


def calls_schema(functions: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The schema of a call of one of the functions. `key`: key of the arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/{function['name']}"}},
            "required": ["name", key],
        }
        for function in functions
    ]
    definitions = {
        function["name"]: moved(function.get("parameters") or NO_PARAMETERS, f"#/$defs/{function['name']}")
        for function in functions
    }
    return {"$defs": definitions} | (calls[0] if len(calls) == 1 else {"anyOf": calls})


def moved(schema: Any, place: str) -> Any:
    """A schema whose references are right when it is at this place in another one."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else moved(value, place)
        for name, value in schema.items()
    }
