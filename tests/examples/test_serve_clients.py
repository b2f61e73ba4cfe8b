"""Requests as real clients send them: recorded bodies of many, the `openai` client itself, and the soak's patterns."""

import asyncio
import json

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai

from benchmarks.soak import client_patterns
from tests.examples.serving import KEY, PROMPT, ask, chat, complete

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "P", "strict": True, "schema": {"type": "object"}}}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# Recorded from lm-eval 0.4.13, guidellm 0.8.1, litellm, langchain-openai 1.7, instructor 1.17, llama-index, haystack-ai
# 3.4 and ai 6.0; only the texts are shorter.
ANSWERED = {
    "lm-eval, loglikelihood": (
        TEXT,
        dict(prompt=[[1, 2, 3], [4, 5]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True),
    ),
    "lm-eval, humaneval": (
        TEXT,
        dict(
            prompt=["def f():"],
            max_tokens=8,
            temperature=0,
            stop=["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
            seed=1234,
        ),
    ),
    "lm-eval, chat": (CHAT, dict(messages=[USER], max_tokens=8, temperature=0, stop=["\n\n"], seed=1234)),
    "guidellm": (
        TEXT,
        dict(
            prompt="a b",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_tokens=8,
            stop=None,
            ignore_eos=True,
        ),
    ),
    "guidellm, chat": (
        CHAT,
        dict(
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_completion_tokens=8,
            stop=None,
            ignore_eos=True,
        ),
    ),
    "litellm, vLLM's extras": (CHAT, dict(messages=[USER], max_tokens=8, top_k=5, repetition_penalty=1.0, min_p=0.0)),
    "litellm, tools": (CHAT, dict(messages=[USER], max_tokens=8, tools=[TOOL], tool_choice="none")),
    "litellm, an answer in the history": (
        CHAT,
        dict(
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
    ),
    "langchain": (
        CHAT,
        dict(stream=False, messages=[{"content": "s", "role": "system"}, USER], max_completion_tokens=8, stop=["5"]),
    ),
    "langchain, tools in the history": (
        CHAT,
        dict(
            stream=False,
            messages=[
                USER,
                {"content": None, "role": "assistant", "tool_calls": [CALL]},
                {"content": "r", "role": "tool", "tool_call_id": "1"},
            ],
            max_completion_tokens=8,
        ),
    ),
    "langchain, logprobs": (
        CHAT,
        dict(stream=False, messages=[USER], logprobs=True, top_logprobs=2, max_completion_tokens=8, n=2),
    ),
    "langchain, reasoning": (
        CHAT,
        dict(stream=False, messages=[USER], max_completion_tokens=8, reasoning_effort="low"),
    ),
    "langchain, completions": (
        TEXT,
        dict(
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
    ),
    "llama-index": (CHAT, dict(messages=[USER], max_tokens=8, stream=True, temperature=0.1)),
    "llama-index, completions": (TEXT, dict(prompt="hi", logprobs=0, max_tokens=8, stream=True, temperature=0.1)),
    "haystack": (CHAT, dict(stream=False, messages=[USER], max_tokens=8, n=1)),
    "ai": (
        CHAT,
        dict(
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
    ),
    "ai, completions": (TEXT, dict(max_tokens=8, prompt="user:\nThe sea\n\nassistant:\n", stop=["\nuser:"])),
}
REFUSED = {
    "langchain, tools": (CHAT, dict(messages=[USER], tools=[TOOL]), 'tools is supported only with tool_choice "none"'),
    "instructor, tools": (
        CHAT,
        dict(messages=[USER], tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}}),
        'tools is supported only with tool_choice "none"',
    ),
    "instructor, JSON": (CHAT, dict(messages=[USER], response_format=SCHEMA), "response_format is supported only as"),
    "ai, responses": ("/v1/responses", dict(input=[USER]), "There are /v1/chat/completions and /v1/completions here"),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_a_client_gets_its_answer(server, name):
    path, fields = ANSWERED[name]
    status, _, answer = ask(server.port, path, json.dumps({"model": "model"} | fields))
    assert status == 200, answer
    if fields.get("stream"):
        *chunks, end = answer.strip().split("\n\n")
        assert end == "data: [DONE]"
        answer = chunks[-1].removeprefix("data: ")
    answer = json.loads(answer)
    kind = "text_completion" if path == TEXT else "chat.completion"
    assert answer["object"].removesuffix(".chunk") == kind
    if fields.get("ignore_eos"):
        assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_is_refused_in_a_clear_sentence(server, name):
    path, fields, message = REFUSED[name]
    status, _, answer = ask(server.port, path, json.dumps({"model": "model"} | fields))
    assert (status // 100, message in json.loads(answer)["error"]["message"]) == (4, True), answer


def test_a_day_of_the_openai_client(server):
    """Its helpers, raw answers, errors and retries, and many clients at once."""
    client = server.client
    assert client.models.list().data[0].id == "model"
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
    with client.completions.with_streaming_response.create(model="model", prompt="a", max_tokens=4) as answer:
        assert answer.http_response.status_code == 200
        assert answer.parse().choices[0].finish_reason
    history = [USER]
    for _ in range(3):
        message = chat(server, messages=history, max_tokens=4).choices[0].message
        history += [message.model_dump(), USER]
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
        options = dict(base_url=str(client.base_url), api_key=KEY, max_retries=20)  # after 429, which is for most
        async with openai.AsyncOpenAI(**options) as many:
            calls = [
                many.completions.create(model="model", prompt=PROMPT, max_tokens=4, temperature=0) for _ in range(24)
            ]
            return await asyncio.gather(*calls)

    texts = {answer.choices[0].text for answer in asyncio.run(ask_many())}
    assert texts == {complete(server, max_tokens=4).choices[0].text}


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("pattern", client_patterns.PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_of_the_soak_is_answered(server, pattern, num_clients):
    options = dict(host="127.0.0.1", port=server.port, num_clients=num_clients, seconds=0.2, key=KEY)
    timed = client_patterns.run_pattern(pattern, **options)
    assert len(timed) >= num_clients
    assert all(0 <= since < 0.2 < 60 > seconds for since, seconds in timed)


def test_requests_that_get_slower_are_noticed():
    def timed(seconds):
        since, found = 0.0, []
        for one in seconds:
            found.append((since, one))
            since += one
        return found

    client_patterns.check_drift("steady", timed([0.1] * 1000))
    client_patterns.check_drift("with a busy neighbour", timed([0.1] * 600 + [0.5] * 120))
    with pytest.raises(AssertionError, match="in the first quarter of the time and"):
        client_patterns.check_drift("slower", timed(0.09 * 1.5 ** (i // 4) for i in range(56)))
    with pytest.raises(AssertionError, match="only 15 requests"):
        client_patterns.check_drift("few", timed([1] * 15))
