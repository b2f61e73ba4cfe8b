"""lib/engines.py within a server: short requests, slow readers, busy event loops."""

import asyncio
import contextlib
import http.client
import json
import statistics
import threading
import time

import pytest

from jaxpaged import Completion, RequestOutput, SamplingParams
from lib import engine_runner
from lib.engine_runner import EngineFailedError
from lib.engine_thread import EngineThread
from lib.engines import Engines, Generation
from tests.examples.serving import KEY, body, make_service, running
from tests.timed_engine import TimedEngine

REQUESTS = 60


@pytest.fixture(scope="module")
def server(tiny):
    with running(make_service(tiny.path)) as server:
        yield server


@pytest.mark.parametrize("num_clients", [1, 2])
def test_short_requests_of_few_clients_stay_quick(server, num_clients):
    seconds = [[] for _ in range(num_clients)]

    def ask_many(own):
        content = body(max_tokens=1, temperature=0)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            for _ in range(REQUESTS):
                begin = time.perf_counter()
                connection.request("POST", "/v1/completions", content, headers)
                assert json.load(connection.getresponse())["usage"]["completion_tokens"] == 1
                own.append(time.perf_counter() - begin)

    clients = [threading.Thread(target=ask_many, args=(own,)) for own in seconds]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for own in seconds:
        assert len(own) == REQUESTS
        # The bound allows for a busy machine. An estimate that includes its own wait would grow without bound.
        assert min(own[-15:]) < 3 * statistics.median(own[:15]) + 0.02


def test_a_slow_reader_holds_one_output_and_misses_no_token():
    generation = Generation([1, 1], [([1], SamplingParams())] * 2)
    for count in (1, 2, 3):
        completion = Completion([7] * count, None, "length" if count == 3 else None)
        generation.put(0, RequestOutput(0, [completion], count == 3))
    generation.put(1, RequestOutput(1, [Completion([8], None, "stop")], True))
    assert len(generation.unread) == 2

    async def read():
        return [(index, output.outputs[0].token_ids) async for index, output in generation.outputs()]

    assert asyncio.run(read()) == [(0, [7, 7, 7]), (1, [8])]


def test_a_finished_completion_of_an_open_request_is_not_running(service):
    running = Engines([EngineThread(service.engines.runners[0].engine)], most_completions=4)
    generation = running.open(4)
    assert running.num_open == 4
    running.start(generation, [([1], SamplingParams(n=3)), ([1], SamplingParams())])
    completions = [Completion([1], None, reason) for reason in ("stop", "length", None)]
    running._deliver([((generation, 0), RequestOutput(0, completions, False))])
    assert running.num_open == running.num_sent[0] == 2
    assert running.open(2)


def test_a_request_that_follows_an_answer_starts_with_the_next_slice(monkeypatch):
    engine = TimedEngine(slice_seconds=0.2)
    running = Engines([EngineThread(engine)], most_completions=4)
    calls, step, add_request = [], engine.step, engine.add_request

    def logged_step(**how):
        calls.append("step")
        outputs = step(**how)
        calls.extend("end" for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(engine, "step", logged_step)
    monkeypatch.setattr(engine, "add_request", lambda *args: calls.append("add") or add_request(*args))

    async def answer(num_tokens):
        generation = running.open(1)
        running.start(generation, [([1], SamplingParams(max_tokens=num_tokens))])
        async for _ in generation.outputs():
            pass

    async def ask():
        async with running.running():
            other = asyncio.ensure_future(answer(9))
            await answer(6)
            await asyncio.sleep(0.02)  # the round trip to the client
            await answer(1)
            await other

    asyncio.run(ask())
    assert calls[calls.index("end") :][:3] == ["end", "add", "step"]


def test_a_busy_event_loop_gets_several_tokens_at_once(monkeypatch):
    monkeypatch.setattr(EngineThread, "loop_share", 1e-9)  # any work exceeds this share
    monkeypatch.setattr(engine_runner, "MOST_HELD_SECONDS", 0.5)
    engine = TimedEngine(num_seats=1, slice_seconds=0.02)
    running = Engines([EngineThread(engine)], most_completions=1)

    async def ask():
        async with running.running():
            generation = running.open(1)
            running.start(generation, [([1], SamplingParams(max_tokens=40))])
            return [len(output.outputs[0].token_ids) async for _, output in generation.outputs()]

    counts = asyncio.run(ask())  # in 0.8 seconds
    assert (counts[0], counts[-1]) == (1, 40)
    assert 3 <= len(counts) <= 6  # one more for each half second


def fail_at_minus_one(monkeypatch, engine):
    add_request = engine.add_request

    def add(prompt, params):
        if prompt == [-1]:
            raise RuntimeError("broken")
        return add_request(prompt, params)

    monkeypatch.setattr(engine, "add_request", add)


def test_a_request_over_two_engines_fails_with_one_of_them(monkeypatch):
    made = [TimedEngine(slice_seconds=0.01), TimedEngine(slice_seconds=0.01)]
    running = Engines(list(map(EngineThread, made)), most_completions=4)
    for engine in made:
        fail_at_minus_one(monkeypatch, engine)

    async def ask():
        async with running.running():
            generation = running.open(2)
            running.start(generation, [([1], SamplingParams(max_tokens=10**6)), ([-1], SamplingParams())])
            with pytest.raises(EngineFailedError):
                async for _ in generation.outputs():
                    pass
            assert len(running.working) == 1
            assert sorted(running.num_sent) == [0, 1]
            running.close(generation)  # aborts the other one
            await asyncio.wait_for(running._idle.wait(), 60)
            assert running.num_sent == [0, 0]

    asyncio.run(ask())


def test_a_call_does_not_wait_for_a_failed_engine(monkeypatch):
    made, waits = [TimedEngine(), TimedEngine()], threading.Event()
    running = Engines([EngineThread(made[0], "first"), EngineThread(made[1], "second")], most_completions=4)
    fail_at_minus_one(monkeypatch, made[1])
    called = []

    def prepare(model):
        if model == "second":
            waits.wait(60)
        return lambda engine: called.append(model)

    async def ask():
        async with running.running():
            calling = asyncio.ensure_future(running.call(prepare))
            await asyncio.sleep(0.05)
            running.runners[1].add({"key": ([-1], SamplingParams())})
            with pytest.raises(EngineFailedError):
                await calling
            assert called == ["first"]
            await running.call(prepare)
            assert called == ["first", "first"]
            waits.set()

    asyncio.run(ask())


def test_an_error_of_a_call_leaves_its_engine_running():
    running = Engines([EngineThread(TimedEngine())], most_completions=4)

    def refuse(model):
        raise KeyError(model)

    async def ask():
        async with running.running():
            with pytest.raises(KeyError):
                await running.call(refuse)
            generation = running.open(1)
            running.start(generation, [([1], SamplingParams(max_tokens=2))])
            assert [output.finished async for _, output in generation.outputs()][-1]

    asyncio.run(ask())
