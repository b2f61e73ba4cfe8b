"""Calls that a model may make, with arguments that must match their schema: a tiny model with equal logits."""

import contextlib
import json

import openai
import pydantic
import pytest

from lib.tool_formats import FORMATS
from tests.examples.equal_logits import all_parts, bias
from tests.examples.scripted_engine import merged
from tests.examples.serving import chat, running
from tests.examples.written_calls import CITY, FORECAST, NOW

LENIENT = {"type": "function", "function": {"name": "forecast", "parameters": CITY}}
# Weights of tokens that begin calls, and a text that only begins a call.
BEGINS = {
    "hermes": ({"<tool_call>": 5, ". <tool_call>\n": 5}, "<tool_call>"),
    "mistral": ({"[TOOL_CALLS]": 5}, "[TOOL_CALLS]"),
    "deepseek_v3": ({"<｜tool▁call▁begin｜>": 5}, "<｜tool▁call▁begin｜>"),
    "llama3_json": ({'{"name": "': 5, 'forecast"': 5}, '{"name": "forecast"'),
    "openai": (
        {" to=functions.": 5, "forecast": 6, "<|channel|>": 5, "<|end|>": 4},
        "to=functions.forecast<|message|>",
    ),
}
ENDS = {"<eos>": 2, "<｜tool▁call▁end｜>": 3, "</tool_call>": 3, "<|call|>": 3, "}": 2, "<|message|>": 3}


@pytest.fixture(scope="module", params=sorted(FORMATS))
def server(equal_services, request):
    kind = "harmony" if request.param == "openai" else "thoughts"
    with running(equal_services[kind], tool_format=FORMATS[request.param]) as server:
        server.begins, server.begin = BEGINS[request.param]
        server.weights = bias(server, server.begins | ENDS)
        yield server


def ask(server, **options):
    usual = dict(tools=[FORECAST], temperature=1, n=4, max_tokens=150, logit_bias=server.weights)
    return chat(server, **usual | options)


def check(name, arguments):
    arguments = json.loads(arguments)
    if name == "forecast":
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Rome", "Paris")
        assert 1 <= arguments["days"] <= 14
    else:
        assert name == "now"


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("tools", [[FORECAST], [NOW, FORECAST]], ids=["strict", "one of two strict"])
def test_a_call_that_begins_matches_its_schema(server, tools, is_parallel):
    """Whole and streamed; other text is free."""
    num_calls, num_free = [], 0
    for seed in range(2):
        options = dict(tools=tools, parallel_tool_calls=is_parallel, seed=seed)
        answer = ask(server, **options)
        for choice in answer.choices:
            reasoning, content, calls, reason = all_parts(choice)
            assert reason in ("stop", "length", "tool_calls")
            assert is_parallel or len(calls) <= 1
            for name, arguments in calls:
                check(name, arguments)
            if reason != "length" and tools == [FORECAST]:
                assert server.begin not in content
            num_calls.append(sum(name == "forecast" for name, _ in calls))
            num_free += bool(reasoning or content)
        streamed = merged(ask(server, stream=True, **options))
        found = [(one.reasoning, one.content or "", one.calls, one.reason) for one in streamed]
        assert found == [all_parts(choice) for choice in answer.choices]
    assert sum(num_calls) > 1
    assert num_free > 0


def test_a_call_that_is_not_strict_is_free(server):
    answers = [ask(server, tools=[LENIENT], seed=seed) for seed in range(4)]
    found = [all_parts(choice) for answer in answers for choice in answer.choices]
    assert any(server.begin in content for _, content, _, _ in found)


def test_the_openai_client_parses_strict_arguments(server):
    class Forecast(pydantic.BaseModel):
        days: int = pydantic.Field(ge=1, le=14)

    tool = openai.pydantic_function_tool(Forecast, name="forecast")
    messages = [{"role": "user", "content": "a"}]
    options = dict(max_tokens=250, temperature=1, logit_bias=server.weights, parallel_tool_calls=False)
    found = []
    for seed in range(8):
        with contextlib.suppress(openai.LengthFinishReasonError):
            answer = server.client.chat.completions.parse(
                model="model", messages=messages, tools=[tool], seed=seed, **options
            )
            found += answer.choices[0].message.tool_calls or []
    assert found
    assert all(isinstance(call.function.parsed_arguments, Forecast) for call in found)


def test_responses_have_strict_calls(server):
    tool = {"type": "function"} | FORECAST["function"]
    options = dict(input="a", tools=[tool], max_output_tokens=250, temperature=1)
    extra = {"logit_bias": server.weights}
    responses = [
        server.client.responses.create(model="model", extra_body=extra | {"seed": seed}, **options) for seed in range(4)
    ]
    calls = [item for response in responses for item in response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check(call.name, call.arguments)


def test_a_schema_that_is_refused_names_its_tool(server):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"uniqueItems": True}, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="'uniqueItems'") as raised:
        ask(server, tools=[NOW, tool])
    assert raised.value.param == "tools[1].function.strict"
