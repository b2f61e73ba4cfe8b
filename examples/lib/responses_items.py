"""Converts the items of OpenAI's Responses API to messages of a chat.

https://platform.openai.com/docs/api-reference/responses
"""

import json
from typing import Any

from lib.fields import Fields
from lib.openai_messages import read_role
from lib.response_store import Item, ResponseStore

Message = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def read_items(fields: Fields, store: ResponseStore) -> list[Item]:
    """The items of the field "input", with those that it refers to. Raises `FieldError` and `MissingFieldError`."""
    given = fields.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise fields.error("input", "must be a text or a list of at least one item")
    return [_read_item(Fields(item, f"input[{i}]."), store) for i, item in enumerate(given)]


def _read_item(item: Fields, store: ResponseStore) -> Item:
    kind = item.text("type", "message" if "role" in item.values else "item_reference")
    if kind not in KINDS:
        raise item.error("type", f"must be one of {', '.join(KINDS)}; got {kind[:60]!r}")
    if kind == "item_reference":
        found = store.find_item(item.text("id"))
        if found is None:
            raise item.error("id", "names no item of the responses that the server still has")
        return found
    if kind == "message":
        read_role(item)
        read_text(item, "content")
    elif kind == "function_call":
        _read_call(item)
    elif kind == "function_call_output":
        item.text("call_id")
        read_text(item, "output")
    else:
        _read_reasoning(item)
    return item.values | {"type": kind}


def read_text(item: Fields, name: str) -> str:
    """A text, or a list of parts with texts."""
    value = item.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.error(name, "must be a text or a list of parts with texts")
    parts = [Fields(part, f"{item.within}{name}[{i}].") for i, part in enumerate(value)]
    for part in parts:
        kind = part.text("type")
        if kind not in TEXT_PARTS:
            raise part.error("type", f"must be input_text or output_text; got {kind[:60]!r}")
    return "".join(part.text("text") for part in parts)


def _read_call(item: Fields) -> Message:
    arguments = item.text("arguments")
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise item.error("arguments", "must be the JSON of an object")
    function = {"name": item.text("name"), "arguments": arguments}
    return {"id": item.text("call_id"), "type": "function", "function": function}


def _read_reasoning(item: Fields) -> str:
    return read_text(item, "content" if item.get("content", None) else "summary")


def to_messages(items: list[Item], instructions: str | None) -> list[Message]:
    """The messages of a chat. Reasoning, text and calls of one answer become one message."""
    messages = list[Message]()
    reasoning = ""
    for values in items:
        item, kind = Fields(values), values["type"]
        if kind == "reasoning":
            reasoning += _read_reasoning(item)
        elif kind == "function_call_output":
            output = read_text(item, "output")
            messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": output})
        elif kind == "function_call":
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_read_call(item))
        else:
            messages.append({"role": item.text("role"), "content": read_text(item, "content")})
        if reasoning and messages and messages[-1]["role"] == "assistant" and kind != "reasoning":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return _instructed(messages, instructions)


def _instructed(messages: list[Message], instructions: str | None) -> list[Message]:
    """The messages after the instructions. Templates read one system message, so the two become one."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        instructions += f"\n\n{messages[0]['content']}"
        messages = messages[1:]
    return [{"role": "system", "content": instructions}, *messages]
