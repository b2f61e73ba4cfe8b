"""Requests of real clients: recorded bodies of many, the `openai` client itself, and the soak's patterns."""

import asyncio
import itertools
import json

import openai
import pytest

from benchmarks.soak import client_patterns
from tests.examples.serving import KEY, PROMPT, ask, body, chat, chat_body, complete, texts

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "P", "strict": True, "schema": {"type": "object"}}}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# Recorded from guidellm 0.8.1, litellm, langchain-openai 1.7, instructor 1.17, llama-index and ai 6.0;
# only the texts are shorter. A chat without messages gets the messages of `chat_body`.
ANSWERED = {
    "guidellm, chat": dict(
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=8,
        stop=None,
        ignore_eos=True,
    ),
    "litellm, vLLM's extras": dict(max_tokens=8, top_k=5, repetition_penalty=1.0, min_p=0.0),
    "litellm, tools": dict(max_tokens=8, tools=[TOOL], tool_choice="none"),
    "litellm, an answer in the history": dict(
        messages=[
            USER,
            {
                "content": "yes",
                "role": "assistant",
                "tool_calls": None,
                "function_call": None,
                "provider_specific_fields": {"refusal": None},
            },
            USER,
        ],
        max_tokens=8,
    ),
    "langchain": dict(
        stream=False, messages=[{"content": "s", "role": "system"}, USER], max_completion_tokens=8, stop=["5"]
    ),
    "langchain, tools in the history": dict(
        stream=False,
        messages=[
            USER,
            {"content": None, "role": "assistant", "tool_calls": [CALL]},
            {"content": "r", "role": "tool", "tool_call_id": "1"},
        ],
        max_completion_tokens=8,
    ),
    "instructor, JSON": dict(response_format=SCHEMA, max_tokens=8),
    "langchain, logprobs": dict(stream=False, logprobs=True, top_logprobs=2, max_completion_tokens=8, n=2),
    "langchain, reasoning": dict(stream=False, max_completion_tokens=8, reasoning_effort="low"),
    "langchain, completions": dict(
        prompt=["a", "b"],
        frequency_penalty=0,
        logprobs=None,
        max_tokens=8,
        n=1,
        presence_penalty=0,
        seed=None,
        temperature=0.7,
        top_p=1,
    ),
    "llama-index, completions": dict(prompt="hi", logprobs=0, max_tokens=8, stream=True, temperature=0.1),
    "ai": dict(
        max_tokens=8,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0,
        presence_penalty=0,
        stop=["x"],
        seed=1,
        messages=[USER, {"role": "assistant", "content": "b"}, USER],
        stream=True,
        stream_options={"include_usage": True},
    ),
}
REFUSED = {
    "langchain, tools": (CHAT, dict(tools=[TOOL]), "start the server with --tool-call-parser"),
    "instructor, tools": (
        CHAT,
        dict(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}}),
        "start the server with --tool-call-parser",
    ),
    "openai, embeddings": ("/v1/embeddings", dict(input="a"), "There are /v1/chat/completions, /v1/responses and"),
}


@pytest.mark.parametrize("fields", [pytest.param(fields, id=name) for name, fields in ANSWERED.items()])
def test_a_client_gets_its_answer(server, fields):
    path, content = (TEXT, body(**fields)) if "prompt" in fields else (CHAT, chat_body(**fields))
    status, _, answer = ask(server, path, content)
    assert status == 200, answer
    if fields.get("stream"):
        *chunks, end = answer.strip().split("\n\n")
        assert end == "data: [DONE]"
        answer = chunks[-1].removeprefix("data: ")
    answer = json.loads(answer)
    assert answer["object"].removesuffix(".chunk") == ("text_completion" if path == TEXT else "chat.completion")
    if fields.get("ignore_eos"):
        assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_is_refused_in_a_clear_sentence(server, name):
    path, fields, message = REFUSED[name]
    status, _, answer = ask(server, path, chat_body(**fields))
    assert (status // 100, message in json.loads(answer)["error"]["message"]) == (4, True), answer


def test_helpers_errors_and_retries_of_the_openai_client(server):
    """Helpers, raw answers, errors and retries, and many clients at once."""
    client = server.client
    raw = client.chat.completions.with_raw_response.create(model="model", messages=[USER], max_tokens=4)
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    options = dict(model="model", messages=[USER], temperature=0, max_tokens=8)
    choice = client.chat.completions.create(**options, extra_body={"return_token_ids": True}).choices[0]
    options |= dict(logprobs=True, stream_options={"include_usage": True})
    with client.chat.completions.stream(**options, extra_body={"stop_token_ids": choice.token_ids[4:5]}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == len(final.choices[0].logprobs.content) <= 5
    assert chat(server, messages=[USER, final.choices[0].message.model_dump(), USER], max_tokens=4).choices
    for error, options in (
        (openai.BadRequestError, dict(temperature=3)),
        (openai.NotFoundError, dict(model="other")),
    ):
        with pytest.raises(error) as raised:
            complete(server, **options)
        assert raised.value.param in options
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1e-4).completions.create(model="model", prompt="a")

    async def ask_many():
        options = dict(base_url=str(client.base_url), api_key=KEY, max_retries=20)  # after 429, which most requests get
        async with openai.AsyncOpenAI(**options) as many:
            options = dict(model="model", prompt=PROMPT, max_tokens=4, temperature=0)
            return await asyncio.gather(*(many.completions.create(**options) for _ in range(24)))

    assert {answer.choices[0].text for answer in asyncio.run(ask_many())} == {*texts(complete(server, max_tokens=4))}


@pytest.mark.parametrize("pattern", client_patterns.PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_of_the_soak_is_answered(server, pattern):
    """Other requests of lm-eval and guidellm."""
    options = dict(host="127.0.0.1", port=server.port, num_clients=2, seconds=0.2, key=KEY)
    assert len(client_patterns.run_pattern(pattern, **options)) >= 2


def test_requests_that_get_slower_are_noticed():
    def check(seconds):
        client_patterns.check_drift("some", list(zip(itertools.accumulate(seconds, initial=0), seconds, strict=False)))

    check([0.1] * 600 + [0.5] * 120)  # with a busy neighbour
    with pytest.raises(AssertionError, match="in the first quarter of the time and"):
        check([0.09 * 1.5 ** (i // 4) for i in range(56)])
    with pytest.raises(AssertionError, match="only 15 requests"):
        check([1] * 15)
