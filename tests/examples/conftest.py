import importlib.util
import json
import threading
from types import SimpleNamespace

import pytest

from lib.checkpoint import load_model, read_checkpoint
from tests.examples.tiny_checkpoint import write_adapter, write_checkpoint

collect_ignore = ["agent_chat.py", "agent_responses.py"]  # programs that test_serve_agents.py runs
# Without the extra "serve" and the package openai, the server is not tested.
if not all(map(importlib.util.find_spec, ("openai", "prometheus_client", "starlette", "uvicorn"))):
    collect_ignore_glob = ["serving.py", "scripted_engine.py", "equal_logits.py", "test_serve*.py", "test_engines.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny random model of `tiny_checkpoint`: its path, tensors, config, tokenizer and the model itself."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    tensors = write_checkpoint(path)
    read = read_checkpoint(path)
    model = load_model(read, "float32")
    return SimpleNamespace(path=path, tensors=tensors, config=read.config, tokenizer=read.tokenizer, model=model)


@pytest.fixture
def run_generate(capsys):
    """Runs examples/generate.py; returns the exit code, the JSON lines (without --json stdout) and stderr."""
    import generate
    from lib.command_line import exit_code

    def call(*arguments, model, prompts, tokens=12, as_json=True):
        command = ["--model", str(model), "--max-new-tokens", str(tokens), *map(str, arguments)]
        code = exit_code(generate.main, command + [f"--prompt={prompt}" for prompt in prompts] + ["--json"] * as_json)
        captured = capsys.readouterr()
        return code, list(map(json.loads, captured.out.splitlines())) if as_json else captured.out, captured.err

    return call


@pytest.fixture
def printed(tiny, monkeypatch, capsys):
    """Runs a program with a fixed result in place of the function that computes it. Returns its lines on stdout, the
    prompts, and the function's other arguments."""

    def call(program, function, result, *options):
        calls = []
        monkeypatch.setattr(program, function, lambda *args, **named: calls.append((args, named)) or result)
        program.main(["--model", str(tiny.path), *options])
        [((_, _, prompts), named)] = calls
        return capsys.readouterr().out.splitlines(), list(map(tiny.tokenizer.decode, prompts)), named

    return call


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def service(tiny, adapters):
    """The tiny model and its adapters in an engine, for one server at a time."""
    import serve
    from tests.examples.serving import KEY, SIZES

    options = ["--model", str(tiny.path), "--dtype=float32", f"--api-key={KEY}", "--max-body-bytes=5000", *SIZES]
    options += [f"--adapter={name}={folder}" for name, (folder, _) in adapters.items()]
    return serve.create_service(serve.parse_arguments(options))


@pytest.fixture(scope="session")
def equal_services(tmp_path_factory):
    """Services with equal logits, one for each kind of control tokens in `equal_logits`."""
    from tests.examples.equal_logits import KINDS, equal_service

    return {kind: equal_service(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def server(service):
    from tests.examples.serving import running

    with running(service) as server:
        yield server


@pytest.fixture
def gate(service, monkeypatch):
    """Makes the engine wait before each step while the gate is shut. `is_reached` is true while it waits."""
    engine, gate, is_reached = service.engines.runners[0].engine, threading.Event(), threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda **how: is_reached.set() or (gate.wait(60) and step(**how)))
    yield SimpleNamespace(set=gate.set, is_reached=is_reached.is_set)
    gate.set()
