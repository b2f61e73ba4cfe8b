"""A server of examples/serve.py around a tiny model, and requests to it."""

import asyncio
import collections
import contextlib
import dataclasses
import http.client
import json
import signal
import threading
import time
from types import SimpleNamespace

import openai
from prometheus_client.parser import text_string_to_metric_families

import serve
from lib.engine_thread import EngineThread
from lib.engines import Engines
from lib.fields import Fields
from lib.http_server import Server, bind
from lib.openai_forms import Ask
from tests.toy_model import one_kind_of_steps

KEY, PROMPT = "secret", "The quick brown fox"
LONG = dict(prompt="page", temperature=0, max_tokens=100)  # the answer has all 100 tokens
SIZES = [
    "--max-num-seqs=4",
    "--chunk-tokens=16",
    "--steps-per-slice=4",
    "--block-size=8",
    "--max-queue=6",
    "--prefix-cache",
]
SERVICE = SimpleNamespace(  # enough to parse requests
    served_names=("model",),
    names={"model": None},
    checkpoint=SimpleNamespace(config=SimpleNamespace(vocab_size=300)),
    max_logprobs=0,
    sampling_defaults={},
    tool_format=None,
    vocabulary=None,
)


@contextlib.contextmanager
def running(service, drain_seconds=30.0, **changes):
    """A server around the engines of a changed service. No other server may use them at the same time."""
    used = [EngineThread(runner.engine, runner.model) for runner in service.engines.runners]
    engines = Engines(used, most_completions=service.engines.most_completions, router=service.engines.router)
    with started(dataclasses.replace(service, engines=engines, **changes), drain_seconds) as server:
        yield server
    for runner in engines.runners:
        if runner.failure is None:
            assert not runner.engine.has_unfinished_requests
            assert int(runner.engine._runner.state.allocator.num_free) == runner.engine._options.num_blocks - 1


@contextlib.contextmanager
def started(service, drain_seconds=30.0):
    """A server of a service, which is drained at the end."""
    server, engines = Server(service, drain_seconds=drain_seconds), service.engines
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        wait_for(lambda: server.loop)
        port = listener.getsockname()[1]
        options = dict(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        try:
            with openai.OpenAI(**options) as client:
                yield SimpleNamespace(
                    server=server, thread=thread, port=port, client=client, service=service, engines=engines
                )
        finally:
            if not engines.is_draining:
                server.handle_exit(signal.SIGTERM, None)
            thread.join(60)
        assert not thread.is_alive()
    assert engines.failure is not None or engines.num_open == 0


def call(server, index, prepare):
    """The result of `EngineRunner.call` of an engine."""
    calling = server.engines.runners[index].call(prepare)
    return asyncio.run_coroutine_threadsafe(calling, server.server.loop).result(60)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(server, path="/v1/completions", body=None, method=None, **headers):
    """A raw request: status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
    with contextlib.closing(connection), connection.getresponse() as response:
        return response.status, response.headers, response.read().decode()


def complete(server, **options):
    return server.client.completions.create(**dict(model="model", prompt=PROMPT, temperature=0) | options)


def chat(server, content=PROMPT, **options):
    messages = [{"role": "user", "content": content}]
    return server.client.chat.completions.create(**dict(model="model", messages=messages, temperature=0) | options)


def change_adapter(server, action, **fields):
    return ask(server, f"/v1/{action}_lora_adapter", json.dumps(fields))[::2]


def load_adapter(server, name, folder, **fields):
    return change_adapter(server, "load", lora_name=name, lora_path=str(folder), **fields)


def unload_adapter(server, name):
    return change_adapter(server, "unload", lora_name=name, lora_int_id=1)


def read_metrics(server):
    status, headers, text = ask(server, "/metrics", Authorization="")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return list(text_string_to_metric_families(text))


def metric_values(server):
    """Samples by name; samples with several reasons are summed."""
    found = collections.Counter()
    for family in read_metrics(server):
        for sample in family.samples:
            found[sample.name.partition(":")[2] or sample.name.removeprefix("jaxpaged_")] += sample.value
    return found


def make_service(folder, *options):
    options = [f"--model={folder}", "--dtype=float32", f"--api-key={KEY}", *SIZES, *options]
    with one_kind_of_steps():
        return serve.create_service(serve.parse_arguments(options))


def text_of(stream):
    return "".join(chunk.choices[0].text for chunk in stream)


def texts(answer):
    return [choice.text for choice in answer.choices]


def stop_in(text, *others):
    """Two characters that first occur inside the text, and that are in none of the other texts."""
    pairs = (text[i : i + 2] for i in range(5, len(text)) if text.find(text[i : i + 2]) == i)
    return next(pair for pair in pairs if "\ufffd" not in pair and not any(pair in other for other in others))


def body(**fields):
    return json.dumps(dict(model="model", prompt="a") | fields)


def chat_body(**fields):
    return json.dumps(dict(model="model", messages=[{"role": "user", "content": "a"}]) | fields)


def read(content, service=SERVICE, *, is_chat=False):
    """The request that a body describes."""
    return Ask(Fields(json.loads(content)), service, is_chat=is_chat)
