"""/v1/responses: answers and events, tools, continued responses, and refusals."""

import json

import openai
import pytest

from lib.response_store import ResponseStore
from tests.examples.scripted_engine import answer_with, engine_of, prompt_of, scripted_service
from tests.examples.serving import ask, running
from tests.examples.written_calls import calls_text

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "get_weather", "description": "d", "parameters": PARAMETERS, "strict": False}
ARGUMENTS = '{"city": "Paris"}'
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def server():
    with running(scripted_service("hermes")) as server:
        yield server


def create(server, text=None, **options):
    if text is not None:
        answer_with(server.service, text)
    return server.client.responses.create(**dict(model="model", input="hi") | options)


def without_ids(response):
    """The JSON of a response, without what differs between two equal ones."""
    fields = response.to_dict()
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {name: value for name, value in fields.items() if name not in ("id", "created_at")}


def test_a_text_is_answered(server):
    response = create(server, "It is 4.", instructions="Be short.", max_output_tokens=50)
    assert (response.output_text, response.status, response.model) == ("It is 4.", "completed", "model")
    assert prompt_of(server.service) == "[system]Be short.[user]hi[assistant]"
    usage, tokenizer = response.usage, server.service.checkpoint.tokenizer
    assert usage.input_tokens == len(engine_of(server.service).prompts[-1])
    assert usage.output_tokens == len(tokenizer.encode("It is 4.")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (response.instructions, response.max_output_tokens, response.store) == ("Be short.", 50, True)


def test_the_events_come_in_order_and_give_the_same_response(server):
    text = f"<think>Where?</think>Let me see.\n{calls_text('hermes', ('get_weather', ARGUMENTS))}"
    whole = create(server, text, tools=[WEATHER])
    events = list(create(server, text, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1].response
    assert without_ids(final) == without_ids(whole)
    reasoning, message, call = final.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Where?", "Let me see.")
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    for kind, item in (("reasoning_text", reasoning), ("output_text", message)):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(event.delta for event in deltas) == item.content[0].text
        assert {(event.item_id, event.output_index) for event in deltas} == {(item.id, final.output.index(item))}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    assert final.usage.output_tokens_details.reasoning_tokens == len(
        server.service.checkpoint.tokenizer.encode("Where?")
    )


def test_the_helper_for_streams_of_the_openai_client(server):
    text = f"Let me see. {calls_text('hermes', ('get_weather', ARGUMENTS))}"
    answer_with(server.service, text)
    with server.client.responses.stream(model="model", input="hi", tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "Let me see."
    assert final.output[1].arguments == ARGUMENTS


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_is_cut_is_incomplete(server, is_streamed):
    answer_with(server.service, "one two three")
    answer = create(server, max_output_tokens=3, stream=is_streamed)
    if is_streamed:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == ["incomplete"]
    assert answer.usage.output_tokens == 3


HISTORY = [
    {"role": "developer", "content": "s"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS},
    {"type": "function_call", "call_id": "call_2", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
]


def test_items_become_messages_of_the_template(server):
    create(server, "d", input=HISTORY, instructions="i", tools=[WEATHER])
    tool = {name: value for name, value in WEATHER.items() if name != "type"}
    calls = f"call_1 get_weather{ARGUMENTS}call_2 get_weather{{}}"
    messages = f"[system]i\n\ns[user]ab[assistant]rc{calls}[tool]raincall_1[tool]suncall_2[assistant]"
    assert prompt_of(server.service) == json.dumps(tool) + messages


def test_the_effort_reaches_the_template(server):
    from lib.fields import Fields
    from lib.responses_forms import ResponsesAsk

    fields = {"model": "model", "input": "a", "reasoning": {"effort": "low", "summary": "auto"}}
    conversation = ResponsesAsk(Fields(fields), server.service).ask.conversation
    assert conversation["chat_template_kwargs"] == {"reasoning_effort": "low"}


def test_a_response_can_be_continued_read_and_deleted(server):
    first = create(server, calls_text("hermes", ("get_weather", ARGUMENTS)), tools=[WEATHER], instructions="i")
    call = first.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = create(server, "It rains.", input=[output], previous_response_id=first.id)
    called = f"{call.call_id} get_weather{ARGUMENTS}[tool]rain{call.call_id}"
    assert prompt_of(server.service) == f"[user]hi[assistant]{called}[assistant]"  # instructions are not kept
    assert second.previous_response_id == first.id
    third = create(server, "Yes.", input="Sure?", previous_response_id=second.id)
    assert prompt_of(server.service).endswith(f"{called}[assistant]It rains.[user]Sure?[assistant]")
    referred = [{"role": "user", "content": "b"}, {"type": "item_reference", "id": third.output[0].id}]
    create(server, "c", input=referred)
    assert prompt_of(server.service) == "[user]b[assistant]Yes.[assistant]"
    assert server.client.responses.retrieve(third.id).output_text == "Yes."
    server.client.responses.delete(third.id)
    for missing in (server.client.responses.retrieve, server.client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            missing(third.id)
    with pytest.raises(openai.NotFoundError, match="no such previous response"):
        create(server, previous_response_id=third.id)


def test_a_response_is_not_kept_against_the_clients_will(server):
    response = create(server, "a", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(response.id)


def test_the_store_has_bounds():
    def add(store, name, text=""):
        item = {"id": f"msg_{name}", "text": text}
        store.add({"id": name, "output": [item]}, [], [])

    store = ResponseStore(most_responses=2, most_bytes=500)
    for name in "abc":
        add(store, name)
    assert [store.get(name) is None for name in "abc"] == [True, False, False]
    assert [store.find_item(f"msg_{name}") is None for name in "abc"] == [True, False, False]
    add(store, "d", "x" * 400)
    assert [store.get(name) is None for name in "bcd"] == [True, True, False]
    add(store, "e", "x" * 500)  # larger than the store
    assert store.get("d") is store.get("e") is store.find_item("msg_e") is None
    add(store, "f", "x" * 400)  # the counts of bytes are right again
    assert store.get("f") is not None


def test_a_long_conversation_stays_within_the_bounds():
    store, conversation = ResponseStore(most_responses=9, most_bytes=5000), []
    for turn in range(50):
        store.add({"id": str(turn), "output": [{"id": f"msg_{turn}", "text": "x" * 200}]}, conversation, [])
        if (stored := store.get(str(turn))) is None:
            break
        conversation = stored.conversation
    assert len(json.dumps(conversation)) < 5000


REFUSED = {
    "no input": (dict(input=None), "The field 'input' is missing.", "input"),
    "an empty input": (dict(input=[]), "input must be a text or a list of at least one item.", "input"),
    "an image": (
        dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]),
        "type must be input_text or output_text; got 'input_image'.",
        "input[0].content[0].type",
    ),
    "an item of another type": (
        dict(input=[{"type": "computer_call"}]),
        "type must be one of message, function_call, function_call_output, reasoning, item_reference; got",
        "input[0].type",
    ),
    "an unknown reference": (
        dict(input=[{"type": "item_reference", "id": "msg_1"}]),
        "id names no item of the responses that the server still has.",
        "input[0].id",
    ),
    "arguments that are no JSON": (
        dict(input=[HISTORY[4] | {"arguments": "{"}]),
        "arguments must be the JSON of an object.",
        "input[0].arguments",
    ),
    "an output without its call": (
        dict(input=[{"type": "function_call_output", "output": "a"}]),
        "The field 'call_id' is missing.",
        "input[0].call_id",
    ),
    "an unknown role": (dict(input=[{"role": "god", "content": "a"}]), "role must be one of", "input[0].role"),
    "a tool of OpenAI's": (
        dict(tools=[{"type": "web_search"}]),
        "type must be function; got 'web_search'.",
        "tools[0].type",
    ),
    "a tool without a name": (dict(tools=[{"type": "function"}]), "The field 'name' is missing.", "tools[0].name"),
    "strict arguments": (
        dict(tools=[WEATHER | {"strict": True}]),
        "tools[0].strict needs a grammar, which this model's tokenizer does not support.",
        "tools[0].strict",
    ),
    "a forced call": (
        dict(tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}),
        "tool_choice needs a grammar, which this model's tokenizer does not support.",
        "tool_choice",
    ),
    "a schema": (
        dict(text={"format": {"type": "json_schema", "name": "a", "schema": {}}}),
        "text.format needs a grammar, which this model's tokenizer does not support.",
        "text.format",
    ),
    "too few tokens": (
        dict(max_output_tokens=0),
        "max_output_tokens must be a whole number from 1",
        "max_output_tokens",
    ),
    "background": (dict(background=True), "background is not supported here; leave it out.", "background"),
    "truncation": (dict(truncation="auto"), "truncation is not supported here; leave it out.", "truncation"),
    "a long input": (dict(input="a " * 5000), "The prompt has", "input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_gets_one_sentence(server, name):
    fields, message, param = REFUSED[name]
    status, _, answer = ask(server, PATH, json.dumps({"model": "model", "input": "a"} | fields))
    error = json.loads(answer)["error"]
    assert (status, error["param"], error["message"].startswith(message)) == (400, param, True), error
    assert error["message"].count(". ") == 0


def test_a_request_needs_the_key(server):
    for path, method in ((PATH, "POST"), (f"{PATH}/a", "GET"), (f"{PATH}/a", "DELETE")):
        body = json.dumps({"input": "a"}) if method == "POST" else None
        assert ask(server, path, body, method, Authorization="Bearer wrong")[0] == 401


def test_an_engine_that_fails_ends_the_stream_with_an_event(monkeypatch):
    with running(scripted_service("hermes")) as server:

        def fail(**how):
            raise ValueError("boom")

        monkeypatch.setattr(engine_of(server.service), "step", fail)
        *_, last = create(server, "a", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.code == "server_error"
