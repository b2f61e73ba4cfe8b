"""Adapts the messages of a conversation to what its chat template reads."""

import json
import re
from typing import Any

# Templates of DeepSeek join a call's arguments to other texts with "+", which fails for an object.
TEXT_ARGUMENTS = re.compile(r"""arguments['"]?\]?\s*\+""")
ONE_CALL = "tool_calls[0]"  # Llama 3's template refuses several calls in a message, that of gpt-oss drops all but one

Message = dict[str, Any]


def adapt_history(messages: list[Message], chat_template: str | dict[str, str]) -> list[Message]:
    """The messages, whose tool calls have their arguments as objects, in the form that the template reads."""
    template = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else chat_template
    if ONE_CALL in template:
        messages = _one_call_each(messages)
    if TEXT_ARGUMENTS.search(template):
        messages = list(map(_with_text_arguments, messages))
    if "message.thinking" in template and "reasoning_content" not in template:  # gpt-oss
        messages = list(map(_with_thinking, messages))
    return messages


def _one_call_each(messages: list[Message]) -> list[Message]:
    """The messages with one call in each, followed by its result."""
    groups = list[list[Message]]()  # a message, and the results after it
    for message in messages:
        if message["role"] == "tool" and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [each for message, *results in groups for each in _pair(message, results)]


def _pair(message: Message, results: list[Message]) -> list[Message]:
    """A message with calls as one message for each, and the results in the order of the calls."""
    calls = message.get("tool_calls") or []
    if len(calls) < 2:
        return [message, *results]
    paired = list[Message]()
    rest = list(results)
    for i, call in enumerate(calls):
        own = [result for result in rest if result.get("tool_call_id") == call.get("id")]
        rest = [result for result in rest if result not in own]
        first = message if i == 0 else {"role": message["role"], "content": ""}
        paired += [first | {"tool_calls": [call]}, *own]
    return paired + rest


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
