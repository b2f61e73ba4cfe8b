"""Converts the conversation of an OpenAI request to the form that chat templates read."""

import contextlib
import json
from typing import Any

from lib.fields import REQUIRED, Fields

# Roles of messages, and their names in templates.
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}


def read_conversation(fields: Fields) -> dict[str, Any]:
    """The arguments of `Tokenizer.encode_conversations` but the tools. Raises `FieldError` and `MissingFieldError`."""
    continues = fields.flag("continue_final_message", False)
    if fields.flag("add_generation_prompt", not continues) == continues:
        raise fields.error("add_generation_prompt", "must be true, or false with continue_final_message: true")
    kwargs = Fields(fields.get("chat_template_kwargs", {}), "chat_template_kwargs.").values
    if fields.get("reasoning_effort", None) is not None:
        kwargs = {"reasoning_effort": fields.text("reasoning_effort")} | kwargs
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "must be a list of at least one message")
    messages = [_read_message(Fields(message, f"messages[{i}].")) for i, message in enumerate(messages)]
    return {
        "messages": messages,
        "documents": _objects(fields, "documents") or None,
        "continue_final_message": continues,
        "chat_template_kwargs": kwargs,
    }


def _objects(fields: Fields, name: str) -> list[dict[str, Any]]:
    return fields.items(name, lambda value: isinstance(value, dict), "must be a list of objects")


def _read_message(message: Fields) -> dict[str, Any]:
    """All fields of a message, because templates read more fields than OpenAI's API defines."""
    role = read_role(message)
    own = {name: value for name, value in message.values.items() if value is not None}
    calls = _objects(message, "tool_calls")
    if calls:
        own["tool_calls"] = [
            _read_call(Fields(call, f"{message.within}tool_calls[{i}].")) for i, call in enumerate(calls)
        ]
    return own | {"role": role, "content": _read_content(message, "" if calls else REQUIRED)}


def read_role(message: Fields) -> str:
    """The role by its name in templates."""
    role = message.text("role")
    if role not in ROLES:
        raise message.error("role", f"must be one of {', '.join(ROLES)}; got {role[:60]!r}")
    return ROLES[role]


def _read_call(call: Fields) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect. OpenAI's API has them as JSON text."""
    function = Fields(call.get("function"), f"{call.within}function.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
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
