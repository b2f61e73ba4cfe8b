"""Adapters of examples/serve.py, given at the start or loaded while it runs."""

import json
import threading

import pytest

from tests.examples.serving import (
    PROMPT,
    ask,
    body,
    change_adapter,
    complete,
    load_adapter,
    make_service,
    running,
    texts,
    unload_adapter,
)
from tests.examples.tiny_checkpoint import greedy, write_adapter


@pytest.fixture(scope="module")
def runtime_service(tiny, adapters):
    options = "--runtime-adapters=1", "--max-adapter-rank=4", f"--adapter=small={adapters['small'][0]}"
    return make_service(tiny.path, *options)


@pytest.fixture
def runtime_server(runtime_service):
    with running(runtime_service) as server:
        yield server


def names(server):
    return [model.id for model in server.client.models.list()]


def assert_serves(server, tiny, name, added):
    prompt = tiny.tokenizer.encode(PROMPT * 2)
    merged = tiny.tensors | {layer: tiny.tensors[layer] + more for layer, more in added.items()}
    for _ in range(2):  # the prompt is cached in the second round
        answer = complete(server, model=name, prompt=prompt, max_tokens=10)
        assert (answer.model, *texts(answer)) == (name, tiny.tokenizer.decode(greedy(merged, prompt, 10)))


def test_a_request_names_an_adapter_as_its_model(server, tiny, adapters):
    for name, added in (("model", {}), *((name, added) for name, (_, added) in adapters.items())):
        assert_serves(server, tiny, name, added)
    prompt = tiny.tokenizer.encode(PROMPT * 2)
    assert len({*(texts(complete(server, model=name, prompt=prompt, max_tokens=10))[0] for name in names(server))}) == 3


def test_an_adapter_is_loaded_replaced_and_unloaded(runtime_server, tiny, adapters, tmp_path):
    server, (folder, large) = runtime_server, adapters["large"]
    first = write_adapter(tmp_path / "a", seed=5, rank=4, layers=("mlp.gate_proj",))
    second = write_adapter(tmp_path / "b", seed=6, rank=2, layers=("self_attn.q_proj",))
    assert load_adapter(server, "new", folder) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert names(server) == ["model", "small", "new"]
    for name, merged in (("new", large), ("small", adapters["small"][1]), ("model", {})):
        assert_serves(server, tiny, name, merged)
    # The prefix cache forgets the prompts of the adapter that was replaced.
    assert load_adapter(server, "new", tmp_path / "a", load_inplace=True)[0] == 200
    assert_serves(server, tiny, "new", first)
    assert unload_adapter(server, "new") == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert names(server) == ["model", "small"]
    assert ask(server, body=body(model="new"))[0] == 404
    assert load_adapter(server, "other", tmp_path / "b")[0] == 200
    assert_serves(server, tiny, "other", second)
    assert unload_adapter(server, "other")[0] == 200


def test_a_slot_is_freed_when_its_last_request_ends(runtime_server, adapters, monkeypatch):
    server, folder = runtime_server, str(adapters["large"][0])
    engine, may_step = server.engines.runners[0].engine, threading.Event()
    step = engine.step
    assert load_adapter(server, "one", folder)[0] == 200
    monkeypatch.setattr(engine, "step", lambda **how: may_step.wait(60) and step(**how))
    stream = complete(server, model="one", max_tokens=4, stream=True)
    assert unload_adapter(server, "one")[0] == 200
    content = json.dumps(dict(lora_name="two", lora_path=folder))
    status, headers, _ = ask(server, "/v1/load_lora_adapter", content)
    assert (status, headers["Retry-After"]) == (503, "1")
    may_step.set()
    list(stream)
    assert load_adapter(server, "two", folder)[0] == 200
    assert unload_adapter(server, "two")[0] == 200


def test_an_adapter_that_cannot_be_loaded_is_refused(runtime_server, adapters, tmp_path):
    write_adapter(tmp_path / "rank", seed=0, rank=5, layers=("mlp.up_proj",))
    large = str(adapters["large"][0])
    for fields, message in (
        (dict(lora_name="a"), "The field 'lora_path' is missing."),
        (dict(lora_name="small", lora_path=large), "lora_name must be new"),
        (dict(lora_name="model", lora_path=large, load_inplace=True), "lora_name must be new"),
        (dict(lora_name="a", lora_path="/nowhere"), "/nowhere cannot be read as an adapter"),
        (dict(lora_name="a", lora_path=str(tmp_path / "rank")), "rank 5; --max-adapter-rank is 4."),
        (dict(lora_name="a", lora_path=large, other=1), "other is not supported here"),
    ):
        status, answer = change_adapter(runtime_server, "load", **fields)
        assert (status, message in json.loads(answer)["error"]["message"]) == (400, True), answer
    assert unload_adapter(runtime_server, "a")[0] == 404
    assert load_adapter(runtime_server, "a", large)[0] == 200
    status, answer = load_adapter(runtime_server, "b", large)
    assert (status, "All 2 adapters are loaded" in answer) == (400, True)
    assert unload_adapter(runtime_server, "a")[0] == 200
    assert names(runtime_server) == ["model", "small"]


def test_adapters_are_loaded_only_with_an_option(server, adapters):
    assert load_adapter(server, "a", adapters["large"][0])[0] == 404
