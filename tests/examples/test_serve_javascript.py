"""JavaScript clients: the package openai, and Vercel's ai with its providers of OpenAI's and compatible APIs.

The tests need node and the npm packages openai, ai, @ai-sdk/openai, @ai-sdk/openai-compatible and zod in a folder that
NODE_PATH names. A test whose package is missing is skipped.
"""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.scripted_engine import answer_with, engine_of, prompt_of, scripted_service
from tests.examples.serving import KEY, running
from tests.examples.written_calls import written

PROGRAMS = Path(__file__).with_name("javascript")
PROVIDERS = {"chat": "@ai-sdk/openai", "responses": "@ai-sdk/openai", "compatible": "@ai-sdk/openai-compatible"}
CALLS = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Bogot\u00e1"}')]
CITIES = [json.loads(arguments) for _, arguments in CALLS]
TEXT = "Hello, w\u00f6rld."


@functools.cache
def has_package(package):
    script = f"require.resolve({json.dumps(package)})"
    return subprocess.run(["node", "-e", script], capture_output=True).returncode == 0


def run(server, program, *arguments, packages):
    """The output of a program. Skips the test if node or a package is missing."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    for package in packages:
        if not has_package(package):
            pytest.skip(f"the npm package {package} is not in NODE_PATH")
    url = f"http://127.0.0.1:{server.port}/v1"
    environment = os.environ | {"BASE_URL": url, "API_KEY": KEY, "AI_SDK_LOG_WARNINGS": "false"}
    command = ["node", PROGRAMS / program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def run_openai(server, task):
    return run(server, "openai_client.cjs", task, packages=["openai", "zod"])


def run_ai(server, provider, task):
    return run(server, "ai_sdk.cjs", provider, task, packages=["ai", "zod", *sorted(set(PROVIDERS.values()))])


@pytest.fixture(scope="module")
def scripted():
    with running(scripted_service("hermes")) as server:
        yield server


@pytest.fixture
def talker(scripted):
    """A server whose answers have reasoning and a text."""
    engine_of(scripted.service).script.clear()
    answer_with(scripted.service, f"<think>So</think>{TEXT}")
    return scripted


@pytest.fixture
def caller(scripted):
    """A server whose first answer has two calls, and whose second has a text."""
    engine_of(scripted.service).script.clear()
    answer_with(scripted.service, written("hermes", *CALLS, thought="First"), TEXT)
    return scripted


@pytest.mark.parametrize("task", ["chat", "chatStream", "responses", "responsesStream"])
def test_openai_gets_a_text(talker, task):
    found = run_openai(talker, task)
    assert found["text"] == found.get("final", TEXT) == TEXT
    assert found.get("reason", "stop") == "stop"
    assert found.get("status", "completed") == "completed"


@pytest.mark.parametrize("task", ["tools", "toolsStream", "responsesTools"])
def test_openai_calls_tools(caller, task):
    assert run_openai(caller, task) == {"text": TEXT, "calls": CITIES}
    assert "17 degrees" in prompt_of(caller.service)


@pytest.mark.parametrize("task", ["parse", "responsesParse"])
def test_openai_parses_an_answer(server, task):
    check_person(run_openai(server, task))


def test_openai_raises_the_error_of_a_field(talker):
    assert run_openai(talker, "error") == {"isBadRequest": True, "param": "temperature"}


@pytest.mark.parametrize("task", ["text", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_gets_a_text(talker, provider, task):
    found = run_ai(talker, provider, task)
    assert (found["text"], found["reason"]) == (TEXT, "stop")
    assert found["tokens"] > len(TEXT) / 2
    assert provider != "compatible" or found["reasoning"] == "So"  # the others show summaries only


@pytest.mark.parametrize("task", ["tools", "toolsStream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_calls_tools(caller, provider, task):
    assert run_ai(caller, provider, task) == {"text": TEXT, "calls": CITIES, "steps": 2}
    assert "17 degrees" in prompt_of(caller.service)


@pytest.mark.parametrize("task", ["object", "objectStream", "output"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_gets_an_object(server, provider, task):
    check_person(run_ai(server, provider, task))


def check_person(person):
    assert set(person) == {"name", "age"}
    assert person["name"] in ("Ada", "Alan")
    assert isinstance(person["age"], int)
