"""Histories in the form that chat templates read."""

import pytest

from lib.template_history import adapt_history

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00fc"}}}
HISTORY = [
    {"role": "user", "content": "a", "reasoning_content": "r"},
    {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL]},
]


def arguments(template):
    return adapt_history(HISTORY, template)[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ name + '\\n' + tool['function']['arguments'] + '\\n' }}",
        {"default": "", "tool_use": "{{ c.arguments + '' }}"},
    ],
)
def test_a_template_that_joins_texts_gets_arguments_as_text(template):
    assert arguments(template) == '{"a": "\u00fc"}'
    assert CALL["function"]["arguments"] == {"a": "\u00fc"}  # the history of the caller has not changed


@pytest.mark.parametrize(
    "template", ["{{ call.arguments | tojson }}", "{{ tool['function']['arguments'] | tojson + '' }}"]
)
def test_other_templates_get_arguments_as_objects(template):
    assert arguments(template) == {"a": "\u00fc"}


def test_the_reasoning_before_a_call_reaches_gpt_oss():
    template = "{{ message.thinking }}"
    assert adapt_history(HISTORY, template)[1]["thinking"] == "r"
    assert "thinking" not in adapt_history([HISTORY[1] | {"content": "b"}], template)[0]
    assert adapt_history(HISTORY, "{{ message.reasoning_content }}") == HISTORY
