"""Tool calls that a request forces, with arguments that follow their schema."""

import json
from typing import Literal

import openai
import pydantic
import pytest

from lib.strict_calls import moved
from lib.tool_formats import FORMATS
from tests.examples.serving import KEY, chat, running
from tests.examples.written_calls import FORECAST, NOW

TOOLS = [FORECAST, NOW]
ONE = {"type": "function", "function": {"name": "forecast"}}


@pytest.fixture(scope="module", params=sorted(FORMATS.keys() - {"openai"}))
def server(service, request):
    with running(service, tool_format=FORMATS[request.param]) as server:
        yield server


def check(name, arguments):
    arguments = json.loads(arguments)
    if name == "now":
        assert arguments == {}
        return
    assert name == "forecast"
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Rome", "Paris")
    assert 1 <= arguments["days"] <= 14


@pytest.mark.parametrize("choice", ["required", ONE], ids=["required", "one function"])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_an_answer_is_a_call_of_a_tool(server, choice, is_parallel):
    """Whole and streamed."""
    options = dict(tools=TOOLS, tool_choice=choice, parallel_tool_calls=is_parallel, temperature=1.5, seed=2, n=4)
    answer, ended = chat(server, **options), 0
    for one in answer.choices:
        assert one.finish_reason in ("tool_calls", "length")
        if one.finish_reason == "length":  # a random model rarely ends an array
            continue
        ended += 1
        calls = one.message.tool_calls
        assert one.message.content is None
        assert len(calls) == 1 or (is_parallel and choice == "required")
        for call in calls:
            check(call.function.name, call.function.arguments)
            assert choice == "required" or call.function.name == "forecast"
    assert ended > 0
    found = [""] * 4
    for chunk in chat(server, stream=True, **options):
        for call in chunk.choices[0].delta.tool_calls or []:
            found[chunk.choices[0].index] += call.function.arguments
    assert found == ["".join(c.function.arguments for c in one.message.tool_calls or []) for one in answer.choices]


def test_a_call_that_is_cut_is_no_call(server):
    (choice,) = chat(server, tools=TOOLS, tool_choice=ONE, max_tokens=20).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content.startswith("{")


def test_the_openai_client_parses_strict_arguments(server):
    class Now(pydantic.BaseModel):
        is_local: bool

    tools = [openai.pydantic_function_tool(Now, name="now")]
    options = dict(model="model", temperature=0, messages=[{"role": "user", "content": "a"}], tools=tools)
    choice = {"type": "function", "function": {"name": "now"}}
    answer = server.client.chat.completions.parse(tool_choice=choice, **options)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Now)
    tool = {"type": "function", "name": "now", "strict": True, "parameters": tools[0]["function"]["parameters"]}
    response = server.client.responses.create(model="model", input="a", tools=[tool], tool_choice="required")
    assert all(item.type == "function_call" for item in response.output) or response.status == "incomplete"


def test_a_schema_that_is_refused_names_its_keyword(server):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="'uniqueItems'") as raised:
        chat(server, tools=[tool], tool_choice="required")
    assert raised.value.param == "tool_choice"


def test_a_forced_call_excludes_other_grammars(server):
    with pytest.raises(openai.BadRequestError, match="response_format does not go with tool_choice") as raised:
        chat(server, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    assert raised.value.param == "response_format"


def test_references_follow_their_schema():
    schema = {"properties": {"$ref": {"type": "null"}, "a": {"$ref": "#"}}, "anyOf": [{"$ref": "#/$defs/b"}]}
    assert moved(schema, "#/x") == {
        "properties": {"$ref": {"type": "null"}, "a": {"$ref": "#/x"}},
        "anyOf": [{"$ref": "#/x/$defs/b"}],
    }


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: Literal["Rome", "Paris"]
    days: int = pydantic.Field(ge=1, le=14)


@pytest.mark.filterwarnings("ignore")  # warnings inside the package
def test_instructor_gets_its_model_by_a_forced_call(server):
    instructor = pytest.importorskip("instructor")
    options = dict(model="model", messages=[{"role": "user", "content": "a"}], max_retries=0)
    client = instructor.from_openai(server.client)
    assert isinstance(client.chat.completions.create(response_model=Forecast, **options), Forecast)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_structured_output(server, method):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="model", base_url=str(server.client.base_url), api_key=KEY)
    assert isinstance(model.with_structured_output(Forecast, method=method).invoke("a"), Forecast)
