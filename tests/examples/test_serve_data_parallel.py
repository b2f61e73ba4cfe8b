"""examples/serve.py --data-parallel: two processes give the answers of one engine; aborts, failures, draining."""

import collections
import contextlib
import functools
import os
import signal
import subprocess
import sys

import openai
import pytest

from jaxpaged import SamplingParams
from lib.command_line import exit_code
from tests.examples.engine_recipes import (
    continue_greedily,
    count_frozen,
    count_requests,
    describe_process,
    hold,
    release,
    sample,
)
from tests.examples.serving import (
    LONG,
    PROMPT,
    ask,
    call,
    complete,
    load_adapter,
    make_service,
    metric_values,
    running,
    started,
    text_of,
    texts,
    unload_adapter,
    wait_for,
)
from tests.examples.tiny_checkpoint import EOS, greedy, write_adapter
from tests.examples.tiny_families import write_family

PROMPTS = ["one and two", "12345678", "three or four", "a page", "five, six, seven", "b", "eight and nine", "the end"]


@pytest.fixture(scope="module")
def pair(tiny, adapters):
    """A server with two engines."""
    options = "--data-parallel=2", "--runtime-adapters=1", f"--adapter=small={adapters['small'][0]}"
    with started(make_service(tiny.path, *options)) as server:
        yield server


@pytest.fixture
def two(pair):
    """The server, which has no requests before and after the test."""
    pair.engines.finished.clear()
    yield pair
    wait_for(lambda: pair.engines.num_open == 0)
    assert pair.engines.num_sent == [0, 0]
    assert [call(pair, i, count_requests) for i in range(2)] == [(0, 0), (0, 0)]


@contextlib.contextmanager
def held(server, folder, *, after=0):
    """For each engine, a file without which it does no step after the first ones."""
    gates = [folder / f"gate{i}" for i in range(2)]
    for i, gate in enumerate(gates):
        call(server, i, functools.partial(hold, gate, after=after))
    try:
        yield gates
    finally:
        for gate in gates:
            gate.touch()
        for i in server.engines.working:
            call(server, i, release)


@pytest.fixture
def gates(two, tmp_path):
    with held(two, tmp_path) as gates:
        yield gates


@contextlib.contextmanager
def streams_on_both(server):
    """A long stream on each engine, in the order of the engines."""
    streams = [complete(server, **LONG, stream=True), complete(server, **LONG | dict(prompt="b"), stream=True)]
    wait_for(lambda: server.engines.num_sent == [1, 1])
    first = next(iter(server.engines._open)).engines[0]
    with contextlib.closing(streams[0]), contextlib.closing(streams[1]):
        yield streams[first], streams[1 - first]


def reason(stream):
    return list(stream)[-1].choices[0].finish_reason


def test_each_engine_has_its_own_process_and_seed(two):
    processes = [call(two, i, describe_process) for i in range(2)]
    assert len({os.getpid(), *(pid for pid, _ in processes)}) == 3
    assert [gpus for _, gpus in processes] == ["0", "1"]
    sampled = [call(two, i, functools.partial(sample, [1, 2, 3])) for i in range(2)]
    assert sampled[0] != sampled[1]


def test_a_collection_does_not_look_through_what_was_traced(two):
    assert all(call(two, i, count_frozen) > 100_000 for i in range(2))


def test_answers_equal_one_engine_and_are_in_the_order_of_the_prompts(server, two, tiny):
    for options in (dict(temperature=0), dict(temperature=2, seed=3)):
        expected = texts(complete(server, prompt=PROMPTS, max_tokens=12, **options))
        before = [runner.stats.num_generated for runner in two.engines.runners]
        assert texts(complete(two, prompt=PROMPTS, max_tokens=12, **options)) == expected
        assert len(set(expected)) == len(PROMPTS)
        assert all(runner.stats.num_generated > n for runner, n in zip(two.engines.runners, before, strict=True))
        streams = [complete(two, prompt=prompt, max_tokens=12, stream=True, **options) for prompt in PROMPTS]
        assert [text_of(stream) for stream in streams] == expected
    ids = tiny.tokenizer.encode(PROMPTS[0])
    assert texts(complete(two, prompt=ids, max_tokens=12)) == [tiny.tokenizer.decode(greedy(tiny.tensors, ids, 12))]


def test_logprobs_of_prompts_and_tokens_equal_one_engine(server, two):
    options = dict(prompt=PROMPTS[:4], max_tokens=9, n=2, temperature=1, seed=5, logprobs=3, echo=True)
    one, other = (complete(each, **options).choices for each in (server, two))
    for expected, choice in zip(one, other, strict=True):
        assert choice.logprobs.tokens == expected.logprobs.tokens
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.logprobs.token_logprobs[1:], abs=1e-4)
        likely = zip(choice.logprobs.top_logprobs[1:], expected.logprobs.top_logprobs[1:], strict=True)
        assert all(of_one == pytest.approx(of_other, abs=1e-4) for of_one, of_other in likely)
        assert len(choice.logprobs.tokens) > 9


def test_each_process_gets_a_grammar_once(two):
    sent = []
    for runner in two.engines.runners:
        send = runner._send
        runner._send = lambda *message, send=send: sent.append(message[0]) or send(*message)
        runner._requests._send = runner._send
    for seed in range(3):
        answer = complete(two, prompt=PROMPTS[:4], max_tokens=9, seed=seed, extra_body={"guided_regex": "[ab]{3}x"})
        assert all(len(text) == 4 and text[3] == "x" and set(text[:3]) <= {"a", "b"} for text in texts(answer))
    for runner in two.engines.runners:
        del runner._send
        runner._requests._send = runner._send
    assert collections.Counter(sent)["keep_grammar"] == 2
    assert collections.Counter(sent)["add"] == 6


def test_a_prompt_returns_to_the_engine_that_has_it_in_its_cache(two):
    prompts = [f"{word} is the first word of this prompt" for word in ("apple", "pear", "plum")]
    cached = [
        [complete(two, prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens for prompt in prompts]
        for _ in range(3)  # by turns, each prompt would change the engine each time
    ]
    assert cached[0] == [0, 0, 0]
    assert min(cached[1] + cached[2]) >= 8


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_disconnect_aborts_on_its_own_engine(two, gates, leaving):
    with streams_on_both(two) as streams:
        streams[leaving].close()
        wait_for(lambda: len(two.server.server_state.tasks) == 1)
        for gate in gates:
            gate.touch()
        wait_for(lambda: two.engines.num_sent[leaving] == 0)
        assert reason(streams[1 - leaving]) == "length"
    wait_for(lambda: two.engines.num_open == 0)
    assert two.engines.finished == {"abort": 1, "length": 1}


def test_a_request_over_both_engines_is_aborted_on_both(two, gates):
    with complete(two, **LONG | dict(prompt=PROMPTS[:4]), stream=True):
        wait_for(lambda: two.engines.num_sent == [2, 2])
    wait_for(lambda: not two.server.server_state.tasks)
    for gate in gates:
        gate.touch()
    wait_for(lambda: two.engines.num_open == 0)
    assert two.engines.finished == {"abort": 4}


def test_counts_are_sums_over_the_engines(two, gates):
    before = metric_values(two)
    assert (before["engines"], before["blocks"], before["free_blocks"]) == (2, 128, 128)
    assert before["most_requests"] == 4 + 4 + 6
    with complete(two, prompt=PROMPTS[:4], max_tokens=9, stream=True, extra_body={"ignore_eos": True}) as stream:
        wait_for(lambda: two.engines.num_sent == [2, 2])
        during = metric_values(two)
        assert (during["engine_requests"], during["waiting_requests"]) == (4, 4)
        for gate in gates:
            gate.touch()
        list(stream)
    after = metric_values(two)
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == 4 * 9
    assert after["finished_requests_total"] - before["finished_requests_total"] == 4
    assert after["running_requests"] == after["engine_requests"] == 0


def test_a_runtime_adapter_is_loaded_into_both(two, tiny, adapters, tmp_path):
    folder, merged = adapters["large"]
    write_adapter(tmp_path, seed=0, rank=20, layers=("mlp.up_proj",))
    status, answer = load_adapter(two, "new", tmp_path)
    assert (status, "rank 20; --max-adapter-rank is 16" in answer) == (400, True)
    assert load_adapter(two, "new", folder)[0] == 200
    slot, prompt = two.service.names["new"], tiny.tokenizer.encode(PROMPT)
    expected = greedy({layer: x + merged.get(layer, 0) for layer, x in tiny.tensors.items()}, prompt, 10)
    params = SamplingParams(max_tokens=10, temperature=0, adapter=slot, stop_token_ids=(EOS,))
    for i in range(2):
        assert call(two, i, functools.partial(continue_greedily, prompt, params)) == expected
    assert unload_adapter(two, "new")[0] == 200


def test_a_killed_engine_and_a_drain(tiny, capsys, tmp_path):
    """One of two processes is killed in the middle of a stream, then the server drains the other."""
    with started(make_service(tiny.path, "--data-parallel=2")) as server:
        engines, lost, other = server.engines, 0, 1
        expected = texts(complete(server, prompt=PROMPTS, max_tokens=12))
        pids = [call(server, i, describe_process)[0] for i in range(2)]
        with held(server, tmp_path, after=4) as gates, streams_on_both(server) as streams:
            assert all(next(stream).choices for stream in streams)
            os.kill(pids[other], signal.SIGTERM)  # which it ignores
            os.kill(pids[lost], signal.SIGKILL)
            with pytest.raises(openai.APIError, match="The engine failed"):
                list(streams[lost])
            gates[other].touch()
            assert reason(streams[other]) == "length"
        message = f"Engine {lost} failed: its process was ended by SIGKILL. The others continue.\n"
        assert message in capsys.readouterr().err
        assert (engines.working, engines.num_sent) == ([other], [0, 0])
        assert ask(server, "/health")[::2] == (200, '{"status":"degraded"}')
        assert texts(complete(server, prompt=PROMPTS, max_tokens=12)) == expected
        gate = tmp_path / "last"
        call(server, other, functools.partial(hold, gate))
        with complete(server, **LONG, stream=True) as stream:
            server.server.handle_exit(signal.SIGTERM, None)
            wait_for(lambda: engines.is_draining)
            with pytest.raises(openai.InternalServerError, match="The server is shutting down"):
                complete(server)
            gate.touch()
            assert reason(stream) == "length"
        server.thread.join(60)
        assert [runner.child.process.returncode for runner in engines.runners] == [-signal.SIGKILL, 0]


def test_a_process_that_cannot_load_is_one_sentence(tiny, tmp_path, capfd):
    write_adapter(tmp_path, seed=0, rank=1, layers=("mlp.up_proj",), use_dora=True)
    assert exit_code(make_service, tiny.path, "--data-parallel=2", f"--adapter=one={tmp_path}") == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("Requests may have")]
    assert len(lines) == 1
    assert lines[0].endswith("its use_dora is True, which is not known here.")


def test_the_server_process_starts_no_device(tiny):
    """The GPUs are for the engines."""
    script = """if True:
        import serve
        from contextlib import nullcontext
        from types import SimpleNamespace
        from jax._src import xla_bridge

        def create(recipes):
            print(len(recipes), xla_bridge.backends_are_initialized())
            raise SystemExit

        processes = SimpleNamespace(backend=lambda: "gpu", create=create)
        serve.EngineProcesses = lambda *_, **__: nullcontext(processes)
        serve.main(["--port=0", "--data-parallel=2"])
    """
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "2 False\n", done.stderr


@pytest.mark.slow
def test_two_engines_that_are_each_tensor_parallel(tmp_path, monkeypatch):
    """Four devices each, which hold the two KV heads twice: the streams of one device."""
    folder = tmp_path / "model"
    write_family(folder, "llama", num_hidden_layers=1)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")

    def stream_all(server):
        streams = [
            complete(server, prompt=prompt, max_tokens=12, stream=True, seed=3, temperature=1) for prompt in PROMPTS
        ]
        return [text_of(stream) for stream in streams]

    with running(make_service(folder)) as one:
        expected = stream_all(one)
    assert len(set(expected)) == len(PROMPTS)
    with started(make_service(folder, "--data-parallel=2", "--tensor-parallel=4")) as two:
        assert [call(two, i, describe_process)[1] for i in range(2)] == ["0,1,2,3", "4,5,6,7"]
        assert stream_all(two) == expected
        assert all(runner.stats.num_generated for runner in two.engines.runners)
