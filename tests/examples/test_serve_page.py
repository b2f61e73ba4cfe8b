"""The page of examples/serve.py in a browser: its numbers follow the engine."""

import itertools
import json
import os
import shutil
import subprocess
import threading

import pytest

from tests.examples.serving import LONG, complete, wait_for

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
READ = "JSON.stringify(Object.fromEntries([...document.querySelectorAll('[id]')].map(e => [e.id, e.textContent])))"


@pytest.fixture
def read(server, tmp_path):
    """Opens the page in a browser. Returns a function that returns the texts of its elements by id.

    With --remote-debugging-pipe, Chromium reads JSON commands from descriptor 3 and writes answers and events to
    descriptor 4. A null byte ends each.
    """
    pipes = [tmp_path / "commands", tmp_path / "answers"]
    for pipe in pipes:
        os.mkfifo(pipe)
    options = "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"
    command = [BROWSER, *options, f"--user-data-dir={tmp_path}/user", f"http://127.0.0.1:{server.port}/"]
    redirected = ["sh", "-c", 'exec "$@" 3<"$0/commands" 4>"$0/answers"', tmp_path, *command]
    numbers = itertools.count()

    def call(method, *session, **params):
        number = next(numbers)
        content = {"id": number, "method": method, "params": params} | dict(zip(["sessionId"], session, strict=False))
        commands.write(json.dumps(content).encode() + b"\0")
        commands.flush()
        while True:
            answer = json.loads(b"".join(iter(lambda: answers.read(1) or b"\0", b"\0")))
            if answer.get("id") == number:
                return answer["result"]

    def find_pages():
        return [each["targetId"] for each in call("Target.getTargets")["targetInfos"] if each["type"] == "page"]

    with (
        subprocess.Popen(redirected, stderr=subprocess.DEVNULL) as browser,
        open(pipes[0], "wb") as commands,
        open(pipes[1], "rb") as answers,
    ):
        try:
            wait_for(find_pages)
            session = call("Target.attachToTarget", targetId=find_pages()[0], flatten=True)["sessionId"]
            yield lambda: json.loads(call("Runtime.evaluate", session, expression=READ)["result"]["value"])
        finally:
            browser.terminate()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_numbers_of_the_page_move_while_a_request_runs(server, read, monkeypatch):
    engine, may_step = server.engines.runners[0].engine, threading.Semaphore(0)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda **how: may_step.acquire(timeout=60) and step(**how))
    wait_for(lambda: read().get("state") == "ok")
    before = read()
    assert [before[name] for name in ("rate", "running", "waiting", "blocks")] == ["0.0", "0", "0", "0 of 64"]
    with complete(server, **LONG, n=6, stream=True) as stream:
        wait_for(lambda: read()["waiting"] == "6")
        assert read()["places"] == "6 of 10"
        may_step.release(5)  # of at least 50
        wait_for(lambda: read()["running"] == "4" and float(read()["rate"]) > 0)
        during = read()
        assert (during["waiting"], during["finished"]) == ("2", before["finished"])
        assert during["blocks"] != before["blocks"]
        may_step.release(1000)
        list(stream)
    wait_for(lambda: int(read()["finished"]) == int(before["finished"]) + 6)
    after = read()
    assert [after[name] for name in ("running", "waiting", "blocks")] == ["0", "0", "0 of 64"]
