"""examples/serve.py --data-parallel: the answers of one engine, and aborts, counts, adapters and failures of two."""

import asyncio
import contextlib
import threading

import jax
import openai
import pytest

from jaxpaged import SamplingParams
from lib.replicas import load_replicas
from lib.tensor_parallel import DevicesError
from tests.examples.serving import (
    LONG,
    PROMPT,
    ask,
    body,
    complete,
    load_adapter,
    make_service,
    metric_values,
    running,
    text_of,
    texts,
    unload_adapter,
    wait_for,
)
from tests.examples.tiny_checkpoint import EOS, greedy
from tests.examples.tiny_families import write_family

PROMPTS = ["one and two", "12345678", "three or four", "a page", "five, six, seven", "b", "eight and nine", "the end"]


@pytest.fixture(scope="module")
def pair(tiny, adapters):
    """A service with two engines."""
    options = "--data-parallel=2", "--runtime-adapters=1", f"--adapter=small={adapters['small'][0]}"
    return make_service(tiny.path, *options)


@pytest.fixture
def two(pair):
    with running(pair) as server:
        yield server


@pytest.fixture
def gates(pair, monkeypatch):
    """For each engine, an event without which it does no step."""
    events = [threading.Event() for _ in pair.engines.runners]

    def gated(step, event):
        return lambda **how: event.wait(60) and step(**how)

    for thread, event in zip(pair.engines.runners, events, strict=True):
        monkeypatch.setattr(thread.engine, "step", gated(thread.engine.step, event))
    yield events
    for event in events:
        event.set()


@contextlib.contextmanager
def streams_on_both(server):
    """A long stream on each engine, in the order of the engines."""
    streams = [complete(server, **LONG, stream=True), complete(server, **LONG | dict(prompt="b"), stream=True)]
    wait_for(lambda: server.engines.num_sent == [1, 1])
    first = next(iter(server.engines._open)).engines[0]
    with contextlib.closing(streams[0]), contextlib.closing(streams[1]):
        yield streams[first], streams[1 - first]


def test_each_engine_has_its_own_device_and_seed(pair):
    engines = [thread.engine for thread in pair.engines.runners]
    for engine, device in zip(engines, jax.devices(), strict=False):
        arrays = jax.tree.leaves((engine._runner.weights, engine._runner.state))
        assert {next(iter(array.devices())) for array in arrays if isinstance(array, jax.Array)} == {device}
        engine._books.next_id = 1000  # the chosen seed depends on the id
    sampled = [engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20))[0] for engine in engines]
    assert sampled[0].request_id == sampled[1].request_id
    assert sampled[0].outputs[0].token_ids != sampled[1].outputs[0].token_ids


def test_answers_equal_one_engine_and_are_in_the_order_of_the_prompts(server, two, tiny):
    for options in (dict(temperature=0), dict(temperature=2, seed=3)):
        expected = texts(complete(server, prompt=PROMPTS, max_tokens=12, **options))
        before = [thread.stats.num_generated for thread in two.engines.runners]
        assert texts(complete(two, prompt=PROMPTS, max_tokens=12, **options)) == expected
        assert len(set(expected)) == len(PROMPTS)
        assert all(thread.stats.num_generated > n for thread, n in zip(two.engines.runners, before, strict=True))
        streams = [complete(two, prompt=prompt, max_tokens=12, stream=True, **options) for prompt in PROMPTS]
        assert [text_of(stream) for stream in streams] == expected
    ids = tiny.tokenizer.encode(PROMPTS[0])
    assert texts(complete(two, prompt=ids, max_tokens=12)) == [tiny.tokenizer.decode(greedy(tiny.tensors, ids, 12))]


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
            gate.set()
        wait_for(lambda: two.engines.num_sent[leaving] == 0)
        assert list(streams[1 - leaving])[-1].choices[0].finish_reason == "length"
    wait_for(lambda: two.engines.num_open == 0)
    assert two.engines.finished == {"abort": 1, "length": 1}


def test_a_request_over_both_engines_is_aborted_on_both(two, gates):
    with complete(two, **LONG | dict(prompt=PROMPTS[:4]), stream=True):
        wait_for(lambda: two.engines.num_sent == [2, 2])
    wait_for(lambda: not two.server.server_state.tasks)
    for gate in gates:
        gate.set()
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
            gate.set()
        list(stream)
    after = metric_values(two)
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == 4 * 9
    assert after["finished_requests_total"] - before["finished_requests_total"] == 4
    assert after["running_requests"] == after["engine_requests"] == 0


def test_draining_finishes_the_requests_of_both(two, gates):
    with streams_on_both(two) as streams:
        two.server.handle_exit(15, None)
        wait_for(lambda: two.engines.is_draining)
        with pytest.raises(openai.InternalServerError, match="The server is shutting down"):
            complete(two)
        for gate in gates:
            gate.set()
        assert [list(stream)[-1].choices[0].finish_reason for stream in streams] == ["length", "length"]


def test_a_runtime_adapter_is_loaded_into_both(two, tiny, adapters):
    folder, merged = adapters["large"]
    assert load_adapter(two, "new", folder)[0] == 200
    slot, prompt = two.service.names["new"], tiny.tokenizer.encode(PROMPT)
    expected = greedy({layer: x + merged.get(layer, 0) for layer, x in tiny.tensors.items()}, prompt, 10)
    params = SamplingParams(max_tokens=10, temperature=0, adapter=slot, stop_token_ids=(EOS,))
    for thread in two.engines.runners:
        calling = thread.call(lambda engine: engine.generate([prompt], params))
        (output,) = asyncio.run_coroutine_threadsafe(calling, two.server.loop).result(60)
        assert output.outputs[0].token_ids == expected
    assert unload_adapter(two, "new")[0] == 200


@pytest.fixture
def breaking(pair, monkeypatch):
    """Makes the next step of an engine fail, once the returned event is set."""

    def break_engine(index):
        engine, may_fail = pair.engines.runners[index].engine, threading.Event()
        step = engine.step

        def fail(**how):
            may_fail.wait(60)
            engine.abort()  # other tests use this engine too
            while engine.has_unfinished_requests:
                step()
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine, "step", fail)
        return may_fail

    return break_engine


@pytest.mark.parametrize("broken", [0, 1])
def test_requests_of_a_failed_engine_fail_and_the_other_continues(server, two, breaking, capsys, broken):
    other, before = 1 - broken, metric_values(two)
    expected = texts(complete(server, prompt=PROMPTS, max_tokens=12))
    may_fail = breaking(broken)
    with streams_on_both(two) as streams:
        may_fail.set()
        with pytest.raises(openai.APIError, match="The engine failed"):
            list(streams[broken])
        assert list(streams[other])[-1].choices[0].finish_reason == "length"
    assert two.engines.working == [other]
    assert f"Engine {broken} failed: out of memory. The others continue.\n" in capsys.readouterr().err
    assert ask(two, "/health")[::2] == (200, '{"status":"degraded"}')
    assert texts(complete(two, prompt=PROMPTS, max_tokens=12)) == expected
    wait_for(lambda: two.engines.num_open == 0)
    after = metric_values(two)
    assert (after["engines"], after["blocks"], after["free_blocks"], after["running_requests"]) == (1, 64, 64, 0)
    assert after["generated_tokens_total"] >= before["generated_tokens_total"] + 100
    assert two.engines.num_sent == [0, 0]
    assert str(two.engines.failure) == "out of memory"


def test_a_request_over_both_engines_fails_with_one_of_them(two, breaking):
    may_fail, statuses = breaking(1), []
    content = body(prompt=PROMPTS[:4], max_tokens=100, ignore_eos=True)
    client = threading.Thread(target=lambda: statuses.append(ask(two, body=content)[0]))
    client.start()
    wait_for(lambda: two.engines.num_sent == [2, 2])
    may_fail.set()
    client.join(60)
    assert statuses == [500]
    wait_for(lambda: two.engines.num_open == 0)  # the other two completions were aborted or had ended
    assert texts(complete(two, max_tokens=2))


def test_a_change_of_weights_does_not_wait_for_a_failed_engine(two, breaking, adapters):
    may_fail, answers = breaking(1), []
    with streams_on_both(two):
        client = threading.Thread(target=lambda: answers.append(load_adapter(two, "new", adapters["large"][0])))
        client.start()
        wait_for(lambda: two.engines.runners[1]._calls)
        may_fail.set()
        client.join(60)
    assert [status for status, _ in answers] == [500]
    assert load_adapter(two, "new", adapters["large"][0])[0] == 200
    assert unload_adapter(two, "new")[0] == 200


def test_the_server_ends_when_the_last_engine_fails(two, breaking):
    events = [breaking(index) for index in range(2)]
    with streams_on_both(two) as streams:
        for event, stream in zip(events, streams, strict=True):
            assert two.thread.is_alive()
            event.set()
            with pytest.raises(openai.APIError, match="The engine failed"):
                list(stream)
    two.thread.join(60)
    assert not two.thread.is_alive()
    assert two.engines.num_open == 0


@pytest.mark.slow
def test_two_engines_that_are_each_tensor_parallel(tmp_path):
    """Four devices each, which hold the two KV heads twice: the streams of one device."""
    folder = tmp_path / "model"
    write_family(folder, "llama", num_hidden_layers=1)

    def stream_all(server):
        streams = [
            complete(server, prompt=prompt, max_tokens=12, stream=True, seed=3, temperature=1) for prompt in PROMPTS
        ]
        return [text_of(stream) for stream in streams]

    with running(make_service(folder)) as one:
        expected = stream_all(one)
    assert len(set(expected)) == len(PROMPTS)
    with running(make_service(folder, "--data-parallel=2", "--tensor-parallel=4")) as two:
        for thread, devices in zip(two.engines.runners, (jax.devices()[:4], jax.devices()[4:8]), strict=True):
            arrays = jax.tree.leaves((thread.engine._runner.weights, thread.engine._runner.state))
            assert all(array.devices() == set(devices) for array in arrays)
        assert stream_all(two) == expected
        assert all(thread.stats.num_generated for thread in two.engines.runners)


def test_too_few_devices_are_refused(tiny):
    with pytest.raises(DevicesError, match="JAX sees 8 devices; 10 were asked for"):
        load_replicas(lambda: tiny.model, tiny.config, data_parallel=5, tensor_parallel=2)
