"""Adapters that are loaded while examples/serve.py runs."""

import json
import threading

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import serve
from tests.examples.serving import KEY, PROMPT, SIZES, ask, complete, running
from tests.examples.tiny_checkpoint import greedy, write_adapter


@pytest.fixture(scope="module")
def runtime_service(tiny, adapters):
    options = [f"--model={tiny.path}", "--dtype=float32", f"--api-key={KEY}", "--runtime-adapters=1", *SIZES]
    options += ["--max-adapter-rank=4", f"--adapter=small={adapters['small'][0]}"]
    return serve.create_service(serve.parse_arguments(options))


@pytest.fixture
def runtime_server(runtime_service):
    with running(runtime_service) as server:
        yield server


def post(server, action, **fields):
    return ask(server.port, f"/v1/{action}_lora_adapter", json.dumps(fields))[::2]


def names(server):
    return [model.id for model in server.client.models.list()]


def assert_serves(server, tiny, name, added):
    prompt = tiny.tokenizer.encode(PROMPT * 2)
    merged = tiny.tensors | {layer: tiny.tensors[layer] + more for layer, more in added.items()}
    answer = complete(server, model=name, prompt=prompt, max_tokens=10)
    assert answer.choices[0].text == tiny.tokenizer.decode(greedy(merged, prompt, 10))


def test_an_adapter_is_loaded_replaced_and_unloaded(runtime_server, tiny, adapters, tmp_path):
    server, (folder, large) = runtime_server, adapters["large"]
    added = {name: write_adapter(tmp_path / name, seed=5, rank=4, layers=("mlp.gate_proj",)) for name in ("a", "b")}
    added["b"] = write_adapter(tmp_path / "b", seed=6, rank=2, layers=("self_attn.q_proj",))
    loaded = post(server, "load", lora_name="new", lora_path=str(folder))
    assert loaded == (200, "Success: LoRA adapter 'new' added successfully.")
    assert names(server) == ["model", "small", "new"]
    for name, merged in (("new", large), ("small", adapters["small"][1]), ("model", {})):
        assert_serves(server, tiny, name, merged)
    # The prefix cache forgets the prompts of the adapter that was replaced.
    assert post(server, "load", lora_name="new", lora_path=str(tmp_path / "a"), load_inplace=True)[0] == 200
    assert_serves(server, tiny, "new", added["a"])
    unloaded = post(server, "unload", lora_name="new", lora_int_id=1)
    assert unloaded == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert names(server) == ["model", "small"]
    assert ask(server.port, body=json.dumps({"prompt": "a", "model": "new"}))[0] == 404
    assert post(server, "load", lora_name="other", lora_path=str(tmp_path / "b"))[0] == 200
    assert_serves(server, tiny, "other", added["b"])
    assert post(server, "unload", lora_name="other")[0] == 200


def test_a_slot_is_free_when_the_last_request_with_it_has_ended(runtime_server, adapters, monkeypatch):
    engine, may_step = runtime_server.service.engine._engine, threading.Event()
    step = engine.step
    fields = dict(lora_path=str(adapters["large"][0]))
    assert post(runtime_server, "load", lora_name="one", **fields)[0] == 200
    monkeypatch.setattr(engine, "step", lambda: may_step.wait(60) and step())
    stream = complete(runtime_server, model="one", max_tokens=4, stream=True)
    assert post(runtime_server, "unload", lora_name="one")[0] == 200
    status, headers, answer = ask(
        runtime_server.port, "/v1/load_lora_adapter", json.dumps(fields | {"lora_name": "two"})
    )
    assert (status, headers["Retry-After"]) == (503, "1"), answer
    may_step.set()
    list(stream)
    assert post(runtime_server, "load", lora_name="two", **fields)[0] == 200
    assert post(runtime_server, "unload", lora_name="two")[0] == 200


def test_an_adapter_that_cannot_be_loaded_is_refused(runtime_server, adapters, tmp_path):
    write_adapter(tmp_path / "rank", seed=0, rank=5, layers=("mlp.up_proj",))
    large = str(adapters["large"][0])
    refused = [
        (dict(lora_name="a"), 400, "The field 'lora_path' is missing."),
        (dict(lora_name="small", lora_path=large), 400, "lora_name must be new"),
        (dict(lora_name="model", lora_path=large, load_inplace=True), 400, "lora_name must be new"),
        (dict(lora_name="a", lora_path="/nowhere"), 400, "/nowhere cannot be read as an adapter"),
        (dict(lora_name="a", lora_path=str(tmp_path / "rank")), 400, "rank 5; --max-adapter-rank is 4."),
        (dict(lora_name="a", lora_path=large, other=1), 400, "other is not supported here"),
    ]
    for fields, status, message in refused:
        found, answer = post(runtime_server, "load", **fields)
        assert (found, message in json.loads(answer)["error"]["message"]) == (status, True), answer
    assert post(runtime_server, "unload", lora_name="a")[0] == 404
    assert post(runtime_server, "load", lora_name="a", lora_path=large)[0] == 200
    status, answer = post(runtime_server, "load", lora_name="b", lora_path=large)
    assert (status, "All 2 adapters are loaded" in answer) == (400, True)
    assert post(runtime_server, "unload", lora_name="a")[0] == 200
    assert names(runtime_server) == ["model", "small"]


def test_adapters_are_loaded_only_with_an_option(server, adapters):
    assert post(server, "load", lora_name="a", lora_path=str(adapters["large"][0]))[0] == 404
