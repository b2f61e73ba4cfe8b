"""Reads and compiles the grammar that a request restricts its answer to.

https://platform.openai.com/docs/guides/structured-outputs
https://docs.vllm.ai/en/latest/features/structured_outputs.html
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxpaged import EngineOptions
from jaxpaged.grammar import (
    Grammar,
    Vocabulary,
    compile_choice,
    compile_json_object,
    compile_json_schema,
    compile_regex,
    compile_text,
)
from lib.answer_start import AnswerStart
from lib.api_error import ApiError
from lib.fields import Fields, short
from lib.grammar_texts import Text
from lib.openai_fields import refuse_unread
from lib.openai_tools import ToolUse
from lib.strict_calls import calls_schema, strict_calls
from lib.tool_formats import ToolFormat

NO_VOCABULARY = "needs a grammar, which this model's tokenizer does not support"
# vLLM's options of a grammar, with values that change nothing here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False, True),  # answers have the declared properties only
    "disable_fallback": (False, True),
}
SCHEMA = "must be a JSON schema, as an object or its text"
MOST_CHARACTERS = 400  # in an error
MOST_STATES = EngineOptions.num_grammar_states - 1  # one is for requests without a grammar
CHOICE = "must be a list of at least one text"


@dataclasses.dataclass(frozen=True)
class GrammarAsk:
    """The grammar of an answer.

    Attributes:
        param: field of the request, for errors.
        make_text: makes the text of answers that begin at a place.
    """

    param: str
    make_text: Callable[[AnswerStart], Text]

    @classmethod
    def of_content(cls, param: str, compile: Callable[[Vocabulary], Grammar]) -> "GrammarAsk":
        """A grammar of the content alone, compiled by a function."""
        return cls(param, lambda start: start.after_reasoning(compile(start.vocabulary)))


def read_grammar(
    fields: Fields, tool_use: ToolUse | None, tool_format: ToolFormat | None, *, has_vocabulary: bool
) -> GrammarAsk | None:
    """The grammar that a request needs. Raises `FieldError` and `MissingFieldError`."""
    found = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    is_free = tool_use is not None and tool_use.choice == "auto" and bool(tool_use.callable_names)
    if found and is_free:
        name = found[0].param.partition(".")[0]
        raise fields.error(name, 'goes with tools only if tool_choice is "none": its grammar rules out calls')
    if tool_use is not None and tool_format is not None:
        found = [*_calls(tool_use, tool_format), *found]
    if not found:
        return None
    grammar, *others = found
    if not has_vocabulary:
        is_strict = grammar.param.endswith("strict")
        raise fields.error(grammar.param if is_strict else grammar.param.partition(".")[0], NO_VOCABULARY)
    if others:
        raise fields.error(others[0].param, f"does not go with {grammar.param}: an answer has one grammar")
    return grammar


def compile_grammar(ask: GrammarAsk, start: AnswerStart) -> Grammar:
    """Runs in a thread, because a grammar may need a second. Raises `ApiError`."""
    try:
        text = ask.make_text(start)
        grammar = text if isinstance(text, Grammar) else compile_text(text, start.vocabulary, max_states=MOST_STATES)
    except ValueError as error:
        raise ApiError(400, one_sentence(str(error)), param=ask.param) from error
    except RecursionError as error:
        raise ApiError(400, "The grammar is nested too deeply.", param=ask.param) from error
    most = EngineOptions.num_grammar_masks - 1
    if len(grammar.masks) > most:
        message = f"The grammar has {len(grammar.masks)} different sets of allowed tokens; it may have {most} here."
        raise ApiError(400, message, param=ask.param)
    return grammar


def one_sentence(message: str) -> str:
    """A message of the compiler without its advice, which names arguments that requests do not have."""
    message = re.sub(r"\. [A-Z][^'\"]*$", "", message).rstrip(".")
    half = MOST_CHARACTERS // 2
    return f"{message if len(message) <= MOST_CHARACTERS else f'{message[:half]} ... {message[-half:]}'}."


def _calls(tool_use: ToolUse, tool_format: ToolFormat) -> Iterator[GrammarAsk]:
    """The grammar of calls that must come, or of strict calls that may."""
    if tool_use.is_forced:
        schema = forced_schema(tool_use, tool_format.without_marks.arguments)
        yield GrammarAsk.of_content("tool_choice", lambda vocabulary: compile_json_schema(schema, vocabulary))
    elif tool_use.strict_names and tool_use.choice == "auto":
        index = next(i for i, tool in enumerate(tool_use.tools) if tool["function"]["name"] in tool_use.strict_names)
        yield GrammarAsk(f"tools[{index}].function.strict", lambda start: strict_calls(start, tool_use, tool_format))


def forced_schema(tool_use: ToolUse, key: str) -> dict[str, Any]:
    """The schema of a forced call, or of an array of calls. `key`: key of the arguments."""
    functions = [tool["function"] for tool in tool_use.tools if tool["function"]["name"] in tool_use.callable_names]
    schema = calls_schema(functions, key)
    if tool_use.choice == "required" and tool_use.is_parallel:
        definitions = schema.pop("$defs")
        schema = {"$defs": definitions, "type": "array", "items": schema, "minItems": 1}
    return schema


def _response_format(fields: Fields) -> Iterator[GrammarAsk]:
    form = Fields(fields.get("response_format", {"type": "text"}), "response_format.")
    kind = form.text("type")
    if kind == "json_object":
        yield GrammarAsk.of_content("response_format", compile_json_object)
    elif kind == "json_schema":
        yield _json(Fields(form.get("json_schema"), "response_format.json_schema."), "schema")
    elif kind != "text":
        raise form.error("type", f"must be text, json_object or json_schema; got {kind[:60]!r}")


def _structured_outputs(fields: Fields) -> Iterator[GrammarAsk]:
    form = Fields(fields.get("structured_outputs", {}), "structured_outputs.")
    yield from _each(form, {"json": _json, "regex": _regex, "choice": _choice})
    if form.flag("json_object", False):
        yield GrammarAsk.of_content("structured_outputs.json_object", compile_json_object)
    refuse_unread(form, NEUTRAL)


def _guided(fields: Fields) -> Iterator[GrammarAsk]:
    """vLLM's older fields."""
    return _each(fields, {"guided_json": _json, "guided_regex": _regex, "guided_choice": _choice})


def _each(fields: Fields, readers: dict[str, Callable[[Fields, str], GrammarAsk]]) -> Iterator[GrammarAsk]:
    return (read(fields, name) for name, read in readers.items() if fields.get(name, None) is not None)


def _json(fields: Fields, name: str) -> GrammarAsk:
    given = schema = fields.get(name)
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(given)
    if not isinstance(schema, dict):
        raise fields.error(name, f"{SCHEMA}; got {short(given)}")
    return GrammarAsk.of_content(fields.within + name, lambda vocabulary: compile_json_schema(schema, vocabulary))


def _regex(fields: Fields, name: str) -> GrammarAsk:
    pattern = fields.text(name)
    return GrammarAsk.of_content(fields.within + name, lambda vocabulary: compile_regex(pattern, vocabulary))


def _choice(fields: Fields, name: str) -> GrammarAsk:
    options = fields.get(name)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise fields.error(name, CHOICE)
    return GrammarAsk.of_content(fields.within + name, lambda vocabulary: compile_choice(options, vocabulary))
