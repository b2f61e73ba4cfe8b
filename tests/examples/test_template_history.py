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


def test_calls_are_split_for_a_template_with_one_call_per_message():
    def call(number):
        return CALL | {"id": number}

    def result(number):
        return {"role": "tool", "tool_call_id": number, "content": number}

    user, final = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    several = {"role": "assistant", "content": "c", "tool_calls": [call("1"), call("2"), call("3")]}
    first, second, third = ({"role": "assistant", "content": "", "tool_calls": [call(number)]} for number in "123")
    first["content"] = "c"
    template = "{{ message.tool_calls[0] }}"
    history = [user, several, result("2"), result("1"), result("4"), final]
    split = [user, first, result("1"), second, result("2"), third, result("4"), final]
    assert adapt_history(history, template) == split
    assert adapt_history(split, template) == split
    assert adapt_history(history, "{% for call in message.tool_calls %}") == history
    assert adapt_history([several], template) == [first, second, third]
    for unusual in ([], [user], [result("1")], [result("1"), user], [user, result("1")], [final, user, result("1")]):
        assert adapt_history(unusual, template) == unusual


def test_the_reasoning_before_a_call_reaches_gpt_oss():
    template = "{{ message.thinking }}"
    assert adapt_history(HISTORY, template)[1]["thinking"] == "r"
    assert "thinking" not in adapt_history([HISTORY[1] | {"content": "b"}], template)[0]
    assert adapt_history(HISTORY, "{{ message.reasoning_content }}") == HISTORY
