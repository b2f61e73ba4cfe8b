"""The conversation of a request in OpenAI's form, as a chat template reads it."""

import dataclasses
import json
from typing import Any

from lib.fields import REQUIRED, Fields

# The roles of messages, and what the templates call them.
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, and what else a chat template is given: the arguments of `Tokenizer.encode_conversations`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_conversation(fields: Fields) -> Conversation:
    """Raises `FieldError` and `MissingFieldError`."""
    tools = _objects(fields, "tools")
    choice = fields.get("tool_choice", "auto" if tools else "none")
    if choice != "none" and (tools or choice != "auto"):
        clause = 'is supported only with tool_choice "none": this server reads no tool calls'
        raise fields.error("tools" if tools else "tool_choice", clause)
    continues = fields.flag("continue_final_message", False)
    if fields.flag("add_generation_prompt", not continues) == continues:
        raise fields.error("add_generation_prompt", "must be true, or false with continue_final_message: true")
    kwargs = Fields(fields.get("chat_template_kwargs", {}), "chat_template_kwargs.").values
    if fields.get("reasoning_effort", None) is not None:
        kwargs = {"reasoning_effort": fields.text("reasoning_effort")} | kwargs
    messages = _read_messages(fields)
    return Conversation(messages, tools or None, _objects(fields, "documents") or None, continues, kwargs)


def _objects(fields: Fields, name: str) -> list[dict[str, Any]]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise fields.error(name, "must be a list of objects")
    return values


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "must be a list of at least one message")
    return [_read_message(Fields(message, f"messages[{i}].")) for i, message in enumerate(messages)]


def _read_message(message: Fields) -> dict[str, Any]:
    """All its fields: templates read more of them than OpenAI's API has."""
    role = message.text("role")
    if role not in ROLES:
        raise message.error("role", f"must be one of {', '.join(ROLES)}; got {role[:60]!r}")
    own = {name: value for name, value in message.values.items() if value is not None}
    calls = _objects(message, "tool_calls")
    if calls:
        own["tool_calls"] = [
            _read_call(Fields(call, f"{message.within}tool_calls[{i}].")) for i, call in enumerate(calls)
        ]
    return own | {"role": ROLES[role], "content": _read_content(message, "" if calls else REQUIRED)}


def _read_call(call: Fields) -> dict[str, Any]:
    """Its arguments as an object, as templates expect them; OpenAI's API has the JSON of it."""
    function = Fields(call.get("function"), f"{call.within}function.")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise function.error("arguments", "must be the JSON of an object") from error
    if not isinstance(arguments, dict):
        raise function.error("arguments", "must be the JSON of an object")
    return call.values | {"function": function.values | {"arguments": arguments}}


def _read_content(message: Fields, default: Any) -> str:
    content = message.get("content", default)
    wanted = message.error("content", "must be a text, or a list of parts of the type text")
    if isinstance(content, list):
        parts = [Fields(part, f"{message.within}content[{i}].") for i, part in enumerate(content)]
        if any(part.text("type") != "text" for part in parts):
            raise wanted
        content = "".join(part.text("text") for part in parts)
    if not isinstance(content, str):
        raise wanted
    check_unicode(message, "content", content)
    return content


def check_unicode(fields: Fields, name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise fields.error(name, "must be Unicode; it holds half of a surrogate pair") from error
