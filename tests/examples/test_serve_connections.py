"""Connections to examples/serve.py: disconnects, half-closed connections, a full queue, draining, failures."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import openai
import pytest

import serve
from lib import completions, http_server
from tests.examples.serving import KEY, LONG, SIZES, ask, body, complete, running, wait_for

INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        yield connection


def send(connection, path="/v1/completions", content=b"", *lines):
    """Sends a request; the default of `lines` is the content's length."""
    lines = lines or (f"Content-Length: {len(content)}",)
    lines = (f"POST {path} HTTP/1.1", "Host: here", f"Authorization: Bearer {KEY}", *lines)
    connection.sendall("\r\n".join((*lines, "Content-Type: application/json", "", "")).encode() + content)


def read_all(connection):
    """The bytes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def drain(server, number=signal.SIGTERM):
    server.server.handle_exit(number, None)
    wait_for(lambda: server.engines.is_draining)


def test_blocks_of_a_disconnected_client_are_freed(server, gate, monkeypatch):
    monkeypatch.setattr(http_server, "PROBE_SECONDS", 0.05)
    engines = server.engines
    before = engines.finished["abort"]
    with contextlib.ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(complete(server, **LONG, stream=True))
            send(clients.enter_context(connected(server)), content=body(**LONG).encode())
        wait_for(lambda: sum(bool(generation.requests) for generation in list(engines._open)) == 4)  # all are sent
    wait_for(lambda: not server.server.server_state.tasks)  # while the engine does no step
    gate.set()
    wait_for(lambda: engines.num_open == 0)
    assert engines.finished["abort"] == before + 4
    assert engines.stats.num_free_blocks == engines.stats.num_blocks


@pytest.mark.parametrize("closes", [(), ("Connection: close",)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_half_closed_client_gets_its_answer(server, gate, monkeypatch, is_streamed, closes):
    monkeypatch.setattr(http_server, "PROBE_SECONDS", 0.05)
    content = body(max_tokens=4, stream=is_streamed).encode()
    with connected(server) as connection:
        send(connection, "/v1/completions", content, f"Content-Length: {len(content)}", *closes)
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: server.engines.num_open == 1)
        time.sleep(0.2)  # the time of four probes
        gate.set()
        answer = read_all(connection)
    before, _, answer = answer.rpartition("HTTP/1.1 200 OK")
    assert set(before.split("\r\n")) <= {"HTTP/1.1 100 ", "HTTP/1.1 100 Continue", ""}
    assert answer.endswith("data: [DONE]\n\n\r\n0\r\n\r\n" if is_streamed else "}")
    assert server.engines.num_open == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_body_with_two_lengths_is_refused_and_the_rest_is_not_read(server, path):
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    with connected(server) as connection:
        send(connection, path, smuggled, f"Content-Length: {len(smuggled)}", "Transfer-Encoding: chunked")
        answer = read_all(connection)
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.count("HTTP/1.1") == 1
    assert "A request has Content-Length or Transfer-Encoding, not both." in answer


def test_a_body_without_a_length_is_read_up_to_the_limit(server):
    with connected(server) as connection:
        send(connection, "/v1/completions", b"1771\r\n" + b" " * 6001, "Transfer-Encoding: chunked")  # no end follows
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_without_the_key_is_not_read(server):
    with connected(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"


def test_a_full_queue_answers_with_retry_after(server, gate):
    streams = [complete(server, max_tokens=4, n=5, stream=True) for _ in range(2)]  # 4 seats, and 6 wait
    status, headers, answer = ask(server, body=body())
    assert (status, headers["Retry-After"]) == (429, "1")
    assert json.loads(answer)["error"]["code"] == "queue_full"
    gate.set()
    assert all(list(stream)[-1].choices[0].finish_reason for stream in streams)
    wait_for(lambda: server.engines.num_open == 0)
    assert complete(server, max_tokens=1).choices


def test_draining_finishes_running_requests_and_refuses_new_ones(service, gate):
    with running(service) as server:
        stream = complete(server, **LONG, stream=True)
        drain(server)
        assert ask(server, "/health")[0] == 503
        with pytest.raises(openai.InternalServerError, match="The server is shutting down"):
            complete(server)
        gate.set()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        server.thread.join(60)
        assert not server.thread.is_alive()


@pytest.mark.usefixtures("server")  # starts a server first: its logging must not use capfd's stderr
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_body_that_never_ends_does_not_delay_the_end(service, monkeypatch, capfd, num_signals):
    monkeypatch.setattr(http_server, "FLUSH_SECONDS", 0.2 if num_signals == 1 else 60)
    with running(service) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            send(stack.enter_context(connected(server)), "/v1/completions", b"{", "Content-Length: 1000")
        wait_for(lambda: len(server.server.server_state.tasks) == 3)
        drain(server)
        if num_signals == 2:
            drain(server)
        server.thread.join(30)
        assert not server.thread.is_alive()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_interrupt_as_soon_as_it_serves_is_not_lost(tiny):
    command = [sys.executable, "-c", INTERRUPTIBLE, serve.__file__, f"--model={tiny.path}", "--port=0", *SIZES[:-1]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any(line.startswith("Serving model at http://127.0.0.1:") for line in lines)
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "Draining for at most 30 seconds.\n")


def test_draining_aborts_slow_requests(service, gate):
    with running(service, drain_seconds=0.05) as server:
        stream = complete(server, **LONG, stream=True)
        wait_for(gate.is_reached)  # the request has left the inbox
        drain(server, signal.SIGINT)
        wait_for(lambda: not server.engines.runners[0]._engine_loop.inbox.empty())  # the abort
        gate.set()
        assert list(stream)[-1].choices[0].finish_reason == "abort"


def test_draining_does_not_wait_for_a_slow_prompt(service, monkeypatch):
    read, encode = threading.Event(), completions.encode
    monkeypatch.setattr(completions, "encode", lambda service, ask: read.wait(60) and encode(service, ask))
    with running(service, drain_seconds=0.05) as server:
        engines, statuses = server.engines, []
        client = threading.Thread(target=lambda: statuses.append(ask(server, body=body())[0]))
        client.start()
        wait_for(lambda: engines.num_open == 1)
        drain(server)
        wait_for(lambda: engines.num_open == 0)
        read.set()
        client.join(60)
        assert statuses == [503]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_engine_that_fails_ends_the_server(service, monkeypatch, error):
    engine = service.engines.runners[0].engine

    def fail(**how):
        engine.abort()
        monkeypatch.undo()
        while engine.has_unfinished_requests:
            engine.step()
        try:
            raise error("out of memory")
        except RuntimeError as failure:  # like a lost engine
            raise RuntimeError("this engine is lost") from failure

    with running(service) as server:
        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(openai.InternalServerError, match="The engine failed") as refused:
            complete(server)
        assert "out of memory" not in str(refused.value)
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert str(server.engines.failure) == "out of memory"
