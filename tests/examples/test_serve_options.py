"""Options of examples/serve.py: adapters, the memory of the cache, the longest request."""

from types import SimpleNamespace

import pytest
import safetensors.numpy

import serve
from lib import http_server
from lib.checkpoint import CheckpointError
from lib.command_line import RequestError
from lib.tool_formats import FORMATS
from tests.examples.serving import make_service
from tests.examples.tiny_checkpoint import write_adapter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(use_dora=True), "its use_dora is True, which is not known here"),
        (dict(r=0), "r must be a whole number from 1"),
        (dict(lora_alpha=None), "lacks 'lora_alpha'"),
    ],
)
def test_an_unusable_adapter_is_refused(tiny, tmp_path, changes, message):
    write_adapter(tmp_path, seed=0, rank=1, layers=("mlp.up_proj",), **changes)
    with pytest.raises(CheckpointError, match=message):
        make_service(tiny.path, f"--adapter=one={tmp_path}")


def test_an_adapter_of_another_model_is_refused(tiny, tmp_path):
    write_adapter(tmp_path, seed=0, rank=1, layers=("mlp.up_proj",))
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({name.replace("up_proj", "other_proj"): x for name, x in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.other_proj, which this model does not have"):
        make_service(tiny.path, f"--adapter=one={tmp_path}")


def test_names_of_adapters_are_unique(tiny):
    for names in (["model"], ["one", "one"]):
        with pytest.raises(RequestError, match="a name of its own"):
            make_service(tiny.path, *(f"--adapter={name}={tiny.path}" for name in names))
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--adapter=one"])


def test_the_form_of_tool_calls(tiny, monkeypatch):
    monkeypatch.setattr(serve, "create_thread", lambda *_: None)
    monkeypatch.setattr(serve, "Engines", lambda *_, **__: None)
    assert make_service(tiny.path).tool_format is None  # its template has none
    assert make_service(tiny.path, "--tool-call-parser=mistral").tool_format is FORMATS["mistral"]


def test_the_memory_of_the_cache(tiny, capsys, monkeypatch):
    made, config = {}, tiny.config
    monkeypatch.setattr(serve, "create_thread", lambda model, _: made.update(vars(model.options) | vars(model)))
    monkeypatch.setattr(serve, "Engines", lambda *_, **__: None)
    make_service(tiny.path, "--cache-mb=1", "--host-cache-mb=3")
    bytes_per_token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    assert made["num_blocks"] == 10**6 // (8 * bytes_per_token)
    assert f"{made['num_blocks']:,} blocks" in capsys.readouterr().err
    assert (made["prefix_cache"], made["host_cache_bytes"]) == (True, 3 * 10**6)
    make_service(tiny.path)
    assert made["host_cache_bytes"] is None
    with pytest.raises(RequestError, match="pass --prefix-cache too"):
        serve.create_service(serve.parse_arguments([f"--model={tiny.path}", "--host-cache-mb=3"]))
    monkeypatch.setattr(serve, "layer_windows", lambda config: [None, 8])
    with pytest.raises(RequestError, match="not for models with windows"):
        make_service(tiny.path, "--host-cache-mb=3")
    monkeypatch.undo()

    def find_capacity(*options):
        return serve.find_capacity(config, serve.parse_arguments(["--cache-mb=1", "--dtype=float32", *options]))

    devices = 3 * config.num_kv_heads  # each holds one KV head
    assert find_capacity(f"--tensor-parallel={devices}").bytes_per_token == 3 * bytes_per_token
    with pytest.raises(RequestError, match=r"--cache-mb 1 is too small: .* holds 0 blocks"):
        find_capacity("--block-size=100000")
    with pytest.raises(SystemExit):
        find_capacity("--num-blocks=3")
    assert "not allowed with argument --cache-mb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "num_blocks", "max_model_len", "reason"),
    [
        (["--max-model-len=64"], None, 64, None),
        ([], None, 128, "fewer than --max-model-len 2,048: the model's context is 128."),
        (["--max-model-len=4096"], 1000, 128, "fewer than --max-model-len 4,096: the model's context is 128."),
        (["--max-model-len=64"], 9, 64, None),
        (["--max-model-len=64"], 5, 32, "fewer than --max-model-len 64: the pool has 5 blocks."),
    ],
)
def test_a_maximum_length_that_is_not_reached_is_reported(tiny, capsys, options, num_blocks, max_model_len, reason):
    args = serve.parse_arguments([*options, "--block-size=8"])
    assert serve.find_max_model_len(tiny.config, args, num_blocks) == max_model_len
    assert capsys.readouterr().err == (
        "" if reason is None else f"Requests may have {max_model_len} tokens, {reason}\n"
    )


@pytest.mark.parametrize(
    ("options", "checks"),
    [
        ([], True),
        (["--host=localhost"], True),
        (["--host=::1"], True),
        (["--host=0.0.0.0"], False),
        (["--api-key=key"], False),
    ],
)
def test_the_host_is_checked_on_loopback_without_a_key(tiny, monkeypatch, options, checks):
    monkeypatch.delenv(serve.API_KEY, raising=False)
    monkeypatch.setattr(serve, "create_thread", lambda *_: None)
    monkeypatch.setattr(serve, "Engines", lambda *_, **__: None)
    arguments = serve.parse_arguments([f"--model={tiny.path}", "--dtype=float32", *options])
    assert serve.create_service(arguments).checks_host == checks


@pytest.mark.parametrize(
    ("options", "address", "warns"),
    [
        ([], "127.0.0.1", False),
        (["--host=0.0.0.0"], "0.0.0.0", True),
        (["--host=0.0.0.0", "--api-key=key"], "0.0.0.0", False),
    ],
)
def test_only_this_machine_reaches_the_server_by_default(monkeypatch, capsys, options, address, warns):
    addresses = []
    server = SimpleNamespace(run=lambda listeners: addresses.append(listeners[0].getsockname()[0]))
    monkeypatch.delenv(serve.API_KEY, raising=False)
    monkeypatch.setattr(serve, "create_service", lambda args: SimpleNamespace(engines=SimpleNamespace(failure=None)))
    monkeypatch.setattr(http_server, "Server", lambda *_, **__: server)
    assert serve.main(["--port=0", *options]) == 0
    assert addresses == [address]
    assert ("Warning: anyone who can reach 0.0.0.0" in capsys.readouterr().err) == warns
