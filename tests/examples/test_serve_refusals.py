"""Requests that examples/serve.py refuses."""

import json
import secrets

import pytest
from starlette.routing import Route

from lib import completions
from lib.adapter_slots import AdapterSlots
from lib.app import create_app
from lib.chat_template import ChatTemplateError, RendererBusyError
from tests.examples.serving import KEY, ask, body, chat_body, read, running

# Bodies, messages, and the fields that the errors name, by default the first word of the message.
REFUSED = [
    ("", "must be a JSON object", None),
    ("[1]", "must be a JSON object", None),
    ("[" * 4000, "must be a JSON object", None),
    (b"\xff{}", "must be a JSON object", None),
    (f'{{"model": "model", "prompt": "a", "seed": {"1" * 4500}}}', "must be a JSON object", None),
    ('{"model": "model"}', "The field 'prompt' is missing.", "prompt"),
    (body(model=7), "model must be a text; got 7."),
    (body(prompt=""), "The prompt holds no token.", "prompt"),
    (body(prompt=[]), "prompt must be a text, a list of token ids, or a list of these."),
    (body(prompt=[[1], [2.5]]), "prompt must be a text, a list of token ids, or a list of these."),
    (body(prompt=[1, 300]), "prompt must hold token ids from 0 to 299."),
    (body(prompt=["a"] * 65), "prompt must be at most 64 prompts; got 65."),
    (body(prompt=["a"] * 11), "at most 10 completions here; got 11.", "n"),
    (body(prompt="\ud800"), "prompt must be Unicode"),
    (
        body(prompt="a" * 200),
        "has 200 tokens and asks for 1 more; a request has at most 128 together here.",
        "prompt",
    ),
    (
        body(max_tokens=128),
        "has 1 tokens and asks for 128 more; a request has at most 128 together here.",
        "prompt",
    ),
    (body(max_tokens=0), "max_tokens must be a whole number from 1 to"),
    (body(max_tokens=10**30), "max_tokens must be a whole number from 1 to"),
    (body(max_tokens=True), "max_tokens must be a whole number from 1 to"),
    (body(max_tokens="4"), "max_tokens must be a whole number from 1 to"),
    (body(temperature=float("nan")), "temperature must be a number from 0 to 2; got nan."),
    (body(temperature=-1), "temperature must be a number from 0 to 2; got -1."),
    (body(temperature=10**400), "temperature must be a number from 0 to 2; got 1000"),
    (body(top_p=1.01), "top_p must be a number from 0 to 1; got 1.01."),
    (body(top_k=-2), "top_k must be a whole number from -1 to 300; got -2."),
    (body(min_p=1.5), "min_p must be a number from 0 to 1; got 1.5."),
    (body(seed=2**63), "seed must be a whole number from -9223372036854775808 to 9223372036854775807"),
    (body(n=0), "n must be a whole number from 1 to 16; got 0."),
    (body(n=17), "n must be a whole number from 1 to 16; got 17."),
    (body(stop=["a"] * 33), "stop must be a text or at most 32 texts"),
    (body(stop="a" * 201), "stop must be a text or at most 32 texts, each of 1 to 200 characters."),
    (body(stop=""), "stop must be a text or at most 32 texts"),
    (body(stop_token_ids=[300]), "stop_token_ids must be at most 16 token ids from 0 to 299."),
    (body(stop_token_ids=[1] * 17), "stop_token_ids must be at most 16 token ids from 0 to 299."),
    (body(messages=[]), "messages is not supported here: send it to /v1/chat/completions."),
    (body(min_tokens=-1), "min_tokens must be a whole number from 0 to"),
    (body(min_tokens=3, max_tokens=2), "min_tokens must be at most max_tokens; got 3."),
    (body(min_tokens=17), "min_tokens must be at most max_tokens, which is 16 here; got 17."),
    (body(response_format={"type": "xml"}), "type must be text, json_object or json_schema", "response_format.type"),
    (body(presence_penalty=2.1), "presence_penalty must be a number from -2 to 2; got 2.1."),
    (body(frequency_penalty="1"), "frequency_penalty must be a number from -2 to 2; got '1'."),
    (body(repetition_penalty=0), "repetition_penalty must be a number from 0.001 to 1000; got 0."),
    (body(best_of=2), "best_of is not supported here; leave it out."),
    (body(echo=1), "echo must be true or false; got 1."),
    (body(logit_bias={"300": 5}), "logit_bias must be an object of at most 300 token ids from 0 to 299, each with"),
    *(
        (body(logit_bias=bias), "logit_bias must be an object of at most 300 token ids from 0 to 299")
        for bias in (
            [1],
            {"a": 5},
            {"1": 101},
            {"1": "5"},
            {"1": None},
            {"-1": 5},
            dict.fromkeys(map(str, range(301)), 1),
        )
    ),
    (body(allowed_token_ids=[]), "allowed_token_ids must be 1 to 300 token ids from 0 to 299."),
    (body(allowed_token_ids=[300]), "allowed_token_ids must be 1 to 300 token ids from 0 to 299."),
    (body(bad_words=[""]), "bad_words must be a text or at most 64 texts, each of 1 to 200 characters."),
    (body(bad_words=[[3]]), "bad_words must be a text or at most 64 texts, each of 1 to 200 characters."),
    (
        body(allowed_token_ids=[1] * 299, bad_words=["ab"]),
        "list 301 tokens together; a request has at most 300 here.",
        "allowed_token_ids",
    ),
    (body(**{"a\n\ud800": 1}), r"'a\n\ud800' is not supported here; leave it out.", "'a\\n\\ud800'"),
    (body(logprobs=6), "logprobs must be a whole number from 0 to 5, the server's --max-logprobs; got 6."),
    (body(logprobs=True), "logprobs must be a whole number from 0 to 5; got True."),
    (body(max_completion_tokens=1), "max_completion_tokens is not supported here; leave it out."),
    (body(top_logprobs=1), "top_logprobs is not supported here; leave it out."),
    (body(stream_options={"include_usage": True}), "stream_options goes with stream."),
    (body(stream="yes"), "stream must be true or false; got 'yes'."),
]


def messages(**fields):
    return chat_body(messages=[{"role": "user", "content": "a"}, fields])


REFUSED_CHATS = [
    (body(), "prompt is not supported here: send it to /v1/completions."),
    (
        chat_body(logprobs=True, top_logprobs=20),
        "top_logprobs must be a whole number from 0 to 5, the server's --max-logprobs; got 20.",
    ),
    (chat_body(tools=7), "tools must be a list of at most 128 objects."),
    (chat_body(add_generation_prompt=False), "add_generation_prompt must be true, or false with continue_final"),
    (chat_body(chat_template_kwargs=[]), "expected a JSON object; got [].", "chat_template_kwargs"),
    (chat_body(top_logprobs=1), "top_logprobs goes with logprobs: true."),
    (chat_body(logprobs=1), "logprobs must be true or false; got 1."),
    (chat_body(chat_template="{{ 1 }}"), "chat_template is not supported here; leave it out."),
    (chat_body(echo=True), "echo is not supported here; leave it out."),
    (
        chat_body(stream=True, stream_options={"include_usage": 1}),
        "include_usage must be true or false; got 1.",
        "stream_options.include_usage",
    ),
    (chat_body(messages=[]), "messages must be a list of at least one message."),
    (chat_body(messages=["hi"]), "expected a JSON object; got 'hi'.", "messages[0]"),
    (messages(role="user"), "The field 'content' is missing.", "messages[1].content"),
    (
        messages(role="other", content="a"),
        "role must be one of developer, system, user, assistant, tool; got 'other'.",
        "messages[1].role",
    ),
    (
        messages(role="user", content=[{"type": "image_url"}]),
        "content must be a text, or a list of parts of the type text.",
        "messages[1].content",
    ),
    (messages(role="user", content=[{"type": "text"}]), "The field 'text' is missing.", "messages[1].content[0].text"),
    (
        messages(role="assistant", tool_calls=[{"function": {"arguments": "a"}}]),
        "arguments must be the JSON of an object.",
        "messages[1].tool_calls[0].function.arguments",
    ),
]


def test_requests_of_openai_and_vllm_clients_are_accepted():
    params = read(body(seed=-1, top_k=-1)).params
    assert (params.seed, params.top_k) == (2**32 - 1, 0)
    assert read('{"prompt": "a"}').prompts == ["a"]
    conversation = read(chat_body(messages=[{"role": "developer", "content": "a"}]), is_chat=True).conversation
    assert conversation["messages"] == [{"role": "system", "content": "a"}]


def test_invalid_requests_are_refused_in_one_sentence(server, capfd):
    text, chat = "/v1/completions", "/v1/chat/completions"
    refused = [(path, 400, *row) for path, rows in ((text, REFUSED), (chat, REFUSED_CHATS)) for row in rows]
    refused += [
        (text, 404, body(model="gpt-9"), "The model 'gpt-9' does not exist here", "model"),
        (text, 413, "x" * 5001, "The body must be at most 5000 bytes.", None),
        ("/v1/nothing", 404, "{}", "Not Found.", None),
        ("/health", 405, "{}", "Method Not Allowed.", None),
    ]
    for path, status, content, message, *param in refused:
        found, _, answer = ask(server, path, content)
        error = json.loads(answer)["error"]
        assert (found, message in error["message"]) == (status, True), (content[:100], answer)
        assert [error["param"]] == (param or [message.split()[0]]), answer
        assert error["message"].count("\n") == 0
        assert error["message"].endswith(".")
        assert error["type"] == "invalid_request_error"
    assert ask(server, body=body(), **{"Content-Type": "text/plain"})[0] == 415
    assert "GET" in ask(server, "/health", "{}")[1]["Allow"]
    assert server.engines.num_open == 0
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(ChatTemplateError("It refuses."), 400, None), (RendererBusyError("The machine is busy."), 503, "1")],
)
def test_a_busy_machine_is_not_a_client_error(server, monkeypatch, error, status, retry_after):
    def encode_conversations(*args, **options):
        raise error

    monkeypatch.setattr(type(server.service.checkpoint.tokenizer), "encode_conversations", encode_conversations)
    for path in ("/v1/chat/completions", "/tokenize"):
        found, headers, answer = ask(server, path, chat_body())
        assert (found, headers["Retry-After"]) == (status, retry_after)
        assert json.loads(answer)["error"]["message"] == str(error)
    assert server.engines.num_open == 0


def test_all_paths_but_the_counts_require_the_key(server):
    adapters = AdapterSlots(num_empty=1)
    with running(server.service, adapters=adapters, has_tokenizer_info=True) as opened:
        without_key = {}
        for route in create_app(opened.service).routes:
            assert type(route) is Route  # no folder of files
            path, content = route.path.replace("{model:path}", "model"), "{}" if "POST" in route.methods else None
            without_key[path], _, answer = ask(opened, path, content, Authorization="")
            if without_key[path] != 200:
                assert json.loads(answer)["error"]["code"] == "invalid_api_key"
    assert {path for path, status in without_key.items() if status == 200} == {"/", "/health", "/metrics", "/version"}
    assert set(without_key.values()) == {200, 401}
    assert len(without_key) == 15


def test_a_wrong_key_is_refused_and_compared_in_constant_time(server, monkeypatch):
    compared, compare = [], secrets.compare_digest
    monkeypatch.setattr(secrets, "compare_digest", lambda *keys: compared.append(keys) or compare(*keys))
    for sent in ("Bearer wrong", "", KEY, "Bearer \u00e9"):
        status, _, answer = ask(server, "/v1/models", Authorization=sent)
        assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
    assert compared == [(b"wrong", KEY.encode()), ("\u00e9".encode("latin-1"), KEY.encode())]
    assert ask(server, "/v1/models", Authorization=f"bearer {KEY}")[0] == 200  # the scheme is case-insensitive


def test_a_server_without_a_key_answers_only_as_localhost(server):
    with running(server.service, api_key=None, checks_host=True) as opened:
        for host in ("localhost", "LocalHost:8000", "127.0.0.1:80", "[::1]", "[::1]:8000"):
            assert ask(opened, "/v1/models", Host=host)[0] == 200
        for host in ("", "a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example", "0.0.0.0", "::1"):
            for path, content in (("/v1/completions", body()), ("/metrics", None)):
                status, _, answer = ask(opened, path, content, Host=host)
                assert (status, "set a key" in json.loads(answer)["error"]["message"]) == (403, True), host
    assert ask(server, "/v1/models", Host="a.example")[0] == 200  # the key protects it


@pytest.mark.parametrize(
    "path", ["/../serve.py", "/%2e%2e/serve.py", "//etc/passwd", "/lib/app.py", "/serve_page.html"]
)
def test_no_path_is_a_file(server, path):
    assert ask(server, path)[0] == ask(server, f"/v1/models/..{path}")[0] == 404


def test_an_unexpected_error_tells_the_client_nothing(server, monkeypatch):
    def fail(*_):
        raise ValueError("a line of the code")

    monkeypatch.setattr(completions, "encode", fail)
    for is_streamed in (False, True):
        status, _, answer = ask(server, body=body(stream=is_streamed))
        assert (status, json.loads(answer)["error"]["message"]) == (500, "The server failed.")
    assert server.engines.num_open == 0
