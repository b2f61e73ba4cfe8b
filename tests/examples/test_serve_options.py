"""Options of examples/serve.py: adapters, the memory of the cache, the longest request."""

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import safetensors.numpy

import serve
from lib.checkpoint import CheckpointError
from lib.command_line import RequestError
from tests.examples.serving import PROMPT, SIZES, complete
from tests.examples.tiny_checkpoint import greedy, write_adapter


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


def test_the_memory_of_the_cache(tiny, capsys, monkeypatch):
    made = {}
    monkeypatch.setattr(
        serve, "create_engine", lambda model, config, options, **sizes: made.update(vars(options) | sizes)
    )
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
