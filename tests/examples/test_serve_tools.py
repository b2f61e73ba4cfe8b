"""Tools over HTTP: calls in answers and streams, histories with calls, and refusals."""

import json

import openai
import pydantic
import pytest

from lib.tool_formats import FORMATS
from tests.examples.scripted_engine import answer_with, merged, parts, prompt_of, scripted_service
from tests.examples.serving import ask, chat, chat_body, running
from tests.examples.written_calls import MULTIPLY, TOOLS, calls_text, written

ARGUMENTS = '{"city": "S\u00e3o {\\"Paulo\\"}"}'
FIRST, SECOND = ("get_weather", ARGUMENTS), ("multiply", '{"a": [1, {"b": 2}]}')
CALLS = [list(FIRST), list(SECOND)]


@pytest.fixture(scope="module", params=FORMATS)
def form(request):
    return request.param


@pytest.fixture(scope="module")
def scripted(form):
    with running(scripted_service(form)) as server:
        yield server


@pytest.fixture(scope="module")
def hermes():
    with running(scripted_service("hermes")) as server:
        yield server


def both(server, text, *, cut=0, **options):
    """The choice of a whole answer, checked to equal the stream's."""
    answer_with(server.service, text, text, cut=cut)
    options = dict(tools=TOOLS) | options
    answer = chat(server, **options)
    *chunks, last = chat(server, stream=True, stream_options={"include_usage": True}, **options)
    wholes, streams = list(map(parts, answer.choices)), merged(chunks)
    assert wholes == streams
    assert last.usage == answer.usage
    return wholes[0]


def test_calls_are_in_the_answer_and_in_the_stream(scripted, form):
    choice = both(scripted, written(form, FIRST, SECOND, thought="Which?"))
    assert (choice.content, choice.reasoning, choice.calls) == (None, "Which?", CALLS)
    assert choice.reason == "tool_calls"


def test_a_call_that_is_cut_by_length_is_not_presented_as_complete(scripted, form):
    text = written(form, FIRST)
    for cut in (len('l\\"}"}'), len(ARGUMENTS) // 2):
        end = text.rindex(ARGUMENTS) + len(ARGUMENTS) - cut
        num_tokens = len(scripted.service.checkpoint.tokenizer.encode(text[:end]))
        choice = both(scripted, text, max_tokens=num_tokens)
        assert (choice.calls, choice.reason) == ([], "length")
        assert choice.content.endswith(text[end - 8 : end])


def test_calls_are_read_while_the_reasoning_stays_in_the_content(form):
    with running(scripted_service(form, splits_reasoning=False)) as server:
        choice = both(server, written(form, FIRST, thought="Which?"))
        assert (choice.reasoning, choice.calls, choice.reason) == ("", CALLS[:1], "tool_calls")
        assert "Which?" in choice.content


def test_an_answer_without_a_call_is_text(scripted, form):
    text = "<|channel|>final<|message|>It is 4." if form == "openai" else "It is 4."
    choice = both(scripted, text)
    assert (choice.content, choice.calls, choice.reason) == ("It is 4.", [], "stop")


def test_a_call_of_no_tool_stays_text(scripted, form):
    choice = both(scripted, written(form, ("other", "{}")))
    assert (choice.calls, choice.reason) == ([], "stop")
    assert "other" in choice.content


def test_with_tool_choice_none_text_is_not_searched_for_calls(hermes):
    text = calls_text("hermes", FIRST)
    choice = both(hermes, text, tool_choice="none")
    assert (choice.content, choice.calls, choice.reason) == (text, [], "stop")
    assert "Current weather" in prompt_of(hermes.service)


def test_without_parallel_calls_the_first_one_ends_the_answer(scripted, form):
    text = written(form, FIRST, SECOND)
    choice = both(scripted, text, parallel_tool_calls=False)
    assert (choice.content, choice.calls, choice.reason) == (None, CALLS[:1], "tool_calls")


@pytest.mark.parametrize("tokens_per_step", [1, 4, 1000])
def test_the_usage_without_parallel_calls_does_not_depend_on_slices(tokens_per_step):
    text = calls_text("hermes", FIRST)
    with running(scripted_service("hermes", tokens_per_step=tokens_per_step)) as server:
        answer_with(server.service, f"{text} and much more text, which nobody reads.")
        usage = chat(server, tools=TOOLS, parallel_tool_calls=False).usage
        assert usage.completion_tokens == len(server.service.checkpoint.tokenizer.encode(text))


def test_several_answers_have_calls_of_their_own(hermes):
    answer_with(hermes.service, calls_text("hermes", FIRST, SECOND), calls_text("hermes", FIRST, SECOND))
    wholes = chat(hermes, tools=TOOLS, n=2).choices
    streams = merged(chat(hermes, tools=TOOLS, n=2, stream=True))
    assert list(map(parts, wholes)) == streams
    assert [choice.calls for choice in streams] == [CALLS, CALLS]
    assert len({call.id for choice in wholes for call in choice.message.tool_calls}) == 4


def test_a_stop_string_ends_the_text_around_calls(hermes):
    choice = both(hermes, f"Let me see.\n{calls_text('hermes', FIRST)}\nDone. More.", stop=[" More"])
    assert (choice.content, choice.calls, choice.reason) == ("Let me see.Done.", CALLS[:1], "tool_calls")


def test_logprobs_and_token_ids_of_calls_come_once(hermes):
    text = calls_text("hermes", FIRST)
    tokens = hermes.service.checkpoint.tokenizer.encode(text)
    answer_with(hermes.service, text)
    options = dict(tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}, stream=True)
    choices = [chunk.choices[0] for chunk in chat(hermes, **options)]
    assert [token for choice in choices for token in choice.token_ids][:-1] == tokens
    assert sum(len(choice.logprobs.content) for choice in choices) == len(tokens) + 1


def test_the_helper_for_streams_of_the_openai_client_reads_calls(scripted, form):
    answer_with(scripted.service, written(form, FIRST, SECOND))
    messages = [{"role": "user", "content": "hi"}]
    with scripted.client.chat.completions.stream(model="model", messages=messages, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [[event.name, event.arguments] for event in done] == CALLS
    assert [[call.function.name, call.function.arguments] for call in final.message.tool_calls] == CALLS
    assert final.finish_reason == "tool_calls"


def test_the_template_reads_tools_calls_and_results(hermes):
    answer_with(hermes.service, calls_text("hermes", FIRST), "It rains.")
    messages = [{"role": "user", "content": "Weather?"}]
    message = hermes.client.chat.completions.create(model="model", messages=messages, tools=TOOLS).choices[0].message
    call = message.tool_calls[0]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    final = hermes.client.chat.completions.create(model="model", messages=messages, tools=TOOLS).choices[0]
    assert (final.message.content, final.message.tool_calls, final.finish_reason) == ("It rains.", None, "stop")
    called = f"{call.id} get_weather{json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)}"
    history = f"[user]Weather?[assistant]{called}[tool]rain{call.id}[assistant]"
    assert prompt_of(hermes.service).endswith(history)


REFUSED = {
    "a tool without a type": (dict(tools=[{}]), "The field 'type' is missing.", "tools[0].type"),
    "a tool of another type": (dict(tools=[{"type": "web"}]), "type must be function; got 'web'.", "tools[0].type"),
    "a tool without a name": (
        dict(tools=[{"type": "function", "function": {}}]),
        "The field 'name' is missing.",
        "tools[0].function.name",
    ),
    "a name with a space": (
        dict(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "name must be 1 to 64 letters, digits, underscores and dashes; got 'a b'.",
        "tools[0].function.name",
    ),
    "parameters that are no schema": (
        dict(tools=[{"type": "function", "function": {"name": "a", "parameters": []}}]),
        "parameters must be a JSON schema of an object.",
        "tools[0].function.parameters",
    ),
    "two tools of one name": (dict(tools=[MULTIPLY, MULTIPLY]), "tools must have different names.", "tools"),
    "too many tools": (dict(tools=[{}] * 129), "tools must be a list of at most 128 objects.", "tools"),
    "an unknown choice": (dict(tools=TOOLS, tool_choice="any"), 'tool_choice must be "none", "auto",', "tool_choice"),
    "a choice without tools": (dict(tool_choice="required"), "tool_choice goes with tools.", "tool_choice"),
    "a choice of no tool": (
        dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "a"}}),
        "name must be one of the tools; got 'a'.",
        "tool_choice.function.name",
    ),
    "a forced call": (
        dict(tools=TOOLS, tool_choice="required"),
        "tool_choice needs a grammar, which this model's tokenizer does not support.",
        "tool_choice",
    ),
    "a forced function": (
        dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "multiply"}}),
        "tool_choice needs a grammar, which this model's tokenizer does not support.",
        "tool_choice",
    ),
    "strict arguments": (
        dict(tools=[MULTIPLY, {"type": "function", "function": {"name": "a", "strict": True}}]),
        "tools[1].function.strict needs a grammar, which this model's tokenizer does not support.",
        "tools[1].function.strict",
    ),
    "a schema": (
        dict(response_format={"type": "json_object"}),
        "response_format needs a grammar, which this model's tokenizer does not support.",
        "response_format",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_gets_one_sentence(hermes, name):
    fields, message, param = REFUSED[name]
    status, _, answer = ask(hermes, "/v1/chat/completions", chat_body(**fields))
    error = json.loads(answer)["error"]
    assert (status, error["param"], error["message"].startswith(message)) == (400, param, True), error
    assert error["message"].count(". ") == 0


def test_parsing_helpers_of_the_openai_client_are_told_the_reason(hermes):
    class Weather(pydantic.BaseModel):
        city: str

    messages = [{"role": "user", "content": "hi"}]
    for options, reason in (
        (dict(response_format=Weather), "response_format needs a grammar"),
        (dict(tools=[openai.pydantic_function_tool(Weather)]), "strict needs a grammar"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            hermes.client.chat.completions.parse(model="model", messages=messages, **options)


def test_a_template_without_a_known_form_of_calls_refuses_tools():
    with running(scripted_service("none")) as server:
        with pytest.raises(openai.BadRequestError, match="start the server with --tool-call-parser") as raised:
            chat(server, tools=TOOLS)
        assert raised.value.param == "tools"
        answer_with(server.service, "It rains.")
        assert chat(server, tools=TOOLS, tool_choice="none").choices[0].message.content == "It rains."
