"""Parses requests of OpenAI's Responses API, and turns them into requests of a chat."""

import dataclasses
from typing import Any

from lib.api_error import ApiError
from lib.fields import FieldError, Fields, MissingFieldError
from lib.openai_fields import refuse_unread
from lib.openai_forms import Ask
from lib.response_store import ResponseStore
from lib.responses_items import read_items, to_messages
from lib.service import Service

# Fields that mean the same in a chat, and vLLM's that are not in OpenAI's API.
SAME = ["model", "stream", "temperature", "top_p", "parallel_tool_calls", "presence_penalty", "frequency_penalty"]
SAME += ["top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty", "logit_bias"]
SAME += [
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "chat_template_kwargs",
    "documents",
]
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),  # the reasoning is not encrypted
    "top_logprobs": (0,),
    "n": (1,),
}
# Names of fields in a chat, and here.
NAMES = {"max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "messages": "input"}
NAMES |= {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    ".function.": ".",
}


class ResponsesAsk:
    """A parsed request. Raises `ApiError`, `FieldError` and `MissingFieldError`.

    Attributes:
        ask: the same request to a chat.
        earlier: items of the response that this one continues, and of those before it.
        items: items of the request.
        stores: whether the response is kept.
        shown: fields that the response repeats.
    """

    def __init__(self, fields: Fields, service: Service):
        self.earlier = _earlier_items(fields, service.responses)
        self.items = read_items(fields, service.responses)
        self.stores = fields.flag("store", True)
        instructions = fields.get("instructions", None)
        if instructions is not None:
            fields.text("instructions")
        reasoning = Fields(fields.get("reasoning", {}), "reasoning.")
        text = Fields(fields.get("text", {}), "text.")
        form = Fields(text.get("format", {"type": "text"}), "text.format.")
        fields.get("stream_options", None)  # only says whether to hide the lengths of the deltas
        chat = {name: fields.get(name, None) for name in SAME}
        chat |= {
            "messages": to_messages([*self.earlier, *self.items], instructions),
            "tools": [_chat_tool(Fields(tool, f"tools[{i}].")) for i, tool in enumerate(_tools(fields))],
            "tool_choice": _chat_choice(fields),
            "max_completion_tokens": fields.get("max_output_tokens", None),
            "reasoning_effort": reasoning.get("effort", None),
            "response_format": _chat_format(form),
            "verbosity": text.get("verbosity", None),
        }
        refuse_unread(fields, NEUTRAL)
        try:
            self.ask = Ask(Fields(chat), service, is_chat=True)
        except FieldError as error:
            raise FieldError(_renamed(str(error)), _renamed(error.path)) from error
        except MissingFieldError as error:
            raise MissingFieldError(error.args[0], _renamed(error.path)) from error
        self.ask.prompt_field = "input"
        if self.ask.grammar is not None:
            self.ask.grammar = dataclasses.replace(self.ask.grammar, param=_renamed(self.ask.grammar.param))
        self.shown = self._shown(fields, form)

    def _shown(self, fields: Fields, form: Fields) -> dict[str, Any]:
        """Fields of the response in OpenAI's API that repeat the request or its defaults."""
        params = self.ask.params
        return {
            "model": self.ask.model,
            "instructions": fields.get("instructions", None),
            "max_output_tokens": fields.get("max_output_tokens", None),
            "metadata": fields.get("metadata", {}),
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "previous_response_id": fields.get("previous_response_id", None),
            "reasoning": {"effort": None, "summary": None} | fields.get("reasoning", {}),
            "store": self.stores,
            "temperature": params.temperature,
            "text": {"format": form.values},
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": fields.get("tools", []),
            "top_p": params.top_p,
            "truncation": "disabled",
        }


def _earlier_items(fields: Fields, store: ResponseStore) -> list[dict[str, Any]]:
    if fields.get("previous_response_id", None) is None:
        return []
    stored = store.get(fields.text("previous_response_id"))
    if stored is None:
        raise ApiError(
            404,
            "The server has no such previous response, or no longer: send its items in input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored.conversation


def _tools(fields: Fields) -> list[dict[str, Any]]:
    return fields.items("tools", lambda tool: isinstance(tool, dict), "must be a list of objects")


def _chat_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type")
    if kind != "function":
        raise tool.error("type", f"must be function; got {kind[:60]!r}")
    return {"type": kind, "function": {name: value for name, value in tool.values.items() if name != "type"}}


def _chat_choice(fields: Fields) -> Any:
    choice = fields.get("tool_choice", None)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _chat_format(form: Fields) -> dict[str, Any]:
    kind = form.text("type")
    if kind != "json_schema":
        return form.values
    return {"type": kind, "json_schema": {name: value for name, value in form.values.items() if name != "type"}}


def _renamed(text: str) -> str:
    for name, here in NAMES.items():
        text = text.replace(name, here)
    return text
