"""examples/serve.py, asked by the real `openai` client: answers, streams, refusals, clients that leave, draining."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
import safetensors.numpy

import serve
from benchmarks.engine import stand_in
from benchmarks.engine.stand_in import StandIn
from jaxpaged import Completion, RequestOutput, SamplingParams
from lib import engine_thread, http_server
from lib.checkpoint import CheckpointError
from lib.command_line import RequestError
from lib.engine_thread import EngineThread, Generation
from lib.http_server import Server, bind
from lib.openai_forms import read_ask
from lib.service import PAGE_POLICY, Service
from lib.text_stream import HALF
from tests.examples.tiny_checkpoint import EOS, VOCAB, greedy, next_logits, write_adapter
from tests.examples.tiny_families import PROMPT as PROMPT_OF_FAMILIES
from tests.examples.tiny_families import write_family

KEY, PROMPT = "secret", "The quick brown fox"
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
LONG = dict(prompt="page", temperature=0, max_tokens=100)  # the answer is as long
SIZES = [
    "--num-seats=4",
    "--chunk-tokens=16",
    "--steps-per-slice=4",
    "--block-size=8",
    "--max-queue=6",
    "--prefix-cache",
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters: their folders, and what they add to the tensors."""
    folder = tmp_path_factory.mktemp("adapters")
    layers = {
        "small": (1, ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")),
        "large": (3, ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")),
    }
    return {
        name: (folder / name, write_adapter(folder / name, seed=rank, rank=rank, layers=of_one))
        for name, (rank, of_one) in layers.items()
    }


@pytest.fixture(scope="module")
def service(tiny, adapters):
    options = ["--model", str(tiny.path), "--dtype=float32", f"--api-key={KEY}", "--max-body-bytes=5000", *SIZES]
    options += [f"--adapter={name}={folder}" for name, (folder, _) in adapters.items()]
    return serve.create_service(serve.parse_arguments(options))


@contextlib.contextmanager
def running(service, drain_seconds=30.0):
    """A server around the engine of a service, which no other server uses meanwhile."""
    engine = service.engine._engine
    thread_of_engine = EngineThread(engine, most_completions=service.engine.most_completions)
    service = dataclasses.replace(service, engine=thread_of_engine)
    server = Server(service, drain_seconds=drain_seconds)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        wait_for(lambda: server.loop)
        port = listener.getsockname()[1]
        options = dict(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        try:
            with openai.OpenAI(**options) as client:
                yield SimpleNamespace(server=server, thread=thread, port=port, client=client, service=service)
        finally:
            if not service.engine.is_draining:
                server.handle_exit(signal.SIGTERM, None)
            thread.join(60)
        assert not thread.is_alive()
    if service.engine.failure is None:
        assert not engine.has_unfinished_requests
        assert service.engine.num_open == 0
        assert int(engine._runner.state.allocator.num_free) == engine._options.num_blocks - 1


@pytest.fixture(scope="module")
def server(service):
    with running(service) as server:
        yield server


@pytest.fixture
def gate(service, monkeypatch):
    """The engine waits before each step while the gate is shut; `is_reached` says that it has come there."""
    engine, gate, is_reached = service.engine._engine, threading.Event(), threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: is_reached.set() or (gate.wait(60) and step()))
    yield SimpleNamespace(set=gate.set, is_reached=is_reached.is_set)
    gate.set()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(port, path="/v1/completions", body=None, **headers):
    """A raw request: status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    connection.request("GET" if body is None else "POST", path, body, headers)
    with contextlib.closing(connection), connection.getresponse() as response:
        return response.status, response.headers, response.read().decode()


def complete(server, **options):
    return server.client.completions.create(**dict(model="model", prompt=PROMPT, temperature=0) | options)


def chat(server, content=PROMPT, **options):
    messages = [{"role": "user", "content": content}]
    return server.client.chat.completions.create(**dict(model="model", messages=messages, temperature=0) | options)


def test_completions_are_those_of_the_model(server, tiny):
    prompts = [PROMPT, "a", "12345678"]
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    expected = [greedy(tiny.tensors, prompt, 12) for prompt in ids]
    for prompt in (prompts, ids):
        answer = complete(server, prompt=prompt, max_tokens=12)
        assert [choice.text for choice in answer.choices] == [tiny.tokenizer.decode(tokens) for tokens in expected]
        reasons = ["stop" if tokens[-1] == EOS else "length" for tokens in expected]
        assert [choice.finish_reason for choice in answer.choices] == reasons
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == sum(map(len, expected))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_request_names_an_adapter_as_its_model(server, tiny, adapters):
    prompt = tiny.tokenizer.encode(PROMPT * 2)
    seen = {tuple(greedy(tiny.tensors, prompt, 10))}
    for _ in range(2):  # the second time the prefix cache knows the prompt
        for name, (_, added) in adapters.items():
            answer = complete(server, model=name, prompt=prompt, max_tokens=10)
            merged = tiny.tensors | {layer: tiny.tensors[layer] + more for layer, more in added.items()}
            expected = greedy(merged, prompt, 10)
            assert (answer.model, answer.choices[0].text) == (name, tiny.tokenizer.decode(expected))
            seen.add(tuple(expected))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(use_dora=True), "its use_dora is True, which is not known here"),
        (dict(modules_to_save=["lm_head"]), "its modules_to_save is"),
        (dict(r=0), "r must be a whole number from 1"),
        (dict(lora_alpha=None), "lacks 'lora_alpha'"),
        (dict(layers=("mlp.other_proj",)), "layers.0.mlp.other_proj, which this model does not have"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(tiny, tmp_path, change, message):
    layers = change.pop("layers", ("mlp.up_proj",))
    write_adapter(tmp_path, seed=0, rank=1, layers=("mlp.up_proj",), **change)
    if layers != ("mlp.up_proj",):
        file = tmp_path / "adapter_model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file({k.replace("mlp.up_proj", layers[0]): v for k, v in tensors.items()}, file)
    options = ["--model", str(tiny.path), f"--adapter=one={tmp_path}", *SIZES]
    with pytest.raises(CheckpointError, match=message):
        serve.create_service(serve.parse_arguments(options))


def test_adapters_have_names_of_their_own(tiny):
    for name in ("model", "one"):
        options = ["--model", str(tiny.path), *[f"--adapter={name}={tiny.path}"] * (1 if name == "model" else 2)]
        with pytest.raises(RequestError, match="a name of its own"):
            serve.create_service(serve.parse_arguments(options))
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--adapter=one"])


@pytest.mark.parametrize("call", [complete, chat])
def test_a_stream_says_the_same_piece_by_piece(server, call):
    # Hot: most bytes that come are no text, and many are parts of characters.
    options = dict(max_tokens=30, temperature=1.5, seed=3, n=2, top_p=0.99, extra_body={"top_k": 200})
    whole = call(server, **options)
    chunks = list(call(server, **options, stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert reasons[choice.index] is None
        texts[choice.index] += choice.text if call is complete else choice.delta.content
        reasons[choice.index] = choice.finish_reason
    expected = [choice.text if call is complete else choice.message.content for choice in whole.choices]
    assert texts == expected
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 6
    assert all(chunk.usage is None for chunk in call(server, stream=True, max_tokens=2))


def test_logprobs_are_those_of_the_tokens(server, tiny):
    answer = complete(server, max_tokens=6, logprobs=0).choices[0]
    prompt = tiny.tokenizer.encode(PROMPT)
    tokens = greedy(tiny.tensors, prompt, 6)
    for i, (token, logprob) in enumerate(zip(tokens, answer.logprobs.token_logprobs, strict=True)):
        logits = next_logits(tiny.tensors, prompt + tokens[:i])
        assert logprob == pytest.approx(logits[token] - np.logaddexp.reduce(logits), abs=1e-3)
    assert answer.logprobs.tokens == [tiny.tokenizer.decode([token]) for token in tokens]
    assert answer.logprobs.text_offset[0] == 0
    content = chat(server, max_tokens=6, logprobs=True).choices[0].logprobs.content
    streamed = chat(server, max_tokens=6, logprobs=True, stream=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in streamed]
    entries = [entry for piece in pieces for entry in piece]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in content], abs=1e-4)
    assert [(entry.token, entry.bytes) for entry in entries] == [(entry.token, entry.bytes) for entry in content]
    assert len(content) == 6


def likely(tiny, tokens, count):
    """By its text: the logprobs of the `count` most likely tokens after these, and of one more token."""
    logits = next_logits(tiny.tensors, tokens[:-1])
    logprobs = logits - np.logaddexp.reduce(logits)
    order = [*np.argsort(-logits)[:count].tolist(), tokens[-1]]
    return {tiny.tokenizer.decode([token]): pytest.approx(logprobs[token], abs=1e-3) for token in reversed(order)}


def joined(pieces):
    """The fields of logprobs of a completion's stream, each as one list."""
    parts = [chunk.choices[0].logprobs.model_dump() for chunk in pieces]
    return {
        name: None if parts[0][name] is None else [entry for part in parts for entry in part[name]] for name in parts[0]
    }


@pytest.mark.parametrize("count", [1, 3])
def test_top_logprobs_are_those_of_the_model(server, tiny, count):
    tokens = tiny.tokenizer.encode(PROMPT)
    options = dict(temperature=1.5, seed=4, max_tokens=6, logprobs=count)  # so that others than the likeliest are drawn
    found = complete(server, **options).choices[0].logprobs
    for text, logprob, entries in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        with_text = [token for token in range(VOCAB) if tiny.tokenizer.decode([token]) == text]
        logits = next_logits(tiny.tensors, tokens)
        logprobs = logits - np.logaddexp.reduce(logits)
        tokens.append(min(with_text, key=lambda token: abs(logprobs[token] - logprob)))
        assert entries == likely(tiny, tokens, count)
    assert any(len(entries) > count for entries in found.top_logprobs)
    assert joined(complete(server, stream=True, **options)) == found.model_dump()
    options = dict(max_tokens=6, logprobs=True, top_logprobs=count)
    chat(server, **options)  # its prompt is found by both that are compared, so that their last bits are equal
    content = chat(server, **options).choices[0].logprobs.content
    for entry in content:
        assert entry.top_logprobs[0].model_dump() == entry.model_dump(exclude={"top_logprobs"})
        assert len(entry.top_logprobs) == count
        assert sorted(entry.top_logprobs, key=lambda other: -other.logprob) == entry.top_logprobs
    assert joined(chat(server, stream=True, **options))["content"] == [entry.model_dump() for entry in content]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("is_text", [True, False])
def test_an_echo_has_the_logprobs_of_the_prompt(server, tiny, max_tokens, is_text):
    """What lm-eval's local-completions asks for, several prompts at once; the second time they are cached."""
    prompts = [PROMPT, "a", "The quick brown"]
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    options = dict(prompt=prompts if is_text else ids, max_tokens=max_tokens, echo=True)
    for _ in range(2):
        answer = complete(server, logprobs=1, **options)
        assert answer.usage.completion_tokens == sum(max_tokens for _ in prompts)
        for prompt, choice in zip(ids, answer.choices, strict=True):
            tokens, found = prompt + greedy(tiny.tensors, prompt, max_tokens), choice.logprobs
            assert choice.text == tiny.tokenizer.decode(tokens)
            assert choice.finish_reason == "length"
            assert found.tokens == [tiny.tokenizer.decode([token]) for token in tokens]
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            for i in range(1, len(tokens)):
                assert found.top_logprobs[i] == likely(tiny, tokens[: i + 1], 1)
                assert found.token_logprobs[i] == found.top_logprobs[i][found.tokens[i]]
            for begin, token in zip(found.text_offset, found.tokens, strict=True):
                assert choice.text[begin:].startswith(token) or HALF in token
    assert [choice.text for choice in complete(server, **options).choices] == [choice.text for choice in answer.choices]


def test_a_streamed_echo_says_the_same(server):
    options = dict(max_tokens=5, echo=True, n=2, temperature=1.0, seed=5)
    whole = complete(server, logprobs=2, **options).choices
    chunks = list(complete(server, logprobs=2, stream=True, **options))
    for choice in whole:
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(chunk.choices[0].text for chunk in own) == choice.text
        assert choice.text.startswith(PROMPT)
        assert joined(own) == choice.logprobs.model_dump()
    stopped = complete(server, max_tokens=30, echo=True, stop=[PROMPT[:3], whole[0].text[len(PROMPT) :][2:4]])
    assert stopped.choices[0].text.startswith(PROMPT)  # a stop string in the prompt stops nothing


def test_a_chat_is_rendered_and_its_control_tokens_are_text(server, tiny):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a<eos>b"}]
    (prompt,) = tiny.tokenizer.encode_conversations([messages])
    assert prompt.count(EOS) == 2  # the template's
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": t} for t in ("a<e", "os>b")]}]
    for form in (messages, parts):
        answer = chat(server, messages=form, max_completion_tokens=8)
        expected = greedy(tiny.tensors, prompt, 8)
        assert answer.choices[0].message.content == tiny.tokenizer.decode(expected)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(expected)
    # Without a limit, up to what a request may have.
    answer = chat(server, temperature=1.0, seed=1)
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == 128


def test_a_stop_string_ends_the_text_before_it(server):
    options = dict(max_tokens=60, temperature=2, seed=4)
    text = complete(server, **options).choices[0].text
    at = next(i for i in range(5, len(text)) if text.find(text[i : i + 2]) == i and "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    for stops in (stop, ["never there", stop, text[at : at + 9]]):
        answer = complete(server, **options, stop=stops)
        assert answer.choices[0].text == text[:at]
        assert answer.choices[0].finish_reason == "stop"
        assert at + 2 <= answer.usage.completion_tokens < 60
        chunks = list(complete(server, **options, stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("ended", [0, 1])
def test_a_stop_string_ends_one_completion_and_the_others_go_on(server, ended):
    engine, options = server.service.engine, dict(max_tokens=60, temperature=2, seed=4, n=2)
    texts = [choice.text for choice in complete(server, **options).choices]
    text, other = texts[ended], texts[1 - ended]
    pairs = (text[i : i + 2] for i in range(5, len(text)))
    stop = next(pair for pair in pairs if pair not in other and "\ufffd" not in pair)
    before = engine.finished.copy()
    answer = complete(server, **options, stop=stop)
    assert answer.choices[ended].text == text.partition(stop)[0]
    assert answer.choices[1 - ended].text == other
    wait_for(lambda: engine.num_open == 0)
    assert engine.finished - before == {"abort": 1, answer.choices[1 - ended].finish_reason: 1}
    assert engine.stats.num_free_blocks == engine._engine._options.num_blocks - 1


def test_choices_are_in_the_order_of_the_prompts(server):
    options = dict(max_tokens=8, temperature=2, seed=7, n=2)
    prompts = [PROMPT, "12345678"]
    alone = [choice.text for prompt in prompts for choice in complete(server, prompt=prompt, **options).choices]
    assert len(set(alone)) == 4
    together = complete(server, prompt=prompts, **options).choices
    assert [choice.index for choice in together] == [0, 1, 2, 3]
    assert [choice.text for choice in together] == alone


def body(**fields):
    return json.dumps(dict(model="model", prompt="a") | fields)


def chat_body(**fields):
    return json.dumps({"model": "model", "messages": [{"role": "user", "content": "a"}]} | fields)


REFUSED = [
    ("", 400, "must be a JSON object"),
    ("[1]", 400, "must be a JSON object"),
    ("[" * 4000, 400, "must be a JSON object"),
    (b"\xff{}", 400, "must be a JSON object"),
    (f'{{"model": "model", "prompt": "a", "seed": {"1" * 4500}}}', 400, "must be a JSON object"),
    ('{"model": "model"}', 400, "The field 'prompt' is missing."),
    (body(model="gpt-9"), 404, "The model 'gpt-9' does not exist here"),
    (body(model=7), 400, "model must be a text; got 7."),
    (body(prompt=""), 400, "The prompt holds no token."),
    (body(prompt=[]), 400, "prompt must be a text, a list of token ids, or a list of these."),
    (body(prompt=[[1], [2.5]]), 400, "prompt must be a text, a list of token ids, or a list of these."),
    (body(prompt=[1, 300]), 400, "prompt must hold token ids from 0 to 299."),
    (body(prompt=["a"] * 11), 400, "at most 10 completions here; got 11."),
    (body(prompt="\ud800"), 400, "prompt must be Unicode"),
    (body(prompt="a" * 200), 400, "has 200 tokens and asks for 1 more; a request has at most 128 together here."),
    (body(max_tokens=128), 400, "has 1 tokens and asks for 128 more; a request has at most 128 together here."),
    (body(max_tokens=0), 400, "max_tokens must be a whole number from 1 to"),
    (body(max_tokens=10**30), 400, "max_tokens must be a whole number from 1 to"),
    (body(max_tokens=True), 400, "max_tokens must be a whole number from 1 to"),
    (body(max_tokens="4"), 400, "max_tokens must be a whole number from 1 to"),
    (body(temperature=float("nan")), 400, "temperature must be a number from 0 to 2; got nan."),
    (body(temperature=-1), 400, "temperature must be a number from 0 to 2; got -1."),
    (body(temperature=10**400), 400, "temperature must be a number from 0 to 2; got 1000"),
    (body(top_p=1.01), 400, "top_p must be a number from 0 to 1; got 1.01."),
    (body(top_k=-2), 400, "top_k must be a whole number from -1 to 300; got -2."),
    (body(seed=2**63), 400, "seed must be a whole number from -9223372036854775808 to 9223372036854775807"),
    (body(n=0), 400, "n must be a whole number from 1 to 16; got 0."),
    (body(stop=["a"] * 5), 400, "stop must be a text or at most 4 texts"),
    (body(stop=""), 400, "stop must be a text or at most 4 texts"),
    (body(best_of=2), 400, "best_of is not supported here; leave it out."),
    (body(echo=1), 400, "echo must be true or false; got 1."),
    (body(logit_bias={"1": 5}), 400, "logit_bias is not supported here; leave it out."),
    (body(**{"a\n\ud800": 1}), 400, r"'a\n\ud800' is not supported here; leave it out."),
    (body(logprobs=6), 400, "logprobs must be a whole number from 0 to 5; got 6."),
    (body(logprobs=True), 400, "logprobs must be a whole number from 0 to 5; got True."),
    (body(top_logprobs=1), 400, "top_logprobs is not supported here; leave it out."),
    (body(stream_options={"include_usage": True}), 400, "stream_options goes with stream."),
    (body(stream="yes"), 400, "stream must be true or false; got 'yes'."),
    ("x" * 5001, 413, "The body must be at most 5000 bytes."),
]
REFUSED_CHATS = [
    (body(), "prompt is not supported here; leave it out."),
    (chat_body(logprobs=True, top_logprobs=6), "top_logprobs must be a whole number from 0 to 5; got 6."),
    (chat_body(top_logprobs=1), "top_logprobs goes with logprobs: true."),
    (chat_body(logprobs=1), "logprobs must be true or false; got 1."),
    (chat_body(echo=True), "echo is not supported here; leave it out."),
    (json.dumps({"model": "model", "messages": []}), "messages must be a list of at least one message."),
    (json.dumps({"model": "model", "messages": ["hi"]}), "expected a JSON object; got 'hi'."),
    (json.dumps({"model": "model", "messages": [{"role": "user"}]}), "The field 'content' is missing."),
    (
        json.dumps({"model": "model", "messages": [{"role": "tool", "content": "a"}]}),
        "role must be one of developer, system, user, assistant; got 'tool'.",
    ),
    (
        json.dumps({"model": "model", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        "content must be a text, or a list of parts of the type text.",
    ),
]


def test_what_clients_of_openai_and_vllm_send_is_read():
    ask = read_ask(body(seed=-1, top_k=-1).encode(), model="model", is_chat=False, vocab_size=300)
    assert (ask.params.seed, ask.params.top_k) == (2**32 - 1, 0)
    chat = json.dumps({"model": "model", "messages": [{"role": "developer", "content": "a"}]}).encode()
    ask = read_ask(chat, model="model", is_chat=True, vocab_size=300)
    assert read_ask(b'{"prompt": "a"}', model="model", is_chat=False, vocab_size=300).prompts == ["a"]
    assert ask.messages == [{"role": "system", "content": "a"}]


def test_what_cannot_be_answered_is_refused_in_one_sentence(server, capfd):
    refused = [("/v1/completions", *row) for row in REFUSED]
    refused += [("/v1/chat/completions", content, 400, message) for content, message in REFUSED_CHATS]
    refused += [("/v1/nothing", "{}", 404, "Not Found."), ("/health", "{}", 405, "Method Not Allowed.")]
    for path, content, status, message in refused:
        found, _, answer = ask(server.port, path, content)
        error = json.loads(answer)["error"]
        assert (found, message in error["message"]) == (status, True), (content[:100], answer)
        assert error["message"].count("\n") == 0
        assert error["message"].endswith(".")
        assert error["type"] == "invalid_request_error"
    assert ask(server.port, body=body(), **{"Content-Type": "text/plain"})[0] == 415
    assert "GET" in ask(server.port, "/health", "{}")[1]["Allow"]
    assert server.service.engine.num_open == 0
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        complete(server, best_of=2)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_key_is_asked_for_where_there_is_one(server):
    for path, content in (("/v1/completions", body()), ("/v1/models", None)):
        for key in ("Bearer wrong", "", KEY, "Bearer \u00e9"):
            status, _, answer = ask(server.port, path, content, Authorization=key)
            assert status == 401
            assert json.loads(answer)["error"]["code"] == "invalid_api_key"
    assert ask(server.port, "/health", Authorization="")[0] == 200
    assert [model.id for model in server.client.models.list()] == ["model", "small", "large"]
    assert server.client.models.retrieve("model").id == "model"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")
    assert ask(server.port, "/v1/models", Authorization=f"bearer {KEY}")[0] == 200  # the scheme has no case


def test_a_client_that_leaves_gives_its_blocks_back(server, gate, monkeypatch):
    monkeypatch.setattr(http_server, "PROBE_SECONDS", 0.05)
    engine = server.service.engine
    before = engine.finished["abort"]
    streams = [complete(server, **LONG, stream=True) for _ in range(2)]
    gone = [ask_only(server.port, body(**LONG)) for _ in range(2)]
    wait_for(lambda: sum(bool(generation.requests) for generation in list(engine._open)) == 4)  # they are sent
    for client in (*streams, *gone):
        client.close()
    wait_for(lambda: not server.server.server_state.tasks)  # while the engine stands still
    gate.set()
    wait_for(lambda: engine.num_open == 0)
    assert engine.finished["abort"] == before + 4
    assert engine.stats.num_free_blocks == engine._engine._options.num_blocks - 1


def ask_only(port, content):
    """The connection of a client that has asked and reads no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", content, headers)
    return connection


def head(path="/v1/completions", *lines):
    lines = (f"POST {path} HTTP/1.1", "Host: here", f"Authorization: Bearer {KEY}", *lines)
    return "\r\n".join((*lines, "Content-Type: application/json", "", "")).encode()


def read_all(connection):
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


@pytest.mark.parametrize("closes", [(), ("Connection: close",)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_half_closed_client_gets_its_answer(server, gate, monkeypatch, is_streamed, closes):
    monkeypatch.setattr(http_server, "PROBE_SECONDS", 0.05)
    content = body(max_tokens=4, stream=is_streamed).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head("/v1/completions", f"Content-Length: {len(content)}", *closes) + content)
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: server.service.engine.num_open == 1)
        time.sleep(0.2)  # of probes
        gate.set()
        answer = read_all(connection)
    before, _, answer = answer.rpartition("HTTP/1.1 200 OK")
    assert set(before.split("\r\n")) <= {"HTTP/1.1 100 ", "HTTP/1.1 100 Continue", ""}
    assert answer.endswith("data: [DONE]\n\n\r\n0\r\n\r\n" if is_streamed else "}")
    assert server.service.engine.num_open == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_body_of_two_lengths_is_refused_and_what_follows_is_not_read(server, path):
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        lengths = f"Content-Length: {len(smuggled)}", "Transfer-Encoding: chunked"
        connection.sendall(head(path, *lengths) + smuggled)
        answer = read_all(connection)
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.count("HTTP/1.1") == 1
    assert "A request has Content-Length or Transfer-Encoding, not both." in answer


def test_a_client_that_reads_slowly_holds_one_output_and_misses_no_token():
    generation = Generation(2, [1, 1], [([1], SamplingParams())] * 2)
    for count in (1, 2, 3):
        completion = Completion([7] * count, None, "length" if count == 3 else None)
        generation.tell(0, RequestOutput(0, [completion], count == 3))
    generation.tell(1, RequestOutput(1, [Completion([8], None, "stop")], True))
    assert len(generation.news) == 2

    async def read():
        return [(index, output.outputs[0].token_ids) async for index, output in generation.outputs()]

    assert asyncio.run(read()) == [(0, [7, 7, 7]), (1, [8])]


def test_a_finished_completion_of_an_open_request_is_not_under_way(service):
    engine = EngineThread(service.engine._engine, most_completions=4)
    generation = engine.open(4)
    assert engine.num_open == 4
    engine.start(generation, [([1], SamplingParams(n=3)), ([1], SamplingParams())])
    completions = [Completion([1], None, reason) for reason in ("stop", "length", None)]
    engine._deliver([(generation, 0, RequestOutput(0, completions, False))], engine.stats)
    assert engine.num_open == 2
    assert engine.open(2)


def test_a_request_that_follows_an_answer_starts_with_the_next_slice(monkeypatch):
    engine = StandIn(num_seats=2, steps_per_slice=1, tokens_per_s=10, vocab_size=300)  # slices of 0.2 seconds
    thread, calls, step, add_request = EngineThread(engine, most_completions=4), [], engine.step, engine.add_request
    monkeypatch.setattr(stand_in, "spared", lambda seconds: 0.9 * seconds)  # so that a busy machine is in time

    def logged_step():
        calls.append("step")
        outputs = step()
        calls.extend("end" for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(engine, "step", logged_step)
    monkeypatch.setattr(engine, "add_request", lambda *args: calls.append("add") or add_request(*args))

    async def answer(num_tokens):
        generation = thread.open(1)
        thread.start(generation, [([1], SamplingParams(max_tokens=num_tokens))])
        async for _ in generation.outputs():
            pass

    async def ask():
        async with thread.running():
            other = asyncio.ensure_future(answer(9))
            await answer(6)
            await asyncio.sleep(0.02)  # the way to the client and back
            await answer(1)
            await other

    asyncio.run(ask())
    assert calls[calls.index("end") :][:3] == ["end", "add", "step"]


def test_a_busy_event_loop_gets_several_tokens_at_once(monkeypatch):
    monkeypatch.setattr(engine_thread, "LOOP_SHARE", 1e-9)  # whatever it does is too much
    monkeypatch.setattr(engine_thread, "MOST_HELD_SECONDS", 0.5)
    engine = StandIn(num_seats=1, steps_per_slice=1, tokens_per_s=50, vocab_size=300)
    thread = EngineThread(engine, most_completions=1)

    async def ask():
        async with thread.running():
            generation = thread.open(1)
            thread.start(generation, [([1], SamplingParams(max_tokens=40))])
            return [len(output.outputs[0].token_ids) async for _, output in generation.outputs()]

    counts = asyncio.run(ask())  # of 0.8 seconds
    assert (counts[0], counts[-1]) == (1, 40)
    assert 3 <= len(counts) <= 6  # one more for each half second
    assert not thread._held


def test_metrics_count_and_the_page_reads_them(server):
    def metrics():
        status, headers, text = ask(server.port, "/metrics", Authorization="")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {name: int(value) for name, value in re.findall(r"^jaxpaged_(\S+) (\d+)$", text, re.MULTILINE)}

    before = metrics()
    tokens = complete(server, max_tokens=9, n=2).usage.completion_tokens
    after = metrics()
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == tokens
    finished = [sum(n for name, n in m.items() if name.startswith("finished")) for m in (before, after)]
    assert finished[1] - finished[0] == 2
    assert after["running_requests"] == after["waiting_requests"] == 0
    assert after["found_tokens_total"] >= before["found_tokens_total"] + 16  # of the second completion
    assert after["free_blocks"] == after["blocks"] == 64  # 4 seats of 128 tokens in blocks of 8
    status, headers, page = ask(server.port, "/", Authorization="")
    assert status == 200
    assert headers["Content-Security-Policy"] == PAGE_POLICY
    assert re.findall(r"(?:src|href)=|https?://", page) == []  # nothing from elsewhere
    for name in re.findall(r"now\.(\w+)", page):
        assert name == "time" or name in after or name == "finished_requests_total", name


def test_a_full_queue_says_when_to_come_again(server, gate):
    streams = [complete(server, max_tokens=4, n=5, stream=True) for _ in range(2)]  # 4 seats, and 6 wait
    status, headers, answer = ask(server.port, body=body())
    assert (status, headers["Retry-After"]) == (429, "1")
    assert json.loads(answer)["error"]["code"] == "queue_full"
    gate.set()
    assert all(list(stream)[-1].choices[0].finish_reason for stream in streams)
    wait_for(lambda: server.service.engine.num_open == 0)
    assert complete(server, max_tokens=1).choices


def test_draining_finishes_what_is_under_way_and_takes_nothing_new(service, gate):
    with running(service) as server:
        stream = complete(server, **LONG, stream=True)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.service.engine.is_draining)
        assert ask(server.port, "/health")[0] == 503
        with pytest.raises(openai.InternalServerError, match="The server is shutting down"):
            complete(server)
        gate.set()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        server.thread.join(60)
        assert not server.thread.is_alive()


@pytest.mark.usefixtures("server")  # the first sets up logging, which must not meet capfd's stderr
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_body_that_never_ends_does_not_delay_the_end(service, monkeypatch, capfd, num_signals):
    monkeypatch.setattr(http_server, "FLUSH_SECONDS", 0.2 if num_signals == 1 else 60)
    with running(service) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(head("/v1/completions", "Content-Length: 1000") + b"{")
        wait_for(lambda: len(server.server.server_state.tasks) == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.service.engine.is_draining)
        if num_signals == 2:
            server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(30)
        assert not server.thread.is_alive()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_interrupt_as_soon_as_it_serves_is_not_lost(tiny):
    command = [sys.executable, "-c", INTERRUPTIBLE, serve.__file__, f"--model={tiny.path}", "--port=0", *SIZES[:-1]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any(line.startswith("Serving model at http://127.0.0.1:") for line in lines)
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "Draining for at most 30 seconds.\n")


def test_draining_aborts_what_takes_too_long(service, gate):
    with running(service, drain_seconds=0.05) as server:
        stream = complete(server, **LONG, stream=True)
        wait_for(gate.is_reached)  # so the request has left the inbox
        server.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: not server.service.engine._inbox.empty())  # the abort
        gate.set()
        assert list(stream)[-1].choices[0].finish_reason == "abort"


def test_draining_does_not_wait_for_a_prompt_that_is_read_too_long(service, monkeypatch):
    read, encode = threading.Event(), Service._encode
    monkeypatch.setattr(Service, "_encode", lambda self, ask: read.wait(60) and encode(self, ask))
    with running(service, drain_seconds=0.05) as server:
        engine, statuses = server.service.engine, []
        client = threading.Thread(target=lambda: statuses.append(ask(server.port, body=body())[0]))
        client.start()
        wait_for(lambda: engine.num_open == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: engine.num_open == 0)
        read.set()
        client.join(60)
        assert statuses == [503]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_engine_that_fails_ends_the_server(service, monkeypatch, error):
    engine = service.engine._engine

    def fail():
        engine.abort()
        monkeypatch.undo()
        while engine.has_unfinished_requests:
            engine.step()
        try:
            raise error("out of memory")
        except RuntimeError as failure:  # as a lost engine does
            raise RuntimeError("this engine is lost") from failure

    with running(service) as server:
        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(openai.InternalServerError, match="The engine failed"):
            complete(server)
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert str(server.service.engine.failure) == "out of memory"


@pytest.mark.slow
def test_latents_behind_the_server(tmp_path):
    """A prompt, and again as the prefix cache knows it: the tokens of transformers."""
    write_family(tmp_path, "deepseek_v3")
    tokens = json.loads(Path(__file__).with_name("data").joinpath("families.json").read_text())["deepseek_v3"]["tokens"]
    options = [f"--model={tmp_path}", "--dtype=float32", f"--api-key={KEY}", *SIZES, "--max-length=32"]
    service = serve.create_service(serve.parse_arguments(options))
    with running(service) as server:
        for _ in range(2):
            answer = complete(server, model=tmp_path.name, prompt=[PROMPT_OF_FAMILIES] * 2, max_tokens=len(tokens))
            assert [choice.text for choice in answer.choices] == [service.checkpoint.tokenizer.decode(tokens)] * 2


def test_the_memory_of_the_cache(tiny, capsys, monkeypatch):
    made = {}
    monkeypatch.setattr(serve, "create_engine", lambda model, config, **options: made.update(options))
    monkeypatch.setattr(serve, "EngineThread", lambda engine, most_completions: None)
    config = tiny.config
    options = ["--model", str(tiny.path), "--dtype=float32", "--block-size=8", "--cache-mb=1"]
    serve.create_service(serve.parse_arguments(options))
    bytes_per_token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    assert made["num_blocks"] == 10**6 // (8 * bytes_per_token)
    assert f"{made['num_blocks']:,} blocks" in capsys.readouterr().err
    assert made["host_cache_bytes"] is None
    serve.create_service(serve.parse_arguments([*options, "--prefix-cache", "--host-cache-mb=3"]))
    assert (made["prefix_cache"], made["host_cache_bytes"]) == (True, 3 * 10**6)
    with pytest.raises(RequestError, match="pass --prefix-cache too"):
        serve.create_service(serve.parse_arguments([*options, "--host-cache-mb=3"]))
    monkeypatch.setattr(serve, "layer_windows", lambda config: [None, 8])
    with pytest.raises(RequestError, match="not for models with windows"):
        serve.create_service(serve.parse_arguments([*options, "--prefix-cache", "--host-cache-mb=3"]))
    monkeypatch.undo()

    devices = 4 * config.num_kv_heads  # they hold a KV head each
    capacity = serve.find_capacity(config, serve.parse_arguments([*options, f"--tensor-parallel={devices}"]))
    assert capacity.bytes_per_token == 4 * bytes_per_token
    with pytest.raises(RequestError, match=r"--cache-mb 1 is too small: .* holds 0 blocks"):
        serve.find_capacity(config, serve.parse_arguments([*options, "--block-size=100000"]))
    with pytest.raises(SystemExit):
        serve.parse_arguments([*options, "--num-blocks=3"])
    assert "not allowed with argument --cache-mb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "num_blocks", "max_length", "reason"),
    [
        (["--max-length=64"], None, 64, None),
        ([], None, 128, "fewer than --max-length 2,048: the model's context is 128."),
        (["--max-length=4096"], 1000, 128, "fewer than --max-length 4,096: the model's context is 128."),
        (["--max-length=64"], 9, 64, None),
        (["--max-length=64"], 5, 32, "fewer than --max-length 64: the pool has 5 blocks."),
    ],
)
def test_a_maximum_length_that_is_not_reached_is_reported(tiny, capsys, options, num_blocks, max_length, reason):
    args = serve.parse_arguments([*options, "--block-size=8"])
    assert serve.find_max_length(tiny.config, args, num_blocks) == max_length
    assert capsys.readouterr().err == ("" if reason is None else f"Requests may have {max_length} tokens, {reason}\n")
