"""lib/engine_thread.py behind a server: many short requests, and which completion a stop string ends."""

import contextlib
import http.client
import json
import statistics
import threading
import time

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import serve
from tests.examples.test_serve import KEY, SIZES, complete, running

REQUESTS = 60


@pytest.fixture(scope="module")
def server(tiny):
    options = ["--model", str(tiny.path), "--dtype=float32", f"--api-key={KEY}", *SIZES]
    with running(serve.create_service(serve.parse_arguments(options))) as server:
        yield server


@pytest.mark.parametrize("num_clients", [1, 2])
def test_short_requests_of_few_clients_stay_quick(server, num_clients):
    seconds = [[] for _ in range(num_clients)]

    def ask_many(own):
        body = json.dumps(dict(model="model", prompt="a", max_tokens=1, temperature=0))
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            for _ in range(REQUESTS):
                begin = time.perf_counter()
                connection.request("POST", "/v1/completions", body, headers)
                assert json.load(connection.getresponse())["usage"]["completion_tokens"] == 1
                own.append(time.perf_counter() - begin)

    clients = [threading.Thread(target=ask_many, args=(own,)) for own in seconds]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for own in seconds:
        assert len(own) == REQUESTS
        # The bound leaves room for a busy machine. An estimate that feeds on its own wait grows without one.
        assert min(own[-15:]) < 3 * statistics.median(own[:15]) + 0.02


def test_a_stop_string_ends_the_completion_of_its_own_prompt(server):
    options = dict(max_tokens=60, temperature=2, seed=4, prompt=["The quick brown fox", "12345678"])
    first, second = (choice.text for choice in complete(server, **options).choices)
    stop = next(second[i : i + 2] for i in range(5, len(second)) if second[i : i + 2] not in first)
    answer = complete(server, **options, stop=stop)
    assert [choice.text for choice in answer.choices] == [first, second.partition(stop)[0]]
