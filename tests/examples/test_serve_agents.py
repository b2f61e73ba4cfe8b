"""Agents of the openai client and of other client packages, unedited, against answers that are given."""

import contextlib
import io
from pathlib import Path

import openai
import pytest

from lib.tool_formats import FORMATS
from tests.examples.scripted_engine import answer_with, engine_of, prompt_of, scripted_service
from tests.examples.serving import KEY, running
from tests.examples.written_calls import written

WEATHER = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Bogot\u00e1"}')]
EMAIL = ("send_email", '{"to": "Ada", "body": "17 and 17"}')
RESULTS = ["Paris: 17 degrees", "Bogot\u00e1: 17 degrees", "sent 9 characters to Ada"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("agent", ["agent_chat", "agent_responses"])
def test_an_agent_runs_unedited(agent, form, monkeypatch):
    final = "<|channel|>final<|message|>Done." if form == "openai" else "Done."
    with running(scripted_service(form, served_names=("gpt-5",))) as server:
        answer_with(server.service, written(form, *WEATHER, thought="First"), written(form, EMAIL), final)
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        namespace, out = {}, io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(Path(__file__).with_name(f"{agent}.py").read_text(), namespace)
        namespace["client"].close()
        assert out.getvalue() == "Done.\n"
        prompt = prompt_of(server.service)
        places = [prompt.index(result) for result in RESULTS]
        assert places == sorted(places)
        assert len(engine_of(server.service).prompts) == 3


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with running(scripted_service("hermes")) as server:
        server.url = f"http://127.0.0.1:{server.port}/v1"
        answer_with(server.service, written("hermes", *WEATHER), "17 degrees.")
        yield server


CALLS = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Bogot\u00e1"})]
packages = pytest.mark.filterwarnings("ignore")  # warnings inside other packages


def get_weather(city: str) -> str:
    """Get the current temperature of a city."""
    return f"{city}: 17 degrees"


@packages
@pytest.mark.parametrize("uses_responses", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_langchain_binds_tools(server, uses_responses, is_streamed):
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain_openai.ChatOpenAI(model="model", base_url=server.url, use_responses_api=uses_responses)
    chat = chat.bind_tools([get_weather])

    def invoke(messages):
        if not is_streamed:
            return chat.invoke(messages)
        first, *others = chat.stream(messages)
        return sum(others, first)

    messages = [HumanMessage("hi")]
    message = invoke(messages)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
    messages += [message, *(ToolMessage(get_weather(**c["args"]), tool_call_id=c["id"]) for c in message.tool_calls)]
    assert invoke(messages).text == "17 degrees."
    assert RESULTS[1] in prompt_of(server.service)


@packages
def test_langchain_is_told_that_a_forced_call_needs_a_grammar(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(model="model", base_url=server.url)
    chat = chat.with_structured_output(
        {"title": "Weather", "type": "object", "properties": {}}, method="function_calling"
    )
    with pytest.raises(openai.BadRequestError, match="tool_choice needs a grammar"):
        chat.invoke("hi")


@packages
def test_instructor_reads_parallel_calls(server):
    instructor = pytest.importorskip("instructor")
    from collections.abc import Iterable

    import pydantic

    Weather = pydantic.create_model("get_weather", city=(str, ...))
    client = instructor.from_openai(server.client, mode=instructor.Mode.PARALLEL_TOOLS)
    options = dict(model="model", messages=[{"role": "user", "content": "hi"}])
    found = client.chat.completions.create(response_model=Iterable[Weather], **options)
    assert [one.city for one in found] == ["Paris", "Bogot\u00e1"]
    client = instructor.from_openai(server.client)
    with pytest.raises(Exception, match="tool_choice needs a grammar"):
        client.chat.completions.create(response_model=Weather, max_retries=0, **options)


@packages
@pytest.mark.parametrize("is_streamed", [False, True])
def test_litellm_reads_calls(server, is_streamed):
    litellm = pytest.importorskip("litellm")
    from tests.examples.written_calls import TOOLS

    options = dict(model="hosted_vllm/model", api_base=server.url, api_key=KEY, tools=TOOLS, stream=is_streamed)
    messages = [{"role": "user", "content": "hi"}]
    answer = litellm.completion(messages=messages, **options)
    if is_streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == WEATHER
    messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": "17"} for c in message.tool_calls)]
    answer = litellm.completion(messages=messages, **options)
    if is_streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    assert answer.choices[0].message.content == "17 degrees."


@packages
@pytest.mark.parametrize("is_streamed", [False, True])
def test_llama_index_reads_calls(server, is_streamed):
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.tools import FunctionTool

    tools = [FunctionTool.from_defaults(get_weather)]
    options = dict(model="model", api_base=server.url, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
    with openai.DefaultHttpxClient() as http_client:
        llm = openai_like.OpenAILike(http_client=http_client, **options)
        if is_streamed:
            *_, answer = llm.stream_chat_with_tools(tools, user_msg="hi", allow_parallel_tool_calls=True)
        else:
            answer = llm.chat_with_tools(tools, user_msg="hi", allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == CALLS


@packages
@pytest.mark.parametrize("is_streamed", [False, True])
def test_haystack_reads_calls(server, is_streamed):
    pytest.importorskip("haystack")
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    generator = OpenAIChatGenerator(
        model="model",
        api_base_url=server.url,
        tools=[create_tool_from_function(get_weather)],
        streaming_callback=(lambda chunk: None) if is_streamed else None,
    )
    messages = [ChatMessage.from_user("hi")]
    (reply,) = generator.run(messages=messages)["replies"]
    assert [(call.tool_name, call.arguments) for call in reply.tool_calls] == CALLS
    results = [ChatMessage.from_tool("17", origin=call) for call in reply.tool_calls]
    (reply,) = generator.run(messages=[*messages, reply, *results])["replies"]
    assert reply.text == "17 degrees."
