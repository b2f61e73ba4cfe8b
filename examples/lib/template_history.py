"""Adapts the messages of a conversation to what its chat template reads."""

import json
import re
from typing import Any

# Templates of DeepSeek join a call's arguments to other texts with "+", which fails for an object.
TEXT_ARGUMENTS = re.compile(r"""arguments['"]?\]?\s*\+""")

Message = dict[str, Any]


def adapt_history(messages: list[Message], chat_template: str | dict[str, str]) -> list[Message]:
    """The messages, whose tool calls have their arguments as objects, in the form that the template reads."""
    template = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else chat_template
    if TEXT_ARGUMENTS.search(template):
        messages = list(map(_with_text_arguments, messages))
    if "message.thinking" in template and "reasoning_content" not in template:  # gpt-oss
        messages = list(map(_with_thinking, messages))
    return messages


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _with_thinking(message: Message) -> Message:
    """The reasoning before a tool call, which gpt-oss reads again. Its template refuses a message with content too."""
    reasoning = message.get("reasoning_content")
    return message if not reasoning or message.get("content") else {"thinking": reasoning} | message
