"""Grammars of the content after reasoning: a tiny model with equal logits, over HTTP."""

import json
import re

import openai
import pytest

from lib.tool_formats import FORMATS
from tests.examples.equal_logits import all_parts, bias
from tests.examples.scripted_engine import merged
from tests.examples.serving import chat, complete, running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["<think>", "b"]}, "c": {"type": "boolean"}},
    "required": ["a", "c"],
}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": SCHEMA}}]
WEIGHTS = {"</think>": 4, "<|channel|>": 4, "<|end|>": 4, "<|message|>": 2, "<eos>": 2}


def is_valid(text):
    answer = json.loads(text)
    return answer["a"] in ("<think>", "b") and isinstance(answer["c"], bool)


# Fields, and what the content must be; calls are in `message.tool_calls`.
ASKS = {
    "response_format": (
        dict(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        is_valid,
    ),
    "regex": (dict(extra_body={"structured_outputs": {"regex": "[ab]{3}"}}), re.compile("[ab]{3}").fullmatch),
    "choice": (dict(extra_body={"guided_choice": ["yes", "no"]}), ("yes", "no").__contains__),
    "one function": (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}), is_valid),
    "required": (dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), is_valid),
}
# The kind of tokenizer, the arguments of its chat template, and whether answers have reasoning; None: some do.
PROMPTS = {
    "inside reasoning": ("thoughts", {"enable_thinking": True}, True),
    "after reasoning": ("thoughts", {"enable_thinking": False}, False),
    "before both": ("thoughts", {}, None),
    "messages": ("harmony", {}, None),
}


@pytest.fixture(scope="module", params=PROMPTS)
def server(equal_services, request):
    kind, arguments, has_reasoning = PROMPTS[request.param]
    with running(equal_services[kind], tool_format=FORMATS["openai" if kind == "harmony" else "hermes"]) as server:
        server.arguments, server.has_reasoning = arguments, has_reasoning
        server.weights = bias(server, WEIGHTS | {"<think>": 5})
        yield server


def ask(server, **options):
    extra = {"chat_template_kwargs": server.arguments} | options.pop("extra_body", {})
    usual = dict(temperature=1, n=4, max_tokens=150, logit_bias=server.weights)
    return chat(server, **usual | options, extra_body=extra)


@pytest.mark.parametrize("name", ASKS)
def test_content_after_reasoning_follows_its_grammar(server, name):
    """Whole and streamed."""
    fields, is_right = ASKS[name]
    has_reasoning, num_ended = set(), 0
    for seed in range(3):
        answer = ask(server, seed=seed, **fields)
        for choice in answer.choices:
            reasoning, content, calls, reason = all_parts(choice)
            if reason == "length":
                continue
            assert reason == ("tool_calls" if calls else "stop")
            assert bool(calls) == ("tools" in fields)
            assert is_right(calls[0][1] if calls else content), content
            assert not (calls and content)
            num_ended += 1
            has_reasoning.add(bool(reasoning))
        streamed = merged(ask(server, seed=seed, stream=True, **fields))
        found = [(one.reasoning, one.content or "", one.calls, one.reason) for one in streamed]
        assert found == [all_parts(choice) for choice in answer.choices]
    assert num_ended > 1
    if server.has_reasoning is None:
        assert has_reasoning == {True, False}
    else:
        assert server.has_reasoning or has_reasoning == {False}


def test_content_without_a_grammar_is_not_valid(server):
    for choice in ask(server, seed=0).choices:
        with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid"):
            is_valid(all_parts(choice)[1])


def test_responses_have_reasoning_and_a_valid_text(server):
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    extra = {"chat_template_kwargs": server.arguments, "logit_bias": server.weights}
    options = dict(model="model", input="a", text={"format": form}, max_output_tokens=200, temperature=1)
    statuses = set()
    for seed in range(4):
        response = server.client.responses.create(**options, extra_body=extra | {"seed": seed})
        statuses.add(response.status)
        kinds = [item.type for item in response.output]
        assert kinds in (["message"], ["reasoning", "message"], ["reasoning"])
        if response.status == "completed":
            assert is_valid(response.output_text)
    assert "completed" in statuses


def test_a_completion_has_no_reasoning(server):
    """Its grammar begins with the first token."""
    answer = complete(server, temperature=1, logit_bias=server.weights, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].text in ("yes", "no")


def test_reasoning_that_stays_in_the_content_excludes_grammars(equal_services):
    fields = dict(extra_body={"guided_choice": ["yes"], "chat_template_kwargs": {"enable_thinking": True}})
    with running(equal_services["thoughts"], splits_reasoning=False) as server:
        with pytest.raises(openai.BadRequestError, match="begin with reasoning") as raised:
            chat(server, **fields)
        assert raised.value.param == "guided_choice"
        assert chat(server, extra_body={"guided_choice": ["yes"]}).choices[0].message.content == "yes"
